"""Delta rule: the state is corrected towards v at k. S = Diag(exp g) S ; S = S + k (u - S^T r)^T, o = scale S^T q.

With a write strength beta, r = beta k and u = beta v (DeltaNet, Gated DeltaNet, KDA); with an erase gate b and a write gate w
per channel, r = b k and u = w v (Gated DeltaNet 2).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import Decay, Masks, decay, gate_pullback, transposed, unit_lower_inverse
from lajax.recurrence.drive import Affine, Chunk, Rule
from lajax.recurrence.linear_attention import decay_state, token_decay


class Tokens(NamedTuple):
  """q is already scaled; r is what reads the old value, u the new value, both times their strength."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  r: Float[Array, "B T HV K"]
  u: Float[Array, "B T HV V"]
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None


def _step(state, x: Tokens):
  state = decay_state(x.g, state)
  error = x.u - (state * x.r[:, None]).sum(0)
  state = state + x.k[:, None] * error[None, :]
  return state, _read(None, state, x)


def _lift(x: Tokens) -> Affine:
  decay = token_decay(x.g, x.k) * jnp.ones_like(x.k)
  return Affine(jnp.diag(decay) - x.k[:, None] * (x.r * decay)[None, :], x.k[:, None] * x.u[None, :])


def _read(before, after, x: Tokens):
  return (after * x.q[:, None]).sum(0)


# --- chunks ----------------------------------------------------------------------------------------------------------
#
# With X = u - (r head) S, the values that the tokens of a chunk really write are v' = T X, T = (I + N)^-1, N the scores of r
# and k below the diagonal (the UT transform: Yang et al. 2024, arXiv:2406.06484, section 3.2). So v' = U - W S with
# W = T (r head), U = T u, and with P the scores of q and k:
#     o  = (q head) S + P v'            = (q head - P W) S + P U
#     S' = total S + (k tail)^T v'      = (total - (k tail)^T W) S + (k tail)^T U


class _Solved(NamedTuple):
  P: Float[Array, "C C"]
  T: Float[Array, "C C"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]


def _inverse(x: Tokens, d: Decay, precision) -> tuple[Array, Array, Array]:
  """T, W and U."""
  T = unit_lower_inverse(d.scores(x.r, x.k, precision, diagonal=False, careful=True))
  both = jnp.matmul(T, jnp.concatenate([x.r * d.head, x.u], axis=-1), precision=precision)
  return T, both[:, : x.r.shape[-1]], both[:, x.r.shape[-1] :]


def _solve(x: Tokens, d: Decay, precision) -> _Solved:
  inverse = _inverse(x, d, precision)
  return _Solved(d.scores(x.q, x.k, precision, diagonal=True), *inverse)


def _chunk(x: Tokens, masks: Masks | None, precision) -> Chunk:
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  s = _solve(x, d, precision)
  full = partial(jnp.matmul, precision=precision)
  written = transposed(x.k * d.tail)
  A = _diagonal(d.total, x.k) - full(written, s.W)
  return Chunk(A, full(written, s.U), x.q * d.head - full(s.P, s.W), full(s.P, s.U))


def _diagonal(total: Array, k: Array) -> Array:
  return jnp.diag(jnp.broadcast_to(total, k.shape[-1:]))


def _begin_pullback(x: Tokens, masks: Masks | None, do: Array, precision):
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  s = _solve(x, d, precision)
  full = partial(jnp.matmul, precision=precision)
  A = _diagonal(d.total, x.k) - full(transposed(x.k * d.tail), s.W)
  return Affine(A, full(transposed(x.q * d.head - full(s.P, s.W)), do)), s


