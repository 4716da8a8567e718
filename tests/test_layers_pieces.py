"""The pieces of layers against independent results in float64, and what each layer promises beside
the laws.
"""

import functools
import pathlib

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx
from layer_cases import CASES, EACH, B, Case, D, abstract, values

import lajax.layers as L
from lajax._numerics import l2_normalize
from lajax._operations import programs_inside
from lajax.layers import parameters
from lajax.layers.kv_cache import CachedMixer
from lajax.layers.state import LayerState, follow
from lajax.pallas import launch

ORACLE = pathlib.Path(__file__).parent / "oracle" / "ops"
SOME = ("SoftmaxAttention", "Mamba2", "GatedDeltaNet")
each_class = pytest.mark.parametrize(
  "case",
  [pytest.param(case, id=case.name, marks=() if case.plain else pytest.mark.slow) for case in EACH],
)
every_layer = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


def oracle(name: str) -> dict:
  with np.load(ORACLE / f"{name}.npz") as file:
    return {
      key: file[key].astype(np.float64) if file[key].dtype.kind == "f" else file[key]
      for key in file
    }


def agrees_with_oracle(name: str, f):
  """f of the inputs, by name, to a dict of outputs; held to the outputs and the gradients of the
  file.
  """
  data = oracle(name)
  inputs = {key[3:]: value for key, value in data.items() if key.startswith("in_")}
  cotangents = {key[3:]: value for key, value in data.items() if key.startswith("ct_")}

  def with_gradients(inputs, cotangents):
    out, pull = jax.vjp(f, inputs)
    return out, *pull(cotangents)

  out, grads = quick_jit(with_gradients)(inputs, cotangents)
  for key, value in out.items():
    assert relative_rms(value, data[f"out_{key}"]) <= BUDGET["float64"]["value"], key
  for key, value in grads.items():
    assert relative_rms(value, data[f"grad_{key}"]) <= BUDGET["float64"]["gate"], (
      f"gradient of {key}"
    )


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["T17", "T2_cache"])
def test_short_conv(name):
  activation = {"silu": "silu"}.get(str(oracle(f"short_conv__{name}")["attr_activation"]))

  def f(i):
    width = i["weight"].shape[1]
    layer = L.ShortConv(
      6,
      width,
      use_bias="bias" in i,
      activation=activation,
      param_dtype=jnp.float64,
      rngs=nnx.Rngs(0),
    )
    layer.weight[...] = i["weight"]
    if "bias" in i:
      layer.bias[...] = i["bias"]
    cache = i.get("cache", jnp.zeros((2, 6, width)))
    tail = jnp.moveaxis(cache, 1, 2)[:, 1:]
    o, state = layer(i["x"], layer.init_state(2)._replace(conv=tail))
    # The file keeps W inputs, of which the next call reads W - 1: the oldest comes from what went
    # in.
    oldest = jnp.concatenate([tail, i["x"]], axis=1)[:, -width]
    return {
      "o": o,
      "cache": jnp.moveaxis(jnp.concatenate([oldest[:, None], state.conv], axis=1), 1, 2),
    }

  agrees_with_oracle(f"short_conv__{name}", f)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_rms_norm(activation):
  def f(i):
    norm = L.GatedRMSNorm(8, activation, param_dtype=jnp.float64)
    norm.weight[...] = i["weight"]
    return {"y": norm(i["x"], i["g"])}

  agrees_with_oracle(f"rmsnorm_gated__{activation}", f)


@pytest.mark.usefixtures("x64")
def test_l2_normalize():
  agrees_with_oracle("l2norm__basic", lambda i: {"y": l2_normalize(i["x"])})


@pytest.mark.usefixtures("x64")
def test_softplus_decay():
  agrees_with_oracle(
    "gdn_gate__basic", lambda i: {"y": parameters.softplus_decay(i["g"], i["A_log"], i["dt_bias"])}
  )
  by_channel = lambda i: (i["g"], i["A_log"][:, None], i["dt_bias"].reshape(3, 8))
  agrees_with_oracle("kda_gate__basic", lambda i: {"y": parameters.softplus_decay(*by_channel(i))})
  agrees_with_oracle(
    "kda_lowerbound_gate__basic", lambda i: {"y": parameters.bounded_decay(*by_channel(i), -5.0)}
  )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["T17", "T70_extreme"])
