"""Delta rule: the state is corrected towards v at k.

    S = Diag(exp g) S ; S = S + k (u - S^T r)^T ,  o = S^T q

With a write strength beta, r = beta k and u = beta v (DeltaNet, Gated DeltaNet, KDA); with an erase
gate b and a write gate w per channel, r = b k and u = w v (Gated DeltaNet 2).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, row_sums, spread, transposed
from lajax.recurrence.decays import Decay, Masks, decay_of, gate_pullback
from lajax.recurrence.linear_attention import decay_state, token_decay
from lajax.recurrence.rule import Affine, Chunk, Pullback, Rule, bind, on_raw_tokens
from lajax.recurrence.triangle import unit_lower_inverse


class DeltaTokens(NamedTuple):
  """q is already scaled. Strengths are per head or per channel; a write of None is the erase."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  erase: Float[Array, "B T HV"] | Float[Array, "B T HV K"]
  write: Float[Array, "B T HV V"] | None
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


class Corrections(NamedTuple):
  """Tokens with their strengths multiplied in: r reads the old value, u is the new value.

  Arrays of one token have no axis C.
  """

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
  decays = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  A = jnp.diag(decays) - x.k[:, None] * (x.r * decays)[None, :]
  return Affine(A, x.k[:, None] * x.u[None, :])


def _read(before, after, x: Corrections):
  return (after * x.q[:, None]).sum(0)


# --- chunks --------------------------------------------------------------------------------------
#
# N are the scores of r and k below the diagonal, and T = (I + N)^-1. With X = u - (r from_start) S,
# the values that the tokens of a chunk really write are T X (the UT transform: Yang et al. 2024,
# arXiv:2406.06484, section 3.2), that is U - W S with W = T (r from_start) and U = T u. With P the
# scores of q and k:
#     o  = (q from_start) S + P (U - W S)        = (q from_start - P W) S + P U
#     S' = total S + (k to_end)^T (U - W S)      = (total - (k to_end)^T W) S + (k to_end)^T U


class _Solved(NamedTuple):
  d: Decay
  scores: Float[Array, "C 2 C 1"]  # P and N, with the diagonal
  T: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]

  @property
  def P(self) -> Float[Array, "C C"]:
    return self.scores[:, 0, :, 0]


def _solve(bounded: bool, x: Corrections, masks: Masks | None, precision) -> _Solved:
  d = decay_of(x.g, len(x.k), x.k.dtype, masks, bounded)
  readers = jnp.stack([x.q, x.r], axis=1)
  scores = d.scores(readers, x.k[:, None], precision, careful=True)
  return _Solved(d, scores, *_inverse(x, d, scores[:, 1, :, 0], precision))


def _inverse(
  x: Corrections, d: Decay, N: Float[Array, "C C"], precision
) -> tuple[Array, Array, Array]:
  """T, W and U."""
  T, full = unit_lower_inverse(jnp.tril(N, -1)), partial(jnp.matmul, precision=precision)
  return T, full(T, x.r * d.from_start), full(T, x.u)


def _chunk(bounded: bool, x: Corrections, masks: Masks | None, precision) -> Chunk:
  s, full = _solve(bounded, x, masks, precision), partial(jnp.matmul, precision=precision)
  written = transposed(x.k * s.d.to_end)
  A = diagonal(s.d.total, x.k.shape[-1]) - full(written, s.W)
  return Chunk(A, full(written, s.U), x.q * s.d.from_start - full(s.P, s.W), full(s.P, s.U))


def _begin(bounded: bool, x: Corrections, masks: Masks | None, do: Array, precision):
  s, full = _solve(bounded, x, masks, precision), partial(jnp.matmul, precision=precision)
  A = diagonal(s.d.total, x.k.shape[-1]) - full(transposed(x.k * s.d.to_end), s.W)
  return Affine(A, full(transposed(x.q * s.d.from_start - full(s.P, s.W)), do)), s


