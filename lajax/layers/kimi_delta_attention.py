"""Kimi Delta Attention (KDA)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_flag, check_number, check_positive
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import (
  Linear,
  aligned,
  bounded_decay,
  log_uniform_rate,
  softplus_decay,
  step_bias,
  widen,
)
from lajax.ops import delta_rule


class KimiDeltaAttention(Mixer):
  """The gated delta rule with one decay per key channel.

      S_t = Diag(e^(g_t)) S_{t-1} ;  S_t += beta_t k_t (v_t - S_t^T k_t)^T
      o_t = K^(-1/2) S_t^T q_t
      g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * sigmoid(x W_g1 W_g2 + b)) W_o
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H, of the queries and keys.
    head_dim: K.
    num_v_heads: HV, of the values, gates and states, a multiple of H; None for H.
    expand_v: V / K.
    gate_rank: the rank of the projections to the decay and to the output gate; None for V.
    full_rank: one matrix instead of two in these projections.
    gate_bias: the bias b of the output gate.
    lower_bound: None, or a negative number L: the decay is then L * sigmoid(exp(A_log) (x W_f1 W_f2
      + dt_bias)) in (L, 0); -5 is usual.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by the sigmoid gate.
    allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.delta_rule`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log [HV], dt_bias [HV K] and the norm's weight are float32 at
      least.
    rngs: random streams of the initial parameters. A ~ U(1, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025,
  arXiv:2510.26692, equation 1.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_v_heads: int | None = None,
    expand_v: float = 1.0,
    gate_rank: int | None = None,
    full_rank: bool = False,
    gate_bias: bool = True,
    lower_bound: float | None = None,
    conv_size: int | None = 4,
    use_gate: bool = True,
    allow_negative_eigenvalues: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, HV, K, V = (
      num_heads,
      value_heads(num_heads, num_v_heads),
      head_dim,
      value_width(head_dim, expand_v),
    )
    check_positive("gate_rank", gate_rank)
    if lower_bound is not None and check_number("lower_bound", lower_bound) >= 0:
      raise ValueError(
        f"`lower_bound` must be a negative log decay, such as -5.0, or None; got {lower_bound}."
      )
    R = V if gate_rank is None else gate_rank
    check_flag("full_rank", full_rank)
    check_flag("gate_bias", gate_bias)
    check_flag("allow_negative_eigenvalues", allow_negative_eigenvalues)
    if full_rank and gate_rank is not None:
      raise ValueError(f"`gate_rank` must be None with full_rank=True; got {gate_rank}.")
    f, gate = ((HV, K), (HV, V)) if full_rank else ((R,), (R,))
    projections = with_gate(
      {"q": (H, K), "k": (H, K), "v": (HV, V), "beta": (HV,), "f": f}, use_gate, *gate
    )
    super().__init__(
      d_model,
      projections,
      inner=HV * V,
      memory=(HV, K, V),
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    linear = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.decay_proj = None if full_rank else Linear(R, HV * K, use_bias=False, **linear)
    low_rank_gate, bias = use_gate and not full_rank, use_gate and full_rank and gate_bias
    self.gate_proj = Linear(R, HV * V, use_bias=gate_bias, **linear) if low_rank_gate else None
    self.gate_bias = nnx.Param(jnp.zeros((HV, V), self.gate_dtype)) if bias else None
    self.A_log = nnx.Param(log_uniform_rate(rngs.params(), (HV,), 1.0, 16.0, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (HV, K), self.gate_dtype))
    self.norm = self.rms_norm(V, norm_eps, "sigmoid")
    self.beta_range = 2.0 if allow_negative_eigenvalues else 1.0
    self.lower_bound = lower_bound

  def mix(self, p, memory, documents):
    q, k = l2_normalize(p["q"]), l2_normalize(p["k"])
    beta = self.beta_range * jax.nn.sigmoid(widen(p["beta"]))
    f = p["f"] if self.decay_proj is None else self.decay_proj(p["f"])
    A_log, dt_bias = self.A_log[...][:, None], self.dt_bias[...]
    f = f.reshape(*f.shape[:2], *dt_bias.shape)
    if self.lower_bound is None:
      g = softplus_decay(f, A_log, dt_bias)
    else:
      g = bounded_decay(f, A_log, dt_bias, self.lower_bound)
    o, memory = self.correct(p, q, k, beta, g, memory, documents)
    return self.norm(o, self._gate(p, o.shape)), memory

  def correct(self, p, q, k, beta, g, memory, documents):
    """Returns what the op gives: outputs [B T HV V] and the memory."""
    return self.apply_op(
      delta_rule, q, k, p["v"], beta, g, memory=memory, documents=documents, bound=self.lower_bound
    )

  def _gate(self, p, shape):
    """Returns the output gate before its sigmoid, or None."""
    if self.gate_proj is not None:
      return self.gate_proj(p["gate"]).reshape(shape)
    if self.gate_bias is None:
      return p.get("gate")
    gate = widen(p["gate"])
    return (gate + aligned(self.gate_bias[...], gate)).astype(p["gate"].dtype)
