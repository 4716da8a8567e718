"""Gates, norms and rotations that several layers share, and initial values of their parameters."""

import functools
from math import pi
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._numerics import accumulation_dtype, promoted
from lajax._shapes import (
  IMPLS,
  check_dtype_option,
  check_flag,
  check_number,
  check_option,
  check_whole,
)
from lajax.ops import gated_rms_norm
from lajax.ops.norm import GATES


def _in_one_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
  """Returns a tuple of arrays in `dtype`, or in the dtype that holds the numbers of all of them."""
  if dtype is None:
    dtype = promoted(*(x.dtype for x in args if x is not None))
  return tuple(None if x is None else jnp.asarray(x, dtype) for x in args)


# Flax's own promotion of inputs and parameters fails under JAX's strict promotion.
Linear = functools.partial(nnx.Linear, promote_dtype=_in_one_dtype)


class Buffer(nnx.Variable):
  """Numbers of a layer that gradients leave alone: fixed decays, biases of an expert's choice."""


def wide_dtype(*dtypes: Any) -> jnp.dtype:
  """Returns the dtype of gates, norms and states: float64 if one of these is, else float32."""
  wide = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
  return jnp.dtype(jnp.float64 if wide else jnp.float32)


def widen(x: Array) -> Array:
  """Returns x in float32 at least."""
  return x.astype(accumulation_dtype(x))


def aligned(weight: Float[Array, "*D"], x: Array) -> Float[Array, "..."]:
  """Returns a parameter in the dtype of `widen(x)`, with axes of size 1 in front up to x's rank."""
  return weight.astype(accumulation_dtype(x)).reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


# --- decays ---------------------------------------------------------------------------------------


def softplus_decay(
  a: Float[Array, "B T *H"], A_log: Float[Array, "*H"], dt_bias: Float[Array, "*H"]
) -> Float[Array, "B T *H"]:
  """Returns g = -exp(A_log) softplus(a + dt_bias), a natural-log decay <= 0, in float32 at least.

  A_log and dt_bias have the last axes of a, or axes of size 1 in their place.
  """
  a = widen(a)
  return -jnp.exp(aligned(A_log, a)) * jax.nn.softplus(a + aligned(dt_bias, a))


def bounded_decay(
  a: Float[Array, "B T *H"],
  A_log: Float[Array, "*H"],
  dt_bias: Float[Array, "*H"],
  lower_bound: float,
) -> Float[Array, "B T *H"]:
  """Returns g = lower_bound sigmoid(exp(A_log) (a + dt_bias)), in float32 at least."""
  a = widen(a)
  return lower_bound * jax.nn.sigmoid(jnp.exp(aligned(A_log, a)) * (a + aligned(dt_bias, a)))


def log_uniform_rate(key: Array, shape: tuple[int, ...], low: float, high: float, dtype) -> Array:
  """Draws A_log = log A with A ~ U(low, high)."""
  tiny = jnp.finfo(dtype).tiny
  return jnp.log(jax.random.uniform(key, shape, dtype, max(low, float(tiny)), high))


def step_bias(
  key: Array, shape: tuple[int, ...], dtype, low: float = 1e-3, high: float = 1e-1
) -> Array:
  """Draws dt_bias with softplus(dt_bias) = dt, dt log-uniform in [low, high]."""
  dt = jnp.exp(jax.random.uniform(key, shape, dtype, np.log(low), np.log(high)))
  return dt + jnp.log(-jnp.expm1(-dt))


# --- norms ----------------------------------------------------------------------------------------


