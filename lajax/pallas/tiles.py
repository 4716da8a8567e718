"""The mathematics of one tile, as every kernel uses it: products, masks, and decays over intervals.

What the lowering takes decides how it is written: sides of tiles are powers of two, no value is sliced or concatenated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax.pallas.launch import load, store

NEGLIGIBLE = -1e30  # a log decay below which exp is 0, and whose products with 0 are 0


def iota(shape: tuple[int, ...], axis: int) -> Array:
  return lax.broadcasted_iota(jnp.int32, shape, axis)


# --- products --------------------------------------------------------------------------------------------------------


class Products(NamedTuple):
  """How tiles are multiplied: the dtype of the operands, and their precision. Sums are float32.

  bfloat16 goes into the tensor cores as it is. float16 goes in as tf32, which has its digits and the range of
  float32: a state need not fit into float16. float32 means float32: three products of tf32 parts on a GPU, where the
  plain default would silently be one.
  """

  dtype: jnp.dtype
  precision: lax.Precision | lax.DotAlgorithmPreset

  def __call__(self, a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    a, b = a.astype(self.dtype), b.astype(self.dtype)
    return jnp.dot(a, b, precision=self.precision, preferred_element_type=jnp.float32)

  def inner(self, a: Float[Array, "M K"], b: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return self(a, b.astype(self.dtype).T)

  def outer(self, a: Float[Array, "K M"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return self(a.astype(self.dtype).T, b)


def operand_dtype(*arrays) -> jnp.dtype:
  """The narrowest of bfloat16, float16 and float32 that holds them all."""
  kinds = {jnp.dtype(x.dtype) for x in arrays}
  return kinds.pop() if len(kinds) == 1 else jnp.dtype(jnp.float32)


def products(dtype: jnp.dtype, interpreted: bool) -> Products:
  if dtype == jnp.bfloat16:
    return Products(jnp.dtype(jnp.bfloat16), lax.Precision.DEFAULT)
  if dtype == jnp.float16:
    preset = lax.Precision.HIGHEST if interpreted else lax.DotAlgorithmPreset.TF32_TF32_F32
    return Products(jnp.dtype(jnp.float32), preset)
  return full_products(interpreted)


def full_products(interpreted: bool) -> Products:
  preset = lax.Precision.HIGHEST if interpreted else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  return Products(jnp.dtype(jnp.float32), preset)


# --- loads and stores ------------------------------------------------------------------------------------------------


def inside(start, size: int, end: int, whole: bool) -> Bool[Array, "size"] | None:
  """Which of the places start .. start + size - 1 are before `end`; None where all are known to be."""
  return None if whole else start + jnp.arange(size) < end


def both(rows: Array | None, columns: Array | None) -> Array | None:
  """The mask of a tile from those of its rows and columns."""
  if rows is None or columns is None:
    return columns[None, :] if rows is None and columns is not None else None if rows is None else rows[:, None]
  return rows[:, None] & columns[None, :]


def take(ref, mask: Array | None) -> Array:
  """A tile, with zeros where the mask is false: nothing behind an array's end is read."""
  return load(ref) if mask is None else load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def give(ref, x: Array, mask: Array | None) -> None:
  store(ref, x.astype(ref.dtype), mask=mask)


# --- decays ----------------------------------------------------------------------------------------------------------
#
# Of the log decays g of a chunk of C tokens: the exponential of a sum over an interval is formed from the sum of that
# interval, or as a product over it; never from a difference, a quotient, or a positive exponent.


def between_per_head(g: Float[Array, "C"]) -> Float[Array, "C C"]:
  """exp of the sums of g over j < l <= i; 1 on and above the diagonal."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.cumsum(jnp.where(iota(shape, 0) > iota(shape, 1), g[:, None], 0.0), axis=0))


def head_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """exp of the sums of g over l <= i."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) <= iota(shape, 1), g[:, None], 0.0), axis=0))


def tail_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """exp of the sums of g over l > j."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) > iota(shape, 1), g[:, None], 0.0), axis=0))


def sums(keep: Bool[Array, "C C"], x: Float[Array, "C K"], full: Products) -> Float[Array, "C K"]:
  """For each row of `keep`, the sum of the rows of x that it keeps."""
  return full(keep.astype(jnp.float32), x)


def head_per_channel(g: Float[Array, "C K"]) -> Float[Array, "C K"]:
  """exp of the sums of g over l <= i."""
  return jnp.exp(jnp.cumsum(g, axis=0))


def tail_per_channel(g: Float[Array, "C K"], full: Products) -> Float[Array, "C K"]:
  """exp of the sums of g over l > j, of which there is no scan in this direction."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(sums(iota(shape, 0) < iota(shape, 1), jnp.maximum(g, NEGLIGIBLE), full))


def halves(g: Float[Array, "C K"]) -> Iterator[tuple[int, Array, Array]]:
  """For h = 1, 2, 4 .. C: h, and of each token the decay from the start of its part of h tokens, and to its part's end.

  An aligned block of 2h tokens is two such parts: for i in the later and j in the earlier one, the decay between them
  is the product of the two. So each h < C gives the scores of its pairs as one product of matrices, both factors of
  which decay. The last one, h = C, is the decay from the chunk's start and to its end.
  """
  C, K = g.shape
  upto, after = jnp.exp(g), jnp.ones_like(g)
  h = 1
  while h < C:
    yield h, upto, after
    pair = (C // (2 * h), 2 * h, K)
    place, u, a = iota(pair, 1), upto.reshape(pair), after.reshape(pair)
    first = jnp.sum(jnp.where(place == h - 1, u, 0.0), axis=1, keepdims=True)  # of the whole earlier half
    second = jnp.sum(jnp.where(place == 2 * h - 1, u, 0.0), axis=1, keepdims=True)
    upto = jnp.where(place >= h, u * first, u).reshape(C, K)
    after = jnp.where(place < h, a * second, a).reshape(C, K)
    h *= 2
  yield h, upto, after


def pairs_of_halves(C: int, h: int) -> Bool[Array, "C C"]:
  """Whether row i is in the later and column j in the earlier half of one aligned pair of halves of h tokens."""
  i, j = iota((C, C), 0), iota((C, C), 1)
  return ((i ^ j) // h == 1) & (i > j)


# --- documents -------------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
  """Of one chunk: the document of each token, of the token before the chunk, and of the chunk's last token."""

  each: Int[Array, "C"]
  before: Int[Array, ""]
  last: Int[Array, ""]

  def together(self) -> Bool[Array, "C C"]:
    return self.each[:, None] == self.each[None, :]


def from_start(runs: Runs | None, x: Array) -> Array:
  """A decay [C ..] from the chunk's start, 0 where another document has begun."""
  return x if runs is None else jnp.where(_column(runs.each == runs.before, x), x, 0.0)


def to_end(runs: Runs | None, x: Array) -> Array:
  """A decay [C ..] to the chunk's end, 0 where another document begins."""
  return x if runs is None else jnp.where(_column(runs.each == runs.last, x), x, 0.0)


def throughout(runs: Runs | None, x: Array) -> Array:
  """The decay of the whole chunk, 0 where a document begins."""
  return x if runs is None else jnp.where(runs.before == runs.last, x, 0.0)


def pairs(runs: Runs | None, keep: Bool[Array, "C C"], x: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """x of the pairs that are kept and of one document; else 0."""
  return jnp.where(keep if runs is None else keep & runs.together(), x, 0.0)


def _column(keep: Bool[Array, "C"], like: Array) -> Array:
  return keep if like.ndim == 1 else keep[:, None]
