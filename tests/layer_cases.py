"""The table of layers that every test of the laws iterates over: a new layer is one row."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lajax.layers as L

D, B, T = 16, 4, 70


class Case(NamedTuple):
  """A layer of width D with its options; `plain` for one row a class, which the tests that compile
  much run in the fast set.
  """

  name: str
  layer: Callable[..., Any]
  plain: bool = False

  def make(self, **options):
    return self.layer(**options, rngs=nnx.Rngs(0))

  def in_form(self, impl: str) -> "Case":
    """The same layer with a named form of what it calls."""
    return self._replace(layer=functools.partial(self.layer, impl=impl))


def _case(name: str, layer, *sizes, plain: bool = False, **options) -> Case:
  return Case(name, functools.partial(layer, D, *sizes, **options), plain)


CASES = (
  _case("ShortConv", L.ShortConv, use_bias=True, plain=True),
  _case("ShortConv-width1", L.ShortConv, 1, activation=None),
  _case("SoftmaxAttention", L.SoftmaxAttention, 2, 8, max_length=3 * T, plain=True),
  _case(
    "SoftmaxAttention-all", L.SoftmaxAttention, 4, 8, num_kv_heads=2, max_length=3 * T, rope_theta=100.0, qk_norm=True,
    qk_norm_offset=True, output_gate=True, sink=True, conv_size=4,
  ),
  _case("SoftmaxAttention-window", L.SoftmaxAttention, 2, 8, num_kv_heads=1, window=5, rope_theta=100.0, rope_dim=4,
    qk_norm=True, qk_norm_whole=True, key_multiplier=0.5, scale=0.3, use_bias=True, out_bias=False),
  _case("LinearAttention", L.LinearAttention, 2, 8, plain=True),
  _case("LinearAttention-relu-conv", L.LinearAttention, 2, 8, feature_map="relu", conv_size=3),
  _case("LinearAttention-exp", L.LinearAttention, 2, 8, feature_map="exp"),
  _case("LinearAttention-taylor2", L.LinearAttention, 2, 4, feature_map="taylor2", expand_v=2),
  _case("LinearAttention-sum", L.LinearAttention, 2, 8, feature_map="identity", normalize=False),
  _case("Performer", L.Performer, 2, 8, num_features=20),
  _case("CosFormer", L.CosFormer, 2, 8, max_length=3 * T),
  _case("Based", L.Based, 2, 4, expand_v=2),
  _case("ReBased", L.ReBased, 2, 4, expand_v=2),
  _case("Hedgehog", L.Hedgehog, 2, 8),
  _case("Lightning", L.Lightning, 2, 8, layer_index=1, num_layers=4, expand_v=2),
  _case("HGRN", L.HGRN, width=24, lower_bound=0.3, conv_size=2),
  _case("HGRN2", L.HGRN2, 2, 8, lower_bound=0.3),
  _case("RetNet", L.RetNet, 2, 8, plain=True),
  _case("GLA", L.GLA, 2, 8, plain=True),
  _case("GLA-conv", L.GLA, 2, 8, gate_rank=3, conv_size=4, use_gate=False, expand_v=2),
  _case("Mamba2", L.Mamba2, 2, 8, state_dim=8, plain=True),
  _case("Mamba2-groups", L.Mamba2, 4, 8, state_dim=6, num_groups=2, conv_size=None, norm_groups=2, dt_limits=(0.5, 2.0),
    multipliers=(0.5, 0.6, 0.7, 0.8, 0.9)),
  _case("Mamba3", L.Mamba3, 4, 8, state_dim=4, num_groups=2, use_norm=True),
  _case("Mamba3-ranks", L.Mamba3, 2, 8, state_dim=4, rank=2, rope_fraction=1.0, use_bias=True),
  _case("DeltaNet", L.DeltaNet, 2, 8, plain=True),
  _case("DeltaNet-reflect", L.DeltaNet, 2, 8, allow_negative_eigenvalues=True, use_gate=True, conv_size=2),
  _case("GatedDeltaNet", L.GatedDeltaNet, 2, 8, plain=True),
  _case("GatedDeltaNet-grouped", L.GatedDeltaNet, 2, 8, num_v_heads=4, expand_v=1.5, allow_negative_eigenvalues=True,
    gate_activation="sigmoid"),
  _case("KimiDeltaAttention", L.KimiDeltaAttention, 2, 8, plain=True),
  _case("KimiDeltaAttention-bounded", L.KimiDeltaAttention, 2, 8, num_v_heads=4, lower_bound=-5.0, full_rank=True),
  _case("Mamba", L.Mamba, 12, state_dim=4, dt_rank=3, inner_norm=True),
  _case("RGLRU", L.RGLRU, 4),
  _case("GriffinBlock", L.GriffinBlock, 12, 3),
  _case("ForgettingAttention", L.ForgettingAttention, 2, 8, num_kv_heads=1, max_length=2 * T, qk_norm=True, output_gate=True),
  _case("MLA", L.MLA, 2, 6, kv_rank=5, rope_dim=4, value_dim=7, max_length=2 * T, rope_theta=100.0,
    rope_pairs="neighbours", head_gate=True),
  _case("DoubleGatedConv", L.DoubleGatedConv, use_bias=True),
  _case("DeltaProduct", L.DeltaProduct, 2, 8),
  _case("GatedDeltaNet2", L.GatedDeltaNet2, 2, 8, gate_rank=3),
  _case("GatedOja", L.GatedOja, 2, 8, gate_rank=3),
  _case("Comba", L.Comba, 2, 8),
  _case("QDelta", L.QDelta, 2, 8, num_v_heads=4, conv_size=2),
  _case("MesaNet", L.MesaNet, 2, 8, expand_v=0.5, use_gate=True),
  _case("LogLinearMamba2", L.LogLinearMamba2, 2, 8, state_dim=4, max_length=2 * T),
  _case("LogLinearGatedDeltaNet", L.LogLinearGatedDeltaNet, 2, 4, num_v_heads=4, max_length=4, conv_size=2),
  _case("MomentumDeltaNet", L.MomentumDeltaNet, 2, 8, num_v_heads=4, conv_size=2),
  _case("PreconditionedGatedDeltaNet", L.PreconditionedGatedDeltaNet, 2, 8, num_v_heads=4, conv_size=2),
  _case("PreconditionedKDA", L.PreconditionedKDA, 2, 8, gate_rank=3, conv_size=None),
  _case("MLSTM", L.MLSTM, 2, 8),
  _case("RWKV6", L.RWKV6, 2, 8, decay_rank=4, shift_rank=3),
  _case("RWKV7", L.RWKV7, 2, 8, decay_rank=4, iclr_rank=3, gate_rank=5),
)  # fmt: skip
PLAIN = tuple(case for case in CASES if case.plain)
EACH = tuple({case.layer.func: case for case in reversed(CASES)}.values())[
  ::-1
]  # the first row of every class


def abstract(case: Case, **options):
  """The graph and the parameters' shapes of a layer, without the time to compile their initial
  values.
  """
  return nnx.split(nnx.eval_shape(lambda: case.make(**options)))


def values(params, seed: int = 0):
  """Parameters unlike those that training starts from, such that every gate has something to say."""
  rng = np.random.default_rng(seed)
  ones = lambda p: 1 + 0.3 * rng.normal(size=p.shape)
  matrix = lambda p: rng.normal(size=p.shape) * p.shape[0] ** -0.5
  return jax.tree.map(
    lambda p: (ones(p) if len(p.shape) == 1 else matrix(p)).astype(p.dtype), params
  )


class Result(NamedTuple):
  """A call's outputs and state, and the gradients of <dy, y> + <dstate, the state's floats>."""

  y: jax.Array
  state: Any
  dparams: Any
  dx: jax.Array
  dstate: tuple  # of the incoming state's floats


class Compiled:
  """A layer in float64 with its jitted calls, shared by all tests of one case (inside
  `jax.enable_x64`).
  """

  def __init__(self, case: Case):
    graph, params = abstract(case, param_dtype=jnp.float64)
    self.params = values(params)
    self.x, self.dy = np.random.default_rng(1).normal(size=(2, B, T, D))
    self.init = jax.device_get(nnx.merge(graph, params).init_state(B))

    def call(params, x, state, ids):
      return nnx.merge(graph, params)(x, state, segment_ids=ids)

    def with_gradients(params, x, state, ids, dy, dstate):
      def f(params, x, values):
        y, new = call(params, x, _with_floats(state, values), ids)
        return (y, floats(new)), (y, new)

      _, pull, (y, new) = jax.vjp(f, params, x, floats(state), has_aux=True)
      return Result(y, new, *pull((dy, dstate)))

    def decode(params, x, state):
      def step(state, x):
        y, state = call(params, x[:, None], state, None)
        return state, y[:, 0]

      state, y = jax.lax.scan(step, state, jnp.moveaxis(x, 1, 0))
      return jnp.moveaxis(y, 0, 1), state

    jit = cases.quick_jit  # the laws are about what is computed, not how fast
    self._call, self._with_gradients, self._decode = jit(call), jit(with_gradients), jit(decode)

  def __call__(self, x, state):
    """A call without segment_ids."""
    return jax.device_get(self._call(self.params, x, state, None))

  def decode(self, x, state):
    """The same token by token, in a scan."""
    return jax.device_get(self._decode(self.params, x, state))

  def with_gradients(self, x, state, ids, dy=None, dstate=None) -> Result:
    dy = np.zeros_like(x) if dy is None else dy
    dstate = jax.tree.map(np.zeros_like, floats(state)) if dstate is None else dstate
    return jax.device_get(
      self._with_gradients(self.params, x, state, np.asarray(ids, np.int32), dy, dstate)
    )

  def in_calls(self, x, state, ids, dy, dstate, cuts) -> Result:
    """The sequence cut before the tokens `cuts`, the state passed on, and the gradients passed back.

    Each call gets all T tokens, those outside its piece as padding: so all pieces share one compilation.
    """
    place = np.arange(ids.shape[1])
    bounds = itertools.pairwise((0, *cuts, ids.shape[1]))
    pieces = [np.where((place >= start) & (place < stop), ids, -1) for start, stop in bounds]
    states, y = [state], np.zeros_like(x)
    for piece in pieces:
      part = self.with_gradients(x, states[-1], piece)
      states.append(part.state)
      y += part.y
    dparams, dx = jax.tree.map(np.zeros_like, (self.params, x))
    for piece, before in zip(reversed(pieces), reversed(states[:-1]), strict=True):
      part = self.with_gradients(x, before, piece, dy, dstate)
      dparams, dx, dstate = jax.tree.map(np.add, dparams, part.dparams), dx + part.dx, part.dstate
    return Result(y, states[-1], dparams, dx, dstate)


def floats(state) -> tuple:
  """The float arrays of a state: what is differentiable in it."""
  return tuple(leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating))


def _with_floats(state, values):
  leaves, tree = jax.tree.flatten(state)
  values = iter(values)
  return jax.tree.unflatten(
    tree, [next(values) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves]
  )


@functools.cache
def compiled(case: Case) -> Compiled:
  return Compiled(case)
