"""Backward kernels of the delta rule: corrections again, cotangents from chunk to chunk, then those
of scores and keys.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lajax.pallas import tiles, time_splits
from lajax.pallas.delta_rule_forward import WIDE, scores
from lajax.pallas.plan import (
  Axes,
  MatrixPlan,
  Tiles,
  chunk_of,
  decayed_results,
  document_of,
  key_cotangents,
  launch_plan,
  loop_tiles,
  places,
  sum_over_groups,
)
from lajax.pallas.state_tiles import (
  decays,
  load_parts,
  load_state,
  parts_of,
  read_state,
  store_state,
  total_decay,
)
from lajax.pallas.tiles import iota, load, store, tile_mask

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("recompute", False, False): Tiles(64, 32, 8, 1),
  ("recompute", True, False): Tiles(16, 32, 8, 1),
  ("recompute", False, True): Tiles(32, 32, 8, 1),
  ("recompute", True, True): Tiles(32, 32, 4, 1),
  ("recompute_bounded", True, True): Tiles(32, 32, 4, 2),
  ("summaries_back", False, False): Tiles(64, 16, 4, 2),
  ("summaries_back", True, False): Tiles(64, 32, 4, 2),
  ("summaries_back", False, True): Tiles(128, 16, 8, 1),
  ("summaries_back", True, True): Tiles(32, 16, 8, 1),
  ("carry_back", False, False): Tiles(64, 32, 4, 2),
  ("carry_back_wide", False, False): Tiles(64, 16, 4, 1),
  ("carry_back", True, False): Tiles(64, 32, 4, 2),
  ("carry_back_wide", True, False): Tiles(128, 16, 8, 2),
  ("carry_back", False, True): Tiles(128, 16, 8, 1),
  ("carry_back", True, True): Tiles(32, 16, 8, 1),
  ("scores", False, False): Tiles(16, 16, 4, 1),
  ("scores", True, False): Tiles(16, 32, 4, 1),
  ("scores", False, True): Tiles(16, 32, 4, 1),
  ("scores", True, True): Tiles(16, 32, 4, 1),
  ("key_gradients", False, False): Tiles(16, 32, 8, 1),
  ("key_gradients", True, False): Tiles(16, 16, 8, 1),
  ("key_gradients_narrow", True, False): Tiles(16, 16, 8, 2),
  ("key_gradients", False, True): Tiles(16, 32, 8, 1),
  ("key_gradients", True, True): Tiles(32, 32, 4, 1),
}
# Up to this K `key_gradients` with decays per channel takes two stages: with one it spills on
# Hopper.
NARROW = 64
AXES = {
  "recompute": Axes(True, False, False),
  "carry_back": Axes(False, False, True),
  "scores": Axes(True, False, False),
  "key_gradients": Axes(True, True, False),
}


# --- recompute: the corrections of each token -----------------------------------------------------


def _recompute_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """G of a chunk, the corrections E = Y - G (beta Y), and scale P^T do, where P are the scores of q
  with k.
  """
  q_ref, k_ref, v_ref, do_ref, beta_ref, g_ref, document_ref, edges_ref, chunk_states_ref = inputs
  triangle_ref, corrections_ref, dread_ref, *decayed_refs = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["recompute"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = load(beta_ref, tokens).astype(f32)
  M, *P = scores(
    p, fine, tokens, [k_ref, q_ref] if p.gate == "channel" else [k_ref], k_ref, g_ref, decayed_refs
  )
  G = tiles.solve_triangle(tiles.mask_scores(document, row > column, M), beta, fine)
  store(triangle_ref, G, None)

  def correct(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def tile(i, sums):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      k = load(k_ref.at[:, rows], tile_mask(tokens, keys))
      if p.gate == "channel":
        k = k.astype(f32) * tiles.from_start_per_channel(
          load(g_ref.at[:, rows], tile_mask(tokens, keys)).astype(f32)
        )
      return sums + product(k, load(chunk_states_ref.at[rows, at], tile_mask(keys, values)))

    out = loop_tiles(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
    if p.gate == "head":
      out *= tiles.from_start_per_head(load(g_ref, tokens).astype(f32))[:, None]
    Y = load(v_ref.at[:, at], tile_mask(tokens, values)).astype(f32) - tiles.mask_from_start(
      document, out
    )
    store(corrections_ref.at[:, at], Y - fine(G, beta[:, None] * Y), tile_mask(tokens, values))
    return nothing

  loop_tiles(p.NV, correct, jnp.int32(0))
  # Without decays per channel the scores of q are made only here, which saves registers above.
  (P,) = P or scores(p, fine, tokens, [q_ref], k_ref, g_ref, [])
  P = p.scale * tiles.mask_scores(document, row >= column, P)

  def respond(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do = load(do_ref.at[:, at], tile_mask(tokens, values))
    store(dread_ref.at[:, at], fine.outer(P, do), tile_mask(tokens, values))
    return nothing

  loop_tiles(p.NV, respond, jnp.int32(0))


def recompute(
  p: MatrixPlan, q, k, v, do, beta, g, document, edges, chunk_states
) -> tuple[Array, Array, Array, list[Array]]:
  """Returns G, E and scale P^T do; then k and q as they read a state, and k as it writes to one."""
  wide = p.bounded and p.dtype != jnp.bfloat16
  p = p.cut(TILES, "recompute_bounded" if wide else "recompute")
  values = "v", v.shape, f32
  results = [
    ("scores", (p.B, p.HV, p.N, p.C, p.C), f32),
    values,
    values,
    *decayed_results(p, p.state_dtype, p.state_dtype, f32),
  ]
  kinds = "q", "q", "v", "v", "head", p.gate, "document", "edges", "chunk_states"
  triangle, found, dread, *decayed = launch_plan(
    _recompute_kernel,
    p,
    AXES["recompute"],
    "delta_recompute",
    kinds,
    (q, k, v, do, beta, g, document, edges, chunk_states),
    results,
  )
  return triangle, found, dread, decayed or [k, q, k]


# --- carry_back: cotangents from chunk to chunk ---------------------------------------------------


def _carry_back_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan, summary: bool):
  """dS = total dS + scale (from_start q)^T do - (from_start k)^T dv, chunk by chunk in reverse.

  Stores dS after each chunk, dX and dv. With `summary` it starts from zeros and gives dS at the
  split's start alone.
  """
  (
    k_ref,
    q_ref,
    writer_ref,
    do_ref,
    dread_ref,
    beta_ref,
    g_ref,
    document_ref,
    edges_ref,
    triangle_ref,
    dlast_ref,
  ) = inputs
  *given, dstate_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  parts = parts_of(p)
  place = places(p, AXES["carry_back"])[0](pl.program_id(0))
  values = p.values(place.j)

  def chunk(m, dS):
    n = chunk_of(p, place.n, m, reverse=True)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    if given:
      store_state(given[0], dS, parts, values, n)
    document = document_of(p, document_ref, edges_ref, n, at)
    from_start, to_end = decays(
      p, g_ref, at, tokens, tiles.from_start_per_head, tiles.to_end_per_head
    )
    beta = load(beta_ref.at[at], tokens).astype(f32)[:, None]
    dW = load(dread_ref.at[at, :], tile_mask(tokens, values))
    # dS is rounded as it is stored, so the error is the same for every token of the chunk.
    k, rounded = load_parts(writer_ref, at, tokens, parts), [x.astype(p.state_dtype) for x in dS]
    dW += tiles.mask_to_end(document, to_end * read_state(fine, k, rounded))
    dX = dW - fine.outer(load(triangle_ref.at[n], None), beta * dW)
    for ref, x in zip(given[1:], (dX, beta * dX), strict=False):
      store(ref.at[at, :], x, tile_mask(tokens, values))
    do = load(do_ref.at[at, :], tile_mask(tokens, values)).astype(f32)
    do = tiles.mask_from_start(document, p.scale * from_start * do)
    dv = tiles.mask_from_start(document, from_start * beta * dX)

    def update(x, part):
      q, k = (load(ref.at[at, part[0]], tile_mask(tokens, part[1])) for ref in (q_ref, k_ref))
      total = total_decay(p, g_ref, at, tokens, part)
      return tiles.mask_total(document, total * x) + product.outer(q, do) - fine.outer(k, dv)

    return [update(x, part) for x, part in zip(dS, parts, strict=True)]

  dS = (
    [jnp.zeros((p.k_tile, p.v_tile), f32) for _ in parts]
    if summary
    else load_state(dlast_ref, parts, values)
  )
  store_state(dstate_ref, lax.fori_loop(0, p.span, chunk, dS), parts, values)


def carry_back(
  p: MatrixPlan, k, q, writer, do, dread, beta, g, document, edges, triangle, dlast, transitions
) -> Sequence[Array]:
  """Returns dS after each chunk, dX, dv, and dS before the first token; `transitions` are the
  splits', of `scan_chunks`.
  """
  kinds = *(p.reader,) * 3, "v", "v", "head", p.gate, "document", "edges", "scores"
  inputs = k, q, writer, do, dread, beta, g, document, edges, triangle
  return time_splits.carried_back(
    _carry_back_kernel,
    p,
    TILES,
    AXES["carry_back"],
    "delta",
    p.K > WIDE,
    kinds,
    inputs,
    dlast,
    transitions,
    [("v", do.shape, f32), ("v", do.shape, do.dtype)],
  )


# --- scores_back: cotangents of the scores --------------------------------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """dP = scale do W^T on and below the diagonal, dM = -dv W^T below it, both within documents; and
  dbeta = dX . E.

  A decay per head between the two tokens is already multiplied in.
  """
  do_ref, corrections_ref, dx_ref, beta_ref, g_ref, document_ref, edges_ref = inputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = load(beta_ref, tokens).astype(f32)[:, None]

  def tile(j, sums):
    dP, dM, dbeta = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do, E, dX = (
      load(ref.at[:, at], tile_mask(tokens, values)) for ref in (do_ref, corrections_ref, dx_ref)
    )
    W = beta * E
    return dP + fine.inner(do, W), dM - fine.inner(beta * dX, W), dbeta + jnp.sum(dX * E, axis=1)

  square = jnp.zeros((p.C, p.C), f32)
  dP, dM, dbeta = loop_tiles(p.NV, tile, (square, square, jnp.zeros(p.C, f32)))
  between = p.scale
  if p.gate == "head":
    decay = tiles.between_per_head(load(g_ref, tokens).astype(f32))
    dM, between = dM * decay, p.scale * decay
  store(outputs[0], between * tiles.mask_scores(document, row >= column, dP), None)
  store(outputs[1], tiles.mask_scores(document, row > column, dM), None)
  store(outputs[2], dbeta, tokens)


def scores_back(p: MatrixPlan, do, corrections, dx, beta, g, document, edges) -> Sequence[Array]:
  p = p.cut(TILES, "scores")
  square = "scores", (p.B, p.HV, p.N, p.C, p.C), f32
  kinds, results = (
    ("v", "v", "v", "head", "head", "document", "edges"),
    [square, square, ("head", (p.B, p.T, p.HV), f32)],
  )
  inputs = do, corrections, dx, beta, g if p.gate == "head" else None, document, edges
  return launch_plan(_scores_kernel, p, AXES["scores"], "delta_scores", kinds, inputs, results)


# --- key_gradients: dq, dk and dg -----------------------------------------------------------------


def _key_gradients_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """dq, dk and dg of one tile of K, as in the additive family, with two readers of scores and
  state.

  q reads with the cotangent do, k with -dv. Both read what the keys k have written.
  """
  (
    q_ref,
    k_ref,
    do_ref,
    corrections_ref,
    dx_ref,
    beta_ref,
    g_ref,
    document_ref,
    edges_ref,
    dp_ref,
    dm_ref,
    chunk_states_ref,
    dchunk_states_ref,
  ) = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["key_gradients"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = load(beta_ref, tokens).astype(f32)[:, None]

  def tile(j, sums):
    dq, dreader, writes, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do, E, dX = (
      load(ref.at[:, at], tile_mask(tokens, values)) for ref in (do_ref, corrections_ref, dx_ref)
    )
    S, dS = (
      load(chunk_states_ref.at[:, at], tile_mask(keys, values)),
      load(dchunk_states_ref.at[:, at], tile_mask(keys, values)),
    )
    dq, dreader = dq + product.inner(do, S), dreader - product.inner(beta * dX, S)
    writes += product.inner(beta * E, dS)
    return dq, dreader, writes, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  zeros = jnp.zeros((p.C, p.k_tile), f32)
  dq, dreader, writes, total = loop_tiles(
    p.NV, tile, (zeros, zeros, zeros, jnp.zeros(p.k_tile, f32))
  )
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  dq, dreader = (
    tiles.mask_from_start(document, p.scale * dq),
    tiles.mask_from_start(document, dreader),
  )
  writes, g = tiles.mask_to_end(document, writes), None
  q, k = load(q_ref, tile_mask(tokens, keys)), load(k_ref, tile_mask(tokens, keys))
  dP, dM = load(dp_ref, None), load(dm_ref, None)
  own = jnp.sum(jnp.where(row == column, dP, 0.0), axis=1)[:, None]
  if p.gate == "channel":
    g = load(g_ref, tile_mask(tokens, keys)).astype(f32)
    q, k, by_q, by_k, dk = q.astype(f32), k.astype(f32), zeros, zeros, zeros
    for h, upto, after in tiles.halves(g, p.bounded):
      if h == p.C:
        dq, dreader, writes = by_q + dq * upto, by_k + dreader * upto, writes * after
      else:
        keep = tiles.crosses_halves(p.C, h, p.bounded)
        corner, other = jnp.where(keep, dP, 0.0), jnp.where(keep, dM, 0.0)
        by_q += fine(corner, k * after) * upto
        by_k += fine(other, k * after) * upto
        dk += (fine.outer(corner, q * upto) + fine.outer(other, k * upto)) * after
  else:
    if p.gate == "head":
      g = load(g_ref, tokens).astype(f32)
      from_start = tiles.from_start_per_head(g)[:, None]
      dq, dreader = dq * from_start, dreader * from_start
      writes = writes * tiles.to_end_per_head(g)[:, None]
    dP = jnp.where(row == column, 0.0, dP)
    dq, dreader, dk = dq + fine(dP, k), dreader + fine(dM, k), fine.outer(dP, q) + fine.outer(dM, k)

  q, k = q.astype(f32), k.astype(f32)
  if g is not None:
    late, after = q * dq + k * (dreader - dk), k * writes
    dg = tiles.gate_cotangent(g, document, late, None, after, total, fine)
    store(outputs[2], dg, tile_mask(tokens, keys) if p.gate == "channel" else tokens)
  store(outputs[0], dq + own * k, tile_mask(tokens, keys))
  store(outputs[1], dreader + dk + writes + own * q, tile_mask(tokens, keys))


def key_gradients(
  p: MatrixPlan,
  q,
  k,
  do,
  corrections,
  dx,
  beta,
  g,
  document,
  edges,
  dp,
  dm,
  chunk_states,
  dchunk_states,
) -> tuple[Array, Array, Array | None]:
  narrow = p.K <= NARROW and p.gate == "channel" and p.dtype == jnp.bfloat16
  p = p.cut(TILES, "key_gradients_narrow" if narrow else "key_gradients")
  kinds = (
    "q",
    "q",
    "v",
    "v",
    "v",
    "head",
    p.gate,
    "document",
    "edges",
    "scores",
    "scores",
    "chunk_states",
    "chunk_states",
  )
  inputs = q, k, do, corrections, dx, beta, g, document, edges, dp, dm, chunk_states, dchunk_states
  found = launch_plan(
    _key_gradients_kernel,
    p,
    AXES["key_gradients"],
    "delta_key_gradients",
    kinds,
    inputs,
    key_cotangents(p, q, k),
  )
  (dq, dk), dg = sum_over_groups(p, found, 2)
  return dq, dk, dg
