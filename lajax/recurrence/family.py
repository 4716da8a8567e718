"""A family of recurrences as a row of a table: a call, its problem, and how one is solved.

A family turns the arguments of a call into a `Problem`: tokens of a rule with its first state, and
the maps from the rule's results to the call's own. `lajax.ops` runs a problem over all tokens by an
implementation of choice; `lajax.recurrence.steps` runs it over one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from lajax import _shapes
from lajax._meshes import axes_of_letters, spec_for, spec_of
from lajax._numerics import accumulation_dtype, vary_like
from lajax.recurrence.documents import blank_padding, packing
from lajax.recurrence.rule import Rule
from lajax.recurrence.tokens import recurrent

CHUNK = 64  # tokens in a chunk
CHANNEL_CHUNK = 32  # with decays per channel, whose scores cost more per pair of tokens


class Call(NamedTuple):
  """Arguments of a call, checked."""

  arrays: Mapping[str, Any]  # by name; None where an optional one was left out
  state: tuple  # parts of the state before the first token; all None for zeros, but in a problem
  segment_ids: Int[Array, "B T"] | None
  scale: Any = None  # of the queries: a float, or a traced array without axes
  options: Mapping[str, Any] = MappingProxyType({})  # static ones of the family, by name
  by_kernels: bool = False  # tokens are for the op's kernels
  # (family, arrays, state, scale=None) -> (output, parts of the final state): another family on the
  # same documents, by the call's implementation.
  aside: Callable = NotImplemented

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of states, sums and solves."""
    return accumulation_dtype(*self.arrays.values(), *self.state)

  def blank(self, *names: str) -> tuple[Array, ...]:
    """Returns arrays [B T ..] with zeros at padding.

    A problem that multiplies inputs takes these, so that NaN in padding stays out of gradients.
    """
    arrays = tuple(self.arrays[name] for name in names)
    return arrays if self.segment_ids is None else blank_padding(arrays, self.segment_ids >= 0)


class Problem(NamedTuple):
  """Inputs of a rule, and the maps from its results to those of the call."""

  rule: Rule
  tokens: Any  # the rule's NamedTuple of arrays [B T ..], not yet cast
  state: Array  # [B HV K V], in the accumulation dtype
  segment_ids: Int[Array, "B T"] | None
  output: Callable = lambda o: o
  final: Callable = lambda state: (state,)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
  """A row of the table.

  arrays: letters per argument; "| None" at the end for one that may be left out.
  state: letters per part of the state, which arguments have too; "L-1" is one less than L.
  gates: arguments whose values must hold no NaN.
  weights: those among them that must be below +inf too.
  problem: Call -> Problem; the call's state has its dtype, and zeros for None.
  operands: fields of the tokens that products multiply as they are; all others are gates.
  output: letters of the output.
  like: the argument whose dtype the output has.
  chunk_length: tokens of a rule -> default length of a chunk.
  """

  arrays: Mapping[str, str]
  state: Mapping[str, str]
  problem: Callable[[Call], Problem]
  gates: tuple[str, ...] = ()
  weights: tuple[str, ...] = ()
  operands: tuple[str, ...] = ("q", "k", "v")
  output: str = "B T HV V"
  like: str = "v"
  chunk_length: Callable[[Any], int] = lambda tokens: _length_by_gate(tokens)

  def check(self, arrays: Mapping[str, Any], state, segment_ids=None, *, one_token: bool = False):
    """Returns sizes by letter, and the parts of the state; ValueError for a wrong argument."""
    name = "state" if one_token else "initial_state"
    parts = (state,)
    if len(self.state) > 1:
      parts = tuple(_shapes.check_parts(name, state, tuple(self.state)))
    expected = {n: (x, self.letters(n, one_token)) for n, x in arrays.items()}
    required = [n for n in arrays if "None" not in self.arrays[n]]
    for n, (part, letters) in enumerate(zip(parts, self.state.values(), strict=True)):
      part_name = name if len(parts) == 1 else f"{name}[{n}]"
      expected[part_name] = (part, letters)
      required += [part_name] * one_token
    _shapes.check_given(**{n: expected[n] for n in required})
    sizes = _shapes.check(**expected, segment_ids=(segment_ids, "B T", "int"))
    if "H" in self.arrays.get("q", "").split():
      _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
    return sizes, parts

  def letters(self, name: str, one_token: bool = False) -> str:
    """Letters of an argument; without T for one token."""
    options = [option.split() for option in self.arrays[name].split("|") if "None" not in option]
    return " | ".join(
      " ".join(axis for axis in option if not (one_token and axis == "T")) for option in options
    )

  def shape(self, letters: str, call: Call) -> tuple[int, ...]:
    """Returns the sizes that letters have in the arrays of a call."""
    sizes = {}
    for name, x in call.arrays.items():
      sizes |= zip(
        _letters_of(x, self.letters(name)).split(), () if x is None else x.shape, strict=True
      )
    size = lambda axis: sizes[axis[:-2]] - 1 if axis.endswith("-1") else sizes[axis]
    return tuple(map(size, letters.split()))

  def first_state(self, call: Call) -> tuple[Array, ...]:
    """Returns the parts of the state before the first token, in the dtype of states."""
    return tuple(
      jnp.zeros(self.shape(letters, call), call.dtype) if x is None else x.astype(call.dtype)
      for letters, x in zip(self.state.values(), call.state, strict=True)
    )


