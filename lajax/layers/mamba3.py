"""Mamba-3."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_flag, check_number, check_positive, check_whole
from lajax.layers.mixer import Mixer, key_groups
from lajax.layers.parameters import aligned, rotate_neighbours, step_bias, widen
from lajax.ops import mamba3
from lajax.recurrence.running import running_angle

SMALLEST_RATE = 1e-4


class Mamba3(Mixer):
  """A state space that turns, discretised by the trapezoidal rule, without a short convolution.

      S_t = e^(g_t) (S_{t-1} + (1 - lambda_t) dt_t k_{t-1} v_{t-1}^T) + lambda_t dt_t k_t v_t^T
      o_t = S_t^T q_t + D v_t,  y = (o * silu(z)) W_o, or (RMSNorm(o) * silu(z)) W_o
      g = -dt max(f(x W_A), 1e-4), f(a) = 1 + a where a >= 0, else 1 / (1 - a)
      dt = softplus(x W_dt + dt_bias), lambda = sigmoid(x W_lambda), v = x W_u, z = x W_z
      q, k = turn(theta_t, RMSNorm(x W) + bias), theta_t = theta_{t-1} + dt_t pi tanh(x W_angle)

  `turn` rotates pairs of neighbouring channels; heads share the angle x W_angle, and each has its
  own dt. With a `rank` R a token has R keys and R queries of its own, the values v_r = v * w_r and
  gates z_r = z * w'_r, and its output is the sum of the R outputs, each times w''_r.

  Args:
    d_model: D.
    num_heads: H, of the values and the states.
    head_dim: V, the width of the values in a head (the paper's P). The inner width is H V.
    state_dim: K, the width of queries and keys (the paper's N).
    num_groups: how many queries and keys a token has; each serves H / num_groups heads.
    rank: R, for the form with several inputs and outputs (MIMO); None for one.
    rope_fraction: the part of the state's K rows that turns, 0.5 or 1.0.
    use_bias: biases on the projections in and out.
    use_norm: norm the outputs of each head before the gate.
    norm_eps: of the norms.
    impl, chunk_size: of `lajax.mamba3`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; all but the projections' are float32 at least.
    rngs: random streams of the initial parameters. softplus(dt_bias) log-uniform in [1e-3, 1e-1];
      the biases of queries and keys and D are 1, w and w'' are 1 / R, w' is 1.

  Raises:
    ValueError: an option is out of its range, or num_groups does not divide num_heads.

  Paper: A. Lahoti et al., "Mamba-3: Improved Sequence Modeling using State Space Principles", 2026,
  arXiv:2603.15569.
  """

  memory_letters = "B H A", "B H K V", "B H K", "B H V"

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    state_dim: int = 128,
    num_groups: int = 1,
    rank: int | None = None,
    rope_fraction: float = 0.5,
    use_bias: bool = False,
    use_norm: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    check_whole("state_dim", state_dim)
    check_positive("rank", rank)
    check_flag("use_norm", use_norm)
    H, G, V, K = num_heads, key_groups(num_heads, num_groups), head_dim, state_dim
    if check_number("rope_fraction", rope_fraction) not in (0.5, 1.0):
      raise ValueError(f"`rope_fraction` must be 0.5 or 1.0; got {rope_fraction}.")
    if K * rope_fraction % 2:
      turning = f"`state_dim` times rope_fraction = {rope_fraction}"
      raise ValueError(f"{turning} must be even, since channels turn in pairs; got {K}.")
    ranks = () if rank is None else (rank,)
    angles = round(K * rope_fraction) // 2
    keys = dict.fromkeys(("B", "C"), (*ranks, G, K))
    gates = dict.fromkeys(("dt", "rate", "trapezoid"), (H,))
    super().__init__(
      d_model,
      {"z": (H, V), "u": (H, V), **keys, **gates, "angle": (angles,)},
      inner=H * V,
      memory=(H, K, V),
      use_bias=use_bias,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    full = lambda value, *shape: nnx.Param(jnp.full(shape, value, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (H,), self.gate_dtype))
    self.B_norm, self.C_norm = self.rms_norm(K, norm_eps), self.rms_norm(K, norm_eps)
    self.B_bias, self.C_bias = full(1.0, *ranks, H, K), full(1.0, *ranks, H, K)
    self.D = full(1.0, H)
    self.norm = self.rms_norm(V, norm_eps, use_weight=False) if use_norm else None
    self.norm_weight = full(1.0, H, V) if use_norm else None
    if rank is not None:
      self.rank_u, self.rank_out = (full(1 / rank, rank, H, V) for _ in range(2))
      self.rank_z = full(1.0, rank, H, V)
      self.memory_letters = "B H A", "B H K V", "B R H K", "B R H V"
    self.rank, self.num_angles = rank, angles

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    (B, H, K, V), ranks = S.shape, () if self.rank is None else (self.rank,)
    shapes = (B, *ranks, H, K), (B, *ranks, H, V)
    return jnp.zeros((B, H, self.num_angles), S.dtype), S, *(jnp.zeros(s, S.dtype) for s in shapes)

  def mix(self, p, memory, documents):
    dt, rate = widen(p["dt"]), widen(p["rate"])
    dt = jax.nn.softplus(dt + aligned(self.dt_bias[...], dt))
    rate = jnp.where(rate >= 0, 1 + rate, 1 / (1 - jnp.minimum(rate, 0)))
    g, trapezoid = -dt * jnp.maximum(rate, SMALLEST_RATE), jax.nn.sigmoid(widen(p["trapezoid"]))
    turned = jnp.tanh(widen(p["angle"]))[:, :, None] * dt[..., None]
    angle, before = (None, None) if memory is None else (memory[0], tuple(memory[1:]))
    turned = running_angle(turned, angle, documents.ids)
    q = self._heads(p["C"], self.C_norm, self.C_bias[...], turned)
    k = self._heads(p["B"], self.B_norm, self.B_bias[...], turned)
    v, z = widen(p["u"]), widen(p["z"])
    if self.rank is not None:
      per_rank = lambda x, weight: x[:, :, None] * aligned(weight[...], x[:, :, None])
      v, z = per_rank(v, self.rank_u), per_rank(z, self.rank_z)
    arrays = q, k, v.astype(p["u"].dtype), g, dt, trapezoid
    o, behind = self.apply_op(mamba3, *arrays, memory=before, documents=documents, scale=1.0)
    o = widen(o) + aligned(self.D[...][:, None], o) * v
    if self.norm is None or self.norm_weight is None:
      o = o * jax.nn.silu(z)
    else:
      o = self.norm(o, z) * aligned(self.norm_weight[...], o)
    if self.rank is not None:
      o = (o * aligned(self.rank_out[...], o)).sum(2)
    return o.astype(p["u"].dtype), (turned[:, -1], *behind)

  def _heads(self, given, norm, bias, turned: Float[Array, "B T H A"]) -> Array:
    """Returns queries or keys [B T .. H K] of all heads: normed, biased and turned."""
    x = norm(widen(given))
    x = jnp.repeat(x, bias.shape[-2] // x.shape[-2], axis=-2)
    angle = jnp.pi * (turned if self.rank is None else turned[:, :, None])
    return rotate_neighbours(x + aligned(bias, x), angle).astype(given.dtype)
