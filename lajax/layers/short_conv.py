"""Short causal depthwise convolution, which stands before most linear mixers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import (
  IMPLS,
  check_dtype_option,
  check_flag,
  check_option,
  check_rngs,
  check_whole,
)
from lajax.layers.state import CallDocuments
from lajax.layers.stateful import StatefulLayer, computation_dtype
from lajax.ops import short_conv


class ShortConv(StatefulLayer):
  """Causal depthwise convolution over the last `width` tokens, with its cache.

      y_t = act(sum_{w < W} weight[:, W - 1 - w] * x_{t - w} + bias)

  Documents do not mix: a tap that would reach into another document reads zero. Padding is passed
  over: taps count real tokens only.

  Args:
    channels: D.
    width: W >= 1, the current token included.
    use_bias: add one bias per channel.
    activation: "silu", or None for none.
    impl: of `lajax.ops.short_conv`.
    dtype: of the computation; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: D. Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models",
  2022, arXiv:2212.14052, section 3.1 (the shift matrix, here with learned weights).
  """

  def __init__(
    self,
    channels: int,
    width: int = 4,
    *,
    use_bias: bool = False,
    activation: str | None = "silu",
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("channels", channels)
    check_whole("width", width)
    check_flag("use_bias", use_bias)
    check_option("impl", impl, IMPLS)
    check_dtype_option("dtype", dtype)
    check_dtype_option("param_dtype", param_dtype, optional=False)
    check_rngs(rngs)
    if activation is not None and not (isinstance(activation, str) and activation == "silu"):
      raise ValueError(
        f"`activation` must be 'silu' or None; got {activation!r}. "
        "Apply another one to the outputs."
      )
    bound = width**-0.5
    self.weight = nnx.Param(
      jax.random.uniform(rngs.params(), (channels, width), param_dtype, -bound, bound)
    )
    self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if use_bias else None
    self.channels, self.width, self.activation, self.impl = channels, width, activation, impl
    self.dtype = dtype

  @property
  def input_width(self) -> int:
    return self.channels

  @property
  def parameters_dtype(self):
    return self.weight.dtype

  def init_conv(self, batch, dtype) -> Float[Array, "B W-1 D"]:
    return jnp.zeros((batch, self.width - 1, self.channels), dtype)

  def advance(self, x, memory, conv, documents):
    y, conv = self.convolve(x, conv, documents)
    return y, None, conv

  def convolve(
    self, x: Float[Array, "B T D"], cache: Array | None, documents: CallDocuments
  ) -> tuple[Array, Array]:
    """Returns the convolution behind a cache, and the cache after it; x must be zero at padding."""
    dtype = computation_dtype(self, x.dtype)
    past = self.init_conv(len(x), dtype) if cache is None else cache.astype(dtype)
    bias = None if self.bias is None else self.bias[...]
    options = {"activation": self.activation, "impl": self.impl}
    return short_conv(x.astype(dtype), self.weight[...], bias, past, documents.ids, **options)
