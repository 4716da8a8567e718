"""Additive state: S = Diag(exp g) S + k v^T, o = scale S^T q."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._numerics import Masks, decay, gate_pullback, transposed
from lajax.recurrence.drive import Affine, Chunk, Rule


class Tokens(NamedTuple):
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


def _step(state, x: Tokens):
  state = decay_state(x.g, state) + x.k[:, None] * x.v[None, :]
  return state, _read(None, state, x)


def _lift(x: Tokens) -> Affine:
  return Affine(token_decay(x.g, x.k), x.k[:, None] * x.v[None, :])


def _read(before, after, x: Tokens):
  return (after * x.q[:, None]).sum(0)


# --- chunks: everything below is about the arrays of one chunk of C tokens of one head --------------------------------


def _chunk(x: Tokens, masks: Masks | None, precision) -> Chunk:
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(x.q, x.k, precision, diagonal=True)
  return Chunk(d.total, full(transposed(x.k * d.tail), x.v), x.q * d.head, full(scores, x.v))


def _begin_pullback(x: Tokens, masks: Masks | None, do: Array, precision):
  d = decay(x.g, len(x.k), x.k.dtype, masks)
  return Affine(d.total, jnp.matmul(transposed(x.q * d.head), do, precision=precision)), ()


def _pullback(x: Tokens, masks: Masks | None, kept, state: Array, dstate: Array, do: Array, precision) -> Tokens:
  q, k, v = x.q, x.k, x.v
  d = decay(x.g, len(k), k.dtype, masks)
  full = partial(jnp.matmul, precision=precision)
  scores = d.scores(q, k, precision, diagonal=True)
  dq_pairs, dk_pairs = d.scores_pullback(full(do, v.T), q, k, precision)
  dq_state, dk_state = full(do, state.T) * d.head, full(v, dstate.T) * d.tail
  dv = full(transposed(scores), do) + full(k * d.tail, dstate)
  own = (do * v).sum(-1, keepdims=True)  # the diagonal of the scores' cotangent: no decay stands between a token and itself
  dg = None
  if x.g is not None:
    total = d.total * (state * dstate).sum(-1)
    dg = gate_pullback(x.g, q * (dq_pairs + dq_state), k * dk_pairs, k * dk_state, total)
  return Tokens(dq_pairs + dq_state + own * k, dk_pairs + dk_state + own * q, dv, dg)


rule = Rule(_step, _lift, _read, _chunk, _begin_pullback, _pullback)
