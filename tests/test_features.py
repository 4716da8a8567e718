"""Features, gates and bounds of layers, each against what its paper promises of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx
from layer_cases import Case, D, abstract, values

import lajax.layers as L
from lajax.layers.features import dpfp, favor_features, orthogonal_projection, squares
from lajax.layers.hgrn import forget_gate
from lajax.layers.state import follow
from lajax.recurrence.running import running_maximum


def drawn(kind, *sizes, **options):
  """The graph of a layer and parameters for it, without the time to compile initial values."""
  graph, params = abstract(
    Case(kind.__name__, functools.partial(kind, D, *sizes, impl="recurrent", **options))
  )
  return graph, values(params)


def called(graph, params, x, state=None, segment_ids=None):
  call = lambda params, x, state, ids: nnx.merge(graph, params)(x, state, segment_ids=ids)
  return quick_jit(call)(params, x, state, segment_ids)


# --- Performer ------------------------------------------------------------------------------------


def test_favor_features_estimate_the_softmax_kernel_without_bias():
  """The mean over 20,000 draws is within four of its standard errors of exp(q .

  k / sqrt K), and orthogonality helps.
  """
  K, M, draws = 8, 16, 20_000
  q, k = 0.5 * np.random.default_rng(0).normal(size=(2, 6, K)).astype(np.float32)

  @quick_jit
  def estimates(keys):
    phi = lambda x, projections: jnp.exp(jax.vmap(lambda w: favor_features(x, w))(projections))
    estimate = lambda projections: (phi(q, projections) * phi(k, projections)).sum(-1)
    orthogonal = jax.vmap(lambda key: orthogonal_projection(key, K, M))(keys)
    return estimate(orthogonal), estimate(jax.random.normal(keys[0], (draws, K, M)))

  drawn, independent = (
    np.asarray(x, np.float64) for x in estimates(jax.random.split(jax.random.key(0), draws))
  )
  want = np.exp((q * k).sum(-1) / K**0.5)
  error = drawn.mean(0) - want
  assert (np.abs(error) < 4 * drawn.std(0) / draws**0.5).all(), error
  assert (np.abs(error) < 0.01 * want).all(), error
  assert drawn.std(0).mean() < independent.std(0).mean()


@pytest.mark.parametrize(("K", "M"), [(8, 20), (5, 3)])
def test_directions_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors(K, M):
  draws = quick_jit(jax.vmap(lambda key: orthogonal_projection(key, K, M)))
  many = np.asarray(draws(jax.random.split(jax.random.key(1), 4000)), np.float64)
  w = many[0]
  assert w.shape == (K, M)
  for start in range(0, M, K):
    block = w[:, start : start + K]
    norms = np.linalg.norm(block, axis=0)
    np.testing.assert_allclose(
      block.T @ block / np.outer(norms, norms), np.eye(block.shape[1]), atol=1e-6
    )
  np.testing.assert_allclose(
    (many**2).sum(1).mean(), K, rtol=0.03
  )  # chi-squared: mean K, variance 2 K
  np.testing.assert_allclose((many**2).sum(1).var(), 2 * K, rtol=0.1)
  np.testing.assert_allclose(many.mean(0), 0, atol=0.1)  # no direction is preferred
  np.testing.assert_allclose(
    np.einsum("nkm,nlm->kl", many, many) / many.shape[0] / M, np.eye(K), atol=0.1
  )


def test_performer_redraws_and_keeps_its_directions_out_of_the_parameters():
  make = lambda: L.Performer(D, 2, 8, num_features=12, rngs=nnx.Rngs(0))
  _, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
  assert {path[0] for path in nnx.to_flat_state(params).paths} == {"in_proj", "out_proj"}
  assert list(nnx.to_flat_state(rest).paths) == [("projection",)]

  @quick_jit
  def draws(key):
    layer = make()
    found = [layer.projection[...]]
    for _ in range(2):
      layer.redraw(nnx.Rngs(key))
      found.append(layer.projection[...])
    return found

  before, after, again = map(np.asarray, draws(jax.random.key(1)))
  assert after.shape == before.shape
  assert np.abs(np.corrcoef(after.ravel(), before.ravel())[0, 1]) < 0.5
  np.testing.assert_array_equal(again, after)


@pytest.mark.usefixtures("x64")
def test_performer_does_not_underflow():
  """Keys so long that all features are below e^-150: relative to the largest so far, they still
  weigh.
  """
  graph, params = drawn(L.Performer, 1, 8, num_features=16, param_dtype=jnp.float64)
  k_proj = params["in_proj"]["k"]
  k_proj["kernel"] = k_proj["kernel"].replace(40 * np.asarray(k_proj["kernel"]))
  layer = nnx.merge(graph, params)
  x = np.random.default_rng(0).normal(size=(1, 9, D))
  q, k, v = (x[0] @ np.asarray(layer.in_proj[name].kernel) for name in "qkv")
  projection = params["projection"][...]
  log_q, log_k = (
    np.asarray(favor_features(q, projection)),
    np.asarray(favor_features(k, projection)),
  )
  assert log_k.max() < -150
  want = np.zeros((9, 8))
  for t in range(9):
    scores = log_q[t] + log_k[: t + 1]
    e = np.exp(scores - scores.max()).sum(axis=1)
    want[t] = e @ v[: t + 1] / e.sum()
  y, _ = called(graph, params, x)
  want = want @ np.asarray(layer.out_proj.kernel)
  assert relative_rms(y[0], want) < BUDGET["float64"]["value"]


# --- polynomials, positions -----------------------------------------------------------------------


def test_squares_are_the_squared_product():
  q, k = np.random.default_rng(0).normal(size=(2, 7, 5)).astype(np.float32)
  assert squares(q).shape == (7, 15)
  np.testing.assert_allclose((squares(q) * squares(k)).sum(-1), (q * k).sum(-1) ** 2 / 5, rtol=1e-4)


def test_cosformer_stops_at_its_maximum_length():
  graph, params = drawn(L.CosFormer, 2, 8, max_length=4)
  layer = nnx.merge(graph, params)
  x = np.random.default_rng(0).normal(size=(1, 5, D)).astype(np.float32)
  remedy = r"at most max_length = 4 tokens; got 5.*max_length=5 or more"
  with pytest.raises(ValueError, match=remedy):
    layer(x)
  with pytest.raises(ValueError, match=remedy):
    layer(x[:, :1], layer.init_state(1)._replace(length=jnp.array([4])))
  y, _ = called(graph, params, x)  # under jit
  assert np.isfinite(y[:, :4]).all()
  assert np.isnan(y[:, 4]).all()
  y, _ = called(
    graph,
    params,
    np.concatenate([x, x], axis=1),
    segment_ids=np.array([[0] * 4 + [1] * 4 + [-1] * 2]),
  )
  assert np.isfinite(y).all()


# --- HGRN -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_lower_bounds_grow_from_zero_to_below_one():
  logits = np.random.default_rng(0).normal(size=(5, 3))
  bounds = np.asarray(L.hgrn_lower_bounds(jnp.asarray(logits)))
  share = np.exp(logits) / np.exp(logits).sum(0)
  np.testing.assert_allclose(bounds, np.cumsum(share, axis=0) - share[0], atol=1e-15)
  assert not bounds[0].any()
  assert (np.diff(bounds, axis=0) > 0).all()
  assert (bounds < 1).all()


def test_forget_gate_is_exact_at_both_ends():
  """Against float64: gates next to 1 keep their distance from it, and the gradient of a gate that
  forgets all is finite.
  """
  f = np.array([-200.0, -70, -30, -1, 0, 1e-3, 5, 20, 90], np.float32)

  @quick_jit
  def gates_and_slopes(f, bound):
    slope = jax.vmap(jax.grad(lambda f: forget_gate(f, bound)[0]))
    return (
      *forget_gate(f, bound),
      slope(f),
      jax.grad(lambda bound: forget_gate(jnp.float32(2), bound)[0])(bound),
    )

  for bound in (0.0, 0.3):
    g, forgets, slope, by_bound = gates_and_slopes(f, bound)
    keep = bound + (1 - bound) / (1 + np.exp(-np.maximum(f, -80.0).astype(np.float64)))
    miss = (1 - bound) * np.exp(-np.logaddexp(0, f.astype(np.float64)))
    np.testing.assert_allclose(forgets, miss, rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(
      g, np.where(f > 0, np.log1p(-np.minimum(miss, 0.9)), np.log(keep)), rtol=1e-5, atol=1e-38
    )
    exact = (
      (1 - bound)
      * np.exp(-np.logaddexp(0, f.astype(np.float64)) - np.logaddexp(0, -f.astype(np.float64)))
      / keep
    )
    np.testing.assert_allclose(slope, np.where(f < -80, 0, exact), rtol=1e-5, atol=1e-38)
    keep = bound + (1 - bound) / (1 + np.exp(-2.0))
    np.testing.assert_allclose(by_bound, (1 - 1 / (1 + np.exp(-2.0))) / keep, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [L.HGRN, L.HGRN2], ids=lambda kind: kind.__name__)
def test_learned_lower_bounds(kind):
  """A number and an array of it are the same; a model that trains logits hands the bounds to its
  layers in each call.
  """
  options, shape = (
    ({"width": 16}, (16,)) if kind is L.HGRN else ({"num_heads": 2, "head_dim": 8}, (2, 8))
  )
  make = lambda lower_bound: kind(
    D, **options, lower_bound=lower_bound, impl="recurrent", rngs=nnx.Rngs(0)
  )
  x = np.random.default_rng(0).normal(size=(1, 5, D)).astype(np.float32)

  class Model(nnx.Module):
    def __init__(self):
      self.logits = nnx.Param(jnp.zeros((3, *shape)))
      self.layers = nnx.List([make(lower_bound=jnp.zeros(shape)) for _ in range(3)])

    def __call__(self, x):
      for layer, bound in zip(self.layers, L.hgrn_lower_bounds(self.logits[...]), strict=True):
        layer.lower_bound[...] = bound
        x = x + layer(x)[0]
      return x

  @quick_jit
  def gradient(x):
    model = Model()
    fixed = [make(lower_bound=bound) for bound in (0.0, 1 / 3, 2 / 3)]
    want = functools.reduce(lambda x, layer: x + layer(x)[0], fixed, x)
    return model(x), want, nnx.grad(lambda model: (model(x) ** 2).sum())(model)["logits"][...]

  got, want, d = gradient(x)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  assert np.isfinite(d).all()
  assert (np.abs(d).max(axis=tuple(range(1, d.ndim))) > 0).all()
  for wrong in (1.0, -0.1):
    with pytest.raises(ValueError, match=r"`lower_bound` must be in \[0, 1\)"):
      make(lower_bound=wrong)
  with pytest.raises(ValueError, match="`lower_bound` must be"):
    make(lower_bound=jnp.zeros(3))


# --- Lightning ------------------------------------------------------------------------------------


def test_lightning_forgets_less_in_later_layers():
  kept = []
  for layer_index in range(4):
    layer = L.Lightning(D, 4, 4, layer_index=layer_index, num_layers=4, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    state = nnx.merge(graph, params).init_state(1)._replace(memory=jnp.ones((1, 4, 4, 4)))
    _, state = called(graph, params, np.zeros((1, 1, D), np.float32), state)
    kept.append(np.asarray(state.memory)[0, :, 0, 0])
  assert all((after > before).all() for before, after in itertools.pairwise(kept))
  np.testing.assert_allclose(-np.log(kept[0]), 2.0 ** -np.arange(2, 10, 2) * (1 + 1e-5), rtol=1e-4)
  with pytest.raises(ValueError, match=r"`layer_index` must be in 0 .. num_layers - 1 = 3; got 4"):
    L.Lightning(D, layer_index=4, num_layers=4, rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind", [L.Performer, L.CosFormer, L.Based, L.ReBased, L.Hedgehog], ids=lambda kind: kind.__name__
)
def test_half_precision(kind):
  graph, params = drawn(kind, 2, 4)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, D)), jnp.bfloat16)
  want, _ = called(graph, params, x.astype(jnp.float32))
  half, _ = drawn(kind, 2, 4, dtype=jnp.bfloat16)
  y, _ = called(half, params, x)
  assert y.dtype == jnp.bfloat16
  assert (
    relative_rms(y, want) < 10 * BUDGET["bfloat16"]["value"]
  )  # projections and features are rounded too


def test_dpfp_multiplies_neighbours_of_the_rectified_halves():
  x = np.array([[1.0, -2.0, 3.0]], np.float32)
  r = [1, 0, 3, 0, 2, 0]
  want = [r[i] * r[i - 1] for i in range(6)]
  np.testing.assert_array_equal(dpfp(x)[0], want)
  np.testing.assert_array_equal(dpfp(x, nu=2)[0, 6:], [r[i] * r[i - 2] for i in range(6)])
  y, state = quick_jit(
    lambda x: L.LinearAttention(8, 2, 4, feature_map="dpfp", rngs=nnx.Rngs(0))(x)
  )(jnp.ones((1, 3, 8)))
  assert y.shape == (1, 3, 8)
  assert state.memory[0].shape == (1, 2, 8, 4)


def test_performer_with_one_token_gives_its_value():
  """Whatever q and k are: also where their features are large in other places, and z .

  phi(q) is small.
  """
  rng = np.random.default_rng(0)

  @quick_jit
  def mixed(q, v):
    layer = L.Performer(16, 1, 16, num_features=64, impl="recurrent", rngs=nnx.Rngs(0))
    return layer.mix({"q": q, "k": -q, "v": v}, None, follow(None, (8, 1), None))[0]

  q = jnp.asarray(4 * rng.standard_normal((8, 1, 1, 16)), jnp.float32)
  v = jnp.asarray(rng.standard_normal((8, 1, 1, 16)), jnp.float32)
  np.testing.assert_allclose(mixed(q, v), v, rtol=1e-5, atol=1e-6)


# --- half precision -------------------------------------------------------------------------------


def test_elu_plus_one_has_no_cancellation():
  """elu(x) + 1 gave 0 at -8 in bfloat16, 3 % too little at -15 in float32, and 0 below -17."""
  phi = L.FEATURE_MAPS["elu+1"]
  at = lambda x, dtype: float(phi(jnp.array([[x]], dtype))[0, 0])
  assert at(-8, jnp.bfloat16) == pytest.approx(3.355e-4, rel=4e-3)
  x = np.array([-80, -20, -15, -8, -1, -1e-3, 0, 1e-3, 5], np.float32)
  want = np.where(x >= 0, x.astype(np.float64) + 1, np.exp(np.minimum(x, 0).astype(np.float64)))
  np.testing.assert_allclose(phi(x[None])[0], want, rtol=3e-7)
  slope = jax.vmap(jax.grad(lambda x: phi(x[None])[0]))(x)
  np.testing.assert_allclose(slope, np.where(x >= 0, 1, want), rtol=3e-7)


@pytest.mark.parametrize("name", [n for n in L.FEATURE_MAPS if n not in ("relu", "identity")])
def test_maps_round_once(name):
  """A map of bfloat16 is that of the same numbers in float32, rounded; layers do not even round it."""
  phi = L.FEATURE_MAPS[name]
  x = jnp.asarray(np.random.default_rng(0).normal(-4, 2, size=(5, 6)), jnp.bfloat16)
  wide = phi(x.astype(jnp.float32))
  np.testing.assert_array_equal(phi(x), wide.astype(jnp.bfloat16))
  layer = nnx.eval_shape(
    lambda: L.LinearAttention(D, 2, 6, feature_map=name, normalize=False, rngs=nnx.Rngs(0))
  )
  seen = layer.features(x, x, None)[0]
  assert seen.dtype == jnp.float32
  np.testing.assert_array_equal(seen, wide)


def test_a_map_of_the_user_gets_float32():
  given = []
  phi = lambda x: given.append(x.dtype) or jnp.exp(x)
  make = lambda: L.LinearAttention(D, 2, 4, feature_map=phi, rngs=nnx.Rngs(0))
  layer = nnx.eval_shape(make)
  layer.features(*jnp.ones((2, 1, 2, 2, 4), jnp.bfloat16), None)
  assert given
  assert set(given) == {jnp.dtype(jnp.float32)}


@quick_jit
def one_layer_in_bfloat16(q, k, v):
  """The mixer's outputs and <o, 1>'s gradient of q = k, of features elu + 1 with one head."""
  layer = L.LinearAttention(8, 1, q.shape[-1], impl="recurrent", rngs=nnx.Rngs(0))
  mix = lambda q, k: layer.mix({"q": q, "k": k, "v": v}, None, follow(None, q.shape[:2], None))[0]
  return mix(q, k), jax.grad(lambda x: mix(x, x).astype(jnp.float32).sum())(q)


def test_a_token_that_reads_itself_with_small_features():
  """o = phi^2 / (phi^2 + 1e-10), with phi = e^-8: not 0."""
  x = jnp.full((1, 1, 1, 1), -8, jnp.bfloat16)
  o, slope = one_layer_in_bfloat16(x, x, jnp.ones_like(x))
  assert float(o[0, 0, 0, 0]) == pytest.approx(0.99911, rel=4e-3)
  assert float(slope[0, 0, 0, 0]) == pytest.approx(1.77e-3, rel=1e-2)


@pytest.mark.parametrize("mean", [-4, -6])
def test_tokens_with_small_features_keep_the_budget(mean):
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 1, 200, 1, 16)) + np.array([mean, mean, 0]).reshape(3, 1, 1, 1, 1)
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
  o, _ = one_layer_in_bfloat16(q, k, v)
  q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v))
  phi = lambda x: np.where(x >= 0, x + 1, np.exp(np.minimum(x, 0)))
  weights = np.tril(phi(q) @ phi(k).T)
  want = weights @ v / (weights.sum(1, keepdims=True) + 1e-10)
  assert relative_rms(np.asarray(o, np.float64)[0, :, 0], want) < BUDGET["bfloat16"]["value"]


# --- Performer far out ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32])
def test_performer_far_out(size):
  """The log-sum-exp average of the same features: one maximum for all of them gave errors of .18
  and .71.
  """
  K, M, T = 16, 32, 24
  rng = np.random.default_rng(0)
  q, k = size * rng.normal(size=(2, 1, T, 1, K)).astype(np.float32)
  v = rng.normal(size=(1, T, 1, K)).astype(np.float32)

  @quick_jit
  def mixed(q, k, v):
    layer = L.Performer(8, 1, K, num_features=M, impl="chunked", rngs=nnx.Rngs(0))
    o, _ = layer.mix({"q": q, "k": k, "v": v}, None, follow(None, (1, T), None))
    return o, layer.features(q, k, None)

  o, (log_q, log_k) = mixed(q, k, v)
  log_q, log_k = (np.asarray(x, np.float64)[0, :, 0] for x in (log_q, log_k))
  want = np.zeros((T, K))
  for t in range(T):
    scores = np.logaddexp.reduce(log_q[t] + log_k[: t + 1], axis=1)
    weights = np.exp(scores - scores.max())
    want[t] = weights @ v[0, : t + 1, 0] / weights.sum()
  # Exponents of some thousands, in float32, are exact to 2e-4.
  assert relative_rms(np.asarray(o)[0, :, 0], want) < 5e-4


# --- the running maximum of exponential features --------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_equal_keys_have_the_gradients_of_the_plain_equation():
  """Outputs do not depend on the maxima, so neither do gradients where two keys are equally large."""
  rng = np.random.default_rng(0)
  token, other = rng.normal(size=(2, D))
  x = jnp.asarray(np.stack([other, token, token, other, token])[None])
  weights = jnp.asarray(rng.normal(size=x.shape))
  graph, params = abstract(
    Case("exp", functools.partial(L.LinearAttention, D, 1, 4, feature_map="exp", impl="recurrent")),
    param_dtype=jnp.float64,
  )
  layer = nnx.merge(graph, values(params))

  def plain(x):
    q, k, v = (layer.in_proj[name](x) for name in "qkv")
    w = jnp.einsum("btf,bsf->bts", jnp.exp(q / 2), jnp.exp(k / 2)) * np.tri(5)[None]
    return layer.out_proj(jnp.einsum("bts,bsv->btv", w / w.sum(-1, keepdims=True), v))

  gradient = lambda f: quick_jit(jax.grad(lambda x: (f(x) * weights).sum()))(x)
  one_document = jnp.zeros((1, 5), jnp.int32)
  for ids in (None, one_document):
    got = gradient(lambda x, ids=ids: layer(x, segment_ids=ids)[0])
    assert relative_rms(got, gradient(plain)) <= BUDGET["float64"]["gradient"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_running_maximum_keeps_nan_in_its_document(bad):
  """Tried in the keys, the first maximum, and the cotangents of maxima and changes."""
  document = jnp.array([[0, 0, 1, 1, -1, 2, 2]])
  k = np.random.default_rng(0).normal(size=(1, 7, 1)).astype(np.float32)
  before, ones = np.zeros((1, 1), np.float32), np.ones_like(k)

  @quick_jit
  def run(k, before, dm, dg):
    f = lambda k, before: running_maximum(k, before, document, jnp.array([3]))
    found, back = jax.vjp(f, k, before)
    return *found, *back((dm, dg))

  arrays = [k, before, ones, ones]
  want = run(*arrays)
  for n, (at, own) in enumerate([(3, (2, 3, 4)), (0, (0, 1)), (3, (2, 3, 4)), (3, (2, 3, 4))]):
    changed = [x.copy() for x in arrays]
    changed[n][0, at] = bad
    others = np.setdiff1d(np.arange(7), own)
    for got, x in zip(run(*changed)[:3], want, strict=False):
      np.testing.assert_array_equal(got[0, others], x[0, others])
