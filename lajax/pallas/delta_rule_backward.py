"""Backward kernels of the delta rule: what each token corrected, cotangents from chunk to chunk, and of pairs."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lajax.pallas import segments, tiles
from lajax.pallas.delta_rule_forward import WIDE, scores
from lajax.pallas.plan import (
  Axes,
  Plan,
  Tiles,
  chunk_of,
  decayed_results,
  gathered,
  key_cotangents,
  over,
  places,
  runs_of,
  start,
)
from lajax.pallas.state_tiles import (
  decays,
  give_state,
  parts_of,
  read_state,
  take_parts,
  take_state,
  total_decay,
)
from lajax.pallas.tiles import both, give, iota, take

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("errors", False, False): Tiles(64, 32, 8, 1),
  ("errors", True, False): Tiles(16, 32, 8, 1),
  ("errors", False, True): Tiles(32, 32, 8, 1),
  ("errors", True, True): Tiles(32, 32, 4, 1),
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
  ("pairs", False, False): Tiles(16, 32, 8, 1),
  ("pairs", True, False): Tiles(16, 16, 8, 1),
  ("pairs_narrow", True, False): Tiles(16, 16, 8, 2),
  ("pairs", False, True): Tiles(16, 32, 8, 1),
  ("pairs", True, True): Tiles(32, 32, 4, 1),
}
NARROW = 64  # the K up to which `pairs` of one decay a channel takes two stages: with one it spills on Hopper
AXES = {
  "errors": Axes(True, False, False),
  "carry_back": Axes(False, False, True),
  "scores": Axes(True, False, False),
  "pairs": Axes(True, True, False),
}


# --- errors: what each token corrected -------------------------------------------------------------------------------


def _errors_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """G of a chunk, E = Y - G (beta Y), and P^T do, P the scores of q and k."""
  q_ref, k_ref, v_ref, do_ref, beta_ref, g_ref, runs_ref, edges_ref, kept_ref = inputs
  solved_ref, errors_ref, dread_ref, *decayed_refs = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["errors"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = take(beta_ref, tokens).astype(f32)
  M, *P = scores(
    p, fine, tokens, [k_ref, q_ref] if p.gate == "channel" else [k_ref], k_ref, g_ref, decayed_refs
  )
  G = tiles.solve(tiles.pairs(runs, row > column, M), beta, fine)
  give(solved_ref, G, None)

  def correct(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def tile(i, sums):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      k = take(k_ref.at[:, rows], both(tokens, keys))
      if p.gate == "channel":
        k = k.astype(f32) * tiles.head_per_channel(
          take(g_ref.at[:, rows], both(tokens, keys)).astype(f32)
        )
      return sums + product(k, take(kept_ref.at[rows, at], both(keys, values)))

    out = over(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
    if p.gate == "head":
      out *= tiles.head_per_head(take(g_ref, tokens).astype(f32))[:, None]
    Y = take(v_ref.at[:, at], both(tokens, values)).astype(f32) - tiles.from_start(runs, out)
    give(errors_ref.at[:, at], Y - fine(G, beta[:, None] * Y), both(tokens, values))
    return nothing

  over(p.NV, correct, jnp.int32(0))
  (P,) = P or scores(
    p, fine, tokens, [q_ref], k_ref, g_ref, []
  )  # not before it is needed, where that saves registers
  P = p.scale * tiles.pairs(runs, row >= column, P)

  def respond(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do = take(do_ref.at[:, at], both(tokens, values))
    give(dread_ref.at[:, at], fine.outer(P, do), both(tokens, values))
    return nothing

  over(p.NV, respond, jnp.int32(0))


def errors(
  p: Plan, q, k, v, do, beta, g, runs, edges, kept
) -> tuple[Array, Array, Array, list[Array]]:
  """G, E and P^T do; and k and q as they read from a state, and k as it writes to one."""
  p = p.cut(TILES, "errors")
  tall = "v", v.shape, f32
  results = [
    ("pairs", (p.B, p.HV, p.N, p.C, p.C), f32),
    tall,
    tall,
    *decayed_results(p, p.kept, p.kept, f32),
  ]
  kinds = "q", "q", "v", "v", "head", p.gate, "runs", "edges", "kept"
  solved, found, dread, *decayed = start(
    _errors_kernel,
    p,
    AXES["errors"],
    "delta_errors",
    kinds,
    (q, k, v, do, beta, g, runs, edges, kept),
    results,
  )
  return solved, found, dread, decayed or [k, q, k]


# --- carry_back: cotangents from chunk to chunk -----------------------------------------------------------------------


def _carry_back_kernel(inputs, outputs, *, interpreted: bool, p: Plan, summary: bool):
  """dS = total dS + scale (head q)^T do - (head k)^T dv, in reverse, keeping dX, and dS after each chunk.

  Or the summary of each segment of time: dS at its start where there is none at its end.
  """
  (
    k_ref,
    q_ref,
    writer_ref,
    do_ref,
    dread_ref,
    beta_ref,
    g_ref,
    runs_ref,
    edges_ref,
    solved_ref,
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
      give_state(given[0], dS, parts, values, n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    head, tail = decays(p, g_ref, at, tokens, tiles.head_per_head, tiles.tail_per_head)
    beta = take(beta_ref.at[at], tokens).astype(f32)[:, None]
    dW = take(dread_ref.at[at, :], both(tokens, values))
    k, rounded = (
      take_parts(writer_ref, at, tokens, parts),
      [x.astype(p.kept) for x in dS],
    )  # in every token alike
    dW += tiles.to_end(runs, tail * read_state(fine, k, rounded))
    dX = dW - fine.outer(take(solved_ref.at[n], None), beta * dW)
    for ref, x in zip(given[1:], (dX, beta * dX), strict=False):
      give(ref.at[at, :], x, both(tokens, values))
    do = take(do_ref.at[at, :], both(tokens, values)).astype(f32)
    do, dv = tiles.from_start(runs, p.scale * head * do), tiles.from_start(runs, head * beta * dX)

    def update(x, part):
      q, k = (take(ref.at[at, part[0]], both(tokens, part[1])) for ref in (q_ref, k_ref))
      total = tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part))
      return total * x + product.outer(q, do) - fine.outer(k, dv)

    return [update(x, part) for x, part in zip(dS, parts, strict=True)]

  dS = (
    [jnp.zeros((p.k_tile, p.v_tile), f32) for _ in parts]
    if summary
    else take_state(dlast_ref, parts, values)
  )
  give_state(dstate_ref, lax.fori_loop(0, p.span, chunk, dS), parts, values)


def carry_back(
  p: Plan, k, q, writer, do, dread, beta, g, runs, edges, solved, dlast, matrices
) -> Sequence[Array]:
  """dS after each chunk, dX, dv, and dS before the first token; `matrices` are the segments', of `attend`."""
  kinds = *(p.reader,) * 3, "v", "v", "head", p.gate, "runs", "edges", "pairs"
  inputs = k, q, writer, do, dread, beta, g, runs, edges, solved
  return segments.carried_back(
    _carry_back_kernel,
    p,
    TILES,
    AXES["carry_back"],
    "delta",
    p.K > WIDE,
    kinds,
    inputs,
    dlast,
    matrices,
    [("v", do.shape, f32), ("v", do.shape, do.dtype)],
  )


