"""Backward kernels of diagonal plus low rank: what tokens read, cotangents from chunk to chunk, and of pairs."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lajax.pallas import segments, tiles
from lajax.pallas.dplr_forward import WIDE, Reader, scores
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
from lajax.pallas.tiles import Products, both, give, iota, take

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("errors", False, False): Tiles(64, 16, 8, 1),
  ("errors", True, False): Tiles(16, 16, 4, 1),
  ("errors", False, True): Tiles(32, 32, 8, 1),
  ("errors", True, True): Tiles(32, 32, 4, 1),
  ("errors_wide", False, False): Tiles(16, 16, 8, 1),
  ("errors_wide", True, False): Tiles(16, 16, 4, 1),
  ("summaries_back", False, False): Tiles(64, 32, 4, 2),
  ("carry_back", False, False): Tiles(64, 32, 4, 2),
  ("carry_back_wide", False, False): Tiles(128, 16, 4, 1),
  ("summaries_back", True, False): Tiles(64, 32, 4, 2),
  ("carry_back", True, False): Tiles(64, 32, 4, 2),
  ("carry_back_wide", True, False): Tiles(128, 16, 8, 2),
  ("summaries_back", False, True): Tiles(128, 16, 8, 1),
  ("carry_back", False, True): Tiles(128, 16, 8, 1),
  ("summaries_back", True, True): Tiles(32, 16, 8, 1),
  ("carry_back", True, True): Tiles(32, 16, 8, 1),
  ("scores", False, False): Tiles(64, 16, 8, 2),
  ("scores", True, False): Tiles(32, 32, 4, 1),
  ("scores", False, True): Tiles(16, 16, 8, 1),
  ("scores", True, True): Tiles(32, 32, 4, 1),
  ("scores_wide", False, False): Tiles(16, 32, 8, 1),
  ("scores_wide", True, False): Tiles(32, 32, 4, 1),
  ("pairs", False, False): Tiles(16, 16, 8, 1),
  ("pairs", True, False): Tiles(16, 32, 8, 1),
  ("pairs", False, True): Tiles(16, 32, 8, 1),
  ("pairs", True, True): Tiles(32, 32, 4, 1),
}
AXES = {
  "errors": Axes(True, False, False),
  "carry_back": Axes(False, False, True),
  "scores": Axes(True, False, False),
  "pairs": Axes(True, True, False),
}


# --- errors: what each token read ------------------------------------------------------------------------------------


def _errors_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """G, N_ak and scale P_k of a chunk, W = X - G X, and scale P_b^T do."""
  q_ref, a_ref, b_ref, k_ref, v_ref, do_ref, g_ref, runs_ref, edges_ref, kept_ref = inputs
  solved_ref, fresh_ref, later_ref, read_ref, dread_ref, *decayed_refs = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  full = tiles.full_products(interpreted)
  place = places(p, AXES["errors"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  together = (
    p.gate == "channel"
  )  # where decays are what is dear; else one after the other, which takes fewer registers

  def scores_of(reader: Reader, keep, refs) -> Iterator[Array]:
    groups = [[b_ref, k_ref]] if together else [[b_ref], [k_ref]]
    for keys in groups:
      yield from (
        tiles.pairs(runs, keep, x) for x in scores(p, fine, tokens, [reader], keys, g_ref, refs)
      )

  found = scores_of(Reader(a_ref, True), row > column, decayed_refs[:3])
  G = tiles.solve(-next(found), jnp.ones(p.C, f32), fine)
  give(solved_ref, G, None)
  N_ak = next(found)
  give(fresh_ref, N_ak, None)

  def correct(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def tile(i, sums):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      a = take(a_ref.at[:, rows], both(tokens, keys))
      if p.gate == "channel":
        g = take(g_ref.at[:, rows], both(tokens, keys)).astype(f32)
        a = a.astype(f32) * tiles.before_per_channel(g, full)
      return sums + product(a, take(kept_ref.at[rows, at], both(keys, values)))

    old = over(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
    if p.gate == "head":
      old *= tiles.before_per_head(take(g_ref, tokens).astype(f32))[:, None]
    X = fine(N_ak, take(v_ref.at[:, at], both(tokens, values))) + tiles.from_start(runs, old)
    give(read_ref.at[:, at], X - fine(G, X), both(tokens, values))
    return nothing

  over(p.NV, correct, jnp.int32(0))
  found = scores_of(Reader(q_ref, False), row >= column, decayed_refs[3:])
  P_b = p.scale * next(found)

  def respond(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do = take(do_ref.at[:, at], both(tokens, values))
    give(dread_ref.at[:, at], fine.outer(P_b, do), both(tokens, values))
    return nothing

  over(p.NV, respond, jnp.int32(0))
  give(later_ref, p.scale * next(found), None)


def errors(
  p: Plan, q, a, b, k, v, do, g, runs, edges, kept
) -> tuple[list[Array], Array, Array, list[Array]]:
  """G, N_ak and scale P_k; W; scale P_b^T do; and a as it reads from a state, b and k as they write to one, q as it reads."""
  p = p.cut(TILES, "errors_wide" if p.K > WIDE else "errors")
  square, tall = ("pairs", (p.B, p.HV, p.N, p.C, p.C), f32), ("v", v.shape, f32)
  results = [square, square, square, tall, tall, *decayed_results(p, p.kept, f32, f32, p.kept)]
  kinds = *("q",) * 4, "v", "v", p.gate, "runs", "edges", "kept"
  inputs = q, a, b, k, v, do, g, runs, edges, kept
  solved, fresh, later, found, dread, *decayed = start(
    _errors_kernel, p, AXES["errors"], "dplr_errors", kinds, inputs, results
  )
  return [solved, fresh, later], found, dread, decayed or [a, b, k, q]


# --- carry_back: cotangents from chunk to chunk -----------------------------------------------------------------------


def _carry_back_kernel(inputs, outputs, *, interpreted: bool, p: Plan, summary: bool):
  """dS = total dS + scale (head q)^T do + (before a)^T dX, in reverse, keeping dX, and dS after each chunk.

  Or the summary of each segment of time: dS at its start where there is none at its end.
  """
  a_ref, q_ref, b_ref, do_ref, dread_ref, g_ref, runs_ref, edges_ref, solved_ref, dlast_ref = inputs
  *given, dstate_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  parts = parts_of(p)
  place = places(p, AXES["carry_back"])[0](pl.program_id(0))
  values = p.values(place.j)

  def chunk(m, dS):
    n = chunk_of(p, place.n, m, reverse=True)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    mask = both(tokens, values)
    if given:
      give_state(given[0], dS, parts, values, n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    head, before, tail = decays(
      p, g_ref, at, tokens, tiles.head_per_head, tiles.before_per_head, tiles.tail_per_head
    )
    b, rounded = (
      take_parts(b_ref, at, tokens, parts),
      [x.astype(p.kept) for x in dS],
    )  # in every token alike
    dW = take(dread_ref.at[at, :], mask) + tiles.to_end(runs, tail * read_state(fine, b, rounded))
    dX = dW - fine.outer(take(solved_ref.at[n], None), dW)
    if given:
      give(given[1].at[at, :], dX, mask)
    do = tiles.from_start(runs, p.scale * head * take(do_ref.at[at, :], mask).astype(f32))
    dX = tiles.from_start(runs, before * dX)

    def update(x, part):
      q, a = (take(ref.at[at, part[0]], both(tokens, part[1])) for ref in (q_ref, a_ref))
      total = tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part))
      return total * x + product.outer(q, do) + fine.outer(a, dX)

    return [update(x, part) for x, part in zip(dS, parts, strict=True)]

  dS = (
    [jnp.zeros((p.k_tile, p.v_tile), f32) for _ in parts]
    if summary
    else take_state(dlast_ref, parts, values)
  )
  give_state(dstate_ref, lax.fori_loop(0, p.span, chunk, dS), parts, values)


def carry_back(
  p: Plan, a, q, b, do, dread, g, runs, edges, solved, dlast, matrices
) -> Sequence[Array]:
  """dS after each chunk, dX, and dS before the first token; `matrices` are the segments', of `attend`."""
  kinds = *(p.reader,) * 3, "v", "v", p.gate, "runs", "edges", "pairs"
  inputs = a, q, b, do, dread, g, runs, edges, solved
  return segments.carried_back(
    _carry_back_kernel,
    p,
    TILES,
    AXES["carry_back"],
    "dplr",
    p.K > WIDE,
    kinds,
    inputs,
    dlast,
    matrices,
    [("v", do.shape, f32)],
  )


