"""Bits per byte of the same text by gzip, xz, and a context model with Witten-Bell smoothing."""

import gzip
import lzma
from collections.abc import Sequence

import numpy as np

ORDER = 3


def references(training: Sequence[bytes], held_out: Sequence[bytes]) -> dict[str, float]:
  """Returns bits per byte of the held-out files.

  gzip and xz compress the held-out files, joined, without having seen the others. The context model
  counts the training files, and its counts stay fixed, as the parameters of a language model do.
  """
  joined = b"".join(held_out)
  bits = lambda compressed: 8 * len(compressed) / len(joined)
  return {
    "gzip": bits(gzip.compress(joined, 9, mtime=0)),
    "xz": bits(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)),
    f"Witten-Bell, order {ORDER}": witten_bell(training, held_out, ORDER),
  }


def witten_bell(training: Sequence[bytes], held_out: Sequence[bytes], order: int) -> float:
  """Returns bits per byte of a context model: mean of -log2 p over the held-out bytes.

      p_n(x | c) = (count(c x) + kinds(c) p_{n-1}(x | c')) / (count(c) + kinds(c))

  c are the n bytes before x, c' the last n - 1 of them, `kinds(c)` the number of different bytes
  that followed c. p_{-1} is 1/256, and p_n = p_{n-1} where c was never seen. Zero bytes stand in
  front of each document.

  Paper: I. Witten and T. Bell, "The zero-frequency problem", 1991, method C.
  """
  p = np.full(sum(map(len, held_out)), 1 / 256)
  for n in range(order + 1):
    p = _refined(p, _codes(training, n), _codes(held_out, n))
  return float(-np.log2(p).mean())


def _refined(p: np.ndarray, seen: np.ndarray, asked: np.ndarray) -> np.ndarray:
  """Returns p_n from p_{n-1} at the asked n-grams."""
  grams, counts = np.unique(seen, return_counts=True)
  found = np.minimum(np.searchsorted(grams, asked), len(grams) - 1)
  count = np.where(grams[found] == asked, counts[found], 0)
  contexts, context = grams >> np.uint64(8), asked >> np.uint64(8)
  first, last = (np.searchsorted(contexts, context, side) for side in ("left", "right"))
  before = np.concatenate([[0], np.cumsum(counts)])
  total, kinds = before[last] - before[first], last - first
  return np.where(total > 0, (count + kinds * p) / np.maximum(total + kinds, 1), p)


def _codes(documents: Sequence[bytes], order: int) -> np.ndarray:
  """Returns each byte of the documents with the `order` bytes before it, as one uint64."""
  padded = b"".join(bytes(order) + document for document in documents)
  joined = np.frombuffer(padded, np.uint8).astype(np.uint64)
  codes = np.zeros(len(joined) - order, np.uint64)
  for n in range(order + 1):
    codes = codes << np.uint64(8) | joined[n : len(joined) - order + n]
  # An n-gram that ends in a document's zero bytes predicts none of its bytes.
  lengths = np.array([len(document) for document in documents])
  starts = np.concatenate([[0], np.cumsum(lengths + order)[:-1]])
  inside = np.concatenate([np.arange(n) + start for n, start in zip(lengths, starts, strict=True)])
  return codes[inside]