# --- scores: cotangents of pairs of tokens ---------------------------------------------------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dP = scale do W^T, dM = -dv W^T, both of one document, below the diagonal (dP on it too), and dbeta = dX . E.

  One decay a head between the two tokens is in them already.
  """
  do_ref, errors_ref, dx_ref, beta_ref, g_ref, runs_ref, edges_ref = inputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = take(beta_ref, tokens).astype(f32)[:, None]

  def tile(j, sums):
    dP, dM, dbeta = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do, E, dX = (take(ref.at[:, at], both(tokens, values)) for ref in (do_ref, errors_ref, dx_ref))
    W = beta * E
    return dP + fine.inner(do, W), dM - fine.inner(beta * dX, W), dbeta + jnp.sum(dX * E, axis=1)

  square = jnp.zeros((p.C, p.C), f32)
  dP, dM, dbeta = over(p.NV, tile, (square, square, jnp.zeros(p.C, f32)))
  between = p.scale
  if p.gate == "head":
    decay = tiles.between_per_head(take(g_ref, tokens).astype(f32))
    dM, between = dM * decay, p.scale * decay
  give(outputs[0], between * tiles.pairs(runs, row >= column, dP), None)
  give(outputs[1], tiles.pairs(runs, row > column, dM), None)
  give(outputs[2], dbeta, tokens)


def scores_back(p: Plan, do, errors, dx, beta, g, runs, edges) -> Sequence[Array]:
  p = p.cut(TILES, "scores")
  square = "pairs", (p.B, p.HV, p.N, p.C, p.C), f32
  kinds, results = (
    ("v", "v", "v", "head", "head", "runs", "edges"),
    [square, square, ("head", (p.B, p.T, p.HV), f32)],
  )
  inputs = do, errors, dx, beta, g if p.gate == "head" else None, runs, edges
  return start(_scores_kernel, p, AXES["scores"], "delta_scores", kinds, inputs, results)


# --- pairs: dq, dk and dg --------------------------------------------------------------------------------------------


def _pairs_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dq, dk and dg of one tile of K: as in the additive family, with a second reader of scores and state.

  q reads with the cotangent do, k with -dv, and both read what the keys k have written. Of dg's sums see there.
  """
  (
    q_ref,
    k_ref,
    do_ref,
    errors_ref,
    dx_ref,
    beta_ref,
    g_ref,
    runs_ref,
    edges_ref,
    dp_ref,
    dm_ref,
    kept_ref,
    dkept_ref,
  ) = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["pairs"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  beta = take(beta_ref, tokens).astype(f32)[:, None]

  def tile(j, sums):
    dq, dreader, writes, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do, E, dX = (take(ref.at[:, at], both(tokens, values)) for ref in (do_ref, errors_ref, dx_ref))
    S, dS = (
      take(kept_ref.at[:, at], both(keys, values)),
      take(dkept_ref.at[:, at], both(keys, values)),
    )
    dq, dreader = dq + product.inner(do, S), dreader - product.inner(beta * dX, S)
    writes += product.inner(beta * E, dS)
    return dq, dreader, writes, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  tall = jnp.zeros((p.C, p.k_tile), f32)
  dq, dreader, writes, total = over(p.NV, tile, (tall, tall, tall, jnp.zeros(p.k_tile, f32)))
  runs = runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  dq, dreader = tiles.from_start(runs, p.scale * dq), tiles.from_start(runs, dreader)
  writes, g = tiles.to_end(runs, writes), None
  q, k = take(q_ref, both(tokens, keys)), take(k_ref, both(tokens, keys))
  dP, dM = take(dp_ref, None), take(dm_ref, None)
  own = jnp.sum(jnp.where(row == column, dP, 0.0), axis=1)[:, None]
  if p.gate == "channel":
    g = take(g_ref, both(tokens, keys)).astype(f32)
    q, k, by_q, by_k, dk = q.astype(f32), k.astype(f32), tall, tall, tall
    for h, upto, after in tiles.halves(g):
      if h == p.C:
        dq, dreader, writes = by_q + dq * upto, by_k + dreader * upto, writes * after
      else:
        keep = tiles.pairs_of_halves(p.C, h)
        corner, other = jnp.where(keep, dP, 0.0), jnp.where(keep, dM, 0.0)
        by_q += fine(corner, k * after) * upto
        by_k += fine(other, k * after) * upto
        dk += (fine.outer(corner, q * upto) + fine.outer(other, k * upto)) * after
  else:
    if p.gate == "head":
      g = take(g_ref, tokens).astype(f32)
      head = tiles.head_per_head(g)[:, None]
      dq, dreader, writes = dq * head, dreader * head, writes * tiles.tail_per_head(g)[:, None]
    dP = jnp.where(row == column, 0.0, dP)
    dq, dreader, dk = dq + fine(dP, k), dreader + fine(dM, k), fine.outer(dP, q) + fine.outer(dM, k)

  q, k = q.astype(f32), k.astype(f32)
  if g is not None:
    late, after = q * dq + k * (dreader - dk), k * writes
    dg = tiles.gate_cotangent(g, runs, late, None, after, total, fine)
    give(outputs[2], dg, both(tokens, keys) if p.gate == "channel" else tokens)
  give(outputs[0], dq + own * k, both(tokens, keys))
  give(outputs[1], dreader + dk + writes + own * q, both(tokens, keys))


def pairs(
  p: Plan, q, k, do, errors, dx, beta, g, runs, edges, dp, dm, kept, dkept
) -> tuple[Array, Array, Array | None]:
  narrow = p.K <= NARROW and p.gate == "channel" and p.dtype == jnp.bfloat16
  p = p.cut(TILES, "pairs_narrow" if narrow else "pairs")
  kinds = "q", "q", "v", "v", "v", "head", p.gate, "runs", "edges", "pairs", "pairs", "kept", "kept"
  inputs = q, k, do, errors, dx, beta, g, runs, edges, dp, dm, kept, dkept
  found = start(
    _pairs_kernel, p, AXES["pairs"], "delta_pairs", kinds, inputs, key_cotangents(p, q, k)
  )
  (dq, dk), dg = gathered(p, found, 2)
  return dq, dk, dg
