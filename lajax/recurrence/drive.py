"""The loops, once for all families: over tokens, by associative scan, over chunks.

A family is a `Rule` of small pure functions on the arrays of one head; the drivers own batching, grouped heads, segments,
padding, the chunk split and what is kept for the backward pass.

Layouts: `tokens` is the family's NamedTuple of arrays [B T H ...] (queries and keys) or [B T HV ...] (all else), a field may
be None; `state` is a pytree of arrays [B HV ...]; outputs are [B T HV V].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from lajax._numerics import Masks, segment_masks

BLOCK = 64  # tokens whose states are recomputed, not kept, in the backward pass of the token scan


class Affine(NamedTuple):
  """The map S -> A S + B of a state S [K V]: A is a scalar, a diagonal [K], or a matrix [K K]."""

  A: Array
  B: Array


class Chunk(NamedTuple):
  """What a chunk of tokens does: S -> A S + B for the state, and outputs R S + O from the state S it begins with."""

  A: Array
  B: Array
  R: Array
  O: Array


class Rule(NamedTuple):
  """A family of recurrences. Every function works on one head, without batch axes.

  A token of zeros is the identity: it leaves the state as it is. So padding with zeros needs no masks.
  """

  step: Callable[[Any, Any], tuple[Any, Array]]  # (state, token) -> (state, output): the paper's equation
  lift: Callable[[Any], Affine]  # token -> its map of the state
  read: Callable[[Any, Any, Any], Array]  # (state before, state after, token) -> output
  chunk: Callable[..., Chunk]  # (tokens with a leading axis C, masks or None, precision) -> its map and its outputs


class Segments(NamedTuple):
  """Packed documents as the drivers see them."""

  runs: Int[Array, "B T"]  # counts the changes of document up to each token; padding belongs to the run before it
  real: Array  # [B T] bool: not padding


def segments(segment_ids: Int[Array, "B T"]) -> Segments:
  """A change of id between real tokens begins a new run; padding (id < 0) neither begins nor ends one."""
  real = segment_ids >= 0
  position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  last_real = lax.cummax(jnp.where(real, position, -1), axis=1)
  before = jnp.concatenate([jnp.full_like(last_real[:, :1], -1), last_real[:, :-1]], axis=1)
  id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  change = real & (before >= 0) & (segment_ids != id_before)
  return Segments(jnp.cumsum(change, axis=1, dtype=jnp.int32), real)


def blank_padding(tokens, real):
  """Zeros for whatever stands in the padding, so that it is the identity whatever it was (NaN included)."""
  return jax.tree.map(lambda x: jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)), tokens)


# --- heads -----------------------------------------------------------------------------------------------------------


def combine(first: Affine, second: Affine) -> Affine:
  """The map that applies `first`, then `second`: (A2 A1, A2 B1 + B2)."""
  return Affine(_times(second.A, first.A), apply(second, first.B))


def apply(affine: Affine, state: Array) -> Array:
  return _times(affine.A, state) + affine.B


def _times(A: Array, X: Array) -> Array:
  """A X, where A is a scalar, a diagonal or a matrix, and X is a state or another A of the same kind."""
  if A.ndim == 2:
    return jnp.matmul(A, X, precision=lax.Precision.HIGHEST)
  return A.reshape(A.shape + (1,) * (X.ndim - A.ndim)) * X


def _group(tokens, groups: int):
  """Splits value heads [.. HV ..] into [.. H G ..]; returns the tokens and, per field, the axis to map over for G."""
  if groups == 1:
    return tokens, None
  heads = min(x.shape[2] for x in jax.tree.leaves(tokens))
  wide = jax.tree.map(lambda x: x.shape[2] == heads * groups, tokens)
  split = jax.tree.map(lambda x, w: x.reshape(*x.shape[:2], heads, groups, *x.shape[3:]) if w else x, tokens, wide)
  return split, jax.tree.map(lambda w: 0 if w else None, wide)


def _over_heads(f: Callable, group_axes) -> Callable:
  """Maps f(state, tokens, *per_batch) over leading axes [B H] or [B H G]."""

  def mapped(state, tokens, *per_batch):
    g = f
    if group_axes is not None:
      g = jax.vmap(g, in_axes=(0, group_axes, *(None,) * len(per_batch)))
    g = jax.vmap(g, in_axes=(0, 0, *(None,) * len(per_batch)))
    return jax.vmap(g)(state, tokens, *per_batch)

  return mapped


def _split_state(state, groups: int):
  return jax.tree.map(lambda s: s.reshape(s.shape[0], -1, groups, *s.shape[2:]) if groups > 1 else s, state)


def _merge_state(state, groups: int):
  return jax.tree.map(lambda s: s.reshape(s.shape[0], -1, *s.shape[3:]) if groups > 1 else s, state)


def _merge_outputs(o: Array, groups: int) -> Array:
  """[T B H V] or [T B H G V] -> [B T HV V]."""
  o = jnp.moveaxis(o, 0, 1)
  return o.reshape(*o.shape[:2], -1, o.shape[-1]) if groups > 1 else o


# --- over tokens -----------------------------------------------------------------------------------------------------


def recurrent(rule: Rule, tokens, state, runs: Array | None = None, *, groups: int = 1):
  """The equation, token by token. Keeps one state in every 64 for the backward pass."""
  tokens, group_axes = _group(tokens, groups)
  step = _over_heads(lambda s, x, reset: rule.step(_reset(s, reset), x), group_axes)
  xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
  T, B = jax.tree.leaves(xs)[0].shape[:2]
  changes = jnp.zeros((T, B), bool) if runs is None else jnp.moveaxis(_changes(runs), 1, 0)
  body = lambda s, x: step(s, *x)

  def scan(state, xs):
    return lax.scan(body, state, xs)

  state = _split_state(state, groups)
  whole = T // BLOCK * BLOCK if T > BLOCK else 0
  outputs = []
  if whole:
    blocks = jax.tree.map(lambda x: x[:whole].reshape(-1, BLOCK, *x.shape[1:]), (xs, changes))
    state, o = lax.scan(jax.checkpoint(scan), state, blocks)
    outputs.append(o.reshape(whole, *o.shape[2:]))
  if whole < T:
    state, o = scan(state, jax.tree.map(lambda x: x[whole:], (xs, changes)))
    outputs.append(o)
  o = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
  return _merge_outputs(o, groups), _merge_state(state, groups)


def _changes(runs: Array) -> Array:
  return jnp.concatenate([jnp.zeros_like(runs[:, :1], bool), runs[:, 1:] != runs[:, :-1]], axis=1)


def _reset(state, reset: Array):
  return jax.tree.map(lambda s: jnp.where(reset, jnp.zeros((), s.dtype), s), state)


# --- by associative scan ---------------------------------------------------------------------------------------------


def associative(rule: Rule, tokens, state, runs: Array | None = None, *, groups: int = 1):
  """All states at once, by `jax.lax.associative_scan` over the tokens' maps. Memory: T states."""
  tokens, group_axes = _group(tokens, groups)
  xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
  T, B = jax.tree.leaves(xs)[0].shape[:2]
  changes = jnp.zeros((T, B), bool) if runs is None else jnp.moveaxis(_changes(runs), 1, 0)
  state = _split_state(state, groups)

  def lift(s, x, reset):
    a, b = rule.lift(x)
    return Affine(jnp.where(reset, jnp.zeros((), a.dtype), a), b)

  per_token = jax.vmap(_over_heads(lift, group_axes), in_axes=(None, 0, 0))
  maps = per_token(state, xs, changes)
  over = lambda f, n: f if n == 0 else jax.vmap(over(f, n - 1))
  batch = maps.B.ndim - state.ndim + (state.ndim - 2)
  first = over(apply, batch - 1)(jax.tree.map(lambda x: x[0], maps), state)
  maps = Affine(maps.A, maps.B.at[0].set(first))
  _, states = lax.associative_scan(over(combine, batch), maps)
  before = jnp.concatenate([state[None], states[:-1]])

  def read(s, x, reset):
    return rule.read(_reset(s[0], reset), s[1], x)

  o = jax.vmap(_over_heads(read, group_axes))((before, states), xs, changes)
  return _merge_outputs(o, groups), _merge_state(states[-1], groups)
