"""The loop over chunks: matrix products inside each chunk, a scan over the chunks' summaries.

Layouts: `tokens` is the family's NamedTuple of arrays [B T H ..] (queries and keys) or [B T HV ..]
(all others), a field may be None; the state is [B HV K V]; outputs are [B T HV V]. Inside, the
HV = H G value heads are two axes, H and G.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lajax._numerics import vary_like
from lajax.recurrence.decays import segment_masks
from lajax.recurrence.documents import previous
from lajax.recurrence.heads import heads_of
from lajax.recurrence.rule import Affine, Rule, apply, apply_transposed
from lajax.recurrence.transforms import differentiable, join_batches

ROWS_AT_ONCE = (
  2048  # tokens times heads whose chunks are computed together: about what stays in a CPU's cache
)


def chunked(
  rule: Rule,
  tokens,
  state: Array,
  document: Array | None = None,
  *,
  scale: float | None = None,
  chunk_size: int = 64,
  precision=None,
):
  """Products inside chunks, a scan over the chunks' maps. The backward pass keeps the inputs and each chunk's first state.

  `scale` multiplies what tokens read: where reads are linear in the queries it is theirs, and costs no pass over memory.
  """
  B, T = jax.tree.leaves(tokens)[0].shape[:2]
  layout = chunk_layout(T, B * state.shape[1], chunk_size)
  missing = layout.C * layout.M * layout.blocks - T
  if missing:
    tokens = jax.tree.map(
      lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), tokens
    )
    document = None if document is None else jnp.pad(document, [(0, 0), (0, missing)], mode="edge")
  o, state = _swept(rule, layout, scale, precision)((tokens, state), document)
  return o[:, :T], state


@functools.lru_cache(maxsize=1024)
def _swept(rule: Rule, layout: "ChunkLayout", scale: float | None, precision) -> Callable:
  """(tokens, state), document -> o, state, differentiable. One function for each layout: JAX traces its forward pass once."""
  sweep = _Sweep(rule, layout, scale, precision)
  # A vmap of the caller's joins the batch, or the rows of what is residuals of chunks [blocks M R ..].
  residuals = Residuals(2, 2, 0)
  keeping = jax.jit(join_batches(sweep.forward_keeping, (0, 0), (0, residuals)))
  return differentiable(
    keeping, sweep.forward, join_batches(sweep.pullback, (0, 0, residuals, 0), 0)
  )


class Residuals(NamedTuple):
  """What the backward pass reads besides the inputs."""

  starts: Any  # the state at the start of every chunk
  output_map: Any = None  # what `Rule.output_map` keeps, of every chunk
  outputs: Any = None  # [B T HV V], if there is a `output_map`


class ChunkLayout(NamedTuple):
  """How tokens are cut: chunks of C tokens, M chunks at once in each of so many blocks."""

  C: int
  M: int
  blocks: int


def chunk_layout(T: int, rows: int, chunk_size: int) -> ChunkLayout:
  """`rows` is batch times heads. A chunk's length is a power of two, at least 16, and no longer than T needs."""
  C = max(16, min(_power_of_two(chunk_size), _power_of_two(T)))
  N = -(-T // C)
  blocks = -(-N // max(1, ROWS_AT_ONCE // (rows * C)))
  return ChunkLayout(C, -(-N // blocks), blocks)


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


class _Sweep(NamedTuple):
  """One pass over the chunks, in either direction. A block of chunks is laid out [M R (G) C ..], with Z = M R as one axis."""

  rule: Rule
  layout: ChunkLayout
  scale: float | None
  precision: Any

  def forward(self, inputs, document):
    return self.forward_keeping(inputs, document)[0]

  def forward_keeping(self, inputs, document):
    """Outputs and final state, and what is residuals."""
    tokens, state = inputs
    heads = heads_of(tokens, state)
    summary = heads.over(
      lambda r, x: self.rule.chunk(x, self._masks(r), self.precision), heads.axes(tokens)
    )

    def block(state, n, _):
      chunk = summary(self._runs(heads, document, n), self._load(heads, tokens, n))
      body = lambda s, affine: (heads.nest(apply)(affine, s), s)
      state, starts = lax.scan(body, state, self._by_chunk(Affine(chunk.A, chunk.B)))
      read = lambda R, S, O: self.rule.respond(R, S, precision=self.precision) + O
      o, residuals = (
        self._scaled(heads.nest(read)(chunk.R, self._merge_chunks(starts), chunk.O)),
        None,
      )
      if self.rule.output_map is not None:
        o, residuals = heads.nest(self.rule.output_map)(o)
      return state, self._store(heads, o, heads.G > 1), Residuals(starts, self._by_chunk(residuals))

    like = jax.eval_shape(
      self.rule.read, state[0, 0], state[0, 0], jax.tree.map(lambda x: x[0, 0, 0], tokens)
    )
    like = jax.ShapeDtypeStruct(
      (*jax.tree.leaves(tokens)[0].shape[:2], state.shape[1], *like.shape), like.dtype
    )
    state, o, residuals = self._over_blocks(block, heads.rows(state), like)
    return (
      o,
      heads.unrows(state),
    ), residuals if self.rule.output_map is None else residuals._replace(outputs=o)

  def pullback(self, inputs, document, residuals, cotangents):
    (tokens, _), (do, dstate) = inputs, cotangents
    heads = heads_of(tokens, dstate)
    axes = heads.axes(tokens)
    begin = lambda r, xd: self.rule.begin_pullback(xd[0], self._masks(r), xd[1], self.precision)
    finish = lambda r, x, *rest: self.rule.pullback(x, self._masks(r), *rest, self.precision)

    def block(dstate, n, forward):
      r, x, d = (
        self._runs(heads, document, n),
        self._load(heads, tokens, n),
        self._load(heads, do, n),
      )
      d = self._scaled(d)
      if self.rule.output_map_pullback is not None:
        o, output_map = (
          self._load(heads, residuals.outputs, n),
          self._merge_chunks(forward.output_map),
        )
        d = heads.nest(self.rule.output_map_pullback)(output_map, o, d)
      back, begun = heads.over(begin, (axes, 0))(r, (x, d))
      body = lambda s, affine: (heads.nest(apply_transposed)(affine, s), s)
      dstate, dstates = lax.scan(body, dstate, self._by_chunk(back), reverse=True)
      dx = heads.over(finish, axes)(
        r, x, begun, self._merge_chunks(forward.starts), self._merge_chunks(dstates), d
      )
      give = lambda dx, x: self._store(
        heads, dx if heads.grouped(x) or heads.G == 1 else dx.sum(1), heads.grouped(x)
      )
      return dstate, jax.tree.map(give, dx, tokens), None

    each = residuals._replace(outputs=None)
    dstate, dx, _ = self._over_blocks(block, heads.rows(dstate), tokens, each, reverse=True)
    return dx, heads.unrows(dstate)

  def _over_blocks(self, block, carry, like, residuals=None, reverse=False):
    """Scans (carry, n, residuals of n) -> (carry, part of the results, what is stacked); results [B T ..] are as `like`.

    Parts are written where they belong. What is there before is never read, but differs between results: XLA would make one
    array of equal ones, and copy it.
    """
    if self.layout.blocks == 1:
      carry, results, stacked = block(carry, 0, jax.tree.map(lambda x: x[0], residuals))
      return carry, results, jax.tree.map(lambda y: y[None], stacked)
    leaves, tree = jax.tree.flatten(like)
    results = tree.unflatten(
      [vary_like(jnp.full(x.shape, i, x.dtype), carry) for i, x in enumerate(leaves, reverse)]
    )
    length = self.layout.C * self.layout.M

    def body(carried, x):
      (carry, results), (n, residuals) = carried, x
      carry, parts, stacked = block(carry, n, residuals)
      put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, n * length, axis=1)
      return (carry, jax.tree.map(put, results, parts)), stacked

    (carry, results), stacked = lax.scan(
      body, (carry, results), (jnp.arange(self.layout.blocks), residuals), reverse=reverse
    )
    return carry, results, stacked

  def _scaled(self, x):
    return x if self.scale is None else x * self.scale

  def _slice(self, x, n):
    length = self.layout.C * self.layout.M
    return x if self.layout.blocks == 1 else lax.dynamic_slice_in_dim(x, n * length, length, axis=1)

  def _by_chunk(self, tree):
    """[Z ..] -> [M R ..]."""
    return jax.tree.map(
      lambda x: x.reshape(self.layout.M, len(x) // self.layout.M, *x.shape[1:]), tree
    )

  def _merge_chunks(self, tree):
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), tree)

  def _load(self, heads, tokens, n):
    """Of [B T H or HV ..], block n as [Z (G) C ..], copied into that order."""

    def take(x):
      x, many = heads.split(self._slice(x, n)), heads.grouped(x)
      x = x.reshape(heads.B, self.layout.M, self.layout.C, *x.shape[2:])
      front = (1, 0, 3, 4, 2) if many else (1, 0, 3, 2)
      x = jnp.transpose(x, (*front, *range(len(front), x.ndim)))
      return lax.optimization_barrier(lax.collapse(x, 0, 3))

    return jax.tree.map(take, tokens)

  def _store(self, heads, x, grouped):
    """[Z (G) C ..] -> [B L H or HV ..]: a block's part of a result."""
    x = x.reshape(self.layout.M, heads.B, heads.H, *x.shape[1:])
    back = (1, 0, 4, 2, 3) if grouped else (1, 0, 3, 2)
    x = jnp.transpose(x, (*back, *range(len(back), x.ndim)))
    x = lax.collapse(x, 3, len(back))
    return x.reshape(heads.B, self.layout.M * self.layout.C, *x.shape[3:])

  def _runs(self, heads, document, n):
    """The run of each token and of the token before each: [Z C]."""
    if document is None:
      return None
    cut = lambda x: jnp.moveaxis(
      self._slice(x, n).reshape(heads.B, self.layout.M, self.layout.C), 1, 0
    )
    return jax.tree.map(
      lambda x: jnp.repeat(cut(x), heads.H, axis=1).reshape(-1, self.layout.C),
      (document, previous(document)),
    )

  def _masks(self, document):
    return None if document is None else segment_masks(document[0], document[1][0])
