"""Forward kernels of the delta rule: the triangular system of each chunk, and the states from chunk to chunk."""

from typing import NamedTuple

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
  parts_of,
  read_state,
  take_parts,
  take_state,
  total_decay,
)
from lajax.pallas.tiles import Products, both, give, iota, take

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
  ("attend", False, False): Tiles(64, 32, 8, 2),
  ("attend_wide", False, False): Tiles(128, 16, 8, 1),
  ("attend", True, False): Tiles(64, 32, 4, 2),
  ("attend_wide", True, False): Tiles(64, 16, 8, 2),
  ("attend", False, True): Tiles(32, 16, 8, 2),
  ("attend", True, True): Tiles(32, 16, 4, 1),
  ("read", False, False): Tiles(64, 32, 4, 2),
  ("read", False, True): Tiles(32, 64, 4, 1),
  ("read", True, True): Tiles(32, 64, 4, 1),
}
NARROW = 64  # the K up to which a program has registers for outputs in float32's products
WIDE = 128  # the K beyond which a program holds fewer columns of the state, and none holds them in float32's products
AXES = {
  "solve": Axes(True, False, False),
  "summaries": Axes(False, False, True),
  "attend": Axes(False, False, True),
  "read": Axes(True, False, True),
}


# --- solve: each chunk's triangular system ---------------------------------------------------------------------------


def scores(
  p: Plan, fine: Products, tokens, readers, k_ref, g_ref, decayed
) -> list[Float[Array, "C C"]]:
  """Of each reader and k, decayed between the two tokens, on and below the diagonal.

  With one decay a channel, gives the readers decayed from the chunk's start and k decayed to its end to `decayed`.
  """
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, sums):
    at, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    load = lambda ref: take(ref.at[:, at], both(tokens, keys))
    k, x = load(k_ref), [load(ref) for ref in readers]
    if p.gate != "channel":
      return [sum + fine.inner(y, k) for sum, y in zip(sums, x, strict=True)]
    g, k, x = load(g_ref).astype(f32), k.astype(f32), [y.astype(f32) for y in x]
    own = [jnp.sum(y * k, axis=1)[:, None] for y in x]
    sums = [sum + jnp.where(row == column, y, 0.0) for sum, y in zip(sums, own, strict=True)]
    for h, upto, after in tiles.halves(g):
      if h == p.C:
        for ref, y in zip(decayed, [*(y * upto for y in x), k * after], strict=True):
          give(ref.at[:, at], y, both(tokens, keys))
      else:
        corners, keep = [fine.inner(y * upto, k * after) for y in x], tiles.pairs_of_halves(p.C, h)
        sums = [sum + jnp.where(keep, y, 0.0) for sum, y in zip(sums, corners, strict=True)]
    return sums

  found = over(p.NK, tile, [jnp.zeros((p.C, p.C), f32)] * len(readers))
  if p.gate == "head":
    between = tiles.between_per_head(take(g_ref, tokens).astype(f32))
    found = [x * between for x in found]
  return found


def _solve_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """G and P of a chunk; with one decay a channel also k and q decayed from the chunk's start, and k to its end."""
  k_ref, q_ref, beta_ref, g_ref, runs_ref, edges_ref = inputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)
  M, P = scores(p, fine, tokens, [k_ref, q_ref], k_ref, g_ref, outputs[1:])
  P = tiles.pairs(runs, row >= column, P)
  M = tiles.pairs(runs, row > column, M)
  G = tiles.solve(M, take(beta_ref, tokens).astype(f32), fine)
  give(outputs[0], jnp.where(row > column, G, P.T), None)


class Solved(NamedTuple):
  """What does not depend on a state."""

  squares: Array  # of each chunk, G below the diagonal, and the transpose of P on and above it
  k_reader: Array
  q_reader: Array
  k_writer: Array


