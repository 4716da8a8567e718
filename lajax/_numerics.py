"""Accumulation dtype, products, decays over intervals, and the triangular inverse: what every rule computes with.

Everything here works on the arrays of ONE chunk of one head; drivers add the batch axes with `jax.vmap`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

SUB = 16  # side of the blocks of the triangular inverse


def accumulation_dtype(*arrays) -> jnp.dtype:
  """float32, or float64 where any input is float64: the dtype of states, gates, sums and solves."""
  return jnp.dtype(jnp.float64 if any(x is not None and x.dtype == jnp.float64 for x in arrays) else jnp.float32)


def product_precision(*arrays) -> lax.Precision:
  """Full products for float32 and float64 inputs; the device's fast ones (tf32 on a GPU) for half-precision inputs."""
  half = all(x is None or x.dtype in (jnp.bfloat16, jnp.float16) for x in arrays)
  return lax.Precision.DEFAULT if half else lax.Precision.HIGHEST


def l2_normalize(x: Float[Array, "... D"], eps: float = 1e-6) -> Float[Array, "... D"]:
  """x / sqrt(sum x^2 + eps) over the last axis, in float32 at least, returned in x.dtype."""
  wide = x.astype(accumulation_dtype(x))
  return (wide * lax.rsqrt((wide * wide).sum(-1, keepdims=True) + eps)).astype(x.dtype)


# --- decays ----------------------------------------------------------------------------------------------------------
#
# With alpha_t = exp(g_t), a chunk needs four products of intervals of alpha:
#     between(i, j) = prod_{j < l <= i} alpha_l      from the write of token j to the read of token i
#     head(i)       = prod_{l <= i} alpha_l          from the chunk's incoming state to token i
#     tail(j)       = prod_{l > j} alpha_l           from token j to the chunk's outgoing state
#     total         = prod_l alpha_l
# None is formed as a quotient, or as exp of a difference of sums: after one strong decay such a difference has lost its
# digits. A change of segment inside an interval makes it zero; that is a mask, never a term of a sum.


class Masks(NamedTuple):
  """Which intervals of a chunk lie inside one segment; every field True where no segments were given."""

  between: Bool[Array, "C C"]  # j <= i, and the same segment
  head: Bool[Array, "C"]
  tail: Bool[Array, "C"]
  total: Bool[Array, ""]


def segment_masks(runs: Array, run_before: Array) -> Masks:
  """The masks of a chunk from each token's segment and the segment of the token before the chunk."""
  same = runs[:, None] == runs[None, :]
  return Masks(jnp.tril(same), runs == run_before, runs == runs[-1], runs[-1] == run_before)
