"""Mamba-3's update as linear attention, by the trapezoidal rule.

    S_t = e^g_t S_{t-1} + (1 - lambda_t) dt_t e^g_t k_{t-1} v_{t-1}^T + lambda_t dt_t k_t v_t^T

A token's k v^T enters twice: half at its own token, half at the next one. With w = lambda dt and
P_t = S_t - w_t k_t v_t^T, all of it that later tokens see enters at the next token:

    P_t = e^g_t P_{t-1} + e^g_t (w_{t-1} + (1 - lambda_t) dt_t) k_{t-1} v_{t-1}^T ,
    S_t^T q_t = P_t^T q_t + w_t (q_t . k_t) v_t

The first line is linear attention that writes the keys and values of the token before. A state that
comes in is S, which has its last token's own write in it, so w_{t-1} is 0 at the first token.

With R keys, values and queries per token, the R writes are consecutive tokens of the linear
attention, of which the first decays. The r-th of them reads r of the R writes; the others are added
behind the recurrence, like the token's own.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from lajax.recurrence import linear_attention
from lajax.recurrence.documents import at_last_token, last_token, packing, previous, taken
from lajax.recurrence.family import MATRIX, QKV, Call, Family, Problem


class Trapezoid(NamedTuple):
  """Tokens, and what each writes of the token before; R is 1 where a token has one key."""

  q: Float[Array, "B T R H K"]
  k: Float[Array, "B T R H K"]
  v: Float[Array, "B T R HV V"]
  g: Float[Array, "B T HV"]
  own: Float[Array, "B T HV"]  # w, the weight of the token's own write
  k_before: Float[Array, "B T R H K"]
  v_before: Float[Array, "B T R HV V"]
  before: Float[Array, "B T HV"]  # weight of the write of the token before


def trapezoid(
  q, k, v, g, dt, mix, last_k, last_v, segment_ids: Int[Array, "B T"] | None
) -> Trapezoid:
  """Returns the tokens with those before them, of the same document."""
  shifted = lambda first, x: jnp.concatenate([first[:, None].astype(x.dtype), x[:, :-1]], axis=1)
  before = shifted
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    begins = document != previous(document)
    source = shifted(jnp.full(g.shape[:1], -1), last_token(is_token)) + 1

    def before(first, x):
      blank = begins.reshape(*begins.shape, *(1,) * (x.ndim - 2))
      return jnp.where(blank, jnp.zeros((), x.dtype), taken(first, x, source))

  own = mix * dt
  weight = jnp.exp(g) * (before(jnp.zeros_like(own[:, 0]), own) + (1 - mix) * dt)
  return Trapezoid(q, k, v, g, own, before(last_k, k), before(last_v, v), weight)


def recurrence(x: Trapezoid) -> tuple[Array, Array, Array, Array]:
  """Returns q, k, v and g of the linear attention, on R tokens for each one."""
  R, together = x.q.shape[2], lambda y: lax.collapse(y, 1, 3)
  v = x.v_before.astype(x.before.dtype) * x.before[:, :, None, :, None]
  g = jnp.pad(x.g[:, :, None], [(0, 0), (0, 0), (0, R - 1), (0, 0)])
  return together(x.q), together(x.k_before), together(v), together(g)


def unread(x: Trapezoid, scale) -> Float[Array, "B T R HV V"]:
  """Returns what tokens read besides the recurrence: all their own writes, and later ones of R."""
  R, G, dtype = x.q.shape[2], x.v.shape[3] // x.q.shape[3], x.own.dtype

  def read(k, v, weight, keep):
    scores = jnp.einsum(
      "btrhk,btshk->btrsh", x.q.astype(dtype), k.astype(dtype), precision=lax.Precision.HIGHEST
    )
    scores = jnp.repeat(scale * scores, G, axis=-1) * weight[:, :, None, None]
    scores = jnp.where(keep[None, None, :, :, None], scores, 0)
    return (scores[..., None] * v.astype(dtype)[:, :, None]).sum(3)

  later = np.triu(np.ones((R, R), bool), 1)
  o = read(x.k, x.v, x.own, np.ones_like(later))
  return o if R == 1 else o + read(x.k_before, x.v_before, x.before, later)


def last_state(state: Float[Array, "B HV K V"], x: Trapezoid, last_k, last_v, is_token):
  """Returns (S, k, v) behind the last token that is not padding, from P."""
  at_last = lambda first, y: at_last_token(first, y.astype(state.dtype), is_token)
  k, v = at_last(last_k, x.k), at_last(last_v, x.v)
  own = at_last(jnp.zeros_like(state[..., 0, 0]), x.own)
  keys = jnp.repeat(k, v.shape[2] // k.shape[2], axis=2)
  written = keys[..., None] * (own[:, None, :, None] * v)[..., None, :]
  return state + written.sum(1), k, v


def _problem(call: Call) -> Problem:
  """Linear attention that writes the token before; see `mamba3`."""
  dtype, ids, (S, last_k, last_v) = call.dtype, call.segment_ids, call.state
  q, k, v, *gates = call.blank("q", "k", "v", "g", "dt", "trapezoid")
  several = q.ndim == 5  # keys per token
  if not several:
    q, k, v = (a[:, :, None] for a in (q, k, v))
    last_k, last_v = last_k[:, None], last_v[:, None]
  g, dt, mix = (a.astype(dtype) for a in gates)
  parts = trapezoid(q, k, v, g, dt, mix, last_k, last_v, ids)

  def output(o):
    o = o.astype(dtype).reshape(v.shape) + unread(parts, call.scale)
    return o if several else o[:, :, 0]

  def final(state):
    is_token = jnp.ones(v.shape[:2], bool) if ids is None else ids >= 0
    S, *last = last_state(state, parts, last_k, last_v, is_token)
    return S, *(a if several else a[:, 0] for a in last)

  tokens = linear_attention.AdditiveTokens(*recurrence(parts))
  written = None if ids is None else jnp.repeat(ids, q.shape[2], axis=1)
  return Problem(linear_attention.rule, tokens, S, written, output, final)


_STEPS = dict.fromkeys(("g", "dt", "trapezoid"), "B T HV")
MAMBA3 = Family(
  arrays=QKV | _STEPS,
  state=MATRIX | {"k": "B H K", "v": "B HV V"},
  gates=tuple(_STEPS),
  problem=_problem,
)
MAMBA3_MIMO = Family(
  arrays={"q": "B T R H K", "k": "B T R H K", "v": "B T R HV V"} | _STEPS,
  state=MATRIX | {"k": "B R H K", "v": "B R HV V"},
  gates=tuple(_STEPS),
  output="B T R HV V",
  problem=_problem,
)
