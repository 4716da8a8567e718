"""The families of recurrences as rows of a table: letters of the arguments, and the rule that
computes them. `lajax.recurrence.family` says what a row is.
"""

import math

import jax.numpy as jnp
from jax import lax

from lajax._numerics import NEGLIGIBLE, accumulation_dtype
from lajax.recurrence import delta_rule, dplr, linear_attention, linear_recurrence, mlstm
from lajax.recurrence.documents import blank_padding
from lajax.recurrence.family import CHUNK, DECAY, MATRIX, QKV, Call, Family, Problem

# --- additive states ---


def _additive(call: Call) -> Problem:
  x = call.arrays
  tokens = linear_attention.AdditiveTokens(x["q"], x["k"], x["v"], x["g"])
  rule = linear_attention.rule_of(bounded=call.options.get("bounded", False))
  return Problem(rule, tokens, call.state[0], call.segment_ids)


def _with_bonus(call: Call) -> Problem:
  """Reads the state before each write; a token's own write is added behind the recurrence."""
  dtype, (q, k, v) = call.dtype, call.blank("q", "k", "v")
  bonus = call.arrays["bonus"].astype(dtype)[None, None]

  def output(o):
    own = (q.astype(dtype) * call.scale * k.astype(dtype) * bonus).sum(-1)
    own = jnp.repeat(own, v.shape[2] // q.shape[2], axis=2)[..., None]
    return o.astype(dtype) + own * v.astype(dtype)

  tokens = linear_attention.AdditiveTokens(q, k, v, call.arrays["g"])
  rule = linear_attention.rule_of(before=True, bounded=call.options.get("bounded", False))
  return Problem(rule, tokens, call.state[0], call.segment_ids, output)


def _normalized(call: Call) -> Problem:
  """z is one more column of the state, that of a value which is always 1."""
  x, v, (S, z) = call.arrays, call.arrays["v"], call.state
  state = jnp.concatenate([S, z[..., None]], axis=-1)
  rule, output = linear_attention.normalized(call.options["eps"]), lambda o: o
  if call.by_kernels:  # they know nothing of the division
    rule, output = linear_attention.rule, lambda o: linear_attention.divided(o, call.options["eps"])
    v = linear_attention.with_ones(v.astype(accumulation_dtype(v)))
  tokens = linear_attention.AdditiveTokens(x["q"], x["k"], v, x["g"])
  split = lambda state: (state[..., :-1], state[..., -1])
  return Problem(rule, tokens, state, call.segment_ids, output, split)


def _mlstm(call: Call) -> Problem:
  """Linear attention with gates relative to the running maximum m, and a normalizer column."""
  ids, (C, n, m) = call.segment_ids, call.state
  q, k, v, i, f = (x.astype(call.dtype) for x in call.blank("q", "k", "v", "i", "f"))
  m = jnp.maximum(m, NEGLIGIBLE)
  top, g, write = mlstm.stabilise(i, f, m, ids)
  state = mlstm.rescaled(jnp.concatenate([C, n[..., None]], axis=-1), m, 1)
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


def _elementwise(call: Call) -> Problem:
  """One head, whose state has a row per channel and one column."""
  x, log_a = call.arrays["x"], call.arrays["log_a"]
  D = math.prod(x.shape[2:])
  (h,) = call.state
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
  rule = delta_rule.bounded if call.options.get("bounded", False) else delta_rule.rule
  return Problem(rule, tokens, call.state[0], call.segment_ids)


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
  return Problem(delta_rule.rule, tokens, call.state[0], ids, lambda o: o[:, R - 1 :: R])


def _corrected_values(call: Call) -> Problem:
  """Oja's rule: the delta rule of the transposed state, with keys and values exchanged."""
  x = call.arrays
  tokens = delta_rule.DeltaTokens(x["q"], x["v"], x["k"], x["beta"], None, x["g"])
  swap = lambda state: jnp.swapaxes(state, -1, -2)
  return Problem(
    delta_rule.by_rows,
    tokens,
    swap(call.state[0]),
    call.segment_ids,
    final=lambda state: (swap(state),),
  )


def _low_rank(call: Call) -> Problem:
  x = call.arrays
  tokens = dplr.DplrTokens(*(x[name] for name in ("q", "k", "v", "a", "b", "g")))
  return Problem(dplr.rule, tokens, call.state[0], call.segment_ids)


# --- the table ---

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
