"""Inverse of a unit lower triangular matrix, which the delta rule and dplr need in each chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from lajax._numerics import block_lower, vary_like

SIDE = 16  # side of the blocks that are inverted by forward substitution


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def unit_lower_inverse(
  n: Float[Array, "C C"], precision=lax.Precision.HIGHEST
) -> Float[Array, "C C"]:
  """Returns (I + n)^-1 for a strictly lower triangular n; C is a power of two.

  Blocks of 16 are inverted by forward substitution, column by column. The inverse over blocks of 2h
  then follows from those of h: [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]. (The
  product of I + n^(2^i) is shorter, and cancels catastrophically where keys repeat.)
  """
  C = len(n)
  size = min(SIDE, C)
  blocks = _diagonal_blocks(n, size)

  def eliminate(c, x):
    column = lax.dynamic_slice_in_dim(blocks, c, 1, axis=2)  # zero at and above the diagonal
    return x - column * lax.dynamic_slice_in_dim(x, c, 1, axis=1)

  eye = jnp.broadcast_to(jnp.asarray(np.eye(size, dtype=n.dtype)), blocks.shape)
  x = lax.fori_loop(0, size - 1, eliminate, vary_like(eye, n))
  while size < C:
    pair = x.reshape(-1, 2, size, size)
    corner = _diagonal_blocks(n, 2 * size)[:, size:, :size]
    corner = -jnp.matmul(
      pair[:, 1], jnp.matmul(corner, pair[:, 0], precision=precision), precision=precision
    )
    x, size = block_lower(pair, corner), 2 * size
  return x[0]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(precision, primals, tangents):
  """d (I + n)^-1 = -(I + n)^-1 dn (I + n)^-1."""
  full = functools.partial(jnp.matmul, precision=precision)
  inverse = unit_lower_inverse(*primals, precision)
  return inverse, -full(inverse, full(jnp.tril(tangents[0], -1), inverse))


def _diagonal_blocks(x: Float[Array, "C C"], size: int) -> Float[Array, "N S S"]:
  return jnp.stack([x[n : n + size, n : n + size] for n in range(0, len(x), size)])
