"""Preconditioned delta rule: each channel of a key writes by the curvature that it has seen.

    A_t = e^g'_t A_{t-1} + b'_t k_t^2 ;  r = log(A_t + eps) - center ;  m_t = base^(-r / (1 + |r|))
    S = Diag(e^g_t) S_{t-1} ;  S_t = S + (m_t k_t) (beta_t (v_t - S^T k_t))^T

A is an elementwise recurrence. The rest is a delta rule that writes at m k and reads at k.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax._shapes import check_not_negative, check_number
from lajax.recurrence.delta_rule import Corrections, DeltaTokens, corrections, rule
from lajax.recurrence.families import linear_recurrence_of
from lajax.recurrence.family import DECAY, MATRIX, QKV, Call, Family, Problem


def options_of(base: float, eps: float, center: float) -> dict[str, float]:
  """Returns the family's options; ValueError for one that is out of its range."""
  return {
    "base": check_number("base", base, above=0.0),
    "eps": check_not_negative("eps", eps),
    "center": check_number("center", center),
  }


def _preconditioner(
  A: Float[Array, "B T H K"], base: float, eps: float, center: float
) -> Float[Array, "B T H K"]:
  """Returns m, between 1 / base and base."""
  r = jnp.log(A + eps) - center
  return jnp.exp(-math.log(base) * r / (1 + abs(r)))


def _problem(call: Call) -> Problem:
  x, (S, A) = call.arrays, call.state
  inputs = call.blank("k", "v", "beta", "beta_precond", "g_precond")
  k, v, beta, strength, g = (a.astype(call.dtype) for a in inputs)
  squares = {"x": strength[..., None] * k * k, "log_a": jnp.broadcast_to(g[..., None], k.shape)}
  A, (last_A,) = call.aside(linear_recurrence_of(2), squares, (A,))
  m = _preconditioner(A, *(call.options[name] for name in ("base", "eps", "center")))
  spread = lambda y: jnp.repeat(y, v.shape[2] // k.shape[2], axis=2)
  beta = beta[..., None]
  if call.by_kernels:  # they take strengths, whose product with the key m k is beta k
    strengths = beta / spread(m), jnp.broadcast_to(beta, v.shape)
    tokens, own = DeltaTokens(x["q"], m * k, x["v"], *strengths, x["g"]), rule
  else:
    tokens, own = Corrections(x["q"], m * k, beta * spread(k), beta * v, x["g"]), corrections
  return Problem(own, tokens, S, call.segment_ids, final=lambda S: (S, last_A))


PRECONDITIONED_DELTA_RULE = Family(
  arrays=QKV | {"beta": "B T HV"} | DECAY | {"beta_precond": "B T H", "g_precond": "B T H"},
  state=MATRIX | {"A": "B H K"},
  gates=("g", "beta", "beta_precond", "g_precond"),
  operands=("q", "v"),
  problem=_problem,
)
