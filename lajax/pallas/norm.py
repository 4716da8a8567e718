"""Kernels of the gated RMS norm: y = x / sqrt(mean x^2 + eps) * weight * act(gate).

One launch forward, one backward, each of which reads a row once. Residuals are the inputs. The
derivative of the weight leaves each program as a sum over its own rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas.launch import differentiable, float64_refusal, launch
from lajax.pallas.tiles import inside, load, store, tile_mask

f32 = jnp.float32
MAX_WIDTH = 8192
TILE, MAX_ROWS = 2048, 32  # numbers in a tile, which has at least one row
# Backward, a program takes several tiles of rows, up to MAX_TILES, if more than PROGRAMS programs
# are left: fewer sums of the weight's derivative are then written.
PROGRAMS, MAX_TILES = 1024, 32
TINY = float(jnp.finfo(f32).tiny)  # under the root: rows behind the end are zeros, and eps may be 0


class NormPlan(NamedTuple):
  """Sizes of a call, and how they are cut."""

  N: int  # rows
  D: int
  activation: str
  eps: float
  C: int  # rows in a tile
  tile: int  # columns in a tile: all of D
  warps: int
  each: int = 1  # tiles in a program

  @property
  def programs(self) -> int:
    return -(-self.N // (self.C * self.each))

  @property
  def columns(self) -> Array | None:
    return inside(0, self.tile, self.D, self.tile == self.D)


def _plan(x, activation: str, eps: float) -> NormPlan:
  N, D = x.shape
  tile = max(16, 1 << (D - 1).bit_length())
  C = max(1, min(MAX_ROWS, TILE // tile))
  return NormPlan(
    N, D, activation, eps, C, tile, 4 if C * tile < TILE else 8 if tile <= 4096 else 16
  )


def _act(activation: str, gate: Array) -> tuple[Array, Array]:
  """Returns act(gate), and its derivative."""
  s = lax.logistic(gate)
  if activation == "sigmoid":
    return s, s * (1.0 - s)
  return gate * s, s * (1.0 + gate * (1.0 - s))


def _normed(p: NormPlan, x: Float[Array, "C tile"]) -> tuple[Array, Array]:
  """Returns x / sqrt(mean x^2 + eps), and 1 / sqrt(mean x^2 + eps)."""
  scale = lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1) / p.D + p.eps, TINY))[:, None]
  return x * scale, scale


def _forward_kernel(inputs, outputs, *, interpreted: bool, p: NormPlan):
  x_ref, weight_ref, gate_ref = inputs
  i = pl.program_id(0)
  mask = tile_mask(inside(i * p.C, p.C, p.N, p.N % p.C == 0), p.columns)
  y, _ = _normed(p, load(x_ref, mask).astype(f32))
  y = y * load(weight_ref, p.columns).astype(f32)[None, :]
  if gate_ref is not None:
    y = y * _act(p.activation, load(gate_ref, mask).astype(f32))[0]
  store(outputs[0], y, mask)


def _backward_kernel(inputs, outputs, *, interpreted: bool, p: NormPlan):
  x_ref, weight_ref, gate_ref, dy_ref = inputs
  part = pl.program_id(0)
  weight = load(weight_ref, p.columns).astype(f32)[None, :]

  def block(m, sums):
    start = (part * p.each + m) * p.C
    at = pl.ds(m * p.C, p.C)
    mask = tile_mask(inside(start, p.C, p.N, p.N % (p.C * p.each) == 0), p.columns)
    normed, scale = _normed(p, load(x_ref.at[at, :], mask).astype(f32))
    dy = load(dy_ref.at[at, :], mask).astype(f32)
    if gate_ref is not None:
      act, slope = _act(p.activation, load(gate_ref.at[at, :], mask).astype(f32))
      store(outputs[2].at[at, :], dy * normed * weight * slope, mask)
      dy = dy * act
    dnormed = dy * weight
    mean = jnp.sum(dnormed * normed, axis=1) / p.D
    store(outputs[0].at[at, :], (dnormed - normed * mean[:, None]) * scale, mask)
    return sums + dy * normed

  zeros = jnp.zeros((p.C, p.tile), f32)
  sums = block(0, zeros) if p.each == 1 else lax.fori_loop(0, p.each, block, zeros)
  store(outputs[1], jnp.sum(sums, axis=0), p.columns)


def _specs(p: NormPlan) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
  """Returns the BlockSpecs of arrays of rows, of the weight, and of its derivative."""
  rows = pl.BlockSpec((p.C * p.each, p.tile), lambda i: (i, 0))
  return (
    rows,
    pl.BlockSpec((p.tile,), lambda i: (0,)),
    pl.BlockSpec((None, p.tile), lambda i: (i, 0)),
  )


# --- the operation --------------------------------------------------------------------------------


def gated_rms_norm(
  x: Float[Array, "*N D"],
  weight: Float[Array, "D"],
  gate: Float[Array, "*N D"] | None = None,
  *,
  activation: str = "swish",
  eps: float = 1e-5,
) -> Float[Array, "*N D"]:
  """y = x / sqrt(mean x^2 + eps) * weight * act(gate); the mean is over the last axis.

  Args:
    x: [.. D].
    weight: [D].
    gate: [.. D], or None for no gate.
    activation: "swish" or "sigmoid"; act.
    eps: inside the root.

  Returns:
    y [.. D] in x.dtype; sums are in float32.
  """
  flat = lambda a: a.reshape(-1, x.shape[-1])
  y: Array = _norm((activation, float(eps)), flat(x), weight, None if gate is None else flat(gate))
  return y.reshape(x.shape)


def _forward(static, x, weight, gate):
  p = _plan(x, *static)
  rows, columns, _ = _specs(p)
  (y,) = launch(
    functools.partial(_forward_kernel, p=p),
    (x, weight, gate),
    name="norm_forward",
    programs=p.programs,
    warps=p.warps,
    stages=1,
    in_specs=[rows, columns, rows],
    out_specs=[rows],
    out_shapes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
  )
  return y, (x, weight, gate)


def _backward(static, residuals, dy):
  x, weight, gate = residuals
  p = _plan(x, *static)
  p = p._replace(each=max(1, min(MAX_TILES, p.programs // PROGRAMS)))
  rows, columns, sums = _specs(p)
  like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
  gates = [] if gate is None else [gate]
  dx, dweight, *dgate = launch(
    functools.partial(_backward_kernel, p=p),
    (x, weight, gate, dy),
    name="norm_backward",
    programs=p.programs,
    warps=p.warps,
    stages=1,
    in_specs=[rows, columns, rows, rows],
    out_specs=[rows, sums, *(rows for _ in gates)],
    out_shapes=[like(x), jax.ShapeDtypeStruct((p.programs, p.D), f32), *map(like, gates)],
  )
  return dx, dweight.sum(0).astype(weight.dtype), dgate[0] if dgate else None


_norm = differentiable(_forward, _backward)


def supports(x, weight, gate=None) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  if reason := float64_refusal(dict(x=x, weight=weight, gate=gate)):
    return reason
  if x.shape[-1] > MAX_WIDTH:
    return f"the kernels take a norm over up to D = {MAX_WIDTH} channels, and D is {x.shape[-1]}."
  if x.size // x.shape[-1] >= 2**31 - 1:
    return f"a GPU starts fewer than 2^31 programs, and {[*x.shape]} has more rows."
  return None
