"""Additive state: S = Diag(exp g) S + k v^T, o = S^T q, which may be divided by its normalizer."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import row_sums, transposed
from lajax.recurrence.decays import Decay, Masks, decay_of, following, gate_pullback, preceding
from lajax.recurrence.rule import Affine, Chunk, OutputPullback, Pullback, Rule, bind, on_raw_tokens


class AdditiveTokens(NamedTuple):
  """q is already scaled; g is None, [B T HV] or [B T HV K]."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


def decay_state(g: Array | None, state: Array) -> Array:
  """Diag(exp g) S for g None, a scalar or [K]."""
  return state if g is None else jnp.exp(g).reshape(g.shape + (1,) * (state.ndim - g.ndim)) * state


def token_decay(g: Array | None, like: Array) -> Array:
  """exp g, or 1 where g is None."""
  return jnp.ones((), like.dtype) if g is None else jnp.exp(g)


def _step(state, x: AdditiveTokens):
  state = decay_state(x.g, state) + x.k[:, None] * x.v[None, :]
  return state, _read(None, state, x)


def _step_reading_before(state, x: AdditiveTokens):
  return _step(state, x)[0], _read_before(state, None, x)


def _lift(x: AdditiveTokens) -> Affine:
  return Affine(token_decay(x.g, x.k), x.k[:, None] * x.v[None, :])


def _read(before, after, x: AdditiveTokens):
  return (after * x.q[:, None]).sum(0)


def _read_before(before, after, x: AdditiveTokens):
  return (before * x.q[:, None]).sum(0)


# --- chunks --------------------------------------------------------------------------------------
#
# `before` is True for a rule whose tokens read the state before their own decay and write.
# `bounded` is True where no log decay is below LOWEST_BOUND.


def _scores(before: bool, d: Decay, x: AdditiveTokens, precision) -> Float[Array, "C 1 C 1"]:
  scores = d.scores_before if before else d.scores
  return scores(x.q[:, None], x.k[:, None], precision)


def _reads(before: bool, d: Decay, x: AdditiveTokens) -> Float[Array, "C K"]:
  """The queries that read the chunk's first state."""
  return x.q * (d.before if before else d.from_start)


def _chunk(before: bool, bounded: bool, x: AdditiveTokens, masks: Masks | None, precision) -> Chunk:
  d = decay_of(x.g, len(x.k), x.k.dtype, masks, bounded)
  full = partial(jnp.matmul, precision=precision)
  scores = _scores(before, d, x, precision)[:, 0, :, 0]
  written = full(transposed(x.k * d.to_end), x.v)
  return Chunk(d.total, written, _reads(before, d, x), full(scores, x.v))


def _begin(
  before: bool, bounded: bool, x: AdditiveTokens, masks: Masks | None, do: Array, precision
):
  d = decay_of(x.g, len(x.k), x.k.dtype, masks, bounded)
  return Affine(d.total, jnp.matmul(transposed(_reads(before, d, x)), do, precision=precision)), d


def _finish(
  before: bool,
  x: AdditiveTokens,
  masks: Masks | None,
  d: Decay,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> AdditiveTokens:
  q, k, v = x.q, x.k, x.v
  full = partial(jnp.matmul, precision=precision)
  scores, dscores = _scores(before, d, x, precision), full(do, v.T)[:, None, :, None]
  dv = full(transposed(scores[:, 0, :, 0]), do) + full(k * d.to_end, dstate)
  dq_state, dk_state = full(do, state.T), full(v, dstate.T) * d.to_end
  pairs = dscores, q[:, None], k[:, None], precision, None if x.g is None else scores
  # Apart from the other pairs are those without a decay between them: of a token with itself, or,
  # for what reads before the token's own decay, of a token with the one before.
  if before:
    dq, dk, crossing = d.scores_before_pullback(*pairs)
    dq_state *= d.before
    from_start = following(q * dq_state)
    own = d.neighbours(row_sums(following(do) * v))
    dq_own, dk_own = preceding(own * k), own * following(q)
  else:
    dq, dk, crossing = d.scores_pullback(*pairs)
    dq_state *= d.from_start
    from_start = q * dq_state
    own = row_sums(do * v)
    dq_own, dk_own = own * k, own * q
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    dg = gate_pullback(x.g, crossing, from_start, k * dk_state, total)
  return AdditiveTokens(dq[:, 0] + dq_state + dq_own, dk[:, 0] + dk_state + dk_own, dv, dg)


def rule_of(*, before: bool = False, bounded: bool = False) -> Rule:
  """Returns the rule of o = S_t^T q, or, with `before`, of o = S_{t-1}^T q."""
  step, read = (_step_reading_before, _read_before) if before else (_step, _read)
  pullback = Pullback(bind(_begin, before, bounded), bind(_finish, before))
  return Rule(step, _lift, read, bind(_chunk, before, bounded), pullback=pullback)


rule = rule_of()


# --- divided by the normalizer -------------------------------------------------------------------
#
# The normalizer z is one more column of the state, the one of a value that is always 1. So a token
# reads V + 1 numbers and puts out V.


def with_ones(v: Float[Array, "*C V"]) -> Float[Array, "*C V1"]:
  """v with a column of ones."""
  return jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 1)], constant_values=1)


def divided(read: Float[Array, "*C V1"], eps: float) -> Float[Array, "*C V"]:
  """o = numerator / (q.z + eps), and 0 for a token that reads nothing, where both are 0."""
  return read[..., :-1] / _divisor(read[..., :-1], read[..., -1:] + eps)


def _divisor(numerator: Array, denominator: Array) -> Array:
  return jnp.where((numerator == 0) & (denominator == 0), 1, denominator)


def _denominator(eps: float, read: Float[Array, "C V1"]) -> Float[Array, "C 1"]:
  return read[..., -1:] + eps


def _divided_pullback(
  denominator: Float[Array, "C 1"], o: Float[Array, "C V"], do: Float[Array, "C V"]
) -> Float[Array, "C V1"]:
  dnumerator = do / _divisor(o, denominator)
  return jnp.concatenate([dnumerator, -row_sums(o * dnumerator)], axis=-1)


def _step_normalized(eps: float, state, x: AdditiveTokens):
  state, read = _step(state, x)
  return state, divided(read, eps)


def _read_normalized(eps: float, before, after, x: AdditiveTokens):
  return divided(_read(before, after, x), eps)


def _output(eps: float, read: Float[Array, "C V1"]) -> Float[Array, "C V"]:
  return divided(read, eps)


def _values_with_ones(x: AdditiveTokens) -> AdditiveTokens:
  return x._replace(v=with_ones(x.v))


def normalized(eps: float) -> Rule:
  """Rule of o = S^T q / (q.z + eps), with S and z in a state [K V+1]."""
  of_values_with_ones = rule._replace(
    step=bind(_step_normalized, eps),
    read=bind(_read_normalized, eps),
    output=bind(_output, eps),
    output_pullback=OutputPullback(bind(_denominator, eps), _divided_pullback),
  )
  return on_raw_tokens(of_values_with_ones, _values_with_ones)
