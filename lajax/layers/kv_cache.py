"""Cache of a document's tokens, as the layers of softmax attention carry it.

A cache is a tuple of arrays [B S HK ..] with one place per token. Without a window, S is the
longest document that fits. With a window of at most S tokens the places are a ring: token p of a
document stands at place p mod S, and the oldest token gives way.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import bits_of_half, promoted
from lajax._shapes import check, check_positive
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import wide_dtype, widen
from lajax.layers.state import CallDocuments, LayerState, kept_rows
from lajax.recurrence import attend
from lajax.recurrence.cached_attention import attend_one

MOST_SLICES = 32  # rows that one token is written to by a slice each

Cache = tuple[Array, ...]  # each [B S HK ..]


def key_heads(num_heads: int, num_kv_heads: int | None) -> int:
  """Returns HK, a divisor of H; H where it is not given."""
  check_positive("num_kv_heads", num_kv_heads)
  heads = num_heads if num_kv_heads is None else num_kv_heads
  if num_heads % heads:
    raise ValueError(
      f"`num_kv_heads` must divide num_heads = {num_heads}; got {heads}. Take a divisor of it."
    )
  return heads


def gated(o: Float[Array, "B T H K"], gate: Float[Array, "B T H K"] | None):
  """Returns o * sigmoid(gate), computed in float32 at least, in o's dtype; o without a gate."""
  if gate is None:
    return o
  wide = widen(o)
  return (wide * jax.nn.sigmoid(gate.astype(wide.dtype))).astype(o.dtype)


class CachedArray(NamedTuple):
  """One array of a cache."""

  name: str  # in messages
  letters: str  # axes of one token's part, "HK K"
  shape: tuple[int, ...]  # sizes of these axes
  wide: bool = False  # float32 at least, whatever the computation's dtype


class Context(NamedTuple):
  """The S keys that the T tokens of a call may read, and the cache after the call."""

  arrays: Cache  # each [B S HK ..]: the cache's tokens, and the call's
  position: Int[Array, "B S"]  # in the document; below 0 at an empty place
  document: Int[Array, "B S"]  # numbered as in `q_document`; -1: read by no token
  q_document: Int[Array, "B T"]  # of the call's tokens; -1: padding
  lost: Bool[Array, "B T"] | None  # tokens of documents that no longer fit; None: all fit
  cache: Cache  # after the call

  def nan_if_lost(self, o: Array) -> Array:
    """Returns o [B T ..] with NaN at tokens that could not read their whole document."""
    return o if self.lost is None else jnp.where(self.lost[..., None, None], jnp.nan, o)


