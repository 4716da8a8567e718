"""Ids of packed documents from lengths or masks, and which tokens have a target."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from lajax import _shapes
from lajax._meshes import laid_out


def segment_ids(
  lengths: Int[Array, "B"] | Int[Array, "B N"] | None = None,
  mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
  length: int | None = None,
) -> Int[Array, "B T"]:
  """Document ids of padded or packed rows, as every op and layer takes them.

      lajax.segment_ids(lengths=[2, 3])           -> [[0, 0, -1], [0, 0, 0]]
      lajax.segment_ids(lengths=[[1, 2], [3, 0]]) -> [[0, 1, 1], [0, 0, 0]]
      lajax.segment_ids(mask=[[False, True]])     -> [[-1, 0]]

  Args:
    lengths: [B], the number of tokens in each row, padding behind them; or [B N], the numbers of
      tokens in N documents that lie one behind the other. Lists of numbers will do.
    mask: [B T], True (or 1) for a token and False (or 0) for padding, wherever it stands: left,
      right or between. Give either `lengths` or `mask`.
    length: T with `lengths`; None for that of the longest row, which must be known (not traced).

  Returns:
    [B T] int32: 0 for the first document of a row, 1 for the next; -1 for padding.

  Raises:
    ValueError: both or none of `lengths` and `mask` are given, or one has the wrong rank, dtype or
      values.
  """
  if (lengths is None) == (mask is None):
    raise ValueError(
      f"give either `lengths` or `mask`; got {'none' if lengths is None else 'both'} of the two."
    )
  length = _shapes.check_positive("length", length)
  if mask is not None:
    return _ids_of_mask(mask, length)
  return _ids_of_lengths(lengths, length)


def _ids_of_lengths(lengths, length: int | None) -> Int[Array, "B T"]:
  lengths = _whole_numbers("lengths", lengths, (1, 2), "[B] or [B N]")
  wide = lengths.dtype in (jnp.int64, jnp.uint64)
  dtype = jax.dtypes.canonicalize_dtype(jnp.int64 if wide else jnp.int32)
  ends = jnp.cumsum(lengths.reshape(len(lengths), -1), axis=1, dtype=dtype)
  if not isinstance(lengths, Tracer):
    if lengths.size and int(lengths.min()) < 0:
      raise ValueError(f"`lengths` must be at least 0; got {int(lengths.min())}.")
    longest = int(ends.max()) if ends.size else 0
    if length is not None and longest > length:
      raise ValueError(
        f"`length` must be at least {longest}, the tokens of the longest row; got {length}."
      )
    length = longest if length is None else length
  if length is None:
    raise ValueError(
      "`length` must be T where `lengths` is traced, as the result's shape; got None."
    )
  position = jnp.arange(length, dtype=ends.dtype)
  document = (ends[:, None, :] <= position[None, :, None]).sum(-1, dtype=jnp.int32)
  return jnp.where(position[None] < ends[:, -1:], document, -1)


def _ids_of_mask(mask, length: int | None) -> Int[Array, "B T"]:
  if length is not None:
    raise ValueError("`length` goes with `lengths`; a mask [B T] has its own T.")
  mask = _whole_numbers("mask", mask, (2,), "[B T]", also_bool=True)
  if not isinstance(mask, Tracer) and mask.dtype != bool and mask.size:
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.size:
      raise ValueError(
        f"`mask` must be True (or 1) for tokens and False (or 0) for padding; got {int(wrong[0])}. "
        "Ids of documents are passed as `segment_ids` as they are."
      )
  return jnp.where(mask.astype(bool), 0, -1).astype(jnp.int32)


def _whole_numbers(name: str, x, ranks: tuple[int, ...], letters: str, also_bool: bool = False):
  """Returns an array of integers (or booleans) of one of these ranks; ValueError else."""
  if isinstance(x, list | tuple):
    try:
      x = np.asarray(x)
    except ValueError as error:
      raise ValueError(f"`{name}` must be {letters}; got rows of different lengths.") from error
  kinds = "whole numbers or booleans" if also_bool else "whole numbers"
  dtype = getattr(x, "dtype", None)
  right = dtype is not None and (
    jnp.issubdtype(dtype, jnp.integer) or (also_bool and jnp.issubdtype(dtype, jnp.bool_))
  )
  if not right or not isinstance(x, jax.Array | np.ndarray):
    got = type(x).__name__ if dtype is None else str(dtype)
    raise ValueError(f"`{name}` must be an array {letters} of {kinds}; got {got}.")
  if x.ndim not in ranks:
    raise ValueError(f"`{name}` must be {letters}; got rank {x.ndim}, shape {tuple(x.shape)}.")
  return x if isinstance(x, Tracer) else np.asarray(x)


def loss_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Marks the tokens whose target, the next token, is a real token of the same document.

      loss = jnp.where(mask, cross_entropy(logits, targets), 0).sum() / mask.sum()

  with targets = jnp.roll(tokens, -1, axis=1). The last token of a document has no target, nor has
  padding.

  Args:
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding. See
      `lajax.segment_ids`.

  Returns:
    [B T] booleans.

  Raises:
    ValueError: `segment_ids` has the wrong rank or dtype, or an id that does not fit 32 bits.
  """
  _shapes.check_given(segment_ids=(segment_ids, "B T"))
  _shapes.check(segment_ids=(segment_ids, "B T", "int"))
  return _has_target(_shapes.check_ids(segment_ids))


@jax.jit
@laid_out("B T", ids="B T")
def _has_target(ids):
  same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
  return jnp.concatenate([same, jnp.zeros_like(ids[:, :1], bool)], axis=1)
