"""Log-linear attention: a state per level of a hierarchy of buckets of past tokens.

    o_t = sum_l scale_t^l S_t^l^T q_t ,  S_t^l = the writes of bucket l, decayed to t

Level 0 is the token itself. Token t, counted from 0 in its document, has a bucket at level l >= 1
where bit l - 1 of t is set: the 2^(l-1) tokens before t - (t mod 2^(l-1)). Behind token t its own
write and the buckets of levels 1 .. b, b being the number of trailing ones of t, become the bucket
of level b + 1, as a binary counter carries. The last level takes all that is older.

The states of all levels stand above each other, K rows for each. A token maps every level by the
transition of a base rule, then moves levels: a product of a [levels levels] matrix with the base
transition. A chunk needs the base rule's summary for the values I: its outputs are then the weights
of each write in each output, which the level scales multiply.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from lajax.recurrence import delta_rule, linear_attention
from lajax.recurrence.decays import Masks, preceding
from lajax.recurrence.documents import at_last_token, packing, positions
from lajax.recurrence.family import QKV, Call, Family, Problem
from lajax.recurrence.rule import Affine, Blocks, Chunk, Rule, bind


class LevelTokens(NamedTuple):
  """q is already scaled; `base` has the base rule's tokens without q."""

  q: Float[Array, "B T H K"]
  base: Any
  scales: Float[Array, "B T HV L"]
  target: Float[Array, "B T H"]  # the level that the token's carry goes to; 0 for padding


def by_levels(base: Rule) -> Rule:
  """Returns the rule of log-linear attention on the state update of a rule that is linear in v."""
  step, lift, read, chunk = (bind(f, base) for f in (_step, _lift, _read, _chunk))
  return Rule(step, lift, read, chunk, log_decays=base.log_decays)


def _base_tokens(x: LevelTokens):
  return x.base._replace(q=x.q)


def _moved(target: Float[Array, ""], levels: int) -> Float[Array, "N N"]:
  """The matrix that moves levels below the target into it."""
  level = np.arange(1, levels + 1, dtype=target.dtype)
  return (level[:, None] == jnp.maximum(level, target)[None]).astype(target.dtype)


def _step(base: Rule, state: Float[Array, "NK V"], x: LevelTokens):
  token, N = _base_tokens(x), len(x.scales) - 1
  silent = token._replace(v=jnp.zeros_like(token.v))
  levels = state.reshape(N, -1, state.shape[-1])
  own = base.step(jnp.zeros_like(levels[0]), token)[0]
  levels = jax.vmap(lambda S: base.step(S, silent)[0])(levels)
  read = x.scales[0] * own + jnp.tensordot(x.scales[1:], levels, 1)
  level = np.arange(1, N + 1, dtype=x.target.dtype)[:, None, None]
  joins = level < x.target
  joined = own + jnp.where(joins, levels, 0).sum(0)
  levels = jnp.where(joins, 0, levels) + jnp.where(level == x.target, joined[None], 0)
  return levels.reshape(state.shape), base.read(None, read, token)


def _lift(base: Rule, x: LevelTokens) -> Affine:
  own, N = base.lift(_base_tokens(x)), len(x.scales) - 1
  to = (np.arange(1, N + 1, dtype=x.target.dtype) == x.target).astype(own.B.dtype)
  written = (to[:, None, None] * own.B[None]).reshape(-1, own.B.shape[-1])
  return Affine(Blocks(_moved(x.target, N), own.A), written)


def _read(base: Rule, before, after, x: LevelTokens):
  return _step(base, before, x)[1]


def _chosen(scales: Float[Array, "C L"], level: Float[Array, "C J"]) -> Float[Array, "C J"]:
  """The scale of each level, at most L - 1."""
  is_level = level[..., None] == np.arange(scales.shape[-1], dtype=level.dtype)[None, None]
  return jnp.where(is_level, scales[:, None], 0).sum(-1)


