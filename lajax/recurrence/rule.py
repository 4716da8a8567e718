"""A family of recurrences as small pure functions (`Rule`), and the algebra of affine maps of a state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class Affine(NamedTuple):
  """The map S -> A S + B of a state S [K V]: A is a scalar, a diagonal [K], or a matrix [K K]."""

  A: Array
  B: Array


class Chunk(NamedTuple):
  """What a chunk of C tokens does with the state S it begins with: S -> A S + B, and its outputs are R S + O."""

  A: Array
  B: Array
  R: Any  # an array, or whatever the rule's `respond` reads
  O: Array


class Rule(NamedTuple):
  """A family of recurrences. Every function works on one head, without batch axes.

  A token of zeros is the identity: it leaves the state as it is, so that padding with zeros needs no masks.

  The functions of a chunk get tokens with a leading axis C, and masks, which are None without segments. The backward pass
  goes through the chunks in reverse. `begin_pullback` document for many chunks at once and gives Affine(A, D), such that the
  cotangent of the state before a chunk is A^T dstate + D, and whatever `pullback` wants kept. `pullback` then gets the state
  before the chunk and the cotangent of the state after it.

  What a token reads may be more than it puts out: `output_map` then makes the outputs of a chunk, which `step` and `read` give
  already. The chunks' outputs O and their cotangents have the width of what is read.
  """

  step: Callable  # (state, token) -> (state, output): the paper's equation
  lift: Callable  # token -> Affine
  read: Callable  # (state before, state after, token) -> output
  chunk: Callable  # (tokens, masks, precision) -> Chunk
  begin_pullback: Callable  # (tokens, masks, do, precision) -> (Affine, kept)
  pullback: (
    Callable  # (tokens, masks, kept, state, dstate, do, precision) -> cotangents of the tokens
  )
  respond: Callable = jnp.matmul  # (R, state, precision=) -> R S
  output_map: Callable | None = None  # what the chunk reads [C ..] -> (outputs [C V], kept)
  output_map_pullback: Callable | None = (
    None  # (kept, outputs, do) -> the cotangent of what the chunk reads
  )


def on_raw_tokens(rule: Rule, prepare: Callable) -> Rule:
  """The rule of tokens that `prepare` makes those of `rule` from, elementwise: in the driver's blocks, not in all of T."""

  def pullback(x, masks, kept, state, dstate, do, precision):
    made, back = jax.vjp(prepare, x)
    return back(rule.pullback(made, masks, kept, state, dstate, do, precision))[0]

  return rule._replace(
    step=lambda state, x: rule.step(state, prepare(x)),
    lift=lambda x: rule.lift(prepare(x)),
    read=lambda before, after, x: rule.read(before, after, prepare(x)),
    chunk=lambda x, masks, precision: rule.chunk(prepare(x), masks, precision),
    begin_pullback=lambda x, masks, do, precision: rule.begin_pullback(
      prepare(x), masks, do, precision
    ),
    pullback=pullback,
  )


def apply(affine: Affine, state: Array) -> Array:
  return _times(affine.A, state) + affine.B


def combine(first: Affine, second: Affine) -> Affine:
  """The map that applies `first`, then `second`: (A2 A1, A2 B1 + B2)."""
  return Affine(_times(second.A, first.A), apply(second, first.B))


def _times(A: Array, X: Array) -> Array:
  """A X, where A is a scalar, a diagonal or a matrix, and X is a state or another A of the same kind."""
  if A.ndim == 2:
    return jnp.matmul(A, X, precision=lax.Precision.HIGHEST)
  return A.reshape(A.shape + (1,) * (X.ndim - A.ndim)) * X


def apply_transposed(affine: Affine, state: Array) -> Array:
  return _times(affine.A.T, state) + affine.B
