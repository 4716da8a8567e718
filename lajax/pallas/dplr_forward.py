"""Forward kernels of diagonal plus low rank: each chunk's triangular system, the states, and the
outputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas import tiles, time_splits
from lajax.pallas.plan import (
  Axes,
  MatrixPlan,
  Tiles,
  chunk_of,
  decayed_results,
  document_of,
  launch_plan,
  loop_tiles,
  places,
  split_suffix,
)
from lajax.pallas.state_tiles import (
  decays,
  identity_from,
  load_parts,
  load_state,
  parts_of,
  read_state,
  store_chunk_state,
  store_state,
  total_decay,
)
from lajax.pallas.tiles import Products, iota, load, store, tile_mask

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("solve", False, False): Tiles(64, 32, 8, 1),
  ("solve", True, False): Tiles(16, 16, 8, 1),
  ("solve", False, True): Tiles(32, 32, 8, 1),
  ("solve", True, True): Tiles(32, 16, 4, 1),
  ("summaries", False, False): Tiles(64, 32, 8, 1),
  ("summaries", True, False): Tiles(64, 16, 4, 2),
  ("summaries", False, True): Tiles(64, 16, 4, 2),
  ("summaries", True, True): Tiles(64, 16, 4, 2),
  ("scan", False, False): Tiles(64, 16, 4, 2),
  ("scan_wide", False, False): Tiles(64, 16, 4, 2),
  ("scan", True, False): Tiles(64, 32, 8, 1),
  ("scan_wide", True, False): Tiles(128, 16, 8, 1),
  ("scan", False, True): Tiles(64, 16, 4, 2),
  ("scan", True, True): Tiles(64, 16, 4, 2),
  ("read", False, True): Tiles(64, 32, 8, 1),
  ("read", True, True): Tiles(64, 32, 8, 1),
}
# Largest K for which a program of `scan` has registers for outputs with products of float32.
NARROW = 64
# Largest K of the usual tiles. Beyond, programs hold fewer columns of a state, and products of
# float32 do not fit at all.
WIDE = 128
AXES = {
  "solve": Axes(True, False, False),
  "summaries": Axes(False, False, True),
  "scan": Axes(False, False, True),
  "read": Axes(True, False, True),
}


# --- scores ---------------------------------------------------------------------------------------


class Reader(NamedTuple):
  """Keys that read what earlier tokens wrote."""

  ref: Any
  early: bool  # reads before its own token's decay; else after it, and its own token's write too


def scores(
  p: MatrixPlan, fine: Products, tokens, readers: Sequence[Reader], key_refs, g_ref, decayed_refs
) -> list[Float[Array, "C C"]]:
  """Returns the scores of each reader with each of the keys, decayed between the two tokens;
  undefined above the diagonal.

  With decays per channel, also stores the readers decayed from the chunk's start, then the keys
  decayed to its end, in as many `decayed_refs` as there are.
  """
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, sums):
    at, mask = pl.ds(i * p.k_tile, p.k_tile), tile_mask(tokens, p.keys(i))
    load_keys = lambda ref: load(ref.at[:, at], mask)
    x, y = [load_keys(reader.ref) for reader in readers], [load_keys(ref) for ref in key_refs]
    if p.gate != "channel":
      return [
        score + fine.inner(a, b) for score, (a, b) in zip(sums, _combinations(x, y), strict=True)
      ]
    x, y = [a.astype(f32) for a in x], [b.astype(f32) for b in y]
    for n, (a, b) in enumerate(_combinations(x, y)):
      if not readers[n // len(y)].early:
        sums[n] += jnp.where(row == column, jnp.sum(a * b, axis=1)[:, None], 0.0)
    for h, upto, before, after in tiles.halves_before(load_keys(g_ref).astype(f32)):
      reads = [a * (before if reader.early else upto) for a, reader in zip(x, readers, strict=True)]
      writes = [b * after for b in y]
      if h < p.C:
        corners, keep = (
          [fine.inner(a, b) for a, b in _combinations(reads, writes)],
          tiles.crosses_halves(p.C, h),
        )
        sums = [
          score + jnp.where(keep, corner, 0.0) for score, corner in zip(sums, corners, strict=True)
        ]
      else:
        for ref, decayed in zip(decayed_refs, [*reads, *writes], strict=False):
          store(ref.at[:, at], decayed, mask)
    return sums

  found = loop_tiles(p.NK, tile, [jnp.zeros((p.C, p.C), f32) for _ in readers for _ in key_refs])
  if p.gate != "head":
    return found
  g = load(g_ref, tokens).astype(f32)
  between = [
    tiles.between_before_per_head(g) if reader.early else tiles.between_per_head(g)
    for reader in readers
  ]
  return [x * between[n // len(key_refs)] for n, x in enumerate(found)]


def _combinations(x: Sequence, y: Sequence) -> list[tuple]:
  """Returns all (a, b) of x and y."""
  return [(a, b) for a in x for b in y]


# --- solve: the triangular system of each chunk ---------------------------------------------------


def _solve_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """G, N_ak, P_b and P_k of a chunk. With decays per channel also a, b, k and q, decayed."""
  a_ref, q_ref, b_ref, k_ref, g_ref, document_ref, edges_ref = inputs
  squares_ref, *decayed_refs = outputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  triangle = lambda keep, found: [tiles.mask_scores(document, keep, x) for x in found]
  keys = [b_ref, k_ref]
  N = triangle(
    row > column, scores(p, fine, tokens, [Reader(a_ref, True)], keys, g_ref, decayed_refs[:3])
  )
  N[0] = tiles.solve_triangle(-N[0], jnp.ones(p.C, f32), fine)
  P = triangle(
    row >= column, scores(p, fine, tokens, [Reader(q_ref, False)], keys, g_ref, decayed_refs[3:])
  )
  for n in range(2):
    store(squares_ref.at[jnp.int32(n)], jnp.where(row > column, N[n], P[n].T), None)


class LowRankSystem(NamedTuple):
  """Part of the chunks that does not depend on a state.

  Keys are decayed already if decays are per channel.
  """

  # [B HV N 2 C C]: G and N_ak below the diagonals, the transposes of P_b and P_k on and above them.
  squares: Array
  a_reader: Array  # a as it reads the state
  b_writer: Array  # b and k as they write to the state
  k_writer: Array
  q_reader: Array  # q as it reads the state


def solve_chunks(p: MatrixPlan, q, a, b, k, g, document, edges) -> LowRankSystem:
  p = p.cut(TILES, "solve")
  results = [
    ("two scores", (p.B, p.HV, p.N, 2, p.C, p.C), f32),
    *decayed_results(p, p.state_dtype, f32, f32, p.state_dtype),
  ]
  kinds = *("q",) * 4, p.gate, "document", "edges"
  squares, *decayed = launch_plan(
    _solve_kernel, p, AXES["solve"], "dplr_solve", kinds, (a, q, b, k, g, document, edges), results
  )
  return LowRankSystem(squares, *(decayed or (a, b, k, q)))


def load_squares(ref, *at) -> list[Float[Array, "C C"]]:
  """Loads the squares of a chunk: G with P_b^T, and N_ak with P_k^T."""
  return [load(ref.at[(*at, jnp.int32(n))], None) for n in range(2)]


# --- scan: through the chunks ---------------------------------------------------------------------


def _summaries_kernel(
  inputs, outputs, *, interpreted: bool, p: MatrixPlan, values_end: int, matrix: int
):
  """Final state of a time split started from zero; columns `matrix:` hold the split's transition
  matrix [K K].

  Those columns start from the identity and get no values.
  """
  a_ref, b_ref, k_ref, v_ref, g_ref, document_ref, edges_ref, squares_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  parts, column = parts_of(p), place.j * p.v_tile + jnp.arange(p.v_tile, dtype=jnp.int32)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    document = document_of(p, document_ref, edges_ref, n, at)
    before, to_end = decays(p, g_ref, at, tokens, tiles.before_per_head, tiles.to_end_per_head)
    v = load(v_ref.at[at, :], tile_mask(tokens, column < values_end))
    W = _read_by_a(
      product, fine, a_ref, at, tokens, document, parts, v, load_squares(squares_ref, n), S, before
    )
    return _advanced(p, fine, (b_ref, k_ref), g_ref, at, tokens, document, parts, (W, v), S, to_end)

  first = identity_from(p, matrix, column)
  store_state(outputs[0], lax.fori_loop(0, p.span, chunk, first), parts, p.values(place.j))


def _summaries(p: MatrixPlan, system: LowRankSystem, v, g, document, edges) -> tuple[Array, Array]:
  """Returns the state after each split from zeros, [B P HV K V], and its matrix, [B P HV K K]."""
  p = p.cut(TILES, "summaries")
  kinds = *(p.reader,) * 3, "v", p.gate, "document", "edges", "two scores"
  inputs = system.a_reader, system.b_writer, system.k_writer, v, g, document, edges, system.squares
  return time_splits.summaries(
    _summaries_kernel, p, AXES["summaries"], "dplr_summaries", kinds, inputs
  )


def _read_by_a(
  product, fine, a_ref, at, tokens, document, parts, v, squares, S, before
) -> Float[Array, "C V"]:
  """Returns W = X - G X, with X = (before a) S + N_ak v."""
  X = tiles.mask_from_start(
    document, before * read_state(product, load_parts(a_ref, at, tokens, parts), S)
  )
  X += fine(tiles.below(squares[1]), v)
  return X - fine(tiles.below(squares[0]), X)


def _advanced(
  p: MatrixPlan, fine, writer_refs, g_ref, at, tokens, document, parts, written, S, to_end
) -> list[Array]:
  """Returns total S + (to_end b)^T W + (to_end k)^T v."""
  W, v = (
    tiles.mask_to_end(document, x if p.gate == "none" else to_end * x.astype(f32)) for x in written
  )

  def update(x, part):
    b, k = (load(ref.at[at, part[0]], tile_mask(tokens, part[1])) for ref in writer_refs)
    x = tiles.mask_total(document, total_decay(p, g_ref, at, tokens, part) * x)
    return x + fine.outer(b, W) + fine.outer(k, v)

  return [update(x, part) for x, part in zip(S, parts, strict=True)]


def _scan_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """o = scale ((from_start q) S + P_b W + P_k v), then S = total S + (to_end b)^T W + (to_end k)^T
  v, chunk by chunk.

  Stores S before each chunk if there is a ref for it. Without q it gives W instead of o.
  """
  a_ref, q_ref, b_ref, k_ref, v_ref, g_ref, document_ref, edges_ref, squares_ref, state_ref = inputs
  out_ref, last_ref, *chunk_states_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scan"])[0](pl.program_id(0))
  parts, values = parts_of(p), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    mask = tile_mask(tokens, values)
    if chunk_states_ref:
      store_chunk_state(p, chunk_states_ref[0], S, parts, values, n)
    document, out = document_of(p, document_ref, edges_ref, n, at), None
    from_start, before, to_end = decays(
      p, g_ref, at, tokens, tiles.from_start_per_head, tiles.before_per_head, tiles.to_end_per_head
    )
    if q_ref is not None:
      out = tiles.mask_from_start(
        document, from_start * read_state(product, load_parts(q_ref, at, tokens, parts), S)
      )
    v = load(v_ref.at[at, :], mask)
    W = _read_by_a(
      product, fine, a_ref, at, tokens, document, parts, v, load_squares(squares_ref, n), S, before
    )
    if out is not None:
      out = _out(p, fine, out, load_squares(squares_ref, n), W, v)
    store(out_ref.at[at, :], W if out is None else out, mask)
    return _advanced(p, fine, (b_ref, k_ref), g_ref, at, tokens, document, parts, (W, v), S, to_end)

  store_state(
    last_ref, lax.fori_loop(0, p.span, chunk, load_state(state_ref, parts, values)), parts, values
  )


def _out(p: MatrixPlan, fine, old, squares, W, v) -> Float[Array, "C V"]:
  """Returns scale (old + P_b W + P_k v); `old` is the read from the state before the chunk."""
  P_b, P_k = (tiles.above(x) for x in squares)
  return p.scale * (old + fine.outer(P_b, W) + fine.outer(P_k, v))


def outputs_fit(p: MatrixPlan) -> bool:
  """Returns whether a program of `scan` has registers for outputs; else `read` makes them from the
  stored states.
  """
  return p.K <= NARROW or p.dtype == jnp.bfloat16


def scan_chunks(
  p: MatrixPlan, system: LowRankSystem, v, g, document, edges, state, dtype, keep_states: bool
) -> tuple[Array, Array, Array | None, Array | None]:
  """Returns o, the last state, the states before the chunks if they are stored, and the splits'
  transitions if there are any.
  """
  states, transitions = state[:, None], None
  if p.P > 1:
    updates, transitions = _summaries(p, system, v, g, document, edges)
    states = time_splits.by_matrices(transitions, updates, state, reverse=False)
  uncut, p = p, p.cut(TILES, "scan_wide" if p.K > WIDE else "scan")
  results = [("v", v.shape, dtype if outputs_fit(p) else f32), ("split state", states.shape, f32)]
  results += (
    [("chunk_states", (p.B, p.HV, p.N // p.every, p.K, p.V), p.state_dtype)]
    if keep_states or not outputs_fit(p)
    else []
  )
  kinds = *(p.reader,) * 4, "v", p.gate, "document", "edges", "two scores", "split state"
  readers = system.a_reader, system.q_reader if outputs_fit(p) else None
  inputs = *readers, system.b_writer, system.k_writer, v, g, document, edges, system.squares, states
  name = ("dplr_outputs" if outputs_fit(p) else "dplr_states") + split_suffix(p)
  out, after, *chunk_states = launch_plan(
    _scan_kernel, p, AXES["scan"], name, kinds, inputs, results
  )
  if not outputs_fit(p):
    out = _read(uncut, system, out, v, g, document, edges, chunk_states[0], dtype)
  return out, after[:, -1], chunk_states[0] if chunk_states else None, transitions


# --- read: the outputs of all chunks at once ------------------------------------------------------


def _read_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """o = scale ((from_start q) S + P_b W + P_k v)."""
  q_ref, read_ref, v_ref, g_ref, document_ref, edges_ref, squares_ref, chunk_states_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  document, mask = (
    document_of(p, document_ref, edges_ref, place.n, slice(None)),
    tile_mask(tokens, values),
  )

  def tile(i, read):
    rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    return read + product(
      load(q_ref.at[:, rows], tile_mask(tokens, keys)),
      load(chunk_states_ref.at[rows, :], tile_mask(keys, values)),
    )

  (from_start,) = decays(p, g_ref, slice(None), tokens, tiles.from_start_per_head)
  old = tiles.mask_from_start(
    document, from_start * loop_tiles(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
  )
  store(
    outputs[0],
    _out(p, fine, old, load_squares(squares_ref), load(read_ref, mask), load(v_ref, mask)),
    mask,
  )


def _read(
  p: MatrixPlan, system: LowRankSystem, reads, v, g, document, edges, chunk_states, dtype
) -> Array:
  p = p.cut(TILES, "read")
  kinds = p.reader, "v", "v", "head", "document", "edges", "two scores", "chunk_states"
  inputs = (
    system.q_reader,
    reads,
    v,
    g if p.gate == "head" else None,
    document,
    edges,
    system.squares,
    chunk_states,
  )
  (out,) = launch_plan(
    _read_kernel, p, AXES["read"], "dplr_reads", kinds, inputs, [("v", v.shape, dtype)]
  )
  return out
