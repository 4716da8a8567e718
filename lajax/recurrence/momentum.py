"""Momentum delta rule: the state moves by a decayed sum of its corrections.

    M_t = e^m_t M_{t-1} - eta_t k_t e_t^T ,  e_t = v_t - S_{t-1}^T p_t ,
    S_t = e^g_t S_{t-1} - beta_t M_t

Both are one state X of 2 K rows, S above M, with an affine update: decays of 2 x 2 numbers, and a
term of rank one.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import diagonal, transposed
from lajax.recurrence.decays import Masks, decay_of, preceding
from lajax.recurrence.family import MATRIX, QKV, Call, Family, Problem
from lajax.recurrence.rule import Affine, Chunk, Rule
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
# and that decays to token i. So S_i has -Y_ij of the write, with
#     Y_ij = sum_{j <= l <= i} between_g(i, l) beta_l between_m(l, j)
# whose terms all have one sign, and eta_j Y_ij of k_j e_j^T. The same sum from the chunk's start is
# y_i, of its first M. The errors e solve a triangular system, as in the delta rule: with N the
# scores of p and k times eta_j Y_{i-1,j}, and T = (I + N)^-1,
#     e = T v - T [before_g p, -y_{i-1} p] X
# P are the scores of q and k times eta_j Y_ij.


def _chunk(x: MomentumTokens, masks: Masks | None, precision) -> Chunk:
  C, K, full = *x.k.shape, partial(jnp.matmul, precision=precision)
  of_S, of_M, plain = (decay_of(g, C, x.k.dtype, masks) for g in (x.g, x.m, None))
  beta, eta = x.beta[:, None], x.eta[None]
  Y = full(of_S.between, beta * of_M.between) * eta
  y = full(of_S.between, beta * of_M.from_start)
  y_before = (
    preceding(y) if masks is None else jnp.where(masks.from_start[:, None], preceding(y), 0)
  )
  readers = jnp.stack([x.q, x.p], axis=1)
  scores = plain.scores(readers, x.k[:, None], precision, careful=True)[..., 0]
  P, N = scores[:, 0] * Y, jnp.tril(scores[:, 1] * preceding(Y), -1)
  T = unit_lower_inverse(N)
  reads = full(T, jnp.concatenate([x.p * of_S.before, -x.p * y_before], axis=1))
  errors = full(T, x.v)
  written = jnp.concatenate([x.k * Y[-1][:, None], -x.k * x.eta[:, None] * of_M.to_end], axis=1)
  written = transposed(written)
  kept = jnp.concatenate([diagonal(of_S.total, K), diagonal(-y[-1], K)], axis=1)
  momentum = jnp.concatenate([jnp.zeros((K, K), x.k.dtype), diagonal(of_M.total, K)], axis=1)
  return Chunk(
    A=jnp.concatenate([kept, momentum]) - full(written, reads),
    B=full(written, errors),
    R=jnp.concatenate([x.q * of_S.from_start, -x.q * y], axis=1) - full(P, reads),
    O=full(P, errors),
  )


rule = Rule(_step, _lift, _read, _chunk, log_decays=("g", "m"))


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
