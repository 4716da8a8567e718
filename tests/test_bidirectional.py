"""Linear attention over whole documents: the ops against plain quadratic forms in float64, and the
layers' laws.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx
from layer_cases import Case, D, abstract, values

import lajax
import lajax.layers as L

B, T, H, HV, K, V = 4, 45, 2, 4, 5, 3
IDS = np.stack(
  [
    np.zeros(T),
    np.repeat([0, 1, 2, 3], [1, 17, 20, 7]),
    np.repeat([-1, 3, -1, 3, 1, -1, 1, -1], [4, 9, 2, 5, 15, 1, 2, 7]),  # padding everywhere
    np.repeat([9, 2, 9], [15, 12, 18]),  # an id comes back: a document of its own
  ]
).astype(np.int32)
RUNS = np.array(IDS)
RUNS[3, 27:] = 10


def inputs(kind: str, dtype=np.float64):
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, B, T, H, K))
  v, do = rng.normal(size=(2, B, T, HV, V))
  if kind == "normalized":
    q, k = np.exp(q), np.exp(k)
  return tuple(jnp.asarray(x, dtype) for x in (q, k, v, do))


def same_document(runs) -> np.ndarray:
  """[B T T]: whether the tokens i and j are real and of one document."""
  return (runs[:, :, None] == runs[:, None, :]) & (runs >= 0)[:, None, :] & (runs >= 0)[:, :, None]


# --- the quadratic forms, as they are printed ---


def quadratic(kind: str, q, k, v, runs):
  seen = same_document(runs)[:, None]
  if kind == "softmax":
    q = jax.nn.softmax(q, axis=-1)
    e = jnp.where(seen[..., None], jnp.exp(k).transpose(0, 2, 1, 3)[:, :, None], 0)  # [B H i j K]
    rho = e / jnp.where(seen.any(-1)[..., None, None], e.sum(3, keepdims=True), 1)
    w = jnp.einsum("bihk,bhijk->bhij", q, rho)
  else:
    w = jnp.where(seen, jnp.einsum("bihk,bjhk->bhij", q, k), 0)
  if kind == "scaling":
    w = w / jnp.maximum(seen.sum(-1, keepdims=True), 1).astype(w.dtype)
  if kind == "normalized":
    w = w / (w.sum(-1, keepdims=True) + 1e-10)
  return jnp.einsum("bhij,bjhv->bihv", jnp.repeat(w, HV // H, axis=1), v)


def op(kind: str, q, k, v, ids):
  if kind == "normalized":
    return lajax.bidirectional_linear_attention(q, k, v, segment_ids=ids)
  return lajax.efficient_attention(q, k, v, normalization=kind, segment_ids=ids)


@functools.cache
def compiled(f, kind: str, packed: bool):
  def run(q, k, v, do, ids):
    o, pull = jax.vjp(lambda q, k, v: f(kind, q, k, v, ids if packed else None), q, k, v)
    return o, pull(do)

  return quick_jit(run)


KINDS = pytest.mark.parametrize("kind", ["softmax", "scaling", "normalized"])


@pytest.mark.usefixtures("x64")
@KINDS
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_op_is_its_quadratic_form(kind, packed):
  q, k, v, do = inputs(kind)
  runs = RUNS if packed else np.zeros_like(RUNS)

  def want(q, k, v, do):
    o, pull = jax.vjp(lambda q, k, v: quadratic(kind, q, k, v, runs), q, k, v)
    return o, pull(do)

  want_o, want_d = quick_jit(want)(q, k, v, do)
  if packed:  # what stands in padding is nobody's business
    hole = (IDS < 0)[..., None, None]
    q, k, v = (np.where(hole, np.nan, x) for x in (q, k, v))
    do = np.where(hole, 1e9, do)
  o, d = compiled(op, kind, packed)(q, k, v, do, IDS)
  assert relative_rms(o, want_o) <= 10 * BUDGET["float64"]["value"]  # sums of another order
  if packed:
    assert not np.where(hole, o, 0).any()
  for got, exact in zip(d, want_d, strict=True):
    assert relative_rms(got, exact) <= BUDGET["float64"]["gradient"]


@pytest.mark.usefixtures("x64")
def test_scaling_is_exactly_the_product_by_n():
  """The worked claim: with rho = 1 / sqrt n, O = Q K^T V / n."""
  q, k, v, _ = inputs("scaling")
  o = lajax.efficient_attention(q, k, v[:, :, :H], normalization="scaling")
  for b in range(B):
    for h in range(H):
      np.testing.assert_allclose(
        o[b, :, h], q[b, :, h] @ k[b, :, h].T @ v[b, :, h] / T, rtol=1e-12, atol=1e-14
      )


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(kind, dtype):
  q, k, v, do = inputs(kind, dtype)
  o, d = compiled(op, kind, True)(q, k, v, do, IDS)
  assert o.dtype == v.dtype
  wide = [np.asarray(x, np.float64) for x in (q, k, v, do)]
  with jax.enable_x64(True):
    want, exact = compiled(op, kind, True)(*wide, IDS)
  assert relative_rms(o, want) <= BUDGET[dtype]["value"]
  for a, b in zip(d, exact, strict=True):
    assert relative_rms(a, b) <= BUDGET[dtype]["gradient"]


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_one_channel_has_gradients_that_nearly_cancel(packed):
  """With K = 1 the weights of all tokens are those of the keys alone, but for eps: dq is of size eps.

  Formed as a difference of numerator and normalizer it is off by 4e-5 and more of itself.
  """
  q, k, v, do = (
    np.asarray(x[..., :1] if x.shape[-1] == K else x, np.float32)
    for x in inputs("normalized", np.float32)
  )

  def run(q, k, v, do):
    call = lambda *x: lajax.bidirectional_linear_attention(
      *x, eps=1e-3, segment_ids=IDS if packed else None
    )
    o, pull = jax.vjp(call, q, k, v)
    return o, *pull(do)

  o, *d = quick_jit(run)(q, k, v, do)
  with jax.enable_x64(True):
    exact = quick_jit(run)(*(np.asarray(x, np.float64) for x in (q, k, v, do)))
  assert relative_rms(o, exact[0]) <= BUDGET["float32"]["value"]
  for got, want in zip(d, exact[1:], strict=True):
    assert relative_rms(got, want) <= BUDGET["float32"]["gradient"]


@pytest.mark.usefixtures("x64")
def test_softmax_over_positions_does_not_overflow():
  q, k, v, do = inputs("softmax")
  far = compiled(op, "softmax", True)(q, k + 1000, v, do, IDS)[0]
  near = compiled(op, "softmax", True)(q, k, v, do, IDS)[0]
  assert relative_rms(far, near) < 1e-9


@KINDS
def test_memory_is_linear_in_the_tokens(kind):
  """No array of the program or its gradient has T x T numbers, however many documents there are."""
  length = 4096
  one = jnp.ones((1, length, 1, 4))
  ids = jnp.arange(length)[None] // 2
  f = lambda q, k, v: op(kind, q, k, v, ids).sum()
  text = str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1, 2)))(one, one, one))
  sizes = [
    math.prod(map(int, shape.split(","))) for shape in re.findall(r"[a-z]\w*\[([\d,]+)\]", text)
  ]
  assert max(sizes) < length**2 / 32
  assert max(sizes) >= 4 * length


def test_no_tokens():
  q, v = jnp.zeros((2, 0, 1, 4)), jnp.zeros((2, 0, 2, 3))
  assert lajax.efficient_attention(q, q, v).shape == (2, 0, 2, 3)
  assert lajax.bidirectional_linear_attention(q, q, v).shape == (2, 0, 2, 3)


def test_layers_refuse_unknown_options():
  with pytest.raises(ValueError, match="`normalization` must be one of"):
    L.EfficientAttention(D, normalization="none", rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="`feature_map` must be one of"):
    L.BidirectionalLinearAttention(D, feature_map="none", rngs=nnx.Rngs(0))


# --- layers ---

LAYERS = {
  "EfficientAttention": functools.partial(L.EfficientAttention, D, 2, 4, expand_v=1.5),
  "EfficientAttention-scaling": functools.partial(
    L.EfficientAttention, D, 2, 4, normalization="scaling"
  ),
  "BidirectionalLinearAttention": functools.partial(L.BidirectionalLinearAttention, D, 2, 4),
  "BidirectionalLinearAttention-exp": functools.partial(
    L.BidirectionalLinearAttention, D, 2, 4, feature_map="exp"
  ),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def layer(name):
  """A layer's parameters, and its call with gradients of <dy, y>, in float64."""
  graph, params = abstract(Case(name, LAYERS[name]), param_dtype=jnp.float64)

  def call(params, x, ids, dy):
    y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, segment_ids=ids), params, x)
    return y, *pull(dy)

  return values(params), quick_jit(call)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@EVERY_LAYER
