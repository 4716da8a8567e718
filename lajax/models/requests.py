"""Prompts and options of `lajax.generate`: their checks, and the arrays made of them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lajax._shapes import INT32, check, check_given, check_ids, check_key, check_number, check_whole

UNNAMED = -2  # a document whose id the state decides
EAGER = "Call lajax.generate outside jit: it compiles its own loop."


class Prompts(NamedTuple):
  """Prompts of B rows, whose tokens begin at the left; L are those of the longest row."""

  tokens: Int[np.ndarray, "B L"]  # int32; 0 at padding
  ids: Int[np.ndarray, "B L"]  # int32, documents; -1 at padding
  lengths: Int[np.ndarray, "B"]

  @property
  def last(self) -> Int[np.ndarray, "B"]:
    """Last token of each row: the loop over new tokens begins with it."""
    return self.tokens[np.arange(len(self.lengths)), self.lengths - 1]

  @property
  def document(self) -> Int[np.ndarray, "B"]:
    """Document of each row's last token."""
    return self.ids[np.arange(len(self.lengths)), self.lengths - 1]

  def pieces(self, piece: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tokens and documents [B piece], padded behind each row, without its last token."""
    place = np.arange(self.tokens.shape[1])
    ids = np.where(place < self.lengths[:, None] - 1, self.ids, -1)
    for start in range(0, int(self.lengths.max()) - 1, piece):
      part = slice(start, start + piece)
      wide = ((0, 0), (0, piece - self.tokens[:, part].shape[1]))
      yield np.pad(self.tokens[:, part], wide), np.pad(ids[:, part], wide, constant_values=-1)

  def longest_document(self, carried: np.ndarray, max_tokens: int) -> int:
    """Tokens that the model reads of the longest document.

    Args:
      carried: [B], tokens that a state holds of each row's first document.
      max_tokens: new tokens of each row; the last one is not read.
    """
    longest = 0
    for ids, length, before in zip(self.ids, self.lengths, carried, strict=True):
      begins = np.flatnonzero(np.diff(ids[:length])) + 1
      counts = np.diff(np.concatenate([[0], begins, [length]]))
      counts[0] += before
      counts[-1] += max_tokens - 1
      longest = max(longest, int(counts.max()))
    return longest


class Request(NamedTuple):
  """Sampling options of each row; None where an option is left out of the program."""

  keys: Array | None  # [B]
  temperature: Float[np.ndarray, "B"] | None
  top_k: Int[np.ndarray, "B"] | None
  top_p: Float[np.ndarray, "B"] | None
  min_p: Float[np.ndarray, "B"] | None
  stop: Int[np.ndarray, "N"] | None  # padded by -1, which is no token


# --- prompts --------------------------------------------------------------------------------------


def prompts_of(prompt: Any, segment_ids: Any, vocab_size: int | None) -> Prompts:
  """Returns the tokens of a prompt; their documents are UNNAMED without `segment_ids`.

  Raises:
    ValueError: the prompt is neither [B T] nor lists of integers, a row has no token, or a token is
      not in the vocabulary.
  """
  ids = None
  if isinstance(prompt, list | tuple):
    if segment_ids is not None:
      raise ValueError(
        "`segment_ids` goes with a prompt [B T]; got a list of prompts, which needs none: leave it "
        "out."
      )
    rows = [_row(n, row) for n, row in enumerate(prompt)]
  else:
    check_given(prompt=(prompt, "B T"))
    sizes = check(prompt=(prompt, "B T", "int"), segment_ids=(segment_ids, "B T", "int"))
    if isinstance(prompt, Tracer) or isinstance(segment_ids, Tracer):
      name = "prompt" if isinstance(prompt, Tracer) else "segment_ids"
      raise ValueError(f"`{name}` must have values that can be seen; got a traced array. {EAGER}")
    rows = list(np.asarray(prompt))
    if segment_ids is not None:
      ids = np.asarray(check_ids(segment_ids)).reshape(sizes.B, sizes.T)
      rows = [row[i >= 0] for row, i in zip(rows, ids, strict=True)]
      ids = [i[i >= 0] for i in ids]
  if not rows:
    raise ValueError("`prompt` must have at least one row; got none.")
  for n, row in enumerate(rows):
    _check_tokens(n, row, vocab_size)
  lengths = np.array([len(row) for row in rows])
  tokens = np.zeros((len(rows), lengths.max()), np.int32)
  documents = np.full(tokens.shape, -1, np.int32)
  for n, row in enumerate(rows):
    tokens[n, : len(row)] = row
    documents[n, : len(row)] = UNNAMED if ids is None else ids[n]
  return Prompts(tokens, documents, lengths)


def _row(n: int, row: Any) -> np.ndarray:
  """One prompt of a list as an array of integers."""
  try:
    array = np.asarray(row)
  except ValueError:  # lists of different lengths
    array = np.zeros((), object)
  if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
    got = type(row).__name__ if array.ndim != 1 else f"one of {array.dtype}"
    raise ValueError(
      f"`prompt` must be integers [B T] or a list of lists of integers; got {got} for row {n}."
    )
  return array


def _check_tokens(n: int, row: np.ndarray, vocab_size: int | None) -> None:
  if not row.size:
    raise ValueError(
      f"`prompt` must have at least one token in each row; got none in row {n}. Begin it with the "
      "token that begins a document."
    )
  limit = INT32.max if vocab_size is None else vocab_size - 1
  wrong = row[(row < 0) | (row > limit)]
  if wrong.size:
    raise ValueError(
      f"`prompt` must hold tokens from 0 to {limit}; got {wrong[0]} in row {n}. Mark padding by "
      "segment_ids, as lajax.segment_ids(mask=prompt >= 0)."
    )


# --- options --------------------------------------------------------------------------------------


def request_of(B: int, *, temperature, top_k, top_p, min_p, stop_tokens, key) -> Request:
  """Returns what is asked of B rows; ValueError for an option out of its range."""
  temperature = _per_row("temperature", temperature, B, lambda n, x: check_number(n, x, 0.0))
  top_k = top_k if top_k is None else _per_row("top_k", top_k, B, lambda n, x: check_whole(n, x))
  top_p = (
    top_p
    if top_p is None
    else _per_row("top_p", top_p, B, lambda n, x: check_number(n, x, high=1, above=0))
  )
  min_p = (
    min_p if min_p is None else _per_row("min_p", min_p, B, lambda n, x: check_number(n, x, 0, 1))
  )
  stop = _stop(stop_tokens)
  keys = _keys(key, B)
  if not temperature.any():  # the most likely token passes every filter
    return Request(None, None, None, None, None, stop)
  if keys is None:
    raise ValueError(
      "`key` must be a JAX random key where a temperature is above 0; got None. Make one by "
      "jax.random.key(0)."
    )
  return Request(keys, temperature, top_k, top_p, min_p, stop)


def _per_row(name: str, value: Any, B: int, checked) -> np.ndarray:
  """A number, or an array [B] of them, as an array [B]."""
  if not isinstance(value, jax.Array | np.ndarray) or isinstance(value, Tracer) or not value.ndim:
    values = [checked(name, value)] * B
  else:
    if value.shape != (B,):
      raise ValueError(
        f"`{name}` must be one number or [B] = ({B},), one per row; got shape {value.shape}."
      )
    values = [checked(f"{name}[{n}]", x) for n, x in enumerate(np.asarray(value))]
  return np.array(values, np.float32 if isinstance(values[0], float) else np.int32)


def _stop(tokens: Any) -> np.ndarray | None:
  """Stop tokens, padded to a multiple of 8: their number alone compiles nothing."""
  kinds = (Sequence, set, frozenset, np.ndarray, jax.Array)
  if (
    isinstance(tokens, str | bytes)
    or not isinstance(tokens, kinds)
    or getattr(tokens, "ndim", 1) != 1
  ):
    got = type(tokens).__name__
    raise ValueError(f"`stop_tokens` must be a sequence of tokens, as [2]; got {got}.")
  found = sorted({check_whole(f"stop_tokens[{n}]", x, 0) for n, x in enumerate(tokens)})
  if not found:
    return None
  return np.array(found + [-1] * (8 * math.ceil(len(found) / 8) - len(found)), np.int32)


def _keys(key: Any, B: int) -> Array | None:
  """One key per row."""
  if key is None:
    return None
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  if shape is not None and len(shape) == (1 if typed else 2) and shape[0] == B:
    check_key("key", key[0])
    return key
  check_key("key", key)
  return _fold_rows(key, np.arange(B, dtype=np.uint32))


@jax.jit
def _fold_rows(key, rows):
  return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
