"""Mamba-2 (SSD)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._numerics import l2_normalize
from lajax._shapes import check_flag, check_numbers, check_positive, check_whole
from lajax.layers.mixer import Mixer, key_groups
from lajax.layers.parameters import aligned, log_uniform_rate, step_bias, widen
from lajax.ops import linear_attention


class Mamba2(Mixer):
  """The state-space dual: linear attention whose decay and writes come from one step size per head.

      dt_t = softplus(x W_dt + dt_bias) ;  S_t = e^(-exp(A_log) dt_t) S_{t-1} + dt_t B_t u_t^T
      o_t = S_t^T C_t + D u_t
      u, B, C = silu(conv(x W)),  y = RMSNorm(o * silu(x W_z)) W_o

  Args:
    d_model: D.
    num_heads: H, of the values u and the states.
    head_dim: V, the width of u in a head (the paper's P). The inner width is H V.
    state_dim: K, the width of B and C (the paper's N).
    num_groups: how many B and C there are; each serves H / num_groups heads.
    conv_size: width of the short convolution on u, B, C; None for none.
    conv_bias: biases of the convolution.
    use_bias: biases on the projections in and out.
    use_norm: norm the gated outputs.
    norm_groups: None for a norm over the heads of each group of B and C, with one weight for all
      groups; or the number of equal parts of the H V channels that are normed, with one weight per
      channel.
    norm_eps: of the output norm.
    dt_limits: None, or the smallest and the greatest step size after the softplus.
    multipliers: None, or factors of the projections z, u, B, C and dt.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log, dt_bias, D and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. A ~ U(1, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1], D = 1.

  Raises:
    ValueError: an option is out of its range, or num_groups does not divide num_heads.

  Paper: T. Dao, A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
  Structured State Space Duality", 2024, arXiv:2405.21060, equation 16 and section 7.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    state_dim: int = 128,
    num_groups: int = 1,
    conv_size: int | None = 4,
    conv_bias: bool = True,
    use_bias: bool = False,
    use_norm: bool = True,
    norm_groups: int | None = None,
    norm_eps: float = 1e-5,
    dt_limits: tuple[float, float] | None = None,
    multipliers: tuple[float, ...] | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    check_whole("state_dim", state_dim)
    H, G, V, K = num_heads, key_groups(num_heads, num_groups), head_dim, state_dim
    check_flag("conv_bias", conv_bias)
    check_flag("use_norm", use_norm)
    check_positive("norm_groups", norm_groups)
    if norm_groups is not None and H * V % norm_groups:
      raise ValueError(f"`norm_groups` must divide the {H * V} channels; got {norm_groups}.")
    self.dt_limits = check_numbers("dt_limits", dt_limits, ("smallest", "greatest"))
    multipliers = check_numbers("multipliers", multipliers, ("z", "u", "B", "C", "dt"))
    super().__init__(
      d_model,
      {"u": (H, V), "B": (G, K), "C": (G, K), "z": (H, V), "dt": (H,)},
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      conv_on=("u", "B", "C"),
      conv_bias=conv_bias,
      use_bias=use_bias,
      multipliers=dict(zip(("z", "u", "B", "C", "dt"), multipliers or (), strict=False)),
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.A_log = nnx.Param(log_uniform_rate(rngs.params(), (H,), 1.0, 16.0, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (H,), self.gate_dtype))
    self.D = nnx.Param(jnp.ones(H, self.gate_dtype))
    width = H // G * V if norm_groups is None else H * V
    self.norm = self.rms_norm(width, norm_eps) if use_norm else None
    self.num_groups, self.norm_groups = G, norm_groups

  def mix(self, p, memory, documents):
    op = self.op(p, memory)
    y, memory = self.ssd(p["u"], p["B"], p["C"], p["dt"], memory, documents, op)
    y = self._normed(y * jax.nn.silu(widen(p["z"])))
    return y.astype(p["u"].dtype), memory

  def _normed(self, y: Float[Array, "B T H V"]) -> Float[Array, "B T ..."]:
    if self.norm is None or self.norm.weight is None:
      return y
    if self.norm_groups is None:
      return self.norm(y.reshape(*y.shape[:2], self.num_groups, self.norm.width))
    parts = y.reshape(*y.shape[:2], self.norm_groups, -1)
    normed = l2_normalize(parts, self.norm.eps * parts.shape[-1]) * parts.shape[-1] ** 0.5
    return jax.lax.collapse(normed, 2) * aligned(self.norm.weight[...], y[..., 0])

  def op(self, p, memory):
    """Returns the op of (C, B, values, log decay)."""
    return linear_attention

  def ssd(self, u, B, C, dt, memory, documents, op=linear_attention):
    """Returns S_t^T C_t + D u_t: u [B T H V], B, C [B T G K], dt [B T H] before its softplus."""
    u, dt = widen(u), widen(dt)
    dt = jax.nn.softplus(dt + aligned(self.dt_bias[...], dt))
    if self.dt_limits is not None:
      dt = jnp.clip(dt, *self.dt_limits)
    v, g = u * dt[..., None], -jnp.exp(aligned(self.A_log[...], dt)) * dt
    o, memory = self.apply_op(op, C, B, v, g, scale=1.0, memory=memory, documents=documents)
    return o + aligned(self.D[...][:, None], u) * u, memory
