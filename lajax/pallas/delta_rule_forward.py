"""Forward kernels of the delta rule: the triangular system of each chunk, and the states from chunk to chunk."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas import tiles
from lajax.pallas.launch import launch
from lajax.pallas.plan import Axes, Plan, Tiles, over, places, runs_of, specs
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
  ("solve", False, False): Tiles(64, 16, 4, 2),
  ("solve", True, False): Tiles(32, 16, 4, 1),
  ("solve", False, True): Tiles(32, 16, 4, 1),
  ("solve", True, True): Tiles(32, 16, 4, 1),
  ("carry", False, False): Tiles(64, 32, 4, 2),
  ("carry_wide", False, False): Tiles(64, 16, 4, 2),
  ("carry", True, False): Tiles(64, 32, 4, 2),
  ("carry_wide", True, False): Tiles(64, 16, 4, 1),
  ("carry", False, True): Tiles(32, 16, 8, 1),
  ("carry", True, True): Tiles(32, 16, 4, 1),
}
WIDE = 128  # the K beyond which a program holds fewer columns of the state, and none holds them in float32's products
AXES = {
  "solve": Axes(True, False, False),
  "carry": Axes(False, False, True),
}


# --- solve: each chunk's triangular system ---------------------------------------------------------------------------


def scores(p: Plan, fine: Products, tokens, readers, k_ref, g_ref, decayed) -> list[Float[Array, "C C"]]:
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
  """G of a chunk, and with one decay a channel k decayed from its start and to its end."""
  k_ref, beta_ref, g_ref, runs_ref, edges_ref = inputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  (M,) = scores(p, fine, tokens, [k_ref], k_ref, g_ref, outputs[1:])
  M = tiles.pairs(runs, iota(M.shape, 0) > iota(M.shape, 1), M)
  give(outputs[0], tiles.solve(M, take(beta_ref, tokens).astype(f32), fine), None)


def solve(p: Plan, k, beta, g, runs, edges) -> tuple[Array, Array, Array]:
  """G, and k as it reads from a state and as it writes to one."""
  p = p.cut(TILES, "solve")
  blocks = specs(p, AXES["solve"])
  results = [("pairs", (p.B, p.HV, p.N, p.C, p.C), f32)]
  results += [("dq", (p.B, p.T, p.HV, p.K), dtype) for dtype in (p.kept, f32)] if p.gate == "channel" else []
  solved, *decayed = launch(
    functools.partial(_solve_kernel, p=p), (k, beta, g, runs, edges), name="delta_solve",
    programs=places(p, AXES["solve"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "head", p.gate, "runs", "edges")],
    out_specs=[blocks[name] for name, _, _ in results],
    out_shapes=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
  )  # fmt: skip
  reader, writer = decayed or (k, k)
  return solved, reader, writer


# --- carry: states from chunk to chunk -------------------------------------------------------------------------------


def _carry_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """S = total S + (tail k)^T W, keeping W, and S before each chunk."""
  reader_ref, writer_ref, v_ref, beta_ref, g_ref, runs_ref, edges_ref, solved_ref, state_ref = inputs
  kept_ref, written_ref, last_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  parts = parts_of(p)
  values = p.values(places(p, AXES["carry"])[0](pl.program_id(0)).j)

  def chunk(n, S):
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    give_state(kept_ref, S, parts, values, n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    head, tail = decays(p, g_ref, at, tokens, tiles.head_per_head, tiles.tail_per_head)
    beta = take(beta_ref.at[at], tokens).astype(f32)[:, None]
    Y = take(v_ref.at[at, :], both(tokens, values)).astype(f32)
    Y -= tiles.from_start(runs, head * read_state(product, take_parts(reader_ref, at, tokens, parts), S))
    W = beta * (Y - fine(take(solved_ref.at[n], None), beta * Y))
    give(written_ref.at[at, :], W, both(tokens, values))
    W = tiles.to_end(runs, tail * W)

    def update(x, part):
      k = take(writer_ref.at[at, part[0]], both(tokens, part[1]))
      return tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part)) * x + fine.outer(k, W)

    return [update(x, part) for x, part in zip(S, parts, strict=True)]

  give_state(last_ref, lax.fori_loop(0, p.N, chunk, take_state(state_ref, parts, values)), parts, values)


def carry(p: Plan, reader, writer, v, beta, g, runs, edges, solved, state) -> Sequence[Array]:
  p = p.cut(TILES, "carry_wide" if p.K > WIDE else "carry")
  blocks = specs(p, AXES["carry"])
  kept, key = jax.ShapeDtypeStruct((p.B, p.HV, p.N, p.K, p.V), p.kept), "dq" if p.gate == "channel" else "q"
  return launch(
    functools.partial(_carry_kernel, p=p), (reader, writer, v, beta, g, runs, edges, solved, state),
    name="delta_states", programs=places(p, AXES["carry"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in (key, key, "v", "head", p.gate, "runs", "edges", "pairs", "state")],
    out_specs=[blocks[name] for name in ("kept", "v", "state")],
    out_shapes=[kept, jax.ShapeDtypeStruct(v.shape, f32), jax.ShapeDtypeStruct(state.shape, f32)],
  )  # fmt: skip
