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

  Where `fine`, an operand that is wider than `dtype` goes in as the sum of two of that dtype, and only the product of
  the two small ones is left out.
  """

  dtype: jnp.dtype
  precision: lax.Precision | lax.DotAlgorithmPreset
  fine: bool = False

  def __call__(self, a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return self._sum(self._parts(a), self._parts(b))

  def inner(self, a: Float[Array, "M K"], b: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return self._sum(self._parts(a), [x.T for x in self._parts(b)])

  def outer(self, a: Float[Array, "K M"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return self._sum([x.T for x in self._parts(a)], self._parts(b))

  def _sum(self, a: list[Array], b: list[Array]) -> Array:
    dot = lambda x, y: jnp.dot(x, y, precision=self.precision, preferred_element_type=jnp.float32)
    low = [dot(x, b[0]) for x in a[1:]] + [dot(a[0], x) for x in b[1:]]
    return sum(low[1:], low[0]) + dot(a[0], b[0]) if low else dot(a[0], b[0])

  def _parts(self, x: Array) -> list[Array]:
    """The high part has the first bits of x and is exact, so that no compiler can take x less itself for 0."""
    if not self.fine or x.dtype == self.dtype:
      return [x.astype(self.dtype)]
    high = lax.bitcast_convert_type(
      lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16), jnp.float32
    )
    return [high.astype(self.dtype), (x - high).astype(self.dtype)]


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


def fine_products(dtype: jnp.dtype, interpreted: bool) -> Products:
  """For sums that cancel: 16 bits of each operand where inputs are bfloat16, else all of float32."""
  return (
    products(dtype, interpreted)._replace(fine=True)
    if dtype == jnp.bfloat16
    else full_products(interpreted)
  )


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
    return (
      columns[None, :]
      if rows is None and columns is not None
      else None
      if rows is None
      else rows[:, None]
    )
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


def before_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """exp of the sums of g over l < i: of what reads before its token's own decay."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) < iota(shape, 1), g[:, None], 0.0), axis=0))


def between_before_per_head(g: Float[Array, "C"]) -> Float[Array, "C C"]:
  """exp of the sums of g over j < l < i; 1 where there are none."""
  shape = (g.shape[0], g.shape[0])
  row, column = iota(shape, 0), iota(shape, 1)
  preceding = jnp.sum(jnp.where(row == column + 1, g[None, :], 0.0), axis=1)
  return jnp.exp(jnp.cumsum(jnp.where(row > column + 1, preceding[:, None], 0.0), axis=0))


def sums(
  keep: Bool[Array, "C C"], x: Float[Array, "C K"], product: Products
) -> Float[Array, "C K"]:
  """For each row of `keep`, the sum of the rows of x that it keeps."""
  return product(keep.astype(product.dtype), x)


def head_per_channel(g: Float[Array, "C K"]) -> Float[Array, "C K"]:
  """exp of the sums of g over l <= i."""
  return jnp.exp(jnp.cumsum(g, axis=0))


def before_per_channel(g: Float[Array, "C K"], full: Products) -> Float[Array, "C K"]:
  """exp of the sums of g over l < i."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(sums(iota(shape, 0) > iota(shape, 1), jnp.maximum(g, NEGLIGIBLE), full))


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
  for h, (upto,), after in _halves([jnp.exp(g)]):
    yield h, upto, after


def halves_before(g: Float[Array, "C K"]) -> Iterator[tuple[int, Array, Array, Array]]:
  """As `halves`, with the decay from the start of its part to before the token's own in the middle."""
  for h, (upto, before), after in _halves([jnp.exp(g), jnp.ones_like(g)]):
    yield h, upto, before, after


