"""Prefixes of prompts whose states are kept: a radix tree, least recently used out first."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from lajax.serve.pages import Pages


class Prefix:
  """A prompt's first pieces, and the state after them.

  Attributes:
    parent: the prefix without the last piece; None for the empty one.
    key: tokens of the last piece, as bytes.
    length: tokens in all.
    arrays: of the state, [.. 1 ..]; None for paged ones.
    pages: of the tokens, in their order. No request writes to them.
    children: longer prefixes by their last piece.
  """

  def __init__(self, parent: "Prefix | None", key: bytes, length: int, arrays: list, pages: list):
    self.parent, self.key, self.length = parent, key, length
    self.arrays, self.pages = arrays, pages
    self.children: dict[bytes, Prefix] = {}

  def line(self) -> Iterator["Prefix"]:
    """Yields this prefix and all shorter ones but the empty one, the longest first."""
    prefix = self
    while prefix.parent is not None:
      yield prefix
      prefix = prefix.parent


class PrefixCache:
  """States of prefixes whose lengths are multiples of a piece.

  A prefix is looked up piece by piece in dictionaries of the pieces' tokens. A dictionary hashes
  them and compares them too, so prefixes whose hashes collide are never taken for each other.

  Args:
    piece: tokens.
    budget: bytes of the states and of the pages that prefixes hold; 0 for no cache.
    pages: of the pool.
    page_bytes: bytes of one page.
  """

  def __init__(self, piece: int, budget: int, pages: Pages, page_bytes: int):
    self.piece, self.budget, self.page_bytes = piece, budget, page_bytes
    self.root = Prefix(None, b"", 0, [], [])
    self._pages = pages
    self._held: Counter[int] = Counter()  # pages, by the number of prefixes that hold them
    self.state_bytes = 0  # without pages
    self._used: OrderedDict[Prefix, None] = OrderedDict()  # a prefix stands before its shorter ones

  def __len__(self) -> int:
    return len(self._used)

  @property
  def nbytes(self) -> int:
    """Bytes of all states, and of the pages that prefixes hold; a shared page counts once."""
    return self.state_bytes + self.page_bytes * len(self._held)

  def longest(self, tokens: Sequence[int]) -> Prefix:
    """Returns the longest known prefix of some tokens; the empty one if none is known."""
    found = self.root
    while found.length + self.piece <= len(tokens):
      after = found.children.get(self._key(tokens, found.length))
      if after is None:
        break
      found = after
    for prefix in found.line():
      self._used.move_to_end(prefix)
    return found

  def knows(self, prefix: Prefix) -> bool:
    """Tells if a prefix is still kept; the empty one always is."""
    return prefix is self.root or prefix in self._used

  def child(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix | None:
    """Returns the prefix that is one piece of `tokens` longer, if it is known."""
    return prefix.children.get(self._key(tokens, prefix.length))

  def add(self, parent: Prefix, tokens: Sequence[int], arrays: list, pages: list[int]) -> Prefix:
    """Keeps the state behind one more piece of `tokens`, and lets others go for it.

    The cache becomes a holder of the pages.
    """
    key = self._key(tokens, parent.length)
    prefix = Prefix(parent, key, parent.length + self.piece, arrays, pages)
    parent.children[key] = prefix
    self._pages.share(pages)
    self._held.update(pages)
    self.state_bytes += _nbytes(arrays)
    self._used[prefix] = None
    for shorter in parent.line():
      self._used.move_to_end(shorter)
    while self.nbytes > self.budget and self.drop_oldest():
      pass
    return prefix

  def drop_oldest(self) -> bool:
    """Forgets the prefix whose last use is longest ago; False if there is none."""
    if not self._used:
      return False
    prefix, _ = self._used.popitem(last=False)
    assert prefix.parent is not None
    assert not prefix.children
    del prefix.parent.children[prefix.key]
    self.state_bytes -= _nbytes(prefix.arrays)
    for page in prefix.pages:
      self._held[page] -= 1
      if not self._held[page]:
        del self._held[page]
    self._pages.release(prefix.pages)
    return True

  def make_room(self, count: int) -> bool:
    """Tells if so many pages are free, after prefixes have given up theirs where that helps."""
    given_up = sum(self._pages.holders(page) == n for page, n in self._held.items())
    if self._pages.free + given_up < count:
      return False
    while self._pages.free < count:
      self.drop_oldest()
    return True

  def _key(self, tokens: Sequence[int], start: int) -> bytes:
    return np.asarray(tokens[start : start + self.piece], np.int32).tobytes()


def _nbytes(arrays: list) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(arrays))
