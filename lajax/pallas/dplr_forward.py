"""Forward kernels of diagonal plus low rank: each chunk's triangular system, the states, and the outputs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas import segments, tiles
from lajax.pallas.plan import (
  Axes,
  Plan,
  Tiles,
  chunk_of,
  decayed_results,
  in_segments,
  over,
  places,
  runs_of,
  start,
)
from lajax.pallas.state_tiles import (
  decays,
  give_state,
  identity_from,
  keep_state,
  parts_of,
  read_state,
  take_parts,
  take_state,
  total_decay,
)
from lajax.pallas.tiles import Products, both, give, iota, take

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
  ("attend", False, False): Tiles(64, 16, 4, 2),
  ("attend_wide", False, False): Tiles(64, 16, 4, 2),
  ("attend", True, False): Tiles(64, 32, 8, 1),
  ("attend_wide", True, False): Tiles(128, 16, 8, 1),
  ("attend", False, True): Tiles(64, 16, 4, 2),
  ("attend", True, True): Tiles(64, 16, 4, 2),
  ("read", False, True): Tiles(64, 32, 8, 1),
  ("read", True, True): Tiles(64, 32, 8, 1),
}
NARROW = 64  # the K up to which a program has registers for outputs in float32's products
WIDE = 128  # the K beyond which a program holds fewer columns of the state, and none holds them in float32's products
AXES = {
  "solve": Axes(True, False, False),
  "summaries": Axes(False, False, True),
  "attend": Axes(False, False, True),
  "read": Axes(True, False, True),
}


# --- scores ----------------------------------------------------------------------------------------------------------


class Reader(NamedTuple):
  """What reads keys that earlier tokens wrote: after its token's decay, its own token's too, or before it (`early`)."""

  ref: Any
  early: bool


def scores(
  p: Plan, fine: Products, tokens, readers: Sequence[Reader], key_refs, g_ref, decayed_refs
) -> list[Float[Array, "C C"]]:
  """Of each reader with each of the keys, decayed between the two tokens; not to be read above the diagonal.

  With one decay a channel, gives the readers decayed from the chunk's start, then the keys decayed to its end, to as many
  `decayed_refs` as there are.
  """
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, sums):
    at, mask = pl.ds(i * p.k_tile, p.k_tile), both(tokens, p.keys(i))
    load = lambda ref: take(ref.at[:, at], mask)
    x, y = [load(reader.ref) for reader in readers], [load(ref) for ref in key_refs]
    if p.gate != "channel":
      return [sum + fine.inner(a, b) for sum, (a, b) in zip(sums, _pairs(x, y), strict=True)]
    x, y = [a.astype(f32) for a in x], [b.astype(f32) for b in y]
    for n, (a, b) in enumerate(_pairs(x, y)):
      if not readers[n // len(y)].early:
        sums[n] += jnp.where(row == column, jnp.sum(a * b, axis=1)[:, None], 0.0)
    for h, upto, before, after in tiles.halves_before(load(g_ref).astype(f32)):
      reads = [a * (before if reader.early else upto) for a, reader in zip(x, readers, strict=True)]
      writes = [b * after for b in y]
      if h < p.C:
        corners, keep = (
          [fine.inner(a, b) for a, b in _pairs(reads, writes)],
          tiles.pairs_of_halves(p.C, h),
        )
        sums = [
          sum + jnp.where(keep, corner, 0.0) for sum, corner in zip(sums, corners, strict=True)
        ]
      else:
        for ref, decayed in zip(decayed_refs, [*reads, *writes], strict=False):
          give(ref.at[:, at], decayed, mask)
    return sums

  found = over(p.NK, tile, [jnp.zeros((p.C, p.C), f32) for _ in readers for _ in key_refs])
  if p.gate != "head":
    return found
  g = take(g_ref, tokens).astype(f32)
  between = [
    tiles.between_before_per_head(g) if reader.early else tiles.between_per_head(g)
    for reader in readers
  ]
  return [x * between[n // len(key_refs)] for n, x in enumerate(found)]


def _pairs(x: Sequence, y: Sequence) -> list[tuple]:
  return [(a, b) for a in x for b in y]


# --- solve: each chunk's triangular system ---------------------------------------------------------------------------


def _solve_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """G and N_ak of a chunk, with P_b and P_k; and with one decay a channel a, b, k and q decayed."""
  a_ref, q_ref, b_ref, k_ref, g_ref, runs_ref, edges_ref = inputs
  squares_ref, *decayed_refs = outputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  triangle = lambda keep, found: [tiles.pairs(runs, keep, x) for x in found]
  keys = [b_ref, k_ref]
  N = triangle(
    row > column, scores(p, fine, tokens, [Reader(a_ref, True)], keys, g_ref, decayed_refs[:3])
  )
  N[0] = tiles.solve(-N[0], jnp.ones(p.C, f32), fine)
  P = triangle(
    row >= column, scores(p, fine, tokens, [Reader(q_ref, False)], keys, g_ref, decayed_refs[3:])
  )
  for n in range(2):
    give(squares_ref.at[jnp.int32(n)], jnp.where(row > column, N[n], P[n].T), None)


class Solved(NamedTuple):
  """What does not depend on a state."""

  squares: Array  # of each chunk, G and N_ak below the diagonals, and the transposes of P_b and P_k on and above them
  a_reader: Array
  b_writer: Array
  k_writer: Array
  q_reader: Array


def solve(p: Plan, q, a, b, k, g, runs, edges) -> Solved:
  p = p.cut(TILES, "solve")
  results = [
    ("two pairs", (p.B, p.HV, p.N, 2, p.C, p.C), f32),
    *decayed_results(p, p.kept, f32, f32, p.kept),
  ]
  kinds = *("q",) * 4, p.gate, "runs", "edges"
  squares, *decayed = start(
    _solve_kernel, p, AXES["solve"], "dplr_solve", kinds, (a, q, b, k, g, runs, edges), results
  )
  return Solved(squares, *(decayed or (a, b, k, q)))


def take_squares(ref, *at) -> list[Float[Array, "C C"]]:
  """G with P_b^T, and N_ak with P_k^T, of a chunk."""
  return [take(ref.at[(*at, jnp.int32(n))], None) for n in range(2)]


# --- attend: through the chunks --------------------------------------------------------------------------------------


def _summaries_kernel(inputs, outputs, *, interpreted: bool, p: Plan, values_end: int, matrix: int):
  """What a segment of time leaves, of zeros, and, in the columns from `matrix` on, of the identity where no values come.

  The second is the matrix [K K] by which it takes a state on.
  """
  a_ref, b_ref, k_ref, v_ref, g_ref, runs_ref, edges_ref, squares_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  parts, column = parts_of(p), place.j * p.v_tile + jnp.arange(p.v_tile)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    before, tail = decays(p, g_ref, at, tokens, tiles.before_per_head, tiles.tail_per_head)
    v = take(v_ref.at[at, :], both(tokens, column < values_end))
    W = _read_by_a(
      product, fine, a_ref, at, tokens, runs, parts, v, take_squares(squares_ref, n), S, before
    )
    return _advanced(p, fine, (b_ref, k_ref), g_ref, at, tokens, runs, parts, (W, v), S, tail)

  first = identity_from(p, matrix, column)
  give_state(outputs[0], lax.fori_loop(0, p.span, chunk, first), parts, p.values(place.j))


def _summaries(p: Plan, solved: Solved, v, g, runs, edges) -> tuple[Array, Array]:
  """What each segment leaves of zeros, [B P HV K V], and its matrix, [B P HV K K]."""
  p = p.cut(TILES, "summaries")
  kinds = *(p.reader,) * 3, "v", p.gate, "runs", "edges", "two pairs"
  inputs = solved.a_reader, solved.b_writer, solved.k_writer, v, g, runs, edges, solved.squares
  return segments.summaries(
    _summaries_kernel, p, AXES["summaries"], "dplr_summaries", kinds, inputs
  )


def _read_by_a(
  product, fine, a_ref, at, tokens, runs, parts, v, squares, S, before
) -> Float[Array, "C V"]:
  """W = X - G X, X = (before a) S + N_ak v."""
  X = tiles.from_start(runs, before * read_state(product, take_parts(a_ref, at, tokens, parts), S))
  X += fine(tiles.below(squares[1]), v)
  return X - fine(tiles.below(squares[0]), X)


def _advanced(
  p: Plan, fine, writer_refs, g_ref, at, tokens, runs, parts, written, S, tail
) -> list[Array]:
  """total S + (tail b)^T W + (tail k)^T v."""
  W, v = (tiles.to_end(runs, x if p.gate == "none" else tail * x.astype(f32)) for x in written)

  def update(x, part):
    b, k = (take(ref.at[at, part[0]], both(tokens, part[1])) for ref in writer_refs)
    x = tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part)) * x
    return x + fine.outer(b, W) + fine.outer(k, v)

  return [update(x, part) for x, part in zip(S, parts, strict=True)]


def _attend_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """o = scale ((head q) S + P_b W + P_k v), S = total S + (tail b)^T W + (tail k)^T v, from chunk to chunk.

  Keeps S before each where there is where to. Without q it gives W in the place of o.
  """
  a_ref, q_ref, b_ref, k_ref, v_ref, g_ref, runs_ref, edges_ref, squares_ref, state_ref = inputs
  out_ref, last_ref, *kept_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["attend"])[0](pl.program_id(0))
  parts, values = parts_of(p), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    mask = both(tokens, values)
    if kept_ref:
      keep_state(p, kept_ref[0], S, parts, values, n)
    runs, out = runs_of(p, runs_ref, edges_ref, n, at), None
    head, before, tail = decays(
      p, g_ref, at, tokens, tiles.head_per_head, tiles.before_per_head, tiles.tail_per_head
    )
    if q_ref is not None:
      out = tiles.from_start(
        runs, head * read_state(product, take_parts(q_ref, at, tokens, parts), S)
      )
    v = take(v_ref.at[at, :], mask)
    W = _read_by_a(
      product, fine, a_ref, at, tokens, runs, parts, v, take_squares(squares_ref, n), S, before
    )
    if out is not None:
      out = _out(p, fine, out, take_squares(squares_ref, n), W, v)
    give(out_ref.at[at, :], W if out is None else out, mask)
    return _advanced(p, fine, (b_ref, k_ref), g_ref, at, tokens, runs, parts, (W, v), S, tail)

  give_state(
    last_ref, lax.fori_loop(0, p.span, chunk, take_state(state_ref, parts, values)), parts, values
  )


def _out(p: Plan, fine, old, squares, W, v) -> Float[Array, "C V"]:
  """scale (old + P_b W + P_k v)."""
  P_b, P_k = (tiles.above(x) for x in squares)
  return p.scale * (old + fine.outer(P_b, W) + fine.outer(P_k, v))


def fits(p: Plan) -> bool:
  """Whether a program of `attend` has the registers to make outputs too; else `read` makes them from the kept states."""
  return p.K <= NARROW or p.dtype == jnp.bfloat16


def attend(
  p: Plan, solved: Solved, v, g, runs, edges, state, dtype, keep: bool
) -> tuple[Array, Array, Array | None, Array | None]:
  """o, the state at the end, if wanted the states at the chunks' starts, and the segments' matrices."""
  states, matrices = state[:, None], None
  if p.P > 1:
    ends, matrices = _summaries(p, solved, v, g, runs, edges)
    states = segments.by_matrices(matrices, ends, state, reverse=False)
  whole, p = p, p.cut(TILES, "attend_wide" if p.K > WIDE else "attend")
  results = [("v", v.shape, dtype if fits(p) else f32), ("segment", states.shape, f32)]
  results += (
    [("kept", (p.B, p.HV, p.N // p.every, p.K, p.V), p.kept)] if keep or not fits(p) else []
  )
  kinds = *(p.reader,) * 4, "v", p.gate, "runs", "edges", "two pairs", "segment"
  readers = solved.a_reader, solved.q_reader if fits(p) else None
  inputs = *readers, solved.b_writer, solved.k_writer, v, g, runs, edges, solved.squares, states
  name = ("dplr_outputs" if fits(p) else "dplr_states") + in_segments(p)
  out, after, *kept = start(_attend_kernel, p, AXES["attend"], name, kinds, inputs, results)
  if not fits(p):
    out = _read(whole, solved, out, v, g, runs, edges, kept[0], dtype)
  return out, after[:, -1], kept[0] if kept else None, matrices


# --- read: the outputs of all chunks at once -------------------------------------------------------------------------


def _read_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """o = scale ((head q) S + P_b W + P_k v)."""
  q_ref, read_ref, v_ref, g_ref, runs_ref, edges_ref, squares_ref, kept_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  runs, mask = runs_of(p, runs_ref, edges_ref, place.n, slice(None)), both(tokens, values)

  def tile(i, sum):
    rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    return sum + product(
      take(q_ref.at[:, rows], both(tokens, keys)), take(kept_ref.at[rows, :], both(keys, values))
    )

  (head,) = decays(p, g_ref, slice(None), tokens, tiles.head_per_head)
  old = tiles.from_start(runs, head * over(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32)))
  give(
    outputs[0],
    _out(p, fine, old, take_squares(squares_ref), take(read_ref, mask), take(v_ref, mask)),
    mask,
  )


def _read(p: Plan, solved: Solved, found, v, g, runs, edges, kept, dtype) -> Array:
  p = p.cut(TILES, "read")
  kinds = p.reader, "v", "v", "head", "runs", "edges", "two pairs", "kept"
  inputs = (
    solved.q_reader,
    found,
    v,
    g if p.gate == "head" else None,
    runs,
    edges,
    solved.squares,
    kept,
  )
  (out,) = start(
    _read_kernel, p, AXES["read"], "dplr_reads", kinds, inputs, [("v", v.shape, dtype)]
  )
  return out
