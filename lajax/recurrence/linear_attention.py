"""Additive state: S = Diag(exp g) S + k v^T, o = scale S^T q, which may be divided by its normalizer."""

from functools import lru_cache, partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import row_sums, transposed
from lajax.recurrence.decays import Decay, Masks, decay, following, gate_pullback, preceding
from lajax.recurrence.rule import Affine, Chunk, Rule, on_raw_tokens


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


# --- chunks: everything below is about the arrays of one chunk of C tokens of one from_start --------------------------------
#
# `before`: the token reads the state before its own decay and write.


def _scores(before: bool, d: Decay, x: AdditiveTokens, precision) -> Array:
  scores = d.scores_before if before else d.scores
  return scores(x.q[:, None], x.k[:, None], precision)[:, 0, :, 0]


def _reads(before: bool, d: Decay, x: AdditiveTokens) -> Array:
  """What reads the chunk's first state."""
  return x.q * (d.before if before else d.from_start)


def _chunk(before: bool, x: AdditiveTokens, masks: Masks | None, precision) -> Chunk:
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  scores = _scores(before, d, x, precision)
  return Chunk(
    d.total, full(transposed(x.k * d.to_end), x.v), _reads(before, d, x), full(scores, x.v)
  )


def _begin_pullback(before: bool, x: AdditiveTokens, masks: Masks | None, do: Array, precision):
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  return Affine(d.total, jnp.matmul(transposed(_reads(before, d, x)), do, precision=precision)), d


def _pullback(
  before: bool,
  x: AdditiveTokens,
  masks: Masks | None,
  d: Decay,
  state,
  dstate,
  do: Array,
  precision,
) -> AdditiveTokens:
  q, k, v = x.q, x.k, x.v
  full = partial(jnp.matmul, precision=precision)
  dscores = full(do, v.T)[:, None, :, None]
  dk_state = full(v, dstate.T) * d.to_end
  dv = full(transposed(_scores(before, d, x, precision)), do) + full(k * d.to_end, dstate)
  # The pairs between which no decay stands are apart: a token with itself, or with the one that reads before the next.
  if before:
    dq, dk = (y[:, 0] for y in d.scores_before_pullback(dscores, q[:, None], k[:, None], precision))
    dq += full(do, state.T) * d.before
    own = d.neighbours(row_sums(following(do) * v))
    ahead, dq_own, dk_own = following(q * dq), preceding(own * k), own * following(q)
  else:
    dq, dk = (y[:, 0] for y in d.scores_pullback(dscores, q[:, None], k[:, None], precision))
    dq += full(do, state.T) * d.from_start
    own = row_sums(do * v)
    ahead, dq_own, dk_own = q * dq, own * k, own * q
  dg = None
  if x.g is not None:
    dg = gate_pullback(x.g, ahead, k * dk, k * dk_state, d.total * row_sums(state * dstate)[:, 0])
  return AdditiveTokens(dq + dq_own, dk + dk_state + dk_own, dv, dg)


def _rule(before: bool) -> Rule:
  step, read = (_step_reading_before, _read_before) if before else (_step, _read)
  return Rule(
    step, _lift, read, *(partial(f, before) for f in (_chunk, _begin_pullback, _pullback))
  )


rule = _rule(before=False)
reading_before = _rule(before=True)  # o = scale S_{t-1}^T q


# --- divided by the normalizer ---------------------------------------------------------------------------------------
#
# z is one more column of the state, of a value that is always 1: what a token reads are V + 1 numbers.


def with_ones(v: Float[Array, "*C V"]) -> Float[Array, "*C V1"]:
  return jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 1)], constant_values=1)


def divided(read: Float[Array, "*C V1"], eps: float) -> Float[Array, "*C V"]:
  """o = numerator / (q.z + eps); 0 where both are 0: a token that reads nothing."""
  return read[..., :-1] / _divisor(read[..., :-1], read[..., -1:] + eps)


def _divisor(numerator: Array, denominator: Array) -> Array:
  return jnp.where((numerator == 0) & (denominator == 0), 1, denominator)


def _divided_pullback(
  denominator: Float[Array, "C 1"], o: Float[Array, "C V"], do: Float[Array, "C V"]
) -> Array:
  dnumerator = do / _divisor(o, denominator)
  return jnp.concatenate([dnumerator, -row_sums(o * dnumerator)], axis=-1)


@lru_cache(maxsize=64)
def normalized(eps: float) -> Rule:
  """o = scale S^T q / (scale q.z + eps), of the state [K V+1] that holds S and z."""

  def step(state, x: AdditiveTokens):
    state, read = _step(state, x)
    return state, divided(read, eps)

  def read(before, after, x: AdditiveTokens):
    return divided(_read(before, after, x), eps)

  def output_map(read):
    return divided(read, eps), read[..., -1:] + eps

  of_values_with_ones = rule._replace(
    step=step, read=read, output_map=output_map, output_map_pullback=_divided_pullback
  )
  return on_raw_tokens(of_values_with_ones, lambda x: x._replace(v=with_ones(x.v)))
