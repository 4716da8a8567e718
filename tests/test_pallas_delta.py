"""Tests of the delta rule's kernels alone: keys that repeat, the triangular system, their own
refusals.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from pallas_cases import misses

from lajax import pallas
from lajax.pallas import tiles

GATES = ("none", "head", "channel")
BASE = Shape()


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
  """Each value is the correction of the one before: sums of them cancel, and what was rounded does
  not.
  """
  assert not misses(
    f"delta_rule-{gate}",
    BASE,
    "bfloat16",
    False,
    ("plain", "plain"),
    **equal_keys(gate, beta, decay),
  )


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_reflections_of_one_key(gate):
  """beta = 2 in float32, by the budget of such rows."""
  arrays = equal_keys(gate, 2.0, 0.0)
  assert not misses(
    f"delta_rule-{gate}", BASE, "float32", False, ("reflected", "reflected"), **arrays
  )


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_triangular_system(C):
  """Also of equal keys with beta = 2: there the inverse by the doubling product reaches 1e14."""
  rng = np.random.default_rng(0)
  draws = [
    (0.3 * rng.standard_normal((C, C)), rng.uniform(size=C)),
    (np.ones((C, C)), np.full(C, 2.0)),
  ]
  solve = jax.jit(
    lambda M, beta: tiles.solve_triangle(M, beta, tiles.full_products(interpreted=True))
  )
  for M, beta in draws:
    M = np.tril(M, -1)
    want = np.linalg.solve(np.eye(C) + M * beta, M)
    assert cases.relative_rms(solve(M.astype(np.float32), beta.astype(np.float32)), want) < 1e-6


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, v, beta = array(2, 64, 2, 128), array(2, 64, 4, 100), array(2, 64, 4)
  assert pallas.supports_delta_rule(q, q, v, beta) is None
  assert pallas.supports_delta_rule(q, q, v, beta, array(2, 64, 4, 128)) is None
  narrow, short = (array(2, 64, 2, K, dtype=jnp.bfloat16) for K in (256, 257))
  assert pallas.supports_delta_rule(narrow, narrow, narrow, beta) is None
  assert "K = 256, and K is 257" in pallas.supports_delta_rule(short, short, short, beta)
  wide, long = array(2, 64, 2, 129), array(2**22, 2**16, 2, 128)
  assert "K = 128 where q, k and v are not bfloat16" in pallas.supports_delta_rule(
    wide, wide, v, beta
  )
  assert "float64" in pallas.supports_delta_rule(q, q, v, array(2, 64, 4, dtype=jnp.float64))
  assert "chunk_size is 7" in pallas.supports_delta_rule(q, q, v, beta, chunk_size=7)
  assert "2^31 programs" in pallas.supports_delta_rule(
    long, long, array(2**22, 2**16, 4, 100), beta
  )
