"""Sizes of a call of the kernels of matrix states, how each kernel cuts them, and the blocks of its
programs.

Time is cut into N chunks of C tokens. K and V are cut into NK and NV tiles of `k_tile` and `v_tile`
columns. In index expressions n counts chunks, i tiles of K, j tiles of V. Where batch, heads and
columns make too few programs to fill a GPU, time is also cut into P splits, which go through their
chunks side by side.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from lajax.pallas.launch import float64_refusal, launch
from lajax.pallas.tiles import ChunkDocuments, inside

f32 = jnp.float32
MAX_K = 256
FILL = 128  # programs that fill a large GPU: about one for each of its cores (SMs)
COLUMNS = 64  # columns of a state per program, assumed when the number of splits is chosen
LEAST = 4  # fewest time splits worth having: with fewer, the extra pass costs more than it saves
SHORTEST = 8  # fewest chunks in a split


class Tiles(NamedTuple):
  """Tiling of a kernel."""

  k: int  # most columns of K in a tile
  v: int  # most columns of V in a tile
  warps: int
  stages: int  # of the pipeline of loads


class Static(NamedTuple):
  """Static arguments of a call."""

  scale: float
  bounded: bool = False  # no log decay per channel is below -5


class Axes(NamedTuple):
  """Axes of a kernel's grid, beside batch and heads."""

  chunks: bool  # a program per chunk; else one per time split
  keys: bool  # a program per tile of K; else each has all of K
  values: bool  # a program per tile of V; else each has all of V


# Keys: kernel, whether decays are per channel, whether operands of products are wider than
# bfloat16.
Table = Mapping[tuple[str, bool, bool], Tiles]
# Tokens of a chunk, by the same two flags. Decays per channel and wide operands need more registers
# per token.
CHUNK = {
  (False, False): 64, (True, False): 32,
  (False, True): 32, (True, True): 16,
}  # fmt: skip