# --- scores: cotangents of pairs of tokens, and of v -----------------------------------------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dP = scale do W^T and scale do v^T, dN = dX W^T and dX v^T; dv = scale P_k^T do + N_ak^T dX + (tail k) dS.

  Of pairs of one document, below the diagonal (dP on it too); one decay a head between the two is in them already.
  """
  (
    k_ref,
    v_ref,
    do_ref,
    read_ref,
    dx_ref,
    g_ref,
    runs_ref,
    edges_ref,
    fresh_ref,
    later_ref,
    dkept_ref,
  ) = inputs
  squares_ref, dv_ref = outputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  g = take(g_ref, tokens).astype(f32) if p.gate == "head" else None

  def tile(j, sums):
    at, mask = pl.ds(j * p.v_tile, p.v_tile), both(tokens, p.values(j))
    v, do, W, dX = (take(ref.at[:, at], mask) for ref in (v_ref, do_ref, read_ref, dx_ref))
    pairs = (do, W), (do, v), (dX, W), (dX, v)
    return [sum + fine.inner(x, y) for sum, (x, y) in zip(sums, pairs, strict=True)]

  found = over(p.NV, tile, [jnp.zeros((p.C, p.C), f32)] * 4)
  late, early = (
    (p.scale, 1.0)
    if g is None
    else (p.scale * tiles.between_per_head(g), tiles.between_before_per_head(g))
  )
  for n, x in enumerate(found):
    kept = (
      tiles.pairs(runs, row >= column, late * x)
      if n < 2
      else tiles.pairs(runs, row > column, early * x)
    )
    give(squares_ref.at[jnp.int32(n)], kept, None)

  def values(j, nothing):
    at, keep = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def written(i, sum):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      return sum + fine(
        take(k_ref.at[:, rows], both(tokens, keys)), take(dkept_ref.at[rows, at], both(keys, keep))
      )

    dv = over(p.NK, written, jnp.zeros((p.C, p.v_tile), f32))
    dv = tiles.to_end(runs, dv if g is None else dv * tiles.tail_per_head(g)[:, None])
    do, dX = (take(ref.at[:, at], both(tokens, keep)) for ref in (do_ref, dx_ref))
    dv += fine.outer(take(fresh_ref, None), dX) + fine.outer(take(later_ref, None), do)
    give(dv_ref.at[:, at], dv, both(tokens, keep))
    return nothing

  over(p.NV, values, jnp.int32(0))


def scores_back(
  p: Plan, k, v, do, found, dx, g, runs, edges, fresh, later, dkept
) -> Sequence[Array]:
  """dP_b, dP_k, dN_ab and dN_ak; and dv."""
  p = p.cut(TILES, "scores_wide" if p.K > WIDE else "scores")
  results = [("four pairs", (p.B, p.HV, p.N, 4, p.C, p.C), f32), ("v", v.shape, v.dtype)]
  kinds = p.reader, *("v",) * 4, "head", "runs", "edges", "pairs", "pairs", "kept"
  inputs = k, v, do, found, dx, g if p.gate == "head" else None, runs, edges, fresh, later, dkept
  return start(_scores_kernel, p, AXES["scores"], "dplr_scores", kinds, inputs, results)


# --- pairs: dq, da, db, dk and dg ------------------------------------------------------------------------------------


def _through(
  fine: Products, squares_ref, load, keep, decays=None, first: int = 0, sums=()
) -> tuple[Array, ...]:
  """The cotangents of q, a, b and k from those of their scores, of which `keep` says whose, added to `sums`.

  The four kinds of scores one after the other, from the first on, and what they are of loaded anew: so that few tiles are in
  registers at a time.
  """

  def one(m, sums):
    dq, da, db, dk = sums
    late, by_b = m < 2, (m & 1) == 0
    x = jnp.where(keep(late), take(squares_ref.at[m], None), 0.0)
    q, a, b, k = load()
    reader, written, head, tail = jnp.where(late, q, a), jnp.where(by_b, b, k), 1.0, 1.0
    if decays is not None:
      head, tail = jnp.where(late, decays[0], decays[1]), decays[2]
      reader, written = reader * head, written * tail
    reads, writes = fine(x, written) * head, fine.outer(x, reader) * tail
    dq, da = dq + jnp.where(late, reads, 0.0), da + jnp.where(late, 0.0, reads)
    return dq, da, db + jnp.where(by_b, writes, 0.0), dk + jnp.where(by_b, 0.0, writes)

  return lax.fori_loop(first, 4, one, sums)


def _pairs_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dq, da, db, dk and dg of one tile of K: as in the additive family, with two readers and two that are read.

  Between neighbours, of which the later one reads before its decay, stands none: they are apart, as a token with itself is.
  """
  q_ref, a_ref, b_ref, k_ref, v_ref, do_ref, read_ref, dx_ref, g_ref, runs_ref, edges_ref, *refs = (
    inputs
  )
  squares_ref, kept_ref, dkept_ref = refs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["pairs"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  runs, mask = runs_of(p, runs_ref, edges_ref, place.n, slice(None)), both(tokens, keys)
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  dtype = f32 if p.gate == "channel" else tiles.operand_dtype(q_ref, a_ref, b_ref, k_ref)
  load = lambda: [take(ref, mask).astype(dtype) for ref in (q_ref, a_ref, b_ref, k_ref)]
  apart = lambda late: (row > column + 1) | (late & (row > column))
  tall, g, levels = jnp.zeros((p.C, p.k_tile), f32), None, p.C.bit_length() - 1
  if p.gate == "channel":
    g = take(g_ref, mask).astype(f32)

    def halves(level, sums, g=g):
      keep = lambda late: apart(late) & tiles.pairs_of_level(p.C, level)
      return _through(
        fine, squares_ref, load, keep, tiles.decays_of_halves(g, level, fine), sums=sums
      )

    by_q, by_a, db, dk = lax.fori_loop(0, levels, halves, (tall,) * 4)
  else:
    by_q, by_a, db, dk = _through(fine, squares_ref, load, apart, sums=(tall,) * 4)

  def tile(j, sums):
    dq, da, b_writes, k_writes, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    v, do, W, dX = (
      take(ref.at[:, at], both(tokens, values)) for ref in (v_ref, do_ref, read_ref, dx_ref)
    )
    S, dS = (
      take(kept_ref.at[:, at], both(keys, values)),
      take(dkept_ref.at[:, at], both(keys, values)),
    )
    dq, da = dq + product.inner(do, S), da + product.inner(dX, S)
    b_writes, k_writes = b_writes + product.inner(W, dS), k_writes + product.inner(v, dS)
    return dq, da, b_writes, k_writes, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  dq, da, b_writes, k_writes, total = over(
    p.NV, tile, (tall, tall, tall, tall, jnp.zeros(p.k_tile, f32))
  )
  head = before = tail = 1.0
  if p.gate == "channel" and g is not None:
    head, before, tail = tiles.decays_of_halves(g, levels, fine)
  elif p.gate == "head":
    g = take(g_ref, tokens).astype(f32)
    head, before, tail = (
      x(g)[:, None] for x in (tiles.head_per_head, tiles.before_per_head, tiles.tail_per_head)
    )
  dq, da = (
    by_q + tiles.from_start(runs, p.scale * head * dq),
    by_a + tiles.from_start(runs, before * da),
  )
  b_writes, k_writes = tiles.to_end(runs, tail * b_writes), tiles.to_end(runs, tail * k_writes)
  q, a, b, k = load()

  wide = lambda x: x.astype(f32)
  if g is not None:
    late, early = wide(q) * dq - wide(k) * dk - wide(b) * db, wide(a) * da
    after = wide(k) * k_writes + wide(b) * b_writes
    dg = tiles.gate_cotangent(g, runs, late, early, after, total, fine)
    give(outputs[4], dg, both(tokens, keys) if p.gate == "channel" else tokens)
  own_b, own_k = (
    jnp.sum(jnp.where(row == column, take(squares_ref.at[jnp.int32(n)], None), 0.0), axis=1)[
      :, None
    ]
    for n in (0, 1)
  )
  near = lambda late: row == column + 1
  _, da, db, dk = _through(
    fine, squares_ref, load, near, first=2, sums=(tall, da, db + b_writes, dk + k_writes)
  )
  give(outputs[0], dq + own_b * wide(b) + own_k * wide(k), both(tokens, keys))
  give(outputs[1], da, both(tokens, keys))
  give(outputs[2], db + own_b * wide(q), both(tokens, keys))
  give(outputs[3], dk + own_k * wide(q), both(tokens, keys))


def pairs(p: Plan, q, a, b, k, v, do, found, dx, g, runs, edges, squares, kept, dkept) -> tuple:
  """dq, da, db, dk and dg."""
  p = p.cut(TILES, "pairs")
  kinds = *("q",) * 4, *("v",) * 4, p.gate, "runs", "edges", "four pairs", "kept", "kept"
  inputs = q, a, b, k, v, do, found, dx, g, runs, edges, squares, kept, dkept
  found = start(
    _pairs_kernel, p, AXES["pairs"], "dplr_pairs", kinds, inputs, key_cotangents(p, q, a, b, k)
  )
  keys, dg = gathered(p, found, 4)
  return *keys, dg
