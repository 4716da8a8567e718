"""Delta rule: the state is corrected towards v at k. S = Diag(exp g) S ; S = S + k (u - S^T r)^T, o = scale S^T q.

With a write strength beta, r = beta k and u = beta v (DeltaNet, Gated DeltaNet, KDA); with an erase gate b and a write gate w
per channel, r = b k and u = w v (Gated DeltaNet 2).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, row_sums, spread, transposed
from lajax.recurrence.decays import Decay, Masks, decay, gate_pullback
from lajax.recurrence.linear_attention import decay_state, token_decay
from lajax.recurrence.rule import Affine, Chunk, Rule, on_raw_tokens
from lajax.recurrence.triangle import unit_lower_inverse


class DeltaTokens(NamedTuple):
  """q is already scaled; erase and write are strengths, one a from_start or one a channel; a write of None is as erase."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  erase: Float[Array, "B T HV"] | Float[Array, "B T HV K"]
  write: Float[Array, "B T HV V"] | None
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


class Corrections(NamedTuple):
  """r is what reads the old value, u the new value, both times their strength: [K] and [V], or [C K] and [C V] of a chunk."""

  q: Float[Array, "*C K"]
  k: Float[Array, "*C K"]
  r: Float[Array, "*C K"]
  u: Float[Array, "*C V"]
  g: Float[Array, "*C"] | Float[Array, "*C K"] | None


def _corrections(x: DeltaTokens) -> Corrections:
  times = lambda y, strength: (
    y * (strength if y.ndim == strength.ndim else spread(strength, y.shape[-1]))
  )
  return Corrections(
    x.q, x.k, times(x.k, x.erase), times(x.v, x.erase if x.write is None else x.write), x.g
  )


def _step(state, x: Corrections):
  state = decay_state(x.g, state)
  error = x.u - (state * x.r[:, None]).sum(0)
  state = state + x.k[:, None] * error[None, :]
  return state, _read(None, state, x)


def _lift(x: Corrections) -> Affine:
  decay = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  return Affine(
    jnp.diag(decay) - x.k[:, None] * (x.r * decay)[None, :], x.k[:, None] * x.u[None, :]
  )


def _read(before, after, x: Corrections):
  return (after * x.q[:, None]).sum(0)


# --- chunks ----------------------------------------------------------------------------------------------------------
#
# With X = u - (r from_start) S, the values that the tokens of a chunk really write are v' = T X, T = (I + N)^-1, N the scores of r
# and k below the diagonal (the UT transform: Yang et al. 2024, arXiv:2406.06484, section 3.2). So v' = U - W S with
# W = T (r from_start), U = T u, and with P the scores of q and k:
#     o  = (q from_start) S + P v'            = (q from_start - P W) S + P U
#     S' = total S + (k to_end)^T v'      = (total - (k to_end)^T W) S + (k to_end)^T U


class _Solved(NamedTuple):
  d: Decay
  P: Float[Array, "C C"]
  T: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]


def _solve(x: Corrections, masks: Masks | None, precision) -> _Solved:
  """The decays, P, T, W and U."""
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  scores = d.scores(jnp.stack([x.q, x.r], axis=1), x.k[:, None], precision, careful=True)[..., 0]
  return _Solved(d, scores[:, 0], *_inverse(x, d, scores[:, 1], precision))


def _inverse(
  x: Corrections, d: Decay, N: Float[Array, "C C"], precision
) -> tuple[Array, Array, Array]:
  """T, W and U."""
  T, full = unit_lower_inverse(jnp.tril(N, -1)), partial(jnp.matmul, precision=precision)
  return T, full(T, x.r * d.from_start), full(T, x.u)


def _chunk(x: Corrections, masks: Masks | None, precision) -> Chunk:
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  written = transposed(x.k * s.d.to_end)
  A = diagonal(s.d.total, x.k.shape[-1]) - full(written, s.W)
  return Chunk(A, full(written, s.U), x.q * s.d.from_start - full(s.P, s.W), full(s.P, s.U))


def _begin_pullback(x: Corrections, masks: Masks | None, do: Array, precision):
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  A = diagonal(s.d.total, x.k.shape[-1]) - full(transposed(x.k * s.d.to_end), s.W)
  return Affine(A, full(transposed(x.q * s.d.from_start - full(s.P, s.W)), do)), s


