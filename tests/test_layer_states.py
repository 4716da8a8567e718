"""States of layers: their dtypes follow the computation, every part that comes in is checked,
arrays of any kind work.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, relative_rms, some_fast
from flax import nnx
from layer_cases import CASES, EACH, B, Case, D, abstract, values

import lajax.layers as L

every_layer = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
FAST = ("ShortConv", "GatedDeltaNet", "RWKV6", "Mamba", "MLA", "Hedgehog")
SPLIT_FAST = FAST[:3]
SLOW = ("LinearAttention", "MLSTM", "RGLRU", "HGRN", "SoftmaxAttention", "DeltaProduct")
name_of = lambda case: case.name
each_class = pytest.mark.parametrize("case", some_fast(EACH, FAST, name_of))


def call_of(graph):
  return lambda params, x, state=None, ids=None: nnx.merge(graph, params)(x, state, segment_ids=ids)


def tokens(length, dtype=np.float32, batch=2):
  return np.random.default_rng(0).normal(size=(batch, length, D)).astype(dtype)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@each_class
def test_states_have_the_dtypes_of_the_computation(case):
  """And those of `init_state(batch, dtype=x.dtype)`, so that they are the carry of a scan."""
  like = lambda tree: jax.tree.map(lambda s: (s.shape, s.dtype), tree)
  wide = lambda tree: {x.dtype for x in jax.tree.leaves(tree) if x.ndim > 1}
  for options, dtype, widest in [
    ({}, jnp.float32, jnp.float32),
    ({"param_dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
    ({}, jnp.float64, jnp.float64),
    ({"dtype": jnp.bfloat16}, jnp.float32, jnp.float32),
  ]:
    graph, params = abstract(case, **options)
    init = nnx.merge(graph, params).init_state(B, dtype=dtype)
    call = call_of(graph)
    ids = np.zeros((B, 3), np.int32)
    for state, segment_ids in [(init, ids), (None, None)][: 1 if options else 2]:
      x = jax.ShapeDtypeStruct((B, 3, D), dtype)
      y, new = jax.eval_shape(call, params, x, state, segment_ids)
      assert y.shape == x.shape
      assert y.dtype == options.get("dtype", dtype)
      assert like(new) == like(init), (options, dtype)
    if "dtype" not in options:
      assert wide(init) <= {jnp.dtype(widest)}


@each_class
def test_a_wider_state_stays_wide(case):
  """float32 in a computation in bfloat16: nothing that came in is rounded."""
  graph, params = abstract(case, param_dtype=jnp.bfloat16)
  state = nnx.merge(graph, params).init_state(B, dtype=jnp.float32)
  x = jax.ShapeDtypeStruct((B, 3, D), jnp.bfloat16)
  y, new = jax.eval_shape(call_of(graph), params, x, state)
  assert y.dtype == jnp.bfloat16
  assert jax.tree.map(lambda s: s.dtype, new) == jax.tree.map(lambda s: s.dtype, state)


@pytest.mark.parametrize(
  "case",
  some_fast(
    [case.in_form("recurrent") for case in EACH if case.name in (*FAST, *SLOW)], SPLIT_FAST, name_of
  ),
)
def test_half_precision_parameters_leave_split_and_whole_equal(case):
  """bfloat16 parameters, float32 inputs: a cache in the parameters' dtype gave errors of 1e-4 to
  1.6e-3.
  """
  graph, params = abstract(case, param_dtype=jnp.bfloat16)
  params, x = values(params), tokens(40)

  @quick_jit
  def both(params, x):
    call = call_of(graph)
    (first, state), (whole, end) = call(params, x[:, :20]), call(params, x)
    second, state = call(params, x[:, 20:], state)
    return (jnp.concatenate([first, second], axis=1), state), (whole, end)

  for got, want in zip(*map(jax.tree.leaves, both(params, x)), strict=True):
    assert got.dtype == want.dtype
    assert relative_rms(got, want, floor=1e-3) < 1e-6


# --- checks ---------------------------------------------------------------------------------------


def _other_parts(state):
  """(part of the state that the message names, a state that is wrong there)"""
  change = lambda **parts: state._replace(**parts)
  short = lambda tree: jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), tree)
  wrong = [
    ("state.length", change(length=jnp.zeros(2))),
    ("state.length", change(length=3)),
    ("state.length", change(length=None)),
    ("state.segment", change(segment=jnp.zeros(3, jnp.int32))),
    ("state.segment", change(segment=jnp.zeros((2, 1), jnp.int32))),
  ]
  for name in ("memory", "conv"):
    part = getattr(state, name)
    if part is None:
      wrong.append((f"state.{name}", change(**{name: jnp.zeros((2, 3))})))
      continue
    integers = jax.tree.map(lambda x: x.astype(jnp.int32), part)
    wider = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype), part)
    for bad in (None, short(part), integers, wider, 7, "zeros"):
      wrong.append((f"state.{name}", change(**{name: bad})))
  return wrong


@every_layer
def test_every_part_of_a_state_is_checked(case):
  layer = nnx.eval_shape(case.make)
  x, state = jnp.ones((2, 3, D)), jax.eval_shape(lambda: layer.init_state(2))
  state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), state)
  for part, wrong in _other_parts(state):
    with pytest.raises(ValueError, match=rf"`{part}.*must (be|have) .*; got"):
      layer(x, wrong)


def test_the_message_names_shapes_letters_and_remedy():
  layer = nnx.eval_shape(lambda: L.GatedDeltaNet(D, 2, 8, rngs=nnx.Rngs(0)))
  other = nnx.eval_shape(lambda: L.GatedDeltaNet(D, 4, 8, rngs=nnx.Rngs(0)))
  x = jnp.ones((2, 3, D))
  with pytest.raises(
    ValueError,
    match=r"`state.memory` must be \[B HV K V\] = \(2, 2, 8, 8\) with a floating dtype; "
    r"got \(2, 4, 8, 8\) of float32: axis HV differs\. "
    r"Pass the state of an earlier call of this layer, or init_state\(2\)",
  ):
    layer(x, other.init_state(2))
  state = layer.init_state(2)
  with pytest.raises(ValueError, match=r"`state.conv\['q'\]` must be \[B W-1 D\] = \(2, 3, 16\)"):
    layer(x, state._replace(conv=state.conv | {"q": jnp.zeros((2, 3, 8))}))
  with pytest.raises(ValueError, match=r"`state.conv` must be a dict .* keys k, q, v; got \['q'\]"):
    layer(x, state._replace(conv={"q": jnp.zeros((2, 3, 16))}))
  with pytest.raises(
    ValueError, match=r"`state` must be a LayerState, .*init_state\(2\).*got tuple"
  ):
    layer(x, tuple(state))
  layer = nnx.eval_shape(lambda: L.MLSTM(D, 2, 8, rngs=nnx.Rngs(0)))
  state = layer.init_state(2)
  with pytest.raises(ValueError, match=r"`state.memory\[1\]` must be \[B HV K\] = \(2, 2, 8\)"):
    layer(x, state._replace(memory=(state.memory[0], state.memory[2], state.memory[2])))
  with pytest.raises(
    ValueError, match=r"`state.memory` must be a tuple of 3 arrays; got .*float32"
  ):
    layer(x, state._replace(memory=state.memory[0]))


# --- kinds of arrays ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "make",
  some_fast(
    [
      functools.partial(L.GatedDeltaNet, D, 2, 8, impl="recurrent"),
      functools.partial(L.RWKV7, D, 2, 8, impl="recurrent"),
      functools.partial(L.SoftmaxAttention, D, 2, 8, max_length=8, impl="recurrent"),
    ],
    ("GatedDeltaNet",),
    lambda make: make.func.__name__,
  ),
)
def test_numpy_states(make):
  """As np.load gives them: eagerly, and as constants of a trace."""
  graph, params = abstract(Case("", make))
  params, x = values(params), tokens(2)
  call = quick_jit(call_of(graph))
  _, state = call(params, x)
  saved = jax.tree.map(np.asarray, state)
  y, _ = call(params, x, state)
  if make.func is not L.RWKV7:
    eager, _ = nnx.merge(graph, params)(x, saved)
    np.testing.assert_allclose(eager, y, rtol=1e-4, atol=1e-5)
  constant, _ = quick_jit(lambda params, x: call_of(graph)(params, x, saved))(params, x)
  np.testing.assert_allclose(constant, y, rtol=1e-4, atol=1e-5)


def test_ids_that_do_not_fit_are_refused():
  """5 and 2^32 + 5 are two documents, and an unsigned id of 2^31 is none that has not been seen."""
  layer = nnx.eval_shape(lambda: L.ShortConv(D, rngs=nnx.Rngs(0)))
  x = jnp.ones((1, 2, D))
  for ids in (np.array([[5, 2**32 + 5]]), np.array([[2**31, 2**31]], np.uint32)):
    with pytest.raises(ValueError, match="`segment_ids` must be ids of at most 2147483647"):
      layer(x, segment_ids=ids)
  graph, params = abstract(Case("", functools.partial(L.ShortConv, D)))
  for dtype in (np.int64, np.uint32, np.int8):
    _, state = quick_jit(call_of(graph))(values(params), x, None, jnp.asarray([[5, 7]], jnp.int32))
    eager = nnx.merge(graph, values(params))(x, segment_ids=np.array([[5, 7]], dtype))[1]
    assert state.segment.dtype == eager.segment.dtype == jnp.int32
    np.testing.assert_array_equal(eager.segment, state.segment)
  with jax.enable_x64(True), pytest.raises(ValueError, match=r"`segment_ids` must be ids .*int64"):
    jax.eval_shape(call_of(graph), params, x, None, jax.ShapeDtypeStruct((1, 2), jnp.int64))


# --- tools around ---------------------------------------------------------------------------------


class Stack(nnx.Module):
  """Two layers, whose states are a list."""

  def __init__(self):
    make = (L.GatedDeltaNet, L.SoftmaxAttention)
    self.layers = nnx.List([layer(D, 2, 8, rngs=nnx.Rngs(0)) for layer in make])

  def __call__(self, x):
    states = []
    for layer in self.layers:
      x, state = layer(x)
      states.append(state)
    return x, states


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_tabulate_describes_layers_and_leaves_them_usable():
  x = jnp.ones((1, 2, D))
  model = Stack()
  assert "GatedDeltaNet" in nnx.tabulate(model, x)
  assert model(x)[0].shape == x.shape


def test_paths_have_the_names_of_the_parts():
  state = L.LayerState(jnp.zeros(1), {"q": jnp.zeros(1)}, jnp.zeros(1), None)
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
  assert paths == [".memory", ".conv['q']", ".segment"]
  assert jax.tree.map(lambda x: x, state) is not None
  assert isinstance(jax.tree.map(lambda x: x + 1, state), L.LayerState)
