"""The cache of tokens that the layers of softmax attention carry: one place a token, a ring where there is a window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from lajax._shapes import check_positive
from lajax.layers.mixer import Mixer
from lajax.layers.state import Documents, LayerState, check_arrays

Cache = tuple[Array, ...]  # each [B S HK ..]


class Seen(NamedTuple):
  """What the tokens of a call may read behind a cache, and where it stands: S keys for T queries."""

  arrays: Cache  # each [B S HK ..]: the cache and the call's tokens
  position: Int[Array, "B S"]  # in the document; < 0 where nothing stands
  segment: Int[Array, "B S"]  # -1: to be read by nobody
  q_segment: Int[Array, "B T"]
  lost: Bool[Array, "B T"] | None  # the tokens of documents that the cache did not hold
  cache: Cache  # after the call

  def only_kept(self, o: Array) -> Array:
    """o [B T ..] with NaN where a token could not see its whole document."""
    return o if self.lost is None else jnp.where(self.lost[..., None, None], jnp.nan, o)


class CachedMixer(Mixer):
  """A mixer whose memory is the tokens of the current document: arrays [B S HK ..], S = `max_length` or a smaller `window`.

  A subclass sets `max_length`, `window` and `places`: what one token keeps in each array, its shape [HK ..] and its dtype.
  """

  max_length: int
  window: int | None = None

  @property
  def places(self) -> tuple[tuple[tuple[int, ...], jnp.dtype], ...]:
    raise NotImplementedError

  @property
  def cache_dtype(self) -> jnp.dtype:
    return jnp.dtype(self.dtype or self.param_dtype)

  def init_state(self, batch: int, max_length: int | None = None, *, dtype=None) -> LayerState:
    """An empty cache for documents of up to `max_length` tokens (None: the layer's own), or of any length in a window."""
    check_positive("max_length", max_length)
    state = super().init_state(batch, dtype=dtype)
    return (
      state if max_length is None else state._replace(memory=self.empty_cache(batch, max_length))
    )

  def init_memory(self, batch: int, dtype) -> Cache:
    return self.empty_cache(batch, self.max_length)

  def check_memory(self, memory, batch: int) -> Cache:
    """Returns the cache as JAX arrays; ValueError if it is not this layer's. Its length S is free."""
    length = memory[0].shape[1] if isinstance(memory, tuple) and np.ndim(memory[0]) > 1 else 0
    shapes = [(batch, length, *shape) for shape, _ in self.places]
    wanted = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return check_arrays("state.memory", memory, ("B S HK D",) * len(wanted), wanted)

  def empty_cache(self, batch: int, max_length: int) -> Cache:
    size = max_length if self.window is None else min(max_length, self.window)
    return tuple(jnp.zeros((batch, size, *shape), dtype) for shape, dtype in self.places)

  def begin(self, new: Cache, documents: Documents) -> Cache:
    """The cache after a first call: as long as that call, if `max_length` is less."""
    B, T = documents.position.shape
    return _write(self.empty_cache(B, max(T, self.max_length)), new, documents)

  def extend(self, cache: Cache, new: Cache, documents: Documents) -> Seen:
    """The tokens of a call behind a cache.

    Where the cache is full and the window does not allow for forgetting, ValueError; under jit, where the length cannot be
    seen, such tokens are `lost`.
    """
    B, T = documents.position.shape
    capacity = cache[0].shape[1]
    bounded = self.window is None or capacity < self.window
    if bounded:
      _check_room(documents.length, capacity)
    lost = (
      (documents.position >= capacity) & (documents.length > capacity)[:, None] if bounded else None
    )
    now = jnp.zeros((B, T), jnp.int32) if documents.ids is None else documents.ids
    written = _write(cache, new, documents)
    if T == 1:  # the new token stands in the cache, in the place of one that it does not read
      position = _positions(documents.length, capacity)
      return Seen(written, position, jnp.where(position < 0, -1, now), now, lost, written)
    arrays = tuple(jnp.concatenate([old, x], axis=1) for old, x in zip(cache, new, strict=True))
    before = _positions(documents.carried, capacity)
    position = jnp.concatenate([before, documents.position], axis=1)
    segment = jnp.concatenate([jnp.where(before < 0, -1, 0), now], axis=1)
    return Seen(arrays, position, segment, now, lost, written)


def _positions(count: Int[Array, "B"], capacity: int) -> Int[Array, "B S"]:
  """Which token of the document stands at each place of a ring that `count` tokens were written to; < 0: none."""
  last = count[:, None] - 1
  return last - (last - jnp.arange(capacity, dtype=jnp.int32)) % capacity


def _write(cache: Cache, new: Cache, documents: Documents) -> Cache:
  """The cache with the tokens of the call's last document; the documents before it are over."""
  B, capacity = cache[0].shape[:2]
  keep = documents.position >= documents.length[:, None] - capacity
  if documents.ids is not None:
    current = documents.ids.max(axis=1, keepdims=True)
    keep &= (documents.ids >= 0) & (documents.ids == current)
    cache = tuple(jnp.where((current > 0)[..., None, None], 0, c) for c in cache)
  places = jnp.where(keep, documents.position % capacity, capacity)
  rows = jnp.arange(B)[:, None]
  return tuple(
    c.at[rows, places].set(x.astype(c.dtype), mode="drop") for c, x in zip(cache, new, strict=True)
  )


def _check_room(length: Int[Array, "B"], capacity: int) -> None:
  if isinstance(length, Tracer) or not length.size:
    return
  longest = int(length.max())
  if longest > capacity:
    raise ValueError(
      f"the cache of {capacity} tokens is full: a document would have {longest}. "
      f"Make the first state by init_state(batch, max_length={longest}), or give the layer a larger max_length or a window."
    )