def solve(p: Plan, q, k, beta, g, runs, edges) -> Solved:
  p = p.cut(TILES, "solve")
  results = [("pairs", (p.B, p.HV, p.N, p.C, p.C), f32), *decayed_results(p, p.kept, p.kept, f32)]
  kinds = "q", "q", "head", p.gate, "runs", "edges"
  squares, *decayed = start(
    _solve_kernel, p, AXES["solve"], "delta_solve", kinds, (k, q, beta, g, runs, edges), results
  )
  return Solved(squares, *(decayed or (k, q, k)))


# --- attend: through the chunks --------------------------------------------------------------------------------------


def _summaries_kernel(inputs, outputs, *, interpreted: bool, p: Plan, values_end: int, matrix: int):
  """What a segment of time leaves, of zeros, and, in the columns from `matrix` on, of the identity where no values come.

  The second is the matrix [K K] by which it takes a state on.
  """
  reader_ref, writer_ref, v_ref, beta_ref, g_ref, runs_ref, edges_ref, squares_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  parts, column = parts_of(p), place.j * p.v_tile + jnp.arange(p.v_tile)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    (head,) = decays(p, g_ref, at, tokens, tiles.head_per_head)
    y = take(v_ref.at[at, :], both(tokens, column < values_end)).astype(f32)
    beta = take(beta_ref.at[at], tokens).astype(f32)[:, None]
    W = _written(
      p,
      product,
      fine,
      reader_ref,
      at,
      tokens,
      runs,
      parts,
      y,
      beta,
      tiles.below(take(squares_ref.at[n], None)),
      S,
      head,
    )
    return _advanced(p, fine, writer_ref, g_ref, at, tokens, runs, parts, W, S)

  first = identity_from(p, matrix, column)
  give_state(outputs[0], lax.fori_loop(0, p.span, chunk, first), parts, p.values(place.j))


def _summaries(p: Plan, solved: Solved, v, beta, g, runs, edges) -> tuple[Array, Array]:
  """What each segment leaves of zeros, [B P HV K V], and its matrix, [B P HV K K]."""
  p = p.cut(TILES, "summaries")
  kinds = p.reader, p.reader, "v", "head", p.gate, "runs", "edges", "pairs"
  inputs = solved.k_reader, solved.k_writer, v, beta, g, runs, edges, solved.squares
  return segments.summaries(
    _summaries_kernel, p, AXES["summaries"], "delta_summaries", kinds, inputs
  )


def _written(
  p: Plan, product, fine, reader_ref, at, tokens, runs, parts, y, beta, G, S, head
) -> Float[Array, "C V"]:
  """W = beta (Y - G (beta Y)), Y = y - (head k) S."""
  Y = y - tiles.from_start(
    runs, head * read_state(product, take_parts(reader_ref, at, tokens, parts), S)
  )
  return beta * (Y - fine(G, beta * Y))


def _advanced(p: Plan, fine, writer_ref, g_ref, at, tokens, runs, parts, W, S) -> list[Array]:
  """total S + (tail k)^T W."""
  (tail,) = decays(p, g_ref, at, tokens, tiles.tail_per_head)
  W = tiles.to_end(runs, tail * W)

  def update(x, part):
    k = take(writer_ref.at[at, part[0]], both(tokens, part[1]))
    return tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part)) * x + fine.outer(k, W)

  return [update(x, part) for x, part in zip(S, parts, strict=True)]


