"""Tilings of the attention kernels, and which tokens and blocks read which.

Letters: K and V are cut into NK and NV tiles of columns; i counts tiles of K, j tiles of V, n
blocks of queries, m blocks of keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from lajax.pallas import tiles
from lajax.pallas.plan import loop_tiles
from lajax.pallas.tiles import Products, inside, load, tile_mask

f32 = jnp.float32


class AttentionTiles(NamedTuple):
  """Tiling of a kernel."""

  C: int  # queries in a block
  S: int  # keys in a block
  width: int  # most columns in a tile
  warps: int
  stages: int  # of the pipeline of loads


# Keys: kernel, the larger of K and V up to this, whether operands are wider than bfloat16.
TILES = {
  ("forward", 64, False): AttentionTiles(128, 32, 64, 8, 2),
  ("forward", 128, False): AttentionTiles(128, 32, 128, 8, 2),
  ("forward", 256, False): AttentionTiles(64, 64, 128, 8, 2),
  ("forward", 64, True): AttentionTiles(32, 32, 64, 4, 1),
  ("forward", 128, True): AttentionTiles(32, 32, 64, 8, 1),
  ("forward", 256, True): AttentionTiles(32, 32, 64, 8, 1),
  ("queries", 64, False): AttentionTiles(64, 64, 64, 8, 2),
  ("queries", 128, False): AttentionTiles(64, 64, 128, 8, 2),
  ("queries", 256, False): AttentionTiles(64, 32, 128, 8, 2),
  ("queries", 64, True): AttentionTiles(32, 32, 64, 8, 1),
  ("queries", 128, True): AttentionTiles(32, 32, 64, 8, 1),
  ("queries", 256, True): AttentionTiles(32, 32, 32, 4, 1),
  ("keys", 64, False): AttentionTiles(32, 64, 64, 8, 2),
  ("keys", 128, False): AttentionTiles(64, 64, 128, 8, 2),
  ("keys", 256, False): AttentionTiles(32, 64, 64, 8, 2),
  ("keys", 64, True): AttentionTiles(32, 32, 32, 4, 1),
  ("keys", 128, True): AttentionTiles(32, 32, 32, 4, 1),
  ("keys", 256, True): AttentionTiles(32, 32, 32, 4, 1),
}


class Mask(NamedTuple):
  """Reads of a query within its document: nothing after itself if causal, `window` tokens on either
  side.
  """

  causal: bool
  window: int | None


class AttentionPlan(NamedTuple):
  """Sizes of a call, and how one kernel cuts them."""

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

  def cut(self, kernel: str) -> "AttentionPlan":
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


def plan(q, k, v, mask: Mask, documents: bool, scale: float) -> AttentionPlan:
  (B, T, H, K), (HK, V) = q.shape, v.shape[2:]
  return AttentionPlan(B, T, H, HK, K, V, mask, documents, scale, tiles.operand_dtype(q, k, v))


# --- which tokens read which ----------------------------------------------------------------------


class AttentionDocuments(NamedTuple):
  """Documents of tokens."""

  document: Int[Array, "B T"]  # of each token; -1 for padding
  position: Int[Array, "B T"]  # number of tokens up to it, padding not counted
  start: Int[Array, "B T"]  # first token of its document
  end: Int[Array, "B T"]  # behind the last token of its document


def documents_of(document: Int[Array, "B T"], is_token: Bool[Array, "B T"]) -> AttentionDocuments:
  """Returns the documents of tokens whose padding has the number of the document before it."""
  T, index = document.shape[1], jnp.arange(document.shape[1], dtype=jnp.int32)
  begins = jnp.pad(document[:, 1:] != document[:, :-1], ((0, 0), (1, 0)))
  start = lax.cummax(jnp.where(begins, index, 0), axis=1)
  last = lax.cummin(jnp.where(begins, index - 1, T - 1), axis=1, reverse=True)
  last = jnp.pad(last[:, 1:], ((0, 0), (0, 1)), constant_values=T - 1)
  token_from = lax.cummin(jnp.where(is_token, index, T - 1), axis=1, reverse=True)
  token_upto = lax.cummax(jnp.where(is_token, index, 0), axis=1)
  at = functools.partial(jnp.take_along_axis, axis=1)
  position = jnp.cumsum(is_token, axis=1, dtype=jnp.int32)
  return AttentionDocuments(
    jnp.where(is_token, document, -1), position, at(token_from, start), at(token_upto, last) + 1
  )


class Blocks(NamedTuple):
  """Blocks that a program goes through: from `first` to before `past`. [B or 1, programs of a
  head].
  """

  first: Int[Array, "B N"]
  past: Int[Array, "B N"]


def reach(p: AttentionPlan, documents: AttentionDocuments | None) -> tuple[Array, Array]:
  """Returns the smallest range of tokens that holds all that a token reads if not causal; empty for
  padding.

  The same range holds all tokens that read it.
  """
  T, window = p.T, p.mask.window
  index = jnp.arange(T, dtype=jnp.int32)[None]
  if documents is None:
    lo, hi = jnp.zeros_like(index), jnp.full_like(index, T)
    return (
      (lo, hi)
      if window is None
      else (jnp.maximum(index - window + 1, 0), jnp.minimum(index + window, T))
    )
  document, position, lo, hi = documents
  if window is not None:
    search = lambda side, offset: jax.vmap(functools.partial(jnp.searchsorted, side=side))(
      position, position + offset
    )
    lo = jnp.maximum(lo, search("right", -window).astype(jnp.int32))
    hi = jnp.minimum(hi, search("left", window - 1).astype(jnp.int32) + 1)
  return jnp.where(document < 0, T, lo), jnp.where(document < 0, 0, hi)


def blocks(p: AttentionPlan, documents: AttentionDocuments | None, keys: bool) -> Blocks:
  """Returns the blocks of keys that each block of queries reads; with `keys`, the blocks of queries
  that read each of keys.
  """
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
  """Places of the tokens of a block, as a row or a column."""

  index: Array
  position: Array
  document: Array | None


def where(p: AttentionPlan, start, size: int, axis: int, document_ref, position_ref) -> Where:
  """Returns the places of a block: a column for axis 0, a row for axis 1."""
  lay = lambda x: x[:, None] if axis == 0 else x[None, :]
  index = start + jnp.arange(size, dtype=jnp.int32)
  if not p.documents:
    return Where(lay(index), lay(index), None)
  at, tokens = pl.ds(start, size), p.tokens(start, size)
  document = load(document_ref.at[at], tokens, other=-1)
  return Where(lay(index), lay(load(position_ref.at[at], tokens)), lay(document))


def masked(p: AttentionPlan, queries: Where, keys: Where, x: Array, other: float) -> Array:
  """Returns x where the query reads the key, else `other`."""
  distance = queries.position - keys.position
  window, keep = p.mask.window, []
  if p.T % p.S:
    keep.append(keys.index < p.T)
  if queries.document is not None and keys.document is not None:
    keep.append((queries.document == keys.document) & (keys.document >= 0))
  if p.mask.causal:
    keep.append(distance >= 0)
  if window is not None:
    keep.append(distance < window)
    if not p.mask.causal:
      keep.append(distance > -window)
  return jnp.where(functools.reduce(jnp.logical_and, keep), x, other) if keep else x


# --- blocks of arrays -----------------------------------------------------------------------------


class AttentionPlace(NamedTuple):
  """Part of the arrays that a program works on."""

  b: Array
  h: Array
  block: Array
  tile: Array


def places(heads: int, blocks: int, columns: int, backwards: bool = False):
  """Returns the map from a program's number to its place.

  With `backwards` the last blocks come first: causal queries read most there, so the longest
  programs start first.
  """

  def place(program) -> AttentionPlace:
    block = program // columns % blocks
    program, tile = program // columns // blocks, program % columns
    return AttentionPlace(
      program // heads, program % heads, blocks - 1 - block if backwards else block, tile
    )

  return place


def specs_of(p: AttentionPlan, place, keys: bool) -> dict[str, pl.BlockSpec]:
  """Returns BlockSpecs by kind of array.

  A block has all tokens of one head; with `keys`, of a group of heads of queries.
  """
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
  """Returns left right^T, both by tiles of columns."""
  body = lambda i, total: total + product.inner(left(i), right(i))
  return loop_tiles(count, body, jnp.zeros(shape, f32))


def tile_of(ref, p: AttentionPlan, start, size: int, width: int, mask, head=None):
  """Returns the map from a number to that tile of columns of a block of tokens; of one head if the
  array has several.
  """
  at, tokens = pl.ds(start, size), p.tokens(start, size)
  rows = (at,) if head is None else (at, head)
  return lambda i: load(ref.at[(*rows, pl.ds(i * width, width))], tile_mask(tokens, mask(i)))


def held(count: int, tile):
  """Returns the same map for a block that stays while others pass: a single tile is loaded once."""
  if count > 1:
    return tile
  x = tile(0)
  return lambda i: x
