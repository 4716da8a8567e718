"""Decays over the intervals of one chunk, the scores and sums formed with them, and their backward pass.

Every function works on the arrays of ONE chunk of one head; the drivers add the batch axes with `jax.vmap`.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import NEGLIGIBLE, block_lower, row_sums, transposed, vary_like

SIDE = 16  # tokens whose decays per channel are formed together, each as exp of a sum over its own interval

# With alpha_t = exp(g_t), a chunk needs four products of intervals of alpha:
#     between(i, j) = prod_{j < l <= i} alpha_l      from the write of token j to the read of token i
#     from_start(i)       = prod_{l <= i} alpha_l          from the chunk's incoming state to token i
#     to_end(j)       = prod_{l > j} alpha_l           from token j to the chunk's outgoing state
#     total         = prod_l alpha_l
# and, for what reads the state before the token's own decay, before(i) = from_start(i - 1) and between(i - 1, j).
# None is formed as a quotient, or as exp of a difference of sums: after one strong decay such a difference has lost its
# digits. A change of segment inside an interval makes it zero; that is a mask, never a term of a sum.
#
# Per channel, between(i, j) would be C C K numbers. Instead, an aligned block of 2h tokens is two halves: for i in the later
# and j in the earlier one, between(i, j) = (product from the later half's start to i) (product after j to the earlier half's
# end). So each size h = 1, 2, 4, .. C/2 gives the scores of its pairs of halves as one product of matrices, both factors of
# which decay. Inside blocks of 16 tokens the products over halves are exp of sums, each over its own interval, all of them
# from one product of matrices; beyond, those over halves of size 2h follow from those of size h by one multiplication.


class Masks(NamedTuple):
  """Which intervals of a chunk lie inside one segment."""

  between: Bool[Array, "C C"]
  from_start: Bool[Array, "C"]
  to_end: Bool[Array, "C"]
  total: Bool[Array, ""]


def segment_masks(document: Int[Array, "C"], previous: Int[Array, ""]) -> Masks:
  """The masks of a chunk, from the segment of each token and of the token before the chunk."""
  return Masks(
    document[:, None] == document[None, :],
    document == previous,
    document == document[-1],
    document[-1] == previous,
  )


class Decay(NamedTuple):
  """Products of decays over the intervals of one chunk, and what is computed with them.

  `from_start`, `to_end`, `before` and `total` are [C 1] and [1] for one decay a from_start, [C K] and [K] for one a channel.
  """

  between: Float[
    Array, "C C"
  ]  # one decay a from_start: the decays themselves; one a channel: 1 inside a segment, else 0
  from_start: Float[Array, "C K"]
  to_end: Float[Array, "C K"]
  total: Float[Array, "K"]
  before: Float[Array, "C K"]
  same: Bool[Array, "C C"] | None  # inside a segment; None without segments
  small: "_Small | None"  # one a channel: the halves inside blocks of 16 tokens
  halves: (
    tuple  # for h = 16, 32 .. the products (from its half's start to i, after j to its half's end)
  )

  def scores(
    self,
    readers: Float[Array, "C R K"],
    writers: Float[Array, "C W K"],
    precision,
    *,
    careful: bool = False,
  ) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i, j)_c writers_jwc for j <= i, else 0. `careful`: to be inverted."""
    product = functools.partial(_careful_matmul if careful else jnp.matmul, precision=precision)
    (C, R, K), W = readers.shape, writers.shape[1]
    if self.small is None:
      found = product(readers.reshape(-1, K), writers.reshape(-1, K).T).reshape(C, R, C, W)
      return jnp.where(_lower(C, 0), found * self.between[:, None, :, None], 0)
    # Of halves smaller than 8, which are too small for products of their own, masked products of 16 tokens.
    small = self.small
    found = product(small.decayed(readers), jnp.swapaxes(small.decayed(writers), -1, -2))
    squares = jnp.where(small.keep(R, W), found, 0).sum(0).reshape(-1, small.side, R, small.side, W)
    own = row_sums(readers[:, :, None] * writers[:, None]).reshape(-1, small.side, R, 1, W)
    blocks = jnp.where(
      np.eye(small.side, dtype=bool)[:, None, :, None], own, squares
    )  # [C/h h R h W]
    for n, (upto, after) in enumerate(self.halves, small.levels):
      h = 2**n
      later, earlier = (
        _half(readers, n, 1) * _half(upto, n, 1),
        _half(writers, n, 0) * _half(after, n, 0),
      )
      corner = product(
        later.reshape(-1, h * R, K), jnp.swapaxes(earlier.reshape(-1, h * W, K), -1, -2)
      )
      blocks = block_lower(blocks.reshape(-1, 2, h * R, h * W), corner)
    return blocks.reshape(C, R, C, W) * self.between[:, None, :, None]

  def scores_pullback(self, d: Float[Array, "C R C W"], readers, writers, precision):
    """Cotangents of readers and writers from that of `scores` below the diagonal (what `d` holds elsewhere is not read)."""
    (C, R, K), W = readers.shape, writers.shape[1]
    product = functools.partial(jnp.matmul, precision=precision)
    d = jnp.where(_lower(C, -1), d * self.between[:, None, :, None], 0)
    if self.small is None:
      d = d.reshape(C * R, C * W)
      found = product(d, writers.reshape(-1, K)), product(transposed(d), readers.reshape(-1, K))
      return found[0].reshape(readers.shape), found[1].reshape(writers.shape)
    dreaders, dwriters, blocks, small = (
      jnp.zeros_like(readers),
      jnp.zeros_like(writers),
      d[None],
      self.small,
    )
    for n, (upto, after) in reversed(list(enumerate(self.halves, small.levels))):
      h = 2**n
      pair = blocks.reshape(-1, 2, h * R, 2, h * W)
      corner, blocks = pair[:, 1, :, 0], _chosen(pair[:, :, :, 0], pair[:, :, :, 1], axis=1)
      upto, after = _half(upto, n, 1), _half(after, n, 0)
      later, earlier = _half(readers, n, 1) * upto, _half(writers, n, 0) * after
      dlater = product(corner, earlier.reshape(-1, h * W, K)).reshape(later.shape) * upto
      dearlier = (
        product(jnp.swapaxes(corner, -1, -2), later.reshape(-1, h * R, K)).reshape(earlier.shape)
        * after
      )
      dreaders, dwriters = dreaders + _unhalf(dlater, 1), dwriters + _unhalf(dearlier, 0)
    squares = blocks.reshape(-1, small.side * R, small.side * W)
    keep = small.keep(R, W)
    dlater = product(jnp.where(keep, squares, 0), small.decayed(writers))
    keep, squares = np.swapaxes(keep, -1, -2), transposed(squares)
    dearlier = product(jnp.where(keep, squares, 0), small.decayed(readers))
    dreaders += small.decayed_pullback(dlater, readers.shape)
    dwriters += small.decayed_pullback(dearlier, writers.shape)
    return lax.optimization_barrier((dreaders, dwriters))

  def scores_before(
    self, readers, writers, precision, *, careful: bool = False
  ) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i - 1, j)_c writers_jwc for j < i, else 0: reading before their own token's decay."""
    return self.inside(
      preceding(self.scores(following(readers), writers, precision, careful=careful))
    )

  def scores_before_pullback(self, d: Float[Array, "C R C W"], readers, writers, precision):
    """Cotangents from that of `scores_before` where j < i - 1; between neighbours stands no decay."""
    dreaders, dwriters = self.scores_pullback(
      following(self.inside(d)), following(readers), writers, precision
    )
    return preceding(dreaders), dwriters

  def neighbours(self, d: Float[Array, "C ..."]) -> Float[Array, "C ..."]:
    """d of the pairs (i + 1, i), where both are of one segment."""
    if self.same is None:
      return d
    together = jnp.append(jnp.diagonal(self.same, -1), False)
    return jnp.where(together.reshape(-1, *(1,) * (d.ndim - 1)), d, 0)

  def inside(self, scores: Float[Array, "C R C W"]) -> Float[Array, "C R C W"]:
    """Zeros between documents."""
    return scores if self.same is None else jnp.where(self.same[:, None, :, None], scores, 0)


