"""State that a layer carries from call to call, its checks, and how a call's tokens continue it.

A call may hold several documents (`segment_ids`), and a document may be split over calls. So a
state holds, beside the memory of the recurrence, the document of its last token and that document's
length.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from lajax._shapes import check_ids, check_ids_fit
from lajax.recurrence.documents import at_last_token, positions


class LayerState(NamedTuple):
  """State of one layer: a pytree of arrays [B ..]. A part that a layer lacks is None.

  The next call continues the document of this state in three cases: without `segment_ids`, where
  its first real token has the id `segment`, and where `segment` is -1. Otherwise that token begins
  a document, and memory and convolution start from zeros.

  `memory` and `conv` are floats and differentiable. NumPy arrays may stand in all parts.
  """

  memory: Any  # of the recurrence: [B HV K V], a tuple of such arrays, or the cache of attention
  conv: (
    Any  # last inputs of short convolutions, [B W-1 channels]: an array, or a dict by projection
  )
  segment: Int[Array, "B"]  # int32: id of the last real token; -1 before the first id
  length: Int[Array, "B"]  # int32: number of that document's tokens so far


def register_by_index(kind: type) -> None:
  """Registers a NamedTuple as a pytree whose paths are indices, with names in messages.

  Without it, `nnx.tabulate` takes a NamedTuple for a list, fails on the names of its parts, and
  leaves the classes that it was to describe unusable until the process ends.
  """

  class Key(jax.tree_util.SequenceKey):
    def __str__(self) -> str:
      return f".{kind._fields[self.idx]}"

  keys = [Key(n) for n in range(len(kind._fields))]
  jax.tree_util.register_pytree_with_keys(
    kind,
    lambda parts: (tuple(zip(keys, parts, strict=True)), None),
    lambda _, parts: kind(*parts),
    lambda parts: (tuple(parts), None),
  )


register_by_index(LayerState)


# --- checks ---------------------------------------------------------------------------------------


def check_state(state: Any, batch: int) -> LayerState:
  """Returns a state with its counters as int32; ValueError if it is none, or a counter is wrong.

  The layer's own checks of `memory` and `conv` follow: `check_arrays`.
  """
  if not isinstance(state, LayerState):
    got = type(state).__name__
    raise ValueError(
      f"`state` must be a LayerState, from init_state({batch}) or an earlier call; got {got}."
    )
  counters = {}
  for name in ("segment", "length"):
    given = getattr(state, name)
    check_array(f"state.{name}", given, "B", (batch,), "integer")
    counters[name] = jnp.asarray(given).astype(jnp.int32)
  return state._replace(**counters)


def check_arrays(name: str, given: Any, letters: Any, wanted: Any) -> Any:
  """Returns part of a state as JAX arrays; ValueError if it is not as `init_state` makes it.

  Args:
    name: what the messages call the part, "state.memory".
    given: an array, a tuple of arrays, a dict of arrays, or None.
    letters: axis letters of the array, "B HV K V"; for a tuple of arrays a tuple of them.
    wanted: what `init_state` gives: arrays or `jax.ShapeDtypeStruct`s.
  """
  if wanted is None:
    if given is not None:
      raise ValueError(
        f"`{name}` must be None for this layer; got {type(given).__name__}. "
        "Pass the state of an earlier call of this layer, or its init_state."
      )
    return None
  if isinstance(wanted, dict):
    if not isinstance(given, dict) or set(given) != set(wanted):
      got = sorted(given) if isinstance(given, dict) else _kind(given)
      raise ValueError(
        f"`{name}` must be a dict of arrays with the keys {', '.join(sorted(wanted))}; got {got}. "
        "Pass the state of an earlier call of this layer, or its init_state."
      )
    return {k: check_arrays(f"{name}[{k!r}]", given[k], letters, wanted[k]) for k in wanted}
  if isinstance(wanted, tuple):
    if not isinstance(given, tuple | list) or len(given) != len(wanted):
      raise ValueError(
        f"`{name}` must be a tuple of {len(wanted)} arrays; got {_kind(given)}. "
        "Pass the state of an earlier call of this layer, or its init_state."
      )
    parts = zip(given, letters, wanted, strict=True)
    return tuple(check_arrays(f"{name}[{n}]", *part) for n, part in enumerate(parts))
  return check_array(name, given, letters, wanted.shape, "floating")


def check_array(name: str, x: Any, letters: str, shape: tuple[int, ...], kind: str) -> Array:
  """Returns an array of a state; ValueError unless it has this shape and this kind of dtype."""
  dtype = getattr(x, "dtype", None)
  right_kind = dtype is not None and jnp.issubdtype(
    dtype, jnp.floating if kind == "floating" else jnp.integer
  )
  if right_kind and tuple(x.shape) == shape:
    return jnp.asarray(x)
  message = f"`{name}` must be [{letters}] = {shape} with {_article(kind)} dtype; got {_kind(x)}"
  if right_kind and len(x.shape) == len(shape):
    axes = zip(letters.split(), shape, x.shape, strict=True)
    differ = [letter for letter, wanted, got in axes if wanted != got]
    message += f": {'axis' if len(differ) == 1 else 'axes'} {' and '.join(differ)}"
    message += " differs" if len(differ) == 1 else " differ"
  raise ValueError(
    f"{message}. Pass the state of an earlier call of this layer, or init_state({shape[0]})."
  )


def _article(kind: str) -> str:
  return f"an {kind}" if kind == "integer" else f"a {kind}"


def _kind(x: Any) -> str:
  """An array's shape and dtype, a tuple's length, or the type of anything else."""
  if x is None:
    return "None"
  if hasattr(x, "dtype") and hasattr(x, "shape"):
    return f"{tuple(x.shape)} of {x.dtype}"
  return f"{type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__


# --- documents ------------------------------------------------------------------------------------


class CallDocuments(NamedTuple):
  """The documents of one call's tokens, the first of which may have begun in an earlier call."""

  position: Int[Array, "B T"]  # of a token in its document; of padding, that of the token before it
  carried: Int[Array, "B"]  # tokens of the call's first document that came before the call
  segment: Int[Array, "B"]  # after the call
  length: Int[Array, "B"]  # after the call
  ids: (
    Int[Array, "B T"] | None
  )  # 0: the carried document; 1, 2, ..: those that begin here; -1: padding
  continues: Bool[Array, "B"] | None  # whether the first real token continues the carried document

  def blank_padding(self, x: Array) -> Array:
    """Returns x [B T ...] with zeros at the padding, whatever x holds there."""
    if self.ids is None:
      return x
    is_token = (self.ids >= 0).reshape(self.ids.shape + (1,) * (x.ndim - 2))
    return jnp.where(is_token, x, jnp.zeros((), x.dtype))

  def continued(self, state: Any) -> Any:
    """Returns arrays [B ...] of a state, with zeros in rows where the call begins a document."""
    return state if self.continues is None else kept_rows(state, self.continues)