def test_documents_are_independent_and_padding_is_inert(name):
  params, call = layer(name)
  x, dy = np.random.default_rng(1).normal(size=(2, B, T, D))
  hole = (IDS < 0)[..., None]
  y, dparams, dx = call(params, x, IDS, dy)
  same = call(params, np.where(hole, np.nan, x), IDS, np.where(hole, 1e9, dy))
  jax.tree.map(np.testing.assert_array_equal, same, (y, dparams, dx))
  assert not np.where(hole, y, 0).any()
  assert not np.where(hole, dx, 0).any()
  sum_y, sum_params, sum_dx = jax.tree.map(np.zeros_like, (y, dparams, dx))
  for run in np.unique(RUNS[RUNS >= 0]):
    part = call(params, x, np.where(run == RUNS, 0, -1).astype(np.int32), dy)
    sum_y, sum_dx = sum_y + part[0], sum_dx + part[2]
    sum_params = jax.tree.map(np.add, sum_params, part[1])
  assert relative_rms(sum_y, y) <= 10 * BUDGET["float64"]["value"]
  for got, want in zip(
    jax.tree.leaves((sum_params, sum_dx)), jax.tree.leaves((dparams, dx)), strict=True
  ):
    assert relative_rms(got, want) <= BUDGET["float64"]["gate"]
  whole = call(params, x, None, dy)
  one = call(params, x, np.zeros_like(IDS), dy)
  for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
    assert relative_rms(got, want) <= BUDGET["float64"]["gate"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["EfficientAttention", "BidirectionalLinearAttention-exp"])
