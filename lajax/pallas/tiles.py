"""Mathematics of one tile, as every kernel uses it: products, masks, and decays over intervals.

The lowering decides how it is written: sides of tiles are powers of two, and no value is sliced or
concatenated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import NEGLIGIBLE
from lajax.pallas import launch


def iota(shape: tuple[int, ...], axis: int) -> Array:
  return lax.broadcasted_iota(jnp.int32, shape, axis)


# --- products -------------------------------------------------------------------------------------


class Products(NamedTuple):
  """Products of tiles: dtype of the operands, and their precision. Sums are float32.

  * bfloat16 enters the tensor cores as it is.
  * float16 enters as tf32, which has the digits of float16 and the range of float32: a state may
    not fit into float16.
  * float32 means float32: three products of tf32 parts on a GPU, whose default would silently be
    one.

  If `fine`, an operand that is wider than `dtype` enters as the sum of two parts of that dtype.
  Only the product of the two small parts is left out.
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
    """Returns x as parts of `dtype`.

    The high part is made by clearing bits, not by rounding: a compiler may take x -
      float32(bfloat16(x)) for 0.
    """
    if not self.fine or x.dtype == self.dtype:
      return [x.astype(self.dtype)]
    high = lax.bitcast_convert_type(
      lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16), jnp.float32
    )
    return [high.astype(self.dtype), (x - high).astype(self.dtype)]


def operand_dtype(*arrays) -> jnp.dtype:
  """Returns the dtype that all arrays share, else float32."""
  kinds = {jnp.dtype(x.dtype) for x in arrays}
  return kinds.pop() if len(kinds) == 1 else jnp.dtype(jnp.float32)


def products(dtype: jnp.dtype, interpreted: bool) -> Products:
  """Returns the products for inputs of that dtype."""
  if dtype == jnp.bfloat16:
    return Products(jnp.dtype(jnp.bfloat16), lax.Precision.DEFAULT)
  if dtype == jnp.float16:
    preset = lax.Precision.HIGHEST if interpreted else lax.DotAlgorithmPreset.TF32_TF32_F32
    return Products(jnp.dtype(jnp.float32), preset)
  return full_products(interpreted)


def fine_products(dtype: jnp.dtype, interpreted: bool) -> Products:
  """Returns products for sums that cancel: 16 bits of each operand where inputs are bfloat16, else
  all of float32.
  """
  return (
    products(dtype, interpreted)._replace(fine=True)
    if dtype == jnp.bfloat16
    else full_products(interpreted)
  )


def full_products(interpreted: bool) -> Products:
  """Returns products of full float32."""
  preset = lax.Precision.HIGHEST if interpreted else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
  return Products(jnp.dtype(jnp.float32), preset)


# --- loads and stores -----------------------------------------------------------------------------


def inside(start, size: int, end: int, whole: bool) -> Bool[Array, "size"] | None:
  """Returns the mask of the places start .. start + size - 1 that are before `end`; None if
  `whole`: all are.
  """
  return None if whole else start + jnp.arange(size, dtype=jnp.int32) < end


def tile_mask(rows: Array | None, columns: Array | None) -> Array | None:
  """Returns the mask of a tile from those of its rows and columns; None where both are None."""
  if rows is not None and columns is not None:
    return rows[:, None] & columns[None, :]
  if rows is not None:
    return rows[:, None]
  return None if columns is None else columns[None, :]


def load(ref, mask: Array | None = None, other: float = 0) -> Array:
  """Loads a tile, with `other` where the mask is false: nothing behind an array's end is read."""
  if mask is None:
    return launch.load(ref)
  return launch.load(ref, mask=mask, other=jnp.full((), other, ref.dtype))


def store(ref, x: Array, mask: Array | None) -> None:
  """Stores a tile in the dtype of the ref, where the mask is true."""
  launch.store(ref, x.astype(ref.dtype), mask=mask)


# --- decays ---------------------------------------------------------------------------------------
#
# All of these are exponentials of sums of log decays g over an interval of a chunk of C tokens.
# They are formed from the sum of that interval, or as a product over it. A difference of running
# sums loses its digits after one strong decay; a quotient or a positive exponent overflows. Only a
# declared bound of g allows quotients, inside blocks of `BLOCK` tokens: see `halves`.
#
#     from_start(i)  over l <= i    from the chunk's start to token i
#     before(i)      over l < i     from the chunk's start to just before the decay of token i
#     to_end(j)      over l > j     from token j to the chunk's end
#     between(i, j)  over j < l <= i
#     total          over all l
#
# Sums per head are masked sums of a [C C] tile: the lowering has no scan that would be cheaper on
# [C].

BLOCK = 16  # tokens; half a block decays by no more than e^-40 if no entry of g is below -5


