"""The loop over chunks: products of matrices inside a chunk, a scan over the summaries of chunks.

Layouts. Callers have tokens [B T H ..] (queries and keys) or [B T HV ..] (all others), a state
[B HV K V] and outputs [B T HV V]. Time is cut into blocks, a block into M chunks of C tokens.

    [B L H ..]       a block, L = M C tokens, in the callers' order
    [Z (G) C ..]     the same block, chunk by chunk: Z = M B H chunks are computed together
    [M R (G) ..]     one thing per chunk of a block, as the scan over chunks takes it; R = B H

G = HV / H value heads share a head of queries and keys; arrays have an axis G where G > 1 and the
array differs between them. The M chunks of one row stand B H apart along Z.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from lajax._numerics import vary_like
from lajax.recurrence.decays import Masks, document_masks
from lajax.recurrence.documents import any_not_finite, finite, not_finite, previous
from lajax.recurrence.heads import Heads, heads_of
from lajax.recurrence.rule import (
  Affine,
  Rule,
  apply,
  apply_transposed,
  output_pullback_of,
  pullback_of,
  warn_if_made_anew,
)
from lajax.recurrence.transforms import differentiable, join_batches

# Tokens times heads whose chunks are computed together: about what stays in a CPU's cache.
ROWS_AT_ONCE = 2048


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
  """Returns outputs and final state, by products inside chunks and a scan over their summaries.

  The backward pass keeps the inputs and the first state of each chunk. `scale` multiplies what
  tokens read; for reads that are linear in the queries it replaces a scale of the queries, which
  would cost a pass over memory.

  NaN and infinity in a token make the outputs of a head NaN from that token on until its document
  ends, and nothing else. In the same way a cotangent that is not finite makes the gradients NaN
  from its token back to the document's first one.
  """
  B, T = jax.tree.leaves(tokens)[0].shape[:2]
  if not isinstance(T, int):
    raise NotImplementedError(
      f"impl='chunked' needs a known number of tokens, and it is the symbol {T} here; export with "
      "a number, or use impl='recurrent'."
    )
  warn_if_made_anew(rule)
  layout = chunk_layout(T, B * state.shape[1], chunk_size)
  missing = layout.length * layout.blocks - T
  if missing:
    tokens = jax.tree.map(
      lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), tokens
    )
    document = None if document is None else jnp.pad(document, [(0, 0), (0, missing)], mode="edge")
  o, state = _differentiable_loop(rule, layout, scale, precision)((tokens, state), document)
  return o[:, :T], state


@functools.lru_cache(maxsize=1024)
def _differentiable_loop(
  rule: Rule, layout: "ChunkLayout", scale: float | None, precision
) -> Callable:
  """Returns (tokens, state), document -> o, state, differentiable.

  There is one function for each layout, so that JAX traces its forward pass once.
  """
  loop = _Loop(rule, layout, scale, precision)
  # Under the caller's vmap the batch grows: axis 0, and axis 2 of the residuals [blocks M R ..].
  residuals = Residuals(2, 0, 2, 0)
  forward = jax.jit(join_batches(loop.forward_with_residuals, (0, 0), (0, residuals)))
  pullback = join_batches(loop.pullback, (0, 0, residuals, 0), 0)
  return differentiable(forward, loop.forward, pullback)


class Residuals(NamedTuple):
  """What the backward pass reads besides the inputs."""

  states: Any  # [blocks M R (G) K V]: the state at the start of every chunk
  spoiled: Any  # [B T HV]: which outputs are NaN
  output: Any = None  # [blocks M R (G) C ..]: residuals of the rule's `output`, if there is one
  outputs: Any = None  # [B T HV V], if the rule has an `output`


class ChunkLayout(NamedTuple):
  """How time is cut: blocks, each of M chunks of C tokens."""

  C: int
  M: int
  blocks: int

  @property
  def length(self) -> int:
    """Tokens of a block."""
    return self.C * self.M


def chunk_layout(T: int, rows: int, chunk_size: int) -> ChunkLayout:
  """Returns the layout for T tokens of `rows` (batch times heads).

  The length of a chunk is a power of two, at least 16, and no longer than T needs. A symbolic
  number of rows, as `jax.export` has, counts as many: a block is then one chunk.
  """
  C = max(16, min(_power_of_two(chunk_size), _power_of_two(T)))
  N = -(-T // C)
  chunks_at_once = max(1, ROWS_AT_ONCE // (rows * C)) if isinstance(rows, int) else 1
  blocks = -(-N // chunks_at_once)
  return ChunkLayout(C, -(-N // blocks), blocks)


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


class _Loop(NamedTuple):
  """A rule's pass over all chunks: forward, and backward."""

  rule: Rule
  layout: ChunkLayout
  scale: float | None
  precision: Any

  def forward(self, inputs, document):
    """Returns (o, final state)."""
    return self.forward_with_residuals(inputs, document)[0]

  def forward_with_residuals(self, inputs, document):
    """Returns (o, final state), residuals."""
    tokens, state = inputs
    heads = heads_of(tokens, state)
    blocks = _Blocks(heads, self.layout, document)
    bad = not_finite(tokens, state.shape[1], self.rule.log_decays)
    bad_state = any_not_finite(state, 2)

    def summary(documents, x, bad):
      masks = _masks(documents)
      return self.rule.chunk(x, masks, self.precision), _reach_forwards(bad, masks)

    summary = heads.over(summary, heads.axes(tokens))
    read = lambda R, S, O: self.rule.respond(R, S, precision=self.precision) + O

    def next_chunk(carry, chunk):
      (state, spoiled), (affine, reach) = carry, chunk
      after = heads.nest(apply)(affine, state), reach.leaving(spoiled)
      return after, carry

    def block(carry, n, _):
      x = blocks.load(finite(blocks.slice(tokens, n), self.rule.log_decays))
      chunk, reach = summary(blocks.documents(n), x, blocks.load(blocks.slice(bad, n)))
      xs = blocks.by_chunk((Affine(chunk.A, chunk.B), reach.over_chunks()))
      carry, starts = lax.scan(next_chunk, carry, xs)
      state, spoiled = blocks.merge_chunks(starts)
      o, residuals = self._scaled(heads.nest(read)(chunk.R, state, chunk.O)), None
      if self.rule.output is not None:
        residuals = heads.nest(output_pullback_of(self.rule).residuals)(o)
        o = heads.nest(self.rule.output)(o)
      spoiled = reach.tokens(spoiled)
      o = jnp.where(spoiled[..., None], jnp.nan, o)
      results = blocks.store(o, heads.G > 1), blocks.store(spoiled, heads.G > 1)
      return carry, results, Residuals(starts[0], None, blocks.by_chunk(residuals))

    output = jax.eval_shape(
      self.rule.read, state[0, 0], state[0, 0], jax.tree.map(lambda x: x[0, 0, 0], tokens)
    )
    o = jax.ShapeDtypeStruct((*bad.shape, *output.shape), output.dtype)
    carry = heads.rows(finite(state)), heads.rows(bad_state)
    carry, results, residuals = self._over_blocks(block, carry, (o, bad))
    state, spoiled = (heads.unrows(x) for x in carry)
    state = jnp.where(spoiled[..., None, None], jnp.nan, state)
    o, spoiled = results
    residuals = residuals._replace(spoiled=spoiled)
    if self.rule.output is not None:
      residuals = residuals._replace(outputs=o)
    return (o, state), residuals

  def pullback(self, inputs, document, residuals, cotangents):
    """Returns the cotangents of (tokens, state)."""
    (tokens, first), (do, dstate) = inputs, cotangents
    heads = heads_of(tokens, dstate)
    axes, blocks = heads.axes(tokens), _Blocks(heads, self.layout, document)
    pullback = pullback_of(self.rule)
    bad = not_finite(do, do.shape[2])
    bad_state = any_not_finite(dstate, 2)

    def begin(documents, x, do, bad):
      masks = _masks(documents)
      return *pullback.begin(x, masks, do, self.precision), _reach_backwards(bad, masks)

    def finish(documents, x, *rest):
      return pullback.finish(x, _masks(documents), *rest, self.precision)

    begin, finish = heads.over(begin, axes), heads.over(finish, axes)

    def previous_chunk(carry, chunk):
      (dstate, lost), (affine, reach) = carry, chunk
      before = heads.nest(apply_transposed)(affine, dstate), reach.leaving(lost)
      return before, carry

    def block(carry, n, kept):
      documents = blocks.documents(n)
      x = blocks.load(finite(blocks.slice(tokens, n), self.rule.log_decays))
      unread = blocks.slice(residuals.spoiled, n)
      d = jnp.where(unread[..., None], 0, finite(blocks.slice(do, n)))
      d = self._scaled(blocks.load(d))
      if self.rule.output is not None:
        o = blocks.load(finite(blocks.slice(residuals.outputs, n)))
        back = output_pullback_of(self.rule).pullback
        d = heads.nest(back)(blocks.merge_chunks(kept.output), o, d)
      affine, begun, reach = begin(documents, x, d, blocks.load(blocks.slice(bad, n)))
      xs = blocks.by_chunk((affine, reach.over_chunks()))
      carry, ends = lax.scan(previous_chunk, carry, xs, reverse=True)
      dstate, lost = blocks.merge_chunks(ends)
      dx = finish(documents, x, begun, blocks.merge_chunks(kept.states), dstate, d)
      lost = reach.tokens(lost) | blocks.load(unread)

      def put(dx, x):
        dx = jnp.where(lost.reshape(*lost.shape, *(1,) * (dx.ndim - lost.ndim)), jnp.nan, dx)
        grouped = heads.grouped(x)
        return blocks.store(dx if grouped or heads.G == 1 else dx.sum(1), grouped)

      return carry, jax.tree.map(put, dx, tokens), None

    kept = Residuals(residuals.states, None, residuals.output)
    dstate = jnp.where(residuals.spoiled[:, -1, :, None, None], 0, finite(dstate))
    carry = heads.rows(dstate), heads.rows(bad_state)
    carry, dx, _ = self._over_blocks(block, carry, tokens, kept, reverse=True)
    dstate, lost = (heads.unrows(x) for x in carry)
    lost = lost | any_not_finite(first, 2)
    return dx, jnp.where(lost[..., None, None], jnp.nan, dstate)

  def _over_blocks(self, block, carry, like, residuals=None, reverse=False):
    """Scans `block` over all blocks: (carry, n, residuals) -> (carry, results, residuals).

    Each block writes its slice of the results [B T ..], which are as `like`, in place. The first
    contents of a result are never read; they differ between results, since XLA would make one array
    of equal ones and copy it.
    """
    if self.layout.blocks == 1:
      carry, results, stacked = block(carry, 0, jax.tree.map(lambda x: x[0], residuals))
      return carry, results, jax.tree.map(lambda y: y[None], stacked)
    leaves, tree = jax.tree.flatten(like)
    results = tree.unflatten(
      [vary_like(jnp.full(x.shape, i, x.dtype), carry) for i, x in enumerate(leaves, reverse)]
    )

    def body(carried, x):
      (carry, results), (n, residuals) = carried, x
      carry, parts, stacked = block(carry, n, residuals)
      put = lambda whole, part: lax.dynamic_update_slice_in_dim(
        whole, part, n * self.layout.length, axis=1
      )
      return (carry, jax.tree.map(put, results, parts)), stacked

    (carry, results), stacked = lax.scan(
      body, (carry, results), (jnp.arange(self.layout.blocks), residuals), reverse=reverse
    )
    return carry, results, stacked

  def _scaled(self, x):
    return x if self.scale is None else x * self.scale


