"""Layouts of packed rows: segment ids with documents and padding in every kind of arrangement."""

import functools
import itertools

import numpy as np

# Pieces of a row, (id, tokens); the last piece takes the remaining tokens.
LAYOUTS = {
  "one": [(0, None)],
  "documents": [(0, 1), (1, 16), (2, 64), (3, None)],
  "padded_right": [(0, 30), (1, 33), (-1, None)],
  "padded_left": [(-1, 5), (3, 40), (4, None)],
  # padding within a document and between two
  "padded_inside": [(0, 10), (-1, 7), (0, 20), (-2, 1), (1, 30), (-1, 3), (2, None)],
  # ids that jump: documents 1 to 4 are empty
  "repeated_boundaries": [(0, 20), (5, 44), (9, 1), (10, 1), (40, None)],
  # every change begins a new document, also a change to an earlier id
  "returning": [(0, 17), (1, 30), (0, None)],
  "singles": [(n, 1) for n in range(1000)],
  "only_padding": [(-1, None)],
}


def layout(name: str, T: int) -> np.ndarray:
  """Segment ids of one row of T tokens."""
  return np.concatenate([np.full(T if n is None else n, i, np.int32) for i, n in LAYOUTS[name]])[:T]


@functools.cache
def packed_rows(rows: int, T: int) -> np.ndarray:
  """Segment ids [rows T]: one layout per row, in turn."""
  names = itertools.islice(itertools.cycle(LAYOUTS), rows)
  return np.stack([layout(name, T) for name in names])


def documents(ids: np.ndarray) -> list[np.ndarray]:
  """Positions of the tokens of each document of one row."""
  tokens = np.flatnonzero(ids >= 0)
  pieces = np.split(tokens, np.flatnonzero(np.diff(ids[tokens])) + 1)
  return [piece for piece in pieces if len(piece)]