def between_per_head(g: Float[Array, "C"]) -> Float[Array, "C C"]:
  """Returns between(i, j); 1 on and above the diagonal."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.cumsum(jnp.where(iota(shape, 0) > iota(shape, 1), g[:, None], 0.0), axis=0))


def from_start_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """Returns from_start(i)."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) <= iota(shape, 1), g[:, None], 0.0), axis=0))


def to_end_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """Returns to_end(j)."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) > iota(shape, 1), g[:, None], 0.0), axis=0))


def before_per_head(g: Float[Array, "C"]) -> Float[Array, "C"]:
  """Returns before(i)."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(jnp.sum(jnp.where(iota(shape, 0) < iota(shape, 1), g[:, None], 0.0), axis=0))


def between_before_per_head(g: Float[Array, "C"]) -> Float[Array, "C C"]:
  """Returns exp of the sums of g over j < l < i; 1 where the interval is empty."""
  shape = (g.shape[0], g.shape[0])
  row, column = iota(shape, 0), iota(shape, 1)
  preceding = jnp.sum(jnp.where(row == column + 1, g[None, :], 0.0), axis=1)
  return jnp.exp(jnp.cumsum(jnp.where(row > column + 1, preceding[:, None], 0.0), axis=0))


def sums(
  keep: Bool[Array, "C C"], x: Float[Array, "C K"], product: Products
) -> Float[Array, "C K"]:
  """Returns, for each row of `keep`, the sum of the rows of x that it keeps."""
  return product(keep.astype(product.dtype), x)


def from_start_per_channel(g: Float[Array, "C K"]) -> Float[Array, "C K"]:
  """Returns from_start(i)."""
  return jnp.exp(jnp.cumsum(g, axis=0))


def before_per_channel(g: Float[Array, "C K"], full: Products) -> Float[Array, "C K"]:
  """Returns before(i)."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(sums(iota(shape, 0) > iota(shape, 1), jnp.maximum(g, NEGLIGIBLE), full))


def to_end_per_channel(g: Float[Array, "C K"], full: Products) -> Float[Array, "C K"]:
  """Returns to_end(j), by a product: the lowering has no scan in this direction."""
  shape = (g.shape[0], g.shape[0])
  return jnp.exp(sums(iota(shape, 0) < iota(shape, 1), jnp.maximum(g, NEGLIGIBLE), full))


def halves(g: Float[Array, "C K"], bounded: bool = False) -> Iterator[tuple[int, Array, Array]]:
  """Yields, for h = 1, 2, 4 .. C: h, each token's decay from the start of its part of h tokens, and
  to the end of its part.

  Two neighbouring parts make an aligned group of 2h tokens. For i in the later and j in the earlier
  part, between(i, j) is the product of i's decay from its start and j's decay to its end. So each h
  < C gives the scores across its halves as one product of matrices, both factors of which decay.
  The last item, h = C, holds from_start and to_end.

  If `bounded`, no entry of g is below -5. The item of h = 8 is then the first, and gives all scores
  inside blocks of 16 tokens. Its two arrays hold, for a token i behind the block's middle, the
  decay from the middle to i and the reciprocal of that decay; for a token j before the middle, the
  reciprocal of the decay from j to the middle and that decay. All are between e^-40 and e^40.
  """
  for h, (upto,), after in _halves([jnp.exp(g)]):
    if bounded and 2 * h == BLOCK:
      later = iota(g.shape, 0) % BLOCK >= h
      decay = jnp.where(later, upto, after)
      upto, after = jnp.where(later, decay, 1 / decay), jnp.where(later, 1 / decay, decay)
    if not bounded or 2 * h >= BLOCK:
      yield h, upto, after


def halves_before(g: Float[Array, "C K"]) -> Iterator[tuple[int, Array, Array, Array]]:
  """Yields the same as `halves`, with the decay from the start of the part to just before the
  token's own as third item.
  """
  for h, (upto, before), after in _halves([jnp.exp(g), jnp.ones_like(g)]):
    yield h, upto, before, after


def _halves(starts: list[Array]) -> Iterator[tuple[int, list[Array], Array]]:
  """Yields h, the decays from the starts of the parts, and those to their ends.

  The first of `starts` is exp g.
  """
  (C, K), after = starts[0].shape, jnp.ones_like(starts[0])
  h = 1
  while h < C:
    yield h, starts, after
    pair = (C // (2 * h), 2 * h, K)
    place, u, a = iota(pair, 1), starts[0].reshape(pair), after.reshape(pair)
    # Decays of the whole earlier and the whole later half. A masked sum replaces a slice, which
    # the lowering lacks.
    first = jnp.sum(jnp.where(place == h - 1, u, 0.0), axis=1, keepdims=True)
    second = jnp.sum(jnp.where(place == 2 * h - 1, u, 0.0), axis=1, keepdims=True)
    starts = [
      jnp.where(place >= h, x * first, x).reshape(C, K)
      for x in (u, *(x.reshape(pair) for x in starts[1:]))
    ]
    after = jnp.where(place < h, a * second, a).reshape(C, K)
    h *= 2
  yield h, starts, after


def decays_of_halves(
  g: Float[Array, "C K"], level: Int[Array, ""] | int, full: Products
) -> tuple[Array, Array, Array]:
  """Returns what `halves_before` yields for h = 2^level, from sums over the intervals; the level
  may be traced.
  """
  shape = (g.shape[0], g.shape[0])
  row, column, g = iota(shape, 0), iota(shape, 1), jnp.maximum(g, NEGLIGIBLE)
  part = (row >> level) == (column >> level)
  decay = lambda keep: jnp.exp(sums(part & keep, g, full))
  return decay(row >= column), decay(row > column), decay(row < column)


def crosses_level(C: int, level: Int[Array, ""] | int) -> Bool[Array, "C C"]:
  """Returns `crosses_halves` for h = 2^level; the level may be traced."""
  i, j = iota((C, C), 0), iota((C, C), 1)
  return ((i ^ j) >> level) == 1


def crosses_halves(C: int, h: int, bounded: bool = False) -> Bool[Array, "C C"]:
  """Returns whether row i is in the later and column j in the earlier half of one aligned group of
  2h tokens: the pairs of an item of `halves`.

  If `bounded` and h = 8, these are all pairs j < i of a group.
  """
  i, j = iota((C, C), 0), iota((C, C), 1)
  if bounded and 2 * h == BLOCK:
    return ((i ^ j) < BLOCK) & (i > j)
  return ((i ^ j) // h == 1) & (i > j)


# --- documents ------------------------------------------------------------------------------------


class ChunkDocuments(NamedTuple):
  """Documents of one chunk."""

  each: Int[Array, "C"]  # of each token
  before: Int[Array, ""]  # of the token before the chunk
  last: Int[Array, ""]  # of the chunk's last token

  def same(self) -> Bool[Array, "C C"]:
    return self.each[:, None] == self.each[None, :]


def mask_from_start(document: ChunkDocuments | None, x: Array) -> Array:
  """Returns what has come from the chunk's start [C ..], 0 at tokens where another document has
  begun.
  """
  return x if document is None else jnp.where(_column(document.each == document.before, x), x, 0.0)


def mask_to_end(document: ChunkDocuments | None, x: Array) -> Array:
  """Returns what goes to the chunk's end [C ..], 0 at tokens that another document follows."""
  return x if document is None else jnp.where(_column(document.each == document.last, x), x, 0.0)


