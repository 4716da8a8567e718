"""One layer of a language model, and stacks of layers that repeat."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax.layers import GatedRMSNorm, LayerState
from lajax.layers.parameters import wide_dtype
from lajax.layers.state import CallDocuments
from lajax.layers.stateful import advance
from lajax.models.config import BlockConfig, MoEConfig, NormConfig, ResidualConfig
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts

BlockState = tuple[LayerState, ...]  # one per mixer


def rms_norm(width: int, config: NormConfig, param_dtype) -> GatedRMSNorm:
  """Returns the norm of a config."""
  options = {"eps": config.eps, "unit_offset": config.unit_offset}
  return GatedRMSNorm(width, param_dtype=wide_dtype(param_dtype), **options)


class Block(nnx.Module):
  """Mixers in parallel, then an MLP, each joined to the residual stream: see `BlockConfig`."""

  def __init__(
    self, d_model: int, config: BlockConfig, *, dtype=None, param_dtype=jnp.float32, rngs: nnx.Rngs
  ):
    common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.config = config
    self.mixers = nnx.List([m.layer(d_model, **m.keywords, **common) for m in config.mixers])
    norm = lambda: rms_norm(d_model, config.norm, param_dtype)
    self.mixer_norm = norm() if config.mixers else None
    self.mlp_norm = None if config.mlp is None else norm()
    if config.mlp is None:
      self.mlp = None
    elif isinstance(config.mlp, MoEConfig):
      self.mlp = MixtureOfExperts(d_model, config.mlp, **common)
    else:
      self.mlp = MLP(d_model, config.mlp, **common)

  def __call__(
    self, x: Float[Array, "B T D"], states: BlockState | None, documents: CallDocuments
  ) -> tuple[Float[Array, "B T D"], BlockState]:
    """Returns the residual stream after this layer, and the states of its mixers."""
    after: list[LayerState] = []

    def mix(x):
      outputs = []
      for n, (mixer, c) in enumerate(zip(self.mixers, self.config.mixers, strict=True)):
        state = None if states is None else mixer.check_state(states[n], x.shape[0])
        y, state = advance(mixer, _scaled(x, c.in_multiplier), state, documents)
        outputs.append(_scaled(y, c.out_multiplier))
        after.append(state)
      return sum(outputs[1:], outputs[0])

    if self.mixers:
      x = _joined(x, mix, self.mixer_norm, self.config.mixer_residual)
    if self.mlp is not None:
      x = _joined(x, self.mlp, self.mlp_norm, self.config.mlp_residual)
    return documents.blank_padding(x), tuple(after)

  def init_state(self, batch: int, max_length: int | None, dtype) -> BlockState:
    """Returns the states of the mixers before the first token."""
    return tuple(
      mixer.init_state(batch, dtype=dtype)
      if max_length is None or not hasattr(mixer, "max_length")
      else mixer.init_state(batch, max_length, dtype=dtype)
      for mixer in self.mixers
    )


def _joined(x: Array, f, norm, residual: ResidualConfig) -> Array:
  """Returns the stream after the part f of a block; everything keeps the stream's dtype."""
  if residual.place == "pre":
    y = f(norm(x))
  elif residual.place == "post":
    y = norm(f(x).astype(x.dtype))
  else:
    x = norm(x)
    y = f(x)
  return _scaled(x, residual.alpha) + _scaled(y.astype(x.dtype), residual.beta)


def _scaled(x: Array, factor: float) -> Array:
  return x if factor == 1 else x * factor


