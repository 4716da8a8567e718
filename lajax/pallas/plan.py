"""The sizes of a call of a matrix state's kernels, how each kernel cuts them, and where its programs find their blocks.

Time is cut into N chunks of C tokens, K and V into NK and NV tiles of so many columns (`k_tile`, `v_tile`); n counts
chunks, i tiles of K, j tiles of V. What goes from chunk to chunk goes through P segments of time at once where batch, heads
and columns are too few to fill a GPU.
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

from lajax.pallas.launch import launch
from lajax.pallas.tiles import Runs, inside

f32 = jnp.float32
MAX_K = 256
FILL = 128  # programs that fill a large GPU, about one for each of its cores (SMs)
COLUMNS = 64  # of a state that a program usually has, for the number of programs
LEAST = 4  # segments, else their ends, which need the inputs once more, cost what they save
SHORTEST = 8  # chunks of a segment


class Tiles(NamedTuple):
  """How a kernel cuts its work: most columns of K and V in a tile, warps, and stages of the loads' pipeline."""

  k: int
  v: int
  warps: int
  stages: int


class Axes(NamedTuple):
  """Of a kernel's programs, beside batch and heads."""

  chunks: bool  # else segments
  keys: bool
  values: bool


Table = Mapping[
  tuple[str, bool, bool], Tiles
]  # by kernel, one decay a channel, operands wider than bfloat16
CHUNK = {  # tokens, by whether there is one decay a channel, and whether the operands are wider than bfloat16
  (False, False): 64, (True, False): 32,
  (False, True): 32, (True, True): 16,
}  # fmt: skip


