"""Memory of an engine: state slots, pages of key-value memory, and the compiled functions on them.

A pool has the arrays of a model's state, in two kinds:

* An array of a fixed size (the state of a recurrence, a convolution's cache, the ring of a window)
  has one row per slot.
* An array that grows with the document (the cache of softmax attention) is paged: its rows are
  pages of `page_size` tokens. A table names the pages of each slot, in the order of the tokens.

A compiled function gathers the pages of its slots into a cache of the first places, runs the model
on it, and writes the new tokens' places back. Its time grows with the width of the table, which is
that of the longest request among its slots, rounded up to a power of two.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lajax.models.drafts import Verified, verify
from lajax.models.graphs import Graph, axes_that_differ, choose, first_state, settled
from lajax.models.requests import Request

Pool = list[Array]  # arrays of the state: [.. slots ..], or paged [.. pages page_size ..]


class Layout(NamedTuple):
  """Places of the axes in the arrays of a state; a static argument of the compiled functions."""

  batch: tuple[int, ...]  # axis of the rows
  places: tuple[int, ...]  # axis of the tokens in a cache that is paged; -1 for an array per slot
  structure: Any  # of the state
  page_size: int
  max_length: int

  @property
  def is_paged(self) -> bool:
    return any(axis >= 0 for axis in self.places)


class Rows(NamedTuple):
  """Rows of a call: which pages they have, and how many tokens they have read."""

  table: Int[Array, "B W"]  # pages, in the order of the tokens; any page behind the last one
  length: Int[Array, "B"]  # tokens read
  slots: Int[Array, "B"] | None  # number of slots: a row of padding; None for all slots


def layout_of(graph: Graph, parameters: list[Array], page_size: int, max_length: int) -> Layout:
  """Returns the layout of a model's state.

  Raises:
    ValueError: an array of the state has no axis for the rows of a batch.
  """
  sizes = (1, 0, max_length)
  batch, structure = jax.tree.flatten(
    axes_that_differ(graph, parameters, sizes, (2, 0, max_length))
  )
  places = jax.tree.leaves(axes_that_differ(graph, parameters, sizes, (1, page_size, max_length)))
  if min(batch, default=0) < 0:
    raise ValueError(
      "each array of the model's state must have an axis for the rows of a batch; got "
      f"{batch.count(-1)} without, of {len(batch)}. Let `init_state(batch)` give each row its own."
    )
  assert all(s < 0 or s > b for b, s in zip(batch, places, strict=True))  # caches are [B S ..]
  return Layout(tuple(batch), tuple(places), structure, page_size, max_length)


def _arrays(layout: Layout, *lists):
  """Yields the axes of each array of a state, with its entry in each list."""
  return zip(layout.batch, layout.places, *lists, strict=True)


def make_pool(graph: Graph, layout: Layout, parameters: list[Array], slots: int, pages: int):
  """Returns a pool without requests, and the first state of one slot.

  The first state has None in the place of paged arrays: no token of a page is read before it is
  written.
  """
  return _make_pool(graph, layout, slots, pages, parameters)


@functools.partial(jax.jit, static_argnames=("graph", "layout", "slots", "pages"))
def _make_pool(graph, layout: Layout, slots: int, pages: int, parameters) -> tuple[Pool, list]:
  model = graph.merge(parameters)
  state = first_state(graph, parameters, 1, 0, layout.max_length)
  leaves = jax.tree.leaves(settled(model, state, jnp.zeros(1, jnp.int32)))
  pool, first = [], []
  for b, s, x in _arrays(layout, leaves):
    if s < 0:
      pool.append(jnp.repeat(x, slots, axis=b))
      first.append(x)
    else:
      shape = list(jnp.moveaxis(x, s, b + 1).shape)
      shape[b : b + 2] = pages, layout.page_size
      pool.append(jnp.zeros(shape, x.dtype))
      first.append(None)
  return pool, first


# --- one slot -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="layout")
def read_slot(layout: Layout, pool: Pool, slot) -> list:
  """Returns copies of a slot's arrays [.. 1 ..]; None for paged ones."""
  return [_row(x, slot, b) if s < 0 else None for b, s, x in _arrays(layout, pool)]


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="pool")
def write_slot(layout: Layout, pool: Pool, slot, arrays: list) -> Pool:
  """Returns the pool with a slot's arrays replaced, whatever they held."""
  return [
    _with_row(x, new, slot, b) if s < 0 else x for b, s, x, new in _arrays(layout, pool, arrays)
  ]


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="pool")
def copy_page(layout: Layout, pool: Pool, source, target) -> Pool:
  """Returns the pool with one page copied to another."""
  return [
    x if s < 0 else _with_row(x, _row(x, source, b), target, b) for b, s, x in _arrays(layout, pool)
  ]


