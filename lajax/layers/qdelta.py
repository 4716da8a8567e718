"""Q-Delta."""

import jax
import jax.numpy as jnp

from lajax.layers.gated_deltanet import GatedDeltaNet
from lajax.layers.parameters import widen
from lajax.ops import dplr

FEEDBACK_BIAS = 0.9  # lambda starts at sigmoid(-0.9) = 0.29, as in the authors' code


class QDelta(GatedDeltaNet):
  """Gated DeltaNet whose error is predicted by the query too.

      S_t = e^(g_t) S_{t-1} ;  S_t += beta_t k_t (v_t - S_t^T (k_t + lambda_t q_t))^T
      o_t = K^(-1/2) S_t^T q_t,  lambda = sigmoid(x W_lambda - 0.9)
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * act(x W_g)) W_o,  q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H, of the queries and keys.
    head_dim: K.
    num_v_heads: HV, of the values, gates and states, a multiple of H; None for H.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by act(x W_g).
    gate_activation: act, "swish" (silu) or "sigmoid".
    allow_negative_eigenvalues: beta and lambda in (0, 2) instead of (0, 1).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.dplr`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(0, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: S. Park, S. Kim, N. Park, "Q-Delta: Beyond Key-Value Associative State Evolution", 2026,
  arXiv:2606.08804, its query-aware delta rule with one decay per head.
  """

  def further_projections(self, projections):
    return {"feedback": projections["beta"]}

  def correct(self, p, q, k, beta, g, memory, documents):
    v, beta = p["v"], beta[..., None]
    q, k = (jnp.repeat(widen(x), v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    feedback = self.beta_range * jax.nn.sigmoid(widen(p["feedback"]) - FEEDBACK_BIAS)
    # The error reads the decayed state, and `a` of the op the one before the decay.
    a = jnp.exp(g)[..., None] * (k + feedback[..., None] * q)
    written = (beta * widen(v)).astype(v.dtype)
    return self.apply_op(dplr, q, k, written, a, -beta * k, g, memory=memory, documents=documents)
