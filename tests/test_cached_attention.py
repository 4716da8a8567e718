"""One query per row over a cache: `attend` in outputs and derivatives, and no copy of the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx

import lajax.layers as L
from lajax.recurrence import attend, cached_attention
from lajax.recurrence.cached_attention import attend_one

B, S, H, HK, K, V = 4, 11, 4, 2, 5, 3
KEYS = (2, 3)  # channels of the two parts of a key


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Three blocks of four keys, the last of which overlaps the one before."""
  monkeypatch.setattr(cached_attention, "BLOCK", 4)


def arguments(dtype=np.float32):
  """Rows: a full cache, one of three tokens, a ring, and a query of padding."""
  random = np.random.default_rng(0)
  normal = lambda *shape: random.standard_normal(shape).astype(dtype)
  arrays = dict(q=normal(B, 1, H, K), k=normal(B, S, HK, K), v=normal(B, S, HK, V), sink=normal(H))
  count = np.array([S, 3, 2 * S + 5, 6], np.int32)
  last = count[:, None] - 1
  position = last - (last - np.arange(S, dtype=np.int32)) % S
  document = np.where(position < 0, -1, 0).astype(np.int32)
  query = np.array([[0], [0], [0], [-1]], np.int32)
  places = dict(q_positions=last, k_positions=position, q_segments=query, k_segments=document)
  return arrays, places


@functools.cache
def compiled(window, with_sink):
  """Outputs and gradients of `attend_one`, and those of `attend`, with a cotangent."""
  options = dict(window=window, scale=0.3)

  def run(f, arrays, places, do):
    call = lambda arrays: f(arrays["q"], arrays["k"], arrays["v"], arrays.get("sink"), places)
    o, pull = jax.vjp(call, arrays)
    return o, pull(do)[0]

  def one(q, k, v, sink, places):
    keys = tuple(jnp.split(k, [KEYS[0]], axis=-1))
    return attend_one(q, keys, v, sink=sink, **places, **options)

  def whole(q, k, v, sink, places):
    return attend(q, k, v, sink=sink, **places, **options)

  forward = lambda arrays, places: one(*_parts(arrays, with_sink), places)
  return quick_jit(forward), *(quick_jit(functools.partial(run, f)) for f in (one, whole))


def _parts(arrays, with_sink):
  return arrays["q"], arrays["k"], arrays["v"], arrays["sink"] if with_sink else None


@pytest.mark.parametrize(("window", "with_sink"), [(None, True), (7, False)])
def test_one_query_equals_attend(window, with_sink):
  forward, one, whole = compiled(window, with_sink)
  arrays, places = arguments()
  arrays = arrays if with_sink else {n: x for n, x in arrays.items() if n != "sink"}
  do = np.random.default_rng(1).standard_normal((B, 1, H, V)).astype(np.float32)
  want, gradients = whole(arrays, places, do)
  o = forward(arrays, places)
  assert relative_rms(o, want) < BUDGET["float32"]["value"]
  assert not np.asarray(o)[3].any(), "a query of padding reads nothing"
  same, found = one(arrays, places, do)
  np.testing.assert_array_equal(same, want)
  for name, gradient in gradients.items():
    np.testing.assert_array_equal(found[name], gradient, err_msg=name)


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_stays_with_the_queries_that_read_it(name):
  """In a place that row 0 reads, and row 1 does not: it holds three tokens."""
  forward = compiled(None, True)[0]
  arrays, places = arguments()
  want = np.asarray(forward(arrays, places))
  broken = arrays | {name: arrays[name].copy()}
  broken[name][:, 5, 1, 0] = [np.nan, np.inf, 0, np.nan]
  broken[name][2] = arrays[name][2]
  got = np.asarray(forward(broken, places))
  assert np.isnan(got[0, :, H // HK :]).all(), "heads that read it"
  np.testing.assert_array_equal(got[0, :, : H // HK], want[0, :, : H // HK])
  np.testing.assert_array_equal(got[1:], want[1:])


LAYERS = {
  "SoftmaxAttention": functools.partial(L.SoftmaxAttention, 8, 2, 8, rope_theta=100.0),
  "MLA": functools.partial(L.MLA, 8, 2, 4, kv_rank=16, rope_dim=16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_decode_step_makes_no_second_cache(name):
  """Compiled with the state donated: nothing of the size of k or v is allocated, or written."""
  places = 4096
  layer = LAYERS[name](max_length=places, rngs=nnx.Rngs(0))
  graph, parameters = nnx.split(layer)
  step = lambda p, x, state, ids: nnx.merge(graph, p)(x, state, segment_ids=ids)
  state, x = layer.init_state(2), jnp.zeros((2, 1, 8))
  ids = jnp.zeros((2, 1), jnp.int32)
  program = jax.jit(step, donate_argnums=2).lower(parameters, x, state, ids).compile()
  size = min(a.nbytes for a in state.memory)
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes >= sum(a.nbytes for a in state.memory)
  assert memory.temp_size_in_bytes < size
