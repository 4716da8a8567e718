"""Momentum delta rule: the state moves by a decayed sum of its corrections.

    M_t = e^m_t M_{t-1} - eta_t k_t e_t^T ,  e_t = v_t - S_{t-1}^T p_t ,
    S_t = e^g_t S_{t-1} - beta_t M_t

Both are one state X of 2 K rows, S above M, with an affine update: decays of 2 x 2 numbers, and a
term of rank one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, row_sums, transposed
from lajax.recurrence.decays import Masks, decay_of, preceding
from lajax.recurrence.family import MATRIX, QKV, Call, Family, Problem
from lajax.recurrence.rule import Affine, Chunk, Pullback, Rule
from lajax.recurrence.triangle import unit_lower_inverse


class MomentumTokens(NamedTuple):
  """q is already scaled; g is the log decay of S, m that of M."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  p: Float[Array, "B T H K"]
  v: Float[Array, "B T HV V"]
  beta: Float[Array, "B T HV"]
  eta: Float[Array, "B T HV"]
  g: Float[Array, "B T HV"]
  m: Float[Array, "B T HV"]


def _step(state, x: MomentumTokens):
  S, M = jnp.split(state, 2)
  error = x.v - (S * x.p[:, None]).sum(0)
  M = jnp.exp(x.m) * M - x.eta * x.k[:, None] * error[None, :]
  state = jnp.concatenate([jnp.exp(x.g) * S - x.beta * M, M])
  return state, _read(None, state, x)


def _lift(x: MomentumTokens) -> Affine:
  eye = jnp.eye(len(x.k), dtype=x.k.dtype)
  momentum = jnp.concatenate([x.eta * x.k[:, None] * x.p[None, :], jnp.exp(x.m) * eye], axis=1)
  kept = jnp.concatenate([jnp.exp(x.g) * eye, jnp.zeros_like(eye)], axis=1)
  write = -x.eta * x.k[:, None] * x.v[None, :]
  return Affine(
    jnp.concatenate([kept - x.beta * momentum, momentum]), jnp.concatenate([-x.beta * write, write])
  )


def _read(before, after, x: MomentumTokens):
  return (after[: len(x.q)] * x.q[:, None]).sum(0)


# --- chunks --------------------------------------------------------------------------------------
#
# A write into M at token j has decayed by between_m(l, j) when token l moves S by -beta_l times M,
# and that decays to token i. So S_i has -Y_ij of the write -k_j e_j^T, with
#     Y_ij = eta_j sum_{j <= l <= i} between_g(i, l) beta_l between_m(l, j)
# whose terms all have one sign. The same sum from the chunk's start is y_i, of its first M. The
# errors e solve a triangular system, as in the delta rule: with P the scores of q and k times Y_ij,
# N those of p and k times Y_{i-1,j}, and T = (I + N)^-1,
#     e = T v - W X ,   W = T [before_g p, -y_{i-1} p]
#     o = [from_start_g q, -y q] X + P e ,   X' = kept X + [Y_last k, -eta to_end_m k]^T e


class _Weights(NamedTuple):
  """Weights of a chunk, from its gates alone; all else of it is products with them."""

  pairs: Float[Array, "C 2 C"]  # of the writes in what q and p read
  from_S: Float[Array, "C 2 1"]  # of the first S in it
  from_M: Float[Array, "C 2 1"]
  to_S: Float[Array, "C 1"]  # of the writes in the last S
  to_M: Float[Array, "C 1"]
  total_S: Float[Array, "1"]  # of the first S in the last one
  total_MS: Float[Array, "1"]  # of the first M in the last S
  total_M: Float[Array, "1"]


def _weights(beta, eta, g, m, masks: Masks | None, precision) -> _Weights:
  C, full = len(g), partial(jnp.matmul, precision=precision)
  of_S, of_M = (decay_of(x, C, beta.dtype, masks) for x in (g, m))
  Y = full(of_S.between, beta[:, None] * of_M.between) * eta[None]
  y = full(of_S.between, beta[:, None] * of_M.from_start)
  y_before = preceding(y)
  if masks is not None:
    y_before = jnp.where(masks.from_start[:, None], y_before, 0)
  return _Weights(
    jnp.stack([Y, jnp.tril(preceding(Y), -1)], axis=1),
    jnp.stack([of_S.from_start, of_S.before], axis=1),
    -jnp.stack([y, y_before], axis=1),
    Y[-1][:, None],
    -eta[:, None] * of_M.to_end,
    of_S.total,
    -y[-1],
    of_M.total,
  )


class _Solved(NamedTuple):
  scores: Float[Array, "C 2 C"]  # of q and p with k, inside a document
  P: Float[Array, "C C"]
  T: Float[Array, "C C"]
  W: Float[Array, "C 2*K"]