def test_mamba2_ssd(name):
  def f(i):
    (_, _, H, P), N = i["x"].shape, i["Bm"].shape[-1]
    layer = L.Mamba2(4, H, P, state_dim=N, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.A_log[...], layer.dt_bias[...], layer.D[...] = i["A_log"], i["dt_bias"], i["D"]
    heads = lambda x: x[:, :, None]
    documents = follow(None, i["x"].shape[:2], None)
    o, state = layer.ssd(i["x"], heads(i["Bm"]), heads(i["Cm"]), i["dt"], i.get("h0"), documents)
    return {"o": o, "ht": state}

  agrees_with_oracle(f"mamba2_ssd__{name}", f)


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 5e6])
def test_rotation_is_exact_far_out(theta):
  """Phases of float32 products were off by 5e-6 turns at 4,000 and 1e-3 at a million."""
  x = np.random.default_rng(0).normal(size=(1, 6, 1, 64)).astype(np.float32)
  rotate = quick_jit(lambda x, position: parameters.rotate(x, position, theta))
  for start in (0, 4_000, 1_000_000, 2**31 - 6):
    position = start + np.arange(6)
    angle = position[:, None].astype(np.longdouble) * np.longdouble(theta) ** (-np.arange(32) / 32)
    turn = np.exp(1j * np.asarray(angle % (2 * np.longdouble(np.pi)), np.float64))
    want = (x[0, :, 0, :32] + 1j * x[0, :, 0, 32:]) * turn
    got = np.asarray(rotate(x, position[None].astype(np.int32)), np.float64)[0, :, 0]
    # Frequencies have the 53 bits of a float64: at 2^31 that is 3e-7 turns.
    assert relative_rms(got, np.concatenate([want.real, want.imag], axis=1)) < (
      1e-7 if start <= 1_000_000 else 2e-6
    )
  np.testing.assert_array_equal(rotate(x, np.zeros((1, 6), np.int32)), x)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_norm_of_large_half_precision_inputs(activation):
  """The mean square of float16 inputs of 1,000 is beyond float16; bfloat16 is right to one
  rounding.
  """
  norm = L.GatedRMSNorm(8, activation)
  x = np.random.default_rng(0).normal(size=(5, 8))
  for dtype, size in [(jnp.float16, 1e3), (jnp.float16, 2e4), (jnp.bfloat16, 1e18)]:
    given = jnp.asarray(size * x, dtype)
    wide = np.asarray(given, np.float64)
    for gate in (None, jnp.asarray(x, dtype)):
      want = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
      if gate is not None:
        g = np.asarray(gate, np.float64)
        want = want / (1 + np.exp(-g)) * (g if activation == "swish" else 1)
      got = np.asarray(norm(given, gate), np.float64)
      assert (np.abs(got - want) <= jnp.finfo(dtype).eps * np.abs(want)).all()


# --- the cache of short convolutions --------------------------------------------------------------


def test_the_cache_holds_the_last_tokens_of_the_document():
  """Exactly: of rows with padding, of a document shorter than the cache, of one that an earlier
  call began.
  """
  W, x = 4, np.random.default_rng(0).normal(size=(5, 6, D)).astype(np.float32)
  old = np.random.default_rng(1).normal(size=(5, W - 1, D)).astype(np.float32)
  ids = np.array(
    [[0] * 6, [0, 0, -1, 0, -1, -1], [0, 0, 0, 0, 1, 1], [1, -1, -1, -1, -1, -1], [-1] * 6],
    np.int32,
  )
  graph, params = abstract(Case("", functools.partial(L.ShortConv, D, W)))
  state = L.LayerState(None, old, np.zeros(5, np.int32), np.full(5, 9, np.int32))
  call = quick_jit(lambda p, x, state, ids: nnx.merge(graph, p)(x, state, segment_ids=ids))
  _, packed = call(values(params), x, state, ids)
  _, whole = call(values(params), x, state, None)
  zero = np.zeros((W - 1, D), np.float32)
  want = [
    x[0, 3:],
    x[1, [0, 1, 3]],
    np.stack([zero[0], x[2, 4], x[2, 5]]),
    np.stack([zero[0], zero[0], x[3, 0]]),
    old[4],
  ]
  np.testing.assert_array_equal(packed.conv, np.stack(want))
  np.testing.assert_array_equal(whole.conv, x[:, 3:])


def test_calls_shorter_than_the_cache_keep_its_newer_part():
  """One token and two at a time: a stale row would be read by the next call."""
  W, x = 5, np.random.default_rng(0).normal(size=(2, 7, D)).astype(np.float32)
  graph, params = abstract(Case("", functools.partial(L.ShortConv, D, W)))
  params = values(params)
  call = quick_jit(lambda p, x, state, ids: nnx.merge(graph, p)(x, state, segment_ids=ids))
  want, end = call(params, x, None, None)
  for ids in (None, np.zeros((2, 7), np.int32)):
    state, outputs = nnx.merge(graph, params).init_state(2), []
    for start, stop in [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7)]:
      piece = None if ids is None else ids[:, start:stop]
      y, state = call(params, x[:, start:stop], state, piece)
      outputs.append(y)
      seen = np.concatenate([np.zeros((2, W - 1, D), np.float32), x[:, :stop]], axis=1)
      np.testing.assert_array_equal(state.conv, seen[:, stop:])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.conv, end.conv)


