"""Promises of Mamba, RG-LRU, forgetting attention and MLA besides the laws of all layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx
from layer_cases import Case, D, abstract, values
from test_layers_pieces import agrees_with_oracle

import lajax.layers as L
from lajax._operations import programs_inside
from lajax.layers import rglru
from lajax.layers.state import follow


def made(layer, *sizes, **options):
  """A layer of width D in float64, or another dtype, with values for its parameters, and its jitted
  call.
  """
  options = {"param_dtype": jnp.float64} | options
  graph, params = abstract(Case("", functools.partial(layer, D, *sizes, **options)))
  return (
    nnx.merge(graph, params),
    values(params),
    quick_jit(lambda p, x, state=None: nnx.merge(graph, p)(x, state)),
  )


def inputs(*shape):
  return np.random.default_rng(0).normal(size=shape)


# --- Mamba ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["T17", "T64_h0"])
def test_mamba_ssm(name):
  def f(i):
    E, N = i["A_log"].shape
    layer = nnx.eval_shape(
      lambda: L.Mamba(4, E, state_dim=N, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    )
    layer.A_log, layer.D = nnx.Param(i["A_log"]), nnx.Param(i["D"])
    o, state = layer.ssm(
      i["x"], i["dt"], i["Bm"], i["Cm"], i.get("h0"), follow(None, i["x"].shape[:2], None)
    )
    return {"o": o, "ht": state}

  agrees_with_oracle(f"mamba1__{name}", f)


def test_mamba_defaults():
  layer = nnx.eval_shape(lambda: L.Mamba(40, rngs=nnx.Rngs(0)))
  assert layer.init_state(2).memory.shape == (2, 80, 16)
  assert layer.dt_rank == 3
  A_log = quick_jit(lambda: L.Mamba(40, rngs=nnx.Rngs(0)).A_log[...])()
  np.testing.assert_allclose(np.exp(A_log), np.tile(np.arange(1, 17), (80, 1)), rtol=1e-5)


# --- RG-LRU ---------------------------------------------------------------------------------------


def test_input_scale_near_a_of_one():
  log_a = jnp.array([-0.0, -1e-30, -1e-9, -1.0, -jnp.inf])
  value, slope = jax.vmap(jax.value_and_grad(rglru._input_scale))(log_a)
  want = np.sqrt(-np.expm1(2 * np.array(log_a, np.float64)))
  np.testing.assert_allclose(value, want, rtol=1e-6)
  assert np.isfinite(slope).all()
  assert slope[0] == slope[-1] == 0
  np.testing.assert_allclose(slope[1:4], -np.exp(2 * np.float64(log_a[1:4])) / want[1:4], rtol=1e-5)


def test_rglru_gradients_are_finite_where_nothing_decays():
  """Gates of zero: a = 1 exactly."""
  _, params, _ = made(L.RGLRU, 2, param_dtype=jnp.float32)
  params["gates_bias"] = params["gates_bias"].replace(
    jnp.full_like(params["gates_bias"][...], -1e4)
  )
  graph, _ = abstract(Case("", functools.partial(L.RGLRU, D, 2)))
  loss = lambda params, x: (nnx.merge(graph, params)(x)[0] ** 2).sum()
  gradients = quick_jit(jax.grad(loss, argnums=(0, 1)))(params, inputs(1, 5, D).astype(np.float32))
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.usefixtures("x64")
def test_rglru_begins_with_the_whole_first_token():
  layer, params, call = made(L.RGLRU, 4)
  x = inputs(2, 3, D)
  i = (
    x[:, 0].reshape(2, 4, 1, 4) @ np.asarray(params["gates"])[..., 4:]
    + np.asarray(params["gates_bias"])[:, None, 4:]
  )
  want = x[:, 0] / (1 + np.exp(-i.reshape(2, D)))
  y, state = call(params, x)
  np.testing.assert_allclose(y[:, 0], want, rtol=1e-12)
  dirty = layer.init_state(2)._replace(memory=jnp.ones((2, D)))  # of length 0: a = 0 removes it
  np.testing.assert_allclose(call(params, x, dirty)[0], y, rtol=1e-12)
  again, _ = call(params, x, state)  # continued: not a start
  assert relative_rms(again[:, 0], want) > 0.01


def test_rglru_initial_decay():
  rate = rglru._initial_rate(jax.random.key(0), 4000, jnp.float32)
  a = jnp.exp(-8 * jax.nn.softplus(rate))
  assert a.min() >= 0.8999
  assert a.max() <= 0.9991
  assert abs(a.mean() - 0.9495) < 0.003


@pytest.mark.usefixtures("x64")
def test_griffin_with_biases_is_one_of_a_wider_input():
  """A bias is the weight of an input that is always one."""
  _, params, call = made(L.GriffinBlock, 12, 3, use_bias=True)
  x = inputs(1, 6, D)
  y, _ = call(params, x)
  graph, state = nnx.split(
    nnx.eval_shape(lambda: L.GriffinBlock(D + 1, 12, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0)))
  )
  for name in ("conv", "rglru"):
    state[name] = params[name]
  for name, old in params["in_proj"].items():
    kernel = np.concatenate([old["kernel"][...], old["bias"][...][None]])
    state["in_proj"][name]["kernel"] = state["in_proj"][name]["kernel"].replace(kernel)
  out = np.pad(params["out_proj"]["kernel"][...], ((0, 0), (0, 1)))
  state["out_proj"]["kernel"] = state["out_proj"]["kernel"].replace(out)
  want, _ = quick_jit(lambda p, x: nnx.merge(graph, p)(x))(
    state, np.concatenate([x, np.ones((1, 6, 1))], axis=-1)
  )
  assert relative_rms(y, want[..., :D] + np.asarray(params["out_proj"]["bias"])[None, None]) < 1e-12


# --- forgetting attention -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_forgetting_reads_alike_with_and_without_a_cache():
  """Gates that forget all, some and nothing; the last is softmax attention."""
  layer, params, call = made(L.ForgettingAttention, 4, 8, num_kv_heads=2, max_length=20)
  x = inputs(2, 11, D)
  for bias in (-1e4, -3.0, 1e4):
    params["f_bias"] = params["f_bias"].replace(np.full(4, bias))
    y, _ = call(params, x)
    state, parts = layer.init_state(2), []
    for start, stop in [(0, 5), (5, 6), (6, 11)]:
      part, state = call(params, x[:, start:stop], state)
      parts.append(part)
    assert relative_rms(np.concatenate(parts, axis=1), y) < BUDGET["float64"]["value"]
  _, plain, attend = made(L.SoftmaxAttention, 4, 8, num_kv_heads=2)
  for name in "qkv":
    plain["in_proj"][name] = params["in_proj"][name]
  plain["out_proj"] = params["out_proj"]
  assert relative_rms(y, attend(plain, x)[0]) < BUDGET["float64"]["value"]


def test_forgetting_keeps_its_gates_in_float32():
  layer = nnx.eval_shape(
    lambda: L.ForgettingAttention(D, 2, 8, max_length=5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  )
  _, state = jax.eval_shape(lambda: (0, layer.init_state(1)))
  assert [s.dtype for s in state.memory] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
  assert [s.shape for s in state.memory] == [(1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 1)]


# --- MLA ------------------------------------------------------------------------------------------

SIZES = dict(kv_rank=16, rope_dim=4, value_dim=7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rope_theta", [pytest.param(None, marks=pytest.mark.slow), 100.0])
def test_mla_absorbed_equals_expanded(rope_theta):
  layer, params, call = made(
    L.MLA, 3, 8, **SIZES, max_length=12, rope_theta=rope_theta, impl="recurrent"
  )
  x, dy = inputs(2, 2, 10, D)
  state = layer.init_state(2)
  call = call.__wrapped__

  @quick_jit
  def run(params, x, state):
    y, pull = jax.vjp(lambda p, x: call(p, x, state)[0], params, x)
    return y, pull(dy)

  (absorbed, *gradients), (expanded, *others) = (
    jax.tree.leaves(run(params, x, s)) for s in (state, None)
  )
  assert relative_rms(absorbed, expanded) < BUDGET["float64"]["value"]
  for got, want in zip(gradients, others, strict=True):
    assert relative_rms(got, want) < BUDGET["float64"]["gradient"]


def test_mla_cache_is_the_latent_and_decode_makes_no_keys_of_a_head():
  H, K, S = 8, 8, 512
  make = functools.partial(L.MLA, D, H, K, **SIZES, max_length=S)
  graph, params = abstract(Case("", make))
  state = jax.eval_shape(lambda p: nnx.merge(graph, p).init_state(1), params)
  assert [s.shape for s in state.memory] == [(1, S, 1, 16), (1, S, 1, 4)]
  decode = lambda p, x, state: nnx.merge(graph, p)(x, state)
  jaxpr = jax.make_jaxpr(decode)(params, jax.ShapeDtypeStruct((1, 1, D), jnp.float32), state)
  assert largest(jaxpr.jaxpr) < S * H * 7  # 7 < K: the width of a value
  whole = jax.make_jaxpr(lambda p, x: nnx.merge(graph, p)(x))(
    params, jax.ShapeDtypeStruct((1, S, D), jnp.float32)
  )
  assert largest(whole.jaxpr) >= S * H * (7 + K)


def largest(jaxpr) -> int:
  """The size of the largest array in a program."""
  sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
  return max(
    sizes + [largest(inner) for eqn in jaxpr.eqns for inner in programs_inside(eqn)], default=0
  )


def test_mla_defaults():
  layer = nnx.eval_shape(lambda: L.MLA(D, rngs=nnx.Rngs(0)))
  assert [x.shape for x in layer.cached] == [(1, 512), (1, 64)]
  assert layer.scale == 192**-0.5
  assert layer.norm.eps == 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layer", [functools.partial(L.MLA, **SIZES), L.ForgettingAttention])
def test_full_cache(layer):
  graph, params = abstract(Case("", functools.partial(layer, D, 2, 8, max_length=4)))
  layer, x = nnx.merge(graph, values(params)), jnp.ones((2, 3, D))
  call = quick_jit(lambda x, s: layer(x, s))
  _, state = call(x, layer.init_state(2))
  with pytest.raises(
    ValueError,
    match=r"cache of 4 tokens is full: a document would have 6.*init_state\(batch, max_length=6\)",
  ):
    layer(x, state)
  np.testing.assert_array_equal(np.isnan(call(x, state)[0]).any(axis=-1), [[False, True, True]] * 2)
  assert jax.eval_shape(lambda x: layer(x), jnp.ones((2, 6, D)))[1].memory[0].shape[1] == 6
  assert layer.init_state(2, max_length=9).memory[0].shape[1] == 9
