"""Softmax attention, exactly and with memory linear in the number of tokens.

The softmax over a set of keys is kept as a `Partial` (m, l, a): running maximum, denominator and numerator. Partials of two
disjoint sets of keys merge associatively, so the keys may be read in blocks, in any grouping (online softmax: Milakov and
Gimelshein 2018, arXiv:1805.02867, algorithm 3; FlashAttention: Dao et al. 2022, arXiv:2205.14135, algorithm 1).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lajax import _shapes
from lajax._numerics import accumulation_dtype, product_precision, vary_like

BLOCK = 256  # queries and keys in a block

LOWEST = -1e30  # the maximum over no keys: finite, so that differences of maxima are never NaN


class Partial(NamedTuple):
  """Softmax over some of the keys: o = a / l, with every exponent taken relative to m."""

  m: Float[Array, "..."]
  l: Float[Array, "..."]
  a: Float[Array, "... V"]


class Where(NamedTuple):
  """Where tokens stand: position inside the sequence, and document (id < 0: not there)."""

  position: Int[Array, "B T"]
  segment: Int[Array, "B T"]


def partial_softmax(
  scores: Float[Array, "... S"], values: Float[Array, "S V"], mask=True
) -> Partial:
  """The softmax of some scores over their values, unfinished."""
  return _partial(scores, mask, lambda p: p @ values)


def _partial(scores, mask, read) -> Partial:
  m = lax.stop_gradient(jnp.max(jnp.where(mask, scores, LOWEST), axis=-1))
  m = jnp.maximum(m, LOWEST)
  p = jnp.where(mask, jnp.exp(jnp.where(mask, scores - m[..., None], 0.0)), 0.0)
  return Partial(m, p.sum(-1), read(p))


def merge(first: Partial, second: Partial) -> Partial:
  """The softmax over both sets of keys."""
  m = jnp.maximum(first.m, second.m)
  x, y = jnp.exp(first.m - m), jnp.exp(second.m - m)
  return Partial(m, x * first.l + y * second.l, x[..., None] * first.a + y[..., None] * second.a)


def finish(total: Partial) -> Float[Array, "... V"]:
  """a / l, and 0 where there was no key at all."""
  some = total.l > 0
  return jnp.where(some[..., None], total.a / jnp.where(some, total.l, 1.0)[..., None], 0.0)


def visible(queries: Where, keys: Where, causal: bool, window: int | None):
  """[B T S]: which keys each query reads."""
  distance = queries.position[:, :, None] - keys.position[:, None, :]
  mask = (queries.segment[:, :, None] == keys.segment[:, None, :]) & (keys.segment[:, None, :] >= 0)
  if causal:
    mask &= distance >= 0
  if window is not None:
    mask &= (distance < window) if causal else (abs(distance) < window)
  return mask


def attend(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B S HK K"],
  v: Float[Array, "B S HK V"],
  *,
  q_positions: Int[Array, "B T"],
  k_positions: Int[Array, "B S"],
  q_segments: Int[Array, "B T"],
  k_segments: Int[Array, "B S"],
  causal: bool = True,
  window: int | None = None,
  sink: Float[Array, "H"] | None = None,
  log_forget: Float[Array, "B T H"] | None = None,
  scale: float | None = None,
  impl: str = "chunked",
) -> Float[Array, "B T H V"]:
  """Softmax attention of T queries over S keys that stand anywhere: what a key-value cache needs.

  Query i reads key j iff k_segments[j] >= 0, both segments are equal, k_positions[j] <= q_positions[i] (causal), and
  q_positions[i] - k_positions[j] < window. A query that reads no key gives 0. `sink` is one logit a head that takes part
  in the denominator only. `log_forget` (log gates <= 0, S = T) adds the sum of the gates after j up to i to the score.
  """
  dtype, precision = accumulation_dtype(q, k, v, sink, log_forget), product_precision(q, k, v)
  H, HK, K = q.shape[2], k.shape[2], q.shape[3]
  heads = lambda x: x.reshape(*x.shape[:2], HK, H // HK, *x.shape[3:])
  queries = heads(q.astype(dtype) * _shapes.scale_of(scale, {"K": K}))
  gates = None if log_forget is None else heads(log_forget.astype(dtype))
  start = _start(sink, q.shape, v.shape[-1], HK, dtype)
  form = {"chunked": _chunked, "recurrent": _recurrent, "associative": _associative}[impl]
  o = form(
    queries,
    k.astype(dtype),
    v.astype(dtype),
    gates,
    Where(q_positions, q_segments),
    Where(k_positions, k_segments),
    partial(visible, causal=causal, window=window),
    start,
    precision,
  )
  return o.reshape(*o.shape[:2], H, o.shape[-1]).astype(v.dtype)


def _start(sink, q_shape, V: int, HK: int, dtype) -> Partial:
  """The partial before any key: nothing, or the sink. [HK G], to be broadcast over batch and queries."""
  H = q_shape[2]
  m = (
    jnp.full((HK, H // HK), LOWEST, dtype)
    if sink is None
    else sink.astype(dtype).reshape(HK, H // HK)
  )
  top = lax.stop_gradient(m)
  l = jnp.zeros_like(m) if sink is None else jnp.exp(m - top)
  return Partial(top, l, jnp.zeros((*m.shape, V), dtype))


def _over_queries(start: Partial, B: int, T: int) -> Partial:
  """[HK G ..] -> [B HK G T ..]."""
  spread = lambda x: jnp.broadcast_to(x[None, :, :, None], (B, *x.shape[:2], T, *x.shape[2:]))
  return Partial(*map(spread, start))


def _block(q, k, v, bias, mask, precision) -> Partial:
  """Queries [B T HK G K] over keys [B S HK K], values [B S HK V]: partials [B HK G T ..]."""
  scores = jnp.einsum("bthgk,bshk->bhgts", q, k, precision=precision)
  if bias is not None:
    scores = scores + bias
  read = lambda p: jnp.einsum("bhgts,bshv->bhgtv", p, v, precision=precision)
  return _partial(scores, mask[:, None, None], read)


def _recurrent(q, k, v, gates, queries, keys, mask, start, precision):
  """One query after the other, over all keys. [The equation as printed; memory S for each.]"""
  B, T = q.shape[:2]
  begin = _over_queries(start, B, 1)
  index = jnp.arange(k.shape[1])

  def one(i):
    take = lambda x: lax.dynamic_slice_in_dim(x, i, 1, axis=1)
    bias = None
    if gates is not None:  # sum of the gates l with j < l <= i
      later = jnp.where((index > i)[None, :, None, None], 0.0, gates)
      after = lax.cumsum(later, axis=1, reverse=True) - 0.0
      after = jnp.concatenate([after[:, 1:], jnp.zeros_like(after[:, :1])], axis=1)
      bias = jnp.moveaxis(after, 1, -1)[..., None, :]
    seen = mask(Where(*map(take, queries)), keys)
    return finish(merge(begin, _block(take(q), k, v, bias, seen, precision)))

  o = lax.map(jax.checkpoint(one), jnp.arange(T))  # [T B HK G 1 V]
  return jnp.moveaxis(o[..., 0, :], 0, 1)


def _blocks(x, size: int, fill=0):
  """[B T ..] -> [N B size ..], padded with `fill`."""
  T = x.shape[1]
  pad = [(0, 0), (0, -T % size)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pad, constant_values=fill)
  return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


class _Gates(NamedTuple):
  """Sums of log gates over intervals: after each token to its block's end, up to each token from its block's start."""

  after: Array  # [N B size HK G]
  upto: Array
  between: Array  # [N N B HK G]: over the blocks strictly between a query's (first axis) and a key's (second axis)


def _gates(gates, size: int) -> _Gates | None:
  if gates is None:
    return None
  x = _blocks(gates, size)
  upto = jnp.cumsum(x, axis=2)
  after = lax.cumsum(x, axis=2, reverse=True)
  after = jnp.concatenate([after[:, :, 1:], jnp.zeros_like(after[:, :, :1])], axis=2)
  total, N = upto[:, :, -1], x.shape[0]
  n = jnp.arange(N)
  inside = (n[:, None] > n[None, :]).reshape(N, N, *(1,) * (total.ndim - 1))
  sums = jnp.cumsum(jnp.where(inside, total[:, None], 0.0), axis=0)
  return _Gates(after, upto, jnp.concatenate([jnp.zeros_like(sums[:1]), sums[:-1]], axis=0))


def _bias(upto, after, between, same_block, own):
  """[B HK G T S] from gates of a query block and a key block."""
  last = lambda x: jnp.moveaxis(x, 1, -1)
  apart = last(upto)[..., :, None] + between[..., None, None] + last(after)[..., None, :]
  return jnp.where(same_block, own, apart)


def _own_block(x):
  """Interval sums of gates inside one block: [B size HK G] -> [B HK G size size]."""
  x = jnp.moveaxis(x, 1, -1)
  n = jnp.arange(x.shape[-1])
  return jnp.cumsum(jnp.where(n[:, None] > n[None, :], x[..., :, None], 0.0), axis=-2)


def _query_blocks(form):
  """Runs form(query block, its number, its gates) over blocks of queries, keeping nothing inside for the backward pass."""

  def run(q, k, v, gates, queries, keys, mask, start, precision):
    B, T = q.shape[:2]
    size = min(BLOCK, T)
    key_size = size if gates is not None else min(BLOCK, k.shape[1])
    kv = (
      _blocks(k, key_size),
      _blocks(v, key_size),
      Where(_blocks(keys.position, key_size), _blocks(keys.segment, key_size, -1)),
    )
    sums = _gates(gates, size)
    own = None if gates is None else _blocks(gates, size)
    begin = jax.tree.map(lambda x: vary_like(x, q, kv), _over_queries(start, B, size))

    def one(block):
      q, where, n, upto, between, x = block

      def read(m, kv, after, row):
        k, v, at = kv
        bias = None if sums is None else _bias(upto, after, row, n == m, _own_block(x))
        return _block(q, k, v, bias, mask(where, at), precision)

      return jnp.moveaxis(
        finish(form(read, mask, where, kv, sums, between, begin)), 3, 1
      )  # [B size HK G V]

    N = -(-T // size)
    per_block = (None, None, None) if sums is None else (sums.upto, sums.between, own)
    where = Where(_blocks(queries.position, size), _blocks(queries.segment, size, -1))
    o = lax.map(jax.checkpoint(one), (_blocks(q, size), where, jnp.arange(N), *per_block))
    return jnp.moveaxis(o, 0, 1).reshape(B, N * size, *o.shape[3:])[:, :T]

  return run


@_query_blocks
def _chunked(read, mask, where, kv, sums, between, begin):
  """Key blocks one after the other; a block that no query of this block reads costs nothing."""

  @jax.checkpoint
  def body(total, block):
    m, kv, after, row = block
    needed = mask(where, kv[2]).any()
    return lax.cond(needed, lambda: merge(total, read(m, kv, after, row)), lambda: total), None

  M = kv[0].shape[0]
  after = None if sums is None else sums.after
  return lax.scan(body, begin, (jnp.arange(M), kv, after, between))[0]


@_query_blocks
def _associative(read, mask, where, kv, sums, between, begin):
  """All key blocks at once, merged as a tree."""
  M = kv[0].shape[0]
  after = None if sums is None else sums.after
  partials = jax.vmap(read)(jnp.arange(M), kv, after, between)
  total = jax.tree.map(lambda x: x[-1], lax.associative_scan(merge, partials))
  return merge(begin, total)
