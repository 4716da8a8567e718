"""RetNet: multi-scale retention."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import check_rotary, rotate, wide_dtype
from lajax.ops import linear_attention


class RetNet(Mixer):
  """Linear attention with a fixed decay per head, and rotary positions.

      S_t = gamma_h S_{t-1} + k_t v_t^T, gamma_h = 1 - 2^(-5-h) ;  o_t = K^(-1/2) S_t^T q_t
      q, k = rotate(x W, t),  y = (RMSNorm(o) * silu(x W_g)) W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K, even.
    expand_v: V / K.
    rope_theta: the base of the rotary positions; None for none.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: Y. Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models",
  2023, arXiv:2307.08621, equations 5, 6 and 8.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 2.0,
    rope_theta: float | None = 10_000.0,
    conv_size: int | None = None,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_rotary(rope_theta, K)
    projections = with_gate({"q": (H, K), "k": (H, K), "v": (H, V)}, use_gate, H, V)
    super().__init__(
      d_model,
      projections,
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.norm = self.rms_norm(V, norm_eps)
    self.rope_theta = rope_theta

  def mix(self, p, memory, documents):
    q, k = p["q"], p["k"]
    if self.rope_theta is not None:
      q, k = (rotate(x, documents.position, self.rope_theta) for x in (q, k))
    log_gamma = np.log1p(-np.exp2(-5.0 - np.arange(q.shape[2])))
    g = jnp.broadcast_to(jnp.asarray(log_gamma[None, None], wide_dtype(q.dtype)), q.shape[:3])
    o, memory = self.apply_op(linear_attention, q, k, p["v"], g, memory=memory, documents=documents)
    return self.norm(o, p.get("gate")), memory
