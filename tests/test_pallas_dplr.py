"""Tests of the kernels of diagonal plus low rank alone: decays before a read, the delta rule per
channel, refusals.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from pallas_cases import launches_of, misses, misses_of_float16

import lajax
from lajax import pallas
from lajax.pallas import tiles

BASE = Shape()
CHANNELS = "delta_rule-erase_write"


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_the_feedback_of_comba(gate):
  """a reads along the key that b writes along; decays of all kinds, also of nothing but -1e4."""
  case = CASES[f"dplr-{gate}"]
  rows = ("cliff", "inf", "forget", "cliff")
  arrays = cases.inputs(case.id, BASE, rows)
  k = arrays["k"] / np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
  g = arrays["g"].copy()
  g[3] = -1e4
  replaced = {"k": k, "a": 0.9 * k, "b": -0.7 * k, "g": g}
  assert not misses(case.id, BASE, "float32", True, rows, **replaced)


@pytest.mark.parametrize("C", [16, 32])
def test_decays_before_a_token(C):
  """Every level, by products and by sums of their own intervals, among decays of -inf and -1e4."""
  rng = np.random.default_rng(0)
  g = rng.choice([0.0, -1e-4, -1.0, -20.0, -1e4, -np.inf], (C, 16)).astype(np.float32)
  full = tiles.full_products(interpreted=True)

  @cases.quick_jit
  def decays(g):
    """Returns decays between tokens per head, and those of every level by products and by sums."""
    products = [found[1:] for found in tiles.halves_before(g)]
    sums = [tiles.decays_of_halves(g, level, full) for level in range(len(products))]
    return jax.vmap(tiles.between_before_per_head, 1, 2)(g), products, sums

  between, products, sums = jax.device_get(decays(g))
  for level, both in enumerate(zip(products, sums, strict=True)):
    part = np.arange(C) // 2**level
    for i in range(C):
      for upto, before, after in both:
        mine = [j for j in range(C) if part[j] == part[i]]
        want = np.exp(
          [g[mine[0] : i + 1].sum(0), g[mine[0] : i].sum(0), g[i + 1 : mine[-1] + 1].sum(0)]
        )
        np.testing.assert_allclose([upto[i], before[i], after[i]], want, rtol=1e-4, atol=1e-30)
  for i in range(1, C):
    np.testing.assert_allclose(between[i, 0], np.exp(g[1:i].sum(0)), rtol=1e-5, atol=1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 33])
def test_a_last_chunk_of_one_token(T):
  """One chunk backward.

  Forward, whose chunks are half as long, two: the second is empty, or has one token.
  """
  assert not misses(
    "dplr-head", Shape(T=T, K=48, V=7), "bfloat16", True, ("plain", "inf", "cliff", "zero")
  )


@pytest.mark.slow
def test_the_delta_rule_per_channel():
  assert not misses(CHANNELS, BASE, "float32", True, cases.batch(CASES[CHANNELS]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "dtype", "packed"),
  [
    (BASE, "bfloat16", True),
    (Shape(T=17, H=1, HV=4, K=100, V=33), "float32", False),
    (Shape(T=65, H=1, HV=2, K=192, V=72), "bfloat16", False),
  ],
  ids=["base", "T17", "K192"],
)
def test_the_delta_rule_per_channel_of_other_sizes(shape, dtype, packed):
  rows = cases.batch(CASES[CHANNELS]) if packed else ("plain", "inf")
  assert not misses(CHANNELS, shape, dtype, packed, rows)


@pytest.mark.slow
def test_the_delta_rule_per_channel_with_a_decay_per_head():
  case = CASES[CHANNELS]
  arrays = cases.inputs(case.id, BASE, case.rows)
  assert not misses(case.id, BASE, "float32", False, case.rows, g=arrays["g"][..., 0])


@pytest.mark.slow
def test_the_delta_rule_per_channel_without_decay():
  arrays = {
    name: x.astype(np.float32) for name, x in cases.inputs(CHANNELS, BASE).items() if name != "g"
  }
  arrays["beta"] = None
  got = lajax.delta_rule(**arrays, impl="pallas")
  for x, want in zip(got, lajax.delta_rule(**arrays, impl="recurrent"), strict=True):
    assert cases.relative_rms(x, want) < cases.BUDGET["float32"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize("case_id", ["dplr-channel", CHANNELS])
def test_float16(case_id):
  assert not misses_of_float16(case_id, BASE)


@pytest.mark.slow
def test_launches_of_the_delta_rule_per_channel():
  assert [len(x) for x in launches_of(CHANNELS, BASE)] == [2, 6]


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, v = array(2, 64, 2, 128), array(2, 64, 4, 100)
  assert pallas.supports_dplr(q, q, v, q, q) is None
  assert pallas.supports_dplr(q, q, v, q, q, array(2, 64, 4, 128)) is None
  narrow, wide = (array(2, 64, 2, 256, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
  assert pallas.supports_dplr(narrow, narrow, narrow, narrow, narrow) is None
  assert "K = 128" in pallas.supports_dplr(narrow, narrow, narrow, wide, narrow)
  assert "float64" in pallas.supports_dplr(q, q, v, q, array(2, 64, 2, 128, dtype=jnp.float64))
  assert "chunk_size is 7" in pallas.supports_dplr(q, q, v, q, q, chunk_size=7)
  long = array(2**22, 2**16, 2, 128)
  assert "2^31 programs" in pallas.supports_dplr(
    long, long, array(2**22, 2**16, 4, 100), long, long
  )
  many = array(
    2**20, 2**14, 4, 16, dtype=jnp.bfloat16
  )  # chunks of the forward pass are half as long as of the backward
  assert "2^31 programs" in pallas.supports_dplr(many, many, many, many, many)
  gates = wide, array(2, 64, 2, 256)
  assert pallas.supports_delta_rule_by_channel(narrow, narrow, narrow, *gates) is None
  assert "K = 128" in pallas.supports_delta_rule_by_channel(wide, wide, wide, *gates)