def _pullback(
  x: Tokens, masks: Masks | None, kept: _Solved, state: Array, dstate: Array, do: Array, precision
) -> Tokens:
  q, k, r = x.q, x.k, x.r
  d = decay(x.g, len(k), k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  values = kept.U - full(kept.W, state)
  dvalues = full(transposed(kept.P), do) + full(k * d.tail, dstate)
  du = full(transposed(kept.T), dvalues)
  dq_pairs, dk_reads = d.scores_pullback(full(do, values.T), q, k, precision)
  dr_pairs, dk_errors = d.scores_pullback(-full(du, values.T), r, k, precision)
  dq_state, dr_state = full(do, state.T) * d.head, -full(du, state.T) * d.head
  dk_pairs, dk_state = dk_reads + dk_errors, full(values, dstate.T) * d.tail
  own = (do * values).sum(-1, keepdims=True)
  dq, dr = dq_pairs + dq_state, dr_pairs + dr_state
  dg = None
  if x.g is not None:
    total = d.total * (state * dstate).sum(-1)
    dg = gate_pullback(x.g, q * dq + r * dr, k * dk_pairs, k * dk_state, total)
  return Tokens(dq + own * k, dk_pairs + dk_state + own * q, dr, du, dg)


rule = Rule(_step, _lift, _read, _chunk, _begin_pullback, _pullback)


# --- read by rows ----------------------------------------------------------------------------------------------------
#
# The same state, read as o = S q: q is as wide as the values, o as the keys, and it is the OUTPUT that decays channel by channel:
#     o_i = head_i * (S q_i) + sum_j (q_i . v'_j) between(i, j) * k_j
# With S^T for S this is Oja's rule, whose decay stands on the value side.


def _step_by_rows(state, x: Tokens):
  state, _ = _step(state, x._replace(q=jnp.zeros_like(x.k)))
  return state, _read_rows(None, state, x)


def _read_rows(before, after, x: Tokens):
  return (after * x.q[None, :]).sum(1)


class _Reads(NamedTuple):
  """What the outputs of a chunk need beside the state."""

  q: Float[Array, "C V"]
  k: Float[Array, "C K"]
  W: Float[Array, "C K"]
  U: Float[Array, "C V"]
  decay: Decay


def _chunk_by_rows(x: Tokens, masks: Masks | None, precision) -> Chunk:
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  _, W, U = _inverse(x, d, precision)
  written = transposed(x.k * d.tail)
  full = partial(jnp.matmul, precision=precision)
  A = _diagonal(d.total, x.k) - full(written, W)
  return Chunk(A, full(written, U), _Reads(x.q, x.k, W, U, d), jnp.zeros_like(x.k))


def _respond_by_rows(x: _Reads, state: Array, precision) -> Array:
  full = partial(jnp.matmul, precision=precision)
  scores = full(x.q, (x.U - full(x.W, state)).T)
  own = jnp.diagonal(scores)[:, None] * x.k
  return full(x.q, state.T) * x.decay.head + x.decay.scores_pullback(scores, x.k, x.k, precision)[0] + own


def _begin_pullback_by_rows(x: Tokens, masks: Masks | None, do: Array, precision):
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  solved = _inverse(x, d, precision)
  _, W, _ = solved
  dscores = d.scores(do, x.k, precision, diagonal=True)
  dvalues = full(transposed(dscores), x.q)
  A = _diagonal(d.total, x.k) - full(transposed(x.k * d.tail), W)
  D = full(transposed(do * d.head), x.q) - full(transposed(W), dvalues)
  return Affine(A, D), (*solved, dscores, dvalues)


def _pullback_by_rows(
  x: Tokens, masks: Masks | None, kept, state: Array, dstate: Array, do: Array, precision
) -> Tokens:
  T, W, U, dscores, dvalues = kept
  q, k, r = x.q, x.k, x.r
  d = decay(x.g, len(k), k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  values = U - full(W, state)
  scores = full(q, values.T)
  reads, dk_reads = d.scores_pullback(scores, do, k, precision)
  reads += full(q, state.T) * d.head
  du = full(transposed(T), dvalues + full(k * d.tail, dstate))
  dr, dk_errors = d.scores_pullback(-full(du, values.T), r, k, precision)
  dr -= full(du, state.T) * d.head
  dk_state = full(values, dstate.T) * d.tail
  dk_pairs = dk_reads + dk_errors
  dg = None
  if x.g is not None:
    total = d.total * (state * dstate).sum(-1)
    dg = gate_pullback(x.g, do * reads + r * dr, k * dk_pairs, k * dk_state, total)
  dq = full(dscores, values) + full(do * d.head, state)
  return Tokens(dq, dk_pairs + dk_state + jnp.diagonal(scores)[:, None] * do, dr, du, dg)


by_rows = Rule(
  _step_by_rows, _lift, _read_rows, _chunk_by_rows, _begin_pullback_by_rows, _pullback_by_rows, _respond_by_rows
)