class MatrixPlan(NamedTuple):
  """Sizes of a call, and how one kernel cuts them."""

  B: int
  T: int
  H: int
  HV: int
  K: int
  V: int
  gate: str  # none, head or channel
  documents: bool
  scale: float
  dtype: jnp.dtype  # of the inputs of products
  C: int
  P: int = 1
  multiple: int = 1  # the number of chunks in a split is a multiple of this
  bounded: bool = False  # decays are per channel, and no log decay is below -5
  every: int = 1  # chunk states are stored for every n-th chunk
  k_tile: int = 0
  k_part: int = 0  # width of the pieces that a tile of K is loaded in; 0 for whole tiles
  v_tile: int = 0
  warps: int = 0
  stages: int = 0

  @property
  def N(self) -> int:
    """Number of chunks. All splits have the same number, so the last chunks may have no tokens."""
    return self.P * self.span

  @property
  def span(self) -> int:
    """Number of chunks in a split."""
    return self.multiple * -(-self.T // (self.C * self.P * self.multiple))

  @property
  def NK(self) -> int:
    return -(-self.K // self.k_tile)

  @property
  def NV(self) -> int:
    return -(-self.V // self.v_tile)

  @property
  def state_dtype(self) -> jnp.dtype:
    """Dtype of the stored chunk states: the one that products round them to anyway."""
    return self.dtype if self.dtype == jnp.bfloat16 else jnp.dtype(f32)

  @property
  def reader(self) -> str:
    """Kind of block of the keys that read or write a state.

    Decayed per channel, they are per value head.
    """
    return "dq" if self.gate == "channel" else "q"

  def cut(self, table: Table, kernel: str) -> "MatrixPlan":
    """Returns the plan with the tiling of a kernel."""
    return self.cut_by(table[kernel, self.gate == "channel", self.dtype != jnp.bfloat16])

  def cut_by(self, t: Tiles) -> "MatrixPlan":
    return self._replace(
      k_tile=_side(self.K, t.k), v_tile=_side(self.V, t.v), warps=t.warps, stages=t.stages
    )

  def cut_in_parts(self, table: Table, kernel: str, most: int) -> "MatrixPlan":
    """Returns the plan with tiles of K of up to `most` columns, loaded in pieces of the table's
    width.
    """
    p = self.cut(table, kernel)
    return p._replace(k_tile=_side(self.K, most), k_part=p.k_tile)

  def tokens(self, n) -> Array | None:
    """Mask of the tokens of chunk n that exist; None where all do.

    `keys` and `values` are the same for columns.
    """
    return inside(n * self.C, self.C, self.T, self.T == self.N * self.C)

  def keys(self, i) -> Array | None:
    return inside(i * self.k_tile, self.k_tile, self.K, self.K % self.k_tile == 0)

  def values(self, j) -> Array | None:
    return inside(j * self.v_tile, self.v_tile, self.V, self.V % self.v_tile == 0)


def _side(size: int, most: int) -> int:
  """Returns the width of a tile: a power of two, at least 16, which is the least that a product
  takes.
  """
  return max(16, min(most, 1 << (size - 1).bit_length()))


def plan(q, v, g, documents: bool, scale: float, dtype, bounded: bool = False) -> MatrixPlan:
  """Returns the plan of a call, not yet cut for a kernel."""
  (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
  gate = "none" if g is None else "head" if g.ndim == 3 else "channel"
  C = CHUNK[gate == "channel", dtype != jnp.bfloat16]
  return MatrixPlan(
    B,
    T,
    H,
    HV,
    K,
    V,
    gate,
    documents,
    float(scale),
    dtype,
    C,
    count_splits(B * HV * -(-V // COLUMNS), -(-T // C)),
    bounded=bounded and gate == "channel",
  )


def count_splits(programs: int, chunks: int) -> int:
  """Returns the number of time splits that fill a GPU: 1, or a power of two of at least `LEAST`."""
  P = 1
  while programs * P < FILL and chunks >= 2 * P * SHORTEST:
    P *= 2
  return P if P >= LEAST else 1


def refusal(
  p: MatrixPlan,
  inputs: Mapping[str, Array | None],
  chunk_size: int | None,
  table: Table,
  axes: Mapping[str, Axes],
) -> str | None:
  """Returns a sentence that says what these kernels do not take, or None."""
  if reason := float64_refusal(inputs):
    return reason
  if p.K > MAX_K:
    return f"the kernels take keys of up to K = {MAX_K}, and K is {p.K}."
  if chunk_size is not None and chunk_size != p.C:
    gate = "no gate" if p.gate == "none" else f"a gate per {p.gate}"
    return (
      f"the kernels take chunk_size = {p.C} or None with {gate} and products of {p.dtype.name}, "
      f"and chunk_size is {chunk_size}."
    )
  cuts = (table.get((kernel, p.gate == "channel", p.dtype != jnp.bfloat16)) for kernel in axes)
  programs = max(
    places(p.cut_by(cut), axis)[1] for cut, axis in zip(cuts, axes.values(), strict=True) if cut
  )
  return refusal_of_programs(p, programs)


def refusal_of_programs(p: MatrixPlan, programs: int) -> str | None:
  """Returns a sentence that says that a GPU does not start so many programs, or None."""
  if programs >= 2**31 - 1:
    sizes = [p.B, p.T, p.HV, p.K, p.V]
    return (
      f"a GPU starts fewer than 2^31 programs, and [B T HV K V] = {sizes} would need {programs}."
    )
  return None


# --- blocks ---------------------------------------------------------------------------------------


class Place(NamedTuple):
  """Part of the arrays that a program works on."""

  b: Array  # row of the batch
  n: Array  # chunk, or time split
  h: Array  # value head
  i: Array  # tile of K
  j: Array  # tile of V


def places(p: MatrixPlan, axes: Axes) -> tuple[Callable[[Array], Place], int]:
  """Returns the map from a program's number to its place, and the number of programs.

  Tiles vary fastest, then heads: programs that run side by side share inputs in the cache.
  """
  sizes = (p.N if axes.chunks else p.P, p.HV, p.NK if axes.keys else 1, p.NV if axes.values else 1)

  def place(program) -> Place:
    parts = []
    for size in reversed(sizes):
      parts.append(program % size if size > 1 else 0)
      program = program // size
    return Place(program, *reversed(parts))

  return place, p.B * math.prod(sizes)


def specs(p: MatrixPlan, axes: Axes) -> dict[str, Any]:
  """Returns BlockSpecs by kind of array.

  If the grid does not run over an axis, a block spans the whole axis.
  """
  chunks, keys, values = axes
  place, G = places(p, axes)[0], p.HV // p.H
  C, K, V = (
    p.C if chunks else p.N * p.C,
    p.k_tile * (1 if keys else p.NK),
    p.v_tile * (1 if values else p.NV),
  )
  n = lambda x: x.n if chunks else 0
  i = lambda x: x.i if keys else 0
  j = lambda x: x.j if values else 0
  spec = lambda shape, index: pl.BlockSpec(shape, lambda program: index(place(program)))
  every = None if chunks else p.N
  return {
    "q": spec((None, C, None, K), lambda x: (x.b, n(x), x.h // G, i(x))),
    "dq": spec((None, C, None, K), lambda x: (x.b, n(x), x.h, i(x))),
    "partial": spec((None, None, C, None, V), lambda x: (i(x), x.b, n(x), x.h, j(x))),
    "v": spec((None, C, None, V), lambda x: (x.b, n(x), x.h, j(x))),
    "none": None,
    "head": spec((None, C, None), lambda x: (x.b, n(x), x.h)),
    "channel": spec((None, C, None, K), lambda x: (x.b, n(x), x.h, i(x))),
    "dhead": spec((None, None, C, None), lambda x: (i(x), x.b, n(x), x.h)),
    "document": spec((None, C), lambda x: (x.b, n(x))),
    "edges": spec((None, p.N + 1), lambda x: (x.b, 0)),
    "state": spec((None, None, K, V), lambda x: (x.b, x.h, i(x), j(x))),
    "split state": spec((None, None, None, K, V), lambda x: (x.b, x.n, x.h, i(x), j(x))),
    "chunk_states": spec(
      (None, None, None if chunks else p.N // p.every, K, V), lambda x: (x.b, x.h, n(x), i(x), j(x))
    ),
    "scores": spec((None, None, every, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0)),
    "two scores": spec((None, None, every, 2, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0, 0)),
    "four scores": spec((None, None, every, 4, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0, 0)),
  }


Result = tuple[str, tuple[int, ...], Any]  # kind of block, shape, dtype


def decayed_results(p: MatrixPlan, *dtypes) -> list[Result]:
  """Returns the results that hold keys decayed per channel, as they read or write a state; none for
  other gates.
  """
  return [("dq", (p.B, p.T, p.HV, p.K), dtype) for dtype in dtypes] if p.gate == "channel" else []


def launch_plan(
  kernel: Callable,
  p: MatrixPlan,
  axes: Axes,
  name: str,
  kinds: Sequence[str],
  arrays: Sequence[Array | None],
  results: Sequence[Result],
) -> Sequence[Array]:
  """Runs kernel(p=p) over the grid of `axes`; `kinds` are the kinds of the arrays' blocks, in the
  same order.
  """
  blocks = specs(p, axes)
  return launch(
    functools.partial(kernel, p=p),
    arrays,
    name=name,
    programs=places(p, axes)[1],
    warps=p.warps,
    stages=p.stages,
    in_specs=[blocks[kind] for kind in kinds],
    out_specs=[blocks[kind] for kind, _, _ in results],
    out_shapes=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
  )


def key_cotangents(p: MatrixPlan, *arrays: Array) -> list[Result]:
  """Returns the results for cotangents of keys [B T H K] and of g.

  Of grouped heads each value head has its own.
  """
  per_head = (p.B, p.T, p.HV, p.K)
  dg = {
    "none": [],
    "head": [("dhead", (p.NK, p.B, p.T, p.HV), f32)],
    "channel": [("channel", per_head, f32)],
  }[p.gate]
  return [*(("dq", per_head, f32 if p.HV > p.H else x.dtype) for x in arrays), *dg]


def sum_over_groups(
  p: MatrixPlan, found: Sequence[Array], count: int
) -> tuple[Sequence[Array], Array | None]:
  """Returns the cotangents of `count` arrays of keys, summed over grouped heads, and dg."""
  keys, dg = found[:count], found[count:]
  if p.HV > p.H:
    keys = [x.reshape(p.B, p.T, p.H, -1, p.K).sum(3) for x in keys]
  return keys, (dg[0] if p.gate == "channel" else dg[0].sum(0) if dg else None)


def chunk_documents(
  document: Int[Array, "B T"], p: MatrixPlan
) -> tuple[Int[Array, "B N*C"], Int[Array, "B N+1"]]:
  """Returns the document of each token, padded to whole chunks, and the documents at the chunks'
  edges.

  Edge n is the document of the token before chunk n; 0, the document that continues the initial
  state, for n = 0.
  """
  padded = jnp.pad(document, [(0, 0), (0, p.N * p.C - p.T)], mode="edge")
  return padded, jnp.pad(padded[:, p.C - 1 :: p.C], [(0, 0), (1, 0)])


def document_of(p: MatrixPlan, document_ref, edges_ref, n, at) -> ChunkDocuments | None:
  return ChunkDocuments(document_ref[at], edges_ref[n], edges_ref[n + 1]) if p.documents else None


def split_suffix(p: MatrixPlan) -> str:
  """Returns the end of the name of a kernel that goes through time splits."""
  return "_in_splits" if p.P > 1 else ""


def chunk_of(p: MatrixPlan, split, m, reverse: bool = False):
  """Returns the number of the m-th chunk of a split, counted from its end in reverse."""
  return split * p.span + (p.span - 1 - m if reverse else m)


def loop_tiles(count: int, body, carry):
  """Runs body(tile, carry) -> carry over `count` tiles.

  One tile is not a loop, which saves registers.
  """
  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)
