"""Accumulation dtype, products, decays over intervals, and the triangular inverse: what every rule computes with.

Everything here works on the arrays of ONE chunk of one head; drivers add the batch axes with `jax.vmap`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

SUB = 16  # side of the blocks of the triangular inverse
NEGLIGIBLE = -1e30  # a log decay below which exp is 0 in every dtype, and whose sums stay finite


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


def alike(x: Array, *others) -> Array:
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


def diagonal(x: Array, size: int) -> Float[Array, "K K"]:
  """Diag(x), of [K] numbers, or of one for all."""
  return jnp.where(np.eye(size, dtype=bool), x, jnp.zeros((), x.dtype))


# --- decays ----------------------------------------------------------------------------------------------------------
#
# With alpha_t = exp(g_t), a chunk needs four products of intervals of alpha:
#     between(i, j) = prod_{j < l <= i} alpha_l      from the write of token j to the read of token i
#     head(i)       = prod_{l <= i} alpha_l          from the chunk's incoming state to token i
#     tail(j)       = prod_{l > j} alpha_l           from token j to the chunk's outgoing state
#     total         = prod_l alpha_l
# and, for what reads the state before the token's own decay, before(i) = head(i - 1) and between(i - 1, j).
# None is formed as a quotient, or as exp of a difference of sums: after one strong decay such a difference has lost its
# digits. A change of segment inside an interval makes it zero; that is a mask, never a term of a sum.
#
# Per channel, between(i, j) would be C C K numbers. Instead, an aligned block of 2h tokens is two halves: for i in the later
# and j in the earlier one, between(i, j) = (product from the later half's start to i) (product after j to the earlier half's
# end). So each size h = 1, 2, 4, .. C/2 gives the scores of its pairs of halves as one product of matrices, both factors of
# which decay; and the products over halves of size 2h follow from those of size h by one multiplication.


class Masks(NamedTuple):
  """Which intervals of a chunk lie inside one segment."""

  between: Bool[Array, "C C"]
  head: Bool[Array, "C"]
  tail: Bool[Array, "C"]
  total: Bool[Array, ""]


def segment_masks(runs: Int[Array, "C"], run_before: Int[Array, ""]) -> Masks:
  """The masks of a chunk, from the segment of each token and of the token before the chunk."""
  return Masks(runs[:, None] == runs[None, :], runs == run_before, runs == runs[-1], runs[-1] == run_before)


class Decay(NamedTuple):
  """Products of decays over the intervals of one chunk, and what is computed with them.

  `head`, `tail`, `before` and `total` are [C 1] and [1] for one decay a head, [C K] and [K] for one a channel.
  """

  between: Float[Array, "C C"]  # one decay a head: the decays themselves; one a channel: 1 inside a segment, else 0
  head: Float[Array, "C K"]
  tail: Float[Array, "C K"]
  total: Float[Array, "K"]
  before: Float[Array, "C K"]
  same: Bool[Array, "C C"] | None  # inside a segment; None without segments
  halves: (
    tuple  # one a channel: for h = 1, 2, 4 .. the products (from its half's start to i, after j to its half's end)
  )

  def scores(
    self, readers: Float[Array, "C R K"], writers: Float[Array, "C W K"], precision, *, careful: bool = False
  ) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i, j)_c writers_jwc for j <= i, else 0. `careful`: to be inverted."""
    product = functools.partial(_careful_matmul if careful else jnp.matmul, precision=precision)
    (C, R, K), W = readers.shape, writers.shape[1]
    if not self.halves:
      found = product(readers.reshape(-1, K), writers.reshape(-1, K).T).reshape(C, R, C, W)
      return jnp.where(_lower(C, 0), found * self.between[:, None, :, None], 0)
    # Of halves smaller than 8, which are too small for products of their own, masked products of 16 tokens.
    small = self._small(R, W)
    found = product(small.readers(readers), jnp.swapaxes(small.writers(writers), -1, -2))
    squares = jnp.where(small.keep, found, 0).sum(0).reshape(-1, small.side, R, small.side, W)
    own = (readers[:, :, None] * writers[:, None]).sum(-1).reshape(-1, small.side, R, 1, W)
    blocks = jnp.where(np.eye(small.side, dtype=bool)[:, None, :, None], own, squares)  # [C/h h R h W]
    for n, (upto, after) in list(enumerate(self.halves))[small.levels :]:
      h = 2**n
      later, earlier = _half(readers, n, 1) * _half(upto, n, 1), _half(writers, n, 0) * _half(after, n, 0)
      corner = product(later.reshape(-1, h * R, K), jnp.swapaxes(earlier.reshape(-1, h * W, K), -1, -2))
      corner, pair = corner.reshape(-1, h, R, h, W), blocks.reshape(-1, 2, h, R, h, W)
      top = jnp.concatenate([pair[:, 0], jnp.zeros_like(corner)], axis=3)
      blocks = jnp.concatenate([top, jnp.concatenate([corner, pair[:, 1]], axis=3)], axis=1)
    return blocks[0] * self.between[:, None, :, None]

  def scores_pullback(self, d: Float[Array, "C R C W"], readers, writers, precision):
    """Cotangents of readers and writers from that of `scores` below the diagonal (what `d` holds elsewhere is not read)."""
    (C, R, K), W = readers.shape, writers.shape[1]
    product = functools.partial(jnp.matmul, precision=precision)
    d = jnp.where(_lower(C, -1), d * self.between[:, None, :, None], 0)
    if not self.halves:
      d = d.reshape(C * R, C * W)
      found = product(d, writers.reshape(-1, K)), product(transposed(d), readers.reshape(-1, K))
      return found[0].reshape(readers.shape), found[1].reshape(writers.shape)
    dreaders, dwriters, blocks, small = jnp.zeros_like(readers), jnp.zeros_like(writers), d[None], self._small(R, W)
    for n, (upto, after) in reversed(list(enumerate(self.halves))[small.levels :]):
      h = 2**n
      pair = blocks.reshape(-1, 2, h, R, 2, h, W)
      corner = pair[:, 1, :, :, 0].reshape(-1, h * R, h * W)
      blocks = jnp.stack([pair[:, 0, :, :, 0], pair[:, 1, :, :, 1]], axis=1).reshape(-1, h, R, h, W)
      upto, after = _half(upto, n, 1), _half(after, n, 0)
      later, earlier = _half(readers, n, 1) * upto, _half(writers, n, 0) * after
      dlater = product(corner, earlier.reshape(-1, h * W, K)).reshape(later.shape) * upto
      dearlier = product(jnp.swapaxes(corner, -1, -2), later.reshape(-1, h * R, K)).reshape(earlier.shape) * after
      dreaders, dwriters = dreaders + _unhalf(dlater, 1), dwriters + _unhalf(dearlier, 0)
    squares = blocks.reshape(-1, small.side * R, small.side * W)
    dlater = product(jnp.where(small.keep, squares, 0), small.writers(writers))
    keep, squares = np.swapaxes(small.keep, -1, -2), transposed(squares)
    dearlier = product(jnp.where(keep, squares, 0), small.readers(readers))
    dreaders += small.of_readers(dlater, readers.shape)
    dwriters += small.of_writers(dearlier, writers.shape)
    return lax.optimization_barrier((dreaders, dwriters))

  def _small(self, R: int, W: int) -> "_Small":
    side = min(SUB, len(self.head))
    levels = side.bit_length() - 1
    cut = lambda n, which: self.halves[n][which].reshape(-1, side, 1, self.head.shape[-1])
    here = np.arange(levels).reshape(-1, 1, 1, 1, 1)  # by choice, not by stacking: LLVM takes long over a concatenation
    choose = lambda which: functools.reduce(
      lambda found, n: jnp.where(here == n, cut(n, which), found), range(1, levels), cut(0, which)[None]
    )
    return _Small(side, levels, choose(0), choose(1), _pairs_of_halves(levels, R, W)[:, None])

  def scores_before(self, readers, writers, precision, *, careful: bool = False) -> Float[Array, "C R C W"]:
    """sum_c readers_irc between(i - 1, j)_c writers_jwc for j < i, else 0: reading before their own token's decay."""
    return self.inside(preceding(self.scores(following(readers), writers, precision, careful=careful)))

  def scores_before_pullback(self, d: Float[Array, "C R C W"], readers, writers, precision):
    """Cotangents from that of `scores_before` where j < i - 1; between neighbours stands no decay."""
    dreaders, dwriters = self.scores_pullback(following(self.inside(d)), following(readers), writers, precision)
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
  """The halves of 1, 2, 4 .. tokens of blocks of `side` tokens: [levels M side ..], M = C / side."""

  side: int
  levels: int
  upto: Float[Array, "levels M side 1 K"]
  after: Float[Array, "levels M side 1 K"]
  keep: Bool[np.ndarray, "levels 1 sideR sideW"]

  def readers(self, x: Float[Array, "C R K"]) -> Float[Array, "levels M sideR K"]:
    return self._flat(self._cut(x) * self.upto)

  def writers(self, x: Float[Array, "C W K"]) -> Float[Array, "levels M sideW K"]:
    return self._flat(self._cut(x) * self.after)

  def of_readers(self, d: Float[Array, "levels M sideR K"], shape) -> Float[Array, "C R K"]:
    """The transpose of `readers`."""
    return (d.reshape(self.levels, -1, self.side, *shape[1:]) * self.upto).sum(0).reshape(shape)

  def of_writers(self, d: Float[Array, "levels M sideW K"], shape) -> Float[Array, "C W K"]:
    return (d.reshape(self.levels, -1, self.side, *shape[1:]) * self.after).sum(0).reshape(shape)

  def _cut(self, x: Array) -> Array:
    return x.reshape(-1, self.side, *x.shape[1:])

  def _flat(self, x: Array) -> Array:
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


