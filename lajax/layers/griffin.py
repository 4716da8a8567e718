"""The recurrent block of Griffin and RecurrentGemma."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_positive, check_whole
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import widen
from lajax.layers.rglru import RGLRU


class GriffinBlock(Mixer):
  """The RG-LRU behind a short convolution, times a GeLU branch.

      y = (RG-LRU(conv(x W_x)) * gelu(x W_y)) W_o

  Args:
    d_model: D.
    lru_width: the channels of the recurrence; None for d_model.
    num_blocks: of the RG-LRU's gates, a divisor of lru_width.
    conv_size: width of the short convolution, without activation; None for none.
    use_bias: biases on the projections, as in RecurrentGemma.
    impl: of `lajax.linear_recurrence`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the RG-LRU's biases and Lambda are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or num_blocks does not divide lru_width.

  Paper: S. De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
  Language Models", 2024, arXiv:2402.19427, section 2.3 and figure 2; GeLU in its tanh form, as in
  A. Botev et al., "RecurrentGemma", 2024, arXiv:2404.07839.
  """

  memory_letters = "B D"

  def __init__(
    self,
    d_model: int,
    lru_width: int | None = None,
    num_blocks: int = 1,
    *,
    conv_size: int | None = 4,
    use_bias: bool = False,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("d_model", d_model)
    check_positive("lru_width", lru_width)
    W = lru_width or d_model
    super().__init__(
      d_model,
      {"u": (W,), "gate": (W,)},
      inner=W,
      memory=(W,),
      conv_size=conv_size,
      conv_on=("u",),
      conv_bias=True,
      conv_activation=None,
      use_bias=use_bias,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.rglru = RGLRU(W, num_blocks, impl=impl, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

  def mix(self, p, memory, documents):
    h, memory = self.rglru.recur(documents.blank_padding(p["u"]), memory, documents)
    gated = widen(h) * jax.nn.gelu(widen(p["gate"]), approximate=True)
    return gated.astype(h.dtype), memory
