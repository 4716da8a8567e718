"""How the kernels of attention cut their work, and which tokens and blocks read which.

Letters: K and V are cut into NK and NV tiles of so many columns; i counts tiles of K, j of V, n blocks of queries, m of keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from lajax.pallas import tiles
from lajax.pallas.launch import load
from lajax.pallas.plan import over
from lajax.pallas.tiles import Products, both, inside, take

f32 = jnp.float32


class Tiles(NamedTuple):
  """How a kernel cuts its work: queries and keys in a block, most columns in a tile, warps, and stages of the pipeline."""

  C: int
  S: int
  width: int
  warps: int
  stages: int


TILES = {  # by kernel, the larger of K and V up to 64, 128 or 256, and whether the operands are wider than bfloat16
  ("forward", 64, False): Tiles(128, 32, 64, 8, 2),
  ("forward", 128, False): Tiles(128, 32, 128, 8, 2),
  ("forward", 256, False): Tiles(64, 64, 128, 8, 2),
  ("forward", 64, True): Tiles(32, 32, 64, 4, 1),
  ("forward", 128, True): Tiles(32, 32, 64, 8, 1),
  ("forward", 256, True): Tiles(32, 32, 64, 8, 1),
  ("queries", 64, False): Tiles(64, 64, 64, 8, 2),
  ("queries", 128, False): Tiles(64, 64, 128, 8, 2),
  ("queries", 256, False): Tiles(64, 32, 128, 8, 2),
  ("queries", 64, True): Tiles(32, 32, 64, 8, 1),
  ("queries", 128, True): Tiles(32, 32, 64, 8, 1),
  ("queries", 256, True): Tiles(32, 32, 32, 4, 1),
  ("keys", 64, False): Tiles(32, 64, 64, 8, 2),
  ("keys", 128, False): Tiles(64, 64, 128, 8, 2),
  ("keys", 256, False): Tiles(32, 64, 64, 8, 2),
  ("keys", 64, True): Tiles(32, 32, 32, 4, 1),
  ("keys", 128, True): Tiles(32, 32, 32, 4, 1),
  ("keys", 256, True): Tiles(32, 32, 32, 4, 1),
}


class Mask(NamedTuple):
  """What a query reads, beside its document: nothing after itself if causal, and of the window on either side."""

  causal: bool
  window: int | None


class Plan(NamedTuple):
  """The sizes of a call, and how one kernel cuts them."""

  B: int
  T: int
  H: int
  HK: int
  K: int
  V: int
  mask: Mask
  documents: bool
  scale: float
  dtype: jnp.dtype  # of the inputs of products
  C: int = 0
  S: int = 0
  k_tile: int = 0
  v_tile: int = 0
  warps: int = 0
  stages: int = 0

  @property
  def G(self) -> int:
    return self.H // self.HK

  @property
  def N(self) -> int:
    return -(-self.T // self.C)

  @property
  def M(self) -> int:
    return -(-self.T // self.S)

  @property
  def NK(self) -> int:
    return -(-self.K // self.k_tile)

  @property
  def NV(self) -> int:
    return -(-self.V // self.v_tile)

  def cut(self, kernel: str) -> "Plan":
    size = next(size for size in (64, 128, 256) if max(self.K, self.V) <= size)
    t = TILES[kernel, size, self.dtype != jnp.bfloat16]
    side = lambda size: max(16, min(t.width, 1 << (size - 1).bit_length()))
    return self._replace(
      C=t.C, S=t.S, k_tile=side(self.K), v_tile=side(self.V), warps=t.warps, stages=t.stages
    )

  def tokens(self, start, size: int) -> Array | None:
    return inside(start, size, self.T, self.T % size == 0)

  def keys(self, i) -> Array | None:
    return inside(
      i * self.k_tile, self.k_tile, self.K, self.K % self.k_tile == 0 and self.NK >= self.NV
    )

  def values(self, j) -> Array | None:
    return inside(
      j * self.v_tile, self.v_tile, self.V, self.V % self.v_tile == 0 and self.NV >= self.NK
    )


def plan(q, k, v, mask: Mask, documents: bool, scale: float) -> Plan:
  (B, T, H, K), (HK, V) = q.shape, v.shape[2:]
  return Plan(B, T, H, HK, K, V, mask, documents, scale, tiles.operand_dtype(q, k, v))


# --- which tokens read which -----------------------------------------------------------------------------------------


class Documents(NamedTuple):
  """Of each token: its document, -1 of padding; how many real tokens there are up to it; from which real token
  to behind which its document goes."""

  segment: Int[Array, "B T"]
  position: Int[Array, "B T"]
  start: Int[Array, "B T"]
  end: Int[Array, "B T"]


def documents_of(runs: Int[Array, "B T"], real: Bool[Array, "B T"]) -> Documents:
  """From what `drive.segments` gives."""
  T, index = runs.shape[1], jnp.arange(runs.shape[1], dtype=jnp.int32)
  begins = jnp.pad(runs[:, 1:] != runs[:, :-1], ((0, 0), (1, 0)))
  start = lax.cummax(jnp.where(begins, index, 0), axis=1)
  last = lax.cummin(jnp.where(begins, index - 1, T - 1), axis=1, reverse=True)
  last = jnp.pad(last[:, 1:], ((0, 0), (0, 1)), constant_values=T - 1)
  real_from = lax.cummin(jnp.where(real, index, T - 1), axis=1, reverse=True)
  real_upto = lax.cummax(jnp.where(real, index, 0), axis=1)
  at = functools.partial(jnp.take_along_axis, axis=1)
  position = jnp.cumsum(real, axis=1, dtype=jnp.int32)
  return Documents(
    jnp.where(real, runs, -1), position, at(real_from, start), at(real_upto, last) + 1
  )


class Blocks(NamedTuple):
  """The blocks that a program goes through: from `first` to before `past`, [B or 1, programs of a head]."""

  first: Int[Array, "B N"]
  past: Int[Array, "B N"]


def reach(p: Plan, documents: Documents | None) -> tuple[Array, Array]:
  """The least range of tokens that holds those that a token reads, or is read by, if not causal; empty for padding."""
  T, window = p.T, p.mask.window
  index = jnp.arange(T, dtype=jnp.int32)[None]
  if documents is None:
    lo, hi = jnp.zeros_like(index), jnp.full_like(index, T)
    return (
      (lo, hi)
      if window is None
      else (jnp.maximum(index - window + 1, 0), jnp.minimum(index + window, T))
    )
  segment, position, lo, hi = documents
  if window is not None:
    search = lambda side, offset: jax.vmap(functools.partial(jnp.searchsorted, side=side))(
      position, position + offset
    )
    lo = jnp.maximum(lo, search("right", -window).astype(jnp.int32))
    hi = jnp.minimum(hi, search("left", window - 1).astype(jnp.int32) + 1)
  return jnp.where(segment < 0, T, lo), jnp.where(segment < 0, 0, hi)


def blocks(p: Plan, documents: Documents | None, keys: bool) -> Blocks:
  """Of blocks of queries, the blocks of keys that are read; of blocks of keys, those of queries that read them."""
  lo, hi = reach(p, documents)
  index = jnp.arange(p.T, dtype=jnp.int32)[None]
  if p.mask.causal:
    lo, hi = (jnp.maximum(lo, index), hi) if keys else (lo, jnp.minimum(hi, index + 1))
  own, other = (p.S, p.C) if keys else (p.C, p.S)
  cut = lambda x, fill: jnp.pad(x, ((0, 0), (0, -p.T % own)), constant_values=fill).reshape(
    x.shape[0], -1, own
  )
  return Blocks(cut(lo, p.T).min(2) // other, -(-cut(hi, 0).max(2) // other))


class Where(NamedTuple):
  """Where the tokens of a block stand, as a row or a column."""

  index: Array
  position: Array
  segment: Array | None


def where(p: Plan, start, size: int, axis: int, segment_ref, position_ref) -> Where:
  lay = lambda x: x[:, None] if axis == 0 else x[None, :]
  index = start + jnp.arange(size)
  if not p.documents:
    return Where(lay(index), lay(index), None)
  at, tokens = pl.ds(start, size), p.tokens(start, size)
  segment = (
    load(segment_ref.at[at]) if tokens is None else load(segment_ref.at[at], mask=tokens, other=-1)
  )
  return Where(lay(index), lay(take(position_ref.at[at], tokens)), lay(segment))


def masked(p: Plan, queries: Where, keys: Where, x: Array, other: float) -> Array:
  """x where the query reads the key."""
  distance = queries.position - keys.position
  window, keep = p.mask.window, []
  if p.T % p.S:
    keep.append(keys.index < p.T)
  if queries.segment is not None and keys.segment is not None:
    keep.append((queries.segment == keys.segment) & (keys.segment >= 0))
  if p.mask.causal:
    keep.append(distance >= 0)
  if window is not None:
    keep.append(distance < window)
    if not p.mask.causal:
      keep.append(distance > -window)
  return jnp.where(functools.reduce(jnp.logical_and, keep), x, other) if keep else x


# --- blocks of arrays ------------------------------------------------------------------------------------------------


class Place(NamedTuple):
  """Which part of the arrays a program works on."""

  b: Array
  h: Array
  block: Array
  tile: Array


def places(heads: int, blocks: int, columns: int, backwards: bool = False):
  """Program number -> Place. With `backwards` the last blocks come first: those of causal queries read most."""

  def place(program) -> Place:
    block = program // columns % blocks
    program, tile = program // columns // blocks, program % columns
    return Place(
      program // heads, program % heads, blocks - 1 - block if backwards else block, tile
    )

  return place


def specs_of(p: Plan, place, keys: bool) -> dict[str, pl.BlockSpec]:
  """BlockSpecs by kind of array: all tokens of a head of the queries, or of the heads of a group, and of one of the keys."""
  spec = lambda shape, index: pl.BlockSpec(shape, lambda program: index(place(program)))
  shared = (lambda x: x.h) if keys else (lambda x: x.h // p.G)
  G = p.G if keys else None
  rows = lambda x: x.b if p.documents else 0
  T = -(-p.T // max(p.C, p.S)) * max(p.C, p.S)
  K, V = p.NK * p.k_tile, p.NV * p.v_tile
  return {
    "q": spec((None, T, G, K), lambda x: (x.b, 0, x.h, 0)),
    "o": spec((None, T, G, V), lambda x: (x.b, 0, x.h, 0)),
    "row": spec((None, T, G), lambda x: (x.b, 0, x.h)),
    "k": spec((None, T, None, K), lambda x: (x.b, 0, shared(x), 0)),
    "v": spec((None, T, None, V), lambda x: (x.b, 0, shared(x), 0)),
    "sink": spec((None,), lambda x: (x.h,)),
    "tokens": spec((None, T), lambda x: (x.b, 0)),
    "blocks": spec((None, p.M if keys else p.N), lambda x: (rows(x), 0)),
  }


def inner(
  product: Products, count: int, left, right, shape: tuple[int, int]
) -> Float[Array, "M N"]:
  """left right^T, both by tiles of columns."""
  body = lambda i, total: total + product.inner(left(i), right(i))
  return over(count, body, jnp.zeros(shape, f32))


def tile_of(ref, p: Plan, start, size: int, width: int, mask, head=None):
  """Tile number -> that tile of the columns of a block of tokens; of one head, where the array has several."""
  at, tokens = pl.ds(start, size), p.tokens(start, size)
  rows = (at,) if head is None else (at, head)
  return lambda i: take(ref.at[(*rows, pl.ds(i * width, width))], both(tokens, mask(i)))


def held(count: int, tile):
  """Tile number -> tile, of a block that stays: where there is one tile, it is read once."""
  if count > 1:
    return tile
  x = tile(0)
  return lambda i: x