def test_layer_is_its_equation(name):
  params, call = layer(name)
  x = np.random.default_rng(1).normal(size=(1, T, D))
  projected = {n: x[0] @ np.asarray(p["kernel"]) for n, p in params["in_proj"].items()}
  o = []
  for h in range(2):
    q, k, v = (np.split(projected[n], 2, axis=1)[h] for n in ("q", "k", "v"))
    if name == "EfficientAttention":
      rho_q, rho_k = np.exp(q) / np.exp(q).sum(1, keepdims=True), np.exp(k) / np.exp(k).sum(0)
      o.append(rho_q @ (rho_k.T @ v))
    else:
      w = np.exp(q / 2) @ np.exp(k / 2).T
      o.append(w @ v / w.sum(1, keepdims=True))
  want = np.concatenate(o, axis=1) @ np.asarray(params["out_proj"]["kernel"])
  y, *_ = call(params, x, None, np.zeros_like(x))
  assert relative_rms(y[0], want) <= 1e2 * BUDGET["float64"]["value"]


@EVERY_LAYER
def test_layer_in_half_precision_and_wrong_inputs(name):
  half = nnx.eval_shape(lambda: LAYERS[name](dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  graph, params = nnx.split(half)
  y = jax.eval_shape(
    lambda p, x: nnx.merge(graph, p)(x), params, jax.ShapeDtypeStruct((2, 3, D), jnp.bfloat16)
  )
  assert y.shape == (2, 3, D)
  assert y.dtype == jnp.bfloat16
  with pytest.raises(ValueError, match=rf"`x` must be \[B T D\] = \(2, 3, {D}\).*axis D differs"):
    half(jnp.ones((2, 3, 5)))
  with pytest.raises(ValueError, match=r"`segment_ids` must be \[B T\] = \(2, 3\)"):
    half(jnp.ones((2, 3, D)), segment_ids=jnp.ones((2, 4), jnp.int32))
