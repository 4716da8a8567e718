"""Forward kernels of diagonal plus low rank: each chunk's triangular system, the states, and the outputs."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas import tiles
from lajax.pallas.launch import launch
from lajax.pallas.plan import Axes, Plan, Tiles, over, places, runs_of, specs
from lajax.pallas.state_tiles import decays, give_state, parts_of, read_state, take_parts, take_state, total_decay
from lajax.pallas.tiles import Products, both, give, iota, take

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("solve", False, False): Tiles(64, 32, 8, 1),
  ("solve", True, False): Tiles(32, 32, 4, 1),
  ("solve", False, True): Tiles(32, 16, 4, 1),
  ("solve", True, True): Tiles(32, 32, 8, 1),
  ("carry", False, False): Tiles(64, 16, 4, 2),
  ("carry_wide", False, False): Tiles(64, 16, 4, 1),
  ("carry", True, False): Tiles(64, 32, 4, 2),
  ("carry_wide", True, False): Tiles(64, 16, 8, 1),
  ("carry", False, True): Tiles(128, 16, 8, 1),
  ("carry", True, True): Tiles(32, 16, 8, 1),
  ("read", False, False): Tiles(64, 32, 8, 1),
  ("read", True, False): Tiles(32, 64, 8, 1),
  ("read", False, True): Tiles(32, 64, 8, 1),
  ("read", True, True): Tiles(32, 32, 4, 1),
}
WIDE = 128  # the K beyond which a program holds fewer columns of the state, and none holds them in float32's products
AXES = {
  "solve": Axes(True, False, False),
  "carry": Axes(False, False, True),
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
        corners, keep = [fine.inner(a, b) for a, b in _pairs(reads, writes)], tiles.pairs_of_halves(p.C, h)
        sums = [sum + jnp.where(keep, corner, 0.0) for sum, corner in zip(sums, corners, strict=True)]
      else:
        for ref, decayed in zip(decayed_refs, [*reads, *writes], strict=False):
          give(ref.at[:, at], decayed, mask)
    return sums

  found = over(p.NK, tile, [jnp.zeros((p.C, p.C), f32) for _ in readers for _ in key_refs])
  if p.gate != "head":
    return found
  g = take(g_ref, tokens).astype(f32)
  between = [tiles.between_before_per_head(g) if reader.early else tiles.between_per_head(g) for reader in readers]
  return [x * between[n // len(key_refs)] for n, x in enumerate(found)]


def _pairs(x: Sequence, y: Sequence) -> list[tuple]:
  return [(a, b) for a in x for b in y]


def decayed_results(p: Plan, *dtypes) -> list[tuple[str, tuple[int, ...], Any]]:
  """What `scores` gives with one decay a channel: kind of block, shape and dtype of each."""
  return [("dq", (p.B, p.T, p.HV, p.K), dtype) for dtype in dtypes] if p.gate == "channel" else []


# --- solve: each chunk's triangular system ---------------------------------------------------------------------------


def _solve_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """G and N_ak v of a chunk, and with one decay a channel a, b and k decayed."""
  a_ref, b_ref, k_ref, v_ref, g_ref, runs_ref, edges_ref = inputs
  solved_ref, fresh_ref, *decayed_refs = outputs
  fine = tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["solve"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  below = iota((p.C, p.C), 0) > iota((p.C, p.C), 1)
  found = scores(p, fine, tokens, [Reader(a_ref, True)], [b_ref, k_ref], g_ref, decayed_refs)
  N_ab, N_ak = (tiles.pairs(runs, below, x) for x in found)
  give(solved_ref, tiles.solve(-N_ab, jnp.ones(p.C, f32), fine), None)

  def tile(j, nothing):
    at, mask = pl.ds(j * p.v_tile, p.v_tile), both(tokens, p.values(j))
    give(fresh_ref.at[:, at], fine(N_ak, take(v_ref.at[:, at], mask)), mask)
    return nothing

  over(p.NV, tile, jnp.int32(0))


def solve(p: Plan, a, b, k, v, g, runs, edges) -> tuple[Array, Array, list[Array]]:
  """G and N_ak v; and a as it reads from a state, b and k as they write to one."""
  p = p.cut(TILES, "solve")
  blocks = specs(p, AXES["solve"])
  results = [("pairs", (p.B, p.HV, p.N, p.C, p.C), f32), ("v", v.shape, f32), *decayed_results(p, p.kept, f32, f32)]
  solved, fresh, *decayed = launch(
    functools.partial(_solve_kernel, p=p), (a, b, k, v, g, runs, edges), name="dplr_solve",
    programs=places(p, AXES["solve"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "q", "q", "v", p.gate, "runs", "edges")],
    out_specs=[blocks[name] for name, _, _ in results],
    out_shapes=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
  )  # fmt: skip
  return solved, fresh, decayed or [a, b, k]


# --- carry: states from chunk to chunk -------------------------------------------------------------------------------


def _carry_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """S = total S + (tail b)^T W + (tail k)^T v, keeping W, and S before each chunk."""
  a_ref, b_ref, k_ref, v_ref, fresh_ref, g_ref, runs_ref, edges_ref, solved_ref, state_ref = inputs
  kept_ref, read_ref, last_ref = outputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  parts = parts_of(p)
  values = p.values(places(p, AXES["carry"])[0](pl.program_id(0)).j)

  def chunk(n, S):
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    mask = both(tokens, values)
    give_state(kept_ref, S, parts, values, n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    before, tail = decays(p, g_ref, at, tokens, tiles.before_per_head, tiles.tail_per_head)
    old = tiles.from_start(runs, before * read_state(product, take_parts(a_ref, at, tokens, parts), S))
    X = take(fresh_ref.at[at, :], mask) + old
    W = X - fine(take(solved_ref.at[n], None), X)
    give(read_ref.at[at, :], W, mask)
    v = take(v_ref.at[at, :], mask)
    W, v = tiles.to_end(runs, tail * W), tiles.to_end(runs, v if p.gate == "none" else tail * v.astype(f32))

    def update(x, part):
      b, k = (take(ref.at[at, part[0]], both(tokens, part[1])) for ref in (b_ref, k_ref))
      x = tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part)) * x
      return x + fine.outer(b, W) + fine.outer(k, v)

    return [update(x, part) for x, part in zip(S, parts, strict=True)]

  give_state(last_ref, lax.fori_loop(0, p.N, chunk, take_state(state_ref, parts, values)), parts, values)


def carry(p: Plan, a, b, k, v, fresh, g, runs, edges, solved, state) -> Sequence[Array]:
  p = p.cut(TILES, "carry_wide" if p.K > WIDE else "carry")
  blocks = specs(p, AXES["carry"])
  kept, key = jax.ShapeDtypeStruct((p.B, p.HV, p.N, p.K, p.V), p.kept), "dq" if p.gate == "channel" else "q"
  return launch(
    functools.partial(_carry_kernel, p=p), (a, b, k, v, fresh, g, runs, edges, solved, state), name="dplr_states",
    programs=places(p, AXES["carry"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in (key, key, key, "v", "v", p.gate, "runs", "edges", "pairs", "state")],
    out_specs=[blocks[name] for name in ("kept", "v", "state")],
    out_shapes=[kept, jax.ShapeDtypeStruct(v.shape, f32), jax.ShapeDtypeStruct(state.shape, f32)],
  )  # fmt: skip


# --- read: what comes out of a chunk ---------------------------------------------------------------------------------


def _read_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """o = scale ((head q) S + P_b W + P_k v)."""
  q_ref, b_ref, k_ref, v_ref, read_ref, g_ref, runs_ref, edges_ref, kept_ref = inputs
  product, fine = tiles.products(p.dtype, interpreted), tiles.fine_products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  runs = runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  mask, upto = both(tokens, values), iota((p.C, p.C), 0) >= iota((p.C, p.C), 1)
  found = scores(p, product, tokens, [Reader(q_ref, False)], [b_ref, k_ref], g_ref, [])
  P_b, P_k = (tiles.pairs(runs, upto, x) for x in found)
  out = fine(P_b, take(read_ref, mask)) + fine(P_k, take(v_ref, mask))

  def tile(i, sum):
    rows, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    q = take(q_ref.at[:, rows], both(tokens, keys))
    if p.gate == "channel":
      q = q.astype(f32) * tiles.head_per_channel(take(g_ref.at[:, rows], both(tokens, keys)).astype(f32))
    return sum + product(q, take(kept_ref.at[rows, :], both(keys, values)))

  old = over(p.NK, tile, jnp.zeros((p.C, p.v_tile), f32))
  if p.gate == "head":
    old *= tiles.head_per_head(take(g_ref, tokens).astype(f32))[:, None]
  give(outputs[0], p.scale * (out + tiles.from_start(runs, old)), mask)


def read(p: Plan, q, b, k, v, found, g, runs, edges, kept, dtype) -> Array:
  p = p.cut(TILES, "read")
  blocks = specs(p, AXES["read"])
  (out,) = launch(
    functools.partial(_read_kernel, p=p), (q, b, k, v, found, g, runs, edges, kept), name="dplr_outputs",
    programs=places(p, AXES["read"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "q", "q", "v", "v", p.gate, "runs", "edges", "kept")],
    out_specs=[blocks["v"]], out_shapes=[jax.ShapeDtypeStruct(v.shape, dtype)],
  )  # fmt: skip
  return out
