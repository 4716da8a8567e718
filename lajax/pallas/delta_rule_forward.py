"""Forward kernels of the delta rule: the triangular system of each chunk, and the states from chunk
to chunk.
"""

from typing import NamedTuple

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
  store_state,
  total_decay,
)
from lajax.pallas.tiles import Products, iota, load, store, tile_mask

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("solve", False, False): Tiles(64, 16, 4, 2),
  ("solve", True, False): Tiles(16, 16, 4, 1),
  ("solve", False, True): Tiles(32, 16, 4, 1),
  ("solve", True, True): Tiles(32, 16, 4, 1),
  ("summaries", False, False): Tiles(64, 16, 4, 2),
  ("summaries", True, False): Tiles(64, 32, 4, 2),
  ("summaries", False, True): Tiles(32, 16, 8, 1),
  ("summaries", True, True): Tiles(32, 16, 4, 1),
  ("scan", False, False): Tiles(64, 32, 8, 2),
  ("scan_wide", False, False): Tiles(128, 16, 8, 1),
  ("scan", True, False): Tiles(64, 32, 4, 2),
  ("scan_wide", True, False): Tiles(64, 16, 8, 2),
  ("scan", False, True): Tiles(32, 16, 8, 2),
  ("scan", True, True): Tiles(32, 16, 4, 1),
  ("read", False, False): Tiles(64, 32, 4, 2),
  ("read", False, True): Tiles(32, 64, 4, 1),
  ("read", True, True): Tiles(32, 64, 4, 1),
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


# --- solve: the triangular system of each chunk ---------------------------------------------------


def scores(
  p: MatrixPlan, fine: Products, tokens, readers, k_ref, g_ref, decayed
) -> list[Float[Array, "C C"]]:
  """Returns the scores of each reader with k, decayed between the two tokens; correct on and below
  the diagonal.

  With decays per channel, also stores the readers decayed from the chunk's start and k decayed to
  its end in `decayed`.
  """
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, sums):
    at, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    load_keys = lambda ref: load(ref.at[:, at], tile_mask(tokens, keys))
    k, x = load_keys(k_ref), [load_keys(ref) for ref in readers]
    if p.gate != "channel":
      return [score + fine.inner(y, k) for score, y in zip(sums, x, strict=True)]
    g, k, x = load_keys(g_ref).astype(f32), k.astype(f32), [y.astype(f32) for y in x]
    own = [jnp.sum(y * k, axis=1)[:, None] for y in x]
    sums = [score + jnp.where(row == column, y, 0.0) for score, y in zip(sums, own, strict=True)]
    for h, upto, after in tiles.halves(g, p.bounded):
      if h == p.C:
        for ref, y in zip(decayed, [*(y * upto for y in x), k * after], strict=True):
          store(ref.at[:, at], y, tile_mask(tokens, keys))
      else:
        corners, keep = (
          [fine.inner(y * upto, k * after) for y in x],
          tiles.crosses_halves(p.C, h, p.bounded),
        )
        sums = [score + jnp.where(keep, y, 0.0) for score, y in zip(sums, corners, strict=True)]
    return sums

  found = loop_tiles(p.NK, tile, [jnp.zeros((p.C, p.C), f32)] * len(readers))
  if p.gate == "head":
    between = tiles.between_per_head(load(g_ref, tokens).astype(f32))
    found = [x * between for x in found]
  return found


def _solve_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """G and P of a chunk.

  With decays per channel also k and q decayed from the chunk's start, and k decayed to its end.
  """
  k_ref, q_ref, beta_ref, g_ref, document_ref, edges_ref = inputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  M, P = scores(p, fine, tokens, [k_ref, q_ref], k_ref, g_ref, outputs[1:])
  P = tiles.mask_scores(document, row >= column, P)
  M = tiles.mask_scores(document, row > column, M)
  G = tiles.solve_triangle(M, load(beta_ref, tokens).astype(f32), fine)
  store(outputs[0], jnp.where(row > column, G, P.T), None)


class DeltaSystem(NamedTuple):
  """Part of the chunks that does not depend on a state.

  Keys are decayed already if decays are per channel.
  """

  squares: Array  # [B HV N C C]: G below the diagonal, the transpose of P on and above it
  k_reader: Array  # k as it reads the state
  q_reader: Array  # q as it reads the state
  k_writer: Array  # k as it writes to the state