def _chunk(base: Rule, x: LevelTokens, masks: Masks | None, precision) -> Chunk:
  (C, K), N = x.q.shape, x.scales.shape[-1] - 1
  tokens, level = _base_tokens(x), np.arange(1, N + 1, dtype=x.q.dtype)
  c = base.chunk(tokens._replace(v=jnp.eye(C, dtype=x.q.dtype)), masks, precision)
  # highest[i, j] is the level, behind token i, of what token j wrote.
  highest = lax.cummax(jnp.where(np.tri(C, dtype=bool), x.target[:, None], 0), axis=0)
  weights = c.O * _chosen(x.scales, preceding(highest))
  entered = jnp.maximum(preceding(highest[:, :1]), level[None])  # levels of the incoming buckets
  reads = _chosen(x.scales, entered)[..., None] * c.R[:, None]
  written = (level[:, None] == highest[-1][None]).astype(x.q.dtype)[:, None] * c.B[None]
  matmul = lambda a, b: jnp.matmul(a, b, precision=precision)
  return Chunk(
    A=Blocks(_moved(highest[-1, 0], N), c.A),
    B=matmul(written.reshape(N * K, C), tokens.v),
    R=reads.reshape(C, N * K),
    O=matmul(weights, tokens.v),
  )


LINEAR, DELTA = by_levels(linear_attention.rule), by_levels(delta_rule.rule)


def check_levels(name: str, state, level_scales) -> None:
  """ValueError where a state has not one level less than the scales."""
  S = state[0] if isinstance(state, tuple | list) and len(state) == 2 else None
  L, shape = getattr(level_scales, "shape", (0,))[-1:], getattr(S, "shape", ())
  if len(shape) == 5 and L and shape[2] != L[0] - 1:
    raise ValueError(
      f"`{name}[0]` must be [B HV L-1 K V] with one level less than the {L[0]} of `level_scales`; "
      f"got {tuple(shape)}. Cut `level_scales`, or pass the state of as many levels."
    )


# --- the family ----------------------------------------------------------------------------------


def _places(first: Int[Array, "B"], T: int, segment_ids) -> tuple[Array, Array, Any]:
  """Returns the position of each token in its document and that of the token after the last one.

  The third result says whether this one is of the document that came in.
  """
  if segment_ids is None or T == 0:
    return first[:, None] + jnp.arange(T, dtype=first.dtype)[None], first + T, True
  document, is_token = packing(segment_ids)
  position = positions(document, is_token, first)
  return position, at_last_token(first, position + 1, is_token), document[:, -1] == 0


def _problem(call: Call) -> Problem:
  x, dtype, (S, first) = call.arrays, call.dtype, call.state
  q, k, v, scales = (x[name] for name in ("q", "k", "v", "level_scales"))
  (B, T, H, K), (HV, V), N = q.shape, v.shape[2:], scales.shape[-1] - 1
  cycle = 2 ** min(N, 24)  # later digits of a position change nothing, and floats hold these
  position = jnp.round(first).astype(jnp.int32)
  position, after, continues = _places(position, T, call.segment_ids)
  passed_on = jnp.where(continues, first - lax.stop_gradient(first), 0).astype(dtype)  # 0
  carries = lax.population_count(position ^ (position + 1))
  target = jnp.broadcast_to(jnp.minimum(carries, N)[..., None], (B, T, H)).astype(dtype)
  if x["beta"] is None:
    rule, base = LINEAR, linear_attention.AdditiveTokens(q, k, v, x["g"])
  else:
    rule, base = DELTA, delta_rule.DeltaTokens(q, k, v, x["beta"], None, x["g"])
  return Problem(
    rule,
    LevelTokens(q, base._replace(q=None), scales, target),
    S.reshape(B, HV, N * K, V),
    call.segment_ids,
    final=lambda state: (state.reshape(B, HV, N, K, V), (after % cycle).astype(dtype) + passed_on),
  )


LOG_LINEAR = Family(
  arrays=QKV | {"g": "B T HV", "level_scales": "B T HV L", "beta": "B T HV | None"},
  state={"S": "B HV L-1 K V", "position": "B"},
  gates=("g", "level_scales", "beta"),
  operands=("q",),
  chunk_length=lambda tokens: 64,
  problem=_problem,
)
