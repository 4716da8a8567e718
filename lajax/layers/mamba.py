"""Mamba (S6)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_flag, check_number, check_positive, check_whole
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import Linear, aligned, step_bias, widen
from lajax.ops import linear_recurrence


class Mamba(Mixer):
  """The selective state space: N numbers per channel, all of which the channel's step size moves.

      h_t[d, n] = e^(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[n] u_t[d]
      o_t[d] = sum_n C_t[n] h_t[d, n] + D[d] u_t[d]
      u = silu(conv(x W)),  (r, B, C) = u W_x,  dt = softplus(r W_dt + dt_bias),  A = -exp(A_log)
      y = (o * silu(x W_z)) W_o

  Args:
    d_model: D.
    inner_dim: E, the channels d; None for 2 d_model.
    state_dim: N.
    dt_rank: the width of r; None for d_model / 16, rounded up.
    conv_size: width of the short convolution on u; None for none.
    inner_norm: RMSNorm on r, B and C, each by itself (as in Jamba).
    inner_norm_weight: weights in these norms.
    norm_eps: of these norms.
    conv_bias: a bias of the convolution.
    use_bias: biases on the projections in and out.
    impl: of `lajax.linear_recurrence`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias, D and the norms' weights are float32 at least.
    rngs: random streams of the initial parameters. A_log = log(1 .. N), softplus(dt_bias)
      log-uniform in [1e-3, 1e-1], D = 1.

  Raises:
    ValueError: an option is out of its range.

  Paper: A. Gu, T. Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
  arXiv:2312.00752, equation 2a, algorithm 2 and section 3.6 (with B discretised as dt B, as in its
  code); the norms: O. Lieber et al., "Jamba", 2024, arXiv:2403.19887, section 6.4.
  """

  memory_letters = "B D N"

  def __init__(
    self,
    d_model: int,
    inner_dim: int | None = None,
    *,
    state_dim: int = 16,
    dt_rank: int | None = None,
    conv_size: int | None = 4,
    inner_norm: bool = False,
    inner_norm_weight: bool = True,
    norm_eps: float = 1e-6,
    conv_bias: bool = True,
    use_bias: bool = False,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("d_model", d_model)
    check_whole("state_dim", state_dim)
    check_positive("inner_dim", inner_dim)
    check_positive("dt_rank", dt_rank)
    check_flag("inner_norm", inner_norm)
    check_flag("inner_norm_weight", inner_norm_weight)
    check_flag("conv_bias", conv_bias)
    check_number("norm_eps", norm_eps, 0.0)
    E, N, R = inner_dim or 2 * d_model, state_dim, dt_rank or -(-d_model // 16)
    super().__init__(
      d_model,
      {"u": (E,), "z": (E,)},
      inner=E,
      memory=(E, N),
      conv_size=conv_size,
      conv_on=("u",),
      conv_bias=conv_bias,
      use_bias=use_bias,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    linear = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.x_proj = Linear(E, R + 2 * N, **linear)
    self.dt_proj = Linear(R, E, **linear)
    self.A_log = nnx.Param(
      jnp.broadcast_to(jnp.log(jnp.arange(1, N + 1, dtype=self.gate_dtype)), (E, N))
    )
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (E,), self.gate_dtype))
    self.D = nnx.Param(jnp.ones(E, self.gate_dtype))
    options = {"use_weight": inner_norm_weight}
    norm = lambda width: self.rms_norm(width, norm_eps, **options) if inner_norm else None
    self.dt_norm, self.B_norm, self.C_norm = norm(R), norm(N), norm(N)
    self.dt_rank, self.state_dim = R, N

  def mix(self, p, memory, documents):
    u = p["u"]
    dt, B, C = jnp.split(self.x_proj(u), [self.dt_rank, self.dt_rank + self.state_dim], axis=-1)
    if self.dt_norm is not None and self.B_norm is not None and self.C_norm is not None:
      dt, B, C = self.dt_norm(dt), self.B_norm(B), self.C_norm(C)
    dt = widen(self.dt_proj(dt))
    dt = dt + aligned(self.dt_bias[...], dt)
    o, memory = self.ssm(u, dt, B, C, memory, documents)
    return (o * jax.nn.silu(widen(p["z"]))).astype(u.dtype), memory

  def ssm(self, u, dt, B, C, memory, documents):
    """o [B T E] from u [B T E], dt [B T E] before the softplus, and B and C [B T N]."""
    u, dt, B, C = widen(u), jax.nn.softplus(widen(dt)), widen(B), widen(C)
    x, dt = (dt * u)[..., None] * B[:, :, None], dt[..., None]
    log_a = -jnp.exp(aligned(self.A_log[...], dt)) * dt
    h, memory = linear_recurrence(
      x, log_a, initial_state=memory, segment_ids=documents.ids, impl=self.impl
    )
    o = jnp.einsum("btdn,btn->btd", h, C, precision="highest")
    return o + aligned(self.D[...], u) * u, memory
