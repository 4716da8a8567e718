"""Momentum DeltaNet (MDN)."""

from math import sqrt

import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax.layers.gated_delta import GatedDeltaMixer
from lajax.layers.mixer import extends
from lajax.layers.parameters import aligned, log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops import momentum_delta_rule

LEAST_LOG_MOMENTUM = -2.0


class MomentumDeltaNet(GatedDeltaMixer):
  """Gated DeltaNet whose state moves by a decayed sum of its corrections.

      M_t = e^(m_t) M_{t-1} - eta_t k_t (v_t - e^(g_t) S_{t-1}^T k_t)^T
      S_t = e^(g_t) S_{t-1} - beta_t M_t ;  o_t = K^(-1/2) S_t^T q_t
      m = max(-exp(A_log_m) softplus(x W_m + m_bias), -2), eta = 1 + tanh(x W_eta / sqrt(D))
      r = (eta exp(log_ratio))^2, beta = sigmoid(x W_beta) r / (1 + r)
      g = -exp(A_log) softplus(x W_a + dt_bias) - log(1 + r)
      q = l2norm(q' - exp(log_feedback) k'), k = l2norm(k'), q', k', v = silu(conv(x W))
      y = (RMSNorm(o) * act(x W_g)) W_o

  The bounds of beta and g by r keep the second-order dynamics of S and M stable.

  Args:
    d_model: D.
    num_heads: H, of the queries and keys.
    head_dim: K.
    num_v_heads: HV, of the values, gates and states, a multiple of H; None for H.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by act(x W_g).
    gate_activation: act, "sigmoid" or "swish" (silu).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.momentum_delta_rule`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; those of gates and norms are float32 at least.
    rngs: random streams of the initial parameters. A, A_m ~ U(0, 16), softplus of dt_bias and of
      m_bias log-uniform in [1e-3, 1e-1], the ratio ~ U(0, 4), the feedback ~ U(0, 1).

  Raises:
    ValueError: an option is out of its range.

  Paper: Y. Huang et al., "MDN: Parallelizing Stepwise Momentum for Delta Linear Attention", 2026,
  arXiv:2605.05838; the parameterisation as in the authors' code.
  """

  memory_letters = "B HV K V", "B HV K V"

  @extends(GatedDeltaMixer)
  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_v_heads: int | None = None,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    use_gate: bool = True,
    gate_activation: str = "sigmoid",
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ): ...

  def further_projections(self, projections):
    return {"momentum": projections["beta"], "eta": projections["beta"]}

  def add_parameters(self, rngs):
    (HV,), (H, _) = (dict(self.projections)[name] for name in ("beta", "k"))
    uniform = lambda heads, high: nnx.Param(
      log_uniform_rate(rngs.params(), (heads,), 0.0, high, self.gate_dtype)
    )
    self.A_log_momentum, self.log_ratio = uniform(HV, 16.0), uniform(HV, 4.0)
    self.momentum_bias = nnx.Param(step_bias(rngs.params(), (HV,), self.gate_dtype))
    self.log_feedback = uniform(H, 1.0)

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    return S, jnp.zeros_like(S)

  def mix(self, p, memory, documents):
    q, k = widen(p["q"]), widen(p["k"])
    q = l2_normalize(q - jnp.exp(aligned(self.log_feedback[...][:, None], q)) * k)
    k = l2_normalize(k)
    momentum = softplus_decay(p["momentum"], self.A_log_momentum[...], self.momentum_bias[...])
    eta = 1 + jnp.tanh(widen(p["eta"]) / sqrt(self.d_model))
    r = (eta * jnp.exp(aligned(self.log_ratio[...], eta))) ** 2
    g = self.decay(p) - jnp.log1p(r)
    # p = e^g k differs between the value heads of a group, so each has queries and keys of its own.
    q, k = (jnp.repeat(x, g.shape[2] // x.shape[2], axis=2) for x in (q, k))
    o, memory = self.apply_op(
      momentum_delta_rule,
      q.astype(p["q"].dtype),
      k.astype(p["k"].dtype),
      jnp.exp(g)[..., None] * k,
      p["v"],
      self.strength(p) * r / (1 + r),
      eta,
      g,
      jnp.maximum(momentum, LEAST_LOG_MOMENTUM),
      memory=memory,
      documents=documents,
    )
    return self.norm(o, p.get("gate")), memory
