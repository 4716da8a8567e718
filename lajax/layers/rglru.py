"""The real-gated linear recurrent unit (RG-LRU)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import IMPLS, check_dtype_option, check_option, check_rngs, check_whole
from lajax.layers.parameters import aligned, wide_dtype, widen
from lajax.layers.state import CallDocuments
from lajax.layers.stateful import StatefulLayer, computation_dtype
from lajax.ops import linear_recurrence

SHARPNESS = 8.0  # the paper's c


class RGLRU(StatefulLayer):
  """A recurrence channel by channel, with gates on its decay and on its input.

      h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t) ;  y = h
      r, i = sigmoid(block-diagonal products of x, with biases),  log a = -8 r softplus(Lambda)

  At a document's start a = 0: the first token is written whole, h = i * x.

  Args:
    channels: D.
    num_blocks: how many equal blocks the matrices of the gates have on their diagonals; a divisor
      of channels.
    impl: of `lajax.linear_recurrence`.
    dtype: the dtype of the gates' products and of y; None for that of the inputs and parameters
      together.
    param_dtype: the dtype of the gates' matrices; biases and Lambda are float32 at least.
    rngs: random streams of the initial parameters. exp(-8 softplus(Lambda)) ~ U(0.9, 0.999).

  Raises:
    ValueError: an option is out of its range, or num_blocks does not divide channels.

  Paper: S. De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
  Language Models", 2024, arXiv:2402.19427, equations 1 to 4 (with softplus(Lambda) for the paper's
  -log sigmoid(Lambda), as in its code).
  """

  memory_letters = "B D"

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
    check_whole("channels", channels)
    check_whole("num_blocks", num_blocks)
    check_option("impl", impl, IMPLS)
    check_dtype_option("dtype", dtype)
    check_dtype_option("param_dtype", param_dtype, optional=False)
    check_rngs(rngs)
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

  @property
  def input_width(self) -> int:
    return self.channels

  @property
  def parameters_dtype(self):
    return self.gates.dtype

  def init_memory(self, batch, dtype) -> Float[Array, "B D"]:
    """Returns h before the first token of a computation in `dtype`: zeros."""
    return jnp.zeros((batch, self.channels), wide_dtype(dtype, self.param_dtype))

  def advance(self, x, memory, conv, documents):
    y, memory = self.recur(x, memory, documents)
    return y, memory, None

  def recur(
    self, x: Float[Array, "B T D"], memory: Array | None, documents: CallDocuments
  ) -> tuple[Array, Array]:
    """Returns h [B T D] behind a memory [B D], and the memory after; x is zero at padding."""
    dtype = computation_dtype(self, x.dtype)
    blocks = x.reshape(*x.shape[:2], self.num_blocks, x.shape[-1] // self.num_blocks)
    gates = jnp.einsum("btnd,nde->btne", blocks.astype(dtype), self.gates[...].astype(dtype))
    gates = widen(gates)
    r, i = jnp.split(jax.nn.sigmoid(gates + aligned(self.gates_bias[...], gates)), 2, axis=-1)
    r, i = r.reshape(x.shape), i.reshape(x.shape)
    start = (documents.position == 0)[..., None]
    log_a = -SHARPNESS * r * jax.nn.softplus(aligned(self.Lambda[...], r))
    log_a = jnp.where(start, -jnp.inf, log_a)
    written = _input_scale(log_a) * i * x.astype(i.dtype)
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
