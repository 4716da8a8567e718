"""Every op on meshes of two devices, explicit and automatic, gives the numbers of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import PLACES, MeshCase, differences, refusals, report_of, results

import lajax
import lajax.recurrence
from lajax import ops

B, T, H, HV, K, V, R, W = 2, 20, 2, 4, 4, 6, 2, 3
LAYOUTS = {  # axes of batch and heads in an array, by its letters
  "B T H K": (0, 2), "B T HV V": (0, 2), "B T HV": (0, 2), "B T HV K": (0, 2), "B T R H K": (0, 3), "B T R HV V": (0, 3),
  "B T R HV": (0, 3), "B HV K V": (0, 1), "B HV K": (0, 1), "B HV": (0, 1), "H K": (None, 0), "B T D": (0, 2), "B D": (0, 1),
  "B T": (0, None), "HV": (None, 0), "D W": (None, 0), "D": (None, 0), "B W-1 D": (0, 2), "B H K": (0, 1), "B HV V": (0, 1),
  "B T H V": (0, 2), "B HV K K": (0, 1), "B T HV L": (0, 2), "B HV N K V": (0, 1), "B T H": (0, 2),
}  # fmt: skip
SIZES = dict(B=B, T=T, H=H, HV=HV, K=K, V=V, R=R, D=4, W=W, L=6, N=5) | {"W-1": W - 1}
IDS = np.stack([np.repeat([0, 1, -1, 2], [3, 8, 2, 7]), np.repeat([-1, 4, 5], [4, 6, 10])])
GATE = ("g", "g_precond", "g_momentum", "log_a", "f", "log_forget")


def draw(name: str, letters: str, rng) -> jax.Array:
  x = 0.5 * rng.standard_normal([SIZES[axis] for axis in letters.split()])
  if name in GATE:
    x = -abs(x)
  if name in ("beta", "erase", "write", "beta_precond", "eta", "dt", "trapezoid"):
    x = 1 / (1 + np.exp(-x))
  return jnp.asarray(x, jnp.float32)


def case(
  call, /, carried=None, ids=True, heads=True, positive=(), definite=(), **letters
) -> MeshCase:
  """A case of arrays drawn by letters; a tuple of letters is a tuple of arrays."""
  rng = np.random.default_rng(0)
  arrays, batch, by_heads = {}, {}, {}
  for name, given in letters.items():
    some = given if isinstance(given, tuple) else (given,)
    drawn = tuple(draw(name, x, rng) for x in some)
    drawn = tuple(abs(x) + 0.1 for x in drawn) if name in positive else drawn
    if name in definite:  # its first part is a matrix that a system is solved with
      drawn = (jnp.matmul(drawn[0], jnp.swapaxes(drawn[0], -1, -2)), *drawn[1:])
    arrays[name] = drawn if isinstance(given, tuple) else drawn[0]
    batch[name], by_heads[name] = LAYOUTS[some[0]]
  if ids:
    arrays["segment_ids"], batch["segment_ids"] = jnp.asarray(IDS, jnp.int32), 0
  return MeshCase(
    lambda arrays: call(**arrays), arrays, batch, by_heads if heads else None, carried
  )


QKV = dict(q="B T H K", k="B T H K", v="B T HV V")
MATRIX = dict(initial_state="B HV K V")
STATEFUL = {  # op, letters of its arguments
  "linear_attention": (lajax.linear_attention, QKV | dict(g="B T HV") | MATRIX, {}),
  "linear_attention, per channel": (lajax.linear_attention, QKV | dict(g="B T HV K") | MATRIX, {}),
  "linear_attention, bonus": (lajax.linear_attention, QKV | dict(g="B T HV K", bonus="H K") | MATRIX, {}),
  "normalized_linear_attention": (
    lajax.normalized_linear_attention, QKV | dict(g="B T HV", initial_state=("B HV K V", "B HV K")), dict(positive=("q", "k", "initial_state")),
  ),
  "delta_rule": (lajax.delta_rule, QKV | dict(beta="B T HV", g="B T HV") | MATRIX, {}),
  "delta_rule, erase and write": (
    functools.partial(lajax.delta_rule, beta=None), QKV | dict(erase="B T HV K", write="B T HV V", g="B T HV K") | MATRIX, {},
  ),
  "delta_product": (lajax.delta_product, dict(q="B T H K", k="B T R H K", v="B T R HV V", beta="B T R HV", g="B T HV") | MATRIX, {}),
  "gated_oja": (lajax.gated_oja, QKV | dict(beta="B T HV", g="B T HV") | MATRIX, {}),
  "dplr": (lajax.dplr, QKV | dict(a="B T H K", b="B T H K", g="B T HV K") | MATRIX, {}),
  "mlstm": (lajax.mlstm, QKV | dict(i="B T HV", f="B T HV", initial_state=("B HV K V", "B HV K", "B HV")), {}),
  "preconditioned_delta_rule": (
    lajax.preconditioned_delta_rule,
    QKV | dict(beta="B T HV", g="B T HV", beta_precond="B T H", g_precond="B T H", initial_state=("B HV K V", "B H K")),
    dict(positive=("initial_state",)),
  ),
  "momentum_delta_rule": (
    lajax.momentum_delta_rule,
    QKV | dict(p="B T H K", beta="B T HV", eta="B T HV", g="B T HV", g_momentum="B T HV", initial_state=("B HV K V", "B HV K V")),
    {},
  ),
  "mesa": (
    lajax.mesa,
    QKV | dict(beta="B T HV", g="B T HV", ridge="H K", initial_state=("B HV K K", "B HV K V")),
    dict(positive=("ridge",), definite=("initial_state",)),
  ),
  "mesa, conjugate gradients": (
    functools.partial(lajax.mesa, cg_steps=30),
    QKV | dict(beta="B T HV", g="B T HV", ridge="H K", initial_state=("B HV K K", "B HV K V")),
    dict(positive=("ridge",), definite=("initial_state",)),
  ),
  "log_linear_attention": (
    lajax.log_linear_attention,
    QKV | dict(g="B T HV", level_scales="B T HV L", initial_state=("B HV N K V", "B")),
    {},
  ),
  "log_linear_attention, delta rule": (
    lajax.log_linear_attention,
    QKV | dict(g="B T HV", level_scales="B T HV L", beta="B T HV", initial_state=("B HV N K V", "B")),
    {},
  ),
  "mamba3": (
    lajax.mamba3, QKV | dict(g="B T HV", dt="B T HV", trapezoid="B T HV", initial_state=("B HV K V", "B H K", "B HV V")), {},
  ),
  "mamba3, ranks": (
    lajax.mamba3,
    dict(q="B T R H K", k="B T R H K", v="B T R HV V", g="B T HV", dt="B T HV", trapezoid="B T HV")
    | dict(initial_state=("B HV K V", "B R H K", "B R HV V")),
    {},
  ),
  "linear_recurrence": (lajax.linear_recurrence, dict(x="B T D", log_a="B T D", initial_state="B D"), {}),
}  # fmt: skip
IMPLS = ("recurrent", "associative", "chunked")
AUTOMATIC = (  # compared on an automatic mesh too
  "delta_rule", "preconditioned_delta_rule", "momentum_delta_rule", "mesa", "log_linear_attention", "mamba3",
)  # fmt: skip
BY_KERNELS = ("linear_attention", "delta_rule, erase and write", "mlstm", "linear_recurrence")


def _stateful(name: str, impl: str) -> MeshCase:
  op, letters, options = STATEFUL[name]
  return case(functools.partial(op, impl=impl), "initial_state", **letters, **options)


STATELESS = {
  "bidirectional_linear_attention": case(lajax.bidirectional_linear_attention, **QKV, positive=("q", "k")),
  "efficient_attention": case(lajax.efficient_attention, **QKV),
  "gated_rms_norm": case(ops.gated_rms_norm, ids=False, x="B T D", weight="D", gate="B T D"),
  "short_conv": case(ops.short_conv, "cache", ids=False, x="B T D", weight="D W", bias="D", cache="B W-1 D"),
}  # fmt: skip
ATTENTION = {
  f"attention, {impl}": case(
    functools.partial(lajax.attention, impl=impl), q="B T HV K", k="B T H K", v="B T H V", sink="HV", log_forget="B T HV"
  )
  for impl in IMPLS
}  # fmt: skip


def _step(name: str) -> MeshCase:
  """A scan of steps: the state must keep its layout, or the carry changes its type."""
  op, letters, options = STATEFUL[name]
  step = getattr(lajax.recurrence, f"{name.split(',')[0]}_step")
  step = functools.partial(step, **op.keywords) if isinstance(op, functools.partial) else step

  def scan(initial_state, **tokens):
    shared = {name: tokens.pop(name) for name in ("bonus", "ridge") if name in tokens}
    body = lambda state, x: step(state, **x, **shared)
    state, o = jax.lax.scan(
      body, initial_state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    )
    return o, state

  return case(scan, "initial_state", ids=False, **letters, **options)


def cases_of_ops() -> dict[str, MeshCase]:
  found = {f"{name}, {impl}": _stateful(name, impl) for name in STATEFUL for impl in IMPLS}
  found |= {f"{name}, pallas": _stateful(name, "pallas") for name in BY_KERNELS}
  found |= {f"{name}, steps": _step(name) for name in STATEFUL}
  return found | STATELESS | ATTENTION


def traced() -> dict[str, list[str]]:
  """Every op in every implementation: what an explicit mesh refuses, it refuses when a program is
  traced.
  """
  return {name: refusals(c) for name, c in cases_of_ops().items()}


def some_numbers() -> dict[str, list[str]]:
  some = ("delta_rule, chunked", "short_conv", "linear_attention, steps")
  found = {name: differences(cases_of_ops()[name], PLACES[:1]) for name in some}
  plain = case(lajax.linear_recurrence, ids=False, x="B T D", log_a="B T D")
  return found | {"linear_recurrence, eagerly": differences(plain, (), eager=True)}


def all_numbers() -> dict[str, list[str]]:
  """Every op in every implementation by heads, against the equation on one device."""
  found = {}
  for name in STATEFUL:
    want = results(_stateful(name, "recurrent"))
    for impl in IMPLS:
      places = PLACES[1:] if impl == "chunked" and name in AUTOMATIC else PLACES[1:2]
      places = PLACES if (name, impl) == ("delta_rule", "chunked") else places
      found[f"{name}, {impl}"] = differences(_stateful(name, impl), places, want=want)
  others = STATELESS | ATTENTION
  others["linear_recurrence, pallas"] = _stateful("linear_recurrence", "pallas")
  others |= {f"{name}, steps": _step(name) for name in ("delta_rule", "mlstm")}
  return found | {name: differences(c, PLACES[:1]) for name, c in others.items()}


@pytest.mark.parametrize(
  "function",
  [
    "some_numbers",
    pytest.param("traced", marks=pytest.mark.slow),
    pytest.param("all_numbers", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
  ],
)
def test_two_devices_equal_one(function):
  wrong = {name: lines for name, lines in report_of("test_meshes", function).items() if lines}
  assert not wrong, "\n".join(f"{name}: {line}" for name, lines in wrong.items() for line in lines)


@pytest.mark.parametrize("name", ["linear_attention", "mlstm"])
def test_one_device_has_no_wrapper(name):
  """Off explicit meshes the program of an op is the plain one."""
  c = _stateful(name, "chunked")
  text = str(jax.make_jaxpr(lambda arrays: c.f(arrays))(c.arrays))
  assert "reshard" not in text
