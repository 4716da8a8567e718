"""Laws of the kernels: a token that forgets everything has no gate gradient; NaN and inf stay in
their document.

One call answers for all: its rows have the same arrays, and each row but the first has one bad
value.
"""

import cases
import jax
import numpy as np
import pytest

import lajax
from lajax import pallas
from lajax.pallas import linear_recurrence, plan

T, H, HV, K, V, D = 40, 1, 2, 4, 3, 5
DOCUMENT = np.repeat(np.int32([0, 1]), 20)
BAD_TOKENS = (10, 25)
FORGETS = {"-1e4": (3, 30), "-inf": (6, 33)}  # tokens whose gate forgets everything

WIDTHS = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": (H, K), "b": (H, K), "beta": (HV,)}
MATRIX = {
  "linear_attention": ("q", "k", "v"),
  "delta_rule": ("q", "k", "v", "beta"),
  "dplr": ("q", "k", "v", "a", "b"),
}
FAST = ("linear_attention-head", "linear_attention-channel")


def _cases():
  for family in MATRIX:
    for gate in ("none", "head", "channel"):
      name = f"{family}-{gate}"
      yield pytest.param(family, gate, id=name, marks=() if name in FAST else pytest.mark.slow)


def gate_of(draw, *width):
  g = -abs(draw(T, *width))
  for value, tokens in FORGETS.items():
    g[list(tokens)] = float(value)
  return g


def matrix_arrays(family: str, gate: str) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(0.5 * rng.standard_normal(shape))
  arrays = {name: draw(T, *WIDTHS[name]) for name in MATRIX[family]}
  if gate != "none":
    arrays["g"] = gate_of(draw, HV, *((K,) if gate == "channel" else ()))
  return arrays | {"initial_state": draw(HV, K, V)}


def results(f, arrays: dict[str, np.ndarray], bad: list[tuple[str, int, float]]):
  """Returns outputs and gradients [rows ..] of f(arrays, document): a clean row, then one per bad
  value.

  A bad value is (array, token, value); "do" is the outputs' cotangent, a state's token is 0, and
  "overflow" is a finite k and v that make the state inf.
  """
  rows = {name: np.stack([x] * (1 + len(bad))) for name, x in arrays.items()}
  document = np.stack([DOCUMENT] * (1 + len(bad)))
  rng = np.random.default_rng(1)
  out = jax.eval_shape(f, rows, document)
  cotangents = jax.tree.map(
    lambda x: np.stack([np.float32(rng.standard_normal(x.shape[1:]))] * x.shape[0]), out
  )
  first = jax.tree.leaves(cotangents)[0]
  for row, (name, token, value) in enumerate(bad, 1):
    if name == "overflow":
      rows["k"][row, token] = rows["v"][row, token] = value
    elif name.endswith("state"):
      rows[name][row, ..., -1] = value
    else:
      (first if name == "do" else rows[name])[row, token, ..., -1] = value

  def run(rows, document, cotangents):
    out, pull = jax.vjp(lambda rows: f(rows, document), rows)
    return out, pull(cotangents)[0]

  out, gradients = jax.device_get(cases.quick_jit(run)(rows, document, cotangents))
  return out if isinstance(out, tuple) else (out,), gradients


def check_forgotten(gradients, name: str = "g"):
  for tokens in FORGETS.values():
    assert not gradients[name][0, list(tokens)].any(), "gradient of a gate that forgets everything"
  assert gradients[name][0].any()


def check_contained(bad, out, gradients):
  """Everything outside the reach of a bad value is as in the clean row, which comes first."""
  token = np.arange(T)
  for row, (name, at, value) in enumerate(bad, 1):
    case = f"{name}[{at}] = {value}"
    other = DOCUMENT[at] != DOCUMENT
    o = out[0]
    if name != "do":
      right = other | (token < at)
      np.testing.assert_array_equal(o[row, right], o[0, right], err_msg=case)
      assert not np.isfinite(o[row, at]).all(), f"{case} does not show in its own output"
      if len(out) > 1 and DOCUMENT[at] != DOCUMENT[-1]:
        np.testing.assert_array_equal(out[1][row], out[1][0], err_msg=case)
    for grad, x in gradients.items():
      if x.shape[1] == T and name != "overflow":
        np.testing.assert_allclose(
          x[row, other], x[0, other], rtol=1e-5, atol=1e-6, err_msg=f"{case}: d{grad}"
        )
        assert np.isfinite(x[row, other]).all()


def bad_values(names, state=None):
  found = [(name, at, value) for name in names for at in BAD_TOKENS for value in (np.nan, np.inf)]
  return found + ([] if state is None else [(state, 0, np.nan), (state, 0, np.inf)])


def check_matrix_states(family: str, gate: str):
  arrays = matrix_arrays(family, gate)
  bad = bad_values([*arrays.keys() - {"initial_state"}, "do"], "initial_state")
  if family == "linear_attention":  # the others' triangular systems multiply inf by 0
    bad.append(("overflow", BAD_TOKENS[0], 1e30))
  f = lambda x, document: getattr(lajax, family)(**x, segment_ids=document, impl="pallas")
  out, gradients = results(f, arrays, bad)
  check_contained(bad, out, gradients)
  if gate != "none":
    check_forgotten(gradients)


@pytest.mark.parametrize(("family", "gate"), [*_cases()])
def test_matrix_states(family, gate):
  check_matrix_states(family, gate)


@pytest.mark.slow
@pytest.mark.parametrize("family", MATRIX)
def test_matrix_states_in_time_splits(family, monkeypatch):
  """Two splits, on the boundary of which no document begins."""
  for name, value in (("FILL", 1000), ("SHORTEST", 1), ("LEAST", 2)):
    monkeypatch.setattr(plan, name, value)
  jax.clear_caches()
  check_matrix_states(family, "head")
  jax.clear_caches()


@pytest.mark.parametrize("least", [pytest.param(64, marks=pytest.mark.slow), 8])
def test_linear_recurrence(least, monkeypatch):
  """Whole, and in time splits."""
  monkeypatch.setattr(linear_recurrence, "LEAST", least)
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.standard_normal(shape))
  arrays = {"x": draw(T, D), "log_a": gate_of(draw, D), "initial_state": draw(D)}
  bad = bad_values(["x", "log_a", "do"], "initial_state")

  def f(x, document):
    return pallas.run_linear_recurrence(x["x"], x["log_a"], x["initial_state"], document)

  out, gradients = results(f, arrays, bad)
  check_contained(bad, out, gradients)
  check_forgotten(gradients, "log_a")


@pytest.mark.parametrize(
  ("causal", "window"), [(True, None), pytest.param(True, 7, marks=pytest.mark.slow)]
)
def test_attention(causal, window):
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.standard_normal(shape))
  arrays = {"q": draw(T, HV, K), "k": draw(T, H, K), "v": draw(T, H, V)}
  bad = bad_values([*arrays, "do"])

  def f(x, document):
    return pallas.run_attention(
      **x, document=document, is_token=document >= 0, causal=causal, window=window
    )

  out, gradients = results(f, arrays, bad)
  check_contained(bad, out, gradients)


def test_short_conv():
  """The convolution selects what taps read: a bad value reaches the next W - 1 tokens of its
  document.
  """
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.standard_normal(shape))
  weight, arrays = draw(D, 4), {"x": draw(T, D), "cache": draw(3, D)}
  bad = bad_values(["x", "do"])
  f = lambda x, document: pallas.run_short_conv(x["x"], weight, None, x["cache"], document)
  out, gradients = results(f, arrays, bad)
  check_contained(bad, out, {"x": gradients["x"]})
