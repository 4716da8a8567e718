"""Comba."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_flag
from lajax.layers.gated_delta import GatedDeltaMixer
from lajax.layers.mixer import extends
from lajax.layers.parameters import aligned, widen
from lajax.ops import dplr


class Comba(GatedDeltaMixer):
  """A delta rule with feedback of the un-decayed state, and a corrected query.

      u_t = beta_t (v_t - S_{t-1}^T p_t) ;  S_t = e^(g_t) S_{t-1} + k_t u_t^T
      o_t = K^(-1/2) S_t^T (q_t - D_h p_t)
      p = sigmoid(d_h) k, g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * silu(x W_g)) W_o,  q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    correct_outputs: read with q - D p instead of q.
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.dplr`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias, d, D and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(0, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1], d = D = 1.

  Raises:
    ValueError: an option is out of its range.

  Paper: J. Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", 2025,
  arXiv:2506.02475, its recurrence of a scalar plus low rank with output correction.
  """

  @extends(GatedDeltaMixer)
  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    conv_size: int | None = 4,
    use_gate: bool = True,
    correct_outputs: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.correct_outputs = check_flag("correct_outputs", correct_outputs)

  def add_parameters(self, rngs):
    ones = lambda: nnx.Param(jnp.ones(dict(self.projections)["k"][0], self.gate_dtype))
    self.d, self.D = ones(), ones() if self.correct_outputs else None

  def mix(self, p, memory, documents):
    (q, k), v = map(widen, self.queries_and_keys(p)), p["v"]
    beta, g = self.strength(p)[..., None], self.decay(p)
    per_head = lambda weight: aligned(weight[...][:, None], k)
    feedback = jax.nn.sigmoid(per_head(self.d)) * k
    if self.D is not None:
      q = q - per_head(self.D) * feedback
    o, memory = self.apply_op(
      dplr,
      q,
      k,
      (beta * widen(v)).astype(v.dtype),
      feedback,
      -beta * k,
      g,
      memory=memory,
      documents=documents,
    )
    return self.norm(o, p.get("gate")), memory
