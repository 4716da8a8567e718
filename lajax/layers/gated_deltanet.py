"""Gated DeltaNet."""

from lajax.layers.gated_delta import GatedDeltaMixer
from lajax.ops import delta_rule


class GatedDeltaNet(GatedDeltaMixer):
  """The delta rule on a state that decays, with one decay per head.

      S_t = e^(g_t) S_{t-1} ;  S_t += beta_t k_t (v_t - S_t^T k_t)^T ;  o_t = K^(-1/2) S_t^T q_t
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * act(x W_g)) W_o
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H, of the queries and keys.
    head_dim: K.
    num_v_heads: HV, of the values, gates and states, a multiple of H; None for H.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by act(x W_g).
    gate_activation: act, "swish" (silu) or "sigmoid".
    allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.delta_rule`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(0, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
  Rule", 2024, arXiv:2412.06464, equation 10.
  """

  def mix(self, p, memory, documents):
    o, memory = self.correct(
      p, *self.queries_and_keys(p), self.strength(p), self.decay(p), memory, documents
    )
    return self.norm(o, p.get("gate")), memory

  def correct(self, p, q, k, beta, g, memory, documents):
    """Returns what the op gives: outputs [B T HV V] and the memory."""
    return self.apply_op(delta_rule, q, k, p["v"], beta, g, memory=memory, documents=documents)