def _length_by_gate(tokens) -> int:
  return CHANNEL_CHUNK if tokens.g is not None and tokens.g.ndim == 4 else CHUNK


# --- letters ---

QKV = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
DECAY = {"g": "B T HV | B T HV K | None"}
MATRIX = {"S": "B HV K V"}


# --- solving ---


def factor(family: Family, scale, sizes: _shapes.Sizes) -> tuple[float | None, Any]:
  """Returns the scale as (number, None) or (None, traced array); two None without queries."""
  if "q" not in family.arrays:
    return None, None
  found = _shapes.scale_of(scale, sizes)
  return (found, None) if isinstance(found, float) else (None, found)


def widened(problem: Problem, scale):
  """Returns the tokens in the state's dtype, queries times a given `scale`, and the first state."""
  dtype = problem.state.dtype
  tokens = jax.tree.map(lambda x: x.astype(dtype), problem.tokens)
  if scale is not None:
    tokens = tokens._replace(q=tokens.q * jnp.asarray(scale, dtype))
  return tokens, vary_like(problem.state, tokens)


def problem_of(family: Family, call: Call, run: Callable) -> Problem:
  """Returns the problem of a call, whose `aside` computes by `run`, as `solve` does."""

  def aside(other: Family, arrays, state, scale=None):
    return solve(other, Call(arrays, state, call.segment_ids, scale), run)

  return family.problem(call._replace(state=family.first_state(call), aside=aside))


def solve(family: Family, call: Call, run: Callable) -> tuple[Array, tuple]:
  """Returns the output of a call, and the parts of its final state.

  Args:
    family: of the call.
    call: its arguments, checked.
    run: (family, problem, document, scale) -> (output of the rule, final state).
  """
  problem, like = problem_of(family, call, run), call.arrays[family.like]
  if is_empty(problem):
    o = jnp.zeros(family.shape(family.output, call), like.dtype)
    return o, problem.final(problem.state)
  run_one = lambda problem, document: run(family, problem, document, call.scale)
  o, final = in_documents(problem, run_one)
  return problem.output(o).astype(like.dtype), problem.final(final)


def in_documents(problem: Problem, run: Callable) -> tuple[Array, Array]:
  """Runs a problem with zeros at padding, also in the output.

  Args:
    problem: its `output` and `final` are left to the caller.
    run: (problem, document) -> (output of the rule, final state).
  """
  if problem.segment_ids is None:
    return run(problem, None)
  document, is_token = packing(problem.segment_ids)
  o, final = run(problem._replace(tokens=blank_padding(problem.tokens, is_token)), document)
  return blank_padding(o, is_token), final


def is_empty(problem: Problem) -> bool:
  """Says whether there is nothing to compute: no tokens, or a state without numbers."""
  return 0 in problem.state.shape or any(x.shape[1] == 0 for x in jax.tree.leaves(problem.tokens))


def by_tokens(family: Family, problem: Problem, document, scale):
  """Runs the rule of a problem token by token."""
  return recurrent(problem.rule, *widened(problem, scale), document)


def layouts(family: Family, call: Call, *, one_token: bool = False):
  """Mesh axes of (output, state parts) on an explicit mesh: by letters, or as the state came in."""
  held = [(x, _letters_of(x, family.letters(name, one_token))) for name, x in call.arrays.items()]
  held += list(zip(call.state, family.state.values(), strict=True))
  axes = axes_of_letters(*held, (call.segment_ids, "B T"))
  output = " ".join(axis for axis in family.output.split() if not (one_token and axis == "T"))
  states = [
    spec_for(letters, axes) if part is None else spec_of(part)
    for part, letters in zip(call.state, family.state.values(), strict=True)
  ]
  return spec_for(output, axes), tuple(states)


def _letters_of(x, letters: str) -> str:
  """The alternative that has as many axes as the array."""
  options = letters.split("|")
  return next((option for option in options if x is not None and len(option.split()) == x.ndim), "")