class _Blocks(NamedTuple):
  """Changes between the layouts that stand at the top of this file; all take pytrees."""

  heads: Heads
  layout: ChunkLayout
  document: Array | None

  def slice(self, tree, n):
    """[B T ..] -> [B L ..]: block n."""
    length = self.layout.length
    if self.layout.blocks == 1:
      return tree
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, n * length, length, axis=1), tree)

  def load(self, tree):
    """[B L H or HV ..] -> [Z (G) C ..], copied into that order."""

    def load(x):
      x, grouped = self.heads.split(x), self.heads.grouped(x)
      x = x.reshape(self.heads.B, self.layout.M, self.layout.C, *x.shape[2:])
      front = (1, 0, 3, 4, 2) if grouped else (1, 0, 3, 2)
      x = jnp.transpose(x, (*front, *range(len(front), x.ndim)))
      return lax.optimization_barrier(lax.collapse(x, 0, 3))

    return jax.tree.map(load, tree)

  def store(self, x, grouped: bool):
    """[Z (G) C ..] -> [B L H or HV ..]."""
    x = x.reshape(self.layout.M, self.heads.B, self.heads.H, *x.shape[1:])
    back = (1, 0, 4, 2, 3) if grouped else (1, 0, 3, 2)
    x = jnp.transpose(x, (*back, *range(len(back), x.ndim)))
    x = lax.collapse(x, 3, len(back))
    return x.reshape(self.heads.B, self.layout.length, *x.shape[3:])

  def by_chunk(self, tree):
    """[Z ..] -> [M R ..]."""
    rows = self.heads.B * self.heads.H
    return jax.tree.map(lambda x: x.reshape(self.layout.M, rows, *x.shape[1:]), tree)

  def merge_chunks(self, tree):
    """[M R ..] -> [Z ..]."""
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), tree)

  def documents(self, n):
    """The document of each token of block n, and of the token before it: [Z C] each."""
    if self.document is None:
      return None

    def by_chunk(x):
      x = self.slice(x, n).reshape(self.heads.B, self.layout.M, self.layout.C)
      return jnp.repeat(jnp.moveaxis(x, 1, 0), self.heads.H, axis=1).reshape(-1, self.layout.C)

    return by_chunk(self.document), by_chunk(previous(self.document))