def solve_chunks(p: MatrixPlan, q, k, beta, g, document, edges) -> DeltaSystem:
  p = p.cut(TILES, "solve")
  results = [
    ("scores", (p.B, p.HV, p.N, p.C, p.C), f32),
    *decayed_results(p, p.state_dtype, p.state_dtype, f32),
  ]
  kinds = "q", "q", "head", p.gate, "document", "edges"
  squares, *decayed = launch_plan(
    _solve_kernel, p, AXES["solve"], "delta_solve", kinds, (k, q, beta, g, document, edges), results
  )
  return DeltaSystem(squares, *(decayed or (k, q, k)))


# --- scan: through the chunks ---------------------------------------------------------------------


def _summaries_kernel(
  inputs, outputs, *, interpreted: bool, p: MatrixPlan, values_end: int, matrix: int
):
  """Final state of a time split started from zero; columns `matrix:` hold the split's transition
  matrix [K K].

  Those columns start from the identity and get no values.
  """
  reader_ref, writer_ref, v_ref, beta_ref, g_ref, document_ref, edges_ref, squares_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  parts, column = parts_of(p), place.j * p.v_tile + jnp.arange(p.v_tile, dtype=jnp.int32)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    document = document_of(p, document_ref, edges_ref, n, at)
    (from_start,) = decays(p, g_ref, at, tokens, tiles.from_start_per_head)
    y = load(v_ref.at[at, :], tile_mask(tokens, column < values_end)).astype(f32)
    beta = load(beta_ref.at[at], tokens).astype(f32)[:, None]
    W = _written(
      p,
      product,
      fine,
      reader_ref,
      at,
      tokens,
      document,
      parts,
      y,
      beta,
      tiles.below(load(squares_ref.at[n], None)),
      S,
      from_start,
    )
    return _advanced(p, fine, writer_ref, g_ref, at, tokens, document, parts, W, S)

  first = identity_from(p, matrix, column)
  store_state(outputs[0], lax.fori_loop(0, p.span, chunk, first), parts, p.values(place.j))


def _summaries(
  p: MatrixPlan, system: DeltaSystem, v, beta, g, document, edges
) -> tuple[Array, Array]:
  """Returns the state after each split from zeros, [B P HV K V], and its matrix, [B P HV K K]."""
  p = p.cut(TILES, "summaries")
  kinds = p.reader, p.reader, "v", "head", p.gate, "document", "edges", "scores"
  inputs = system.k_reader, system.k_writer, v, beta, g, document, edges, system.squares
  return time_splits.summaries(
    _summaries_kernel, p, AXES["summaries"], "delta_summaries", kinds, inputs
  )


def _written(
  p: MatrixPlan, product, fine, reader_ref, at, tokens, document, parts, y, beta, G, S, from_start
) -> Float[Array, "C V"]:
  """Returns W = beta (Y - G (beta Y)), with Y = y - (from_start k) S."""
  Y = y - tiles.mask_from_start(
    document, from_start * read_state(product, load_parts(reader_ref, at, tokens, parts), S)
  )
  return beta * (Y - fine(G, beta * Y))


def _advanced(
  p: MatrixPlan, fine, writer_ref, g_ref, at, tokens, document, parts, W, S
) -> list[Array]:
  """Returns total S + (to_end k)^T W."""
  (to_end,) = decays(p, g_ref, at, tokens, tiles.to_end_per_head)
  W = tiles.mask_to_end(document, to_end * W)

  def update(x, part):
    k = load(writer_ref.at[at, part[0]], tile_mask(tokens, part[1]))
    total = total_decay(p, g_ref, at, tokens, part)
    return tiles.mask_total(document, total * x) + fine.outer(k, W)

  return [update(x, part) for x, part in zip(S, parts, strict=True)]


