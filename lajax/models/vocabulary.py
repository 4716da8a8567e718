"""Check of the tokens that a model reads."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def check_vocabulary(tokens: Any, segment_ids: Any, vocab_size: int) -> None:
  """ValueError for a token outside the vocabulary, but at padding, where values can be seen."""
  if isinstance(tokens, Tracer) or isinstance(segment_ids, Tracer):
    return
  if isinstance(tokens, jax.Array) and not tokens.is_fully_addressable:
    return
  ids = np.asarray(tokens)
  outside = (ids < 0) | (ids >= vocab_size)
  if segment_ids is not None and outside.any():
    outside &= np.asarray(segment_ids) >= 0
  if outside.any():
    raise ValueError(
      f"`tokens` must be in 0 .. vocab_size - 1 = {vocab_size - 1}; got {ids[outside][0]} and "
      f"{int(outside.sum()) - 1} more outside. Mark padding by segment_ids of -1."
    )