class _Small(NamedTuple):
  """Products over pairs of halves of 1, 2, 4 .. tokens, in blocks of `side` tokens, of which a chunk has M = C / side.

  Of a token of the later half from the half's start to it, of one of the earlier half after it to the half's end.
  """

  products: Float[Array, "levels M side 1 K"]

  @property
  def side(self) -> int:
    return self.products.shape[2]

  @property
  def levels(self) -> int:
    return len(self.products)

  def keep(self, R: int, W: int) -> Bool[np.ndarray, "levels 1 sideR sideW"]:
    return _pairs_of_halves(self.levels, R, W)[:, None]

  def decayed(self, x: Float[Array, "C R K"]) -> Float[Array, "levels M sideR K"]:
    """x decayed, where `keep` has pairs for it; the rest are finite numbers."""
    decayed = x.reshape(-1, self.side, *x.shape[1:]) * self.products
    return decayed.reshape(*decayed.shape[:2], -1, x.shape[-1])

  def decayed_pullback(self, d: Float[Array, "levels M sideR K"], shape) -> Float[Array, "C R K"]:
    return (d.reshape(self.levels, -1, self.side, *shape[1:]) * self.products).sum(0).reshape(shape)


# Masks are made here, not by operations of the program, which would have to be compiled.


def _lower(C: int, k: int) -> Bool[np.ndarray, "C 1 C 1"]:
  return np.tri(C, k=k, dtype=bool)[:, None, :, None]