def mask_total(document: ChunkDocuments | None, x: Array) -> Array:
  """Returns what goes through the whole chunk, 0 if a document begins in it.

  A selection, not a product with 0: the state of the document before may be inf.
  """
  return x if document is None else jnp.where(document.before == document.last, x, 0.0)


def mask_scores(
  document: ChunkDocuments | None, keep: Bool[Array, "C C"], x: Float[Array, "C C"]
) -> Float[Array, "C C"]:
  """Returns the scores that `keep` keeps, of two tokens of one document; else 0."""
  return jnp.where(keep if document is None else keep & document.same(), x, 0.0)


def _column(keep: Bool[Array, "C"], like: Array) -> Array:
  return keep if like.ndim == 1 else keep[:, None]


# --- the gate's gradient --------------------------------------------------------------------------


def gate_cotangent(
  g: Float[Array, "C"] | Float[Array, "C K"],
  document: ChunkDocuments | None,
  late: Float[Array, "C K"],
  early: Float[Array, "C K"] | None,
  after: Float[Array, "C K"],
  total: Float[Array, "K"],
  product: Products,
) -> Float[Array, "C"] | Float[Array, "C K"]:
  """Returns the cotangent of the log decays of a chunk: [C K] per channel, or [C] per head where g
  is [C].

  The gate of token l is in every interval that begins before l and ends at or after l. So dg
  sums cotangent times value over everything that decays over such an interval.

  Args:
    late: [C K], of reads after the token's own decay, less the same of the keys that are read;
      summed over i >= l.
    early: [C K], of reads before the token's own decay, summed over i > l; None if there are none.
    after: [C K], of writes to the state, summed over j < l.
    total: [K], of the state, which decays through the whole chunk: every l has this term.
    product: for the sums over tokens, per channel.
  """
  row, column = (iota((g.shape[0], g.shape[0]), axis) for axis in (0, 1))
  if g.ndim == 2:
    total = mask_total(document, total * jnp.exp(jnp.sum(g, axis=0)))
    late, after = sums(row <= column, late, product), sums(row > column, after, product)
    if early is None:
      dg = late + after + total[None, :]
    else:
      dg = late + sums(row < column, early, product) + (after + total[None, :])
  else:
    total = mask_total(document, jnp.sum(total) * jnp.exp(jnp.sum(g)))
    late, after = jnp.sum(late, axis=1)[:, None], jnp.sum(after, axis=1)[:, None]
    if early is None:
      terms = jnp.where(row >= column, late, after)
    else:
      early = jnp.sum(early, axis=1)[:, None]
      terms = jnp.where(row > column, late + early, jnp.where(row == column, late, after))
    dg = jnp.sum(terms, axis=0) + total
  # A token that forgets everything has no gradient at all. The rest here is rounding, which a
  # caller's own derivative, such as that of -exp(x), multiplies by g = -1e4 or -inf.
  return jnp.where(jnp.exp(g) > 0, dg, 0.0)


