"""Elementwise state: h = exp(log_a) h + x, o = h.

Each channel is a row of a state with one column: K = D and V = 1.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lajax.recurrence.decays import Masks
from lajax.recurrence.rule import Affine, Chunk, Pullback, Rule


class ElementwiseTokens(NamedTuple):
  x: Float[Array, "B T 1 D"]
  log_a: Float[Array, "B T 1 D"]


def _step(h, t: ElementwiseTokens):
  h = jnp.exp(t.log_a)[:, None] * h + t.x[:, None]
  return h, h[:, 0]


def _lift(t: ElementwiseTokens) -> Affine:
  return Affine(jnp.exp(t.log_a), t.x[:, None])


def _read(before, after, t: ElementwiseTokens):
  return after[:, 0]


# --- chunks --------------------------------------------------------------------------------------


def _decays(t: ElementwiseTokens, masks: Masks | None) -> Float[Array, "C D"]:
  """exp(log_a), and 0 where a document begins."""
  a = jnp.exp(t.log_a)
  if masks is None:
    return a
  same = jnp.concatenate([masks.from_start[:1], jnp.diagonal(masks.between, -1)])
  return jnp.where(same[:, None], a, 0)


def _scan(a, x, reverse=False):
  """Products of the decays up to each token, and the recurrence from a state of 0."""
  join = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
  return lax.associative_scan(join, (a, x), reverse=reverse)


def _chunk(t: ElementwiseTokens, masks: Masks | None, precision) -> Chunk:
  from_start, h = _scan(_decays(t, masks), t.x)
  return Chunk(from_start[-1], h[-1][:, None], from_start, h)


def _respond(from_start, state, precision=None):
  return from_start * state[None, :, 0]


def _begin(t: ElementwiseTokens, masks: Masks | None, do, precision):
  a = _decays(t, masks)
  from_start, h = _scan(a, t.x)
  return Affine(from_start[-1], (from_start * do).sum(0)[:, None]), (a, from_start, h)


def _finish(
  t: ElementwiseTokens, masks: Masks | None, residuals, state, dstate, do, precision
) -> ElementwiseTokens:
  a, from_start, h = residuals
  after = jnp.concatenate([a[1:], jnp.ones_like(a[:1])])
  to_end, dh = _scan(after, do, reverse=True)
  dh = dh + to_end * dstate[None, :, 0]
  h = h + from_start * state[None, :, 0]
  before = jnp.concatenate([state[:, :1].T, h[:-1]])
  return ElementwiseTokens(dh, dh * a * before)


rule = Rule(
  _step, _lift, _read, _chunk, _respond, pullback=Pullback(_begin, _finish), log_decays=("log_a",)
)
