"""The families of recurrences as rows of a table: letters of the arguments, and the rule that
computes them.

A family turns the arguments of a call into a `Problem`: tokens of a rule with its first state, and
the maps from the rule's results to the call's own. `lajax.ops` runs a problem over all tokens by an
implementation of choice; `lajax.recurrence.steps` runs it over one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from lajax import _shapes
from lajax._meshes import axes_of_letters, spec_for, spec_of
from lajax._numerics import NEGLIGIBLE, accumulation_dtype, vary_like
from lajax.recurrence import delta_rule, dplr, linear_attention, linear_recurrence, mamba3, mlstm
from lajax.recurrence.documents import blank_padding, packing, without_padding
from lajax.recurrence.rule import Rule
from lajax.recurrence.tokens import recurrent

CHUNK = 64  # tokens in a chunk
CHANNEL_CHUNK = 32  # with decays per channel, whose scores cost more per pair of tokens


class Call(NamedTuple):
  """Arguments of a call, checked."""

  arrays: Mapping[str, Any]  # by name; None where an optional one was left out
  state: tuple  # parts of the state before the first token; all None for zeros
  segment_ids: Int[Array, "B T"] | None
  scale: Any = None  # of the queries: a float, or a traced array without axes
  options: Mapping[str, Any] = MappingProxyType({})  # static ones of the family, by name
  by_kernels: bool = False
  # (family, arrays, state, scale=None) -> (output, parts of the final state): another family on the
  # same documents, by the call's implementation.
  aside: Callable = NotImplemented

  @property
  def dtype(self) -> jnp.dtype:
    """The dtype of states, sums and solves."""
    return accumulation_dtype(*self.arrays.values(), *self.state)


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
  state: letters per part of the state.
  gates: arguments whose values must hold no NaN.
  weights: those among them that must be below +inf too.
  problem: Call -> Problem.
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

  def output_shape(self, call: Call) -> tuple[int, ...]:
    sizes = {}
    for name, x in call.arrays.items():
      sizes |= zip(
        _letters_of(x, self.letters(name)).split(), () if x is None else x.shape, strict=True
      )
    return tuple(sizes[axis] for axis in self.output.split())


def _length_by_gate(tokens) -> int:
  return CHANNEL_CHUNK if tokens.g is not None and tokens.g.ndim == 4 else CHUNK


def _first(call: Call, *shape: int) -> Array:
  """State before the first token, where it is one array."""
  (state,) = call.state
  return jnp.zeros(shape, call.dtype) if state is None else state.astype(call.dtype)


def _matrix(call: Call) -> Array:
  q, v = call.arrays["q"], call.arrays["v"]
  return _first(call, q.shape[0], v.shape[-2], q.shape[-1], v.shape[-1])


# --- additive states ---


def _additive(call: Call) -> Problem:
  x = call.arrays
  tokens = linear_attention.AdditiveTokens(x["q"], x["k"], x["v"], x["g"])
  return Problem(linear_attention.rule, tokens, _matrix(call), call.segment_ids)


def _with_bonus(call: Call) -> Problem:
  """Reads the state before each write; a token's own write is added behind the recurrence."""
  x, dtype, ids = call.arrays, call.dtype, call.segment_ids
  q, k, v, bonus = x["q"], x["k"], x["v"], x["bonus"].astype(dtype)[None, None]
  if (
    ids is not None
  ):  # before a product of two inputs, so that NaN in padding stays out of gradients
    q, k, v = blank_padding((q, k, v), ids >= 0)

  def output(o):
    own = (q.astype(dtype) * call.scale * k.astype(dtype) * bonus).sum(-1)
    own = jnp.repeat(own, v.shape[2] // q.shape[2], axis=2)[..., None]
    return o.astype(dtype) + own * v.astype(dtype)

  tokens = linear_attention.AdditiveTokens(q, k, v, x["g"])
  return Problem(linear_attention.reading_before, tokens, _matrix(call), ids, output)


def _normalized(call: Call) -> Problem:
  """z is one more column of the state, that of a value which is always 1."""
  x, v = call.arrays, call.arrays["v"]
  S, z = call.state
  if S is None or z is None:
    shape = (v.shape[0], v.shape[2], x["q"].shape[-1], v.shape[-1] + 1)
    state = jnp.zeros(shape, call.dtype)
  else:
    state = jnp.concatenate([S, z[..., None]], axis=-1).astype(call.dtype)
  rule, output = linear_attention.normalized(call.options["eps"]), lambda o: o
  if call.by_kernels:  # they know nothing of the division
    rule, output = linear_attention.rule, lambda o: linear_attention.divided(o, call.options["eps"])
    v = linear_attention.with_ones(v.astype(accumulation_dtype(v)))
  tokens = linear_attention.AdditiveTokens(x["q"], x["k"], v, x["g"])
  split = lambda state: (state[..., :-1], state[..., -1])
  return Problem(rule, tokens, state, call.segment_ids, output, split)


def _mlstm(call: Call) -> Problem:
  """Linear attention with gates relative to the running maximum m, and a normalizer column."""
  dtype, ids = call.dtype, call.segment_ids
  q, k, v, i, f = (call.arrays[name].astype(dtype) for name in ("q", "k", "v", "i", "f"))
  C, n, m = call.state
  m = jnp.zeros(f.shape[::2], dtype) if m is None else jnp.maximum(m.astype(dtype), NEGLIGIBLE)
  if ids is not None:
    k, v, i, f = blank_padding((k, v, i, f), ids >= 0)
  top, g, write = mlstm.stabilise(i, f, m, ids)
  if C is None or n is None:
    state = jnp.zeros((*m.shape, k.shape[-1], v.shape[-1] + 1), dtype)
  else:
    state = jnp.concatenate([C, n[..., None]], axis=-1).astype(dtype)
    state = mlstm.rescaled(state, m, 1)
  last = top[:, -1] if top.shape[1] else m

  def output(o):
    o = o[..., :-1] * mlstm.normalizer(o[..., -1:], top[..., None])
    return o if ids is None else blank_padding(o, ids >= 0)

  def final(state):
    state = mlstm.rescaled(state, last, -1)
    return state[..., :-1], state[..., -1], last

  tokens = linear_attention.AdditiveTokens(
    q, k, linear_attention.with_ones(v) * write[..., None], g
  )
  return Problem(linear_attention.rule, tokens, state, ids, output, final)


def _trapezoidal(call: Call) -> Problem:
  """Linear attention that writes the token before; see `mamba3`."""
  x, dtype, ids = call.arrays, call.dtype, call.segment_ids
  several = x["q"].ndim == 5  # keys per token
  per_rank = lambda a: a if several else a[:, :, None]
  q, k, v = (per_rank(x[name]) for name in "qkv")
  S, last_k, last_v = call.state
  if S is None or last_k is None or last_v is None:
    S = jnp.zeros((*x["g"].shape[::2], k.shape[-1], v.shape[-1]), dtype)
    last_k, last_v = (jnp.zeros((a.shape[0], *a.shape[2:]), dtype) for a in (k, v))
  elif not several:
    last_k, last_v = last_k[:, None], last_v[:, None]
  g, dt, mix = (x[name].astype(dtype) for name in ("g", "dt", "trapezoid"))
  parts = mamba3.trapezoid(q, k, v, g, dt, mix, last_k, last_v, ids)

  def output(o):
    o = o.astype(dtype).reshape(v.shape) + mamba3.unread(parts, call.scale)
    return o if several else o[:, :, 0]

  def final(state):
    S, *last = mamba3.last_state(state, parts, last_k, last_v, ids)
    return S, *(a if several else a[:, 0] for a in last)

  tokens = linear_attention.AdditiveTokens(*mamba3.recurrence(parts))
  written = None if ids is None else jnp.repeat(ids, q.shape[2], axis=1)
  return Problem(linear_attention.rule, tokens, S.astype(dtype), written, output, final)


def _elementwise(call: Call) -> Problem:
  """One head, whose state has a row per channel and one column."""
  x, log_a = call.arrays["x"], call.arrays["log_a"]
  D = math.prod(x.shape[2:])
  h = _first(call, x.shape[0], *x.shape[2:])
  flat = lambda a: a.reshape(*a.shape[:2], 1, D)
  return Problem(
    linear_recurrence.rule,
    linear_recurrence.ElementwiseTokens(flat(x), flat(log_a)),
    h.reshape(x.shape[0], 1, D, 1),
    call.segment_ids,
    lambda o: o.reshape(x.shape),
    lambda state: (state.reshape(h.shape),),
  )


# --- corrected states ---


def _corrected(call: Call) -> Problem:
  """With `beta` one strength serves both sides: the tokens' `erase`, with a `write` of None."""
  x = call.arrays
  erase = x["beta"] if x["erase"] is None else x["erase"]
  tokens = delta_rule.DeltaTokens(x["q"], x["k"], x["v"], erase, x["write"], x["g"])
  return Problem(delta_rule.rule, tokens, _matrix(call), call.segment_ids)


def _corrected_often(call: Call) -> Problem:
  """R delta steps per token: it decays before the first of them and reads after the last."""
  x, R = call.arrays, call.arrays["k"].shape[2]
  steps = lambda a: lax.collapse(a, 1, 3)

  def alone(a, r):
    """Puts a token's array at its step r, zeros at its other steps."""
    pad = [(0, 0), (0, 0), (r, R - 1 - r)] + [(0, 0)] * (a.ndim - 2)
    return steps(jnp.pad(a[:, :, None], pad))

  g = None if x["g"] is None else alone(x["g"], 0)
  tokens = delta_rule.DeltaTokens(
    alone(x["q"], R - 1), steps(x["k"]), steps(x["v"]), steps(x["beta"]), None, g
  )
  ids = None if call.segment_ids is None else jnp.repeat(call.segment_ids, R, axis=1)
  return Problem(delta_rule.rule, tokens, _matrix(call), ids, lambda o: o[:, R - 1 :: R])


def _corrected_values(call: Call) -> Problem:
  """Oja's rule: the delta rule of the transposed state, with keys and values exchanged."""
  x = call.arrays
  tokens = delta_rule.DeltaTokens(x["q"], x["v"], x["k"], x["beta"], None, x["g"])
  swap = lambda state: jnp.swapaxes(state, -1, -2)
  return Problem(
    delta_rule.by_rows,
    tokens,
    swap(_matrix(call)),
    call.segment_ids,
    final=lambda state: (swap(state),),
  )


def _low_rank(call: Call) -> Problem:
  x = call.arrays
  tokens = dplr.DplrTokens(*(x[name] for name in ("q", "k", "v", "a", "b", "g")))
  return Problem(dplr.rule, tokens, _matrix(call), call.segment_ids)


# --- the table ---

QKV = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
DECAY = {"g": "B T HV | B T HV K | None"}
MATRIX = {"S": "B HV K V"}

LINEAR_ATTENTION = Family(arrays=QKV | DECAY, state=MATRIX, gates=("g",), problem=_additive)
LINEAR_ATTENTION_WITH_BONUS = Family(
  arrays=QKV | DECAY | {"bonus": "H K"}, state=MATRIX, gates=("g",), problem=_with_bonus
)
NORMALIZED_LINEAR_ATTENTION = Family(
  arrays=QKV | DECAY, state=MATRIX | {"z": "B HV K"}, gates=("g",), problem=_normalized
)
MLSTM = Family(
  arrays=QKV | {"i": "B T HV", "f": "B T HV"},
  state={"C": "B HV K V", "n": "B HV K", "m": "B HV"},
  gates=("i", "f"),
  weights=("i",),
  problem=_mlstm,
)
_STEPS = dict.fromkeys(("g", "dt", "trapezoid"), "B T HV")
MAMBA3 = Family(
  arrays=QKV | _STEPS,
  state=MATRIX | {"k": "B H K", "v": "B HV V"},
  gates=tuple(_STEPS),
  problem=_trapezoidal,
)
MAMBA3_MIMO = Family(
  arrays={"q": "B T R H K", "k": "B T R H K", "v": "B T R HV V"} | _STEPS,
  state=MATRIX | {"k": "B R H K", "v": "B R HV V"},
  gates=tuple(_STEPS),
  output="B T R HV V",
  problem=_trapezoidal,
)
DELTA_RULE = Family(
  arrays=QKV
  | {"beta": "B T HV | None"}
  | DECAY
  | {"erase": "B T HV K | None", "write": "B T HV V | None"},
  state=MATRIX,
  gates=("g", "beta", "erase", "write"),
  problem=_corrected,
)
DELTA_PRODUCT = Family(
  arrays={"q": "B T H K", "k": "B T R H K", "v": "B T R HV V", "beta": "B T R HV"} | DECAY,
  state=MATRIX,
  gates=("g", "beta"),
  problem=_corrected_often,
)
GATED_OJA = Family(
  arrays=QKV | {"beta": "B T HV", "g": "B T HV | B T HV V | None"},
  state=MATRIX,
  gates=("g", "beta"),
  problem=_corrected_values,
)
DPLR = Family(
  arrays=QKV | {"a": "B T H K", "b": "B T H K"} | DECAY,
  state=MATRIX,
  gates=("g",),
  operands=("q", "k", "v", "a", "b"),
  problem=_low_rank,
)


def linear_recurrence_of(axes: int) -> Family:
  """Returns the row of the elementwise recurrence for so many axes of channels."""
  return LINEAR_RECURRENCES[min(max(axes, 0), len(LINEAR_RECURRENCES) - 1)]


def _linear_recurrence(axes: int) -> Family:
  channels = " ".join(f"D{n}" for n in range(axes))
  return Family(
    arrays={"x": f"B T {channels}", "log_a": f"B T {channels}"},
    state={"h": f"B {channels}"},
    gates=("log_a",),
    operands=("x",),
    output=f"B T {channels}",
    like="x",
    chunk_length=lambda tokens: CHUNK,
    problem=_elementwise,
  )


LINEAR_RECURRENCES = tuple(map(_linear_recurrence, range(8)))  # JAX compiles a row once


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

  return family.problem(call._replace(aside=aside))


def solve(family: Family, call: Call, run: Callable) -> tuple[Array, tuple]:
  """Returns the output of a call, and the parts of its final state.

  Args:
    family: of the call.
    call: its arguments, checked.
    run: (family, problem, document, scale) -> (output of the rule, final state).
  """
  problem, like = problem_of(family, call, run), call.arrays[family.like]
  if is_empty(problem):
    return jnp.zeros(family.output_shape(call), like.dtype), problem.final(problem.state)
  document = is_token = None
  if problem.segment_ids is not None:
    document, is_token = packing(problem.segment_ids)
    problem = problem._replace(tokens=blank_padding(problem.tokens, is_token))
  o, final = run(family, problem, document, call.scale)
  o = problem.output(without_padding(o, is_token))
  return o.astype(like.dtype), problem.final(final)


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
