"""Delta rule: the state is corrected towards v at k. S = Diag(exp g) S ; S = S + k (u - S^T r)^T, o = scale S^T q.

With a write strength beta, r = beta k and u = beta v (DeltaNet, Gated DeltaNet, KDA); with an erase gate b and a write gate w
per channel, r = b k and u = w v (Gated DeltaNet 2).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax.recurrence.drive import Affine, Rule
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


rule = Rule(_step, _lift, _read, None)
