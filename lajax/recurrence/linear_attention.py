"""Additive state: S = Diag(exp g) S + k v^T, o = scale S^T q."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

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


rule = Rule(_step, _lift, _read, None)
