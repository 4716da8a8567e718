"""Pages of a pool: which are free, and how many requests and prefixes hold each of the others."""

from collections.abc import Iterable

import numpy as np


class Pages:
  """Counts of the holders of each page.

  Args:
    count: number of pages.
  """

  def __init__(self, count: int):
    self.count = count
    self._free = list(range(count))[::-1]
    self._holders = np.zeros(count, np.int64)

  @property
  def free(self) -> int:
    """Number of pages that nobody holds."""
    return len(self._free)

  def holders(self, page: int) -> int:
    """Number of requests and prefixes that hold a page."""
    return int(self._holders[page])

  def take(self, count: int) -> list[int]:
    """Returns free pages, with one holder each."""
    assert count <= self.free
    taken = [self._free.pop() for _ in range(count)]
    self._holders[taken] = 1
    return taken

  def share(self, pages: Iterable[int]) -> None:
    """Adds a holder to each page."""
    for page in pages:
      assert self._holders[page] > 0
      self._holders[page] += 1

  def release(self, pages: Iterable[int]) -> None:
    """Takes a holder from each page; a page without holders is free."""
    for page in pages:
      self._holders[page] -= 1
      assert self._holders[page] >= 0
      if not self._holders[page]:
        self._free.append(page)