# --- the triangular system of the delta rule ------------------------------------------------------

SUB = 16  # side of the squares that are solved column by column


def solve_triangle(
  M: Float[Array, "C C"], beta: Float[Array, "C"], product: Products
) -> Float[Array, "C C"]:
  """Returns G = (I + M Diag(beta))^-1 M, for M that is zero on and above the diagonal, and C = 16,
  32, 64 ..

  G gives both inverses without a division: (I + M Diag(beta))^-1 = I - G Diag(beta), and (I +
    Diag(beta) M)^-1 =
  I - Diag(beta) G. Squares of 16 on the diagonal are solved by forward substitution, column by
  column. Two neighbours G1 and G2, with the corner L of M below G1 and beside G2, are then merged:
  their corner is (I - G2 beta2) L (I - beta1 G1).

  The product of all I + M^(2^i) would be shorter, but cancels catastrophically where keys repeat.
  """
  C = M.shape[0]
  parts = (C // SUB, SUB, C // SUB, SUB)
  blocks = jnp.sum(jnp.where(iota(parts, 0) == iota(parts, 2), M.reshape(parts), 0.0), axis=2)
  weighted = blocks * beta.reshape(parts[0], 1, SUB)
  row, column = iota(blocks.shape, 1), iota(blocks.shape, 2)

  def eliminate(c, x):
    factor = jnp.sum(jnp.where(column == c, weighted, 0.0), axis=2, keepdims=True)
    return x - factor * jnp.sum(jnp.where(row == c, x, 0.0), axis=1, keepdims=True)

  blocks = lax.fori_loop(0, SUB - 1, eliminate, blocks)
  found = [x.reshape(SUB, SUB) for x in _equal_parts(blocks, parts[0], 0)]
  while len(found) > 1:
    corners = [_corner(x) for x in _diagonal(M, len(found) // 2)]
    betas = _equal_parts(beta, len(found), 0)
    found = [
      _merge(found[n], corners[n // 2], found[n + 1], betas[n], betas[n + 1], product)
      for n in range(0, len(found), 2)
    ]
  return found[0]


def below(square: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """Returns the triangle below the diagonal of a square that holds two."""
  return jnp.where(iota(square.shape, 0) > iota(square.shape, 1), square, 0.0)


def above(square: Float[Array, "C C"]) -> Float[Array, "C C"]:
  """Returns the triangle on and above the diagonal of a square that holds two."""
  return jnp.where(iota(square.shape, 0) > iota(square.shape, 1), 0.0, square)


def _merge(G1, L, G2, beta1, beta2, product: Products) -> Array:
  L = L - product(L * beta1[None, :], G1)
  L = L - product(G2 * beta2[None, :], L)
  return _join(_join(G1, jnp.zeros_like(L), 1), _join(L, G2, 1), 0)


def _equal_parts(x: Array, count: int, axis: int) -> list[Array]:
  return [x] if count == 1 else list(lax.split(x, (x.shape[axis] // count,) * count, axis))


def _diagonal(x: Float[Array, "C C"], count: int) -> list[Array]:
  """Returns the squares on the diagonal."""
  return [_equal_parts(x, count, 1)[n] for n, x in enumerate(_equal_parts(x, count, 0))]


def _corner(x: Float[Array, "C C"]) -> Float[Array, "C/2 C/2"]:
  """Returns the quarter below the first half of the diagonal and beside its second half."""
  return _equal_parts(_equal_parts(x, 2, 0)[1], 2, 1)[0]


def _join(x: Float[Array, "M N"], y: Float[Array, "M N"], axis: int) -> Array:
  """Concatenates x and y.

  The lowering has no concatenation: they are stacked, transposed and flattened.
  """
  M, N = x.shape
  z = jnp.stack([x, y], axis=-1)
  return (
    z.transpose(2, 0, 1).reshape(2 * M, N) if axis == 0 else z.transpose(0, 2, 1).reshape(M, 2 * N)
  )
