"""Kernels of diagonal plus low rank: S = Diag(exp g) S + b (S^T a)^T + k v^T, and o = scale S^T q; a reads the S before.

In a chunk that begins with S, with N_ab and N_ak the scores of a with b and with k, decayed from the one token to before
the other's own decay, and P_b and P_k those of q, decayed to its token:

    X = (before a) S + N_ak v ,   W = X + N_ab W = X - G X ,   G = I - (I - N_ab)^-1

W is what the tokens read. o = scale ((head q) S + P_b W + P_k v), S' = total S + (tail b)^T W + (tail k)^T v. The
cotangent dW gives dX = dW - G^T dW. That is the form of the delta rule's kernels (`lajax.pallas.delta_rule`), which have
-k for a, read after the decay, and beta k for b and k. Here the two differ, and nothing is divided by a decay:
the one before a token's own is a product or a sum over its own interval.

Forward are two launches: `solve` makes G and the scores of every chunk, all at once; `attend` goes through the chunks, one
program for each tile of columns of a state, makes the outputs, and keeps the state that each begins with where there will
be a backward pass. Where a program has no registers for outputs (`fits`), it gives W, and a third launch, `read`, makes them.
Backward are four: `errors` makes G and the scores again, W of the kept states, and what the outputs give to dW; `carry_back`
goes through the chunks in reverse, keeps dX and the cotangent of the state that each ends with; `scores_back` gives
dv and the cotangents of the scores; `pairs` gives dq, da, db, dk and dg. Where columns are few and time is long, `attend` and
`carry_back` go through segments of time, as the delta rule's do, each with one launch more before it.

Where b erases, what b and k write cancels: in bfloat16 too, W, v, dX and what they are multiplied with go into those
products with 16 bits. Letters are those of `lajax.pallas.plan`.

RWKV-7 (Peng et al. 2025, arXiv:2503.14456), Comba (Hu et al. 2025, arXiv:2506.02475), IPLR; and the delta rule with gates a
channel.
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
from lajax.pallas.plan import Plan, documents, plan, refusal

f32 = jnp.float32


class _Static(NamedTuple):
  scale: float
  dtype: jnp.dtype  # of the inputs of products
  out: jnp.dtype


# --- the operations --------------------------------------------------------------------------------------------------


def dplr(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  a: Float[Array, "B T H K"],
  b: Float[Array, "B T H K"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S + b (S^T a)^T + k v^T, o = scale S^T q; also of documents.

  Args:
    q, k, v, g, state, runs, scale: those of `lajax.pallas.linear_attention.linear_attention`.
    a, b: [B T H K]; zeros in padding too.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static = _Static(float(scale), tiles.operand_dtype(q, k, v, a, b), jnp.dtype(v.dtype))
  return _run(static, q, k, v, a, b, g, state, runs)


def delta_rule_by_channel(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  erase: Float[Array, "B T HV K"],
  write: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S, S = S + k (write v - S^T (erase k))^T, o = scale S^T q: a = exp(g) erase k, b = -k.

  Args:
    q, k, v, g, state, runs, scale: those of `dplr`.
    erase, write: [B T HV K] and [B T HV V].

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static = _Static(float(scale), tiles.operand_dtype(q, k, v), jnp.dtype(v.dtype))
  q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
  decay = 1.0 if g is None else jnp.exp(g if g.ndim == 4 else g[..., None])
  return _run(
    static, q, k, write * v.astype(f32), decay * erase * k.astype(f32), -k, g, state, runs
  )


def _run(static: _Static, q, k, v, a, b, g, state, runs):
  packed = None if runs is None else documents(runs, _forward_plan(q, v, g, True, static))
  return _advance(static, (q, k, v, a, b, g, state), packed)


def _plan(q, v, g, documents: bool, static: _Static) -> Plan:
  """Beyond K = `WIDE` registers hold chunks of at most 32 tokens, and not what segments of time begin with."""
  p = plan(q, v, g, documents, static.scale, static.dtype)
  return p._replace(C=min(p.C, 32), P=1) if p.K > forward.WIDE else p


def _forward_plan(*args) -> Plan:
  """Where decays do not make chunks short anyway, half of them, in which a program has registers for outputs.

  States are kept for the chunks of `_plan`.
  """
  p = _plan(*args)
  if p.gate == "channel" or p.K > forward.WIDE:
    return p
  return p._replace(C=p.C // 2, multiple=2, every=2 if forward.fits(p) else 1)


def plans(q, v, g, dtype) -> tuple[Plan, Plan]:
  """Forward and backward, without documents."""
  static = _Static(1.0, jnp.dtype(dtype), jnp.dtype(dtype))
  return _forward_plan(q, v, g, False, static), _plan(q, v, g, False, static)


def _pass(static: _Static, inputs, packed, keep: bool):
  q, k, v, a, b, g, state = inputs
  p = _forward_plan(q, v, g, packed is not None, static)
  runs, edges = packed or (None, None)
  solved = forward.solve(p, q, a, b, k, g, runs, edges)
  o, last, kept, matrices = forward.attend(p, solved, v, g, runs, edges, state, static.out, keep)
  kept = None if kept is None else kept[:, :, :: p.multiple // p.every]
  return (o, last), (inputs, packed, kept, matrices)


def _forward(static: _Static, inputs, packed):
  return _pass(static, inputs, packed, keep=True)


def _alone(static: _Static, inputs, packed):
  return _pass(static, inputs, packed, keep=False)


def _backward(static: _Static, residuals, cotangents):
  (q, k, v, a, b, g, state), packed, kept, matrices = residuals
  do, dlast = cotangents
  p = _plan(q, v, g, packed is not None, static)
  runs, edges = packed or (None, None)
  edges = None if edges is None else edges[:, :: _forward_plan(q, v, g, True, static).multiple]
  (solved, fresh, later), found, dread, decayed = backward.errors(
    p, q, a, b, k, v, do, g, runs, edges, kept
  )
  reader, b_writer, k_writer, q_reader = decayed
  dkept, dx, dstate = backward.carry_back(
    p, reader, q_reader, b_writer, do, dread, g, runs, edges, solved, dlast, matrices
  )
  squares, dv = backward.scores_back(
    p, k_writer, v, do, found, dx, g, runs, edges, fresh, later, dkept
  )
  dq, da, db, dk, dg = backward.pairs(
    p, q, a, b, k, v, do, found, dx, g, runs, edges, squares, kept, dkept
  )
  like = lambda x, y: None if x is None else x.astype(y.dtype)
  found = like(dq, q), like(dk, k), dv, like(da, a), like(db, b), like(dg, g), like(dstate, state)
  return found, None


_advance = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, a, b, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """None where the kernels take this, else a sentence that says what they do not take. Reads shapes and dtypes only."""
  return _refusal(
    tiles.operand_dtype(q, k, v, a, b), (q, k, v, a, b, g, initial_state), q, v, g, chunk_size
  )


def supports_by_channel(
  q, k, v, erase, write, g=None, initial_state=None, *, chunk_size: int | None = None
) -> str | None:
  """As `supports`, of `delta_rule_by_channel`."""
  return _refusal(
    tiles.operand_dtype(q, k, v), (q, k, v, erase, write, g, initial_state), q, v, g, chunk_size
  )


def _refusal(dtype, inputs, q, v, g, chunk_size: int | None) -> str | None:
  p = _plan(q, v, g, False, _Static(1.0, dtype, dtype))
  if p.K > forward.WIDE and p.dtype != jnp.bfloat16:
    return f"the kernels take keys of up to K = {forward.WIDE} where not all arrays of tokens are bfloat16, and K is {p.K}."
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
  """One token of `dplr`: the next state, float32, and o in v.dtype. Has no derivative.

  The state is read once and written once, and in place where the caller donates it.
  """
  return one_token("dplr_decode", state, q, k, v, None, g, scale, a, b)