# --- parameters in half precision -----------------------------------------------------------------


@every_layer
def test_gates_are_computed_in_float32_from_any_parameters(case):
  """Parameters cast to bfloat16 after construction are widened before exp, softplus and sigmoid."""
  graph, params = abstract(case)
  params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
  x = jax.ShapeDtypeStruct((2, 3, D), jnp.float32)
  jaxpr = jax.make_jaxpr(lambda p, x: nnx.merge(graph, p)(x)[0])(params, x)
  assert not narrow_functions(jaxpr.jaxpr)


FUNCTIONS = ("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "rsqrt", "sqrt")


def narrow_functions(jaxpr) -> list:
  """The equations of a program that compute such a function in half precision."""
  found = [
    eqn
    for eqn in jaxpr.eqns
    if eqn.primitive.name in FUNCTIONS and eqn.outvars[0].aval.dtype.itemsize == 2
  ]
  return sum((narrow_functions(inner) for e in jaxpr.eqns for inner in programs_inside(e)), found)


def test_initial_values():
  @quick_jit
  def drawn(key):
    A_log = parameters.log_uniform_rate(key, (4000,), 0.0, 16.0, jnp.float32)
    return jax.nn.softplus(parameters.step_bias(key, (4000,), jnp.float32)), A_log

  dt, A_log = map(np.asarray, drawn(jax.random.key(0)))
  assert dt.min() >= 0.999e-3
  assert dt.max() <= 1.001e-1
  assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.1
  assert np.isfinite(A_log).all()
  assert abs(np.exp(A_log).mean() - 8) < 0.4


# --- documents ------------------------------------------------------------------------------------


def test_documents_follow_the_state():
  state = LayerState(None, None, jnp.array([-1, 5, 5, 5]), jnp.array([3, 3, 3, 3]))
  ids = jnp.array([[5, 5, -1, 5, 7], [-1, 5, 7, 7, 5], [7, -1, -1, 7, 5], [-1, -1, -1, -1, -1]])
  d = quick_jit(lambda state, ids: follow(state, ids.shape, ids))(state, ids)
  np.testing.assert_array_equal(
    d.ids, [[0, 0, -1, 0, 1], [-1, 0, 1, 1, 2], [1, -1, -1, 1, 2], [-1] * 5]
  )
  np.testing.assert_array_equal(
    np.where(ids < 0, 0, d.position), [[3, 4, 0, 5, 0], [0, 3, 0, 1, 0], [0, 0, 0, 1, 0], [0] * 5]
  )
  np.testing.assert_array_equal(d.continues, [True, True, False, True])
  np.testing.assert_array_equal(d.carried, [3, 3, 0, 3])
  np.testing.assert_array_equal(d.segment, [7, 5, 5, 5])
  np.testing.assert_array_equal(d.length, [1, 1, 1, 3])


# --- every layer ----------------------------------------------------------------------------------


same = lambda call: call
rows = lambda call: jax.vmap(
  lambda p, row: (jax.checkpoint(call)(p, row[None])[0][0], None), in_axes=(None, 0)
)


def tokens(length, dtype):
  return np.random.default_rng(0).normal(size=(B, length, D)).astype(np.float32).astype(dtype)


def drawn(case, dtype):
  """A layer's call of (parameters, x) and its parameters, which are float32 in any dtype."""
  graph, params = abstract(case, **({} if dtype == "float32" else {"dtype": dtype}))
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
  return lambda p, x: nnx.merge(graph, p)(x), values(params)


@functools.cache
def results(case, dtype, transform=same):
  """The output, the state's memory and the parameters' gradients of a loss: of a plain case in the form that users run, over
  two chunks; of the others in the form that compiles fastest."""
  call, params = drawn(case if case.plain else case.in_form("recurrent"), dtype)
  call = transform(
    lambda p, x, call=call: (lambda y, state: (y, getattr(state, "memory", None)))(*call(p, x))
  )

  def loss(params, x):
    y, memory = call(params, x)
    return (y.astype(jnp.float32) ** 2).sum(), (y, memory)

  run = quick_jit(jax.grad(loss, has_aux=True))
  gradients, (y, memory) = run(params, tokens(70 if case.plain else 9, dtype))
  return y, memory, gradients


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, id=case.name, marks=() if case.name in SOME else pytest.mark.slow)
    for case in EACH
  ],
)
def test_bfloat16(case):
  """In the recurrent form, of nine tokens."""

  def forward(dtype):
    call, params = drawn(case.in_form("recurrent"), dtype)
    y, state = quick_jit(call)(params, tokens(9, dtype))
    return y, state.memory

  run = forward if case.plain else lambda dtype: results(case, dtype)[:2]
  (y, memory), (exact, _) = run("bfloat16"), run("float32")
  assert y.dtype == jnp.bfloat16
  # Not the first tokens: where q . k is near 0, a norm turns a small error of it into a change of
  # sign.
  assert relative_rms(y[:, 3:].astype(np.float32), exact[:, 3:]) < 3e-2
  if not issubclass(case.layer.func, CachedMixer):  # its keys and values are kept as they are
    assert all(s.dtype == jnp.float32 for s in jax.tree.leaves(memory))


