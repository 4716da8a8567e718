"""What a layer carries from call to call, and how the tokens of a call follow it.

A call may hold several documents (`segment_ids`), and a document may be split over calls. So a state remembers, beside what
the recurrence needs, which document its last token belonged to and how many tokens of it there were.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class LayerState(NamedTuple):
  """The state of one layer, a pytree of arrays with the batch in front; a part that a layer lacks is None.

  `memory` and `conv` are floats and differentiable. The next call continues the document of this state where it gives no
  `segment_ids`, where its first real token has the id `segment`, or where `segment` is -1; otherwise a new document begins
  there, and the state starts from zero.
  """

  memory: Any  # what the recurrence carries: [B HV K V], a tuple of such arrays, or a KV cache
  conv: Array | None  # [B W-1 channels]: the last inputs of the short convolution
  segment: Int[Array, "B"]  # int32: the id of the last real token; -1 before the first id is seen
  length: Int[Array, "B"]  # int32: tokens of that document so far


def check_state(state: LayerState | None, batch: int) -> None:
  """ValueError where this is no state, or one of another batch."""
  if state is None:
    return
  if not isinstance(state, LayerState):
    got = type(state).__name__
    raise ValueError(
      f"`state` must be a LayerState, from init_state({batch}) or an earlier call; got {got}."
    )
  rows = state.length.shape
  if rows != (batch,):
    raise ValueError(
      f"`state` must have B = {batch} rows to match `x`; got {rows}. Make it by init_state({batch})."
    )


class Documents(NamedTuple):
  """How the tokens of one call fall into documents, the first of which may have begun in an earlier call."""

  position: Int[
    Array, "B T"
  ]  # of each token in its document; of padding, that of the token before it
  carried: Int[Array, "B"]  # how many tokens of the call's first document came before the call
  segment: Int[Array, "B"]  # after the call
  length: Int[Array, "B"]  # after the call
  ids: (
    Int[Array, "B T"] | None
  )  # 0 for the carried document, 1, 2, ... for those that begin here, -1 for padding
  continues: Bool[Array, "B"] | None  # whether the first real token continues the carried document

  def only_real(self, x: Array) -> Array:
    """x [B T ...] with zeros at the padding, whatever stood there."""
    if self.ids is None:
      return x
    return jnp.where(
      (self.ids >= 0).reshape(self.ids.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)
    )

  def only_continued(self, state: Any) -> Any:
    """The arrays [B ...] of a state with zeros in the rows where a new document begins."""
    if self.continues is None:
      return state
    keep = self.continues
    return jax.tree.map(
      lambda s: jnp.where(keep.reshape(-1, *(1,) * (s.ndim - 1)), s, jnp.zeros((), s.dtype)), state
    )


def follow(
  state: LayerState | None, shape: tuple[int, int], segment_ids: Int[Array, "B T"] | None
) -> Documents:
  """Lays the [B T] tokens of a call behind a state (None: behind nothing)."""
  B, T = shape
  if T == 0:
    raise ValueError(
      "`x` must be [B T D] with at least one token; got T = 0. Leave the call out: it changes no state."
    )
  segment = jnp.full(B, -1, jnp.int32) if state is None else state.segment
  length = jnp.zeros(B, jnp.int32) if state is None else state.length
  if segment_ids is None:
    return Documents(
      length[:, None] + jnp.arange(T, dtype=jnp.int32), length, segment, length + T, None, None
    )

  real = segment_ids >= 0
  places = jnp.arange(T, dtype=jnp.int32)
  last_real = lax.cummax(
    jnp.where(real, places, -1), axis=1
  )  # the last real token up to each; -1 where none
  before = jnp.pad(last_real, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  id_before = jnp.where(
    before < 0, segment[:, None], jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  )
  begins = real & (id_before >= 0) & (segment_ids != id_before)
  run = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
  rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1  # of each real token among the real ones
  rank_of_start = lax.cummax(jnp.where(begins, rank, 0), axis=1)
  continues = ~jnp.any(begins & (rank == 0), axis=1)
  carried = jnp.where(continues, length, 0)
  position = rank - rank_of_start + jnp.where(run == 0, length[:, None], 0)

  last = last_real[:, -1:]
  at_last = lambda x, otherwise: jnp.where(
    last < 0, otherwise[:, None], jnp.take_along_axis(x, jnp.maximum(last, 0), axis=1)
  )[:, 0]
  return Documents(
    position=position,
    carried=carried,
    segment=at_last(segment_ids.astype(jnp.int32), segment),
    length=at_last(position + 1, length),
    ids=jnp.where(real, run, -1),
    continues=continues,
  )