class CachedMixer(Mixer):
  """A mixer whose memory is a cache of the current document's tokens.

  A subclass sets `max_length` and `window`, and says in `cached` which arrays it keeps per token.
  """

  max_length: int
  window: int | None = None

  @property
  def cached(self) -> tuple[CachedArray, ...]:
    """The arrays of the cache."""
    raise NotImplementedError

  @property
  def cached_impl(self) -> str:
    """Implementation of `attend`, which has no kernels."""
    return "chunked" if self.impl in ("auto", "pallas") else self.impl

  def init_state(self, batch: int, max_length: int | None = None, *, dtype=None) -> LayerState:
    """Returns the state before the first token: an empty cache.

    Args:
      batch: B.
      max_length: tokens of the longest document; None for the layer's own. With a window, documents
        of any length fit.
      dtype: of the inputs that will come; None for the layer's `dtype`, or that of its parameters.
    """
    max_length = check_positive("max_length", max_length)
    state = super().init_state(batch, dtype=dtype)
    if max_length is None:
      return state
    return state._replace(memory=self._empty(batch, max_length, state.memory))

  def init_memory(self, batch: int, dtype) -> Cache:
    """Returns the cache before the first token of a computation in `dtype`: zeros."""
    wide = wide_dtype(dtype, self.param_dtype)
    like = tuple(jax.ShapeDtypeStruct((), wide if x.wide else dtype) for x in self.cached)
    return self._empty(batch, self.max_length, like)

  def check_memory(self, memory: Any, batch: int) -> Cache:
    """Returns the cache of a state as JAX arrays; ValueError if it is not this layer's.

    Its number of places S is free: `init_state(max_length=..)` chooses it.
    """
    names = ", ".join(x.name for x in self.cached)
    advice = f"Pass the state of an earlier call of this layer, or init_state({batch})."
    if not isinstance(memory, tuple | list) or len(memory) != len(self.cached):
      got = f" of {len(memory)}" if isinstance(memory, tuple | list) else ""
      raise ValueError(
        f"`state.memory` must be the tuple ({names}); got {type(memory).__name__}{got}. {advice}"
      )
    sizes = {"B": batch}
    for n, (x, array) in enumerate(zip(self.cached, memory, strict=True)):
      name = f"state.memory[{n}]"
      if array is None:
        raise ValueError(f"`{name}` ({x.name}) must be an array; got None. {advice}")
      sizes |= zip(x.letters.split(), x.shape, strict=True)
      found = check(sizes, **{name: (array, f"B S {x.letters}")})
      sizes["S"] = found.S
    if sizes["S"] == 0:
      raise ValueError(f"`state.memory` must have places for tokens; got S = 0. {advice}")
    return tuple(jnp.asarray(array) for array in memory)

  def _empty(self, batch: int, max_length: int, like) -> Cache:
    """An empty cache in the dtypes of `like`."""
    size = max_length if self.window is None else min(max_length, self.window)
    return tuple(
      jnp.zeros((batch, size, *x.shape), y.dtype) for x, y in zip(self.cached, like, strict=True)
    )

  def continued(self, memory: Cache, documents: CallDocuments) -> Cache:
    """Returns the cache, empty in rows where the call begins a document.

    Where no row does, it stays where it is: selecting would read and write all of it.
    """
    return memory if documents.continues is None else _kept(memory, documents.continues)

  def begin(self, new: Cache, documents: CallDocuments) -> Cache:
    """Returns the cache after a first call; its documents may be longer than `max_length`."""
    B, T = documents.position.shape
    return _write(self._empty(B, max(T, self.max_length), new), new, documents)

  def extend(self, cache: Cache, new: Cache, documents: CallDocuments) -> Context:
    """Returns the context of a call behind a cache.

    Where a document no longer fits, ValueError. Under jit, where lengths cannot be seen, its tokens
    are `lost`.
    """
    capacity = cache[0].shape[1]
    bounded = self.window is None or capacity < self.window
    if bounded:
      check_room(documents.length, capacity)
    return _extend(cache, new, documents, bounded)

  def attend_cached(
    self,
    q: Float[Array, "B T H K"],
    keys: Cache,
    values: Float[Array, "B S HK V"] | None,
    context: Context,
    documents: CallDocuments,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Float[Array, "H"] | None = None,
  ) -> Float[Array, "B T H V"]:
    """Returns `attend` of the call's queries over a context.

    Args:
      q: queries.
      keys: arrays [B S HK ..] whose channels together are those of a key.
      values: values; None for the first of `keys`.
      context: of `extend`.
      documents: of the call's tokens.
      scale, window, sink: as in `attend`.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "sink": sink}
    options |= {"q_positions": documents.position, "k_positions": context.position}
    options |= {"q_segments": context.q_document, "k_segments": context.document}
    if q.shape[1] == 1 and self.cached_impl == "chunked":
      return attend_one(q, keys, values, **options)
    k = keys[0] if len(keys) == 1 else jnp.concatenate(keys, axis=-1)
    values = keys[0] if values is None else values
    return attend(q, k, values, impl=self.cached_impl, **options)


@functools.partial(jax.jit, static_argnames="bounded")
def _extend(cache: Cache, new: Cache, documents: CallDocuments, bounded: bool) -> Context:
  T, capacity = documents.position.shape[1], cache[0].shape[1]
  lost = None
  if bounded:
    lost = (documents.position >= capacity) & (documents.length > capacity)[:, None]
  now = jnp.zeros_like(documents.position) if documents.ids is None else documents.ids
  if T == 1:  # the new token stands in the cache, in the place of one that it does not read
    written = _write_one(cache, new, documents)
    position = _positions(documents.length, capacity)
    return Context(written, position, jnp.where(position < 0, -1, now), now, lost, written)
  written = _write(cache, new, documents)
  both = [(old.astype(x.dtype), x) for old, x in zip(cache, _promoted(cache, new), strict=True)]
  arrays = tuple(jnp.concatenate(pair, axis=1) for pair in both)
  before = _positions(documents.carried, capacity)
  position = jnp.concatenate([before, documents.position], axis=1)
  document = jnp.concatenate([jnp.where(before < 0, -1, 0), now], axis=1)
  return Context(arrays, position, document, now, lost, written)


def _promoted(cache: Cache, new: Cache) -> Cache:
  """The call's tokens in the wider of their own dtypes and the cache's: neither is cut."""
  pairs = zip(cache, new, strict=True)
  return tuple(x.astype(promoted(old.dtype, x.dtype)) for old, x in pairs)


def _positions(count: Int[Array, "B"], capacity: int) -> Int[Array, "B S"]:
  """Position of the token at each place of a ring that `count` tokens went into; < 0: empty."""
  last = count[:, None] - 1
  return last - (last - np.arange(capacity, dtype=np.int32)[None]) % capacity


@jax.jit
def _write(cache: Cache, new: Cache, documents: CallDocuments) -> Cache:
  """The cache with the tokens of the call's last document; the documents before it are over."""
  B, capacity = cache[0].shape[:2]
  keep = documents.position >= documents.length[:, None] - capacity
  new = _promoted(cache, new)
  cache = tuple(old.astype(x.dtype) for old, x in zip(cache, new, strict=True))
  if documents.ids is not None:
    current = documents.ids.max(axis=1, keepdims=True)
    keep &= (documents.ids >= 0) & (documents.ids == current)
    begins = (current > 0)[..., None, None]
    cache = tuple(jnp.where(begins, jnp.zeros((), c.dtype), c) for c in cache)
  places = jnp.where(keep, documents.position % capacity, capacity)  # capacity: dropped
  rows = np.arange(B)[:, None]
  return tuple(c.at[rows, places].set(x, mode="drop") for c, x in zip(cache, new, strict=True))


