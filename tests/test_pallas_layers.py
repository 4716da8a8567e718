"""The kernels of the short convolution and of the gated norm: interpreted on a CPU, against the
layers in float64.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lajax.layers as L
from lajax import pallas
from lajax.layers.state import follow
from lajax.pallas.model import kernel_names


def run(graph, ids, arrays, cts):
  """Outputs, and gradients of the parameters and of the arrays: x and cache, or x and gate."""

  def f(params, *arrays):
    layer = nnx.merge(graph, params)
    if not isinstance(layer, L.ShortConv):
      return layer(*arrays)
    x, cache = arrays
    documents = follow(layer.init_state(x.shape[0])._replace(conv=cache), x.shape[:2], ids)
    return layer.convolve(documents.blank_padding(x), cache, documents)

  out, pull = jax.vjp(f, *arrays)
  return out, pull(jax.tree.map(lambda ct, x: ct.astype(x.dtype), cts, out))


@functools.cache
def compiled(graph):
  return cases.quick_jit(functools.partial(run, graph))


def misses(make, arrays, cts, ids=None, dtype="float32"):
  """Returns the errors of the kernels that miss the budget; parameters stay float32."""
  layer, like = make(impl="pallas"), make(impl="auto")
  rng = np.random.default_rng(1)
  graph, params = nnx.split(layer)
  params = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)
  round_off = lambda tree: jax.tree.map(lambda x: cases.rounded("x", x, dtype), tree)
  arrays, cts = round_off(arrays), round_off(cts)
  ids = None if ids is None else np.asarray(ids, np.int32)
  got = jax.device_get(compiled(graph)(ids, (params, *arrays), cts))
  with jax.enable_x64(True):
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    want = jax.device_get(
      compiled(nnx.split(like)[0])(ids, (wide(params), *wide(arrays)), wide(cts))
    )
  budget = cases.BUDGET[dtype]
  errors = [
    (cases.relative_rms(x, y), budget[kind])
    for kind, found, wanted in zip(("value", "gradient"), got, want, strict=True)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  ]
  return [error for error, allowed in errors if not error <= allowed]


# --- the short convolution ------------------------------------------------------------------------


def conv(width, **options):
  return functools.partial(L.ShortConv, 20, width, use_bias=width > 2, rngs=nnx.Rngs(0), **options)


def conv_arrays(T, W, B=10, D=20):
  rng = np.random.default_rng(T)
  draw = lambda *shape: rng.standard_normal(shape)
  return (draw(B, T, D), draw(B, W - 1, D)), (draw(B, T, D), draw(B, W - 1, D))


def ids_of(T):
  return np.stack([cases.layout(name, T) for name in (*cases.LAYOUTS, "one")])


@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True])
def test_short_conv(documents):
  """Outputs, outgoing cache, and gradients of input, cache, weight and bias; packed documents with
  padding anywhere.
  """
  assert not misses(conv(3), *conv_arrays(70, 3), ids_of(70) if documents else None)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("T", "width", "activation", "documents"),
  [
    (1, 4, "silu", True),
    (2, 4, "silu", False),
    (17, 3, None, True),
    (70, 1, None, True),
    (70, 4, "silu", False),
    (70, 8, "silu", True),
    (300, 2, "silu", False),
  ],
)
def test_short_conv_sizes(T, width, activation, documents):
  ids = ids_of(T) if documents else None
  assert not misses(conv(width, activation=activation), *conv_arrays(T, width), ids)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_short_conv_in_bfloat16(documents):
  make = conv(4, dtype=jnp.bfloat16)
  ids = ids_of(70) if documents else None
  arrays, cts = conv_arrays(70, 4)
  layer = make(impl="pallas")
  graph, params = nnx.split(layer)
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
  (y, cache), _ = compiled(graph)(ids, (params, *low), cts)
  assert y.dtype == cache.dtype == jnp.bfloat16
  wide = functools.partial(L.ShortConv, 20, 4, use_bias=True, rngs=nnx.Rngs(0))
  pick = lambda impl, **_: make(impl=impl) if impl == "pallas" else wide(impl=impl)
  assert not misses(pick, arrays, cts, ids, "bfloat16")


@pytest.mark.slow
def test_short_conv_in_many_tiles(monkeypatch):
  """Programs of several tiles of rows: at a length that no other test has, so nothing compiled is
  taken for it.
  """
  from lajax.pallas import short_conv

  monkeypatch.setattr(short_conv, "PROGRAMS", 1)
  assert not misses(conv(4), *conv_arrays(171, 4), ids_of(171))


def test_short_conv_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  x, cache = array(2, 64, 20), array(2, 3, 20)
  assert pallas.supports_short_conv(x, array(20, 8), cache) is None
  assert "W is 9" in pallas.supports_short_conv(x, array(20, 9), cache)
  assert "float64" in pallas.supports_short_conv(x, array(20, 4, dtype=jnp.float64), cache)
  assert "2^31 programs" in pallas.supports_short_conv(
    array(2**20, 2**14, 2**10), array(2**10, 4), cache
  )


def test_mixers_hand_their_implementation_to_the_convolutions():
  layer = nnx.eval_shape(lambda: L.GLA(16, 2, 8, conv_size=4, impl="pallas", rngs=nnx.Rngs(0)))
  assert layer.conv is not None
  assert {layer.conv[name].impl for name in "qkv"} == {"pallas"}


# --- the gated norm -------------------------------------------------------------------------------


def norm_arrays(*shape):
  rng = np.random.default_rng(shape[-1])
  return (rng.standard_normal(shape), rng.standard_normal(shape)), rng.standard_normal(shape)


@pytest.mark.parametrize(
  ("shape", "activation"), [((3, 7, 2, 20), "swish"), ((5, 128), "sigmoid"), ((2, 9, 300), "swish")]
)
def test_gated_norm(shape, activation):
  """Outputs, and gradients of input, gate and weight."""
  make = functools.partial(L.GatedRMSNorm, shape[-1], activation)
  assert not misses(make, *norm_arrays(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70, 16), (33, 257), (2, 5000), (1, 1)])
def test_norm_sizes(shape):
  make = functools.partial(L.GatedRMSNorm, shape[-1], eps=0.1)
  (x, gate), ct = norm_arrays(*shape)
  assert not misses(make, (x, gate), ct)
  assert not misses(make, (x,), ct)
  assert not misses(make, (x, gate), ct, None, "bfloat16")


@pytest.mark.slow
def test_norm_in_many_tiles(monkeypatch):
  """The same of the norm."""
  from lajax.pallas import norm

  monkeypatch.setattr(norm, "PROGRAMS", 2)
  assert not misses(functools.partial(L.GatedRMSNorm, 48), *norm_arrays(600, 48))


def test_norm_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  assert pallas.supports_gated_rms_norm(array(4, 8192), array(8192)) is None
  assert "D is 8193" in pallas.supports_gated_rms_norm(array(4, 8193), array(8193))
  assert "float64" in pallas.supports_gated_rms_norm(
    array(4, 8), array(8), array(4, 8, dtype=jnp.float64)
  )
  assert "more rows" in pallas.supports_gated_rms_norm(array(2**16, 2**15, 8), array(8))


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [L.ShortConv, L.GatedRMSNorm], ids=lambda layer: layer.__name__)
def test_one_launch_forward_and_one_backward(layer):
  if layer is L.ShortConv:
    make, (arrays, cts) = conv(4), conv_arrays(17, 4)
  else:
    make, (arrays, cts) = functools.partial(L.GatedRMSNorm, 20), norm_arrays(5, 20)
  graph, params = nnx.split(make(impl="pallas"))
  assert len(kernel_names(functools.partial(run, graph, None), (params, *arrays), cts)) == 2


def test_second_derivatives_are_refused_with_a_sentence():
  norm = L.GatedRMSNorm(4, impl="pallas")
  first = jax.grad(lambda x: norm(x).sum())
  with pytest.raises(NotImplementedError, match="first derivatives only"):
    jax.grad(lambda x: first(x).sum())(jnp.ones((2, 4)))


@pytest.mark.parametrize(
  "make",
  [lambda: L.ShortConv(4, impl="fast", rngs=nnx.Rngs(0)), lambda: L.GatedRMSNorm(4, impl="fast")],
)
def test_an_unknown_form_is_named(make):
  with pytest.raises(ValueError, match="`impl` must be one of"):
    make()
