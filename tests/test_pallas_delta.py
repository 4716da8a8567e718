"""The kernels of the delta rule: interpreted on a CPU against `recurrent` in float64."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from pallas_cases import (
  change_by_vmap_and_checkpoint,
  kept,
  launches,
  misses,
  misses_of_float16,
  refuses_second_derivatives,
)

import lajax
from lajax import pallas
from lajax.pallas import tiles
from lajax.recurrence import delta_rule_step

GATES = ("none", "head", "channel")
BASE = Shape()


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_packed_documents_of_every_kind_of_values(gate):
  """Outputs, states, all gradients: documents, padding, gates of -inf, sizes no powers of two, grouped heads."""
  case_id = f"delta_rule-{gate}"
  assert not misses(case_id, BASE, "float32", True, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gate", "dtype", "packed"),
  [
    ("none", "float32", True),
    ("head", "bfloat16", True),
    ("head", "bfloat16", False),
    ("channel", "float32", False),
    ("channel", "bfloat16", True),
  ],
)
def test_dtypes(gate, dtype, packed):
  case_id = f"delta_rule-{gate}"
  assert not misses(case_id, BASE, dtype, packed, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gate", "shape", "dtype"),
  [
    ("head", Shape(T=1, H=2, HV=2, K=48, V=7), "float32"),
    ("channel", Shape(T=17, H=1, HV=4, K=100, V=33), "float32"),
    ("head", Shape(T=65, H=2, HV=4, K=192, V=72), "bfloat16"),
    ("channel", Shape(T=33, H=1, HV=1, K=256, V=16), "bfloat16"),
  ],
  ids=lambda s: s if isinstance(s, str) else f"T{s.T}-H{s.H}-HV{s.HV}-K{s.K}-V{s.V}",
)
def test_sizes(gate, shape, dtype):
  case_id = f"delta_rule-{gate}"
  assert not misses(case_id, shape, dtype, False, CASES[case_id].rows[:5:2])


@pytest.mark.slow
def test_float16():
  assert not misses_of_float16("delta_rule-head", BASE)


@pytest.mark.slow
def test_vmap_and_checkpoint():
  assert change_by_vmap_and_checkpoint("delta_rule-head", BASE) < 1e-6


# --- keys that repeat ------------------------------------------------------------------------------------------------


def equal_keys(gate: str, beta: float, decay: float):
  """The arrays of a case with one key for all tokens."""
  case = CASES[f"delta_rule-{gate}"]
  arrays = cases.inputs(case.id, BASE, ("plain", "plain"))
  gates = {} if gate == "none" else {"g": np.full_like(arrays["g"], decay)}
  k = np.broadcast_to(arrays["k"][:, :1], arrays["k"].shape)
  return arrays | gates | {"k": k, "beta": np.full_like(arrays["beta"], beta)}


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("beta", "decay"), [(1.0, 0.0), (0.1, -0.01)])
def test_equal_keys_in_bfloat16(gate, decay, beta):
  """Each value is the correction of the one before: sums of them cancel, and what was rounded does not."""
  assert not misses(f"delta_rule-{gate}", BASE, "bfloat16", False, ("plain", "plain"), **equal_keys(gate, beta, decay))


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_reflections_of_one_key(gate):
  """beta = 2 in float32, by the budget of such rows."""
  arrays = equal_keys(gate, 2.0, 0.0)
  assert not misses(f"delta_rule-{gate}", BASE, "float32", False, ("reflected", "reflected"), **arrays)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_triangular_system(C):
  """Also of equal keys with beta = 2: there the inverse by the doubling product reaches 1e14."""
  rng = np.random.default_rng(0)
  draws = [(0.3 * rng.standard_normal((C, C)), rng.uniform(size=C)), (np.ones((C, C)), np.full(C, 2.0))]
  solve = jax.jit(lambda M, beta: tiles.solve(M, beta, tiles.full_products(interpreted=True)))
  for M, beta in draws:
    M = np.tril(M, -1)
    want = np.linalg.solve(np.eye(C) + M * beta, M)
    assert cases.relative_rms(solve(M.astype(np.float32), beta.astype(np.float32)), want) < 1e-6


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", GATES)
def test_decode(gate):
  """One token of many states, K and V no powers of two, grouped heads."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  B, H, HV, K, V = 3, 2, 4, 12, 40
  S, q, k, v, beta = draw(B, HV, K, V), draw(B, H, K), draw(B, H, K), draw(B, HV, V), abs(draw(B, HV))
  g = {"none": None, "head": -abs(draw(B, HV)), "channel": -abs(draw(B, HV, K))}[gate]
  if g is not None:
    g[0] = -np.inf
  run = jax.jit(pallas.decode_delta_rule, static_argnums=6, compiler_options=cases.quick())
  want = delta_rule_step(S, q, k, v, beta, g, scale=0.5)
  for x, y in zip(run(S, q, k, v, beta, g, 0.5), want, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# --- what is launched, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("gate", "chunk"), [("head", 32), ("channel", 16)])
def test_number_of_launches(gate, chunk):
  """Three forward, four backward; what is kept between them is the inputs and the states at the chunks' starts."""
  assert launches(f"delta_rule-{gate}", BASE) == (3, 7)
  found, most = kept(f"delta_rule-{gate}", BASE, chunk)
  assert found <= most


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, v, beta = array(2, 64, 2, 128), array(2, 64, 4, 100), array(2, 64, 4)
  assert pallas.supports_delta_rule(q, q, v, beta) is None
  assert pallas.supports_delta_rule(q, q, v, beta, array(2, 64, 4, 128)) is None
  narrow, short = (array(2, 64, 2, K, dtype=jnp.bfloat16) for K in (256, 257))
  assert pallas.supports_delta_rule(narrow, narrow, narrow, beta) is None
  assert "K = 256, and K is 257" in pallas.supports_delta_rule(short, short, short, beta)
  wide, long = array(2, 64, 2, 129), array(2**22, 2**16, 2, 128)
  assert "K = 128 where q, k and v are not bfloat16" in pallas.supports_delta_rule(wide, wide, v, beta)
  assert "float64" in pallas.supports_delta_rule(q, q, v, array(2, 64, 4, dtype=jnp.float64))
  assert "chunk_size is 7" in pallas.supports_delta_rule(q, q, v, beta, chunk_size=7)
  assert "`erase` and `write`" in pallas.supports_delta_rule(q, q, v, erase=array(2, 64, 4, 128), write=v)
  assert "2^31 programs" in pallas.supports_delta_rule(long, long, array(2**22, 2**16, 4, 100), beta)


def test_second_derivatives_are_refused_with_a_sentence():
  refuses_second_derivatives(lambda x: lajax.delta_rule(x, x, x, x[..., 0], impl="pallas")[0])
