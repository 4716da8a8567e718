"""A family of recurrences as small pure functions (`Rule`), and affine maps of a state."""

import collections
import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class Affine(NamedTuple):
  """The map S -> A S + B of a state S [K V].

  A is a scalar, a diagonal [K], a matrix [K K], or `Blocks` of these.
  """

  A: Any
  B: Array


class Blocks(NamedTuple):
  """A on each of N states that stand above each other, then sums of them: (sums x A) S."""

  sums: Array  # [N N]
  A: Any

  @property
  def T(self) -> "Blocks":
    return Blocks(self.sums.T, self.A.T)


class Chunk(NamedTuple):
  """Summary of C tokens: the state S before them becomes A S + B, and what they read is R S + O."""

  A: Any
  B: Array
  R: Any  # an array [C K], or whatever the rule's `respond` takes
  O: Array  # [C W]


class Pullback(NamedTuple):
  """The backward pass of `Rule.chunk` and `Rule.respond`.

  begin(tokens, masks, do, precision) -> (Affine(A, D), residuals)
    runs for many chunks at once. The cotangent of the state before a chunk is A^T dstate + D.
  finish(tokens, masks, residuals, state, dstate, do, precision) -> cotangents of the tokens
    gets the state before the chunk and the cotangent of the state after the chunk.
  """

  begin: Callable
  finish: Callable


class OutputPullback(NamedTuple):
  """The backward pass of `Rule.output`.

  residuals(read) -> what `pullback` needs besides the outputs
  pullback(residuals, outputs, do) -> the cotangent of what the tokens read
  """

  residuals: Callable
  pullback: Callable


class Rule(NamedTuple):
  """A family of recurrences. Every function works on one head, without batch axes.

  step(state, token) -> (state, output)
    the equation of the paper.
  lift(token) -> Affine
    the token as a map of the state.
  read(state before, state after, token) -> output
  chunk(tokens, masks, precision) -> Chunk
    C tokens at once, with a leading axis C. `masks` says which intervals of the chunk lie inside
    one document; `masks` is None without documents.
  respond(R, state, precision=) -> R S
  output(read [C W]) -> outputs [C V]
    for rules that put out less than they read; `step` and `read` return outputs already.
  pullback, output_pullback
    optional, for speed: by default they follow from `chunk`, `respond` and `output` by `jax.vjp`.
  log_decays
    names of the token fields in which -inf is a number: the log of a decay to 0.

  A token of zeros is the identity: it leaves the state as it is, so padding needs no masks.

  Compiled functions belong to a rule, and rules are equal if their functions are. Functions at
  module level are equal to themselves; `bind(function, option)` adds an option. A lambda or a
  nested function is a new one each time it is made, and its rule is compiled each time.
  """

  step: Callable
  lift: Callable
  read: Callable
  chunk: Callable
  respond: Callable = jnp.matmul
  output: Callable | None = None
  pullback: Pullback | None = None
  output_pullback: OutputPullback | None = None
  log_decays: tuple[str, ...] = ("g",)


@dataclasses.dataclass(frozen=True)
class Bound:
  """A function with its first arguments fixed. Unlike `functools.partial`, it compares by value."""

  function: Callable
  options: tuple[Hashable, ...]

  def __call__(self, *args, **kwargs):
    return self.function(*self.options, *args, **kwargs)


def bind(function: Callable, *options: Hashable) -> Bound:
  """Returns the function with its first arguments fixed. Equal arguments give equal results."""
  return Bound(function, options)


# --- rules from rules ----------------------------------------------------------------------------


def on_raw_tokens(rule: Rule, prepare: Callable) -> Rule:
  """Returns the same rule on raw tokens.

  `prepare` makes the rule's tokens, elementwise. It runs inside each block of chunks, so that its
  result is never stored for all T.
  """
  pullback = None
  if rule.pullback is not None:
    pullback = Pullback(
      bind(_on_raw, rule.pullback.begin, prepare), bind(_finish_raw, rule.pullback.finish, prepare)
    )
  return rule._replace(
    step=bind(_step_raw, rule.step, prepare),
    lift=bind(_on_raw, rule.lift, prepare),
    read=bind(_read_raw, rule.read, prepare),
    chunk=bind(_on_raw, rule.chunk, prepare),
    pullback=pullback,
  )


def _on_raw(function, prepare, x, *rest):
  return function(prepare(x), *rest)


