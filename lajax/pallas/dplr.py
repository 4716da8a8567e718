"""Kernels of diagonal plus low rank: S = Diag(exp g) S + b (S^T a)^T + k v^T, and o = scale S^T q;
a reads the S before.

In a chunk that begins with S, let N_ab and N_ak be the scores of a with b and with k, decayed from
the earlier token to just before the later token's own decay. Let P_b and P_k be those of q, decayed
to its token:

    X = (before a) S + N_ak v ,   W = X + N_ab W = X - G X ,   G = I - (I - N_ab)^-1

W is what a reads. o = scale ((from_start q) S + P_b W + P_k v), S' = total S + (to_end b)^T W +
(to_end k)^T v. The cotangent dW gives dX = dW - G^T dW. This is the form of the delta rule's
kernels (`lajax.pallas.delta_rule`), which have -k for a, read after the decay, and beta k for b and
k. Here reader and writers differ. Nothing is divided by a decay: the decay before a token's own is
a product or a sum over its own interval.

The launches:

forward
  `solve`: G and the scores of every chunk, all at once.
  `summaries`: as in the delta rule. Only where columns are few and time is long.
  `scan`: goes through the chunks, one program per tile of columns of a state. Makes the outputs.
    Stores the states before the chunks if there will be a backward pass. Where a program has no
    registers for outputs (`outputs_fit`) it gives W.
  `read`: makes the outputs from W and the stored states. Only where `scan` did not.
backward
  `recompute`: G and the scores again, W from the stored states, and what the outputs give to dW.
  `summaries_back`, `carry_back`: the same as `summaries` and `scan`, in reverse. Gives dX and the
    cotangent of the state after each chunk.
  `scores_back`: dv and the cotangents of the scores.
  `key_gradients`: dq, da, db, dk and dg.

Where b erases, the writes of b and k cancel. So with bfloat16 inputs too, W, v, dX and what they
are multiplied with enter those products with 16 bits. Letters are those of `lajax.pallas.plan`.

RWKV-7 (Peng et al. 2025, arXiv:2503.14456), Comba (Hu et al. 2025, arXiv:2506.02475), IPLR; and the
delta rule with gates per channel.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax.pallas import dplr_backward as backward
from lajax.pallas import dplr_forward as forward
from lajax.pallas import tiles
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable
from lajax.pallas.nonfinite import guarded
from lajax.pallas.plan import MatrixPlan, chunk_documents, plan, refusal

f32 = jnp.float32


class _Static(NamedTuple):
  scale: float
  dtype: jnp.dtype  # of the inputs of products
  out: jnp.dtype


# --- the operations -------------------------------------------------------------------------------


def dplr(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  a: Float[Array, "B T H K"],
  b: Float[Array, "B T H K"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  document: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S + b (S^T a)^T + k v^T, o = scale S^T q; also with packed documents.

  Args:
    q, k, v, g, state, document, scale: those of `lajax.pallas.linear_attention.linear_attention`.
    a, b: [B T H K]; zeros in padding too.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static = _Static(float(scale), tiles.operand_dtype(q, k, v, a, b), jnp.dtype(v.dtype))
  return _run(static, q, k, v, a, b, g, state, document)


def delta_rule_by_channel(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  erase: Float[Array, "B T HV K"],
  write: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  document: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S, S = S + k (write v - S^T (erase k))^T, o = scale S^T q: a = exp(g) erase k,
  b = -k.

  Args:
    q, k, v, g, state, document, scale: those of `dplr`.
    erase, write: [B T HV K] and [B T HV V].

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static = _Static(float(scale), tiles.operand_dtype(q, k, v), jnp.dtype(v.dtype))
  q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
  decay = 1.0 if g is None else jnp.exp(g if g.ndim == 4 else g[..., None])
  return _run(
    static, q, k, write * v.astype(f32), decay * erase * k.astype(f32), -k, g, state, document
  )


def _run(static: _Static, q, k, v, a, b, g, state, document):
  packed = None
  if document is not None:
    packed = chunk_documents(document, _forward_plan(q, v, g, True, static))
  return _compute(static, (q, k, v, a, b, g, state), packed)


def _plan(q, v, g, documents: bool, static: _Static) -> MatrixPlan:
  """Returns the plan of the backward pass.

  Beyond K = `WIDE` registers hold chunks of at most 32 tokens, and `summaries` has none for the
  matrix of a time split.
  """
  p = plan(q, v, g, documents, static.scale, static.dtype)
  return p._replace(C=min(p.C, 32), P=1) if p.K > forward.WIDE else p


def _forward_plan(*args) -> MatrixPlan:
  """Returns the plan of the forward pass.

  Without decays per channel, which make chunks short anyway, chunks are half as long as in the
    backward pass: then a program
  has registers for outputs. States are stored for the chunks of the backward pass.
  """
  p = _plan(*args)
  if p.gate == "channel" or p.K > forward.WIDE:
    return p
  return p._replace(C=p.C // 2, multiple=2, every=2 if forward.outputs_fit(p) else 1)


def plans(q, v, g, dtype) -> tuple[MatrixPlan, MatrixPlan]:
  """Returns the plans of the forward and the backward pass, without documents."""
  static = _Static(1.0, jnp.dtype(dtype), jnp.dtype(dtype))
  return _forward_plan(q, v, g, False, static), _plan(q, v, g, False, static)


def _pass(static: _Static, inputs, packed, keep_states: bool):
  q, k, v, a, b, g, state = inputs
  p = _forward_plan(q, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  system = forward.solve_chunks(p, q, a, b, k, g, document, edges)
  o, last, chunk_states, transitions = forward.scan_chunks(
    p, system, v, g, document, edges, state, static.out, keep_states
  )
  chunk_states = None if chunk_states is None else chunk_states[:, :, :: p.multiple // p.every]
  return (o, last), (inputs, packed, chunk_states, transitions)


def _forward(static: _Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=True)


def _alone(static: _Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=False)


def _backward(static: _Static, residuals, cotangents):
  (q, k, v, a, b, g, state), packed, chunk_states, transitions = residuals
  do, dlast = cotangents
  p = _plan(q, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  # The forward pass may have chunks half as long: of its edges take those of these chunks.
  edges = None if edges is None else edges[:, :: _forward_plan(q, v, g, True, static).multiple]
  (triangle, ak_scores, qk_scores), reads, dread, decayed = backward.recompute(
    p, q, a, b, k, v, do, g, document, edges, chunk_states
  )
  reader, b_writer, k_writer, q_reader = decayed
  dchunk_states, dx, dstate = backward.carry_back(
    p, reader, q_reader, b_writer, do, dread, g, document, edges, triangle, dlast, transitions
  )
  squares, dv = backward.scores_back(
    p, k_writer, v, do, reads, dx, g, document, edges, ak_scores, qk_scores, dchunk_states
  )
  dq, da, db, dk, dg = backward.key_gradients(
    p, q, a, b, k, v, do, reads, dx, g, document, edges, squares, chunk_states, dchunk_states
  )
  like = lambda x, y: None if x is None else x.astype(y.dtype)
  found = like(dq, q), like(dk, k), dv, like(da, a), like(db, b), like(dg, g), like(dstate, state)
  return found, None


_compute = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, a, b, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  inputs = dict(q=q, k=k, v=v, a=a, b=b, g=g, initial_state=initial_state)
  return _refusal(tiles.operand_dtype(q, k, v, a, b), inputs, chunk_size)


def supports_by_channel(
  q, k, v, erase, write, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """Returns the same as `supports`, for `delta_rule_by_channel`."""
  inputs = dict(q=q, k=k, v=v, erase=erase, write=write, g=g, initial_state=initial_state)
  return _refusal(tiles.operand_dtype(q, k, v), inputs, chunk_size)


def _refusal(dtype, inputs: dict, chunk_size: int | None) -> str | None:
  q, v, g = inputs["q"], inputs["v"], inputs["g"]
  p = _plan(q, v, g, False, _Static(1.0, dtype, dtype))
  if p.K > forward.WIDE and p.dtype != jnp.bfloat16:
    return (
      f"the kernels take keys of up to K = {forward.WIDE} where not all of q, k, v and what erases "
      f"and writes are bfloat16, and K is {p.K}."
    )
  return refusal(p, inputs, chunk_size, backward.TILES, backward.AXES) or refusal(
    plans(q, v, g, dtype)[0], inputs, None, forward.TILES, forward.AXES
  )


def decode(
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  a: Float[Array, "B H K"],
  b: Float[Array, "B H K"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """Computes one token of `dplr`: the next state in float32, and o in v.dtype. Has no derivative.

  The state is read once and written once, in place if the caller donates it.
  """
  return one_token("dplr_decode", state, q, k, v, None, g, scale, a, b)
