"""Lightning attention, as in MiniMax-Text-01."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lajax._shapes import check_number, check_whole
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import Buffer, wide_dtype
from lajax.ops import linear_attention


class Lightning(Mixer):
  """Linear attention with a fixed decay per head, slower in later layers.

      S_t = e^(-slope_h) S_{t-1} + k_t v_t^T ;  o_t = K^(-1/2) S_t^T q_t
      slope_h = 2^(-8 (h + 1) / H) (1 - l / (L - 1 + 1e-5) + 1e-5)
      for head h = 0 .. H - 1 of layer l = 0 .. L - 1
      q, k, v = silu(x W),  y = (RMSNorm(o) * sigmoid(x W_g)) W_o, the norm over all heads together

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    layer_index: l, in 0 .. num_layers - 1.
    num_layers: L, all layers of the model, those of other kinds included.
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v, before the silu; None (the default) for
      none.
    use_gate: multiply the normed outputs by sigmoid(x W_g).
    scale: factor of o; None for K^(-1/2).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Papers: Z. Qin et al., "Lightning Attention-2", 2024, arXiv:2401.04658; MiniMax, "MiniMax-01:
  Scaling Foundation Models with Lightning Attention", 2025, arXiv:2501.08313, its lightning
  attention layer.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    layer_index: int = 0,
    num_layers: int = 1,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    use_gate: bool = True,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_whole("num_layers", num_layers)
    if check_whole("layer_index", layer_index, 0) >= num_layers:
      raise ValueError(
        f"`layer_index` must be in 0 .. num_layers - 1 = {num_layers - 1}; got {layer_index}."
      )
    projections = with_gate({"q": (H, K), "k": (H, K), "v": (H, V)}, use_gate, H * V)
    super().__init__(
      d_model,
      projections,
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      conv_activation=None,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.norm = self.rms_norm(H * V, norm_eps, "sigmoid")
    self.slopes = Buffer(jnp.asarray(lightning_slopes(H, layer_index, num_layers), self.gate_dtype))
    self.scale = None if scale is None else check_number("scale", scale)

  def mix(self, p, memory, documents):
    q, k, v = (jax.nn.silu(p[name]) for name in "qkv")
    # No gradient: a step along that of all variables must not train them.
    slopes = jax.lax.stop_gradient(self.slopes[...]).astype(wide_dtype(q.dtype))
    g = jnp.broadcast_to(-slopes[None, None], q.shape[:3])
    o, memory = self.apply_op(
      linear_attention, q, k, v, g, scale=self.scale, memory=memory, documents=documents
    )
    return self.norm(jax.lax.collapse(o, 2), p.get("gate")), memory


def lightning_slopes(num_heads: int, layer_index: int, num_layers: int) -> np.ndarray:
  """Returns the negative log decay of each head of layer `layer_index`, [H] float64."""
  depth = 1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5
  return np.exp2(-8 * np.arange(1, num_heads + 1) / num_heads) * depth