def _pairs_of_halves(levels: int, R: int, W: int) -> Bool[np.ndarray, "levels LR LW"]:
  """Of L = 2^levels tokens, the pairs (i in the later half, j in the earlier one) of aligned blocks of 2, 4, .. L."""
  i, h = np.arange(2**levels), 2 ** np.arange(levels)[:, None, None]
  row, column = np.repeat(i, R)[:, None], np.repeat(i, W)[None, :]
  return (row // h == column // h + 1) & (row // (2 * h) == column // (2 * h))


def _intervals(side: int) -> Bool[np.ndarray, "R side"]:
  """Which of the `side` tokens of a block are in the intervals of `_Small`, then from its start up to each, and after each."""
  i = np.arange(side)
  upto, after = i <= i[:, None], i > i[:, None]
  half = i // 2 ** np.arange(side.bit_length() - 1)[:, None, None]  # [levels 1 side]
  later = np.swapaxes(half, 1, 2) % 2 == 1
  halves = (np.swapaxes(half, 1, 2) == half) & np.where(later, upto, after)
  return np.concatenate([*halves, upto, after])


def following(x: Array) -> Array:
  """Row i is that of token i + 1; behind the last one, zeros."""
  return _shifted(x, 0.0, (-1, 1))


def preceding(x: Array) -> Array:
  """Row i is that of token i - 1; before the first one, zeros."""
  return _shifted(x, 0.0, (1, -1))


def _shifted(x: Array, new: float, edges: tuple[int, int]) -> Array:
  """x with so many rows of `new` more, or rows less, at its start and its end."""
  return lax.pad(x, jnp.asarray(new, x.dtype), [(*edges, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def _careful_matmul(a: Array, b: Array, precision) -> Array:
  """a b, summed over four parts of an inner axis of 64, then over the parts; over fewer where it is short.

  What is inverted below needs it: where keys repeat and beta is 2, the error of one k . k enters every token vary_like, and T of
  them add up. One running sum of 64 float32 terms is wrong by up to 2e-7, this one by a quarter of that.
  """
  count = min(4, -(-a.shape[-1] // 16))
  if count == 1:
    return jnp.matmul(a, b, precision=precision)
  front = a.shape[:-2]  # as one axis: XLA's CPU products take no more than eight

  def parts(x):
    x = _padded(x, count)
    return jnp.moveaxis(x.reshape(-1, x.shape[-2], count, x.shape[-1] // count), -2, 0)

  b = jnp.swapaxes(parts(jnp.swapaxes(b, -1, -2)), -1, -2)
  found = jnp.matmul(parts(a), b, precision=precision).sum(0)
  return found.reshape(*front, *found.shape[-2:])


def _padded(x: Array, multiple: int) -> Array:
  """x with zeros behind its last axis, up to a multiple."""
  missing = -x.shape[-1] % multiple
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# XLA's CPU compiler takes long over concatenations, above all over several in one, and less over a choice or padding.


def _chosen(first: Array, second: Array, axis: int) -> Array:
  """Two along the axis: of `first`, then of `second`. Each has two there, or one, or is a number."""
  is_first = np.array([True, False]).reshape(-1, *(1,) * (max(first.ndim, second.ndim) - 1 - axis))
  shape = np.broadcast_shapes(is_first.shape, first.shape, second.shape)
  return lax.select(
    *(jnp.broadcast_to(x, shape) for x in (is_first, first, second))
  )  # traced faster than jnp.where


def _half(x: Array, n: int, which: int) -> Float[Array, "M h R K"]:
  """Of each aligned pair of halves of h = 2^n tokens, the earlier (0) or later (1), of [C K] (R = 1) or [C R K]."""
  return x.reshape(-1, 2, 2**n, x.shape[1] if x.ndim == 3 else 1, x.shape[-1])[:, which]


def _unhalf(x: Float[Array, "M h R K"], which: int) -> Float[Array, "C R K"]:
  """The transpose of `_half`: zeros in the other halves."""
  pair = [x[:, None], jnp.zeros((), x.dtype)]
  return _chosen(*(pair if which == 0 else pair[::-1]), axis=1).reshape(-1, *x.shape[2:])


def decay(g: Array | None, length: int, dtype, masks: Masks | None) -> Decay:
  """The decays of a chunk of `length` tokens (a power of two) from its log gates: None, [C], or [C K]."""
  small, halves = None, ()
  if g is None:
    between, from_start = jnp.ones((length, length), dtype), jnp.ones((length, 1), dtype)
    to_end = from_start
  elif g.ndim == 1:
    between, from_start, to_end = _decay_per_head(g)
  else:
    from_start, to_end, small, halves = _decay_per_channel(g)
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
  """between(i, j) = exp(sum of g over j < l <= i), each sum formed as a sum of its own interval; from_start; to_end."""
  lower = np.tri(len(g), dtype=g.dtype)
  terms = jnp.where(np.tri(len(g), k=-1, dtype=bool), g[:, None], 0)
  between = jnp.where(lower > 0, jnp.exp(_sums(lower, terms)), 0)
  from_start = jnp.exp(_sums(lower, g[:, None]))
  return between, from_start, between[-1][:, None]


def _sums(intervals: np.ndarray, x: Array) -> Array:
  """Sums of rows of x over intervals, as one product; -inf is kept out of it (0 times -inf is NaN)."""
  weights = vary_like(jnp.asarray(intervals, x.dtype), x)
  return jnp.matmul(weights, jnp.maximum(x, NEGLIGIBLE), precision=lax.Precision.HIGHEST)


def _decay_per_channel(g: Float[Array, "C K"]) -> tuple[Array, Array, _Small, tuple]:
  """from_start, to_end, and the products over the halves of every size."""
  side = min(SIDE, len(g))
  products = jnp.exp(_sums(_intervals(side), g.reshape(-1, side, g.shape[-1])))
  products = products.reshape(len(products), -1, side, 1, g.shape[-1])
  small = _Small(jnp.swapaxes(products[:, :-2], 0, 1))
  upto, after = (products[:, n].reshape(g.shape) for n in (-2, -1))
  halves = []
  while side << len(halves) < len(g):
    h = side << len(halves)
    halves.append((upto, after))
    u, a = (x.reshape(-1, 2, h, x.shape[-1]) for x in (upto, after))
    first, second = (
      u[:, :1, -1:],
      u[:, 1:, -1:],
    )  # the products over the whole earlier and the whole later half
    one = jnp.ones((), g.dtype)
    upto, after = (
      (u * _chosen(one, first, axis=1)).reshape(g.shape),
      (a * _chosen(second, one, axis=1)).reshape(g.shape),
    )
  return upto, after, small, tuple(halves)


def gate_pullback(
  g,
  ahead: Float[Array, "C K"],
  behind: Float[Array, "C K"],
  after: Float[Array, "C K"],
  total: Float[Array, "K"],
):
  """The cotangent of g, from (cotangent times value) of everything that decays: token l's gate is in every interval that
  begins before l and ends at or after it.

  Args:
    g: the log gates, [C] or [C K].
    ahead: summed over the pairs (i, j < i) and from_start(i), by the later token i.
    behind: the same pairs, by the earlier token j.
    after: to_end(j), by j.
    total: the whole chunk.
  """
  pairs, C = jnp.stack([ahead - behind, after]), len(g)
  if g.ndim == 1:
    pairs, total = row_sums(pairs), row_sums(total[None])[0]
  later, earlier = np.triu(np.ones((C, C), g.dtype)), np.tri(C, k=-1, dtype=g.dtype)
  mask = vary_like(jnp.asarray(np.concatenate([later, earlier], axis=1)), pairs)
  dg = jnp.matmul(mask, pairs.reshape(2 * C, -1), precision=lax.Precision.HIGHEST)
  dg = dg.reshape(g.shape) + total
  # Behind a token that forgets all, terms of later tokens cancel to nothing, up to their rounding; a caller's d(-exp x) would
  # multiply that by g.
  return jnp.where(jnp.exp(g) > 0, dg, 0)
