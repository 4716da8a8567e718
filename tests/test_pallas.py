"""The kernels of additive states: interpreted on a CPU against `recurrent` in float64.

The interpreter puts NaN behind an array's end, so that a kernel that reads there without a mask fails every comparison.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from jax.experimental import pallas as pl
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
from lajax.pallas.launch import launch

GATES = ("none", "head", "channel")
BASE = Shape()


# --- interpreted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case_id", ["linear_attention-head", "linear_attention-channel"])
def test_packed_documents_of_every_kind_of_values(case_id):
  """Outputs, states, all gradients: documents, padding, gates of -inf, sizes no powers of two, grouped heads."""
  assert not misses(case_id, BASE, "float32", True, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gate", "dtype", "packed"),
  [
    ("none", "float32", True),
    ("none", "bfloat16", False),
    ("head", "float32", False),
    ("head", "bfloat16", True),
    ("channel", "float32", False),
    ("channel", "bfloat16", True),
  ],
)
def test_dtypes(gate, dtype, packed):
  case_id = f"linear_attention-{gate}"
  assert not misses(case_id, BASE, dtype, packed, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize(
  "shape",
  [Shape(T=1, H=2, HV=2, K=48, V=7), Shape(T=17, H=1, HV=4, K=100, V=33), Shape(T=65, H=2, HV=4, K=192, V=72)],
  ids=lambda s: f"T{s.T}-H{s.H}-HV{s.HV}-K{s.K}-V{s.V}",
)
def test_sizes(gate, shape):
  case_id = f"linear_attention-{gate}"
  assert not misses(case_id, shape, "float32", False, CASES[case_id].rows[:5:2])


@pytest.mark.slow
def test_float16():
  assert not misses_of_float16("linear_attention-head", BASE)


@pytest.mark.slow
def test_vmap_and_checkpoint():
  assert change_by_vmap_and_checkpoint("linear_attention-head", BASE) < 1e-6


@pytest.mark.parametrize("gate", GATES)
def test_decode(gate):
  """One token of many states, K and V no powers of two, grouped heads."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  B, H, HV, K, V = 3, 2, 4, 12, 40
  S, q, k, v = draw(B, HV, K, V), draw(B, H, K), draw(B, H, K), draw(B, HV, V)
  g = {"none": None, "head": -abs(draw(B, HV)), "channel": -abs(draw(B, HV, K))}[gate]
  if g is not None:
    g[0] = -np.inf
  got = jax.jit(pallas.decode_linear_attention, static_argnums=5, compiler_options=cases.quick())(S, q, k, v, g, 0.5)
  q, k = np.repeat(q, 2, 1), np.repeat(k, 2, 1)
  decay = np.exp(np.zeros((B, HV), np.float32) if g is None else g)
  S = decay.reshape(*decay.shape, *(1,) * (4 - decay.ndim)) * S + k[..., :, None] * v[..., None, :]
  np.testing.assert_allclose(got[0], S, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[1], 0.5 * np.einsum("bhkv,bhk->bhv", S, q), rtol=1e-5, atol=1e-5)


def test_nan_stands_behind_an_array():
  """What the other tests rely on: a block's part behind the end of an array is NaN."""

  def copy(inputs, outputs, *, interpreted):
    outputs[0][...] = inputs[0][...]

  spec, shape = pl.BlockSpec((16,), lambda program: (program,)), jax.ShapeDtypeStruct((16,), jnp.float32)
  (x,) = launch(
    copy, [jnp.ones(12)], name="copy", programs=1, in_specs=[spec], out_specs=[spec], out_shapes=[shape],
    warps=1, stages=1,
  )  # fmt: skip
  assert np.isnan(x[12:]).all()
  assert (x[:12] == 1).all()


# --- what is launched, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("gate", "chunk"), [("head", 32), ("channel", 16)])
def test_number_of_launches(gate, chunk):
  """Two forward, three backward; what is kept between them is the inputs and the states at the chunks' starts."""
  assert launches(f"linear_attention-{gate}", BASE) == (2, 5)
  found, most = kept(f"linear_attention-{gate}", BASE, chunk)
  assert found <= most


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, v = array(2, 64, 2, 256), array(2, 64, 4, 100)
  assert pallas.supports_linear_attention(q, q, v) is None
  assert pallas.supports_linear_attention(q, q, v, array(2, 64, 4, 256)) is None
  wide, long = array(2, 64, 2, 257), array(2**22, 2**16, 2, 256)
  assert "K is 257" in pallas.supports_linear_attention(wide, wide, v)
  assert "float64" in pallas.supports_linear_attention(q, q, array(2, 64, 4, 100, dtype=jnp.float64))
  assert "chunk_size is 7" in pallas.supports_linear_attention(q, q, v, chunk_size=7)
  assert "bonus" in pallas.supports_linear_attention(q, q, v, bonus=array(2, 256))
  assert "2^31 programs" in pallas.supports_linear_attention(long, long, array(2**22, 2**16, 4, 100))


def test_second_derivatives_are_refused_with_a_sentence():
  refuses_second_derivatives(lambda x: lajax.linear_attention(x, x, x, impl="pallas")[0])
