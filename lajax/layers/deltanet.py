"""DeltaNet."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_flag
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import widen
from lajax.ops import delta_rule


class DeltaNet(Mixer):
  """Linear attention that corrects what the state would answer, instead of adding to it.

      S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T ;  o_t = K^(-1/2) S_t^T q_t
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W)), beta = sigmoid(x W_beta)
      y = RMSNorm(o) W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1), so that I - beta k k^T may have
      the eigenvalue -1.
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.delta_rule`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
  Length", 2024, arXiv:2406.06484, section 3.3; beta in (0, 2): R. Grazzi et al., "Unlocking
  State-Tracking in Linear RNNs Through Negative Eigenvalues", 2024, arXiv:2411.12537.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    use_gate: bool = False,
    allow_negative_eigenvalues: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    projections = with_gate({"q": (H, K), "k": (H, K), "v": (H, V), "beta": (H,)}, use_gate, H, V)
    check_flag("allow_negative_eigenvalues", allow_negative_eigenvalues)
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
    self.beta_range = 2.0 if allow_negative_eigenvalues else 1.0

  def mix(self, p, memory, documents):
    q, k = l2_normalize(p["q"]), l2_normalize(p["k"])
    beta = self.beta_range * jax.nn.sigmoid(widen(p["beta"]))
    o, memory = self.apply_op(delta_rule, q, k, p["v"], beta, memory=memory, documents=documents)
    return self.norm(o, p.get("gate")), memory
