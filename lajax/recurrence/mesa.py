"""Mesa layer: the state is read with the query that solves a ridge regression on the keys so far.

    G_t = e^g_t G_{t-1} + beta_t k_t k_t^T ,  S_t = e^g_t S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T (G_t + Diag(ridge))^(-1) q_t

G and S are one additive state of K + V columns, whose values are beta (k, v). The systems of all
tokens are one symmetric linear map of all solutions x [T K], and that map is linear attention with
the queries x. So derivatives are implicit: they need that map, and one more solve. Keys and queries
are divided by the root of the ridge, which then is 1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lajax._numerics import vary_like
from lajax.recurrence.families import LINEAR_ATTENTION
from lajax.recurrence.family import QKV, Call, Family, Problem, in_documents
from lajax.recurrence.linear_attention import AdditiveTokens, decay_state, rule, token_decay
from lajax.recurrence.rule import Affine, Rule
from lajax.recurrence.tokens import associative

BLOCK = 64  # tokens whose matrices G are in memory at once in the exact solve
TOLERANCE = {4: 1e-6, 8: 1e-13}  # of conjugate gradients, by bytes of a number


class Systems(NamedTuple):
  """Right-hand sides q, and what makes the matrices: G = e^g G + k w^T with w = beta k."""

  q: Float[Array, "B T HV K"]
  k: Float[Array, "B T H K"]
  w: Float[Array, "B T HV K"]
  g: Float[Array, "B T HV"] | None


# --- by Cholesky's factors -----------------------------------------------------------------------


def _solution(before, after, x: Systems) -> Float[Array, "K"]:
  """(G + I)^-1 q."""
  factor = lax.linalg.cholesky(after + jnp.eye(len(x.q), dtype=x.q.dtype))
  solve = partial(lax.linalg.triangular_solve, factor, left_side=True, lower=True)
  return solve(solve(x.q[:, None]), transpose_a=True)[:, 0]


def _lift(x: Systems) -> Affine:
  return Affine(token_decay(x.g, x.k), x.k[:, None] * x.w[None, :])


def _step(G, x: Systems):
  G = decay_state(x.g, G) + x.k[:, None] * x.w[None, :]
  return G, _solution(None, G, x)


def _no_chunk(x, masks, precision):
  raise NotImplementedError("solutions are not linear in the state.")


exact = Rule(_step, _lift, _solution, _no_chunk)


def _by_factors(problem: Problem, document: Int[Array, "B T"] | None):
  """Solves block by block, so that the matrices of one block alone are in memory."""
  x, state = problem.tokens, problem.state
  B, T = x.q.shape[:2]
  L = max(1, min(T, BLOCK))
  N = -(-T // L)

  def blocks(y, mode="constant"):
    y = jnp.pad(y, [(0, 0), (0, N * L - T)] + [(0, 0)] * (y.ndim - 2), mode=mode)
    return jnp.moveaxis(y.reshape(B, N, L, *y.shape[2:]), 1, 0)

  def solve(carry, block):
    (G, last), (x, document) = carry, block
    within = None if document is None else document - last[:, None]
    o, G = associative(exact, x, G, within)
    return (G, None if document is None else document[:, -1]), o

  first = None if document is None else jnp.zeros((B,), document.dtype)
  documents = None if document is None else blocks(document, "edge")
  (state, _), o = lax.scan(
    solve, (vary_like(state, x), first), (jax.tree.map(blocks, x), documents)
  )
  return jnp.moveaxis(o, 0, 1).reshape(B, N * L, *x.q.shape[2:])[:, :T], state


# --- by conjugate gradients ----------------------------------------------------------------------


def _by_gradients(steps: int, matvec, b: Float[Array, "B T HV K"]) -> Float[Array, "B T HV K"]:
  """Solves all tokens' systems side by side; a token stops at the tolerance."""
  dot = lambda x, y: (x * y).sum(-1, keepdims=True)
  enough = TOLERANCE[b.dtype.itemsize] ** 2 * dot(b, b)

  def step(carry, _):
    x, r, p, rr = carry
    Ap = matvec(p)
    going = rr > enough
    size = jnp.where(going, rr / jnp.where(going, dot(p, Ap), 1), 0)
    x, r = x + size * p, r - size * Ap
    new = dot(r, r)
    p = r + jnp.where(going, new / jnp.where(going, rr, 1), 0) * p
    return (x, r, p, jnp.where(going, new, rr)), None

  carry, _ = lax.scan(step, (jnp.zeros_like(b), b, b, dot(b, b)), None, length=steps)
  return carry[0]


# --- the family ----------------------------------------------------------------------------------


def _problem(call: Call) -> Problem:
  x, dtype, ids, (G, S) = call.arrays, call.dtype, call.segment_ids, call.state
  q, k, v, beta = (a.astype(dtype) for a in call.blank("q", "k", "v", "beta"))
  spread = lambda a: jnp.repeat(a, v.shape[2] // k.shape[2], axis=2)
  root = lax.rsqrt(x["ridge"].astype(dtype))[None, None]
  weighted, roots = beta[..., None] * spread(k), spread(root)
  g = None if x["g"] is None else x["g"].astype(dtype)
  # A state is read as G^T p; G is symmetric, but a derivative by it need not be.
  first = jnp.swapaxes(G, -1, -2) * (roots[:, 0, :, :, None] * roots[:, 0, :, None])
  scaled = {"k": k * root, "v": weighted * roots, "g": g}

  def matvec(p):
    o, _ = call.aside(LINEAR_ATTENTION, scaled | {"q": p}, (first,))
    return o + p

  def solve(matvec, b):
    if call.options["cg_steps"] is not None:
      return _by_gradients(call.options["cg_steps"], matvec, b)
    systems = Problem(exact, Systems(b, scaled["k"], scaled["v"], g), first, ids)
    return in_documents(systems, _by_factors)[0]

  solution = lax.custom_linear_solve(matvec, spread(q * root), solve, symmetric=True) * roots
  values = jnp.concatenate([weighted, beta[..., None] * v], axis=-1)
  return Problem(
    rule,
    AdditiveTokens(solution, spread(k) if call.by_kernels else k, values, g),
    jnp.concatenate([G, S], axis=-1),
    ids,
    lambda o: o[..., k.shape[-1] :],
    lambda state: tuple(jnp.split(state, [k.shape[-1]], axis=-1)),
  )


MESA = Family(
  arrays=QKV | {"beta": "B T HV", "g": "B T HV | None", "ridge": "H K"},
  state={"G": "B HV K K", "S": "B HV K V"},
  gates=("beta", "g"),
  problem=_problem,
)
