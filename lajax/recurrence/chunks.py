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
from jax import lax
from jaxtyping import Array, Bool

from lajax._numerics import vary_like
from lajax.recurrence.decays import Masks, document_masks
from lajax.recurrence.documents import any_not_finite, finite, not_finite, previous, reached
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
  """Values that the backward pass reads besides the inputs."""

  states: Any  # [blocks M R (G) K V]: the state at the start of every chunk
  spoiled: Any  # [B T HV]: which outputs are NaN
  output: Any = None  # [blocks M R (G) C ..]: residuals of the rule's `output`, if there is one
  outputs: Any = None  # [B T HV V], if the rule has an `output`


class ChunkLayout(NamedTuple):
  """The division of time into blocks, each of M chunks of C tokens."""

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
    spoiled = reached(bad, any_not_finite(state, 2), document)

    summary = lambda documents, x: self.rule.chunk(x, _masks(documents), self.precision)
    summary = heads.over(summary, heads.axes(tokens))
    read = lambda R, S, O: self.rule.respond(R, S, precision=self.precision) + O

    def block(state, n, _):
      x = blocks.load(finite(blocks.slice(tokens, n), self.rule.log_decays))
      chunk = summary(blocks.documents(n), x)
      body = lambda s, affine: (heads.nest(apply)(affine, s), s)
      state, starts = lax.scan(body, state, blocks.by_chunk(Affine(chunk.A, chunk.B)))
      o = heads.nest(read)(chunk.R, blocks.merge_chunks(starts), chunk.O)
      o, residuals = self._scaled(o), None
      if self.rule.output is not None:
        residuals = heads.nest(output_pullback_of(self.rule).residuals)(o)
        o = heads.nest(self.rule.output)(o)
      o = _nan_where(blocks.slice(spoiled, n), blocks.store(o, heads.G > 1))
      return state, o, Residuals(starts, None, blocks.by_chunk(residuals))

    output = jax.eval_shape(
      self.rule.read, state[0, 0], state[0, 0], jax.tree.map(lambda x: x[0, 0, 0], tokens)
    )
    like = jax.ShapeDtypeStruct((*spoiled.shape, *output.shape), output.dtype)
    state, o, residuals = self._over_blocks(block, heads.rows(finite(state)), like)
    state = _nan_where(spoiled[:, -1], heads.unrows(state))
    outputs = None if self.rule.output is None else o
    return (o, state), residuals._replace(spoiled=spoiled, outputs=outputs)

  def pullback(self, inputs, document, residuals, cotangents):
    """Returns the cotangents of (tokens, state)."""
    (tokens, first), (do, dstate) = inputs, cotangents
    heads = heads_of(tokens, dstate)
    axes, blocks = heads.axes(tokens), _Blocks(heads, self.layout, document)
    pullback, spoiled = pullback_of(self.rule), residuals.spoiled
    bad = not_finite(do, do.shape[2])
    lost = spoiled | reached(bad, any_not_finite(dstate, 2), document, reverse=True)
    lost_by_group = lost.reshape(*lost.shape[:2], heads.H, heads.G).any(3)

    begin = lambda documents, x, do: pullback.begin(x, _masks(documents), do, self.precision)
    finish = lambda documents, x, *rest: pullback.finish(
      x, _masks(documents), *rest, self.precision
    )
    begin, finish = heads.over(begin, axes), heads.over(finish, axes)

    def block(dstate, n, kept):
      documents = blocks.documents(n)
      x = blocks.load(finite(blocks.slice(tokens, n), self.rule.log_decays))
      unread = blocks.slice(spoiled, n)[..., None]
      d = self._scaled(blocks.load(jnp.where(unread, 0, finite(blocks.slice(do, n)))))
      if self.rule.output is not None:
        o = blocks.load(finite(blocks.slice(residuals.outputs, n)))
        back = output_pullback_of(self.rule).pullback
        d = heads.nest(back)(blocks.merge_chunks(kept.output), o, d)
      affine, begun = begin(documents, x, d)
      body = lambda s, affine: (heads.nest(apply_transposed)(affine, s), s)
      dstate, ends = lax.scan(body, dstate, blocks.by_chunk(affine), reverse=True)
      states, ends = blocks.merge_chunks((kept.states, ends))
      dx = finish(documents, x, begun, states, ends, d)

      def put(dx, x):
        grouped = heads.grouped(x)
        dx = blocks.store(dx if grouped or heads.G == 1 else dx.sum(1), grouped)
        return _nan_where(blocks.slice(lost if grouped else lost_by_group, n), dx)

      return dstate, jax.tree.map(put, dx, tokens), None

    kept = Residuals(residuals.states, None, residuals.output)
    dstate = jnp.where(spoiled[:, -1, :, None, None], 0, finite(dstate))
    dstate, dx, _ = self._over_blocks(block, heads.rows(dstate), tokens, kept, reverse=True)
    lost = lost[:, 0] | any_not_finite(first, 2)
    return dx, _nan_where(lost, heads.unrows(dstate))

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
# A product of matrices would carry NaN to every token of a chunk: 0 times NaN is NaN. So chunks are
# computed without such numbers, and NaN is put where the recurrence would have it. A token is `bad`
# if it holds such a number, its output is `spoiled` if it comes after a bad token, and its gradient
# is `lost` if its output is spoiled or it comes before a bad cotangent.


def _nan_where(mask: Bool[Array, "..."], x: Array) -> Array:
  """Returns x with NaN in the entries, along its first axes, that the mask names."""
  return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), jnp.nan, x)
