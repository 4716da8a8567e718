"""Kernels of softmax attention: o_i = sum_j p_ij v_j, p = softmax of scale q_i . k_j over the keys
that i reads.

Forward is one launch. A program holds C queries of a head, goes through blocks of S keys, and
carries the running maximum, denominator and numerator of the softmax (FlashAttention: Dao et al.,
2022, arXiv:2205.14135, algorithm 1; its backward pass, algorithm 4). Backward are two launches.
`queries` gives dq. `keys` gives dk and dv: a program holds S keys and goes through the blocks of
queries of all heads that share them. Both compute the scores again. Residuals are the inputs, o
and, per query, the logarithm of its denominator, `lse`.

`Blocks` says which blocks a program goes through: those before and after them hold nothing that is
read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import NEGLIGIBLE
from lajax.pallas import tiles
from lajax.pallas.attention_blocks import (
  AttentionDocuments,
  AttentionPlan,
  Mask,
  blocks,
  documents_of,
  held,
  inner,
  masked,
  places,
  plan,
  specs_of,
  tile_of,
  where,
)
from lajax.pallas.launch import differentiable, float64_refusal, launch
from lajax.pallas.nonfinite import bad_tokens, reached, replace
from lajax.pallas.plan import loop_tiles
from lajax.pallas.tiles import load, store, tile_mask

f32 = jnp.float32
MAX_WIDTH = 256


# --- forward --------------------------------------------------------------------------------------


def _forward_kernel(inputs, outputs, *, interpreted: bool, p: AttentionPlan):
  q_ref, k_ref, v_ref, sink_ref, document_ref, position_ref, first_ref, past_ref = inputs
  o_ref, lse_ref = outputs
  product = tiles.products(p.dtype, interpreted)
  place = places(p.H, p.N, p.NV, p.mask.causal)(pl.program_id(0))
  start, values = place.block * p.C, p.values(place.tile)
  queries = where(p, start, p.C, 0, document_ref, position_ref)
  q = held(p.NK, tile_of(q_ref, p, start, p.C, p.k_tile, p.keys))

  def block(m, carry):
    top, total, sums = carry
    keys = where(p, m * p.S, p.S, 1, document_ref, position_ref)
    k = tile_of(k_ref, p, m * p.S, p.S, p.k_tile, p.keys)
    v = tile_of(v_ref, p, m * p.S, p.S, p.v_tile, p.values)(place.tile)
    s = masked(p, queries, keys, p.scale * inner(product, p.NK, q, k, (p.C, p.S)), NEGLIGIBLE)
    higher = jnp.maximum(top, jnp.max(s, axis=1))
    w = masked(p, queries, keys, jnp.exp(s - higher[:, None]), 0.0)
    shrink = jnp.exp(top - higher)
    return higher, total * shrink + jnp.sum(w, axis=1), sums * shrink[:, None] + product(w, v)

  sink = NEGLIGIBLE if sink_ref is None else jnp.maximum(sink_ref[...].astype(f32), NEGLIGIBLE)
  top = jnp.full(p.C, sink, f32)
  total = jnp.full(p.C, 0.0 if sink_ref is None else 1.0, f32)
  begin = top, total, jnp.zeros((p.C, p.v_tile), f32)
  top, total, sums = lax.fori_loop(first_ref[place.block], past_ref[place.block], block, begin)
  some = total > 0
  total = jnp.where(some, total, 1.0)
  tokens = p.tokens(start, p.C)
  at = pl.ds(start, p.C)
  store(
    o_ref.at[at, pl.ds(place.tile * p.v_tile, p.v_tile)],
    sums / total[:, None],
    tile_mask(tokens, values),
  )
  store(lse_ref.at[at], jnp.where(some, top + jnp.log(total), 0.0), tokens)


def _forward_launch(
  p: AttentionPlan, q, k, v, sink, documents: AttentionDocuments | None
) -> tuple[Array, Array]:
  p = p.cut("forward")
  specs = specs_of(p, places(p.H, p.N, p.NV, p.mask.causal), keys=False)
  document, position = documents[:2] if documents else (None, None)
  names = ("q", "k", "v", "sink", "tokens", "tokens", "blocks", "blocks")
  o, lse = launch(
    functools.partial(_forward_kernel, p=p),
    (q, k, v, sink, document, position, *blocks(p, documents, keys=False)),
    name="attention_forward",
    programs=p.B * p.H * p.N * p.NV,
    warps=p.warps,
    stages=p.stages,
    in_specs=[specs[name] for name in names],
    out_specs=[specs["o"], specs["row"]],
    out_shapes=[
      jax.ShapeDtypeStruct((p.B, p.T, p.H, p.V), v.dtype),
      jax.ShapeDtypeStruct((p.B, p.T, p.H), f32),
    ],
  )
  return o, lse


# --- backward -------------------------------------------------------------------------------------


def _queries_kernel(inputs, outputs, *, interpreted: bool, p: AttentionPlan):
  """A tile of dq = scale ds k, ds = p (do v^T - delta); and delta = do . o."""
  q_ref, k_ref, v_ref, do_ref, lse_ref, o_ref, document_ref, position_ref, first_ref, past_ref = (
    inputs
  )
  product = tiles.products(p.dtype, interpreted)
  place = places(p.H, p.N, p.NK, p.mask.causal)(pl.program_id(0))
  start = place.block * p.C
  at, tokens = pl.ds(start, p.C), p.tokens(start, p.C)
  queries = where(p, start, p.C, 0, document_ref, position_ref)
  q = held(p.NK, tile_of(q_ref, p, start, p.C, p.k_tile, p.keys))
  do = held(p.NV, tile_of(do_ref, p, start, p.C, p.v_tile, p.values))
  o = tile_of(o_ref, p, start, p.C, p.v_tile, p.values)
  dot = lambda j, total: total + jnp.sum(do(j).astype(f32) * o(j).astype(f32), axis=1)
  delta = loop_tiles(p.NV, dot, jnp.zeros(p.C, f32))
  store(outputs[1].at[at], delta, tokens)
  lse = load(lse_ref.at[at], tokens)[:, None]

  def block(m, dq):
    keys = where(p, m * p.S, p.S, 1, document_ref, position_ref)
    k = held(p.NK, tile_of(k_ref, p, m * p.S, p.S, p.k_tile, p.keys))
    v = tile_of(v_ref, p, m * p.S, p.S, p.v_tile, p.values)
    s = p.scale * inner(product, p.NK, q, k, (p.C, p.S))
    w = masked(p, queries, keys, jnp.exp(s - lse), 0.0)
    ds = w * (inner(product, p.NV, do, v, (p.C, p.S)) - delta[:, None])
    return dq + product(ds, k(place.tile))

  dq = lax.fori_loop(
    first_ref[place.block], past_ref[place.block], block, jnp.zeros((p.C, p.k_tile), f32)
  )
  columns = pl.ds(place.tile * p.k_tile, p.k_tile)
  store(outputs[0].at[at, columns], p.scale * dq, tile_mask(tokens, p.keys(place.tile)))


def _keys_kernel(inputs, outputs, *, interpreted: bool, p: AttentionPlan):
  """A tile of dk = scale ds^T q and of dv = p^T do, summed over the heads of a group."""
  (
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    document_ref,
    position_ref,
    first_ref,
    past_ref,
  ) = inputs
  product = tiles.products(p.dtype, interpreted)
  place = places(p.HK, p.M, max(p.NK, p.NV))(pl.program_id(0))
  start = place.block * p.S
  at, tokens = pl.ds(start, p.S), p.tokens(start, p.S)
  keys = where(p, start, p.S, 0, document_ref, position_ref)
  k = held(p.NK, tile_of(k_ref, p, start, p.S, p.k_tile, p.keys))
  v = held(p.NV, tile_of(v_ref, p, start, p.S, p.v_tile, p.values))
  first, past = first_ref[place.block], past_ref[place.block]

  def head(g, sums):
    def block(n, sums):
      dk, dv = sums
      here, rows = pl.ds(n * p.C, p.C), p.tokens(n * p.C, p.C)
      queries = where(p, n * p.C, p.C, 1, document_ref, position_ref)
      q = held(p.NK, tile_of(q_ref, p, n * p.C, p.C, p.k_tile, p.keys, g))
      do = held(p.NV, tile_of(do_ref, p, n * p.C, p.C, p.v_tile, p.values, g))
      lse, delta = (
        load(lse_ref.at[here, g], rows)[None, :],
        load(delta_ref.at[here, g], rows)[None, :],
      )
      s = p.scale * inner(product, p.NK, k, q, (p.S, p.C))
      w = masked(p, queries, keys, jnp.exp(s - lse), 0.0)
      dv += product(w, do(place.tile))
      ds = w * (inner(product, p.NV, v, do, (p.S, p.C)) - delta)
      return dk + product(ds, q(place.tile)), dv

    return lax.fori_loop(first, past, block, sums)

  zeros = jnp.zeros((p.S, p.k_tile), f32), jnp.zeros((p.S, p.v_tile), f32)
  dk, dv = lax.fori_loop(0, p.G, head, zeros)
  width = pl.ds(place.tile * p.k_tile, p.k_tile), pl.ds(place.tile * p.v_tile, p.v_tile)
  store(outputs[0].at[at, width[0]], p.scale * dk, tile_mask(tokens, p.keys(place.tile)))
  store(outputs[1].at[at, width[1]], dv, tile_mask(tokens, p.values(place.tile)))


def _backward_launch(
  p: AttentionPlan, kernel: str, inputs, like, documents: AttentionDocuments | None
) -> list[Array]:
  p, keys = p.cut(kernel), kernel == "keys"
  body, axes = (
    (_keys_kernel, (p.HK, p.M, max(p.NK, p.NV))) if keys else (_queries_kernel, (p.H, p.N, p.NK))
  )
  specs = specs_of(p, places(*axes, p.mask.causal and not keys), keys)
  document, position = documents[:2] if documents else (None, None)
  names = (
    "q",
    "k",
    "v",
    "o",
    "row",
    "row" if keys else "o",
    "tokens",
    "tokens",
    "blocks",
    "blocks",
  )
  return list(
    launch(
      functools.partial(body, p=p),
      (*inputs, document, position, *blocks(p, documents, keys)),
      name=f"attention_{kernel}",
      programs=p.B * axes[0] * axes[1] * axes[2],
      warps=p.warps,
      stages=p.stages,
      in_specs=[specs[name] for name in names],
      out_specs=[specs["k"], specs["v"]] if keys else [specs["q"], specs["row"]],
      out_shapes=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
    )
  )


# --- the operation --------------------------------------------------------------------------------


def attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T HK K"],
  v: Float[Array, "B T HK V"],
  sink: Float[Array, "H"] | None = None,
  document: Int[Array, "B T"] | None = None,
  is_token: Bool[Array, "B T"] | None = None,
  *,
  causal: bool = True,
  window: int | None = None,
  scale: float = 1.0,
) -> Float[Array, "B T H V"]:
  """o_i = sum_j p_ij v_j, p_ij = exp(scale q_i . k_j) / (exp(sink) + sum_j' exp(scale q_i . k_j')).

  Args:
    q: [B T H K].
    k, v: [B T HK K], [B T HK V]; head h of q reads head h // (H / HK). Operands of products have
      the dtype that q, k and v share, bfloat16 or float16, else float32.
    sink: [H], a logit of the denominator alone; None for none.
    document, is_token: [B T], number of a token's document in its row, counted from 0, and whether
      it is not padding; both or none. Documents do not read each other, nobody reads padding, and
      the o of padding is 0.
    causal: whether a token reads no later token.
    window: how many tokens a token reads on either side, itself included; None for all.
    scale: of the scores.

  Returns:
    o [B T H V] in v.dtype.
  """
  packed = None if document is None or is_token is None else documents_of(document, is_token)
  return _attend((Mask(causal, window), float(scale)), (q, k, v, sink), packed)


def _forward(static, inputs, documents):
  (mask, scale), (q, k, v, sink) = static, inputs
  p, marked = plan(q, k, v, mask, documents is not None, scale), None
  if documents is not None:
    bad = bad_tokens(q, k, v) & (documents.document >= 0)
    marked = _readers(mask, bad, documents)
    q, k, v = replace(bad, (q, k, v), 0.0)
  o, lse = _forward_launch(p, q, k, v, sink, documents)
  residuals = (q, k, v, sink), documents, o, lse, marked
  return o if marked is None else replace(marked, o, jnp.nan), residuals


def _readers(mask: Mask, bad, documents: AttentionDocuments) -> Bool[Array, "B T"]:
  """Returns the tokens that may read a bad one: those after it in its document; all of its document
  if not causal.
  """
  found = reached(bad, documents.document)
  return found if mask.causal else found | reached(bad, documents.document, reverse=True)


def _backward(static, residuals, do):
  mask, scale = static
  (q, k, v, sink), documents, o, lse, marked = residuals
  p = plan(q, k, v, mask, documents is not None, scale)
  if documents is not None:
    bad = bad_tokens(do) | (marked & (do != 0).any((2, 3)))
    bad &= documents.document >= 0
    do, marked = replace(bad, do, 0.0), reached(bad, documents.document, reverse=True)
    if not mask.causal:
      marked |= reached(bad, documents.document)
  dq, delta = _backward_launch(p, "queries", (q, k, v, do, lse, o), (q, lse), documents)
  dk, dv = _backward_launch(p, "keys", (q, k, v, do, lse, delta), (k, v), documents)
  dsink = None
  if sink is not None:
    weight = jnp.exp(jnp.maximum(sink.astype(f32), NEGLIGIBLE)[None, None] - lse)
    dsink = -jnp.sum(weight * delta, axis=(0, 1)).astype(sink.dtype)
  if documents is not None:
    dq, dk, dv = replace(marked, (dq, dk, dv), jnp.nan)
    dsink = None if dsink is None else jnp.where(bad.any(), jnp.nan, dsink)
  return (dq, dk, dv, dsink), None


_attend = differentiable(_forward, _backward)


def supports(q, k, v, sink=None, log_forget=None) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  if reason := float64_refusal(dict(q=q, k=k, v=v, sink=sink)):
    return reason
  for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
    if size > MAX_WIDTH:
      return f"the kernels take heads of up to {name} = {MAX_WIDTH}, and {name} is {size}."
  if log_forget is not None:
    return "the kernels do not take `log_forget`."
  p = plan(q, k, v, Mask(True, None), False, 1.0).cut("forward")
  programs = p.B * p.H * -(-p.T // min(p.C, p.S)) * max(p.NK, p.NV)
  if programs >= 2**31 - 1:
    sizes = [p.B, p.T, p.H]
    return f"a GPU starts fewer than 2^31 programs, and [B T H] = {sizes} would need {programs}."
  return None