def _step_raw(step, prepare, state, x):
  return step(state, prepare(x))


def _read_raw(read, prepare, before, after, x):
  return read(before, after, prepare(x))


def _finish_raw(finish, prepare, x, *rest):
  prepared, back = jax.vjp(prepare, x)
  return back(finish(prepared, *rest))[0]


def derived(rule: Rule) -> Rule:
  """Returns the rule without its hand-written backward pass, to compare the two."""
  return rule._replace(pullback=None, output_pullback=None)


# --- the backward pass that follows from the forward one -----------------------------------------


def pullback_of(rule: Rule) -> Pullback:
  """Returns the rule's own backward pass, or the one that JAX finds."""
  return rule.pullback or Pullback(bind(_begin, rule), bind(_finish, rule))


def _begin(rule: Rule, tokens, masks, do, precision):
  chunk, back = jax.vjp(lambda x: rule.chunk(x, masks, precision), tokens)
  respond = lambda state: rule.respond(chunk.R, state, precision=precision)
  (D,) = jax.vjp(respond, jnp.zeros_like(chunk.B))[1](do)
  return Affine(chunk.A, D), (chunk, back)


def _finish(rule: Rule, tokens, masks, residuals, state, dstate, do, precision):
  chunk, back = residuals

  def use(chunk):
    return (
      apply(Affine(chunk.A, chunk.B), state),
      rule.respond(chunk.R, state, precision=precision) + chunk.O,
    )

  (dchunk,) = jax.vjp(use, chunk)[1]((dstate, do))
  return back(dchunk)[0]


def output_pullback_of(rule: Rule) -> OutputPullback:
  """Returns the backward pass of the rule's `output`: its own, or the one that JAX finds."""
  return rule.output_pullback or OutputPullback(_itself, bind(_output_pullback, rule.output))


def _itself(read):
  return read


def _output_pullback(output, read, outputs, do):
  return jax.vjp(output, read)[1](do)[0]


# --- rules that are made anew --------------------------------------------------------------------

MADE_ANEW = 8  # rules of the same code but of other functions, before there is a warning

_made: dict[Hashable, set[int]] = collections.defaultdict(set)


def warn_if_made_anew(rule: Rule) -> None:
  """Warns about code that makes its rule again and again; drivers call this while they are traced.

  Each such rule is compiled by itself, and JAX keeps what it compiled.
  """
  code = _code(rule)
  _made[code].add(hash(rule))
  if len(_made[code]) == MADE_ANEW:
    warnings.warn(
      f"{MADE_ANEW} rules were made of the same functions ({_name(rule.chunk)}), and each is "
      "compiled anew. Define the functions at module level and give them options by "
      "lajax.recurrence.rule.bind, or make the rule once.",
      stacklevel=3,
    )


def _code(x) -> Hashable:
  """Identity of a function that stays the same when the same code makes it again."""
  if isinstance(x, tuple):
    return tuple(map(_code, x))
  if isinstance(x, Bound):
    return _code(x.function), _code(x.options)
  return getattr(x, "__code__", x)


def _name(function) -> str:
  return _name(function.function) if isinstance(function, Bound) else repr(function)


# --- affine maps ---------------------------------------------------------------------------------


def apply(affine: Affine, state: Array) -> Array:
  """Returns A S + B."""
  return _times(affine.A, state) + affine.B


def apply_transposed(affine: Affine, state: Array) -> Array:
  """Returns A^T S + B."""
  return _times(affine.A.T, state) + affine.B


def combine(first: Affine, second: Affine) -> Affine:
  """Returns the map that applies `first`, then `second`: (A2 A1, A2 B1 + B2)."""
  return Affine(_times(second.A, first.A), apply(second, first.B))


def _times(A: Any, X: Any) -> Any:
  """A X, where A is of any kind of `Affine`, and X a state or another A of that kind."""
  if isinstance(A, Blocks):
    matmul = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    if isinstance(X, Blocks):
      return Blocks(matmul(A.sums, X.sums), _times(A.A, X.A))
    N = len(A.sums)
    each = jax.vmap(lambda x: _times(A.A, x))(X.reshape(N, -1, X.shape[-1]))
    return matmul(A.sums, each.reshape(N, -1)).reshape(X.shape)
  if A.ndim == 2:
    return jnp.matmul(A, X, precision=lax.Precision.HIGHEST)
  return A.reshape(A.shape + (1,) * (X.ndim - A.ndim)) * X
