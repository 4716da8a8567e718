"""Caches of the layers of softmax attention: dtypes, checks, NumPy states, NaN, tracing."""

import functools
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, relative_rms, some_fast
from flax import nnx

import lajax.layers as L

D, T = 8, 40

LAYERS = {
  "SoftmaxAttention": functools.partial(
    L.SoftmaxAttention, D, 4, 4, num_kv_heads=2, qk_norm=True, output_gate=True, sink=True
  ),
  "window": functools.partial(L.SoftmaxAttention, D, 4, 4, window=7, rope_theta=100.0),
  "MLA": functools.partial(L.MLA, D, 2, 4, kv_rank=6, rope_dim=4),
  "ForgettingAttention": functools.partial(
    L.ForgettingAttention, D, 4, 4, num_kv_heads=2, qk_norm=True, output_gate=True
  ),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def made(name, param_dtype="float32"):
  return LAYERS[name](max_length=T, param_dtype=jnp.dtype(param_dtype), rngs=nnx.Rngs(0))


def tokens(T, B=2, dtype=np.float32):
  return np.random.default_rng(0).standard_normal((B, T, D)).astype(dtype)


def call(layer):
  """The layer as a jitted (x, state, segment_ids=None) -> (y, state)."""
  graph, parameters = nnx.split(layer)
  run = quick_jit(lambda p, x, state, ids: nnx.merge(graph, p)(x, state, segment_ids=ids))
  return lambda x, state=None, ids=None: run(parameters, x, state, ids)


def dtypes(state):
  return {x.dtype.name for x in state.memory}


# --- dtypes ---


@pytest.mark.parametrize(
  ("param_dtype", "dtype", "bound"),
  [
    pytest.param("bfloat16", "float32", 5e-7, id="float32"),
    pytest.param("bfloat16", "float64", 1e-12, id="float64", marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize("name", ["window", "MLA", "ForgettingAttention"])
def test_two_calls_equal_one(name, param_dtype, dtype, bound):
  """The cache has the computation's dtype: what it holds is not rounded, whatever the parameters'.

  Two orders of summation differ by 2e-7 in float32; a cache of bfloat16 would by 1e-3.
  """
  with jax.enable_x64(dtype == "float64"):
    run, x = call(made(name, param_dtype)), tokens(T, dtype=dtype)
    y, state = run(x)
    first, half = run(x[:, : T // 2])
    second, end = run(x[:, T // 2 :], half)
    assert relative_rms(np.concatenate([first, second], axis=1), y) < bound
    assert dtypes(half) == dtypes(end) == dtypes(state) == {dtype}
    for a, b in zip(end.memory, state.memory, strict=True):
      assert relative_rms(a, b) < bound


@each_layer
def test_dtypes_of_empty_caches(name):
  """`init_state` takes the inputs' dtype; a call widens a cache narrower than its computation."""
  layer = made(name, "bfloat16")
  narrow, wide = layer.init_state(2), layer.init_state(2, dtype=jnp.float32)
  assert "bfloat16" in dtypes(narrow)
  assert dtypes(wide) == {"float32"}
  after = lambda state: jax.eval_shape(lambda s: layer(jnp.asarray(tokens(1)), s)[1], state)
  assert dtypes(after(narrow)) == dtypes(after(wide)) == {"float32"}
  half = jax.eval_shape(lambda x, s: layer(x, s)[1], tokens(1).astype(jnp.bfloat16), wide)
  assert dtypes(half) == {"float32"}, "a cache is never narrowed"


# --- eager calls, and states from files ---


def stored(state):
  """The state after np.savez and np.load."""
  file = io.BytesIO()
  np.savez(file, *jax.tree.leaves(state))
  file.seek(0)
  with np.load(file) as arrays:
    return jax.tree.unflatten(jax.tree.structure(state), [arrays[n] for n in arrays.files])


@pytest.mark.parametrize("name", some_fast(["SoftmaxAttention", "MLA"], ("SoftmaxAttention",)))
def test_eager_calls(name, caplog):
  """A state of NumPy arrays gives the same; the second calls of the same shapes compile nothing."""
  layer, x = made(name), jnp.asarray(tokens(2, B=1))

  def run(carried):
    y, state = layer(x)
    z, state = layer(x, carried(state))
    return y, z, layer(x[:, :1], carried(state))[0]

  first = run(lambda state: state)
  run(stored)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    second = run(stored)
  assert not [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


# --- wrong states ---


def replaced(n, change):
  return lambda memory: tuple(change(x) if i == n else x for i, x in enumerate(memory))


WRONG = {
  "heads": (replaced(1, lambda x: x[:, :, :1]), ["memory[1]", "(2, 6, 2, 4)", "(2, 6, 1, 4)"]),
  "all heads": (lambda m: [x[:, :, :1] for x in m], ["memory[0]", "(2, 6, 2, 4)", "(2, 6, 1, 4)"]),
  "batch": (lambda m: tuple(x[:1] for x in m), ["memory[0]", "(2, 6, 2, 4)", "(1, 6, 2, 4)"]),
  "places": (replaced(1, lambda x: x[:, :5]), ["memory[1]", "(2, 6, 2, 4)", "(2, 5, 2, 4)"]),
  "rank": (replaced(0, lambda x: x[0]), ["memory[0]", "[B S HK K]", "(6, 2, 4)"]),
  "integers": (replaced(0, lambda x: x.astype(np.int32)), ["memory[0]", "floating", "int32"]),
  "part of None": (replaced(1, lambda x: None), ["memory[1]", "(v)", "None"]),
  "none": (lambda m: None, ["memory", "(k, v)", "NoneType", "init_state(2)"]),
  "one array": (lambda m: m[0], ["memory", "(k, v)", "Array"]),
  "three": (lambda m: (*m, m[0]), ["memory", "(k, v)", "3"]),
  "no places": (lambda m: tuple(x[:, :0] for x in m), ["memory", "S = 0"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_caches(wrong):
  """Every part of a cache is checked; the message names it, what it must be, and what it was."""
  layer = L.SoftmaxAttention(D, 4, 4, num_kv_heads=2, max_length=6, rngs=nnx.Rngs(0))
  state = layer.init_state(2)._replace(length=jnp.full(2, 3, jnp.int32))
  change, pieces = WRONG[wrong]
  with pytest.raises(ValueError, match="state") as error:
    layer(tokens(1), state._replace(memory=change(state.memory)))
  assert all(piece in str(error.value) for piece in pieces), str(error.value)


@each_layer
def test_any_number_of_places(name):
  """`init_state(max_length=..)` chooses it."""
  layer = made(name)
  state = layer.init_state(2, max_length=3)
  after = jax.eval_shape(lambda s: layer(jnp.asarray(tokens(2)), s)[1], state)
  assert [x.shape for x in after.memory] == [x.shape for x in state.memory]
  assert state.memory[0].shape[1] == 3
  with pytest.raises(ValueError, match="max_length"):
    layer.init_state(2, max_length=0)


# --- numbers that are not finite ---


@pytest.mark.parametrize("name", some_fast(LAYERS, ("SoftmaxAttention",)))
def test_nan_does_not_outlive_its_document(name):
  """Three calls of three tokens; the second document begins inside the second call."""
  run, x = call(made(name)), tokens(9)
  ids = np.array([[0] * 4 + [1] * 5] * 2)
  broken = x.copy()
  broken[:, 2] = np.nan
  outputs = []
  for given in (x, broken):
    state, parts = None, []
    for start in (0, 3, 6):
      y, state = run(given[:, start : start + 3], state, ids[:, start : start + 3])
      parts.append(y)
    outputs.append(np.concatenate(parts, axis=1))
  want, got = outputs
  assert np.isnan(got[:, 2:4]).all()
  np.testing.assert_array_equal(got[:, :2], want[:, :2])
  np.testing.assert_array_equal(got[:, 4:], want[:, 4:])


def test_nan_leaves_the_window():
  """With a window of 7, token 2 is read up to token 8."""
  run, x = call(made("window")), tokens(20)
  broken = x.copy()
  broken[:, 2] = np.nan
  want, got = [], []
  for given, found in ((x, want), (broken, got)):
    y, state = run(given[:, :10])
    found += [y, run(given[:, 10:20], state)[0]]
  want, got = np.concatenate(want, axis=1), np.concatenate(got, axis=1)
  np.testing.assert_array_equal(
    np.isnan(got).any(-1)[0], (np.arange(20) >= 2) & (np.arange(20) < 9)
  )
  np.testing.assert_array_equal(got[:, 9:], want[:, 9:])


# --- tracing ---


@pytest.mark.slow
@each_layer
def test_strict_promotion(name):
  """bfloat16 inputs and parameters, and bfloat16 parameters with float32 inputs."""
  layer, ids = made(name, "bfloat16"), np.zeros((2, 3), np.int32)
  graph, parameters = nnx.split(layer)

  def total(parameters, x):
    layer = nnx.merge(graph, parameters)
    y, state = layer(x, segment_ids=ids)
    z, state = layer(x, state, segment_ids=ids)
    last, _ = layer(x[:, :1], state)
    return sum(o.astype(jnp.float32).sum() for o in (y, z, last))

  jax.eval_shape(jax.grad(total), parameters, tokens(3).astype(jnp.bfloat16))
