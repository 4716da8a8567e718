"""Q-Delta."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax.layers.gated_delta import GatedDeltaMixer
from lajax.layers.parameters import widen
from lajax.ops import dplr

FEEDBACK_BIAS = 0.9  # lambda starts at sigmoid(-0.9) = 0.29, as in the authors' code


class QDelta(GatedDeltaMixer):
  """Gated DeltaNet whose error is predicted by the query too.

      S_t = e^(g_t) S_{t-1} ;  S_t += beta_t k_t (v_t - S_t^T (k_t + lambda_t q_t))^T
      o_t = K^(-1/2) S_t^T q_t,  lambda = sigmoid(x W_lambda - 0.9)
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * silu(x W_g)) W_o,  q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H, of the queries and keys.
    head_dim: K.
    num_v_heads: HV, of the values, gates and states, a multiple of H; None for H.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
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
    allow_negative_eigenvalues: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    HV = num_heads if num_v_heads is None else num_v_heads
    super().__init__(
      d_model,
      num_heads,
      head_dim,
      num_v_heads=num_v_heads,
      expand_v=expand_v,
      conv_size=conv_size,
      use_gate=use_gate,
      allow_negative_eigenvalues=allow_negative_eigenvalues,
      norm_eps=norm_eps,
      projections={"feedback": (HV,)},
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def mix(self, p, memory, documents):
    v, beta, g = p["v"], self.strength(p)[..., None], self.decay(p)
    groups = v.shape[2] // p["k"].shape[2]
    q, k = (jnp.repeat(widen(x), groups, axis=2) for x in self.queries_and_keys(p))
    feedback = self.beta_range * jax.nn.sigmoid(widen(p["feedback"]) - FEEDBACK_BIAS)
    # The error reads the decayed state, and `a` of the op the one before the decay.
    a = jnp.exp(g)[..., None] * (k + feedback[..., None] * q)
    written = (beta * widen(v)).astype(v.dtype)
    o, memory = self.apply_op(
      dplr, q, k, written, a, -beta * k, g, memory=memory, documents=documents
    )
    return self.norm(o, p.get("gate")), memory