def _attend_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """o = scale (P W + (head q) S), S = total S + (tail k)^T W, from chunk to chunk, keeping S before each.

  Without q it gives W in the place of o.
  """
  k_ref, q_ref, writer_ref, v_ref, beta_ref, g_ref, runs_ref, edges_ref, squares_ref, state_ref = (
    inputs
  )
  out_ref, last_ref, *kept_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["attend"])[0](pl.program_id(0))
  parts, values = parts_of(p), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    if kept_ref:
      give_state(kept_ref[0], S, parts, values, n)
    runs, out = runs_of(p, runs_ref, edges_ref, n, at), None
    (head,) = decays(p, g_ref, at, tokens, tiles.head_per_head)
    if q_ref is not None:
      out = tiles.from_start(
        runs, head * read_state(product, take_parts(q_ref, at, tokens, parts), S)
      )
    y = take(v_ref.at[at, :], both(tokens, values)).astype(f32)
    beta = take(beta_ref.at[at], tokens).astype(f32)[:, None]
    G = tiles.below(take(squares_ref.at[n], None))
    W = _written(p, product, fine, k_ref, at, tokens, runs, parts, y, beta, G, S, head)
    if out is not None:
      out = p.scale * (out + fine.outer(tiles.above(take(squares_ref.at[n], None)), W))
    give(out_ref.at[at, :], W if out is None else out, both(tokens, values))
    return _advanced(p, fine, writer_ref, g_ref, at, tokens, runs, parts, W, S)

  give_state(
    last_ref, lax.fori_loop(0, p.span, chunk, take_state(state_ref, parts, values)), parts, values
  )


def fits(p: Plan) -> bool:
  """Whether a program of `attend` has the registers to make outputs too; else `read` makes them from the kept states."""
  return p.K <= NARROW or (p.dtype == jnp.bfloat16 and (p.K <= WIDE or p.gate == "channel"))


def attend(
  p: Plan, solved: Solved, v, beta, g, runs, edges, state, like, keep: bool
) -> tuple[Array, Array, Array | None, Array | None]:
  """o, the state at the end, if wanted the states at the chunks' starts, and the segments' matrices."""
  states, matrices = state[:, None], None
  if p.P > 1:
    ends, matrices = _summaries(p, solved, v, beta, g, runs, edges)
    states = segments.by_matrices(matrices, ends, state, reverse=False)
  whole, p = p, p.cut(TILES, "attend_wide" if p.K > WIDE else "attend")
  results = [("v", like.shape, like.dtype if fits(p) else f32), ("segment", states.shape, f32)]
  results += [("kept", (p.B, p.HV, p.N, p.K, p.V), p.kept)] if keep or not fits(p) else []
  kinds = *(p.reader,) * 3, "v", "head", p.gate, "runs", "edges", "pairs", "segment"
  q = solved.q_reader if fits(p) else None
  inputs = solved.k_reader, q, solved.k_writer, v, beta, g, runs, edges, solved.squares, states
  name = ("delta_outputs" if fits(p) else "delta_states") + in_segments(p)
  out, after, *kept = start(_attend_kernel, p, AXES["attend"], name, kinds, inputs, results)
  if not fits(p):
    out = _read(whole, solved, out, g, runs, edges, kept[0], like)
  return out, after[:, -1], kept[0] if kept else None, matrices


# --- read: the outputs of all chunks at once -------------------------------------------------------------------------


def _read_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """o = scale (P W + (head q) S)."""
  q_ref, written_ref, g_ref, runs_ref, edges_ref, squares_ref, kept_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  runs, mask = runs_of(p, runs_ref, edges_ref, place.n, slice(None)), both(tokens, values)

  def tile(i, read):
    at, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    return read + product(
      take(q_ref.at[:, at], both(tokens, keys)), take(kept_ref.at[at, :], both(keys, values))
    )

  (head,) = decays(p, g_ref, slice(None), tokens, tiles.head_per_head)
  out = tiles.from_start(runs, head * over(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32)))
  give(
    outputs[0],
    p.scale * (out + fine.outer(tiles.above(take(squares_ref, None)), take(written_ref, mask))),
    mask,
  )


def _read(p: Plan, solved: Solved, written, g, runs, edges, kept, like) -> Array:
  p = p.cut(TILES, "read")
  kinds = p.reader, "v", "head", "runs", "edges", "pairs", "kept"
  inputs = (
    solved.q_reader,
    written,
    g if p.gate == "head" else None,
    runs,
    edges,
    solved.squares,
    kept,
  )
  (out,) = start(
    _read_kernel, p, AXES["read"], "delta_reads", kinds, inputs, [("v", like.shape, like.dtype)]
  )
  return out