def _masks(documents) -> Masks | None:
  """Masks of one chunk, from the documents [C] of its tokens and of the tokens before them."""
  return None if documents is None else document_masks(documents[0], documents[1][0])


# --- numbers that are not finite -----------------------------------------------------------------
#
# A product of matrices would carry NaN to every token of a chunk: 0 times NaN is NaN. So a chunk is
# computed without such numbers, and NaN is put where the recurrence would have it. A token is `bad`
# if it holds such a number, its output is `spoiled` if it comes after a bad token, and its gradient
# is `lost` if its output is spoiled or it comes before a bad cotangent.


class _Reach(NamedTuple):
  """Which tokens of a chunk, in the direction of the pass, come after a bad token of a document.

  `entering` and `through` are None without documents, where both are true.
  """

  inside: Any  # [C]: after a bad token of the chunk
  whole: Bool[Array, ""]  # the state that leaves the chunk comes after a bad token of the chunk
  entering: Bool[Array, "C"] | None = None  # of the document that the pass enters the chunk in
  through: Bool[Array, ""] | None = None  # the pass leaves the chunk in the document it enters in

  def over_chunks(self) -> "_Reach":
    return self._replace(inside=None, entering=None)

  def leaving(self, spoiled: Array) -> Array:
    """Whether the leaving state comes after a bad token, given that of the entering state."""
    return self.whole | (spoiled if self.through is None else spoiled & self.through)

  def tokens(self, spoiled: Array) -> Array:
    """Whether each token comes after a bad token, given that of the state that enters."""
    spoiled = spoiled[..., None]
    return self.inside | (spoiled if self.entering is None else spoiled & self.entering)


def _reach_forwards(bad: Bool[Array, "C"], masks: Masks | None) -> _Reach:
  lower = np.tri(len(bad), dtype=bool)
  if masks is None:
    inside = _any_seen(bad, lower)
    return _Reach(inside, inside[-1])
  inside = (masks.between & lower & bad[None]).any(1)
  return _Reach(inside, inside[-1], masks.from_start, masks.total)


def _reach_backwards(bad: Bool[Array, "C"], masks: Masks | None) -> _Reach:
  upper = np.tri(len(bad), dtype=bool).T
  if masks is None:
    inside = _any_seen(bad, upper)
    return _Reach(inside, inside[0])
  inside = (masks.between & upper & bad[None]).any(1)
  return _Reach(inside, (masks.from_start & bad).any(), masks.to_end, masks.total)


def _any_seen(bad: Bool[Array, "C"], sees: np.ndarray) -> Bool[Array, "C"]:
  return jnp.matmul(jnp.asarray(sees.astype(np.float32)), bad.astype(jnp.float32)) > 0
