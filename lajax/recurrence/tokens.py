"""The loops over tokens: `recurrent` is the equation as printed, `associative` has all states.

Layouts: `tokens` is the family's NamedTuple of arrays [B T H ..] (queries and keys) or [B T HV ..]
(all others), a field may be None; the state is [B HV K V]; outputs are [B T HV V].
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lajax.recurrence.documents import previous
from lajax.recurrence.heads import Heads, heads_of
from lajax.recurrence.rule import Affine, Rule, apply, combine, warn_if_made_anew

# Tokens from one stored state to the next; the backward pass computes the states between again.
TOKENS_PER_STATE = 64


def recurrent(rule: Rule, tokens, state: Array, document: Array | None = None):
  """Returns outputs and final state by the equation, token by token.

  The backward pass keeps one of 64 states, or all where they are no larger than the tokens.
  """
  T = jax.tree.leaves(tokens)[0].shape[1]
  if not isinstance(T, int):
    raise NotImplementedError(
      f"a loop over tokens must know their number, and that is the symbol {T} here; export with a "
      "number instead."
    )
  warn_if_made_anew(rule)
  heads = heads_of(tokens, state)
  xs, begins = _token_major(heads, tokens, document)
  step = heads.over(lambda begins, x, s: rule.step(_reset(s, begins), x), heads.axes(tokens))
  body = lambda s, x: step(x[1], x[0], s)
  scan = lambda s, xs: lax.scan(body, s, xs)

  state = heads.rows(state)
  large = math.prod(state.shape[1:]) > sum(math.prod(x.shape[2:]) for x in jax.tree.leaves(xs))
  whole = T - T % TOKENS_PER_STATE if large and T > TOKENS_PER_STATE else 0
  outputs = []
  if whole:
    blocks = jax.tree.map(
      lambda x: x[:whole].reshape(-1, TOKENS_PER_STATE, *x.shape[1:]), (xs, begins)
    )
    state, o = lax.scan(jax.checkpoint(scan), state, blocks)
    outputs.append(o.reshape(whole, *o.shape[2:]))
  if whole < T:
    state, o = scan(state, jax.tree.map(lambda x: x[whole:], (xs, begins)))
    outputs.append(o)
  o = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
  return _batch_major(heads, o), heads.unrows(state)


def _token_major(heads: Heads, tokens, document):
  """Returns tokens as [T R (G) ..], and where documents begin [T R]; None without documents."""

  def flat(x):
    x = jnp.moveaxis(heads.split(x), 1, 0)
    return x.reshape(x.shape[0], heads.B * heads.H, *x.shape[3:])

  xs = jax.tree.map(flat, tokens)
  return xs, None if document is None else jnp.repeat(
    (document != previous(document)).T, heads.H, axis=1
  )


def _batch_major(heads: Heads, o: Array) -> Array:
  """[T R (G) V] -> [B T HV V]."""
  return jnp.moveaxis(o.reshape(len(o), heads.B, heads.H * heads.G, o.shape[-1]), 0, 1)


def _reset(state: Array, begins: Array | None) -> Array:
  return state if begins is None else jnp.where(begins, jnp.zeros((), state.dtype), state)


def associative(rule: Rule, tokens, state: Array, document: Array | None = None):
  """Returns outputs and final state by `jax.lax.associative_scan` over the tokens' maps.

  It holds T states in memory.
  """
  warn_if_made_anew(rule)
  heads = heads_of(tokens, state)
  axes = heads.axes(tokens)
  xs, begins = _token_major(heads, tokens, document)
  lift = heads.over(lambda begins, x: (rule.lift(x), begins), axes)
  maps, begin = jax.vmap(lift)(begins, xs)

  def start(affine, state, begins):
    return apply(affine, _reset(state, begins))

  state = heads.rows(state)
  first = heads.nest(start)(*jax.tree.map(lambda x: x[0], (maps, state[None], begin)))
  maps = Affine(maps.A, jnp.concatenate([first[None], maps.B[1:]]))
  (_, states), _ = lax.associative_scan(heads.nest(_combine_in_documents, 1), (maps, begin))
  read = heads.over(
    lambda begins, x, before, after: rule.read(_reset(before, begins), after, x), axes
  )
  o = jax.vmap(read)(begins, xs, jnp.concatenate([state[None], states[:-1]]), states)
  return _batch_major(heads, o), heads.unrows(states[-1])


def _combine_in_documents(first, second):
  """`combine` for maps of tokens, and whether a document begins at one of the tokens.

  Where one begins in `second`, `first` is replaced by zeros. A transition of 0 would not do:
  0 times NaN is NaN.
  """
  (first, first_begins), (second, second_begins) = first, second
  if second_begins is None:
    return combine(first, second), None
  first = jax.tree.map(lambda x: _reset(x, second_begins), first)
  return combine(first, second), first_begins | second_begins