# Masks are made here, not by operations of the program, which would have to be compiled.


def _lower(C: int, k: int) -> Bool[np.ndarray, "C 1 C 1"]:
  return np.tri(C, k=k, dtype=bool)[:, None, :, None]


def _pairs_of_halves(levels: int, R: int, W: int) -> Bool[np.ndarray, "levels LR LW"]:
  """Of L = 2^levels tokens, the pairs (i in the later half, j in the earlier one) of aligned blocks of 2, 4, .. L."""
  i, h = np.arange(2**levels), 2 ** np.arange(levels)[:, None, None]
  row, column = np.repeat(i, R)[:, None], np.repeat(i, W)[None, :]
  return (row // h == column // h + 1) & (row // (2 * h) == column // (2 * h))


def following(x: Array) -> Array:
  """Row i is that of token i + 1; behind the last one, zeros."""
  return jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


def preceding(x: Array) -> Array:
  """Row i is that of token i - 1; before the first one, zeros."""
  return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def _careful_matmul(a: Array, b: Array, precision) -> Array:
  """a b, summed over four parts of an inner axis of 64, then over the parts; over fewer where it is short.

  What is inverted below needs it: where keys repeat and beta is 2, the error of one k . k enters every token alike, and T of
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


def _half(x: Array, n: int, which: int) -> Float[Array, "M h R K"]:
  """Of each aligned pair of halves of h = 2^n tokens, the earlier (0) or later (1), of [C K] (R = 1) or [C R K]."""
  return x.reshape(-1, 2, 2**n, x.shape[1] if x.ndim == 3 else 1, x.shape[-1])[:, which]


def _unhalf(x: Float[Array, "M h R K"], which: int) -> Float[Array, "C R K"]:
  """The transpose of `_half`: zeros in the other halves."""
  pair = [x, jnp.zeros_like(x)] if which == 0 else [jnp.zeros_like(x), x]
  return jnp.stack(pair, axis=1).reshape(-1, *x.shape[2:])


def decay(g: Array | None, length: int, dtype, masks: Masks | None) -> Decay:
  """The decays of a chunk of `length` tokens (a power of two) from its log gates: None, [C], or [C K]."""
  halves = ()
  if g is None:
    between, head = jnp.ones((length, length), dtype), jnp.ones((length, 1), dtype)
    tail = head
  elif g.ndim == 1:
    between, head, tail = _decay_per_head(g)
  else:
    head, tail, halves = _decay_per_channel(g)
    between = jnp.ones((length, length), dtype)
  before = jnp.concatenate([jnp.ones_like(head[:1]), head[:-1]])
  if masks is None:
    return Decay(between, head, tail, head[-1], before, None, halves)
  keep = lambda mask, x: jnp.where(mask, x, 0)
  return Decay(
    keep(masks.between, between), keep(masks.head[:, None], head), keep(masks.tail[:, None], tail),
    keep(masks.total, head[-1]), keep(masks.head[:, None], before), masks.between, halves,
  )  # fmt: skip


def _decay_per_head(g: Float[Array, "C"]) -> tuple[Array, Array, Array]:
  """between(i, j) = exp(sum of g over j < l <= i), each sum formed as a sum of its own interval; head; tail."""
  lower = np.tri(len(g), dtype=g.dtype)
  terms = jnp.where(np.tri(len(g), k=-1, dtype=bool), g[:, None], 0)
  between = jnp.where(lower > 0, jnp.exp(_sums(lower, terms)), 0)
  head = jnp.exp(_sums(lower, g[:, None]))
  return between, head, between[-1][:, None]


def _sums(lower, x):
  """Cumulative sums down the columns, as one product; -inf is kept out of it (0 times -inf is NaN)."""
  return jnp.matmul(alike(lower, x), jnp.maximum(x, NEGLIGIBLE), precision=lax.Precision.HIGHEST)


def _decay_per_channel(g: Float[Array, "C K"]) -> tuple[Array, Array, tuple]:
  """head, tail, and the products over the halves of every size."""
  upto, after = jnp.exp(g), jnp.ones_like(g)
  halves = []
  while 2 ** len(halves) < len(g):
    halves.append((upto, after))
    u, a = (x.reshape(-1, 2, 2 ** (len(halves) - 1), x.shape[-1]) for x in (upto, after))
    first, second = u[:, :1, -1:], u[:, 1:, -1:]  # the products over the whole earlier and the whole later half
    upto = jnp.concatenate([u[:, :1], u[:, 1:] * first], axis=1).reshape(g.shape)
    after = jnp.concatenate([a[:, :1] * second, a[:, 1:]], axis=1).reshape(g.shape)
  return upto, after, tuple(halves)


def gate_pullback(
  g, ahead: Float[Array, "C K"], behind: Float[Array, "C K"], after: Float[Array, "C K"], total: Float[Array, "K"]
):
  """The cotangent of g, from (cotangent times value) of everything that decays: token l's gate is in every interval that
  begins before l and ends at or after it.

  Args:
    g: the log gates, [C] or [C K].
    ahead: summed over the pairs (i, j < i) and head(i), by the later token i.
    behind: the same pairs, by the earlier token j.
    after: tail(j), by j.
    total: the whole chunk.
  """
  pairs, C = jnp.stack([ahead - behind, after]), len(g)
  if g.ndim == 1:
    pairs, total = pairs.sum(-1, keepdims=True), total.sum()
  later, earlier = np.triu(np.ones((C, C), g.dtype)), np.tri(C, k=-1, dtype=g.dtype)
  mask = alike(jnp.asarray(np.concatenate([later, earlier], axis=1)), pairs)
  dg = jnp.matmul(mask, pairs.reshape(2 * C, -1), precision=lax.Precision.HIGHEST)
  dg = dg.reshape(g.shape) + total
  # Behind a token that forgets all, terms of later tokens cancel to nothing, up to their rounding; a caller's d(-exp x) would
  # multiply that by g.
  return jnp.where(jnp.exp(g) > 0, dg, 0)


# --- the triangular inverse ------------------------------------------------------------------------------------------


def unit_lower_inverse(n: Float[Array, "C C"], precision=lax.Precision.HIGHEST) -> Float[Array, "C C"]:
  """(I + n)^-1 for a strictly lower triangular n; C is a power of two.

  Blocks of 16 by forward substitution, column by column; then the inverse over blocks of 2h from those of h:
  [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]. (The product of I + n^(2^i) is shorter, and cancels
  catastrophically where keys repeat.)
  """
  C = len(n)
  size = min(SUB, C)
  blocks = _diagonal_blocks(n, size)

  def eliminate(c, x):
    column = lax.dynamic_slice_in_dim(blocks, c, 1, axis=2)  # zero at and above the diagonal
    return x - column * lax.dynamic_slice_in_dim(x, c, 1, axis=1)

  eye = jnp.broadcast_to(jnp.asarray(np.eye(size, dtype=n.dtype)), blocks.shape)
  x = lax.fori_loop(0, size - 1, eliminate, alike(eye, n))
  while size < C:
    pair = x.reshape(-1, 2, size, size)
    corner = _diagonal_blocks(n, 2 * size)[:, size:, :size]
    corner = -jnp.matmul(pair[:, 1], jnp.matmul(corner, pair[:, 0], precision=precision), precision=precision)
    top = jnp.concatenate([pair[:, 0], jnp.zeros_like(corner)], axis=-1)
    x = jnp.concatenate([top, jnp.concatenate([corner, pair[:, 1]], axis=-1)], axis=-2)
    size *= 2
  return x[0]


def _diagonal_blocks(x: Float[Array, "C C"], size: int) -> Float[Array, "N S S"]:
  return jnp.stack([x[n : n + size, n : n + size] for n in range(0, len(x), size)])