def _row(x: Array, n, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, n, 1, axis)


def _with_row(x: Array, row: Array, n, axis: int) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(x, row, n, axis)


# --- calls of the model ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames="pool")
def prefill_piece(
  graph: Graph,
  layout: Layout,
  parameters,
  pool: Pool,
  rows: Rows,
  tokens: Int[Array, "B P"],
  ids: Int[Array, "B P"],
) -> Pool:
  """Returns the pool after a piece of a prompt. XLA leaves the output head out."""
  state = gather(layout, pool, rows)
  _, after = graph.merge(parameters)(tokens, state, segment_ids=ids)
  return scatter(layout, pool, rows, after, ids >= 0)


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames="pool")
def decode_step(
  graph: Graph,
  layout: Layout,
  parameters,
  pool: Pool,
  rows: Rows,
  tokens: Int[Array, "B"],
  running: Bool[Array, "B"],
  request: Request,
  number: Int[Array, "B"],
) -> tuple[Pool, Int[Array, "B"], Float[Array, "B"]]:
  """Returns the pool after one token of each running row, the next tokens, and their logprobs.

  A next token is -1 where none can be chosen.
  """
  state = gather(layout, pool, rows)
  ids = jnp.where(running, jnp.int32(0), jnp.int32(-1))[:, None]
  logits, after = graph.merge(parameters)(tokens[:, None], state, segment_ids=ids)
  token, logprob = choose(request, logits[:, 0], number)
  return scatter(layout, pool, rows, after, ids >= 0), token, logprob.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("graph", "layout"), donate_argnames="pool")
def verify_slot(
  graph: Graph,
  layout: Layout,
  parameters,
  pool: Pool,
  rows: Rows,
  inputs: Int[Array, "B k+1"],
  request: Request,
  number: Int[Array, "B"],
  limit: Int[Array, "B"],
) -> tuple[Pool, Verified]:
  """Returns the pool after the accepted tokens of a draft, and these tokens."""
  model = graph.merge(parameters)
  read = lambda tokens, state, ids: model(tokens, state, segment_ids=ids)
  document = jnp.zeros_like(limit)
  state, found = verify(
    read, request, gather(layout, pool, rows), inputs, document, limit > 0, number, limit
  )
  place = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
  return scatter(layout, pool, rows, state, place < found.count[:, None]), found


def gather(layout: Layout, pool: Pool, rows: Rows) -> Any:
  """Returns the state of the rows, as the model knows it.

  The places behind a row's tokens hold zeros, whatever the pages hold there.
  """
  B, W = rows.table.shape
  is_token = jnp.arange(W * layout.page_size, dtype=jnp.int32)[None] < rows.length[:, None]
  leaves = []
  for b, s, x in _arrays(layout, pool):
    if s < 0:
      leaves.append(x if rows.slots is None else jnp.take(x, rows.slots, axis=b, mode="clip"))
      continue
    pages = jnp.take(x, rows.table, axis=b, mode="clip")  # [.. B W page_size ..]
    places = pages.reshape(*x.shape[:b], B, W * layout.page_size, *x.shape[b + 2 :])
    mask = is_token.reshape(*(1,) * b, *is_token.shape, *(1,) * (x.ndim - b - 2))
    leaves.append(jnp.moveaxis(jnp.where(mask, places, jnp.zeros((), x.dtype)), b + 1, s))
  return jax.tree.unflatten(layout.structure, leaves)


def scatter(layout: Layout, pool: Pool, rows: Rows, state: Any, is_new: Bool[Array, "B T"]) -> Pool:
  """Returns the pool with the rows' state after new tokens.

  Args:
    layout, pool, rows: before the new tokens.
    state: of the rows, after them.
    is_new: [B T], which tokens of the call were read; these come first in each row.
  """
  place = rows.length[:, None] + jnp.cumsum(is_new, axis=1, dtype=jnp.int32) - 1
  place = jnp.maximum(place, 0)
  new_pool = []
  for b, s, x, after in _arrays(layout, pool, jax.tree.leaves(state)):
    if s < 0:
      index = (slice(None),) * b
      new_pool.append(
        after if rows.slots is None else x.at[(*index, rows.slots)].set(after, mode="drop")
      )
      continue
    after = jnp.moveaxis(after, s, b + 1)
    index = place.reshape(*(1,) * b, *place.shape, *(1,) * (after.ndim - b - 2))
    tokens = jnp.take_along_axis(after, index, axis=b + 1, mode="clip")
    page = jnp.take_along_axis(rows.table, place // layout.page_size, axis=1, mode="clip")
    page = jnp.where(is_new, page, x.shape[b])  # behind the last page: dropped
    before = (slice(None),) * b
    new_pool.append(x.at[(*before, page, place % layout.page_size)].set(tokens, mode="drop"))
  return new_pool
