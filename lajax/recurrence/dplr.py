"""Diagonal plus low rank: S_t = Diag(exp g) S_{t-1} + b (S_{t-1}^T a)^T + k v^T, o = scale S_t^T q; a reads the un-decayed state.

RWKV-7, Comba and IPLR are of this form (Comba: a = p, b = -beta k, v = beta v).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import Decay, Masks, decay, following, gate_pullback, preceding, transposed, unit_lower_inverse
from lajax.recurrence.drive import Affine, Chunk, Rule
from lajax.recurrence.linear_attention import decay_state, token_decay


class Tokens(NamedTuple):
  """q is already scaled; g is None, [B T HV] or [B T HV K]."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  a: Float[Array, "B T H K"]
  b: Float[Array, "B T H K"]
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


def _step(state, x: Tokens):
  old = (state * x.a[:, None]).sum(0)
  state = decay_state(x.g, state) + x.b[:, None] * old[None, :] + x.k[:, None] * x.v[None, :]
  return state, _read(None, state, x)


def _lift(x: Tokens) -> Affine:
  decay = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  return Affine(jnp.diag(decay) + x.b[:, None] * x.a[None, :], x.k[:, None] * x.v[None, :])


def _read(before, after, x: Tokens):
  return (after * x.q[:, None]).sum(0)


# --- chunks ----------------------------------------------------------------------------------------------------------
#
# What the tokens of a chunk read is w = (a before) S + N_ab w + N_ak v, N the scores of a with b and with k over the intervals
# that end before the reading token. So w = W S + U with W = T (a before), U = T N_ak v, T = (I - N_ab)^-1; and with P the
# scores of q with b and with k:
#     o  = (q head) S + P_b w + P_k v              = (q head + P_b W) S + P_b U + P_k v
#     S' = total S + (b tail)^T w + (k tail)^T v   = (total + (b tail)^T W) S + (b tail)^T U + (k tail)^T v


class _Solved(NamedTuple):
  T: Float[Array, "C C"]
  N_ak: Float[Array, "C C"]
  P_b: Float[Array, "C C"]
  P_k: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]


def _solve(x: Tokens, d: Decay, precision) -> _Solved:
  full = partial(jnp.matmul, precision=precision)
  N_ab, N_ak = d.scores_before(x.a, x.b, precision, careful=True), d.scores_before(x.a, x.k, precision)
  P_b, P_k = (d.scores(x.q, y, precision, diagonal=True) for y in (x.b, x.k))
  T = unit_lower_inverse(-N_ab, precision)
  both = full(T, jnp.concatenate([x.a * d.before, full(N_ak, x.v)], axis=-1))
  return _Solved(T, N_ak, P_b, P_k, both[:, : x.a.shape[-1]], both[:, x.a.shape[-1] :])


def _chunk(x: Tokens, masks: Masks | None, precision) -> Chunk:
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  s, full = _solve(x, d, precision), partial(jnp.matmul, precision=precision)
  written = transposed(x.b * d.tail)
  A = jnp.diag(jnp.broadcast_to(d.total, x.k.shape[-1:])) + full(written, s.W)
  B = full(written, s.U) + full(transposed(x.k * d.tail), x.v)
  return Chunk(A, B, x.q * d.head + full(s.P_b, s.W), full(s.P_b, s.U) + full(s.P_k, x.v))


def _begin_pullback(x: Tokens, masks: Masks | None, do: Array, precision):
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  s, full = _solve(x, d, precision), partial(jnp.matmul, precision=precision)
  A = jnp.diag(jnp.broadcast_to(d.total, x.k.shape[-1:])) + full(transposed(x.b * d.tail), s.W)
  return Affine(A, full(transposed(x.q * d.head + full(s.P_b, s.W)), do)), s


def _pullback(
  x: Tokens, masks: Masks | None, kept: _Solved, state: Array, dstate: Array, do: Array, precision
) -> Tokens:
  q, k, v, a, b = x.q, x.k, x.v, x.a, x.b
  d = decay(x.g, len(k), k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  w = full(kept.W, state) + kept.U
  dz = full(transposed(kept.T), full(transposed(kept.P_b), do) + full(b * d.tail, dstate))
  dv = full(transposed(kept.P_k), do) + full(k * d.tail, dstate) + full(transposed(kept.N_ak), dz)
  dq_b, db_q = d.scores_pullback(full(do, w.T), q, b, precision)
  dq_k, dk_q = d.scores_pullback(full(do, v.T), q, k, precision)
  dN_ab, dN_ak = full(dz, w.T), full(dz, v.T)
  (da_b, db_a), (da_k, dk_a) = (
    d.scores_before_pullback(dN_ab, a, b, precision),
    d.scores_before_pullback(dN_ak, a, k, precision),
  )
  dq_state, da_state = full(do, state.T) * d.head, full(dz, state.T) * d.before
  db_state, dk_state = full(w, dstate.T) * d.tail, full(v, dstate.T) * d.tail
  at = lambda x, y: (x * y).sum(-1, keepdims=True)  # the scores' cotangents where no decay stands between
  own_b, own_k = at(do, w), at(do, v)
  next_b, next_k = d.neighbours(at(following(dz), w)), d.neighbours(at(following(dz), v))
  dq, da = dq_b + dq_k + dq_state, da_b + da_k
  dk_pairs, db_pairs = dk_q + dk_a, db_q + db_a
  dg = None
  if x.g is not None:
    total = d.total * (state * dstate).sum(-1)
    ahead = q * dq + following(a * (da + da_state))
    dg = gate_pullback(x.g, ahead, k * dk_pairs + b * db_pairs, k * dk_state + b * db_state, total)
  beside = preceding(next_b * b + next_k * k)
  return Tokens(
    dq + own_b * b + own_k * k,
    dk_pairs + dk_state + own_k * q + next_k * following(a),
    dv,
    da + da_state + beside,
    db_pairs + db_state + own_b * q + next_b * following(a),
    dg,
  )


rule = Rule(_step, _lift, _read, _chunk, _begin_pullback, _pullback)
