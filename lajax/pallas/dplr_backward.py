"""Backward kernels of diagonal plus low rank: reads again, cotangents from chunk to chunk, then
those of scores and keys.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from lajax.pallas import tiles, time_splits
from lajax.pallas.dplr_forward import WIDE, Reader, scores
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
from lajax.pallas.tiles import Products, iota, load, store, tile_mask

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("recompute", False, False): Tiles(64, 16, 8, 1),
  ("recompute", True, False): Tiles(16, 16, 4, 1),
  ("recompute", False, True): Tiles(32, 32, 8, 1),
  ("recompute", True, True): Tiles(32, 32, 4, 1),
  ("recompute_wide", False, False): Tiles(16, 16, 8, 1),
  ("recompute_wide", True, False): Tiles(16, 16, 4, 1),
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
  ("key_gradients", False, False): Tiles(16, 16, 8, 1),
  ("key_gradients", True, False): Tiles(16, 32, 8, 1),
  ("key_gradients", False, True): Tiles(16, 32, 8, 1),
  ("key_gradients", True, True): Tiles(32, 32, 4, 1),
}
AXES = {
  "recompute": Axes(True, False, False),
  "carry_back": Axes(False, False, True),
  "scores": Axes(True, False, False),
  "key_gradients": Axes(True, True, False),
}


# --- recompute: what each token read --------------------------------------------------------------


def _recompute_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """G, N_ak and scale P_k of a chunk, W = X - G X, and scale P_b^T do."""
  q_ref, a_ref, b_ref, k_ref, v_ref, do_ref, g_ref, document_ref, edges_ref, chunk_states_ref = (
    inputs
  )
  triangle_ref, ak_scores_ref, qk_scores_ref, read_ref, dread_ref, *decayed_refs = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  full = tiles.full_products(interpreted)
  place = places(p, AXES["recompute"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  # With decays per channel both keys are scored at once: making decays is what costs. Else one
  # after the other, which takes fewer registers.
  at_once = p.gate == "channel"

  def scores_with(reader: Reader, keep, refs) -> Iterator[Array]:
    groups = [[b_ref, k_ref]] if at_once else [[b_ref], [k_ref]]
    for keys in groups:
      yield from (
        tiles.mask_scores(document, keep, x)
        for x in scores(p, fine, tokens, [reader], keys, g_ref, refs)
      )

  found = scores_with(Reader(a_ref, True), row > column, decayed_refs[:3])
  G = tiles.solve_triangle(-next(found), jnp.ones(p.C, f32), fine)
  store(triangle_ref, G, None)
  N_ak = next(found)
  store(ak_scores_ref, N_ak, None)

  def correct(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def tile(i, sums):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      a = load(a_ref.at[:, rows], tile_mask(tokens, keys))
      if p.gate == "channel":
        g = load(g_ref.at[:, rows], tile_mask(tokens, keys)).astype(f32)
        a = a.astype(f32) * tiles.before_per_channel(g, full)
      return sums + product(a, load(chunk_states_ref.at[rows, at], tile_mask(keys, values)))

    old = loop_tiles(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
    if p.gate == "head":
      old *= tiles.before_per_head(load(g_ref, tokens).astype(f32))[:, None]
    X = fine(N_ak, load(v_ref.at[:, at], tile_mask(tokens, values))) + tiles.mask_from_start(
      document, old
    )
    store(read_ref.at[:, at], X - fine(G, X), tile_mask(tokens, values))
    return nothing

  loop_tiles(p.NV, correct, jnp.int32(0))
  found = scores_with(Reader(q_ref, False), row >= column, decayed_refs[3:])
  P_b = p.scale * next(found)

  def respond(j, nothing):
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    do = load(do_ref.at[:, at], tile_mask(tokens, values))
    store(dread_ref.at[:, at], fine.outer(P_b, do), tile_mask(tokens, values))
    return nothing

  loop_tiles(p.NV, respond, jnp.int32(0))
  store(qk_scores_ref, p.scale * next(found), None)


def recompute(
  p: MatrixPlan, q, a, b, k, v, do, g, document, edges, chunk_states
) -> tuple[list[Array], Array, Array, list[Array]]:
  """Returns [G, N_ak, scale P_k], W and scale P_b^T do; then a as it reads a state, b and k as they
  write, q as it reads.
  """
  p = p.cut(TILES, "recompute_wide" if p.K > WIDE else "recompute")
  square, values = ("scores", (p.B, p.HV, p.N, p.C, p.C), f32), ("v", v.shape, f32)
  results = [
    square,
    square,
    square,
    values,
    values,
    *decayed_results(p, p.state_dtype, f32, f32, p.state_dtype),
  ]
  kinds = *("q",) * 4, "v", "v", p.gate, "document", "edges", "chunk_states"
  inputs = q, a, b, k, v, do, g, document, edges, chunk_states
  triangle, ak_scores, qk_scores, reads, dread, *decayed = launch_plan(
    _recompute_kernel, p, AXES["recompute"], "dplr_recompute", kinds, inputs, results
  )
  return [triangle, ak_scores, qk_scores], reads, dread, decayed or [a, b, k, q]


# --- carry_back: cotangents from chunk to chunk ---------------------------------------------------


def _carry_back_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan, summary: bool):
  """dS = total dS + scale (from_start q)^T do + (before a)^T dX, chunk by chunk in reverse.

  Stores dS after each chunk, and dX. With `summary` it starts from zeros and gives dS at the
  split's start alone.
  """
  (
    a_ref,
    q_ref,
    b_ref,
    do_ref,
    dread_ref,
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
    mask = tile_mask(tokens, values)
    if given:
      store_state(given[0], dS, parts, values, n)
    document = document_of(p, document_ref, edges_ref, n, at)
    from_start, before, to_end = decays(
      p, g_ref, at, tokens, tiles.from_start_per_head, tiles.before_per_head, tiles.to_end_per_head
    )
    # dS is rounded as it is stored, so the error is the same for every token of the chunk.
    b, rounded = load_parts(b_ref, at, tokens, parts), [x.astype(p.state_dtype) for x in dS]
    dW = load(dread_ref.at[at, :], mask)
    dW = dW + tiles.mask_to_end(document, to_end * read_state(fine, b, rounded))
    dX = dW - fine.outer(load(triangle_ref.at[n], None), dW)
    if given:
      store(given[1].at[at, :], dX, mask)
    do = tiles.mask_from_start(
      document, p.scale * from_start * load(do_ref.at[at, :], mask).astype(f32)
    )
    dX = tiles.mask_from_start(document, before * dX)

    def update(x, part):
      q, a = (load(ref.at[at, part[0]], tile_mask(tokens, part[1])) for ref in (q_ref, a_ref))
      total = total_decay(p, g_ref, at, tokens, part)
      return tiles.mask_total(document, total * x) + product.outer(q, do) + fine.outer(a, dX)

    return [update(x, part) for x, part in zip(dS, parts, strict=True)]

  dS = (
    [jnp.zeros((p.k_tile, p.v_tile), f32) for _ in parts]
    if summary
    else load_state(dlast_ref, parts, values)
  )
  store_state(dstate_ref, lax.fori_loop(0, p.span, chunk, dS), parts, values)


def carry_back(
  p: MatrixPlan, a, q, b, do, dread, g, document, edges, triangle, dlast, transitions
) -> Sequence[Array]:
  """Returns dS after each chunk, dX, and dS before the first token; `transitions` are the splits',
  of `scan_chunks`.
  """
  kinds = *(p.reader,) * 3, "v", "v", p.gate, "document", "edges", "scores"
  inputs = a, q, b, do, dread, g, document, edges, triangle
  return time_splits.carried_back(
    _carry_back_kernel,
    p,
    TILES,
    AXES["carry_back"],
    "dplr",
    p.K > WIDE,
    kinds,
    inputs,
    dlast,
    transitions,
    [("v", do.shape, f32)],
  )


# --- scores_back: cotangents of the scores, and of v ----------------------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """dP = scale do W^T and scale do v^T, dN = dX W^T and dX v^T; dv = scale P_k^T do + N_ak^T dX +
  (to_end k) dS.

  dP is on and below the diagonal, dN below it, both within documents. A decay per head between
  the two tokens is already multiplied in.
  """
  (
    k_ref,
    v_ref,
    do_ref,
    read_ref,
    dx_ref,
    g_ref,
    document_ref,
    edges_ref,
    ak_scores_ref,
    qk_scores_ref,
    dchunk_states_ref,
  ) = inputs
  squares_ref, dv_ref = outputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  g = load(g_ref, tokens).astype(f32) if p.gate == "head" else None

  def tile(j, sums):
    at, mask = pl.ds(j * p.v_tile, p.v_tile), tile_mask(tokens, p.values(j))
    v, do, W, dX = (load(ref.at[:, at], mask) for ref in (v_ref, do_ref, read_ref, dx_ref))
    factors = (do, W), (do, v), (dX, W), (dX, v)
    return [score + fine.inner(x, y) for score, (x, y) in zip(sums, factors, strict=True)]

  found = loop_tiles(p.NV, tile, [jnp.zeros((p.C, p.C), f32)] * 4)
  late, early = (
    (p.scale, 1.0)
    if g is None
    else (p.scale * tiles.between_per_head(g), tiles.between_before_per_head(g))
  )
  for n, x in enumerate(found):
    score = (
      tiles.mask_scores(document, row >= column, late * x)
      if n < 2
      else tiles.mask_scores(document, row > column, early * x)
    )
    store(squares_ref.at[jnp.int32(n)], score, None)

  def values(j, nothing):
    at, keep = pl.ds(j * p.v_tile, p.v_tile), p.values(j)

    def written(i, dv):
      rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
      return dv + fine(
        load(k_ref.at[:, rows], tile_mask(tokens, keys)),
        load(dchunk_states_ref.at[rows, at], tile_mask(keys, keep)),
      )

    dv = loop_tiles(p.NK, written, jnp.zeros((p.C, p.v_tile), f32))
    dv = tiles.mask_to_end(document, dv if g is None else dv * tiles.to_end_per_head(g)[:, None])
    do, dX = (load(ref.at[:, at], tile_mask(tokens, keep)) for ref in (do_ref, dx_ref))
    dv += fine.outer(load(ak_scores_ref, None), dX) + fine.outer(load(qk_scores_ref, None), do)
    store(dv_ref.at[:, at], dv, tile_mask(tokens, keep))
    return nothing

  loop_tiles(p.NV, values, jnp.int32(0))


def scores_back(
  p: MatrixPlan, k, v, do, reads, dx, g, document, edges, ak_scores, qk_scores, dchunk_states
) -> Sequence[Array]:
  """Returns dP_b, dP_k, dN_ab and dN_ak in one array, and dv."""
  p = p.cut(TILES, "scores_wide" if p.K > WIDE else "scores")
  results = [("four scores", (p.B, p.HV, p.N, 4, p.C, p.C), f32), ("v", v.shape, v.dtype)]
  kinds = p.reader, *("v",) * 4, "head", "document", "edges", "scores", "scores", "chunk_states"
  inputs = (
    k,
    v,
    do,
    reads,
    dx,
    g if p.gate == "head" else None,
    document,
    edges,
    ak_scores,
    qk_scores,
    dchunk_states,
  )
  return launch_plan(_scores_kernel, p, AXES["scores"], "dplr_scores", kinds, inputs, results)


# --- key_gradients: dq, da, db, dk and dg ---------------------------------------------------------


def _through(
  fine: Products, squares_ref, load_keys, keep, factors=None, first: int = 0, sums=()
) -> tuple[Array, ...]:
  """Adds the cotangents of q, a, b and k from those of their scores to `sums`.

  Goes through the four kinds of scores one after the other and loads the keys anew for each, so
  that few tiles are in registers at a time.

  Args:
    keep: late -> mask of the scores that count; `late` says whether the reader reads after its own
      decay.
    factors: decays of the readers after and before their own decay, and of the writers; None for
      none.
    first: the first kind of scores.
  """

  def one(m, sums):
    dq, da, db, dk = sums
    late, by_b = m < 2, (m & 1) == 0
    x = jnp.where(keep(late), load(squares_ref.at[m], None), 0.0)
    q, a, b, k = load_keys()
    reader, written = jnp.where(late, q, a), jnp.where(by_b, b, k)
    by_reader, by_writer = 1.0, 1.0
    if factors is not None:
      by_reader, by_writer = jnp.where(late, factors[0], factors[1]), factors[2]
      reader, written = reader * by_reader, written * by_writer
    reads, writes = fine(x, written) * by_reader, fine.outer(x, reader) * by_writer
    dq, da = dq + jnp.where(late, reads, 0.0), da + jnp.where(late, 0.0, reads)
    return dq, da, db + jnp.where(by_b, writes, 0.0), dk + jnp.where(by_b, 0.0, writes)

  return lax.fori_loop(first, 4, one, sums)


def _key_gradients_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """dq, da, db, dk and dg of one tile of K, as in the additive family, with two readers and two
  writers.

  There is no decay between a token and itself, nor between neighbours of which the later one reads
  before its own decay. These scores have no part in dg: `own_b`, `own_k` and `near` add their
  cotangents at the end.
  """
  (
    q_ref,
    a_ref,
    b_ref,
    k_ref,
    v_ref,
    do_ref,
    read_ref,
    dx_ref,
    g_ref,
    document_ref,
    edges_ref,
    *refs,
  ) = inputs
  squares_ref, chunk_states_ref, dchunk_states_ref = refs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["key_gradients"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  document, mask = (
    document_of(p, document_ref, edges_ref, place.n, slice(None)),
    tile_mask(tokens, keys),
  )
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  dtype = f32 if p.gate == "channel" else tiles.operand_dtype(q_ref, a_ref, b_ref, k_ref)
  load_keys = lambda: [load(ref, mask).astype(dtype) for ref in (q_ref, a_ref, b_ref, k_ref)]
  decays_between = lambda late: (row > column + 1) | (late & (row > column))
  zeros, g, levels = jnp.zeros((p.C, p.k_tile), f32), None, p.C.bit_length() - 1
  if p.gate == "channel":
    g = load(g_ref, mask).astype(f32)

    def halves(level, sums, g=g):
      keep = lambda late: decays_between(late) & tiles.crosses_level(p.C, level)
      return _through(
        fine, squares_ref, load_keys, keep, tiles.decays_of_halves(g, level, fine), sums=sums
      )

    by_q, by_a, db, dk = lax.fori_loop(0, levels, halves, (zeros,) * 4)
  else:
    by_q, by_a, db, dk = _through(fine, squares_ref, load_keys, decays_between, sums=(zeros,) * 4)

  def tile(j, sums):
    dq, da, b_writes, k_writes, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    v, do, W, dX = (
      load(ref.at[:, at], tile_mask(tokens, values)) for ref in (v_ref, do_ref, read_ref, dx_ref)
    )
    S, dS = (
      load(chunk_states_ref.at[:, at], tile_mask(keys, values)),
      load(dchunk_states_ref.at[:, at], tile_mask(keys, values)),
    )
    dq, da = dq + product.inner(do, S), da + product.inner(dX, S)
    b_writes, k_writes = b_writes + product.inner(W, dS), k_writes + product.inner(v, dS)
    return dq, da, b_writes, k_writes, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  dq, da, b_writes, k_writes, total = loop_tiles(
    p.NV, tile, (zeros, zeros, zeros, zeros, jnp.zeros(p.k_tile, f32))
  )
  from_start = before = to_end = 1.0
  if p.gate == "channel" and g is not None:
    from_start, before, to_end = tiles.decays_of_halves(g, levels, fine)
  elif p.gate == "head":
    g = load(g_ref, tokens).astype(f32)
    from_start, before, to_end = (
      x(g)[:, None]
      for x in (tiles.from_start_per_head, tiles.before_per_head, tiles.to_end_per_head)
    )
  dq, da = (
    by_q + tiles.mask_from_start(document, p.scale * from_start * dq),
    by_a + tiles.mask_from_start(document, before * da),
  )
  b_writes, k_writes = (
    tiles.mask_to_end(document, to_end * b_writes),
    tiles.mask_to_end(document, to_end * k_writes),
  )
  q, a, b, k = load_keys()

  wide = lambda x: x.astype(f32)
  if g is not None:
    late, early = wide(q) * dq - wide(k) * dk - wide(b) * db, wide(a) * da
    after = wide(k) * k_writes + wide(b) * b_writes
    dg = tiles.gate_cotangent(g, document, late, early, after, total, fine)
    store(outputs[4], dg, tile_mask(tokens, keys) if p.gate == "channel" else tokens)
  own_b, own_k = (
    jnp.sum(jnp.where(row == column, load(squares_ref.at[jnp.int32(n)], None), 0.0), axis=1)[
      :, None
    ]
    for n in (0, 1)
  )
  near = lambda late: row == column + 1
  _, da, db, dk = _through(
    fine, squares_ref, load_keys, near, first=2, sums=(zeros, da, db + b_writes, dk + k_writes)
  )
  store(outputs[0], dq + own_b * wide(b) + own_k * wide(k), tile_mask(tokens, keys))
  store(outputs[1], da, tile_mask(tokens, keys))
  store(outputs[2], db + own_b * wide(q), tile_mask(tokens, keys))
  store(outputs[3], dk + own_k * wide(q), tile_mask(tokens, keys))


def key_gradients(
  p: MatrixPlan,
  q,
  a,
  b,
  k,
  v,
  do,
  reads,
  dx,
  g,
  document,
  edges,
  squares,
  chunk_states,
  dchunk_states,
) -> tuple:
  """Returns dq, da, db, dk and dg."""
  p = p.cut(TILES, "key_gradients")
  kinds = (
    *("q",) * 4,
    *("v",) * 4,
    p.gate,
    "document",
    "edges",
    "four scores",
    "chunk_states",
    "chunk_states",
  )
  inputs = q, a, b, k, v, do, reads, dx, g, document, edges, squares, chunk_states, dchunk_states
  found = launch_plan(
    _key_gradients_kernel,
    p,
    AXES["key_gradients"],
    "dplr_key_gradients",
    kinds,
    inputs,
    key_cotangents(p, q, a, b, k),
  )
  keys, dg = sum_over_groups(p, found, 4)
  return *keys, dg
