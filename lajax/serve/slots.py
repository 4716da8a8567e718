"""Slots of an engine: which pages they have, what they have read, and how they sample."""

from typing import Any

import numpy as np

from lajax._shapes import INT32
from lajax.models.requests import Request
from lajax.serve.pool import Rows


class Slots:
  """Arrays of NumPy with an entry for each slot.

  Args:
    count: number of slots.
    pages: pages of a slot at most; 0 for a model without paged memory.
    page_size: tokens of a page.

  Attributes:
    free: slots without a request.
    table: [count pages], the pages of each slot in the order of the tokens.
    length: [count], tokens that the model has read.
    last: [count], the token that it reads next.
    number: [count], how many new tokens there are.
    is_running: [count], whether the next step writes a token.
  """

  def __init__(self, count: int, pages: int, page_size: int):
    self.count, self.page_size = count, page_size
    self.free = list(range(count))[::-1]
    self.table = np.zeros((count, pages), np.int32)
    self.length = np.zeros(count, np.int32)
    self.last = np.zeros(count, np.int32)
    self.number = np.zeros(count, np.int32)
    self.is_running = np.zeros(count, bool)
    self._keys = np.zeros((count, 2), np.uint32)
    self._temperature = np.zeros(count, np.float32)
    self._top_k = np.full(count, INT32.max, np.int32)
    self._top_p = np.ones(count, np.float32)
    self._min_p = np.zeros(count, np.float32)

  def take(self, pages: list[int], length: int) -> int:
    """Returns a free slot, which gets these pages, and has read so many tokens."""
    slot = self.free.pop()
    self.table[slot, : len(pages)] = pages
    self.length[slot] = length
    return slot

  def run(self, slot: int, last: int, number: int, request: Request) -> None:
    """Lets the next step write a token in a slot, of this number, behind the token `last`."""
    self.last[slot], self.number[slot], self.is_running[slot] = last, number, True
    options = (  # with values that have no effect
      (self._keys, request.keys, 0),
      (self._temperature, request.temperature, 0.0),
      (self._top_k, request.top_k, INT32.max),
      (self._top_p, request.top_p, 1.0),
      (self._min_p, request.min_p, 0.0),
    )
    for array, value, default in options:
      array[slot] = default if value is None else np.asarray(value)[0]

  def go_on(self, slot: int, tokens: np.ndarray) -> None:
    """Counts new tokens of a slot, for each of which the model has read one."""
    self.length[slot] += len(tokens)
    self.number[slot] += len(tokens)
    if len(tokens):
      self.last[slot] = tokens[-1]

  def release(self, slot: int) -> None:
    """Frees a slot."""
    self.is_running[slot], self.length[slot] = False, 0
    self.free.append(slot)

  # --- arguments of calls ---

  def of_step(self, running: np.ndarray) -> np.ndarray:
    """Returns the slots of a step, in order: those that run if they are few, otherwise all.

    A step of few rows has a quarter of all; behind the last one stands padding, the number of
    slots.
    """
    few = max(4, quotient(self.count, 4))
    if len(running) > few or self.count <= few:
      return np.arange(self.count, dtype=np.int32)
    return np.append(running, np.full(few - len(running), self.count)).astype(np.int32)

  def existing(self, slots: np.ndarray) -> np.ndarray:
    """Returns slots to read arrays at: the last one in place of padding."""
    return np.minimum(slots, self.count - 1)

  def rows(self, length: int, slots: np.ndarray) -> Rows:
    """Returns the rows of a call whose longest row has so many tokens after it."""
    width = min(power_of_two(quotient(length, self.page_size)), self.table.shape[1])
    at = self.existing(slots)
    given: Any = None if len(slots) == self.count else slots
    return Rows(self.table[at, :width], self.length[at], given)  # type: ignore[arg-type]

  def request(self, running: np.ndarray, slots: np.ndarray) -> Request:
    """Returns the options of some slots, without those that no running request needs."""
    drawn = running[self._temperature[running] > 0]
    if not drawn.size:
      return Request(None, None, None, None, None, None)
    at = self.existing(slots)
    needs_order = (self._top_k[drawn] < INT32.max) | (self._top_p[drawn] < 1)
    top_k, top_p = (x[at] if needs_order.any() else None for x in (self._top_k, self._top_p))
    keys: Any = self._keys[at]
    return Request(keys, self._temperature[at], top_k, top_p, self._min_p[at], None)


def quotient(number: int, divisor: int) -> int:
  """Returns number / divisor, rounded up."""
  return -(-number // divisor)


def power_of_two(number: int, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `number` and `least`."""
  return max(least, 1 << (number - 1).bit_length())
