"""Products of decays inside a chunk, the scores formed with them, and their backward pass.

Every function works on the arrays of ONE chunk of one head; the drivers add the batch axes with
`jax.vmap`.

With alpha_t = exp(g_t), a chunk of C tokens needs four kinds of products:

    between(i, j)  = prod_{j < l <= i} alpha_l    from the write of token j to the read of token i
    from_start(i)  = prod_{l <= i} alpha_l        from the chunk's first state to token i
    to_end(j)      = prod_{l > j} alpha_l         from token j to the chunk's last state
    total          = prod_l alpha_l

and, for what reads the state before its own token's decay, before(i) = from_start(i - 1). No
product is formed as a quotient, or as exp of a difference of sums: after one strong decay such a
difference has lost its digits. A change of document inside an interval makes its product zero; the
change is a mask, never a term of a sum.

Per channel, between(i, j) would be C C K numbers. Instead, an aligned block of 2h tokens is split
into two halves: for i in the later and j in the earlier half, between(i, j) = (product from the
later half's start to i) (product after j to the earlier half's end). So each size h = 1, 2, 4 ..
C/2 gives the scores of its pairs of halves as one product of matrices whose factors both decay.
Inside blocks of 16 tokens the products over halves are exp of sums, each over its own interval, and
all sums come from one product of matrices; the products over halves of 2h tokens then follow from
those over h tokens by one multiplication.

Where no log decay is below LOWEST_BOUND, a block of 16 tokens needs no halves. With s_i, the sum of
gates from the block's middle to token i (negative for the tokens before the middle), between(i, j)
is exp(s_i) exp(-s_j). Both factors are at most e^40, so the scores of a block are one product of
matrices. The rounding of s is a relative error of at most 4e-6 in a pair of tokens.

The backward pass keeps the same order. The log of every product is a sum of gates, so the cotangent
of a gate is the sum of (cotangent times value) over the products whose interval has that gate, and
over no others: sums over more terms that are subtracted again would leave their rounding, which is
larger than the gradient of a strong gate.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import NEGLIGIBLE, block_lower, row_sums, transposed, vary_like
from lajax.recurrence.transforms import join_batches

SIDE = 16  # tokens of a block in which every decay per channel is exp of a sum of its own
LOWEST_BOUND = -5.0  # of log decays, so that half a block decays by no more than e^-40


class Masks(NamedTuple):
  """Masks of the intervals of a chunk that lie inside one document."""

  between: Bool[Array, "C C"]
  from_start: Bool[Array, "C"]
  to_end: Bool[Array, "C"]
  total: Bool[Array, ""]


def document_masks(document: Int[Array, "C"], previous: Int[Array, ""]) -> Masks:
  """Masks of a chunk, from the document of each token and of the token before the chunk."""
  return Masks(
    document[:, None] == document[None, :],
    document == previous,
    document == document[-1],
    document[-1] == previous,
  )


class Crossing(NamedTuple):
  """(Cotangent times value) of what decays between two tokens of a chunk, for `gate_pullback`.

  Per head `pairs` is the sum over readers and writers, for each pair of tokens. Per channel, the
  pairs of each size of halves are summed over the earlier tokens where the token is in the later
  half, and over the later tokens where the token is in the earlier half. In blocks without halves
  the second sum is subtracted from the first.
  """

  pairs: Float[Array, "C C"] | None = None
  small: Float[Array, "M levels side K"] | None = None  # in blocks of 16 tokens, as in `_Small`
  large: tuple = ()  # [C K] for each size of halves from 16 on


class Decay(NamedTuple):
  """Products of decays over the intervals of one chunk, and what is computed with them.

  Per head, `from_start`, `to_end` and `before` are [C 1] and `total` is [1]; per channel they are
  [C K] and [K].
  """

  between: Float[Array, "C C"]  # per head the products; per channel 1 inside a document, else 0
  from_start: Float[Array, "C K"]
  to_end: Float[Array, "C K"]
  total: Float[Array, "K"]
  before: Float[Array, "C K"]
  same: Bool[Array, "C C"] | None  # whether two tokens are of one document; None without documents
  small: "_Small | None"  # per channel: products inside blocks of 16 tokens
  # For halves of 16, 32 .. tokens: the products from a half's start to i, and after j to its end.
  halves: tuple

  def scores(
    self,
    readers: Float[Array, "C R K"],
    writers: Float[Array, "C W K"],
    precision,
    *,
    careful: bool = False,
  ) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i, j)_c writers_jwc for j <= i, else 0.

    `careful` is for scores that a triangular system is solved with; see `_careful_matmul`.
    """
    product = functools.partial(_careful_matmul if careful else jnp.matmul, precision=precision)
    (C, R, K), W = readers.shape, writers.shape[1]
    if self.small is None:
      found = product(readers.reshape(-1, K), writers.reshape(-1, K).T).reshape(C, R, C, W)
      return jnp.where(_lower(C, 0), found * self.between[:, None, :, None], 0)
    # Halves of less than 16 tokens are too small for products of their own: one masked product of
    # blocks of 16 tokens for each size.
    small = self.small
    later, earlier = (
      small.decayed(readers, small.to_reader),
      small.decayed(writers, small.of_writer),
    )
    found = product(later, jnp.swapaxes(earlier, -1, -2))
    squares = jnp.where(small.keep(R, W), found, 0).sum(1).reshape(-1, small.side, R, small.side, W)
    own = row_sums(readers[:, :, None] * writers[:, None]).reshape(-1, small.side, R, 1, W)
    blocks = jnp.where(np.eye(small.side, dtype=bool)[:, None, :, None], own, squares)
    for n, (upto, after) in enumerate(self.halves, small.side.bit_length() - 1):
      h = 2**n
      later = _half(readers, n, 1) * _half(upto, n, 1)
      earlier = _half(writers, n, 0) * _half(after, n, 0)
      corner = product(
        later.reshape(-1, h * R, K), jnp.swapaxes(earlier.reshape(-1, h * W, K), -1, -2)
      )
      blocks = block_lower(blocks.reshape(-1, 2, h * R, h * W), corner)
    return blocks.reshape(C, R, C, W) * self.between[:, None, :, None]

  def scores_pullback(
    self, dscores: Float[Array, "C R C W"], readers, writers, precision, scores=None
  ) -> tuple[Array, Array, Crossing]:
    """Cotangents of readers and writers, and what the gates' cotangent needs.

    Only the cotangents below the diagonal are read: no decay stands between a token and itself.
    `scores` are the result of `scores`; without them there is no `Crossing`, and no gradient of
    gates.
    """
    (C, R, K), W = readers.shape, writers.shape[1]
    product = functools.partial(jnp.matmul, precision=precision)
    d = jnp.where(_lower(C, -1), dscores * self.between[:, None, :, None], 0)
    if self.small is None:
      crossing = Crossing()
      if scores is not None:
        crossing = Crossing((jnp.where(_lower(C, -1), dscores * scores, 0)).sum((1, 3)))
      d = d.reshape(C * R, C * W)
      found = product(d, writers.reshape(-1, K)), product(transposed(d), readers.reshape(-1, K))
      return found[0].reshape(readers.shape), found[1].reshape(writers.shape), crossing
    blocks, small, large = d[None], self.small, []
    dreaders, dwriters = jnp.zeros_like(readers), jnp.zeros_like(writers)
    for n, (upto, after) in reversed(list(enumerate(self.halves, small.side.bit_length() - 1))):
      h = 2**n
      pair = blocks.reshape(-1, 2, h * R, 2, h * W)
      corner, blocks = pair[:, 1, :, 0], _chosen(pair[:, :, :, 0], pair[:, :, :, 1], axis=1)
      upto, after = _half(upto, n, 1), _half(after, n, 0)
      later, earlier = _half(readers, n, 1), _half(writers, n, 0)
      dlater = product(corner, (earlier * after).reshape(-1, h * W, K)).reshape(later.shape) * upto
      corner = jnp.swapaxes(corner, -1, -2)
      dearlier = product(corner, (later * upto).reshape(-1, h * R, K)).reshape(earlier.shape)
      dearlier = dearlier * after
      dreaders, dwriters = dreaders + _unhalf(dlater, 1), dwriters + _unhalf(dearlier, 0)
      large.append(((earlier * dearlier).sum(2), (later * dlater).sum(2)))
    squares = blocks.reshape(-1, 1, small.side * R, small.side * W)
    later, earlier = (
      small.decayed(readers, small.to_reader),
      small.decayed(writers, small.of_writer),
    )
    keep = small.keep(R, W)
    dlater = product(jnp.where(keep, squares, 0), earlier)
    keep, squares = np.swapaxes(keep, -1, -2), transposed(squares)
    dearlier = product(jnp.where(keep, squares, 0), later)
    dlater, later = small.by_token(dlater, R), small.by_token(later, R)
    dearlier, earlier = small.by_token(dearlier, W), small.by_token(earlier, W)
    dreaders += (dlater * small.to_reader).sum(1).reshape(readers.shape)
    dwriters += (dearlier * small.of_writer).sum(1).reshape(writers.shape)
    dreaders, dwriters = lax.optimization_barrier((dreaders, dwriters))
    if scores is None:
      return dreaders, dwriters, Crossing()
    near, of_writers = (dlater * later).sum(3), (dearlier * earlier).sum(3)
    near = near + of_writers if small.has_halves else near - of_writers
    return dreaders, dwriters, Crossing(None, near, tuple(large[::-1]))

  def scores_before(
    self, readers, writers, precision, *, careful: bool = False
  ) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i - 1, j)_c writers_jwc for j < i, else 0.

    These are the scores of what reads the state before its own token's decay.
    """
    return self.inside(
      preceding(self.scores(following(readers), writers, precision, careful=careful))
    )

  def scores_before_pullback(self, dscores, readers, writers, precision, scores=None):
    """The same of `scores_before`; cotangents are read where j < i - 1.

    No decay stands between neighbours.
    """
    dreaders, dwriters, crossing = self.scores_pullback(
      following(self.inside(dscores)),
      following(readers),
      writers,
      precision,
      None if scores is None else following(scores),
    )
    return preceding(dreaders), dwriters, crossing

  def neighbours(self, x: Float[Array, "C ..."]) -> Float[Array, "C ..."]:
    """x of the pairs (i + 1, i), and 0 where the two tokens are of two documents."""
    if self.same is None:
      return x
    together = jnp.append(jnp.diagonal(self.same, -1), False)
    return jnp.where(together.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

  def inside(self, scores: Float[Array, "C R C W"]) -> Float[Array, "C R C W"]:
    """The scores, and 0 between two documents."""
    return scores if self.same is None else jnp.where(self.same[:, None, :, None], scores, 0)


class _Small(NamedTuple):
  """Products of decays in blocks of `side` tokens (M = C / side of them), by two factors per pair.

  With halves of 1, 2, 4 .. tokens there is a level for each size, and both factors are one array.
  For a token of a later half it holds the product from the half's start to the token, for a token
  of an earlier half that after the token to the half's end.

  Without halves there is one level: the products from the block's middle to a token, and their
  reciprocals.
  """

  to_reader: Float[Array, "M levels side 1 K"]
  of_writer: Float[Array, "M levels side 1 K"]

  @property
  def side(self) -> int:
    return self.to_reader.shape[2]

  @property
  def levels(self) -> int:
    return self.to_reader.shape[1]

  @property
  def has_halves(self) -> bool:
    return _has_halves(self.levels, self.side)

  def keep(self, R: int, W: int) -> Bool[np.ndarray, "levels sideR sideW"]:
    """Masks of the pairs of tokens that each level computes."""
    if self.has_halves:
      return _pairs_of_halves(self.levels, R, W)
    earlier = np.tri(self.side, k=-1, dtype=bool)
    return earlier.repeat(R, axis=0).repeat(W, axis=1)[None]

  def decayed(
    self, x: Float[Array, "C R K"], factors: Float[Array, "M levels side 1 K"]
  ) -> Float[Array, "M levels sideR K"]:
    """x decayed, for the pairs in `keep`; at other pairs the results are finite numbers."""
    decayed = x.reshape(-1, 1, self.side, *x.shape[1:]) * factors
    return decayed.reshape(*decayed.shape[:2], -1, x.shape[-1])

  def by_token(self, x: Float[Array, "M levels sideR K"], R: int):
    """[M levels sideR K] -> [M levels side R K]."""
    return x.reshape(-1, self.levels, self.side, R, x.shape[-1])


def _has_halves(levels: int, side: int) -> bool:
  return 2**levels == side


# Masks are made by NumPy: operations of the program would have to be compiled.


def _lower(C: int, k: int) -> Bool[np.ndarray, "C 1 C 1"]:
  return np.tri(C, k=k, dtype=bool)[:, None, :, None]


def _pairs_of_halves(levels: int, R: int, W: int) -> Bool[np.ndarray, "levels LR LW"]:
  """Masks of the pairs (i, j) of L = 2^levels tokens with i in the later and j in the earlier half.

  One mask for each size of aligned blocks: 2, 4, .. L tokens.
  """
  i, h = np.arange(2**levels), 2 ** np.arange(levels)[:, None, None]
  row, column = np.repeat(i, R)[:, None], np.repeat(i, W)[None, :]
  return (row // h == column // h + 1) & (row // (2 * h) == column // (2 * h))


def _intervals(side: int, has_halves: bool = True) -> np.ndarray:
  """Weights of the `side` tokens of a block in the sums over each interval, [R side].

  First the intervals of `_Small`, then those from the block's start to each token, then those after
  each token. Without halves the first are signed: from the block's middle to each token.
  """
  i = np.arange(side)
  upto, after = i <= i[:, None], i > i[:, None]
  if not has_halves:
    middle = side // 2
    signed = (upto & (i >= middle)).astype(int) - (after & (i < middle))
    return np.concatenate([signed, upto, after])
  half = i // 2 ** np.arange(side.bit_length() - 1)[:, None, None]  # [levels 1 side]
  later = np.swapaxes(half, 1, 2) % 2 == 1
  halves = (np.swapaxes(half, 1, 2) == half) & np.where(later, upto, after)
  return np.concatenate([*halves, upto, after])


def following(x: Array) -> Array:
  """Returns in row i that of token i + 1, and zeros in the last row."""
  return _shifted(x, 0.0, (-1, 1))


def preceding(x: Array) -> Array:
  """Returns in row i that of token i - 1, and zeros in the first row."""
  return _shifted(x, 0.0, (1, -1))


def _shifted(x: Array, new: float, edges: tuple[int, int]) -> Array:
  """x with rows of `new` added (or, if negative, rows removed) at its start and its end."""
  return lax.pad(x, jnp.asarray(new, x.dtype), [(*edges, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _careful_matmul(a: Array, b: Array, precision) -> Array:
  """Returns a b; the sum over an inner axis of 64 is formed in four parts.

  A sum is formed in less parts where the axis is shorter. Triangular systems need this: where keys
  repeat and beta is 2, the error of one k . k enters every token with the same sign, and T such
  errors add up. One running sum of 64 float32 terms is wrong by up to 2e-7, this one by a quarter.
  """
  count = min(4, -(-a.shape[-1] // 16))
  if count == 1:
    return jnp.matmul(a, b, precision=precision)
  front = a.shape[:-2]  # made one axis: XLA's CPU products take no more than eight axes

  def parts(x):
    x = _padded(x, count)
    return jnp.moveaxis(x.reshape(-1, x.shape[-2], count, x.shape[-1] // count), -2, 0)

  b = jnp.swapaxes(parts(jnp.swapaxes(b, -1, -2)), -1, -2)
  found = jnp.matmul(parts(a), b, precision=precision).sum(0)
  return found.reshape(*front, *found.shape[-2:])


def _padded(x: Array, multiple: int) -> Array:
  """x with zeros at the end of its last axis, up to a multiple."""
  missing = -x.shape[-1] % multiple
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# XLA's CPU compiler takes long for concatenations, above all of many arrays, and less for `select`.


def _chosen(first: Array, second: Array, axis: int) -> Array:
  """Returns entry 0 of `first` and entry 1 of `second` along the axis; a size of 1 is repeated."""
  is_first = np.array([True, False]).reshape(-1, *(1,) * (max(first.ndim, second.ndim) - 1 - axis))
  shape = np.broadcast_shapes(is_first.shape, first.shape, second.shape)
  # lax.select is traced faster than jnp.where
  return lax.select(*(jnp.broadcast_to(x, shape) for x in (is_first, first, second)))


def _half(x: Array, n: int, which: int) -> Float[Array, "M h R K"]:
  """Earlier (0) or later (1) halves of h = 2^n tokens, of x [C R K] or [C K] (where R is 1)."""
  return x.reshape(-1, 2, 2**n, x.shape[1] if x.ndim == 3 else 1, x.shape[-1])[:, which]


def _unhalf(x: Float[Array, "M h R K"], which: int) -> Float[Array, "C R K"]:
  """Transpose of `_half`: x in its halves, and zeros in the others."""
  pair = [x[:, None], jnp.zeros((), x.dtype)]
  return _chosen(*(pair if which == 0 else pair[::-1]), axis=1).reshape(-1, *x.shape[2:])


def decay_of(
  g: Array | None, length: int, dtype, masks: Masks | None, bounded: bool = False
) -> Decay:
  """Decays of a chunk of `length` tokens (a power of two) from log gates: None, [C], or [C K].

  `bounded` says that no gate is below LOWEST_BOUND.
  """
  small, halves = None, ()
  if g is None:
    between, from_start = jnp.ones((length, length), dtype), jnp.ones((length, 1), dtype)
    to_end = from_start
  elif g.ndim == 1:
    between, from_start, to_end = _decay_per_head(g)
  else:
    from_start, to_end, small, halves = _decay_per_channel(g, not bounded)
    between = jnp.ones((length, length), dtype)
  before = _shifted(from_start, 1.0, (1, -1))
  if masks is None:
    return Decay(between, from_start, to_end, from_start[-1], before, None, small, halves)
  keep = lambda mask, x: jnp.where(mask, x, 0)
  return Decay(
    keep(masks.between, between),
    keep(masks.from_start[:, None], from_start),
    keep(masks.to_end[:, None], to_end),
    keep(masks.total, from_start[-1]),
    keep(masks.from_start[:, None], before),
    masks.between,
    small,
    halves,
  )


def _decay_per_head(g: Float[Array, "C"]) -> tuple[Array, Array, Array]:
  """between, from_start and to_end; each is exp of a sum over its own interval."""
  lower = np.tri(len(g), dtype=g.dtype)
  terms = jnp.where(np.tri(len(g), k=-1, dtype=bool), g[:, None], 0)
  between = jnp.where(lower > 0, jnp.exp(_sums(lower, terms[None])[0]), 0)
  from_start = jnp.exp(g[0]) * between[:, :1]
  return between, from_start, between[-1][:, None]


def _sums(intervals: np.ndarray, x: Float[Array, "M S K"]) -> Float[Array, "M R K"]:
  """Sums of rows of x over intervals, as one product, without -inf: 0 times -inf is NaN."""
  return _weighted(jnp.asarray(intervals, x.dtype), jnp.maximum(x, NEGLIGIBLE))


@jax.custom_jvp
def _weighted(weights: Float[Array, "R S"], x: Float[Array, "M S K"]) -> Float[Array, "M R K"]:
  """The weights, which are constants, times each matrix of x, of all chunks together.

  There is a copy of the weights for each matrix. With one for all, XLA makes one product of all
  matrices, and reorders x and the result for it.
  """
  copies = jnp.broadcast_to(weights, (len(x), *weights.shape))
  product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  return join_batches(product, (0, 0), 0)(vary_like(copies, x), x)


@_weighted.defjvp
def _weighted_jvp(primals, tangents):
  weights, x = primals
  moved = jnp.matmul(vary_like(weights, x), tangents[1], precision=lax.Precision.HIGHEST)
  return _weighted(weights, x), moved


def _decay_per_channel(
  g: Float[Array, "C K"], has_halves: bool
) -> tuple[Array, Array, _Small, tuple]:
  """from_start, to_end, and the products in blocks and over halves of every size."""
  side = min(SIDE, len(g))
  sums = _sums(_intervals(side, has_halves), g.reshape(-1, side, g.shape[-1]))
  sums = sums.reshape(len(sums), -1, side, 1, g.shape[-1])
  products = jnp.exp(sums)
  small = _Small(products[:, :-2], products[:, :-2])
  if not has_halves:
    small = small._replace(of_writer=jnp.exp(-sums[:, :-2]))
  upto, after = (products[:, n].reshape(g.shape) for n in (-2, -1))
  halves = []
  while side << len(halves) < len(g):
    h = side << len(halves)
    halves.append((upto, after))
    u, a = (x.reshape(-1, 2, h, x.shape[-1]) for x in (upto, after))
    first, second = u[:, :1, -1:], u[:, 1:, -1:]  # over the whole earlier and the whole later half
    one = jnp.ones((), g.dtype)
    upto = (u * _chosen(one, first, axis=1)).reshape(g.shape)
    after = (a * _chosen(second, one, axis=1)).reshape(g.shape)
  return upto, after, small, tuple(halves)


def gate_pullback(
  g: Float[Array, "C"] | Float[Array, "C K"],
  crossing: Crossing,
  from_start: Float[Array, "C K"],
  to_end: Float[Array, "C K"],
  total: Float[Array, "K"],
):
  """Cotangent of g, from (cotangent times value) of everything that decays.

  Args:
    g: log gates, [C] or [C K].
    crossing: of the scores.
    from_start: of what decays by from_start(i), at token i.
    to_end: of what decays by to_end(j), at token j.
    total: of what decays over the whole chunk.
  """
  if g.ndim == 1:
    assert crossing.pairs is not None
    dg = _gate_pullback_per_head(
      crossing.pairs, row_sums(from_start), row_sums(to_end), row_sums(total[None])
    )
  else:
    assert crossing.small is not None
    dg = _gate_pullback_per_channel(crossing.small, crossing.large, from_start, to_end, total)
  # Every term has the factor exp(g), which the compiler may flush to 0 only in part of them.
  return jnp.where(jnp.exp(g) > 0, dg, 0)


def _gate_pullback_per_head(
  pairs: Float[Array, "C C"],
  from_start: Float[Array, "C 1"],
  to_end: Float[Array, "C 1"],
  total: Float[Array, "1 1"],
) -> Float[Array, "C"]:
  """Gate l is in the interval of the pair (i, j) where j < l <= i."""
  C = len(from_start)
  earlier = vary_like(jnp.asarray(np.triu(np.ones((C, C), pairs.dtype), 1)), pairs)  # [j l]: j < l
  full = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  by_reader = full(pairs, earlier) + from_start  # [i l]: of intervals that end at i
  crossed = jnp.where(np.tri(C, dtype=bool), by_reader, 0).sum(0)
  return crossed + full(to_end[:, 0], earlier) + total[0, 0]


def _gate_pullback_per_channel(
  small: Float[Array, "M levels side K"],
  large: tuple,
  from_start: Float[Array, "C K"],
  to_end: Float[Array, "C K"],
  total: Float[Array, "K"],
) -> Float[Array, "C K"]:
  """Goes from the chunk to ever smaller halves, as `_decay_per_channel` goes up.

  At each size, `upto` has the products from a block's start to a token, `after` those from a token
  to the block's end, and `whole` those over the whole block.
  """
  C, K = from_start.shape
  M, levels, side = small.shape[:3]
  upto, after, whole = from_start, to_end, total[None]  # [blocks K]
  for n, (earlier, later) in reversed(list(enumerate(large, side.bit_length() - 1))):
    into_later = _half(upto, n, 1)[:, :, 0].sum(1, keepdims=True)
    out_of_earlier = _half(after, n, 0)[:, :, 0].sum(1, keepdims=True)
    whole = (whole[:, None] + _chosen(into_later, out_of_earlier, axis=1)).reshape(-1, K)
    upto = upto + _unhalf(later[:, :, None], 1)[:, 0]
    after = after + _unhalf(earlier[:, :, None], 0)[:, 0]
  # Three products, not one of a concatenation: XLA's CPU compiler would make `small` inside that.
  intervals = _intervals(side, _has_halves(levels, side)).T
  if not _has_halves(levels, side):
    intervals[:, :side] = np.triu(np.ones((side, side)))  # [l i]: a token i decays by its l <= i
  intervals = jnp.asarray(intervals, small.dtype)
  of_small, of_upto, of_after = jnp.split(intervals, [levels * side, (levels + 1) * side], axis=1)
  dg = _weighted(of_small, lax.optimization_barrier(small).reshape(M, -1, K)) + whole[:, None]
  dg += _weighted(of_upto, upto.reshape(M, side, K))
  dg += _weighted(of_after, after.reshape(M, side, K))
  return dg.reshape(C, K)