register_by_index(CallDocuments)


def kept_rows(state: Any, keep: Bool[Array, "B"]) -> Any:
  """Returns arrays [B ...] with zeros in the rows that are not kept."""
  select = lambda s: jnp.where(keep.reshape(-1, *(1,) * (s.ndim - 1)), s, jnp.zeros((), s.dtype))
  return jax.tree.map(select, state)


def follow(
  state: LayerState | None, shape: tuple[int, int], segment_ids: Int[Array, "B T"] | None
) -> CallDocuments:
  """Returns the documents of a call's [B T] tokens behind a state; None for the first call."""
  B, T = shape
  if T == 0:
    raise ValueError(
      "`x` must be [B T D] with at least one token; got T = 0. "
      "Leave the call out: it changes no state."
    )
  segment = jnp.full(B, -1, jnp.int32) if state is None else state.segment
  length = jnp.zeros(B, jnp.int32) if state is None else state.length
  place = np.arange(T, dtype=np.int32)[None]
  if segment_ids is None:
    return CallDocuments(length[:, None] + place, length, segment, length + T, None, None)

  check_ids_fit(segment_ids)
  ids = jnp.asarray(check_ids(segment_ids)).astype(jnp.int32)
  is_token = ids >= 0
  last_token = lax.cummax(jnp.where(is_token, place, -1), axis=1)  # up to each place; -1: none
  before = jnp.pad(last_token, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  id_before = jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1)
  id_before = jnp.where(before < 0, segment[:, None], id_before)
  begins = is_token & (id_before >= 0) & (ids != id_before)
  document = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
  position = positions(document, is_token, length)
  continues = ~jnp.any(begins & (before < 0), axis=1)
  return CallDocuments(
    position=position,
    carried=jnp.where(continues, length, 0),
    segment=at_last_token(segment, ids, is_token),
    length=at_last_token(length, position + 1, is_token),
    ids=jnp.where(is_token, document, -1),
    continues=continues,
  )
