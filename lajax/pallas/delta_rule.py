"""Kernels of the delta family: S = Diag(exp g) S, then S = S + k (beta (v - S^T k))^T, and o = scale S^T q.

In a chunk that begins with S, with M_ij the scores of k_i and k_j below the diagonal, decayed between the two tokens
(the UT transform: Yang et al. 2024, arXiv:2406.06484, section 3.2):

    Y = v - (head k) S ,   E = Y - M (beta E) = Y - G (beta Y) ,   G = (I + M Diag(beta))^-1 M ,   W = beta E

W are the values that the tokens really write, and what follows is the additive family's: with P the scores of q and k,
o = scale ((head q) S + P W) and S' = total S + (tail k)^T W. The cotangent dW gives dX = dW - G^T (beta dW), of W where it
stands in the equation of E too, hence dv = beta dX and dbeta = dX . E.

Forward are two launches: `solve` makes G and P of every chunk, all at once; `attend` goes through the chunks, one program for
each tile of columns of a state, makes the outputs, and keeps the state that each begins with where there will be a backward
pass. Where a program has no registers for outputs (`fits`), it gives W, and a third launch, `read`, makes them. Backward
are four: `errors` makes G again, E of the kept states, and what the outputs give to dW; `carry_back` goes through the
chunks in reverse, keeps dX and the cotangent of the state that each ends with, and gives dv; `scores_back` gives dbeta and
the cotangents of the scores; `pairs` gives dq, dk and dg.

Where columns are few and time is long, it is cut into segments, and one launch more before `attend`, `summaries`, gives what
each of them leaves of zeros, and the matrix [K K] by which it takes a state on; so does one before `carry_back`. From that
`lajax.pallas.segments` has the states that the segments begin with.

Sums over the values written cancel where keys repeat, each value being the correction of the one before. So in
bfloat16 too, W, dX and what they are multiplied with go into products with 16 bits. Letters are those of
`lajax.pallas.plan`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax.pallas import delta_rule_backward as backward
from lajax.pallas import delta_rule_forward as forward
from lajax.pallas import tiles
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable
from lajax.pallas.nonfinite import guarded
from lajax.pallas.plan import Plan, documents, plan, refusal

f32 = jnp.float32


# --- the operation ---------------------------------------------------------------------------------------------------


def delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S, S = S + k (beta (v - S^T k))^T, o = scale S^T q; also of documents.

  Args:
    q, k, v, g, state, runs, scale: those of `lajax.pallas.linear_attention.linear_attention`; in padding beta is zero too.
    beta: [B T HV], write strength.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  if runs is None:
    return _correct(float(scale), (q, k, v, beta, g, state), None)
  p = _plan(q, k, v, g, True, scale)
  return _correct(float(scale), (q, k, v, beta, g, state), documents(runs, p))


def _plan(q, k, v, g, documents: bool, scale: float) -> Plan:
  """Without segments of time beyond K = `WIDE`: registers do not hold what they begin with."""
  p = plan(q, v, g, documents, scale, tiles.operand_dtype(q, k, v))
  return p._replace(P=1) if p.K > forward.WIDE else p


def _pass(scale: float, inputs, packed, keep: bool):
  q, k, v, beta, g, state = inputs
  p = _plan(q, k, v, g, packed is not None, scale)
  runs, edges = packed or (None, None)
  solved = forward.solve(p, q, k, beta, g, runs, edges)
  o, last, kept, matrices = forward.attend(p, solved, v, beta, g, runs, edges, state, v, keep)
  return (o, last), (inputs, packed, kept, matrices)


def _forward(scale: float, inputs, packed):
  return _pass(scale, inputs, packed, keep=True)


def _alone(scale: float, inputs, packed):
  return _pass(scale, inputs, packed, keep=False)


def _backward(scale: float, residuals, cotangents):
  (q, k, v, beta, g, state), packed, kept, matrices = residuals
  do, dlast = cotangents
  p = _plan(q, k, v, g, packed is not None, scale)
  runs, edges = packed or (None, None)
  solved, errors, dread, (reader, q_reader, writer) = backward.errors(
    p, q, k, v, do, beta, g, runs, edges, kept
  )
  dkept, dx, dv, dstate = backward.carry_back(
    p, reader, q_reader, writer, do, dread, beta, g, runs, edges, solved, dlast, matrices
  )
  dp, dm, dbeta = backward.scores_back(p, do, errors, dx, beta, g, runs, edges)
  dq, dk, dg = backward.pairs(p, q, k, do, errors, dx, beta, g, runs, edges, dp, dm, kept, dkept)
  dg = None if g is None or dg is None else dg.astype(g.dtype)
  found = (
    dq.astype(q.dtype),
    dk.astype(k.dtype),
    dv,
    dbeta.astype(beta.dtype),
    dg,
    dstate.astype(state.dtype),
  )
  return found, None


_correct = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, beta=None, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """None where the kernels take this, else a sentence that says what they do not take. Reads shapes and dtypes only."""
  p = _plan(q, k, v, g, False, 1.0)
  if p.K > forward.WIDE and p.dtype != jnp.bfloat16:
    return f"the kernels take keys of up to K = {forward.WIDE} where q, k and v are not bfloat16, and K is {p.K}."
  return refusal(
    p,
    (q, k, v, beta, g, initial_state),
    chunk_size,
    forward.TILES | backward.TILES,
    forward.AXES | backward.AXES,
  )


def decode(
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """One token of `delta_rule`: the next state, float32, and o in v.dtype. Has no derivative.

  The state is read once and written once, and in place where the caller donates it.
  """
  return one_token("delta_decode", state, q, k, v, beta, g, scale)
