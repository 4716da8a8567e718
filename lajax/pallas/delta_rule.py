"""Kernels of the delta family: S = Diag(exp g) S, then S = S + k (beta (v - S^T k))^T, and o =
scale S^T q.

In a chunk that begins with S, let M_ij be the scores of k_i with k_j below the diagonal and P those
of q with k, decayed between the two tokens (the UT transform: Yang et al. 2024, arXiv:2406.06484,
section 3.2):

    Y = v - (from_start k) S ,   E = Y - M (beta E) = Y - G (beta Y) ,   G = (I + M Diag(beta))^-1 M
    ,   W = beta E

E are the corrections and W the values that the tokens really write. What follows is the additive
family's: o = scale ((from_start q) S + P W) and S' = total S + (to_end k)^T W. W is also in the
equation of E, so its cotangent dW gives dX = dW - G^T (beta dW), hence dv = beta dX and dbeta = dX
. E.

The launches:

forward
  `solve`: G and P of every chunk, all at once.
  `summaries`: the state that each time split makes of zeros, and its matrix [K K], from which
    `lajax.pallas.time_splits` makes the state that each split begins with. Only where columns are
    few and time is long.
  `scan`: goes through the chunks, one program per tile of columns of a state. Makes the outputs.
    Stores the state before each chunk if there will be a backward pass. Where a program has no
    registers for outputs (`outputs_fit`) it gives W.
  `read`: makes the outputs from W and the stored states. Only where `scan` did not.
backward
  `recompute`: G again, E from the stored states, and P^T do.
  `summaries_back`, `carry_back`: the same as `summaries` and `scan`, in reverse. Gives dX, dv, and
    the cotangent of the state after each chunk.
  `scores_back`: dbeta and the cotangents of the scores.
  `key_gradients`: dq, dk and dg.

Sums over the values written cancel where keys repeat: each value is the correction of the one
before. So with bfloat16 inputs too, W, dX and what they are multiplied with enter products with 16
bits. Letters are those of `lajax.pallas.plan`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax.pallas import delta_rule_backward as backward
from lajax.pallas import delta_rule_forward as forward
from lajax.pallas import tiles
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable
from lajax.pallas.nonfinite import guarded
from lajax.pallas.plan import MatrixPlan, Static, chunk_documents, plan, refusal

f32 = jnp.float32


# --- the operation --------------------------------------------------------------------------------


def delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  document: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
  bounded: bool = False,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S, S = S + k (beta (v - S^T k))^T, o = scale S^T q; also with packed documents.

  Args:
    q, k, v, g, state, document, scale, bounded: those of
      `lajax.pallas.linear_attention.linear_attention`.
    beta: [B T HV], write strength; zero in padding.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static, packed = Static(float(scale), bounded), None
  if document is not None:
    packed = chunk_documents(document, _plan(q, k, v, g, True, static))
  return _compute(static, (q, k, v, beta, g, state), packed)


def _plan(q, k, v, g, documents: bool, static: Static) -> MatrixPlan:
  """Returns the plan of a call.

  Beyond K = `WIDE` time is not split: `summaries` would not have registers for the matrix.
  """
  dtype = tiles.operand_dtype(q, k, v)
  p = plan(q, v, g, documents, static.scale, dtype, static.bounded)
  return p._replace(P=1) if p.K > forward.WIDE else p


def _pass(static: Static, inputs, packed, keep_states: bool):
  q, k, v, beta, g, state = inputs
  p = _plan(q, k, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  system = forward.solve_chunks(p, q, k, beta, g, document, edges)
  o, last, chunk_states, transitions = forward.scan_chunks(
    p, system, v, beta, g, document, edges, state, v, keep_states
  )
  return (o, last), (inputs, packed, chunk_states, transitions)


def _forward(static: Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=True)


def _alone(static: Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=False)


def _backward(static: Static, residuals, cotangents):
  (q, k, v, beta, g, state), packed, chunk_states, transitions = residuals
  do, dlast = cotangents
  p = _plan(q, k, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  triangle, corrections, dread, (reader, q_reader, writer) = backward.recompute(
    p, q, k, v, do, beta, g, document, edges, chunk_states
  )
  dchunk_states, dx, dv, dstate = backward.carry_back(
    p, reader, q_reader, writer, do, dread, beta, g, document, edges, triangle, dlast, transitions
  )
  dp, dm, dbeta = backward.scores_back(p, do, corrections, dx, beta, g, document, edges)
  dq, dk, dg = backward.key_gradients(
    p, q, k, do, corrections, dx, beta, g, document, edges, dp, dm, chunk_states, dchunk_states
  )
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


_compute = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, beta=None, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  p = _plan(q, k, v, g, False, Static(1.0))
  if p.K > forward.WIDE and p.dtype != jnp.bfloat16:
    return (
      f"the kernels take keys of up to K = {forward.WIDE} where q, k and v are not bfloat16, "
      f"and K is {p.K}."
    )
  inputs = dict(q=q, k=k, v=v, beta=beta, g=g, initial_state=initial_state)
  tables, axes = forward.TILES | backward.TILES, forward.AXES | backward.AXES
  return refusal(p, inputs, chunk_size, tables, axes)


def decode(
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"] | Float[Array, "B HV K"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """Computes one token of `delta_rule`: the next state in float32, and o in v.dtype. Has no
  derivative.

  A `beta` per channel is the strength that erases, S += k (v - S^T (beta k))^T. The caller has then
  multiplied v by the strength that writes.
  The state is read once and written once, in place if the caller donates it.
  """
  return one_token("delta_decode", state, q, k, v, beta, g, scale)
