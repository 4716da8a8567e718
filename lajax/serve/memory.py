"""Memory of the requests that run: who sits where, and the calls of the model on it.

`lajax.serve.engine` decides which request is next. Here it gets a slot, pages and the longest known
prefix of its tokens, and the model reads and writes for it. `lajax.serve.pool` holds the compiled
functions, `lajax.serve.prefixes` the states of known prefixes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from lajax.models.graphs import Graph
from lajax.serve import pool as device
from lajax.serve.handle import Handle
from lajax.serve.pages import Pages
from lajax.serve.pool import Layout
from lajax.serve.prefixes import Prefix, PrefixCache
from lajax.serve.slots import Slots, power_of_two, quotient


class Seat:
  """A request in a slot.

  Attributes:
    handle: the request.
    slot: its slot.
    pages: its pages, in the order of the tokens.
    text: the tokens to read before the first new one is chosen: all but the last.
    read: how many of them are read.
    prefix: the longest known prefix of what is read.
  """

  def __init__(self, handle: Handle, slot: int, pages: list[int], text: list[int], prefix: Prefix):
    self.handle, self.slot, self.pages, self.text = handle, slot, pages, text
    self.read, self.prefix = prefix.length, prefix

  @property
  def is_reading(self) -> bool:
    return self.read < len(self.text)


class Sizes(NamedTuple):
  """Sizes of a memory."""

  slots: int
  pages: int
  pages_per_slot: int  # at most
  prefill_piece: int  # tokens
  cache_bytes: int  # of known prefixes


class Memory:
  """Slots, pages and known prefixes, without requests at first.

  Args:
    graph, parameters: the model.
    layout: of its state.
    sizes: of the memory.

  Attributes:
    sizes: as given.
    slots, pages: which are free, and what each slot has read.
    cache: known prefixes.
    pool: arrays of the slots and of the pages.
  """

  def __init__(self, graph: Graph, parameters: list[jax.Array], layout: Layout, sizes: Sizes):
    self._graph, self._parameters, self._layout, self.sizes = graph, parameters, layout, sizes
    self.pool, self._first = device.make_pool(graph, layout, parameters, sizes.slots, sizes.pages)
    of_pages = sum(x.nbytes for x, s in zip(self.pool, layout.places, strict=True) if s >= 0)
    page_bytes = of_pages // max(1, sizes.pages)
    self.pages = Pages(sizes.pages)
    self.cache = PrefixCache(sizes.prefill_piece, sizes.cache_bytes, self.pages, page_bytes)
    self.slots = Slots(sizes.slots, sizes.pages_per_slot, layout.page_size)
    self._state_bytes = sum(x.nbytes for x in jax.tree.leaves(self._first))

  # --- seats ---

  def seat(self, handle: Handle, alone: bool) -> Seat | None:
    """Returns a seat behind the longest known prefix; None if there are too few pages for now.

    Args:
      handle: the request, for which a slot must be free.
      alone: whether no other request has a seat.
    """
    text = (handle.prompt + handle.tokens)[:-1]
    prefix = self.cache.longest(text) if self.sizes.cache_bytes else self.cache.root
    total = len(handle.prompt) + handle.max_tokens - 1
    total = quotient(total, self._layout.page_size) if self._layout.is_paged else 0
    pages = self._own_pages(prefix, total)
    if pages is None and prefix.pages and alone:
      prefix = self.cache.root  # the prefix itself stands in the way
      pages = self._own_pages(prefix, total)
    if pages is None:
      return None
    slot = self.slots.take(pages, prefix.length)
    arrays = self._first if prefix is self.cache.root else prefix.arrays
    self.pool = device.write_slot(self._layout, self.pool, np.int32(slot), arrays)
    return Seat(handle, slot, pages, text, prefix)

  def leave(self, seat: Seat) -> None:
    """Frees the slot and the pages of a seat."""
    self.slots.release(seat.slot)
    self.pages.release(seat.pages)

  def _own_pages(self, prefix: Prefix, total: int) -> list[int] | None:
    """Returns a request's pages: the full ones of a prefix, which it shares, and new ones.

    The last page of a prefix that is partly filled is copied, since the request writes to it.
    """
    full = prefix.length // self._layout.page_size if prefix.pages else 0
    shared, partial = prefix.pages[:full], prefix.pages[full:]
    self.pages.share(prefix.pages)
    need = total - full
    if not self.cache.make_room(need):
      self.pages.release(prefix.pages)
      return None
    new = self.pages.take(need)
    if partial:
      self._copy_page(partial[0], new[0])
      self.pages.release(partial)
    return shared + new

  def _copy_page(self, source: int, target: int) -> None:
    self.pool = device.copy_page(self._layout, self.pool, np.int32(source), np.int32(target))

  def _keep_prefix(self, seat: Seat) -> None:
    """Keeps the state behind a piece, unless it is known, or the prefix before it is not."""
    cache, before = self.cache, seat.prefix
    behind = before.length + self.sizes.prefill_piece == seat.read
    if not behind or not cache.knows(before) or self._state_bytes > self.sizes.cache_bytes:
      return
    known = cache.child(before, seat.text)
    if known is not None:
      seat.prefix = known
      return
    full, copies = seat.read // self._layout.page_size, []
    if self._layout.is_paged and seat.read % self._layout.page_size:
      if not cache.make_room(1):
        return
      copies = self.pages.take(1)  # the request goes on to write to the page itself
      self._copy_page(seat.pages[full], copies[0])
    pages = seat.pages[:full] + copies
    if cache.knows(before):
      arrays = device.read_slot(self._layout, self.pool, np.int32(seat.slot))
      seat.prefix = cache.add(before, seat.text, arrays, pages)
    self.pages.release(copies)

  # --- calls of the model ---

  def read_piece(self, seat: Seat) -> None:
    """Reads the next piece of a prompt, and keeps the state behind it."""
    piece = seat.text[seat.read : seat.read + self.sizes.prefill_piece]
    width = min(self.sizes.prefill_piece, power_of_two(len(piece), 8))
    tokens = np.zeros((1, width), np.int32)
    ids = np.full((1, width), -1, np.int32)
    tokens[0, : len(piece)], ids[0, : len(piece)] = piece, 0
    rows = self.slots.rows(seat.read + width, np.array([seat.slot], np.int32))
    self.pool = device.prefill_piece(
      self._graph, self._layout, self._parameters, self.pool, rows, tokens, ids
    )
    seat.read += len(piece)
    self.slots.length[seat.slot] = seat.read
    self._keep_prefix(seat)

  def begin_writing(self, seat: Seat) -> None:
    """Lets the next step write a token of a request that has read its prompt."""
    handle = seat.handle
    last = (handle.prompt + handle.tokens)[-1]
    self.slots.run(seat.slot, last, len(handle.tokens), handle._request)

  def write_tokens(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields slot, next token [1] and its logprob [1] of each running request; -1 for no token."""
    running = np.flatnonzero(self.slots.is_running)
    if not running.size:
      return
    slots = self.slots.of_step(running)
    at = self.slots.existing(slots)
    self.pool, tokens, logprobs = device.decode_step(
      self._graph,
      self._layout,
      self._parameters,
      self.pool,
      self.slots.rows(int(self.slots.length[running].max()) + 1, slots),
      self.slots.last[at],
      self.slots.is_running[at] & (slots < self.sizes.slots),
      self.slots.request(running, slots),
      self.slots.number[at],
    )
    tokens, logprobs = jax.device_get((tokens, logprobs))
    for slot in running:
      row = int(np.searchsorted(slots, slot))
      yield int(slot), tokens[row : row + 1], logprobs[row : row + 1]

  def verify(self, seat: Seat, guesses: np.ndarray) -> Any:
    """Returns what one call finds of the guessed next tokens of a request, on the host."""
    handle, slot = seat.handle, seat.slot
    limit = handle.max_tokens - len(handle.tokens)
    inputs = np.full((1, power_of_two(len(guesses) + 1)), -1, np.int32)
    inputs[0, 0], inputs[0, 1 : len(guesses) + 1] = self.slots.last[slot], guesses
    length = int(self.slots.length[slot]) + inputs.shape[1]
    self.pool, found = device.verify_slot(
      self._graph,
      self._layout,
      self._parameters,
      self.pool,
      self.slots.rows(length, np.array([slot], np.int32)),
      inputs,
      handle._request,
      self.slots.number[slot : slot + 1].copy(),
      np.full(1, limit, np.int32),
    )
    return jax.device_get(found)
