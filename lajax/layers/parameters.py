"""Gates, norms and rotations that several layers share, with the initial values of their parameters."""

from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax import pallas
from lajax._numerics import accumulation_dtype
from lajax._shapes import IMPLS, check_option


def wide_dtype(dtype) -> jnp.dtype:
  """float32, or float64 where it is float64: the dtype of gates, norms and states."""
  return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(x: Array) -> Array:
  return x.astype(accumulation_dtype(x))


def over_tokens(weight: Float[Array, "D"], shape: tuple[int, ...]) -> Float[Array, "... D"]:
  """A weight a channel, broadcast to `shape`, as a product with ones.

  XLA makes the same program of it as of a broadcast; but its transpose is a product too, where that of a broadcast is a sum
  over tokens by columns, which XLA does three times slower on a CPU.
  """
  ones = jnp.ones((prod(shape[:-1]), 1), weight.dtype)
  return jnp.matmul(ones, weight[None], precision="highest").reshape(shape)


# --- decays ----------------------------------------------------------------------------------------------------------


def softplus_decay(
  a: Float[Array, "..."], A_log: Float[Array, "..."], dt_bias: Float[Array, "..."]
) -> Float[Array, "..."]:
  """g = -exp(A_log) softplus(a + dt_bias): a natural-log decay <= 0, in float32 at least; the arguments broadcast."""
  return -jnp.exp(A_log) * jax.nn.softplus(widen(a) + dt_bias)


def bounded_decay(
  a: Float[Array, "..."],
  A_log: Float[Array, "..."],
  dt_bias: Float[Array, "..."],
  lower_bound: float,
) -> Float[Array, "..."]:
  """g = lower_bound sigmoid(exp(A_log) (a + dt_bias)): a natural-log decay in (lower_bound, 0), in float32 at least."""
  return lower_bound * jax.nn.sigmoid(jnp.exp(A_log) * (widen(a) + dt_bias))


def log_uniform_rate(key: Array, shape: tuple[int, ...], low: float, high: float, dtype) -> Array:
  """A_log = log A with A ~ U(low, high)."""
  tiny = jnp.finfo(dtype).tiny
  return jnp.log(jax.random.uniform(key, shape, dtype, max(low, float(tiny)), high))


def step_bias(
  key: Array, shape: tuple[int, ...], dtype, low: float = 1e-3, high: float = 1e-1
) -> Array:
  """dt_bias with softplus(dt_bias) = dt, dt log-uniform in [low, high]."""
  dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(low), jnp.log(high)))
  return dt + jnp.log(-jnp.expm1(-dt))


# --- norms -----------------------------------------------------------------------------------------------------------

GATES = {"swish": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class GatedRMSNorm(nnx.Module):
  """RMSNorm over the last axis in float32, times a gate:  y = x / sqrt(mean x^2 + eps) * weight * act(gate).

  Args:
    width: the size of the last axis.
    activation: "swish" or "sigmoid", of the gate.
    eps: inside the root.
    impl: "pallas" for one kernel, where it takes the arrays, as "auto" does on NVIDIA GPUs; all others are plain JAX.
    param_dtype: the dtype of the weight.

  Paper: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467, equation 4; gated as in
  Y. Sun et al., "Retentive Network", 2023, arXiv:2307.08621, equation 8.
  """

  def __init__(
    self,
    width: int,
    activation: str = "swish",
    *,
    eps: float = 1e-5,
    impl: str = "auto",
    param_dtype=jnp.float32,
  ):
    check_option("impl", impl, IMPLS)
    if activation not in GATES:
      raise ValueError(
        f"`activation` must be one of {', '.join(map(repr, GATES))}; got {activation!r}."
      )
    self.weight = nnx.Param(jnp.ones(width, param_dtype))
    self.activation, self.eps, self.impl = activation, eps, impl

  def __call__(
    self, x: Float[Array, "... D"], gate: Float[Array, "... D"] | None = None
  ) -> Float[Array, "... D"]:
    """Normalises x; without a gate this is RMSNorm."""
    if (
      pallas.wanted(self.impl)
      and x.size
      and pallas.supports_gated_rms_norm(x, self.weight[...], gate) is None
    ):
      return pallas.run_gated_rms_norm(
        x, self.weight[...], gate, activation=self.activation, eps=self.eps
      )
    wide = widen(x)
    y = (
      wide
      * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps)
      * over_tokens(self.weight[...], x.shape)
    )
    if gate is not None:
      y = y * GATES[self.activation](widen(gate))
    return y.astype(x.dtype)


# --- positions -------------------------------------------------------------------------------------------------------


def rotate(
  x: Float[Array, "B T H K"], position: Int[Array, "B T"], theta: float = 10_000.0
) -> Float[Array, "B T H K"]:
  """Rotary position embedding: the pair (x_i, x_{i + K/2}) is turned by the angle position * theta^(-2i/K).

  Paper: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv:2104.09864, equation 34
  (the pairs taken half a width apart).
  """
  half = x.shape[-1] // 2
  wide = widen(x)
  frequency = theta ** (-jnp.arange(half, dtype=wide.dtype) / half)
  angle = position[..., None, None].astype(wide.dtype) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = wide[..., :half], wide[..., half:]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(
    x.dtype
  )


def check_rotary(theta: float | None, width: int) -> None:
  if theta is None:
    return
  if not theta > 1:
    raise ValueError(f"`rope_theta` must be above 1, or None for no positions; got {theta}.")
  if width % 2:
    raise ValueError(
      f"`head_dim` must be even for rotary positions; got {width}. Take an even one, or rope_theta=None."
    )
