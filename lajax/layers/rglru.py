"""The real-gated linear recurrent unit (RG-LRU)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._shapes import IMPLS, check, check_option, check_positive
from lajax.layers.parameters import wide_dtype, widen
from lajax.layers.state import Documents, LayerState, check_state, follow
from lajax.ops import linear_recurrence

SHARPNESS = 8.0  # the paper's c


class RGLRU(nnx.Module):
  """A recurrence channel by channel, with gates on its decay and on its input.

      h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t) ;  y = h
      r, i = sigmoid(block-diagonal products of x, with biases),  log a = -8 r softplus(Lambda)

  At a document's start a = 0: the first token is written whole, h = i * x.

  Args:
    channels: D.
    num_blocks: how many equal blocks the matrices of the gates have on their diagonals; a divisor of channels.
    impl: passed on to `lajax.linear_recurrence`.
    dtype: the dtype of the gates' products and of y; None for that of the inputs and parameters together.
    param_dtype: the dtype of the gates' matrices; biases and Lambda are float32 at least.
    rngs: the random streams of the parameters. exp(-8 softplus(Lambda)) ~ U(0.9, 0.999).

  Raises:
    ValueError: an option is out of its range, or num_blocks does not divide channels.

  Paper: S. De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models", 2024,
  arXiv:2402.19427, equations 1 to 4 (with softplus(Lambda) for the paper's -log sigmoid(Lambda), as in its code).
  """

  def __init__(
    self,
    channels: int,
    num_blocks: int = 1,
    *,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("channels", channels)
    check_positive("num_blocks", num_blocks)
    check_option("impl", impl, IMPLS)
    if channels % num_blocks:
      raise ValueError(
        f"`num_blocks` must divide channels = {channels}; got {num_blocks}. Take a divisor of it."
      )
    width, wide = channels // num_blocks, wide_dtype(param_dtype)
    matrix = jax.nn.initializers.variance_scaling(
      1.0, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0
    )
    # The gates r and i, side by side.
    self.gates = nnx.Param(matrix(rngs.params(), (num_blocks, width, 2 * width), param_dtype))
    self.gates_bias = nnx.Param(jnp.zeros((num_blocks, 2 * width), wide))
    self.Lambda = nnx.Param(_initial_rate(rngs.params(), channels, wide))
    self.channels, self.num_blocks, self.impl = channels, num_blocks, impl
    self.dtype, self.param_dtype = dtype, param_dtype

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """The recurrence over x, continuing from a state; returns y and the state after the last real token of each row."""
    sizes = check({"D": self.channels}, x=(x, "B T D"), segment_ids=(segment_ids, "B T", "int"))
    check_state(state, sizes["B"])
    documents = follow(state, (sizes["B"], sizes["T"]), segment_ids)
    memory = None if state is None else documents.only_continued(state.memory)
    y, memory = self.recur(documents.only_real(x), memory, documents)
    return y, LayerState(
      memory.astype(self._state_dtype), None, documents.segment, documents.length
    )

  def init_state(self, batch: int) -> LayerState:
    """The state before the first token: zeros."""
    check_positive("batch", batch)
    memory = jnp.zeros((batch, self.channels), self._state_dtype)
    return LayerState(memory, None, jnp.full(batch, -1, jnp.int32), jnp.zeros(batch, jnp.int32))

  @property
  def _state_dtype(self) -> jnp.dtype:
    return wide_dtype(self.dtype or self.param_dtype)

  def recur(
    self, x: Float[Array, "B T D"], memory: Array | None, documents: Documents
  ) -> tuple[Array, Array]:
    """h [B T D] behind a memory [B D], and the memory after the last real token; x must be zero at the padding."""
    dtype = self.dtype or jnp.promote_types(x.dtype, self.param_dtype)
    blocks = x.reshape(*x.shape[:2], self.num_blocks, x.shape[-1] // self.num_blocks)
    gates = jnp.einsum("btnd,nde->btne", blocks.astype(dtype), self.gates[...].astype(dtype))
    r, i = jnp.split(jax.nn.sigmoid(widen(gates) + self.gates_bias[...]), 2, axis=-1)
    r, i = r.reshape(x.shape), i.reshape(x.shape)
    start = (documents.position == 0)[..., None]
    log_a = jnp.where(start, -jnp.inf, -SHARPNESS * r * jax.nn.softplus(self.Lambda[...]))
    written = _input_scale(log_a) * i * widen(x)
    h, memory = linear_recurrence(
      written, log_a, initial_state=memory, segment_ids=documents.ids, impl=self.impl
    )
    return h.astype(dtype), memory


def _input_scale(log_a: Float[Array, "..."]) -> Float[Array, "..."]:
  """sqrt(1 - a^2), with a gradient of zero where a = 1 exactly, and not infinity."""
  square = -jnp.expm1(2 * log_a)
  some = square > 0
  return jnp.where(some, jnp.sqrt(jnp.where(some, square, 1.0)), 0.0)


def _initial_rate(key: Array, channels: int, dtype) -> Float[Array, "D"]:
  """Lambda with exp(-8 softplus(Lambda)) ~ U(0.9, 0.999)."""
  rate = -jnp.log(jax.random.uniform(key, (channels,), dtype, 0.9, 0.999)) / SHARPNESS
  return jnp.log(jnp.expm1(rate))