def _write_one(cache: Cache, new: Cache, documents: CallDocuments) -> Cache:
  """The cache with the call's one token, which is written in place if the cache is donated.

  Rows that begin a document are empty already: `CachedMixer.continued`.
  """
  capacity = cache[0].shape[1]
  places = documents.position[:, 0] % capacity
  if documents.ids is not None:
    places = jnp.where(documents.ids[:, 0] >= 0, places, capacity)  # capacity: dropped
  new = _promoted(cache, new)
  pairs = zip(cache, new, strict=True)
  return tuple(_set_rows(old.astype(x.dtype), x[:, 0], places) for old, x in pairs)


@jax.custom_jvp
def _kept(cache: Cache, keep: Bool[Array, "B"]) -> Cache:
  """Returns the cache with zeros in the rows that are not kept, in place if there are none.

  A loop of no or one round. XLA's CPU compiler copies what a conditional returns, and not what a
  loop carries.
  """
  more = lambda carry: carry[1]
  empty = lambda carry: (kept_rows(carry[0], keep), jnp.zeros_like(carry[1]))
  return jax.lax.while_loop(more, empty, (cache, ~keep.all()))[0]


@_kept.defjvp
def _kept_jvp(primals, tangents):
  return jax.jvp(lambda cache: kept_rows(cache, primals[1]), primals[:1], tangents[:1])


@jax.custom_jvp
def _set_rows(cache: Array, new: Array, places: Int[Array, "B"]) -> Array:
  """Writes new[b] to cache[b, places[b]]; a place behind the end is left out."""
  few = not jax.export.is_symbolic_dim(cache.shape[0]) and cache.shape[0] <= MOST_SLICES
  if few and cache.dtype.itemsize == 2:
    return jax.lax.platform_dependent(cache, new, places, cpu=_set_slices, default=_scattered)
  return _scattered(cache, new, places)


@_set_rows.defjvp
def _set_rows_jvp(primals, tangents):
  cache, new, places = primals
  set_rows = lambda cache, new: _scattered(cache, new, places)
  return jax.jvp(set_rows, (cache, new), tangents[:2])


def _scattered(cache: Array, new: Array, places: Int[Array, "B"]) -> Array:
  return cache.at[np.arange(cache.shape[0]), places].set(new, mode="drop")


def _set_slices(cache: Array, new: Array, places: Int[Array, "B"]) -> Array:
  """The same, by one slice per row: a scatter of half precision copies the cache on a CPU."""
  bits, new = jax.lax.optimization_barrier((bits_of_half(cache), bits_of_half(new)))
  for b in range(cache.shape[0]):
    inside = places[b] < cache.shape[1]
    start = (b, jnp.where(inside, places[b], 0), *(0 for _ in new.shape[1:]))
    before = jax.lax.dynamic_slice(bits, start, (1, 1, *new.shape[1:]))
    one = jnp.where(inside, new[b : b + 1, None], before)
    bits = jax.lax.dynamic_update_slice(bits, one, start)
  return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), cache.dtype)


def check_room(length: Int[Array, "B"], capacity: int) -> None:
  if isinstance(length, Tracer) or not length.size:
    return
  longest = int(length.max())
  if longest > capacity:
    raise ValueError(
      f"the cache of {capacity} tokens is full: a document would have {longest}. Make the first"
      f" state by init_state(batch, max_length={longest}), or give the layer a larger max_length or"
      " a window."
    )
