"""Softmax attention, exactly and with memory linear in the number of tokens.

The softmax over a set of keys is held as a `Partial`: running maximum m, denominator l, numerator
a. Partials of two disjoint sets of keys merge associatively, so the keys may be read in blocks, in
any grouping (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3;
FlashAttention: Dao et al. 2022, arXiv:2205.14135, algorithm 1).

A number that is not finite stays where it is read. `p @ v` and the products of the backward pass
multiply every pair of tokens, and 0 times NaN is NaN. So rows of q, k, v that are not finite
become zeros first, and a query that reads one of them gives NaN in the end. Rows of the output's
cotangent that are not finite become zeros too, and NaN in dq of their query.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax import _shapes
from lajax._meshes import laid_out
from lajax._numerics import NEGLIGIBLE, accumulation_dtype, product_precision, promoted, vary_like
from lajax.recurrence.transforms import linear_map

BLOCK = 256  # queries and keys in a block

Mask = Callable[["Placement", "Placement"], Bool[Array, "B T S"]]


class Placement(NamedTuple):
  """Position of each token in its document, and the document (id < 0: padding)."""

  position: Int[Array, "B T"]
  document: Int[Array, "B T"]


class Queries(NamedTuple):
  """Scaled queries by key head, G of them per key head."""

  q: Float[Array, "B T HK G K"]
  finite: Bool[Array, "B T HK G"]  # whether q was finite; q is zero where it was not
  place: Placement


class Keys(NamedTuple):
  """Keys and values."""

  k: Float[Array, "B S HK K"]
  v: Float[Array, "B S HK V"]
  place: Placement


class Partial(NamedTuple):
  """Softmax over some of the keys: o = a / l, with every exponent taken relative to m."""

  m: Float[Array, "..."]
  l: Float[Array, "..."]
  a: Float[Array, "... V"]
  finite: Bool[Array, "..."]  # False once something that was read is not finite: o is NaN


def partial_softmax(
  scores: Float[Array, "... S"],
  values: Float[Array, "... S V"],
  mask: Any = True,
  finite: Any = True,
  precision: lax.PrecisionLike = None,
) -> Partial:
  """Softmax over the keys that `mask` [... S] allows, before the division."""
  m, p = softmax_weights(scores, mask)
  a = jnp.matmul(p, values, precision=precision)
  return Partial(m, p.sum(-1), a, jnp.broadcast_to(finite, m.shape))


def softmax_weights(scores: Float[Array, "... S"], mask: Any) -> tuple[Array, Array]:
  """Returns the maximum m of the scores that `mask` [... S] allows, and exp(scores - m) there."""
  m = lax.stop_gradient(jnp.max(jnp.where(mask, scores, NEGLIGIBLE), axis=-1))
  m = jnp.maximum(m, NEGLIGIBLE)  # finite: a difference of maxima over no keys is 0, never NaN
  return m, jnp.where(mask, jnp.exp(jnp.where(mask, scores - m[..., None], 0.0)), 0.0)


def merge(first: Partial, second: Partial) -> Partial:
  """Softmax over both sets of keys."""
  m = jnp.maximum(first.m, second.m)
  x, y = jnp.exp(first.m - m), jnp.exp(second.m - m)
  l = x * first.l + y * second.l
  a = x[..., None] * first.a + y[..., None] * second.a
  return Partial(m, l, a, first.finite & second.finite)


def finish(total: Partial) -> Float[Array, "... V"]:
  """Returns a / l: 0 without any key, NaN where something that was read is not finite."""
  some = total.l != 0
  o = jnp.where(some[..., None], total.a / jnp.where(some, total.l, 1.0)[..., None], 0.0)
  return jnp.where(total.finite[..., None], o, jnp.nan)


def visible(
  queries: Placement, keys: Placement, causal: bool, window: int | None
) -> Bool[Array, "B T S"]:
  """Tells if query t reads key s."""
  distance = queries.position[:, :, None] - keys.position[:, None, :]
  document = keys.document[:, None, :]
  mask = (queries.document[:, :, None] == document) & (document >= 0)
  if causal:
    mask &= distance >= 0
  if window is not None:
    mask &= (distance < window) if causal else (abs(distance) < window)
  return mask


def finite_rows(x: Float[Array, "*M K"]) -> tuple[Float[Array, "*M K"], Bool[Array, "*M"]]:
  """Returns x with zeros in the rows that are not finite, and which rows are finite."""
  finite = jnp.isfinite(x).all(-1)
  return jnp.where(finite[..., None], x, jnp.zeros((), x.dtype)), finite


def reads_finite(
  mask: Bool[Array, "B T S"], queries: Bool[Array, "B T HK G"], keys: Bool[Array, "B S HK"]
) -> Bool[Array, "B HK G T"]:
  """Tells if a query is finite and reads finite keys only; True for a query that reads none."""
  some = lambda x: x.astype(jnp.float32)
  broken = jnp.einsum("bts,bsh->bht", some(mask), some(~keys)) > 0  # a count: a product is fastest
  own = jnp.moveaxis(queries, 1, -1) | ~mask.any(-1)[:, None, None, :]
  return own & ~broken[:, :, None, :]


def isolate_cotangent(o: Float[Array, "B T H V"], q: Float[Array, "B T H K"]):
  """Returns o. Its cotangent passes, but for rows that are not finite: they become NaN in dq."""

  def pull(_, do):
    do, finite = finite_rows(do)
    dq = jnp.where(finite, 0.0, jnp.nan).astype(q.dtype)
    return do, jnp.broadcast_to(dq[..., None], q.shape)

  return linear_map(lambda _, tangents: tangents[0], pull, (), (o, vary_like(q, o)), o)


# --- the public function ---


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
  scale: float | Float[Array, ""] | None = None,
  impl: str = "chunked",
) -> Float[Array, "B T H V"]:
  """Softmax attention of T queries over S keys at any positions, as a key-value cache needs it.

      o_i = sum_j p_ij v_j ,   p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')) ,
      s_ij = scale q_i . k_j + sum of log_forget_l over j < l <= i

  over the keys j that query i reads: k_segments[j] >= 0, k_segments[j] = q_segments[i],
  k_positions[j] <= q_positions[i] if causal, and q_positions[i] - k_positions[j] < window (its
  absolute value, if not causal). A query that reads no key gives 0. A query that reads a key, a
  value or a gate that is not finite gives NaN, and no other query does.

  Args:
    q: [B T H K].
    k, v: [B S HK K], [B S HK V], where HK divides H; head h of q reads head h // (H / HK).
    q_positions, k_positions: [B T], [B S], positions inside the documents.
    q_segments, k_segments: [B T], [B S], documents by id; a key of id < 0 is read by no query.
    causal: whether a query reads keys at its own position and before it only.
    window: how many positions a query reads, its own included; None for all.
    sink: [H], one logit per head that takes part in the denominator alone; None for none.
    log_forget: [B T H], log forget gates (natural), <= 0. Needs `causal`, and S = T with query
      and key t at the same token. None for none.
    scale: factor of the scores; None for K^-1/2.
    impl: "recurrent": one query after the other. "associative": softmax over blocks of keys,
      merged as a tree. "chunked": softmax over blocks of keys, one block after the other.

  Returns:
    o [B T H V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.

  Paper: T. Dao et al., "FlashAttention", 2022, arXiv:2205.14135, algorithm 1.
  """
  placed = {
    "q_positions": (q_positions, "B T", "int"),
    "k_positions": (k_positions, "B S", "int"),
    "q_segments": (q_segments, "B T", "int"),
    "k_segments": (k_segments, "B S", "int"),
  }
  arrays = {"q": (q, "B T H K"), "k": (k, "B S HK K"), "v": (v, "B S HK V"), **placed}
  _shapes.check_given(**arrays)
  sizes = _shapes.check(**arrays, sink=(sink, "H"), log_forget=(log_forget, "B T H"))
  _shapes.check_multiple("HK", "H", sizes, ("`k` and `v`", "`q`"))
  _shapes.check_option("impl", impl, tuple(IMPLEMENTATIONS))
  for name, (x, *_) in placed.items():
    _check_signed(name, x)
  causal, window = check_reach(causal, window, log_forget)
  if log_forget is not None and sizes.T != sizes.S:
    raise ValueError(
      f"`log_forget` needs as many keys as queries; got T = {sizes.T} queries and"
      f" S = {sizes.S} keys. Put queries in front that read nothing (q_segments of -1)."
    )
  check_lengths(sizes, "T", "S")
  factor = _shapes.scale_of(scale, sizes)
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
  places = (q_positions, k_positions, q_segments, k_segments)
  options = Options(causal, window, impl)
  return _attend(q, k, v, sink, log_forget, *places, factor, options)


def check_reach(causal, window, log_forget) -> tuple[bool, int | None]:
  """Returns `causal` and `window` as Python values; ValueError where they are wrong."""
  causal, window = _shapes.check_flag("causal", causal), _shapes.check_positive("window", window)
  if log_forget is not None and not causal:
    raise ValueError(
      "`log_forget` needs causal=True, since gates lie between a token and earlier ones;"
      " got causal=False. Leave one of them out."
    )
  return causal, window


def check_lengths(sizes, *letters: str) -> None:
  """NotImplementedError for a size that is a symbol of `jax.export`."""
  for letter in letters:
    if jax.export.is_symbolic_dim(sizes[letter]):
      raise NotImplementedError(
        f"attention needs a known size of axis {letter}; got the symbol {sizes[letter]}. Export one"
        " function per length; the batch may be a symbol."
      )


def _check_signed(name: str, x) -> None:
  """ValueError for positions or ids that would change when they become signed JAX integers."""
  if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
    raise ValueError(
      f"`{name}` must be signed integers; got {x.dtype}. Cast them: {name}.astype(jnp.int32)."
    )
  kept = jax.dtypes.canonicalize_dtype(x.dtype)
  if isinstance(x, np.ndarray) and kept != x.dtype and (x != x.astype(kept)).any():
    raise ValueError(
      f"`{name}` must fit into {kept}; got {x.dtype} up to {x.max()}. Number them from 0, or turn"
      " on jax_enable_x64."
    )


class Options(NamedTuple):
  """Holds the static settings of a call: each new one costs a compilation."""

  causal: bool
  window: int | None
  impl: str


@functools.partial(jax.jit, static_argnums=10)
@laid_out(
  "B T H V",
  q="B T H K",
  k="B S HK K",
  v="B S HK V",
  sink="H",
  log_forget="B T H",
  q_positions="B T",
  k_positions="B S",
  q_segments="B T",
  k_segments="B S",
  scale="",
)
def _attend(
  q,
  k,
  v,
  sink,
  log_forget,
  q_positions,
  k_positions,
  q_segments,
  k_segments,
  scale,
  options: Options,
):
  """All array work of a call: an eager call compiles once per shape."""
  dtype, precision = accumulation_dtype(q, k, v, sink, log_forget), product_precision(q, k, v)
  (B, T, H, _), HK, V = q.shape, k.shape[2], v.shape[-1]
  by_key_head = lambda x: x.reshape(*x.shape[:2], HK, H // HK, *x.shape[3:])
  queries, keys = in_one_dtype(
    Placement(q_positions, q_segments), Placement(k_positions, k_segments)
  )
  unscaled = q
  q, finite = finite_rows(by_key_head(q.astype(dtype) * jnp.asarray(scale, dtype)))
  o = IMPLEMENTATIONS[options.impl](
    Queries(q, finite, queries),
    Keys(k.astype(dtype), v.astype(dtype), keys),
    None if log_forget is None else by_key_head(log_forget.astype(dtype)),
    functools.partial(visible, causal=options.causal, window=options.window),
    before_any_key(sink, HK, H // HK, V, dtype),
    precision,
  )
  return isolate_cotangent(o.reshape(B, T, H, V).astype(v.dtype), unscaled)


def in_one_dtype(queries: Placement, keys: Placement) -> tuple[Placement, Placement]:
  """Both in one dtype, of 32 bits at least: differences of positions must not overflow."""

  def widest(x, y):
    dtype = promoted(x.dtype, y.dtype, jnp.int32)
    return x.astype(dtype), y.astype(dtype)

  pairs = [widest(x, y) for x, y in zip(queries, keys, strict=True)]
  return Placement(*(x for x, _ in pairs)), Placement(*(y for _, y in pairs))


def before_any_key(sink, HK: int, G: int, V: int, dtype) -> Partial:
  """Partial [HK G] before any key: of nothing, or of the sink."""
  if sink is None:
    m = jnp.full((HK, G), NEGLIGIBLE, dtype)
    l = jnp.zeros_like(m)
  else:
    logit = sink.astype(dtype).reshape(HK, G)
    m = lax.stop_gradient(logit)
    l = jnp.exp(logit - m)
  return Partial(m, l, jnp.zeros((HK, G, V), dtype), jnp.ones((HK, G), bool))


def over_queries(start: Partial, B: int, T: int) -> Partial:
  """[HK G ..] -> [B HK G T ..]."""
  spread = lambda x: jnp.broadcast_to(x[None, :, :, None], (B, *x.shape[:2], T, *x.shape[2:]))
  return Partial(*map(spread, start))


def _block(
  queries: Queries, keys: Keys, bias: Float[Array, "B HK G T S"] | None, mask, precision
) -> Partial:
  """Partials [B HK G T ..] of a block of queries over a block of keys; `mask` is [B T S]."""
  # Here and not for all keys at once: a cache is mostly empty, and its empty blocks are not read.
  (k, k_finite), (v, v_finite) = finite_rows(keys.k), finite_rows(keys.v)
  scores = jnp.einsum("bthgk,bshk->bhgts", queries.q, k, precision=precision)
  finite = reads_finite(mask, queries.finite, k_finite & v_finite)
  mask = mask[:, None, None]
  if bias is not None:
    known = bias < jnp.inf  # -inf is a gate that forgets everything
    finite &= ~(mask & ~known).any(-1)
    scores = scores + jnp.where(known, bias, 0.0)
  values = jnp.moveaxis(v, 1, 2)[:, :, None]  # [B HK 1 S V]
  return partial_softmax(scores, values, mask, finite, precision)


# --- the implementations ---


def _recurrent(queries: Queries, keys: Keys, gates, mask: Mask, start: Partial, precision):
  """Reads all keys for one query after the other. Needs memory S per query in the making."""
  B, T = queries.q.shape[:2]
  begin = over_queries(start, B, 1)
  index = jnp.arange(keys.k.shape[1])

  def one(i):
    query = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1, axis=1), queries)
    bias = None
    if gates is not None:  # sum of the gates l with j < l <= i
      upto = jnp.where((index > i)[None, :, None, None], 0.0, gates)
      bias = jnp.moveaxis(_sum_after(upto, axis=1), 1, -1)[..., None, :]
    seen = mask(query.place, keys.place)
    return finish(merge(begin, _block(query, keys, bias, seen, precision)))

  o = lax.map(jax.checkpoint(one), jnp.arange(T))  # [T B HK G 1 V]
  return jnp.moveaxis(o[..., 0, :], 0, 1)


def _sum_after(x: Array, axis: int) -> Array:
  """Sum of the entries behind each one along an axis."""
  sums = lax.cumsum(x, axis=axis, reverse=True)
  later = lax.slice_in_dim(sums, 1, None, axis=axis)
  return jnp.concatenate([later, jnp.zeros_like(lax.slice_in_dim(x, 0, 1, axis=axis))], axis=axis)


def _blocks(x: Any, size: int) -> Any:
  """[B T ..] -> [N B size ..] for each array; what fills the last block is padding."""

  def cut(x, fill=0):
    pad = [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)

  place = lambda p: Placement(cut(p.position), cut(p.document, -1))
  is_place = lambda p: isinstance(p, Placement)
  return jax.tree.map(lambda x: place(x) if is_place(x) else cut(x), x, is_leaf=is_place)


class GateSums(NamedTuple):
  """Gates of each block, and their sums over intervals."""

  gates: Array  # [N B size HK G]
  from_start: Array  # from the block's start up to each token
  to_end: Array  # after each token to the block's end
  between: Array  # [N N B HK G]: over the blocks strictly between a query's and a key's


def _gate_sums(gates, size: int) -> GateSums:
  x = _blocks(gates, size)
  from_start = jnp.cumsum(x, axis=2)
  total, n = from_start[:, :, -1], np.arange(x.shape[0])
  inside = (n[:, None] > n[None, :]).reshape(len(n), len(n), *(1,) * (total.ndim - 1))
  sums = jnp.cumsum(jnp.where(inside, total[:, None], 0.0), axis=0)
  between = jnp.concatenate([jnp.zeros_like(sums[:1]), sums[:-1]], axis=0)
  return GateSums(x, from_start, _sum_after(x, axis=2), between)


def _bias(own: GateSums, to_end, between, same_block) -> Float[Array, "B HK G T S"]:
  """Sums of gates from each key of a block to each query of another, or of the same one."""
  last = lambda x: jnp.moveaxis(x, 1, -1)
  x = last(own.gates)
  n = np.arange(x.shape[-1])
  inside = jnp.cumsum(jnp.where(n[:, None] > n[None, :], x[..., :, None], 0.0), axis=-2)
  across = last(own.from_start)[..., :, None] + between[..., None, None]
  return jnp.where(same_block, inside, across + last(to_end)[..., None, :])


def _query_blocks(implementation):
  """Runs implementation(read, needed, key blocks, start) for one block of queries after another.

  `read(key block)` is the Partial of the query block over it, `needed(key block)` whether any
  query reads it. The backward pass computes each block of queries once more: nothing inside it is
  stored.
  """

  def run(queries: Queries, keys: Keys, gates, mask: Mask, start: Partial, precision):
    B, T = queries.q.shape[:2]
    size = min(BLOCK, T)
    key_size = size if gates is not None else min(BLOCK, keys.k.shape[1])
    key_blocks, query_blocks = _blocks(keys, key_size), _blocks(queries, size)
    sums = None if gates is None else _gate_sums(gates, size)
    begin = over_queries(start, B, size)
    begin = jax.tree.map(lambda x: vary_like(x, queries, keys, gates), begin)

    def one(block):
      n, queries, own = block

      def read(block):
        m, keys, to_end, between = block
        bias = None if own is None else _bias(own, to_end, between, n == m)
        return _block(queries, keys, bias, mask(queries.place, keys.place), precision)

      needed = lambda block: mask(queries.place, block[1].place).any()
      to_end, between = (None, None) if sums is None else (sums.to_end, own.between)
      blocks = (jnp.arange(key_blocks.k.shape[0]), key_blocks, to_end, between)
      o = finish(implementation(read, needed, blocks, begin))
      return jnp.moveaxis(o, 3, 1)  # [B size HK G V]

    N = query_blocks.q.shape[0]
    o = lax.map(jax.checkpoint(one), (jnp.arange(N), query_blocks, sums))
    return jnp.moveaxis(o, 0, 1).reshape(B, N * size, *o.shape[3:])[:, :T]

  return run


@_query_blocks
def _chunked(read, needed, blocks, begin):
  """Reads key blocks one after the other; a block that no query needs costs nothing."""

  @jax.checkpoint
  def body(total, block):
    return lax.cond(needed(block), lambda: merge(total, read(block)), lambda: total), None

  return lax.scan(body, begin, blocks)[0]


@_query_blocks
def _associative(read, needed, blocks, begin):
  """Reads all key blocks at once and merges them as a tree."""
  partials = lax.associative_scan(merge, jax.vmap(read)(blocks))
  return merge(begin, jax.tree.map(lambda x: x[-1], partials))


IMPLEMENTATIONS = {"recurrent": _recurrent, "associative": _associative, "chunked": _chunked}
