"""What the RWKV layers share: inputs mixed with those of the token before, and projections of low rank."""

from collections.abc import Callable
from math import prod

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from lajax.layers.mixer import Mixer
from lajax.layers.parameters import over_tokens, widen
from lajax.layers.short_conv import ShortConv


class TokenShift(ShortConv):
  """The token before, of the same document: a short convolution of width 2 whose weights are (1, 0)."""

  def __init__(self, channels: int, *, dtype=None, param_dtype=jnp.float32):
    self.channels, self.width, self.activation, self.bias = channels, 2, None, None
    self.dtype, self.param_dtype = dtype, param_dtype

  @property
  def weight(self) -> Array:
    return jnp.tile(jnp.array([1, 0], self.param_dtype), (self.channels, 1))


class LowRank(nnx.Module):
  """y = activation(x W_1) W_2 + b.

  Args:
    features: of x.
    rank: of the product.
    outputs: of y.
    activation: between the two; None for none.
    bias: the initial b; None for no b.
    dtype, param_dtype, rngs: as in the layers. W_2 starts at zero, so that y starts as b.
  """

  def __init__(
    self,
    features: int,
    rank: int,
    outputs: int,
    activation: Callable | None = None,
    *,
    bias=None,
    dtype,
    param_dtype,
    rngs,
  ):
    linear = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.down = nnx.Linear(features, rank, **linear)
    self.up = nnx.Linear(rank, outputs, kernel_init=nnx.initializers.zeros_init(), **linear)
    self.bias = None if bias is None else nnx.Param(bias)
    self.activation = activation

  def __call__(self, x: Array) -> Array:
    y = self.down(x)
    y = self.up(y if self.activation is None else self.activation(y))
    return y if self.bias is None else widen(y) + self.bias[...]


class TokenShiftMixer(Mixer):
  """A mixer whose projections read mixtures of the token and the one before. A subclass says which in `inputs`.

  Args: those of `Mixer` but the convolution's.
  """

  def __init__(
    self,
    d_model: int,
    projections,
    *,
    inner,
    memory,
    impl,
    chunk_size,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    super().__init__(
      d_model,
      projections,
      inner=inner,
      memory=memory,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.conv = nnx.data(TokenShift(d_model, dtype=dtype, param_dtype=param_dtype))

  def inputs(self, x: Float[Array, "B T D"], change: Float[Array, "B T D"]) -> dict[str, Array]:
    """What each projection, and whatever else `mix` wants, reads: `change` is the token before minus the token."""
    raise NotImplementedError

  def project(self, x, cache, documents):
    before, cache = self.conv.convolve(x, cache, documents)
    p = self.inputs(x, before.astype(x.dtype) - x)
    kernel, start = self.in_proj.kernel[...], 0
    dtype = self.dtype or jnp.promote_types(x.dtype, kernel.dtype)
    for name, shape in self.direct:
      width = prod(shape)
      columns = kernel[:, start : start + width]
      p[name] = jnp.matmul(p[name].astype(dtype), columns.astype(dtype)).reshape(
        *x.shape[:2], *shape
      )
      start += width
    return p, cache


class HeadNorm(nnx.Module):
  """LayerNorm over each head, with a weight and a bias a channel: y = (x - mean x) / sqrt(var x + eps) * weight + bias."""

  def __init__(self, heads: int, width: int, *, eps: float, param_dtype):
    self.weight = nnx.Param(jnp.ones((heads, width), param_dtype))
    self.bias = nnx.Param(jnp.zeros((heads, width), param_dtype))
    self.eps = eps

  def __call__(self, x: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
    wide = widen(x)
    wide = wide - wide.mean(-1, keepdims=True)
    y = wide / jnp.sqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
    flat = lax.collapse(y, 2)
    flat = flat * over_tokens(self.weight[...].reshape(-1), flat.shape) + over_tokens(
      self.bias[...].reshape(-1), flat.shape
    )
    return flat.reshape(x.shape).astype(x.dtype)