class Plan(NamedTuple):
  """The sizes of a call, and how one kernel cuts them."""

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
  multiple: int = 1  # of which a segment has whole ones, in chunks
  every: int = 1  # a state is kept at every so many chunks' start
  k_tile: int = 0
  k_part: int = 0  # of a tile of K that a program takes in parts
  v_tile: int = 0
  warps: int = 0
  stages: int = 0

  @property
  def N(self) -> int:
    """Of whole segments: the last chunks may have no tokens."""
    return self.P * self.span

  @property
  def span(self) -> int:
    """Chunks of a segment."""
    return self.multiple * -(-self.T // (self.C * self.P * self.multiple))

  @property
  def NK(self) -> int:
    return -(-self.K // self.k_tile)

  @property
  def NV(self) -> int:
    return -(-self.V // self.v_tile)

  @property
  def kept(self) -> jnp.dtype:
    """The dtype of the kept states: what products take anyway."""
    return self.dtype if self.dtype == jnp.bfloat16 else jnp.dtype(f32)

  @property
  def reader(self) -> str:
    """The kind of block of the keys that read from a state or write to one: with one decay a channel, of each value head."""
    return "dq" if self.gate == "channel" else "q"

  def cut(self, table: Table, kernel: str) -> "Plan":
    return self.cut_by(table[kernel, self.gate == "channel", self.dtype != jnp.bfloat16])

  def cut_by(self, t: Tiles) -> "Plan":
    return self._replace(
      k_tile=_side(self.K, t.k), v_tile=_side(self.V, t.v), warps=t.warps, stages=t.stages
    )

  def cut_in_parts(self, table: Table, kernel: str, most: int) -> "Plan":
    """Tiles of K of up to so many columns, which a program takes in parts of the table's."""
    p = self.cut(table, kernel)
    return p._replace(k_tile=_side(self.K, most), k_part=p.k_tile)

  def tokens(self, n) -> Array | None:
    return inside(n * self.C, self.C, self.T, self.T == self.N * self.C)

  def keys(self, i) -> Array | None:
    return inside(i * self.k_tile, self.k_tile, self.K, self.K % self.k_tile == 0)

  def values(self, j) -> Array | None:
    return inside(j * self.v_tile, self.v_tile, self.V, self.V % self.v_tile == 0)


def _side(size: int, most: int) -> int:
  """A power of two of at least 16, the least that a product takes."""
  return max(16, min(most, 1 << (size - 1).bit_length()))


def plan(q, v, g, documents: bool, scale: float, dtype) -> Plan:
  (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
  gate = "none" if g is None else "head" if g.ndim == 3 else "channel"
  C = CHUNK[gate == "channel", dtype != jnp.bfloat16]
  return Plan(
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
    segments(B * HV * -(-V // COLUMNS), -(-T // C)),
  )


def segments(programs: int, chunks: int) -> int:
  """How many segments of time make enough of so many programs: 1, or a power of two from `LEAST` on."""
  P = 1
  while programs * P < FILL and chunks >= 2 * P * SHORTEST:
    P *= 2
  return P if P >= LEAST else 1


def refusal(
  p: Plan, inputs, chunk_size: int | None, table: Table, axes: Mapping[str, Axes]
) -> str | None:
  """What no kernel of a matrix state takes, in a sentence."""
  if any(x is not None and x.dtype == jnp.float64 for x in inputs):
    return "the kernels compute in float32, and an input is float64."
  if p.K > MAX_K:
    return f"the kernels take keys of up to K = {MAX_K}, and K is {p.K}."
  if chunk_size is not None and chunk_size != p.C:
    return f"the kernels' chunks have {p.C} tokens here, and chunk_size is {chunk_size}."
  cuts = (table.get((kernel, p.gate == "channel", p.dtype != jnp.bfloat16)) for kernel in axes)
  programs = max(
    places(p.cut_by(cut), axis)[1] for cut, axis in zip(cuts, axes.values(), strict=True) if cut
  )
  if programs >= 2**31 - 1:
    sizes = [p.B, p.T, p.HV, p.K, p.V]
    return (
      f"a GPU starts fewer than 2^31 programs, and [B T HV K V] = {sizes} would need {programs}."
    )
  return None


# --- blocks ----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
  """Which part of the arrays a program works on."""

  b: Array
  n: Array  # of the chunks, or of the segments
  h: Array  # of the value heads
  i: Array
  j: Array


def places(p: Plan, along: Axes) -> tuple[Callable[[Array], Place], int]:
  """Program number -> Place, over batch, chunks or segments, heads and tiles where wanted; neighbours share inputs."""
  sizes = (
    p.N if along.chunks else p.P,
    p.HV,
    p.NK if along.keys else 1,
    p.NV if along.values else 1,
  )

  def place(program) -> Place:
    parts = []
    for size in reversed(sizes):
      parts.append(program % size if size > 1 else 0)
      program = program // size
    return Place(program, *reversed(parts))

  return place, p.B * math.prod(sizes)


def specs(p: Plan, along: Axes) -> dict[str, Any]:
  """BlockSpecs by kind of array. Without an axis among the programs' a block has all of it, of segments too."""
  chunks, keys, values = along
  place, G = places(p, along)[0], p.HV // p.H
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
    "runs": spec((None, C), lambda x: (x.b, n(x))),
    "edges": spec((None, p.N + 1), lambda x: (x.b, 0)),
    "state": spec((None, None, K, V), lambda x: (x.b, x.h, i(x), j(x))),
    "segment": spec((None, None, None, K, V), lambda x: (x.b, x.n, x.h, i(x), j(x))),
    "kept": spec(
      (None, None, None if chunks else p.N // p.every, K, V), lambda x: (x.b, x.h, n(x), i(x), j(x))
    ),
    "pairs": spec((None, None, every, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0)),
    "two pairs": spec((None, None, every, 2, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0, 0)),
    "four pairs": spec((None, None, every, 4, p.C, p.C), lambda x: (x.b, x.h, n(x), 0, 0, 0)),
  }


Result = tuple[str, tuple[int, ...], Any]  # kind of block, shape and dtype


def decayed_results(p: Plan, *dtypes) -> list[Result]:
  """With one decay a channel, the keys that read from a state or write to one, of these dtypes."""
  return [("dq", (p.B, p.T, p.HV, p.K), dtype) for dtype in dtypes] if p.gate == "channel" else []


def start(
  kernel: Callable,
  p: Plan,
  along: Axes,
  name: str,
  kinds: Sequence[str],
  arrays: Sequence[Array | None],
  results: Sequence[Result],
) -> Sequence[Array]:
  """Runs kernel(p=p) in a program for each place; `kinds` are those of the arrays' blocks."""
  blocks = specs(p, along)
  return launch(
    functools.partial(kernel, p=p),
    arrays,
    name=name,
    programs=places(p, along)[1],
    warps=p.warps,
    stages=p.stages,
    in_specs=[blocks[kind] for kind in kinds],
    out_specs=[blocks[kind] for kind, _, _ in results],
    out_shapes=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
  )


def key_cotangents(p: Plan, *arrays: Array) -> list[Result]:
  """What gives the cotangents of arrays of keys [B T H K], of each value head where they are grouped, and dg."""
  tall = (p.B, p.T, p.HV, p.K)
  dg = {
    "none": [],
    "head": [("dhead", (p.NK, p.B, p.T, p.HV), f32)],
    "channel": [("channel", tall, f32)],
  }[p.gate]
  return [*(("dq", tall, f32 if p.HV > p.H else x.dtype) for x in arrays), *dg]


def gathered(p: Plan, found: Sequence[Array], count: int) -> tuple[Sequence[Array], Array | None]:
  """Of what `key_cotangents` gives for so many arrays, their sums over grouped heads; and dg."""
  keys, dg = found[:count], found[count:]
  if p.HV > p.H:
    keys = [x.reshape(p.B, p.T, p.H, -1, p.K).sum(3) for x in keys]
  return keys, (dg[0] if p.gate == "channel" else dg[0].sum(0) if dg else None)


def documents(runs: Int[Array, "B T"], p: Plan) -> tuple[Int[Array, "B NC"], Int[Array, "B N1"]]:
  """The document of each token of whole chunks, and of the token before each chunk and of the last one's last."""
  padded = jnp.pad(runs, [(0, 0), (0, p.N * p.C - p.T)], mode="edge")
  return padded, jnp.pad(padded[:, p.C - 1 :: p.C], [(0, 0), (1, 0)])


def runs_of(p: Plan, runs_ref, edges_ref, n, at) -> Runs | None:
  return Runs(runs_ref[at], edges_ref[n], edges_ref[n + 1]) if p.documents else None


def in_segments(p: Plan) -> str:
  """The end of the name of a kernel that goes through segments of time."""
  return "_in_segments" if p.P > 1 else ""


def chunk_of(p: Plan, segment, m, reverse: bool = False):
  """The number of the m-th chunk of a segment, in reverse from its end."""
  return segment * p.span + (p.span - 1 - m if reverse else m)


def over(count: int, body, carry):
  """The sum over so many tiles."""
  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)