class Stack(nnx.Module):
  """A period of blocks that repeats R times; the parameters of all repeats are stacked [R ..].

  A stack that is unrolled has each layer once, in arrays without the axis R (`stacked` is False).

  Args:
    d_model: D.
    configs: of all its layers, R times the period.
    period: number of layers per repeat.
    dtype, param_dtype: of the layers.
    rngs: random streams of the parameters.
  """

  def __init__(
    self,
    d_model: int,
    configs: tuple[BlockConfig, ...],
    period: int,
    *,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.repeats, self.stacked = len(configs) // period, True
    common = {"dtype": dtype, "param_dtype": param_dtype}
    self.blocks = nnx.List(
      [
        _stacked(d_model, config.structure, self.repeats, common, rngs)
        for config in configs[:period]
      ]
    )
    for place, block in enumerate(self.blocks):
      _fill_buffers(block, configs[place::period])

  def __call__(
    self,
    x: Float[Array, "B T D"],
    states: tuple[BlockState, ...] | None,
    documents: CallDocuments,
    *,
    collect: bool = False,
    remat: bool = False,
  ) -> tuple[Float[Array, "B T D"], tuple[BlockState, ...], Float[Array, "layers B T D"] | None]:
    """Runs all layers. Returns the stream, the states, and the stream after each layer if asked."""
    split = [nnx.split(block) for block in self.blocks]
    graphs, parameters = [graph for graph, _ in split], [p for _, p in split]

    def layer(graph, parameters, x, states):
      return nnx.merge(graph, parameters)(x, states, documents)

    if remat:
      layer = jax.checkpoint(layer, static_argnums=0)

    def period(x, inputs):
      parameters, states = inputs
      after, streams = [], []
      for n, graph in enumerate(graphs):
        x, state = layer(graph, parameters[n], x, None if states is None else states[n])
        after.append(state)
        streams.append(x)
      return x, (tuple(after), jnp.stack(streams) if collect else None)

    if not self.stacked:
      x, (after, streams) = period(x, (parameters, states))
    elif self.repeats == 1:
      x, found = period(x, jax.tree.map(lambda a: a[0], (parameters, states)))
      after, streams = jax.tree.map(lambda a: a[None], found)
    else:
      x, (after, streams) = jax.lax.scan(period, x, (parameters, states))
    return x, after, None if streams is None else streams.reshape(-1, *x.shape)

  def unrolled(self) -> "Stack":
    """Returns the same layers with arrays of their own: each once, without the axis R."""
    copy = nnx.merge(*nnx.split(self))
    if not self.stacked:
      return copy
    split = [nnx.split(block) for block in self.blocks]
    copy.blocks = nnx.List(
      [
        nnx.merge(graph, jax.tree.map(lambda a, r=r: a[r], parameters))
        for r in range(self.repeats)
        for graph, parameters in split
      ]
    )
    copy.repeats, copy.stacked = 1, False
    return copy

  def layer_blocks(self) -> list[Block]:
    """Returns the blocks of one repeat without parameters, for their options and shapes."""
    return [_shapes_of(block, self.stacked) for block in self.blocks]

  def init_state(self, batch: int, max_length: int | None, dtype) -> tuple[BlockState, ...]:
    """Returns the states before the first token, [R B ..], or [B ..] if not stacked."""
    states = tuple(block.init_state(batch, max_length, dtype) for block in self.layer_blocks())
    if not self.stacked:
      return states
    return jax.tree.map(lambda s: jnp.broadcast_to(s[None], (self.repeats, *s.shape)), states)


def _stacked(d_model: int, config: BlockConfig, repeats: int, common, rngs: nnx.Rngs) -> Block:
  """Returns a block whose parameters are those of `repeats` blocks, stacked."""
  graph = nnx.graphdef(
    nnx.eval_shape(lambda: Block(d_model, config, rngs=nnx.Rngs(params=0), **common))
  )
  keys = jax.random.split(rngs.params(), repeats)
  return nnx.merge(graph, _initial(keys, d_model, config, *common.values()))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))  # blocks of one structure compile once
def _initial(keys, d_model: int, config: BlockConfig, dtype, param_dtype):
  def make(key):
    options = {"dtype": dtype, "param_dtype": param_dtype}
    return nnx.state(Block(d_model, config, rngs=nnx.Rngs(params=key), **options))

  return jax.vmap(make)(keys)


def _fill_buffers(block: Block, configs: tuple[BlockConfig, ...]) -> None:
  """Writes the numbers in which the layers of a stack differ."""
  for n, mixer in enumerate(block.mixers):
    layers = [dict(config.mixers[n].buffers) for config in configs]
    for name in layers[0]:
      buffer: Any = getattr(mixer, name)
      values = jnp.asarray([layer[name] for layer in layers], buffer.dtype)
      buffer[...] = jnp.broadcast_to(values.reshape(buffer.shape[0], -1), buffer.shape)


def _shapes_of(module: Any, stacked: bool) -> Any:
  """Returns a module with the shapes of one layer in place of its parameters."""
  graph, state = nnx.split(module)
  one = lambda p: jax.ShapeDtypeStruct(p.shape[1:] if stacked else p.shape, p.dtype)
  return nnx.merge(graph, jax.tree.map(one, state))
