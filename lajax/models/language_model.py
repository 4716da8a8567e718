"""Language models: a config in, logits and a state out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lajax._meshes import explicit_mesh, on_automatic_axes, spec_of
from lajax._numerics import accumulation_dtype, promoted
from lajax._shapes import (
  check,
  check_batch,
  check_dtype_option,
  check_flag,
  check_given,
  check_positive,
  check_rngs,
)
from lajax.layers import LayerState
from lajax.layers.kv_cache import CachedMixer, check_room
from lajax.layers.state import follow
from lajax.models.block import BlockState, Stack, rms_norm
from lajax.models.config import ModelConfig, periods
from lajax.models.moe import MixtureOfExperts
from lajax.models.vocabulary import check_vocabulary

ModelState = tuple[tuple[BlockState, ...], ...]  # [stack][place in its period][mixer]


class LanguageModel(nnx.Module):
  """A language model: embedding, layers, norm, head. See `ModelConfig` for its equation.

      model = LanguageModel(config, rngs=nnx.Rngs(0))
      logits, state = model(tokens)                # [B T] -> [B T vocab_size]
      logits, state = model(next_tokens, state)    # T = 1 (decode) or more: the same call
      state = model.init_state(batch)

  Layers that repeat are stacked, and run by a loop over their period: `model.stacks[s].blocks[p]`
  holds the parameters [R ..] of all R repeats of a layer. So the time of compilation depends on the
  pattern, and not on its depth.

  A state is a tuple of tuples of tuples of `LayerState`s: `state[s][p][m]` is that of mixer m of
  block p of stack s, and all of its arrays are [R B ..].

  Args:
    config: what every layer is.
    dtype: of the computation; None for that of the parameters.
    param_dtype: of the parameters; those of gates and norms are float32 at least.
    remat: compute the inside of each block again in the backward pass, instead of storing it.
    rngs: random streams of the initial parameters. The embedding is N(0, 0.02^2).

  Raises:
    ValueError: an option is out of its range.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    dtype=None,
    param_dtype=jnp.float32,
    remat: bool = False,
    rngs: nnx.Rngs,
  ):
    if not isinstance(config, ModelConfig):
      raise ValueError(
        f"`config` must be a ModelConfig; got {type(config).__name__}. "
        "lajax.models.from_config reads a config.json, hybrid_config makes one of a pattern."
      )
    check_dtype_option("dtype", dtype)
    check_dtype_option("param_dtype", param_dtype, optional=False)
    check_rngs(rngs)
    self.config, self.dtype, self.param_dtype = config, dtype, param_dtype
    self.remat = check_flag("remat", remat)
    V, D = config.vocab_size, config.d_model
    normal = jax.nn.initializers.normal(0.02)
    self.embedding = nnx.Param(normal(rngs.params(), (V, D), param_dtype))
    stacks, start = [], 0
    for period, repeats in periods([block.structure for block in config.blocks]):
      layers = config.blocks[start : start + period * repeats]
      stacks.append(Stack(D, layers, period, dtype=dtype, param_dtype=param_dtype, rngs=rngs))
      start += len(layers)
    self.stacks = nnx.List(stacks)
    self.norm = rms_norm(D, config.norm, param_dtype)
    head = None if config.tied_head else normal(rngs.params(), (D, V), param_dtype)
    self.head = None if head is None else nnx.Param(head)

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T vocab_size"], ModelState]:
    """Returns the logits after each token, and the state after the last one.

    Any split of the tokens into calls that pass the state on gives the same logits.

    Args:
      tokens: [B T] integers in 0 .. vocab_size - 1; T >= 1. At padding any integer.
      state: from `init_state` or from the call before; None for an empty one.
      segment_ids: [B T] int32, the document of each token, ids >= 0; -1 for padding.

    Returns:
      logits [B T vocab_size], in float32 at least, and the state.

    Raises:
      ValueError: an argument is wrong, a token is outside the vocabulary, or a document does not
        fit into the caches of the state. Under jit, where values cannot be seen, the logits of a
        token that does not fit are NaN, and a token outside the vocabulary is taken for the nearest
        one inside.
    """
    return self._run("logits", tokens, state, segment_ids)

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], ModelState]:
    """Returns the inputs of the head (after the final norm), and the state. Arguments as a call."""
    return self._run("hidden", tokens, state, segment_ids)

  def hidden_states(
    self,
    tokens: Int[Array, "B T"],
    state: ModelState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "layers+1 B T D"], ModelState]:
    """Returns the residual stream before each layer, then the inputs of the head, and the state.

    The first entry is the embedding; the last one comes after the final norm.
    """
    return self._run("streams", tokens, state, segment_ids)

  def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... vocab_size"]:
    """Returns the logits of inputs of the head, in float32 at least."""
    check_given(x=(x, "... D"))
    return _head(self, jnp.asarray(x))

  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the inputs of the first layer. A subclass may embed its tokens in another way."""
    x = self.embedding[...].at[tokens].get(mode="clip").astype(self.stream_dtype)
    return x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier

  def init_state(self, batch: int, max_length: int | None = None, *, dtype=None) -> ModelState:
    """Returns the state before the first token: zeros.

    Args:
      batch: B.
      max_length: tokens of the longest document that the caches of softmax attention hold; None for
        each layer's own.
      dtype: of the computation; None for that of the model.
    """
    batch, max_length = check_batch(batch), check_positive("max_length", max_length)
    check_dtype_option("dtype", dtype)
    dtype = jnp.dtype(dtype or self.stream_dtype)
    return tuple(stack.init_state(batch, max_length, dtype) for stack in self.stacks)

  def mixer_layers(self) -> list[tuple[nnx.Module, int]]:
    """Returns every kind of mixer without parameters, and how many layers have it."""
    blocks = [(b, stack.repeats) for stack in self.stacks for b in stack.layer_blocks()]
    return [(mixer, repeats) for block, repeats in blocks for mixer in block.mixers]

  @property
  def stacked(self) -> bool:
    """True if layers that repeat are stacked, as they are until `lajax.models.unrolled`."""
    return all(stack.stacked for stack in self.stacks)

  @property
  def active_parameters(self) -> int:
    """Number of parameters less those of the experts that a token does not use."""
    total = sum(p.size for p in jax.tree.leaves(nnx.state(self, nnx.Param)))
    mlps = [block.mlp for stack in self.stacks for block in stack.blocks]
    return total - sum(m.idle_parameters for m in mlps if isinstance(m, MixtureOfExperts))

  @property
  def stream_dtype(self) -> jnp.dtype:
    """Dtype of the residual stream."""
    if self.dtype is not None:
      return jnp.dtype(self.dtype)
    mixers = [m for stack in self.stacks for block in stack.blocks for m in block.mixers]
    return promoted(self.embedding.dtype, *(mixer.parameters_dtype for mixer in mixers))

  def _run(self, wanted: str, tokens, state, segment_ids):
    check_given(tokens=(tokens, "B T"))
    sizes = check(tokens=(tokens, "B T", "int"))
    check({"B": sizes.B, "T": sizes.T}, segment_ids=(segment_ids, "B T", "int"))
    if sizes["T"] == 0:
      raise ValueError(
        "`tokens` must be [B T] with at least one token; got T = 0. Leave the call out."
      )
    check_vocabulary(tokens, segment_ids, self.config.vocab_size)
    if state is not None:
      state = _check_state(self, state, sizes["B"])
      _check_caches(self, state, (sizes["B"], sizes["T"]), segment_ids)
    graph, parameters = nnx.split(self)
    return _forward(wanted, graph, parameters, jnp.asarray(tokens), state, segment_ids)


def unrolled(model: LanguageModel) -> LanguageModel:
  """Returns the same model with arrays of their own for each layer, for decoding on a CPU.

      engine = lajax.serve.Engine(lajax.models.unrolled(model), slots=16)

  A loop over layers that repeat cuts the parameters and caches of a layer out of stacked arrays. On
  a CPU this copies all of them for every token. An unrolled model copies nothing, and gives the
  same logits. In exchange its compilation takes longer the deeper it is, and its parameters are a
  second copy: let the first one go if memory is short.

  Args:
    model: a language model.

  Returns:
    A model whose stacks have each layer once. Its parameters and states have no axis R:
    `state[s][p][m]` is [B ..]. A model that is unrolled is returned as it is. `save` takes the
    stacked model.

  Raises:
    ValueError: the model is not a `LanguageModel`.
  """
  if not isinstance(model, LanguageModel):
    raise ValueError(
      f"`model` must be a LanguageModel; got {type(model).__name__}. Other models have no layers "
      "that are stacked."
    )
  copy = nnx.merge(*nnx.split(model))
  copy.stacks = nnx.List([stack.unrolled() for stack in model.stacks])
  return copy


@functools.partial(jax.jit, static_argnames=("wanted", "graph"))
def _forward(wanted: str, graph, parameters, tokens, state, segment_ids):
  def f(parameters, tokens, state, segment_ids):
    return _compute(wanted, nnx.merge(graph, parameters), tokens, state, segment_ids)

  def specs(parameters, tokens, state, segment_ids):
    rows = spec_of(tokens)
    y = PartitionSpec(None, *rows) if wanted == "streams" else rows
    stacked = nnx.merge(graph, parameters).stacked
    of_state = PartitionSpec(None, rows[0]) if stacked else PartitionSpec(rows[0])
    if state is None:
      return y, of_state
    laid_out = lambda s: of_state if explicit_mesh(s) is None else spec_of(s)
    return y, jax.tree.map(laid_out, state)

  return on_automatic_axes(f, specs)(parameters, tokens, state, segment_ids)


def _compute(wanted: str, model: LanguageModel, tokens, state, segment_ids):
  """Returns what is wanted ("logits", "hidden" or "streams"), and the state."""
  documents = follow(_first(state), tokens.shape, segment_ids)
  x = documents.blank_padding(model.embed(tokens).astype(model.stream_dtype))
  streams, after = [x[None]], []
  for n, stack in enumerate(model.stacks):
    states = None if state is None else state[n]
    options = {"collect": wanted == "streams", "remat": model.remat}
    x, states, inside = stack(x, states, documents, **options)
    after.append(states)
    streams.append(inside)
  x, after = model.norm(x), tuple(after)
  if wanted == "logits":
    return _head(model, x), after
  if wanted == "hidden":
    return x, after
  return jnp.concatenate([*streams[:-1], streams[-1][:-1], x[None]]), after


def _head(model: LanguageModel, x: Float[Array, "... D"]) -> Float[Array, "... vocab_size"]:
  config = model.config
  matrix = model.embedding[...] if model.head is None else model.head[...]
  matrix = matrix.astype(x.dtype)
  axis = 1 if model.head is None else 0
  wide = accumulation_dtype(x)
  contract = (((x.ndim - 1,), (axis,)), ((), ()))
  logits = jax.lax.dot_general(x, matrix, contract, preferred_element_type=wide)
  if config.logits_multiplier != 1:
    logits = logits * config.logits_multiplier
  if config.soft_cap is not None:
    logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
  return logits


# --- states ---------------------------------------------------------------------------------------


def is_layer_state(x: Any) -> bool:
  return isinstance(x, LayerState)


def _first(state: ModelState | None) -> LayerState | None:
  """Returns the counters of a state; all layers have the same."""
  layers = jax.tree.leaves(state, is_leaf=is_layer_state)
  if not layers:
    return None
  segment, length = layers[0].segment, layers[0].length
  return LayerState(None, None, *(x[0] if x.ndim == 2 else x for x in (segment, length)))


def _check_state(model: LanguageModel, state: Any, batch: int) -> ModelState:
  """Returns a state as JAX arrays; ValueError unless it has a LayerState for each mixer."""
  advice = f"Pass the state of an earlier call of this model, or init_state({batch})."
  count = lambda x: f"a tuple of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__

  def parts(name: str, x: Any, number: int, what: str) -> Any:
    if not isinstance(x, tuple | list) or isinstance(x, LayerState) or len(x) != number:
      raise ValueError(
        f"`{name}` must be a tuple of {number}, one per {what}; got {count(x)}. {advice}"
      )
    return x

  def layer_state(name: str, x: Any, repeats: int) -> LayerState:
    if not isinstance(x, LayerState):
      raise ValueError(f"`{name}` must be a LayerState; got {type(x).__name__}. {advice}")
    for leaf in jax.tree.leaves(x):
      wanted = (repeats, batch) if model.stacked else (batch,)
      if not hasattr(leaf, "shape") or leaf.shape[: len(wanted)] != wanted:
        got, letters = getattr(leaf, "shape", type(leaf).__name__), "R B" if model.stacked else "B"
        sizes = ", ".join(map(str, wanted))
        raise ValueError(
          f"the arrays of `{name}` must be [{letters} ..] = ({sizes}, ..); got {got}. {advice}"
        )
    return jax.tree.map(jnp.asarray, x)

  stacks = parts("state", state, len(model.stacks), "stack of layers")
  return tuple(
    tuple(
      tuple(
        layer_state(f"state[{s}][{p}][{m}]", x, stack.repeats)
        for m, x in enumerate(
          parts(f"state[{s}][{p}]", of_block, len(block.mixers), "mixer of the block")
        )
      )
      for p, (block, of_block) in enumerate(
        zip(stack.blocks, parts(f"state[{s}]", of_stack, len(stack.blocks), "block"), strict=True)
      )
    )
    for s, (stack, of_stack) in enumerate(zip(model.stacks, stacks, strict=True))
  )


def _check_caches(model: LanguageModel, state: ModelState, shape, segment_ids) -> None:
  """ValueError where a document no longer fits into a cache, and lengths can be seen."""
  mixers = [m for stack in model.stacks for block in stack.blocks for m in block.mixers]
  layers = jax.tree.leaves(state, is_leaf=is_layer_state)
  cached = [
    (mixer.window, layer.memory[0].shape[2 if model.stacked else 1])
    for mixer, layer in zip(mixers, layers, strict=True)
    if isinstance(mixer, CachedMixer)
  ]
  room = [size for window, size in cached if window is None or size < window]
  traced = [x for x in (layers[0].length, segment_ids) if isinstance(x, Tracer)] if room else []
  if room and not traced:
    check_room(follow(_first(state), shape, segment_ids).length, min(room))
