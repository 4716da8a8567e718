"""Diagonal plus low rank: the low-rank part reads the state before its decay.

    S_t = Diag(exp g) S_{t-1} + b (S_{t-1}^T a)^T + k v^T ,  o = S_t^T q

RWKV-7, Comba and IPLR are of this form (Comba: a = p, b = -beta k, v = beta v).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, row_sums, transposed
from lajax.recurrence.decays import Decay, Masks, decay_of, following, gate_pullback, preceding
from lajax.recurrence.linear_attention import decay_state, token_decay
from lajax.recurrence.rule import Affine, Chunk, Pullback, Rule
from lajax.recurrence.triangle import unit_lower_inverse


class DplrTokens(NamedTuple):
  """q is already scaled; g is None, [B T HV] or [B T HV K]."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  a: Float[Array, "B T H K"]
  b: Float[Array, "B T H K"]
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


def _step(state, x: DplrTokens):
  old = (state * x.a[:, None]).sum(0)
  state = decay_state(x.g, state) + x.b[:, None] * old[None, :] + x.k[:, None] * x.v[None, :]
  return state, _read(None, state, x)


def _lift(x: DplrTokens) -> Affine:
  decays = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  return Affine(jnp.diag(decays) + x.b[:, None] * x.a[None, :], x.k[:, None] * x.v[None, :])


def _read(before, after, x: DplrTokens):
  return (after * x.q[:, None]).sum(0)


# --- chunks --------------------------------------------------------------------------------------
#
# What the tokens of a chunk read with a is w = (a before) S + N_b w + N_k v, where N are the scores
# of a with b and with k over the intervals that end before the reading token. So w = W S + U with
# T = (I - N_b)^-1, W = T (a before) and U = T N_k v. With P the scores of q with b and with k:
#     o  = (q from_start) S + P_b w + P_k v              = (q from_start + P_b W) S + P_b U + P_k v
#     S' = total S + (b to_end)^T w + (k to_end)^T v
#        = (total + (b to_end)^T W) S + (b to_end)^T U + (k to_end)^T v


class _Solved(NamedTuple):
  d: Decay
  # Of q, and of the a of the token after; with b, and with k. Row i - 1 of the latter has N of i.
  scores: Float[Array, "C 2 C 2"]
  T: Float[Array, "C C"]
  N_k: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]

  @property
  def P_b(self) -> Float[Array, "C C"]:
    return self.scores[:, 0, :, 0]

  @property
  def P_k(self) -> Float[Array, "C C"]:
    return self.scores[:, 0, :, 1]


def _solve(x: DplrTokens, masks: Masks | None, precision) -> _Solved:
  d = decay_of(x.g, len(x.k), x.k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(_readers(x), _writers(x), precision, careful=True)
  N = d.inside(preceding(scores[:, 1:]))[:, 0]
  T, N_k = unit_lower_inverse(-N[..., 0], precision), N[..., 1]
  return _Solved(d, scores, T, N_k, full(T, x.a * d.before), full(T, full(N_k, x.v)))


def _readers(x: DplrTokens) -> Float[Array, "C 2 K"]:
  """q, and the a of the token after: reading before a decay is reading after the one before it."""
  return jnp.stack([x.q, following(x.a)], axis=1)


def _writers(x: DplrTokens) -> Float[Array, "C 2 K"]:
  return jnp.stack([x.b, x.k], axis=1)


def _chunk(x: DplrTokens, masks: Masks | None, precision) -> Chunk:
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  of_b, of_k = transposed(x.b * s.d.to_end), transposed(x.k * s.d.to_end)
  A, B = diagonal(s.d.total, x.k.shape[-1]) + full(of_b, s.W), full(of_b, s.U) + full(of_k, x.v)
  R = x.q * s.d.from_start + full(s.P_b, s.W)
  return Chunk(A, B, R, full(s.P_b, s.U) + full(s.P_k, x.v))


def _begin(x: DplrTokens, masks: Masks | None, do: Array, precision):
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  A = diagonal(s.d.total, x.k.shape[-1]) + full(transposed(x.b * s.d.to_end), s.W)
  return Affine(A, full(transposed(x.q * s.d.from_start + full(s.P_b, s.W)), do)), s


def _finish(
  x: DplrTokens,
  masks: Masks | None,
  solved: _Solved,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> DplrTokens:
  d, (C, K) = solved.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  readers, writers = _readers(x), _writers(x)
  w = full(solved.W, state) + solved.U
  P = solved.scores[:, 0].reshape(C, 2 * C)  # for each token j, with b_j and with k_j
  dwritten = full(transposed(P), do) + full((writers * d.to_end[:, None]).reshape(2 * C, K), dstate)
  dwritten = dwritten.reshape(C, 2, -1)
  dw = full(transposed(solved.T), dwritten[:, 0])
  dv = dwritten[:, 1] + full(transposed(solved.N_k), dw)
  reads = jnp.stack([do, dw], axis=1).reshape(2 * C, -1)
  written = jnp.stack([w, x.v], axis=1).reshape(2 * C, -1)
  dscores = full(reads, written.T).reshape(C, 2, C, 2)
  dscores = jnp.concatenate([dscores[:, :1], following(d.inside(dscores[:, 1:]))], axis=1)
  scores = None if x.g is None else solved.scores
  dreaders, dwriters, crossing = d.scores_pullback(dscores, readers, writers, precision, scores)
  from_state = full(reads, state.T).reshape(C, 2, K)
  dq_state, da_state = from_state[:, 0] * d.from_start, from_state[:, 1] * d.before
  to_state = full(written, dstate.T).reshape(C, 2, K) * d.to_end[:, None]
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    from_start = x.q * dq_state + following(x.a * da_state)
    dg = gate_pullback(x.g, crossing, from_start, (writers * to_state).sum(1), total)
  # The pairs between which no decay stands: of q with its own token, and of a with the one before.
  at = lambda y, z: row_sums(y[:, None] * z.reshape(C, 2, -1))
  own, neighbour = at(do, written), d.neighbours(at(following(dw), written))
  dq = dreaders[:, 0] + dq_state + (own * writers).sum(1)
  da = preceding(dreaders[:, 1] + (neighbour * writers).sum(1)) + da_state
  dwriters += to_state + own * x.q[:, None] + neighbour * following(x.a)[:, None]
  return DplrTokens(dq, dwriters[:, 1], dv, da, dwriters[:, 0], dg)


rule = Rule(_step, _lift, _read, _chunk, pullback=Pullback(_begin, _finish))
