"""Diagonal plus low rank: S_t = Diag(exp g) S_{t-1} + b (S_{t-1}^T a)^T + k v^T, o = scale S_t^T q; a reads the un-decayed state.

RWKV-7, Comba and IPLR are of this form (Comba: a = p, b = -beta k, v = beta v).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, row_sums, transposed
from lajax.recurrence.decays import Decay, Masks, decay, following, gate_pullback, preceding
from lajax.recurrence.linear_attention import decay_state, token_decay
from lajax.recurrence.rule import Affine, Chunk, Rule
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
  decay = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  return Affine(jnp.diag(decay) + x.b[:, None] * x.a[None, :], x.k[:, None] * x.v[None, :])


def _read(before, after, x: DplrTokens):
  return (after * x.q[:, None]).sum(0)


# --- chunks ----------------------------------------------------------------------------------------------------------
#
# What the tokens of a chunk read is w = (a before) S + N_ab w + N_ak v, N the scores of a with b and with k over the intervals
# that end before the reading token. So w = W S + U with W = T (a before), U = T N_ak v, T = (I - N_ab)^-1; and with P the
# scores of q with b and with k:
#     o  = (q from_start) S + P_b w + P_k v              = (q from_start + P_b W) S + P_b U + P_k v
#     S' = total S + (b to_end)^T w + (k to_end)^T v   = (total + (b to_end)^T W) S + (b to_end)^T U + (k to_end)^T v


class _Solved(NamedTuple):
  d: Decay
  T: Float[Array, "C C"]
  N_ak: Float[Array, "C C"]
  P: Float[Array, "C C 2"]  # P_b and P_k
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]


def _solve(x: DplrTokens, masks: Masks | None, precision) -> _Solved:
  """The decays, all scores, T, W and U."""
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(_readers(x), _writers(x), precision, careful=True)
  N = d.inside(preceding(scores[:, 1:]))[:, 0]
  T = unit_lower_inverse(-N[..., 0], precision)
  return _Solved(
    d, T, N[..., 1], scores[:, 0], full(T, x.a * d.before), full(T, full(N[..., 1], x.v))
  )


def _readers(x: DplrTokens) -> Float[Array, "C 2 K"]:
  """What a reads before its token's decay, it would read one token earlier after that one's."""
  return jnp.stack([x.q, following(x.a)], axis=1)


def _writers(x: DplrTokens) -> Float[Array, "C 2 K"]:
  return jnp.stack([x.b, x.k], axis=1)


def _chunk(x: DplrTokens, masks: Masks | None, precision) -> Chunk:
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  of_b, of_k = transposed(x.b * s.d.to_end), transposed(x.k * s.d.to_end)
  A, B = diagonal(s.d.total, x.k.shape[-1]) + full(of_b, s.W), full(of_b, s.U) + full(of_k, x.v)
  P_b, P_k = s.P[..., 0], s.P[..., 1]
  return Chunk(A, B, x.q * s.d.from_start + full(P_b, s.W), full(P_b, s.U) + full(P_k, x.v))


def _begin_pullback(x: DplrTokens, masks: Masks | None, do: Array, precision):
  s, full = _solve(x, masks, precision), partial(jnp.matmul, precision=precision)
  A = diagonal(s.d.total, x.k.shape[-1]) + full(transposed(x.b * s.d.to_end), s.W)
  return Affine(A, full(transposed(x.q * s.d.from_start + full(s.P[..., 0], s.W)), do)), s


def _pullback(
  x: DplrTokens,
  masks: Masks | None,
  kept: _Solved,
  state: Array,
  dstate: Array,
  do: Array,
  precision,
) -> DplrTokens:
  d, (C, K) = kept.d, x.k.shape
  full = partial(jnp.matmul, precision=precision)
  readers, writers = _readers(x), _writers(x)
  w = full(kept.W, state) + kept.U
  dwritten = full(transposed(kept.P.reshape(C, 2 * C)), do)
  dwritten = (dwritten + full((writers * d.to_end[:, None]).reshape(2 * C, K), dstate)).reshape(
    C, 2, -1
  )
  dz = full(transposed(kept.T), dwritten[:, 0])
  dv = dwritten[:, 1] + full(transposed(kept.N_ak), dz)
  reads, written = (
    jnp.stack([do, dz], axis=1).reshape(2 * C, -1),
    jnp.stack([w, x.v], axis=1).reshape(2 * C, -1),
  )
  dscores = full(reads, written.T).reshape(C, 2, C, 2)
  dscores = jnp.concatenate([dscores[:, :1], following(d.inside(dscores[:, 1:]))], axis=1)
  dreaders, dwriters = d.scores_pullback(dscores, readers, writers, precision)
  from_state = full(reads, state.T).reshape(C, 2, K)
  dq, da = (
    dreaders[:, 0] + from_state[:, 0] * d.from_start,
    preceding(dreaders[:, 1]) + from_state[:, 1] * d.before,
  )
  to_state = full(written, dstate.T).reshape(C, 2, K) * d.to_end[:, None]
  dg = None
  if x.g is not None:
    total = d.total * row_sums(state * dstate)[:, 0]
    ahead = x.q * dq + following(x.a * da)
    dg = gate_pullback(x.g, ahead, (writers * dwriters).sum(1), (writers * to_state).sum(1), total)
  # The scores between which no decay stands: of q with its own token, and of a with the one before.
  at = lambda y, z: row_sums(y[:, None] * z.reshape(C, 2, -1))
  own, neighbour = at(do, written), d.neighbours(at(following(dz), written))
  dq += (own * writers).sum(1)
  da += preceding((neighbour * writers).sum(1))
  dwriters += to_state + own * x.q[:, None] + neighbour * following(x.a)[:, None]
  return DplrTokens(dq, dwriters[:, 1], dv, da, dwriters[:, 0], dg)


rule = Rule(_step, _lift, _read, _chunk, _begin_pullback, _pullback)
