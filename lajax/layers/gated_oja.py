"""Gated Oja."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_positive
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import Linear, log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops import gated_oja


class GatedOja(Mixer):
  """Oja's rule on a state that decays per value channel: Gated DeltaNet's transpose.

      S_t = S_{t-1} Diag(e^(g_t)) ;  S_t += (k_t - S_t v_t) (beta_t v_t)^T
      o_t = K^(-1/2) S_t^T q_t
      g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * silu(x W_g)) W_o
      q, k = silu(conv(x W)), v = l2norm(silu(conv(x W)))

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    gate_rank: the rank of the projection to the decay; None for V.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.gated_oja`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log [H], dt_bias [H V] and the norm's weight are float32 at
      least.
    rngs: random streams of the initial parameters. A ~ U(1, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: the update of K. Irie et al., "Images as Weight Matrices", 2022, arXiv:2210.06184, equation
  6, with the gates of Kimi Team, "Kimi Linear", 2025, arXiv:2510.26692, equation 1, on the values.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    gate_rank: int | None = None,
    conv_size: int | None = 4,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_positive("gate_rank", gate_rank)
    R = V if gate_rank is None else gate_rank
    projections = with_gate(
      {"q": (H, K), "k": (H, K), "v": (H, V), "beta": (H,), "f": (R,)}, use_gate, H, V
    )
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
    self.decay_proj = Linear(
      R, H * V, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.A_log = nnx.Param(log_uniform_rate(rngs.params(), (H,), 1.0, 16.0, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (H, V), self.gate_dtype))
    self.norm = self.rms_norm(V, norm_eps)

  def mix(self, p, memory, documents):
    v, beta = l2_normalize(p["v"]), jax.nn.sigmoid(widen(p["beta"]))
    f = self.decay_proj(p["f"]).reshape(v.shape)
    g = softplus_decay(f, self.A_log[...][:, None], self.dt_bias[...])
    o, memory = self.apply_op(
      gated_oja, p["q"], p["k"], v, beta, g, memory=memory, documents=documents
    )
    return self.norm(o, p.get("gate")), memory
