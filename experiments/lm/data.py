"""Text as packed documents: files, the split into training and held-out files, rows of tokens.

A token is an int32 that holds a byte and the three bytes before it in its document, so that an
embedding of n-grams needs no state of its own: bits 0 to 7 are the byte, bits 8 to 15 the byte
before. Byte 0 stands in front of every document, and the first byte is predicted from it.
"""

import dataclasses
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

START = b"\0"  # in front of every document
HELD_OUT = 20  # every 20th file is held out
LEFT_OUT = ("test", "tests", "site-packages")  # folders in that of the standard library


class Rows(NamedTuple):
  """Packed documents: `inputs` are tokens, `targets` the bytes that follow them."""

  inputs: Any  # int32 [B T]
  targets: Any  # int32 [B T]
  documents: Any  # int32 [B T], the `segment_ids`; -1 at padding


@dataclasses.dataclass(frozen=True)
class Text:
  """The bytes of each training file and of each held-out file."""

  training: tuple[bytes, ...]
  held_out: tuple[bytes, ...]


def standard_library() -> list[pathlib.Path]:
  """Returns the sources of Python's standard library without its tests, sorted by path."""
  found = []
  for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
    folders[:] = [name for name in folders if name not in LEFT_OUT]  # os.walk enters the others
    found += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
  return sorted(found)


def files_of(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
  """Returns the files among these paths and inside the folders among them, sorted by path.

  Raises:
    ValueError: a path does not exist.
  """
  missing = [path for path in paths if not path.exists()]
  if missing:
    raise ValueError(f"--text {missing[0]}: no such file or folder")
  found = [path for path in paths if path.is_file()]
  for folder in paths:
    found += [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
  return sorted(set(found))


def split(paths: Sequence[pathlib.Path]) -> Text:
  """Reads files; each 20th of them is held out. Empty ones count and are then left out.

  Raises:
    ValueError: there are no bytes to train on or to hold out, or a file cannot be read.
  """
  try:
    documents = [path.read_bytes() for path in paths]
  except OSError as error:
    raise ValueError(f"--text {error.filename}: cannot read this file: {error.strerror}") from None
  held_out = tuple(filter(None, documents[HELD_OUT - 1 :: HELD_OUT]))
  training = tuple(data for n, data in enumerate(documents, 1) if n % HELD_OUT and data)
  if not held_out or not training:
    raise ValueError(
      f"--text needs at least {HELD_OUT} files, since each {HELD_OUT}th is held out, and bytes in "
      f"both parts; got {len(documents)} files. Split large files, or name more of them."
    )
  return Text(training, held_out)


def tokens_of(document: np.ndarray) -> np.ndarray:
  """Returns the tokens of a document: each byte with the three before it; zeros before the first.

  Args:
    document: uint8 [n].
  """
  padded = np.pad(document.astype(np.int32), (3, 0))
  n = len(document)
  # The topmost bit would make the int32 negative, and ASCII does not use it.
  oldest = padded[:n] & 0x7F
  return padded[3:] | padded[2 : n + 2] << 8 | padded[1 : n + 1] << 16 | oldest << 24


def pack(documents: Sequence[bytes], length: int) -> Rows:
  """Packs documents one behind the other into rows of `length` tokens, cut where a row ends."""
  inputs, targets, ids = [], [], []
  for n, document in enumerate(documents):
    bytes_after_start = np.frombuffer(START + document, np.uint8)
    inputs.append(tokens_of(bytes_after_start)[:-1])
    targets.append(bytes_after_start[1:].astype(np.int32))
    ids.append(np.full(len(document), n, np.int32))
  missing = -sum(map(len, ids)) % length
  rows = lambda parts, fill: np.pad(
    np.concatenate(parts), (0, missing), constant_values=fill
  ).reshape(-1, length)
  return Rows(rows(inputs, 0), rows(targets, 0), rows(ids, -1))


@dataclasses.dataclass
class Batches:
  """Batches of training: `at(step)` depends on the seed and the step alone.

  Each epoch packs the documents in an order of its own, and draws its rows in random order.
  """

  documents: Sequence[bytes]
  batch: int
  length: int
  seed: int

  def __post_init__(self):
    total = sum(map(len, self.documents))
    self.steps_per_epoch = max(1, total // (self.batch * self.length))
    self.epoch = -1

  def at(self, step: int) -> Rows:
    """Returns the batch of a step."""
    epoch, place = divmod(step, self.steps_per_epoch)
    if epoch != self.epoch:
      random = np.random.default_rng((self.seed, epoch))
      order = random.permutation(len(self.documents))
      rows = pack([self.documents[n] for n in order], self.length)
      order = random.permutation(len(rows.inputs))
      self.rows, self.epoch = Rows(*(x[order] for x in rows)), epoch
    chosen = np.arange(place * self.batch, (place + 1) * self.batch)
    return Rows(*(x.take(chosen, axis=0, mode="wrap") for x in self.rows))


def batches_of(rows: Rows, batch: int) -> Iterator[Rows]:
  """Yields all rows in batches of one size; the last one is filled with padding."""
  for start in range(0, len(rows.inputs), batch):
    part = Rows(*(x[start : start + batch] for x in rows))
    missing = ((0, batch - len(part.inputs)), (0, 0))
    yield Rows(
      np.pad(part.inputs, missing),
      np.pad(part.targets, missing),
      np.pad(part.documents, missing, constant_values=-1),
    )