@pytest.mark.slow
@each_class
def test_transformations(case):
  """grad under jit, with remat under a vmap over the batch the same; no gradient is zero or
  infinite, in bfloat16 neither.
  """
  want, got, half = (
    results(case, *how)[2] for how in (("float32",), ("float32", rows), ("bfloat16",))
  )
  for (path, g), h, b in zip(
    jax.tree.leaves_with_path(want), jax.tree.leaves(got), jax.tree.leaves(half), strict=True
  ):
    constant = path[0].key == "projection"  # of random features
    assert constant or np.any(g), path
    assert constant or np.any(b), path
    assert np.isfinite(b).all(), path
    assert relative_rms(h, g) <= BUDGET["float32"]["gate"], path


@each_class
def test_to_linen(case):
  make = case.in_form("recurrent").layer
  module = nnx.bridge.to_linen(make.func, *make.args, **make.keywords)
  x = jnp.ones((1, 2, D))
  variables = jax.eval_shape(module.init, jax.random.key(0), x)
  variables = jax.tree.map(lambda p: 0.1 * np.ones(p.shape, p.dtype), variables)
  y, state = quick_jit(module.apply)(variables, x)
  again, _ = jax.eval_shape(module.apply, variables, x, state)
  assert isinstance(module, flax.linen.Module)
  assert y.shape == again.shape == x.shape
  assert jnp.isfinite(y).all()


@each_class
@pytest.mark.parametrize("kernels", [False, True])
def test_an_empty_batch(case, kernels, monkeypatch):
  """Has an empty output and state, where kernels would compute too."""
  monkeypatch.setattr(launch, "_on_supported_gpu", lambda: kernels)
  graph, params = nnx.split(nnx.eval_shape(case.make))
  x = jax.ShapeDtypeStruct((0, 5, D), jnp.float32)
  y, state = jax.eval_shape(lambda p, x: nnx.merge(graph, p)(x), params, x)
  assert y.shape == x.shape
  if state is not None:
    y, _ = jax.eval_shape(lambda p, x, state: nnx.merge(graph, p)(x, state), params, x, state)
    assert y.shape == x.shape


def test_every_layer_is_in_the_table():
  layers = {getattr(L, name) for name in L.__all__ if hasattr(getattr(L, name), "init_state")} - {
    L.Mixer
  }
  assert layers == {case.layer.func for case in CASES}


# --- the cache of softmax attention ---------------------------------------------------------------


def test_full_cache():
  graph, params = abstract(Case("", functools.partial(L.SoftmaxAttention, D, 2, 8, max_length=4)))
  layer, x = nnx.merge(graph, values(params)), jnp.ones((2, 3, D))
  call = quick_jit(lambda x, s: layer(x, s))
  _, state = call(x, layer.init_state(2))
  with pytest.raises(
    ValueError,
    match=r"cache of 4 tokens is full: a document would have 6.*init_state\(batch, max_length=6\)",
  ):
    layer(x, state)
  y, _ = call(x, state)  # here the length cannot be seen
  np.testing.assert_array_equal(np.isnan(y).any(axis=-1), [[False, True, True]] * 2)


def test_cache_grows_by_choice_only():
  layer = L.SoftmaxAttention(D, 2, 8, max_length=4, rngs=nnx.Rngs(0))
  room = lambda state: state.memory[0].shape[1]
  after = lambda layer: room(
    jax.eval_shape(lambda x: layer(x), jax.ShapeDtypeStruct((2, 6, D), jnp.float32))[1]
  )
  assert room(layer.init_state(2)) == 4
  assert room(layer.init_state(2, max_length=9)) == 9
  assert after(layer) == 6
  windowed = L.SoftmaxAttention(D, 2, 8, window=3, rngs=nnx.Rngs(0))
  assert room(windowed.init_state(2)) == 3
  assert after(windowed) == 3
