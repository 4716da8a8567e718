"""Short causal depthwise convolution, which stands before most linear mixers."""

import itertools
from collections.abc import Mapping

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
    return self._convolve(x, self.weight[...], self._bias(), cache, documents)

  def _bias(self) -> Array | None:
    return None if self.bias is None else self.bias[...]

  def _convolve(self, x, weight, bias, cache, documents: CallDocuments) -> tuple[Array, Array]:
    dtype = computation_dtype(self, x.dtype)
    if cache is None:
      cache = jnp.zeros((x.shape[0], self.width - 1, x.shape[2]), dtype)
    options = {"activation": self.activation, "impl": self.impl}
    return short_conv(x.astype(dtype), weight, bias, cache.astype(dtype), documents.ids, **options)


def convolve_together(
  convs: Mapping[str, ShortConv],
  inputs: Mapping[str, Float[Array, "B T ..."]],
  caches: Mapping[str, Float[Array, "B W-1 D"]] | None,
  documents: CallDocuments,
) -> tuple[dict[str, Array], dict[str, Array]]:
  """Returns the convolutions of several inputs, all computed by one call, and their caches.

  One call compiles in a third of the time of three: XLA computes the taps of each call again for
  every product that needs them. Channels are joined head by head, so that arrays which are sharded
  by heads stay where they are.

  Args:
    convs: convolutions with the same options, by name.
    inputs: [B T *shape], where the shape begins with the heads; zero at padding.
    caches: what each convolution carries; None for zeros.
    documents: of the call's tokens.
  """
  names = tuple(inputs)
  heads = min(inputs[name].shape[2] for name in names)
  if any(inputs[name].shape[2] % heads for name in names):
    heads = 1
  widths = [convs[name].channels // heads for name in names]

  def join(arrays, axis: int):
    """[.. channels ..] of each name -> [.. heads * (all widths) ..]."""
    split = [
      x.reshape(*x.shape[:axis], heads, width, *x.shape[axis + 1 :])
      for x, width in zip(arrays, widths, strict=True)
    ]
    return jax.lax.collapse(jnp.concatenate(split, axis=axis + 1), axis, axis + 2)

  def part(x) -> dict[str, Array]:
    """[B T heads * (all widths)] -> [B T channels] of each name."""
    by_head = x.reshape(*x.shape[:2], heads, sum(widths))
    parts = jnp.split(by_head, list(itertools.accumulate(widths))[:-1], axis=-1)
    return {name: jax.lax.collapse(y, 2) for name, y in zip(names, parts, strict=True)}

  first = convs[names[0]]
  weight = join([convs[name].weight[...] for name in names], 0)
  biases = [bias[...] for name in names if (bias := convs[name].bias) is not None]
  bias = join(biases, 0) if biases else None
  x = join([jax.lax.collapse(inputs[name], 2) for name in names], 2)
  cache = None if caches is None else join([caches[name] for name in names], 2)
  y, cache = first._convolve(x, weight, bias, cache, documents)
  outputs = {name: y.reshape(inputs[name].shape) for name, y in part(y).items()}
  return outputs, part(cache)