def _halves(heads: list[Array]) -> Iterator[tuple[int, list[Array], Array]]:
  """The first of the heads is exp g; each grows to the whole chunk's."""
  (C, K), after = heads[0].shape, jnp.ones_like(heads[0])
  h = 1
  while h < C:
    yield h, heads, after
    pair = (C // (2 * h), 2 * h, K)
    place, u, a = iota(pair, 1), heads[0].reshape(pair), after.reshape(pair)
    first = jnp.sum(
      jnp.where(place == h - 1, u, 0.0), axis=1, keepdims=True
    )  # of the whole earlier half
    second = jnp.sum(jnp.where(place == 2 * h - 1, u, 0.0), axis=1, keepdims=True)
    heads = [
      jnp.where(place >= h, x * first, x).reshape(C, K)
      for x in (u, *(x.reshape(pair) for x in heads[1:]))
    ]
    after = jnp.where(place < h, a * second, a).reshape(C, K)
    h *= 2
  yield h, heads, after


def decays_of_halves(
  g: Float[Array, "C K"], level: Int[Array, ""] | int, full: Products
) -> tuple[Array, Array, Array]:
  """What `halves_before` gives with h = 2^level, which need not be known beforehand: from sums over the intervals."""
  shape = (g.shape[0], g.shape[0])
  row, column, g = iota(shape, 0), iota(shape, 1), jnp.maximum(g, NEGLIGIBLE)
  part = (row >> level) == (column >> level)
  decay = lambda keep: jnp.exp(sums(part & keep, g, full))
  return decay(row >= column), decay(row > column), decay(row < column)


def pairs_of_level(C: int, level: Int[Array, ""] | int) -> Bool[Array, "C C"]:
  """`pairs_of_halves` with h = 2^level, which need not be known beforehand."""
  i, j = iota((C, C), 0), iota((C, C), 1)
  return ((i ^ j) >> level) == 1


def pairs_of_halves(C: int, h: int) -> Bool[Array, "C C"]:
  """Whether row i is in the later and column j in the earlier half of one aligned pair of halves of h tokens."""
  i, j = iota((C, C), 0), iota((C, C), 1)
  return ((i ^ j) // h == 1) & (i > j)


def gate_cotangent(
  g: Float[Array, "C"] | Float[Array, "C K"],
  document: "Runs | None",
  late: Float[Array, "C K"],
  early: Float[Array, "C K"] | None,
  after: Float[Array, "C K"],
  total: Float[Array, "K"],
  product: Products,
) -> Float[Array, "C"] | Float[Array, "C K"]:
  """Cotangent of the log decays of a chunk, per channel or, where g is [C], per head.

  The gate of token l is in every interval that begins before l and ends at or after l. So dg sums cotangent times value of
  all that decays over such an interval.

  Args:
    late: terms of the tokens that read after their own decay, less those of the keys they read: summed over i >= l.
    early: terms of the tokens that read before their own decay, summed over i > l; None for none.
    after: terms of what the tokens write to the state, summed over j < l.
    total: terms of the state, which decays through the whole chunk: every l has them.
    product: multiplies the sums over tokens, per channel.
  """
  row, column = (iota((g.shape[0], g.shape[0]), axis) for axis in (0, 1))
  if g.ndim == 2:
    total = total * throughout(document, jnp.exp(jnp.sum(g, axis=0)))
    dg = sums(row <= column, late, product)
    if early is not None:
      dg += sums(row < column, early, product)
    dg += sums(row > column, after, product)
    dg += total[None, :]
  else:
    total = jnp.sum(total) * throughout(document, jnp.exp(jnp.sum(g)))
    late, after = jnp.sum(late, axis=1)[:, None], jnp.sum(after, axis=1)[:, None]
    if early is None:
      terms = jnp.where(row >= column, late, after)
    else:
      early = jnp.sum(early, axis=1)[:, None]
      terms = jnp.where(row > column, late + early, jnp.where(row == column, late, after))
    dg = jnp.sum(terms, axis=0) + total
  # A token that forgets everything has no gradient at all. What is left here is rounding, which a caller's own
  # derivative, such as that of -exp(x), multiplies by g = -1e4 or -inf.
  return jnp.where(jnp.exp(g) > 0, dg, 0.0)


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


def pairs(
  runs: Runs | None, keep: Bool[Array, "C C"], x: Float[Array, "C C"]
) -> Float[Array, "C C"]:
  """x of the pairs that are kept and of one document; else 0."""
  return jnp.where(keep if runs is None else keep & runs.together(), x, 0.0)


def _column(keep: Bool[Array, "C"], like: Array) -> Array:
  return keep if like.ndim == 1 else keep[:, None]


# --- the triangular system of the delta rule -------------------------------------------------------------------------

SOLVED = 16  # side of the blocks that are solved column by column


def solve(
  M: Float[Array, "C C"], beta: Float[Array, "C"], product: Products
) -> Float[Array, "C C"]:
  """G = (I + M Diag(beta))^-1 M, for M that is zero on and above the diagonal, and C = 16, 32, 64 ..

  With it both inverses are at hand, without a division: (I + M Diag(beta))^-1 = I - G Diag(beta), and
  (I + Diag(beta) M)^-1 = I - Diag(beta) G. Blocks of 16 are solved by forward substitution, column by column; then of
  two neighbours, with L of M below the one and beside the other, the corner is (I - G2 beta2) L (I - beta1 G1). (The
  product of I + M^(2^i) is shorter, and cancels catastrophically where keys repeat.)
  """
  C = M.shape[0]
  parts = (C // SOLVED, SOLVED, C // SOLVED, SOLVED)
  blocks = jnp.sum(jnp.where(iota(parts, 0) == iota(parts, 2), M.reshape(parts), 0.0), axis=2)
  weighted = blocks * beta.reshape(parts[0], 1, SOLVED)
  row, column = iota(blocks.shape, 1), iota(blocks.shape, 2)

  def eliminate(c, x):
    factor = jnp.sum(jnp.where(column == c, weighted, 0.0), axis=2, keepdims=True)
    return x - factor * jnp.sum(jnp.where(row == c, x, 0.0), axis=1, keepdims=True)

  blocks = lax.fori_loop(0, SOLVED - 1, eliminate, blocks)
  solved = [x.reshape(SOLVED, SOLVED) for x in _equal_parts(blocks, parts[0], 0)]
  while len(solved) > 1:
    corners = [_corner(x) for x in _diagonal(M, len(solved) // 2)]
    betas = _equal_parts(beta, len(solved), 0)
    solved = [
      _merge(solved[n], corners[n // 2], solved[n + 1], betas[n], betas[n + 1], product)
      for n in range(0, len(solved), 2)
    ]
  return solved[0]


def below(square: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """Of a square that holds two triangles, the one below the diagonal."""
  return jnp.where(iota(square.shape, 0) > iota(square.shape, 1), square, 0.0)


def above(square: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """Of a square that holds two triangles, the one on and above the diagonal."""
  return jnp.where(iota(square.shape, 0) > iota(square.shape, 1), 0.0, square)


def _merge(G1, L, G2, beta1, beta2, product: Products) -> Array:
  L = L - product(L * beta1[None, :], G1)
  L = L - product(G2 * beta2[None, :], L)
  return _join(_join(G1, jnp.zeros_like(L), 1), _join(L, G2, 1), 0)


def _equal_parts(x: Array, count: int, axis: int) -> list[Array]:
  return [x] if count == 1 else list(lax.split(x, (x.shape[axis] // count,) * count, axis))


def _diagonal(x: Float[Array, "C C"], count: int) -> list[Array]:
  """The blocks on the diagonal."""
  return [_equal_parts(x, count, 1)[n] for n, x in enumerate(_equal_parts(x, count, 0))]


def _corner(x: Float[Array, "C C"]) -> Float[Array, "C/2 C/2"]:
  """The part below the diagonal's first half and beside its second."""
  return _equal_parts(_equal_parts(x, 2, 0)[1], 2, 1)[0]


def _join(x: Float[Array, "M N"], y: Float[Array, "M N"], axis: int) -> Array:
  """One behind the other along an axis, of what the lowering has: a new last axis of two, transposed and flattened."""
  M, N = x.shape
  z = jnp.stack([x, y], axis=-1)
  return (
    z.transpose(2, 0, 1).reshape(2 * M, N) if axis == 0 else z.transpose(0, 2, 1).reshape(M, 2 * N)
  )