def _solve(x: MomentumTokens, w: _Weights, masks: Masks | None, precision) -> _Solved:
  plain, readers = decay_of(None, len(x.k), x.k.dtype, masks), jnp.stack([x.q, x.p], axis=1)
  scores = plain.scores(readers, x.k[:, None], precision, careful=True)[..., 0]
  weighted = scores * w.pairs
  T = unit_lower_inverse(weighted[:, 1])
  W = jnp.matmul(T, _both(x.p, w.from_S[:, 1], w.from_M[:, 1]), precision=precision)
  return _Solved(scores, weighted[:, 0], T, W)


def _both(x: Float[Array, "C K"], of_S, of_M) -> Float[Array, "C 2*K"]:
  return jnp.concatenate([x * of_S, x * of_M], axis=1)


def _ends(x: MomentumTokens, w: _Weights, s: _Solved, precision) -> tuple[Array, Array, Array]:
  """A and R of a chunk, and the transposed keys that write its last state."""
  K, full = x.k.shape[-1], partial(jnp.matmul, precision=precision)
  keys = transposed(_both(x.k, w.to_S, w.to_M))
  of_S = jnp.concatenate([diagonal(w.total_S, K), diagonal(w.total_MS, K)], axis=1)
  of_M = jnp.concatenate([jnp.zeros((K, K), x.k.dtype), diagonal(w.total_M, K)], axis=1)
  R = _both(x.q, w.from_S[:, 0], w.from_M[:, 0]) - full(s.P, s.W)
  return jnp.concatenate([of_S, of_M]) - full(keys, s.W), R, keys


def _chunk(x: MomentumTokens, masks: Masks | None, precision) -> Chunk:
  full = partial(jnp.matmul, precision=precision)
  w = _weights(x.beta, x.eta, x.g, x.m, masks, precision)
  s = _solve(x, w, masks, precision)
  (A, R, keys), errors = _ends(x, w, s, precision), full(s.T, x.v)
  return Chunk(A, full(keys, errors), R, full(s.P, errors))


def _begin(x: MomentumTokens, masks: Masks | None, do: Array, precision):
  weights = partial(_weights, masks=masks, precision=precision)
  w, back = jax.vjp(weights, x.beta, x.eta, x.g, x.m)
  s = _solve(x, w, masks, precision)
  A, R, _ = _ends(x, w, s, precision)
  return Affine(A, jnp.matmul(transposed(R), do, precision=precision)), (w, back, s)


def _finish(x: MomentumTokens, masks: Masks | None, begun, state, dstate, do, precision):
  """Cotangents of a chunk's tokens: its products by hand, its weights by `jax.vjp`."""
  (w, back, s), (C, K), full = begun, x.k.shape, partial(jnp.matmul, precision=precision)
  errors = full(s.T, x.v) - full(s.W, state)
  derrors = full(transposed(s.P), do) + full(_both(x.k, w.to_S, w.to_M), dstate)
  dv = full(transposed(s.T), derrors)
  readers = jnp.stack([x.q, x.p], axis=1)
  reads = jnp.stack([do, -dv], axis=1).reshape(2 * C, -1)
  pairs = full(reads, errors.T).reshape(C, 2, C)
  weighted = pairs * w.pairs
  if masks is not None:
    weighted = jnp.where(masks.between[:, None], weighted, 0)
  weighted = weighted.reshape(2 * C, C)
  of_S, of_M = jnp.split(full(reads, state.T).reshape(C, 2, 2 * K), 2, axis=-1)
  to_S, to_M = jnp.split(full(errors, dstate.T), 2, axis=-1)
  dreaders = full(weighted, x.k).reshape(C, 2, K) + of_S * w.from_S + of_M * w.from_M
  dk = full(transposed(weighted), readers.reshape(2 * C, K)) + to_S * w.to_S + to_M * w.to_M
  total = lambda state, dstate: row_sums((state * dstate).reshape(1, -1))[0]
  (S, M), (dS, dM) = jnp.split(state, 2), jnp.split(dstate, 2)
  dweights = _Weights(
    pairs * s.scores,
    row_sums(readers * of_S),
    row_sums(readers * of_M),
    row_sums(x.k * to_S),
    row_sums(x.k * to_M),
    *(total(S, dS), total(M, dS), total(M, dM)),
  )
  return MomentumTokens(dreaders[:, 0], dk, dreaders[:, 1], dv, *back(dweights))


rule = Rule(_step, _lift, _read, _chunk, pullback=Pullback(_begin, _finish), log_decays=("g", "m"))


def _problem(call: Call) -> Problem:
  tokens = MomentumTokens(*(call.arrays[name] for name in ("q", "k", "p", "v", *GATES)))
  state, split = jnp.concatenate(call.state, axis=2), lambda X: tuple(jnp.split(X, 2, axis=2))
  return Problem(rule, tokens, state, call.segment_ids, final=split)


GATES = ("beta", "eta", "g", "g_momentum")
MOMENTUM_DELTA_RULE = Family(
  arrays=QKV | {"p": "B T H K"} | dict.fromkeys(GATES, "B T HV"),
  state=MATRIX | {"M": "B HV K V"},
  gates=GATES,
  operands=("q", "k", "p", "v"),
  problem=_problem,
)