def _scan_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """o = scale (P W + (from_start q) S), then S = total S + (to_end k)^T W, chunk by chunk. Stores S
  before each.

  Without q it gives W instead of o.
  """
  (
    k_ref,
    q_ref,
    writer_ref,
    v_ref,
    beta_ref,
    g_ref,
    document_ref,
    edges_ref,
    squares_ref,
    state_ref,
  ) = inputs
  out_ref, last_ref, *chunk_states_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["scan"])[0](pl.program_id(0))
  parts, values = parts_of(p), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    if chunk_states_ref:
      store_state(chunk_states_ref[0], S, parts, values, n)
    document, out = document_of(p, document_ref, edges_ref, n, at), None
    (from_start,) = decays(p, g_ref, at, tokens, tiles.from_start_per_head)
    if q_ref is not None:
      out = tiles.mask_from_start(
        document, from_start * read_state(product, load_parts(q_ref, at, tokens, parts), S)
      )
    y = load(v_ref.at[at, :], tile_mask(tokens, values)).astype(f32)
    beta = load(beta_ref.at[at], tokens).astype(f32)[:, None]
    G = tiles.below(load(squares_ref.at[n], None))
    W = _written(p, product, fine, k_ref, at, tokens, document, parts, y, beta, G, S, from_start)
    if out is not None:
      out = p.scale * (out + fine.outer(tiles.above(load(squares_ref.at[n], None)), W))
    store(out_ref.at[at, :], W if out is None else out, tile_mask(tokens, values))
    return _advanced(p, fine, writer_ref, g_ref, at, tokens, document, parts, W, S)

  store_state(
    last_ref, lax.fori_loop(0, p.span, chunk, load_state(state_ref, parts, values)), parts, values
  )


def outputs_fit(p: MatrixPlan) -> bool:
  """Returns whether a program of `scan` has registers for outputs; else `read` makes them from the
  stored states.
  """
  return p.K <= NARROW or (p.dtype == jnp.bfloat16 and (p.K <= WIDE or p.gate == "channel"))


def scan_chunks(
  p: MatrixPlan, system: DeltaSystem, v, beta, g, document, edges, state, like, keep_states: bool
) -> tuple[Array, Array, Array | None, Array | None]:
  """Returns o, the last state, the states before the chunks if they are stored, and the splits'
  transitions if there are any.
  """
  states, transitions = state[:, None], None
  if p.P > 1:
    updates, transitions = _summaries(p, system, v, beta, g, document, edges)
    states = time_splits.by_matrices(transitions, updates, state, reverse=False)
  uncut, p = p, p.cut(TILES, "scan_wide" if p.K > WIDE else "scan")
  results = [
    ("v", like.shape, like.dtype if outputs_fit(p) else f32),
    ("split state", states.shape, f32),
  ]
  results += (
    [("chunk_states", (p.B, p.HV, p.N, p.K, p.V), p.state_dtype)]
    if keep_states or not outputs_fit(p)
    else []
  )
  kinds = *(p.reader,) * 3, "v", "head", p.gate, "document", "edges", "scores", "split state"
  q = system.q_reader if outputs_fit(p) else None
  inputs = system.k_reader, q, system.k_writer, v, beta, g, document, edges, system.squares, states
  name = ("delta_outputs" if outputs_fit(p) else "delta_states") + split_suffix(p)
  out, after, *chunk_states = launch_plan(
    _scan_kernel, p, AXES["scan"], name, kinds, inputs, results
  )
  if not outputs_fit(p):
    out = _read(uncut, system, out, g, document, edges, chunk_states[0], like)
  return out, after[:, -1], chunk_states[0] if chunk_states else None, transitions


# --- read: the outputs of all chunks at once ------------------------------------------------------


def _read_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """o = scale (P W + (from_start q) S)."""
  q_ref, written_ref, g_ref, document_ref, edges_ref, squares_ref, chunk_states_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  document, mask = (
    document_of(p, document_ref, edges_ref, place.n, slice(None)),
    tile_mask(tokens, values),
  )

  def tile(i, read):
    at, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    return read + product(
      load(q_ref.at[:, at], tile_mask(tokens, keys)),
      load(chunk_states_ref.at[at, :], tile_mask(keys, values)),
    )

  (from_start,) = decays(p, g_ref, slice(None), tokens, tiles.from_start_per_head)
  out = tiles.mask_from_start(
    document, from_start * loop_tiles(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
  )
  store(
    outputs[0],
    p.scale * (out + fine.outer(tiles.above(load(squares_ref, None)), load(written_ref, mask))),
    mask,
  )


def _read(
  p: MatrixPlan, system: DeltaSystem, written, g, document, edges, chunk_states, like
) -> Array:
  p = p.cut(TILES, "read")
  kinds = p.reader, "v", "head", "document", "edges", "scores", "chunk_states"
  inputs = (
    system.q_reader,
    written,
    g if p.gate == "head" else None,
    document,
    edges,
    system.squares,
    chunk_states,
  )
  (out,) = launch_plan(
    _read_kernel, p, AXES["read"], "delta_reads", kinds, inputs, [("v", like.shape, like.dtype)]
  )
  return out