def _pullback(
  x: Corrections,
  masks: Masks | None,
  kept: _Solved,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> Corrections:
  q, k, r, d, (C, K) = x.q, x.k, x.r, kept.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  values = kept.U - full(kept.W, state)
  du = full(transposed(kept.T), full(transposed(kept.P), do) + full(k * d.to_end, dstate))
  readers, cotangents = (
    jnp.stack([q, r], axis=1),
    jnp.stack([do, -du], axis=1).reshape(2 * C, -1),
  )  # what reads gives
  dscores = full(cotangents, values.T).reshape(C, 2, C, 1)
  dreaders, dk_pairs = d.scores_pullback(dscores, readers, k[:, None], precision)
  dreaders += full(cotangents, state.T).reshape(C, 2, K) * d.from_start[:, None]
  dk_pairs, dk_state = dk_pairs[:, 0], full(values, dstate.T) * d.to_end
  own = row_sums(do * values)
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    dg = gate_pullback(x.g, (readers * dreaders).sum(1), k * dk_pairs, k * dk_state, total)
  return Corrections(
    dreaders[:, 0] + own * k, dk_pairs + dk_state + own * q, dreaders[:, 1], du, dg
  )


rule = on_raw_tokens(Rule(_step, _lift, _read, _chunk, _begin_pullback, _pullback), _corrections)


# --- read by rows ----------------------------------------------------------------------------------------------------
#
# The same state, read as o = S q: q is as wide as the values, o as the keys, and it is the OUTPUT that decays channel by channel:
#     o_i = head_i * (S q_i) + sum_j (q_i . v'_j) between(i, j) * k_j
# With S^T for S this is Oja's rule, whose decay stands on the value side.


def _step_by_rows(state, x: Corrections):
  state, _ = _step(state, x._replace(q=jnp.zeros_like(x.k)))
  return state, _read_rows(None, state, x)


def _read_rows(before, after, x: Corrections):
  return (after * x.q[None, :]).sum(1)


class _Reads(NamedTuple):
  """What the outputs of a chunk need beside the state."""

  q: Float[Array, "C V"]
  k: Float[Array, "C K"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]
  decay: Decay


def _chunk_by_rows(x: Corrections, masks: Masks | None, precision) -> Chunk:
  d, K = decay(x.g, len(x.k), x.k.dtype, masks), x.k.shape[-1]
  scores = d.scores(x.r[:, None], x.k[:, None], precision, careful=True)
  _, W, U = _inverse(x, d, scores[:, 0, :, 0], precision)
  A, B = (jnp.matmul(transposed(x.k * d.to_end), y, precision=precision) for y in (W, U))
  return Chunk(diagonal(d.total, K) - A, B, _Reads(x.q, x.k, W, U, d), jnp.zeros_like(x.k))


def _respond_by_rows(x: _Reads, state: Array, precision) -> Array:
  full = partial(jnp.matmul, precision=precision)
  scores = full(x.q, (x.U - full(x.W, state)).T)
  own = jnp.diagonal(scores)[:, None] * x.k
  pairs, _ = x.decay.scores_pullback(
    scores[:, None, :, None], x.k[:, None], x.k[:, None], precision
  )
  return full(x.q, state.T) * x.decay.from_start + pairs[:, 0] + own


class _SolvedByRows(NamedTuple):
  d: Decay
  T: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]
  dscores: Float[Array, "C C"]
  dvalues: Float[Array, "C V"]


def _begin_pullback_by_rows(x: Corrections, masks: Masks | None, do: Array, precision):
  d, K = decay(x.g, len(x.k), x.k.dtype, masks), x.k.shape[-1]
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(jnp.stack([do, x.r], axis=1), x.k[:, None], precision, careful=True)[..., 0]
  dscores, (T, W, U) = scores[:, 0], _inverse(x, d, scores[:, 1], precision)
  dvalues = full(transposed(dscores), x.q)
  A = diagonal(d.total, K) - full(transposed(x.k * d.to_end), W)
  D = full(transposed(do * d.from_start), x.q) - full(transposed(W), dvalues)
  return Affine(A, D), _SolvedByRows(d, T, W, U, dscores, dvalues)


def _pullback_by_rows(
  x: Corrections,
  masks: Masks | None,
  kept: _SolvedByRows,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> Corrections:
  q, k, d, (C, K) = x.q, x.k, kept.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  values = kept.U - full(kept.W, state)
  du = full(transposed(kept.T), kept.dvalues + full(k * d.to_end, dstate))
  readers, seen = jnp.stack([do, x.r], axis=1), jnp.stack([q, -du], axis=1).reshape(2 * C, -1)
  scores = full(seen, values.T).reshape(C, 2, C, 1)
  found, dk_pairs = d.scores_pullback(scores, readers, k[:, None], precision)
  found += full(seen, state.T).reshape(C, 2, K) * d.from_start[:, None]
  dk_pairs, dk_state = dk_pairs[:, 0], full(values, dstate.T) * d.to_end
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    dg = gate_pullback(x.g, (readers * found).sum(1), k * dk_pairs, k * dk_state, total)
  dq = full(kept.dscores, values) + full(do * d.from_start, state)
  own = jnp.diagonal(scores[:, 0, :, 0])[:, None]
  return Corrections(dq, dk_pairs + dk_state + own * do, found[:, 1], du, dg)


_by_rows = Rule(
  _step_by_rows,
  _lift,
  _read_rows,
  _chunk_by_rows,
  _begin_pullback_by_rows,
  _pullback_by_rows,
  _respond_by_rows,
)
by_rows = on_raw_tokens(_by_rows, _corrections)