def _finish(
  x: Corrections,
  masks: Masks | None,
  solved: _Solved,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> Corrections:
  q, k, r, d, (C, K) = x.q, x.k, x.r, solved.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  values = solved.U - full(solved.W, state)
  du = full(transposed(solved.T), full(transposed(solved.P), do) + full(k * d.to_end, dstate))
  readers = jnp.stack([q, r], axis=1)
  cotangents = jnp.stack([do, -du], axis=1).reshape(2 * C, -1)  # of what q and r read
  dscores = full(cotangents, values.T).reshape(C, 2, C, 1)
  dreaders_state = full(cotangents, state.T).reshape(C, 2, K) * d.from_start[:, None]
  dk_state = full(values, dstate.T) * d.to_end
  scores = None if x.g is None else solved.scores
  dreaders, dk, crossing = d.scores_pullback(dscores, readers, k[:, None], precision, scores)
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    from_start = (readers * dreaders_state).sum(1)
    dg = gate_pullback(x.g, crossing, from_start, k * dk_state, total)
  dreaders += dreaders_state
  own = row_sums(do * values)  # a token's own pair, between which no decay stands
  dq, dk = dreaders[:, 0] + own * k, dk[:, 0] + dk_state + own * q
  return Corrections(dq, dk, dreaders[:, 1], du, dg)


def _on_corrections(bounded: bool) -> Rule:
  pullback = Pullback(bind(_begin, bounded), _finish)
  return Rule(_step, _lift, _read, bind(_chunk, bounded), pullback=pullback)


corrections = _on_corrections(bounded=False)
rule = on_raw_tokens(corrections, _corrections)
# No log decay is below LOWEST_BOUND.
bounded = on_raw_tokens(_on_corrections(bounded=True), _corrections)


# --- read by rows --------------------------------------------------------------------------------
#
# The same state, read as o = S q: q is as wide as the values and o as the keys, so the OUTPUT
# decays channel by channel:
#     o_i = from_start(i) * (S q_i) + sum_j (q_i . written_j) between(i, j) * k_j
# With S^T for S this is Oja's rule, whose decay stands on the value side.


def _step_by_rows(state, x: Corrections):
  state, _ = _step(state, x._replace(q=jnp.zeros_like(x.k)))
  return state, _read_rows(None, state, x)


def _read_rows(before, after, x: Corrections):
  return (after * x.q[None, :]).sum(1)


class _Reads(NamedTuple):
  """Values of a chunk that its outputs need besides the state."""

  q: Float[Array, "C V"]
  k: Float[Array, "C K"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]
  d: Decay


def _chunk_by_rows(x: Corrections, masks: Masks | None, precision) -> Chunk:
  d, K = decay_of(x.g, len(x.k), x.k.dtype, masks), x.k.shape[-1]
  scores = d.scores(x.r[:, None], x.k[:, None], precision, careful=True)
  _, W, U = _inverse(x, d, scores[:, 0, :, 0], precision)
  A, B = (jnp.matmul(transposed(x.k * d.to_end), y, precision=precision) for y in (W, U))
  return Chunk(diagonal(d.total, K) - A, B, _Reads(x.q, x.k, W, U, d), jnp.zeros_like(x.k))


def _respond_by_rows(x: _Reads, state: Array, precision) -> Array:
  full = partial(jnp.matmul, precision=precision)
  weights = full(x.q, (x.U - full(x.W, state)).T)
  own = jnp.diagonal(weights)[:, None] * x.k
  # If the weights are the cotangent of scores with k, this sum is the cotangent of their reader:
  # sum_j weights_ij between(i, j) k_j.
  pairs, _, _ = x.d.scores_pullback(
    weights[:, None, :, None], x.k[:, None], x.k[:, None], precision
  )
  return full(x.q, state.T) * x.d.from_start + pairs[:, 0] + own


class _SolvedByRows(NamedTuple):
  d: Decay
  T: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]
  scores: Float[Array, "C 2 C 1"]  # of do and of r with k
  dvalues: Float[Array, "C V"]


def _begin_by_rows(x: Corrections, masks: Masks | None, do: Array, precision):
  d, K = decay_of(x.g, len(x.k), x.k.dtype, masks), x.k.shape[-1]
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(jnp.stack([do, x.r], axis=1), x.k[:, None], precision, careful=True)
  T, W, U = _inverse(x, d, scores[:, 1, :, 0], precision)
  dvalues = full(transposed(scores[:, 0, :, 0]), x.q)
  A = diagonal(d.total, K) - full(transposed(x.k * d.to_end), W)
  D = full(transposed(do * d.from_start), x.q) - full(transposed(W), dvalues)
  return Affine(A, D), _SolvedByRows(d, T, W, U, scores, dvalues)


def _finish_by_rows(
  x: Corrections,
  masks: Masks | None,
  solved: _SolvedByRows,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> Corrections:
  q, k, d, (C, K) = x.q, x.k, solved.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  values = solved.U - full(solved.W, state)
  du = full(transposed(solved.T), solved.dvalues + full(k * d.to_end, dstate))
  # do and r read the chunk with the cotangents q and -du, as q and r do in `_finish`.
  readers = jnp.stack([do, x.r], axis=1)
  cotangents = jnp.stack([q, -du], axis=1).reshape(2 * C, -1)
  dscores = full(cotangents, values.T).reshape(C, 2, C, 1)
  dreaders_state = full(cotangents, state.T).reshape(C, 2, K) * d.from_start[:, None]
  dk_state = full(values, dstate.T) * d.to_end
  scores = None if x.g is None else solved.scores
  dreaders, dk, crossing = d.scores_pullback(dscores, readers, k[:, None], precision, scores)
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    from_start = (readers * dreaders_state).sum(1)
    dg = gate_pullback(x.g, crossing, from_start, k * dk_state, total)
  dq = full(solved.scores[:, 0, :, 0], values) + full(do * d.from_start, state)
  own = jnp.diagonal(dscores[:, 0, :, 0])[:, None]
  dr = dreaders[:, 1] + dreaders_state[:, 1]
  return Corrections(dq, dk[:, 0] + dk_state + own * do, dr, du, dg)


_by_rows = Rule(
  _step_by_rows,
  _lift,
  _read_rows,
  _chunk_by_rows,
  _respond_by_rows,
  pullback=Pullback(_begin_by_rows, _finish_by_rows),
)
by_rows = on_raw_tokens(_by_rows, _corrections)
