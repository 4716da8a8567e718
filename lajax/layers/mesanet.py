"""MesaNet."""

import functools
from math import expm1, log

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_number, check_positive
from lajax.layers.gated_delta import GatedDeltaMixer
from lajax.layers.mixer import extends
from lajax.layers.parameters import widen
from lajax.ops import mesa


class MesaNet(GatedDeltaMixer):
  """Linear attention that reads with the solution of a ridge regression on the keys so far.

      G_t = e^(g_t) G_{t-1} + beta_t k_t k_t^T ;  S_t = e^(g_t) S_{t-1} + beta_t k_t v_t^T
      o_t = S_t^T (G_t + Diag(ridge))^(-1) q_t,  ridge = ridge_bound + softplus(ridge_bias)
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = RMSNorm(o) W_o, or (RMSNorm(o) * silu(x W_g)) W_o
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    ridge_bound: the least ridge, above 0.
    cg_steps: None to solve exactly; or the greatest number of steps of conjugate gradients, 30 in
      the paper.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.mesa`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; those of gates and norms are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(0, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1]; the ridge is 1, or twice its bound where that is more than 1/2.

  Raises:
    ValueError: an option is out of its range.

  Paper: J. von Oswald et al., "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
  2025, arXiv:2506.05233.
  """

  memory_letters = "B HV K K", "B HV K V"

  @extends(GatedDeltaMixer)
  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    ridge_bound: float = 0.25,
    cg_steps: int | None = None,
    conv_size: int | None = 4,
    use_gate: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.ridge_bound = check_number("ridge_bound", ridge_bound, above=0.0)
    self.cg_steps = check_positive("cg_steps", cg_steps)

  def add_parameters(self, rngs):
    above = max(1 - self.ridge_bound, self.ridge_bound)
    shape = dict(self.projections)["k"]
    self.ridge_bias = nnx.Param(jnp.full(shape, log(expm1(above)), self.gate_dtype))

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    return jnp.zeros((*S.shape[:3], S.shape[2]), S.dtype), S

  def mix(self, p, memory, documents):
    q, k = self.queries_and_keys(p)
    ridge = self.ridge_bound + jax.nn.softplus(widen(self.ridge_bias[...]))
    o, memory = self.apply_op(
      functools.partial(mesa, cg_steps=self.cg_steps),
      q,
      k,
      p["v"],
      self.strength(p),
      self.decay(p),
      ridge,
      memory=memory,
      documents=documents,
      scale=1.0,
    )
    return self.norm(o, p.get("gate")), memory
