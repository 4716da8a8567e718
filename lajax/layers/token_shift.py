"""Shared by the RWKV layers: inputs mixed with those of the token before, low-rank projections."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from lajax._shapes import check_dtype_option, check_number
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import Linear, aligned, widen
from lajax.layers.stateful import computation_dtype
from lajax.ops import short_conv


class TokenShiftMixer(Mixer):
  """A mixer whose projections read mixtures of the token and the one before: `inputs` says which.

  Args: those of `Mixer` but the convolution's.
  """

  def inputs(self, x: Float[Array, "B T D"], change: Float[Array, "B T D"]) -> dict[str, Array]:
    """Returns what each projection and `mix` read; `change` is the token before minus the token."""
    raise NotImplementedError

  def init_conv(self, batch, dtype) -> Float[Array, "B 1 D"]:
    """Returns the token before the first: zeros."""
    return jnp.zeros((batch, 1, self.d_model), dtype)

  def project(self, x, conv, documents):
    dtype = computation_dtype(self, x.dtype)
    x = x.astype(dtype)
    past = self.init_conv(len(x), dtype) if conv is None else conv.astype(dtype)
    # The token before, of the same document: a convolution of width 2 whose weights are (1, 0).
    weight = jnp.broadcast_to(jnp.array([[1, 0]], dtype), (self.d_model, 2))
    options = {"activation": None, "impl": self.impl}
    before, conv = short_conv(x, weight, None, past, documents.ids, **options)
    read = self.inputs(x, before - x)
    projected = {name: self.projected(name, read[name]) for name, _ in self.projections}
    return read | projected, conv


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
    self.down = Linear(features, rank, **linear)
    self.up = Linear(rank, outputs, kernel_init=nnx.initializers.zeros_init(), **linear)
    self.bias = None if bias is None else nnx.Param(bias)
    self.activation = activation

  def __call__(self, x: Array) -> Array:
    y = self.down(x)
    y = self.up(y if self.activation is None else self.activation(y))
    return y if self.bias is None else widen(y) + aligned(self.bias[...], y)


class HeadNorm(nnx.Module):
  """LayerNorm of each head, with one weight and one bias per channel.

  y = (x - mean x) / sqrt(var x + eps) * weight + bias
  """

  def __init__(self, heads: int, width: int, *, eps: float, param_dtype):
    check_dtype_option("param_dtype", param_dtype, optional=False)
    self.weight = nnx.Param(jnp.ones((heads, width), param_dtype))
    self.bias = nnx.Param(jnp.zeros((heads, width), param_dtype))
    self.eps = check_number("norm_eps", eps, 0.0)

  def __call__(self, x: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
    wide = widen(x)
    wide = wide - wide.mean(-1, keepdims=True)
    y = wide / jnp.sqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
    flat = lax.collapse(y, 2)
    per_channel = lambda w: jnp.broadcast_to(w[...].astype(flat.dtype).reshape(-1), flat.shape)
    y = flat * per_channel(self.weight) + per_channel(self.bias)
    return y.reshape(x.shape).astype(x.dtype)