class GatedRMSNorm(nnx.Module):
  """RMSNorm over the last axis in float32, times a gate.

      y = x / sqrt(mean x^2 + eps) * weight * act(gate)

  Args:
    width: size of the last axis.
    activation: "swish" or "sigmoid", of the gate.
    eps: a number of at least 0, inside the root.
    unit_offset: multiply by 1 + weight instead of weight, as in Gemma; the weight begins at 0.
    use_weight: False for a weight of 1 that is no parameter.
    impl: of `lajax.ops.gated_rms_norm`.
    param_dtype: of the weight.

  Raises:
    ValueError: an option is out of its range.

  Paper: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467,
  equation 4; gated as in Y. Sun et al., "Retentive Network", 2023, arXiv:2307.08621, equation 8.
  """

  def __init__(
    self,
    width: int,
    activation: str = "swish",
    *,
    eps: float = 1e-5,
    unit_offset: bool = False,
    use_weight: bool = True,
    impl: str = "auto",
    param_dtype=jnp.float32,
  ):
    check_whole("width", width)
    check_option("impl", impl, IMPLS)
    check_option("activation", activation, tuple(GATES))
    check_dtype_option("param_dtype", param_dtype, optional=False)
    self.unit_offset = check_flag("unit_offset", unit_offset)
    initial = jnp.zeros if unit_offset else jnp.ones
    self.weight = nnx.Param(initial(width, param_dtype)) if use_weight else None
    self.width = width
    self.activation, self.eps, self.impl = activation, check_number("eps", eps, 0.0), impl

  def __call__(
    self, x: Float[Array, "... D"], gate: Float[Array, "... D"] | None = None
  ) -> Float[Array, "... D"]:
    """Normalises x; without a gate this is RMSNorm."""
    options = {"activation": self.activation, "eps": self.eps, "impl": self.impl}
    weight = jnp.ones(self.width) if self.weight is None else widen(self.weight[...])
    return gated_rms_norm(x, 1 + weight if self.unit_offset else weight, gate, **options)


# --- positions ------------------------------------------------------------------------------------


def rotate(
  x: Float[Array, "B T H K"],
  position: Int[Array, "B T"],
  theta: float = 10_000.0,
  width: int | None = None,
) -> Float[Array, "B T H K"]:
  """Rotary positions: turns the pair (x_i, x_{i + P/2}) by the angle position * theta^(-2i/P).

  P is `width`, or all K channels; channels from P on stay as they are. Angles are right to the
  rounding of their sine, at any position of 31 bits.

  Paper: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
  arXiv:2104.09864, equation 34 (the pairs taken half a width apart).
  """
  if width is not None and width < x.shape[-1]:
    turned, rest = jnp.split(x, [width], axis=-1)
    return jnp.concatenate([rotate(turned, position, theta), rest], axis=-1)
  half = x.shape[-1] // 2
  wide = widen(x)
  angle = (2 * pi) * _phase(position[..., None, None], theta, half, wide.dtype)
  turned = _turn(wide[..., :half], wide[..., half:], angle)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotate_neighbours(
  x: Float[Array, "... K"], angle: Float[Array, "... A"]
) -> Float[Array, "... K"]:
  """Turns the pair (x_2i, x_{2i + 1}) by the i-th angle; channels from 2 A on stay as they are."""
  turning, rest = jnp.split(x, [2 * angle.shape[-1]], axis=-1)
  pairs = turning.reshape(*turning.shape[:-1], -1, 2)
  turned = jnp.stack(_turn(pairs[..., 0], pairs[..., 1], angle), axis=-1)
  return jnp.concatenate([turned.reshape(turning.shape), rest], axis=-1)


def _turn(first: Array, second: Array, angle: Array) -> tuple[Array, Array]:
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return first * cos - second * sin, second * cos + first * sin


def _phase(
  position: Int[Array, "B T 1 1"], theta: float, half: int, dtype
) -> Float[Array, "B T 1 half"]:
  """Returns position * theta^(-i/half) / 2 pi in turns, modulo 1, between -1/2 and 1/2.

  float32 has no digits left for a position of a million times a frequency. So frequencies are fixed
  point numbers of 64 bits, a high and a low word of a turn; unsigned products wrap, which is the
  modulo.
  """
  turns = theta ** (-np.arange(half) / half) / (2 * pi)
  if dtype == jnp.float64:
    phase = position.astype(dtype) * turns[None, None, None]
    return phase - jnp.round(phase)
  high = np.floor(turns * 2.0**32)
  low = np.floor((turns * 2.0**32 - high) * 2.0**32)
  word = lambda w: w.astype(np.uint32)[None, None, None]
  upper, lower = lambda w: w >> np.uint32(16), lambda w: w & np.uint32(0xFFFF)
  high, low, p = word(high), word(low), position.astype(jnp.uint32)
  # p * low / 2^32 by halves of words: at most three units of 2^-32 turns too small.
  carried = upper(p) * upper(low) + upper(upper(p) * lower(low)) + upper(lower(p) * upper(low))
  phase = p * high + carried
  return phase.astype(jnp.int32).astype(dtype) * 2.0**-32


def check_rotary(theta: float | None, width: int) -> None:
  """ValueError unless rotary positions, if any, have a base above 1 and an even width."""
  if theta is None:
    return
  check_number("rope_theta", theta, above=1)
  if width % 2:
    raise ValueError(
      f"`head_dim` must be even for rotary positions; got {width}. "
      "Take an even one, or rope_theta=None."
    )
