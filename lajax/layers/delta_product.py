"""DeltaProduct and Gated DeltaProduct."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_flag, check_whole
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops import delta_product


class DeltaProduct(Mixer):
  """R delta steps per token: the transition is a decay times R Householder-like factors.

      S_t = e^(g_t) S_{t-1}, then for r = 1 .. R: S_t += beta_tr k_tr (v_tr - S_t^T k_tr)^T
      o_t = K^(-1/2) S_t^T q_t
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = 2 sigmoid(x W_beta)
      y = (RMSNorm(o) * silu(x W_g)) W_o
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    num_householder: R.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_decay: e^(g_t) before the steps (Gated DeltaProduct); without it, DeltaProduct.
    use_gate: multiply the normed outputs by silu(x W_g).
    allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.delta_product`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(0, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: J. Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
  Products", 2025, arXiv:2502.10297, equation 4.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_householder: int = 2,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    use_decay: bool = True,
    use_gate: bool = True,
    allow_negative_eigenvalues: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V, R = (
      value_heads(num_heads),
      head_dim,
      value_width(head_dim, expand_v),
      num_householder,
    )
    check_whole("num_householder", num_householder)
    check_flag("use_decay", use_decay)
    check_flag("allow_negative_eigenvalues", allow_negative_eigenvalues)
    # Heads before the R steps, so that a cut of the columns by heads is one of all projections.
    projections = {"q": (H, K), "k": (H, R, K), "v": (H, R, V), "beta": (H, R)}
    projections = with_gate(projections | ({"a": (H,)} if use_decay else {}), use_gate, H, V)
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
    self.A_log = (
      nnx.Param(log_uniform_rate(rngs.params(), (H,), 0.0, 16.0, self.gate_dtype))
      if use_decay
      else None
    )
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (H,), self.gate_dtype)) if use_decay else None
    self.norm = self.rms_norm(V, norm_eps)
    self.beta_range = 2.0 if allow_negative_eigenvalues else 1.0

  def mix(self, p, memory, documents):
    k, v, beta = (jnp.swapaxes(p[name], 2, 3) for name in ("k", "v", "beta"))
    q, k = l2_normalize(p["q"]), l2_normalize(k)
    beta = self.beta_range * jax.nn.sigmoid(widen(beta))
    g = None
    if self.A_log is not None and self.dt_bias is not None:
      g = softplus_decay(p["a"], self.A_log[...], self.dt_bias[...])
    o, memory = self.apply_op(delta_product, q, k, v, beta, g, memory=memory, documents=documents)
    return self.norm(o, p.get("gate")), memory
