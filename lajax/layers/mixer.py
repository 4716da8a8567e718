"""The shell of every mixer: one projection in, a short convolution, the mixer's own equation, one projection out."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._shapes import IMPLS, check, check_option, check_positive
from lajax.layers.parameters import wide_dtype
from lajax.layers.short_conv import ShortConv
from lajax.layers.state import Documents, LayerState, check_state, follow


def value_width(head_dim: int, expand_v: float) -> int:
  """V = K * expand_v, which must be a whole number."""
  check_positive("head_dim", head_dim)
  width = round(head_dim * expand_v)
  if width < 1 or width != head_dim * expand_v:
    raise ValueError(
      f"`expand_v` times head_dim = {head_dim} must be a whole number of at least 1; got expand_v={expand_v}."
    )
  return width


def value_heads(num_heads: int, num_v_heads: int | None) -> int:
  """HV, a multiple of H; H where it is not given."""
  check_positive("num_heads", num_heads)
  check_positive("num_v_heads", num_v_heads)
  heads = num_heads if num_v_heads is None else num_v_heads
  if heads % num_heads:
    raise ValueError(f"`num_v_heads` must be a multiple of num_heads = {num_heads}; got {heads}.")
  return heads


class Mixer(nnx.Module):
  """A layer [B T D] -> [B T D] that mixes tokens causally and carries a state.

  A subclass names its projections and the shape of its memory in `__init__`, and writes its equation in `mix`.

  Args:
    d_model: D.
    projections: the heads cut from one projection of the input: their names, and their shapes [.. *shape] after [B T].
    inner: the width of what `mix` returns, before the output projection.
    memory: the shape of the recurrence's state without the batch, for `init_state`.
    conv_size: the width of the short convolution; None for none.
    conv_on: the projections that pass through it.
    conv_bias, conv_activation: its options.
    use_bias: biases on the projections in and out.
    impl, chunk_size: passed on to the op, and impl to the convolution.
    dtype: the dtype of the projections; None for that of the inputs and parameters together. Gates, norms and the
      recurrence's state are float32 at least.
    param_dtype: the dtype of the parameters; those of gates and norms are float32 at least.
    rngs: the random streams of the parameters.
  """

  def __init__(
    self,
    d_model: int,
    projections: Mapping[str, tuple[int, ...]],
    *,
    inner: int,
    memory: tuple[int, ...] = (),
    conv_size: int | None = None,
    conv_on: tuple[str, ...] = ("q", "k", "v"),
    conv_bias: bool = False,
    conv_activation: str | None = "silu",
    use_bias: bool = False,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_option("impl", impl, IMPLS)
    check_positive("chunk_size", chunk_size)
    check_positive("conv_size", conv_size)
    linear = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.convolved = tuple((name, projections[name]) for name in conv_on if conv_size)
    self.direct = tuple(item for item in projections.items() if item not in self.convolved)
    channels, others = _columns(self.convolved), _columns(self.direct)
    self.in_proj = nnx.Linear(d_model, channels + others, **linear)
    self.out_proj = nnx.Linear(inner, d_model, **linear)
    options = {"use_bias": conv_bias, "activation": conv_activation, "impl": impl}
    options |= {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.conv = ShortConv(channels, conv_size, **options) if conv_size else None
    self.d_model, self.memory_shape = d_model, tuple(memory)
    self.impl, self.chunk_size = impl, chunk_size
    self.dtype, self.param_dtype = dtype, param_dtype

  # --- what a subclass writes ---

  def mix(self, p: dict[str, Array], memory, documents: Documents) -> tuple[Array, Any]:
    """The mixer's equation: from the projections [B T *shape] and the memory (None: zeros) to outputs and memory."""
    raise NotImplementedError

  def project(
    self, x: Array, cache: Array | None, documents: Documents
  ) -> tuple[dict[str, Array], Array | None]:
    """The projections [B T *shape] of an input that is zero at padding, and the cache that they leave."""
    projected = self.in_proj(x)
    if self.conv is None:
      return _cut(projected, self.direct), None
    convolved, direct = jnp.split(projected, [self.conv.channels], axis=-1)
    convolved, cache = self.conv.convolve(convolved, cache, documents)
    return _cut(convolved, self.convolved) | _cut(direct, self.direct), cache

  def init_memory(self, batch: int):
    """The memory before the first token."""
    return jnp.zeros((batch, *self.memory_shape), self.state_dtype)

  # --- what it uses ---

  @property
  def state_dtype(self) -> jnp.dtype:
    return wide_dtype(self.dtype or self.param_dtype)

  @property
  def gate_dtype(self) -> jnp.dtype:
    return wide_dtype(self.param_dtype)

  def run(
    self,
    op: Callable,
    *arrays: Array | None,
    memory,
    documents: Documents,
    scale: float | None = None,
  ) -> tuple[Array, Any]:
    """Calls an op on this layer's arrays with its memory, documents, impl and chunk size."""
    return op(
      *arrays,
      initial_state=memory,
      segment_ids=documents.ids,
      impl=self.impl,
      chunk_size=self.chunk_size,
      scale=scale,
    )

  # --- what all of them do ---

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """Mixes the tokens of x behind a state.

    Args:
      x: [B T D], D = d_model; T >= 1.
      state: from `init_state` or from the call before; None for zeros.
      segment_ids: [B T], the document of each token, ids >= 0; -1 for padding. A change of id begins a new document. The
        first real token continues the state's document if the ids are the same, or if the state has seen none.

    Returns:
      y [B T D], zero at padding, and the state after the last real token of each row.

    Raises:
      ValueError: an argument has the wrong rank, size or dtype.
    """
    sizes = check({"D": self.d_model}, x=(x, "B T D"), segment_ids=(segment_ids, "B T", "int"))
    B, T = sizes["B"], sizes["T"]
    check_state(state, B)
    documents = follow(state, (B, T), segment_ids)
    memory = None if state is None else documents.only_continued(state.memory)

    p, conv = self.project(documents.only_real(x), None if state is None else state.conv, documents)
    o, memory = self.mix(p, memory, documents)
    y = documents.only_real(self.out_proj(jax.lax.collapse(o, 2)))
    memory = jax.tree.map(
      lambda s, like: s.astype(like.dtype), memory, jax.eval_shape(lambda: self.init_memory(B))
    )
    return y, LayerState(memory, conv, documents.segment, documents.length)

  def init_state(self, batch: int) -> LayerState:
    """The state before the first token: zeros, its size independent of the length of the sequence."""
    check_positive("batch", batch)
    conv = None if self.conv is None else self.conv.init_cache(batch)
    return LayerState(
      self.init_memory(batch), conv, jnp.full(batch, -1, jnp.int32), jnp.zeros(batch, jnp.int32)
    )


Heads = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the parts of a projection


def _columns(heads: Heads) -> int:
  return sum(prod(shape) for _, shape in heads)


def _cut(projected: Float[Array, "B T columns"], heads: Heads) -> dict[str, Array]:
  """The parts of a projection, each [B T *shape]."""
  ends = accumulate(prod(shape) for _, shape in heads)
  parts = jnp.split(projected, list(ends), axis=-1)[
    :-1
  ]  # the last one is what lies behind all of them: nothing
  return {
    name: part.reshape(*part.shape[:2], *shape)
    for (name, shape), part in zip(heads, parts, strict=True)
  }
