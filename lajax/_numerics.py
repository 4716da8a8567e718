"""Accumulation dtype and products: the numerical choices that all folders share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

NEGLIGIBLE = -1e30  # a log decay below which exp is 0 in every dtype, and whose sums stay finite


def accumulation_dtype(*arrays) -> jnp.dtype:
  """float32, or float64 where any input is float64: the dtype of states, gates, sums and solves."""
  return jnp.dtype(
    jnp.float64 if any(x is not None and x.dtype == jnp.float64 for x in arrays) else jnp.float32
  )


def product_precision(*arrays) -> lax.Precision:
  """Full products for float32 and float64 inputs; the device's fast ones (tf32 on a GPU) for half-precision inputs."""
  half = all(x is None or x.dtype in (jnp.bfloat16, jnp.float16) for x in arrays)
  return lax.Precision.DEFAULT if half else lax.Precision.HIGHEST


def l2_normalize(x: Float[Array, "... D"], eps: float = 1e-6) -> Float[Array, "... D"]:
  """x / sqrt(sum x^2 + eps) over the last axis, in float32 at least, returned in x.dtype."""
  wide = x.astype(accumulation_dtype(x))
  return (wide * lax.rsqrt((wide * wide).sum(-1, keepdims=True) + eps)).astype(x.dtype)


def vary_like(x: Array, *others) -> Array:
  """x, varying over the mesh axes of `jax.shard_map` that `others` vary over; its cotangent is then summed over them.

  What the first carry of a loop must do, and what a derivative by hand is given: a cotangent has the type of its argument.
  """
  axes = lambda y: jax.typeof(y).manual_axis_type.varying
  missing = frozenset().union(*map(axes, jax.tree.leaves(others))) - axes(x)
  return lax.pcast(x, tuple(missing), to="varying") if missing else x


# --- products --------------------------------------------------------------------------------------------------------


def transposed(x: Array) -> Array:
  """x with its last two axes exchanged, laid out so: XLA's CPU products are slow where the left operand is transposed."""
  return lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def row_sums(x: Float[Array, "*M K"]) -> Float[Array, "*M 1"]:
  """Sums over the last axis, as a product with ones: XLA's CPU compiler makes one loop of it, and three of a reduction."""
  return jnp.matmul(
    x, vary_like(jnp.ones((x.shape[-1], 1), x.dtype), x), precision=lax.Precision.HIGHEST
  )


def spread(x: Float[Array, "*M"], size: int) -> Float[Array, "*M K"]:
  """x in each of `size` columns, so that its cotangent is made by `row_sums`."""
  return jnp.matmul(
    x[..., None], vary_like(jnp.ones((1, size), x.dtype), x), precision=lax.Precision.HIGHEST
  )


def diagonal(x: Array, size: int) -> Float[Array, "K K"]:
  """Diag(x), of [K] numbers, or of one for all."""
  return jnp.where(np.eye(size, dtype=bool), x, jnp.zeros((), x.dtype))


def block_lower(
  pairs: Float[Array, "M 2 A B"], corner: Float[Array, "M A B"]
) -> Float[Array, "M A2 B2"]:
  """[[pairs_0, 0], [corner, pairs_1]]."""
  B, zero = corner.shape[-1], jnp.zeros((), corner.dtype)
  wide = lambda x, left, right: lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), (left, right, 0)])
  return jnp.concatenate(
    [wide(pairs[:, 0], 0, B), wide(corner, 0, B) + wide(pairs[:, 1], B, 0)], axis=1
  )
