"""The double-gated short convolution of LFM2."""

import jax.numpy as jnp
from flax import nnx

from lajax.layers.mixer import Mixer


class DoubleGatedConv(Mixer):
  """A short convolution between two gates: a mixer without a recurrence.

      y = (c * conv(b * u)) W_o,  b, c, u = x W

  Args:
    d_model: D.
    conv_size: width of the convolution.
    use_bias: biases on the projections and the convolution.
    impl: of `lajax.ops.short_conv`.
    dtype: of the computation; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Source: Liquid AI, "LFM2 Technical Report", 2025, arXiv:2511.23404, section 2.
  """

  memory_letters = None

  def __init__(
    self,
    d_model: int,
    conv_size: int = 3,
    *,
    use_bias: bool = False,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(
      d_model,
      {"b": (d_model,), "c": (d_model,), "u": (d_model,)},
      inner=d_model,
      conv_size=conv_size,
      conv_on=("u",),
      conv_bias=use_bias,
      conv_activation=None,
      use_bias=use_bias,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def init_memory(self, batch, dtype):
    """Returns None: the convolution's cache is all that this layer carries."""
    return None

  def project(self, x, conv, documents):
    b, c, u = (self.projected(name, x) for name in "bcu")
    cache = None if conv is None else conv["u"]
    y, cache = self.conv["u"].convolve(documents.blank_padding(b * u), cache, documents)
    return {"y": c * y}, {"u": cache}

  def mix(self, p, memory, documents):
    return p["y"], None
