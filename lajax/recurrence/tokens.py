"""The loops over tokens: the equation as printed (`recurrent`), and all states at once (`associative`).

Layouts: `tokens` is the family's NamedTuple of arrays [B T H ..] (queries and keys) or [B T HV ..]
(all others), a field may be None; the state is [B HV K V]; outputs are [B T HV V].
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lajax.recurrence.documents import previous
from lajax.recurrence.heads import Heads, heads_of
from lajax.recurrence.rule import Affine, Rule, apply, combine

TOKENS_BETWEEN_STATES = (
  64  # of the token scan: in its backward pass the states between are computed again
)


def recurrent(rule: Rule, tokens, state: Array, document: Array | None = None):
  """The equation, token by token. Of each 64 states the backward pass keeps one, or all where they are no larger than tokens."""
  heads = heads_of(tokens, state)
  xs, changes = _token_major(heads, tokens, document)
  step = heads.over(lambda change, x, s: rule.step(_reset(s, change), x), heads.axes(tokens))
  body = lambda s, x: step(x[1], x[0], s)
  scan = lambda s, xs: lax.scan(body, s, xs)

  state = heads.rows(state)
  T = len(jax.tree.leaves(xs)[0])
  large = state.size * T > sum(x.size for x in jax.tree.leaves(xs))
  whole = T - T % TOKENS_BETWEEN_STATES if large and T > TOKENS_BETWEEN_STATES else 0
  outputs = []
  if whole:
    blocks = jax.tree.map(
      lambda x: x[:whole].reshape(-1, TOKENS_BETWEEN_STATES, *x.shape[1:]), (xs, changes)
    )
    state, o = lax.scan(jax.checkpoint(scan), state, blocks)
    outputs.append(o.reshape(whole, *o.shape[2:]))
  if whole < T:
    state, o = scan(state, jax.tree.map(lambda x: x[whole:], (xs, changes)))
    outputs.append(o)
  o = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
  return _batch_major(heads, o), heads.unrows(state)


def _token_major(heads: Heads, tokens, document):
  """Tokens as [T R (G) ..], and [T R]: where a document begins; None without documents."""

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


def _reset(state: Array, change: Array | None) -> Array:
  return state if change is None else jnp.where(change, jnp.zeros((), state.dtype), state)


def associative(rule: Rule, tokens, state: Array, document: Array | None = None):
  """All states at once, by `jax.lax.associative_scan` over the tokens' maps. Memory: T states."""
  heads = heads_of(tokens, state)
  axes = heads.axes(tokens)
  xs, changes = _token_major(heads, tokens, document)

  def lift(change, x):
    affine = rule.lift(x)
    return Affine(_reset(affine.A, change), affine.B)

  maps = jax.vmap(heads.over(lift, axes))(changes, xs)
  state = heads.rows(state)
  first = heads.nest(apply)(jax.tree.map(lambda x: x[0], maps), state)
  maps = Affine(maps.A, jnp.concatenate([first[None], maps.B[1:]]))
  _, states = lax.associative_scan(heads.nest(combine, 1), maps)
  read = heads.over(
    lambda change, x, before, after: rule.read(_reset(before, change), after, x), axes
  )
  o = jax.vmap(read)(changes, xs, jnp.concatenate([state[None], states[:-1]]), states)
  return _batch_major(heads, o), heads.unrows(states[-1])
