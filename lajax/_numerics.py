"""Dtypes, precision and products: the numerical choices that all folders share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

NEGLIGIBLE = -1e30  # a log decay below which exp is 0 in every dtype, and whose sums stay finite


def accumulation_dtype(*arrays) -> jnp.dtype:
  """Returns the dtype of states, gates, sums and solves: float64 if an input is, else float32."""
  return jnp.dtype(
    jnp.float64 if any(x is not None and x.dtype == jnp.float64 for x in arrays) else jnp.float32
  )


def promoted(*dtypes) -> jnp.dtype:
  """Returns the dtype that holds numbers of all these dtypes, under JAX's strict promotion too."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))


def promotion_is_strict() -> bool:
  """Says whether JAX refuses to promote dtypes, here and now."""
  try:
    jnp.promote_types(jnp.bfloat16, jnp.float32)
  except jax.dtypes.TypePromotionError:
    return True
  return False


def product_precision(*arrays) -> lax.Precision:
  """Returns the precision of products.

  Full precision for float32 and float64 inputs; for inputs of half precision, the products that are
  fast on the device (tf32 on a GPU).
  """
  half = all(x is None or x.dtype in (jnp.bfloat16, jnp.float16) for x in arrays)
  return lax.Precision.DEFAULT if half else lax.Precision.HIGHEST


def l2_normalize(x: Float[Array, "... D"], eps: float = 1e-6) -> Float[Array, "... D"]:
  """Returns x / sqrt(sum x^2 + eps) over the last axis in x.dtype, computed in float32 at least."""
  wide = x.astype(accumulation_dtype(x))
  return (wide * lax.rsqrt((wide * wide).sum(-1, keepdims=True) + eps)).astype(x.dtype)


def bits_of_half(x: Array) -> Array:
  """Returns half precision as integers, and other numbers as they are.

  XLA's CPU compiler computes on half precision in float32, so that writing one slice of an array
  would convert the whole array.
  """
  return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def vary_like(x: Array, *others) -> Array:
  """Returns x, varying over the mesh axes of `jax.shard_map` that `others` vary over.

  The first carry of a loop needs this; the cotangent of x is then summed over these axes.
  """
  axes = lambda y: jax.typeof(y).manual_axis_type.varying
  missing = frozenset().union(*map(axes, jax.tree.leaves(others))) - axes(x)
  return lax.pcast(x, tuple(missing), to="varying") if missing else x


# --- products ------------------------------------------------------------------------------------


def transposed(x: Array) -> Array:
  """Returns x with its last two axes exchanged in memory.

  XLA's CPU products are slow where the left operand is transposed by its strides.
  """
  return lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def row_sums(x: Float[Array, "*M K"]) -> Float[Array, "*M 1"]:
  """Returns sums over the last axis, as a product with ones.

  XLA's CPU compiler makes one loop of such a product, and three of a reduction.
  """
  return jnp.matmul(
    x, vary_like(jnp.ones((x.shape[-1], 1), x.dtype), x), precision=lax.Precision.HIGHEST
  )


def spread(x: Float[Array, "*M"], size: int) -> Float[Array, "*M K"]:
  """Returns x in each of `size` columns; its cotangent is then made like `row_sums`."""
  return jnp.matmul(
    x[..., None], vary_like(jnp.ones((1, size), x.dtype), x), precision=lax.Precision.HIGHEST
  )


def diagonal(x: Array, size: int) -> Float[Array, "K K"]:
  """Returns Diag(x) for x [K], or for x [1] that stands for all K."""
  return jnp.where(np.eye(size, dtype=bool), x, jnp.zeros((), x.dtype))


def block_lower(
  pairs: Float[Array, "M 2 A B"], corner: Float[Array, "M A B"]
) -> Float[Array, "M A2 B2"]:
  """Returns [[pairs_0, 0], [corner, pairs_1]]."""
  B, zero = corner.shape[-1], jnp.zeros((), corner.dtype)
  wide = lambda x, left, right: lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), (left, right, 0)])
  return jnp.concatenate(
    [wide(pairs[:, 0], 0, B), wide(corner, 0, B) + wide(pairs[:, 1], B, 0)], axis=1
  )
