"""The kernels of softmax attention: interpreted on a CPU against `recurrent` in float64."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape, quick_jit
from pallas_cases import residuals

import lajax
from lajax import pallas
from lajax.pallas import attention_blocks
from lajax.pallas.model import kernel_names

BASE = Shape()
PLAIN, WINDOW = CASES["attention-none"], CASES["attention-window_sink"]

op = functools.partial(lajax.attention, impl="pallas")


def misses(case, shape, dtype, packed, **options):
  rows = cases.batch(case)
  arrays = cases.inputs(case.id, shape, rows)
  ids = cases.packed_ids(shape.T) if packed else None
  got = cases.evaluate(case, "pallas", dtype, arrays, ids, **options)
  want = cases.evaluate(case, "recurrent", "float64", arrays, ids, values=dtype, **options)
  return cases.misses(case, got, want, dtype, rows)


def test_packed_documents_with_window_and_sink():
  """Outputs, all gradients: documents, padding, sizes no powers of two, grouped heads, a logit of
  the denominator.
  """
  assert not misses(WINDOW, BASE, "float32", True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PLAIN, WINDOW], ids=lambda case: case.gate)
@pytest.mark.parametrize(
  ("causal", "dtype", "packed"),
  [
    (True, "float32", False),
    (False, "float32", True),
    (False, "bfloat16", False),
    (True, "bfloat16", True),
  ],
)
def test_options_and_dtypes(case, causal, dtype, packed):
  assert not misses(case, BASE, dtype, packed, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("causal", "shape"),
  [
    (True, Shape(T=1, V=7)),
    (False, Shape(T=17, H=2, HV=4, K=100, V=33)),
    (True, Shape(T=130, H=2, HV=2, K=48, V=130)),
    (False, Shape(T=96, H=1, HV=1, K=192, V=64)),
  ],
  ids=lambda s: f"T{s.T}-H{s.HV}-HK{s.H}-K{s.K}-V{s.V}" if isinstance(s, Shape) else None,
)
def test_sizes(shape, causal):
  assert not misses(PLAIN, shape, "float32", False, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "packed"), [(1, True), (32, False), (33, False), (33, True)])
def test_windows(window, packed):
  """Causal in packed documents, and not causal without them."""
  assert not misses(PLAIN, Shape(T=170), "float32", packed, window=window, causal=packed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_scores_and_a_sink_of_any_size(dtype):
  """Scores in the hundreds, of which softmax keeps one; a sink that takes all, and one that takes
  nothing.
  """
  rng = np.random.default_rng(0)
  draw = lambda *shape: cases.rounded("x", 6 * rng.standard_normal(shape), dtype)
  arrays = {"q": draw(2, 70, 4, 32), "k": draw(2, 70, 2, 32), "v": draw(2, 70, 2, 24)}
  arrays["sink"] = np.array([300.0, -np.inf, -1e4, 0.0], np.float32)

  def run(impl, arrays, ct):
    out, pull = jax.vjp(lambda arrays: lajax.attention(**arrays, impl=impl), arrays)
    return out, pull(ct.astype(out.dtype))[0]

  ct = cases.rounded("x", rng.standard_normal((2, 70, 4, 24)), dtype)
  o, got = quick_jit(functools.partial(run, "pallas"))(arrays, ct)
  with jax.enable_x64(True):
    finite = arrays | {"sink": np.maximum(arrays["sink"], -1e5)}
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (finite, ct))
    want_o, want = jax.device_get(quick_jit(functools.partial(run, "recurrent"))(*wide))
  assert cases.relative_rms(o, want_o) < cases.BUDGET[dtype]["value"]
  for name in ("q", "k", "v"):
    assert (
      cases.relative_rms(got[name], want[name], cases.CANCELLATION)
      < cases.BUDGET[dtype]["gradient"]
    ), name
  assert np.isfinite(got["sink"]).all()
  assert (
    cases.relative_rms(got["sink"], want["sink"], cases.CANCELLATION) < cases.BUDGET[dtype]["gate"]
  )


@pytest.mark.slow
def test_vmap_and_checkpoint():
  """Mapped over an axis in front, with the forward pass computed again in the backward pass: the
  same numbers.
  """
  arrays = {name: np.float32(x) for name, x in cases.inputs(PLAIN.id, BASE).items()}
  ct = np.float32(cases.cotangents(PLAIN, arrays)[0])
  ids = cases.packed_ids(BASE.T)

  def gradients(f, arrays, ids, ct):
    out, pull = jax.vjp(lambda arrays: f(**arrays, segment_ids=ids), arrays)
    return out, pull(ct)[0]

  whole = quick_jit(functools.partial(gradients, op))(arrays, ids, ct)
  part = lambda x: x.reshape(2, -1, *x.shape[1:])
  mapped = quick_jit(jax.vmap(functools.partial(gradients, jax.checkpoint(op))))
  got = mapped(*jax.tree.map(part, (arrays, ids, ct)))
  for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
    assert cases.relative_rms(x.reshape(want.shape), want) < 1e-6


# --- blocks, launches and residuals ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("causal", "window", "packed"),
  cases.some_fast(
    itertools.product((True, False), (None, 40), (False, True)), ("(True, 40, True)",)
  ),
)
def test_blocks_hold_what_is_read_and_little_else(causal, window, packed):
  """From the first to the last block that holds a token that is read: no block more."""
  T, B = 500, 3
  ids = np.zeros((B, T), np.int32)
  if packed:
    ids[0] = np.repeat(np.arange(10), 50)
    ids[1, 100:300] = 1
    ids[1, 300:] = -1
    ids[2, ::7] = -1
  # Padding has the number of the document before it.
  last = np.maximum.accumulate(np.where(ids >= 0, np.arange(T), 0), axis=1)
  filled = np.take_along_axis(np.maximum(ids, 0), last, axis=1)
  document = np.cumsum(np.diff(filled, prepend=filled[:, :1], axis=1) != 0, axis=1, dtype=np.int32)
  documents = None
  if packed:
    documents = attention_blocks.documents_of(jnp.asarray(document), jnp.asarray(ids >= 0))
  x = jax.ShapeDtypeStruct((B, T, 1, 64), jnp.bfloat16)
  p = attention_blocks.plan(x, x, x, attention_blocks.Mask(causal, window), packed, 1.0)._replace(
    C=64, S=32
  )
  position = np.cumsum(ids >= 0, axis=1) if packed else np.broadcast_to(np.arange(T), (B, T))
  distance = position[:, :, None] - position[:, None]
  reads = (document[:, :, None] == document[:, None]) & (ids >= 0)[:, None] & (ids >= 0)[:, :, None]
  reads &= (distance >= 0) | (not causal)
  reads &= abs(distance) < (window or T)
  reads = np.pad(reads, ((0, 0), (0, 12), (0, 12))).reshape(B, 8, 64, 16, 32).any((2, 4))
  for keys, needed in ((False, reads), (True, reads.swapaxes(1, 2))):
    first, past = map(np.asarray, attention_blocks.blocks(p, documents, keys))
    number = np.arange(needed.shape[2])
    gone_through = (number >= first[..., None]) & (number < past[..., None])
    between = (np.cumsum(needed, axis=2) > 0) & (
      np.cumsum(needed[..., ::-1], axis=2)[..., ::-1] > 0
    )
    np.testing.assert_array_equal(np.broadcast_to(gone_through, needed.shape), between)


def test_launches_and_residuals():
  """Residuals are the inputs, the output, and a number per row of scores."""
  given = {name: jnp.float32(x) for name, x in cases.inputs(PLAIN.id, BASE).items()}
  forward = lambda x: op(**x)
  assert kernel_names(forward, given) == ["attention_forward"]
  both = ["attention_forward", "attention_queries", "attention_keys"]
  assert kernel_names(jax.grad(lambda x: forward(x).sum()), given) == both
  out = jax.eval_shape(forward, given)
  allowed = sum(x.size for x in given.values()) + out.size + out.size // out.shape[-1]
  assert residuals(forward, given) <= allowed


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, k, v = array(2, 64, 4, 256), array(2, 64, 2, 256), array(2, 64, 2, 100)
  assert pallas.supports_attention(q, k, v) is None
  assert pallas.supports_attention(q, k, v, array(4)) is None
  assert "K is 257" in pallas.supports_attention(array(2, 64, 4, 257), array(2, 64, 2, 257), v)
  assert "V is 300" in pallas.supports_attention(q, k, array(2, 64, 2, 300))
  assert "log_forget" in pallas.supports_attention(q, k, v, None, array(2, 64, 4))
  assert "float64" in pallas.supports_attention(q, k, array(2, 64, 2, 100, dtype=jnp.float64))
  long = array(2**20, 2**16, 2, 256)
  assert "2^31 programs" in pallas.supports_attention(long, long, long)
  x, gate = jnp.ones((1, 4, 2, 3)), jnp.zeros((1, 4, 2))
  with pytest.raises(NotImplementedError, match=r"log_forget.*impl='chunked' or impl='auto'\.$"):
    op(x, x, x, log_forget=gate)


def test_second_derivatives_are_refused_with_a_sentence():
  x = jnp.ones((1, 4, 1, 5))
  first = jax.grad(lambda x: op(x, x, x).sum())
  with pytest.raises(NotImplementedError, match=r"first derivatives only.*impl='recurrent'"):
    jax.grad(lambda x: first(x).sum())(x)
