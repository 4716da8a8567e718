"""States and keys of which one program holds all of K: lists of tiles of K."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas.plan import MatrixPlan
from lajax.pallas.tiles import Products, inside, iota, load, store, tile_mask

f32 = jnp.float32


def decays(
  p: MatrixPlan, g_ref, at, tokens, *kinds: Callable[[Array], Array]
) -> list[Array | float]:
  """Returns decays [C 1] per token, one for each kind such as `tiles.from_start_per_head`.

  They are 1 with decays per channel, which the keys and queries already contain.
  """
  if p.gate != "head":
    return [1.0 for _ in kinds]
  g = load(g_ref.at[at], tokens).astype(f32)
  return [kind(g)[:, None] for kind in kinds]


def total_decay(p: MatrixPlan, g_ref, at, tokens, part) -> Array:
  """Returns the decay of a whole chunk for a tile of K, [] or [K 1]."""
  if p.gate == "none":
    return jnp.ones((), f32)
  if p.gate == "head":
    return jnp.exp(jnp.sum(load(g_ref.at[at], tokens).astype(f32)))
  rows, keys = part
  return jnp.exp(jnp.sum(load(g_ref.at[at, rows], tile_mask(tokens, keys)).astype(f32), axis=0))[
    :, None
  ]


def parts_of(p: MatrixPlan, i: Array | int = 0) -> list[tuple[Any, Array | None]]:
  """Returns the slice and the mask of each piece of the i-th tile of K; of each tile of K where
  there are no pieces.
  """
  if p.k_part == 0:
    return [(pl.ds(i * p.k_tile, p.k_tile), p.keys(i)) for i in range(p.NK)]
  starts = range(0, p.k_tile, p.k_part)
  keys = lambda start: inside(i * p.k_tile + start, p.k_part, p.K, p.K % p.k_tile == 0)
  return [(pl.ds(start, p.k_part), keys(start)) for start in starts]


def load_parts(ref, at, rows: Array | None, parts) -> list[Array]:
  """Loads tokens `at` of keys, by tiles of K."""
  return [load(ref.at[at, columns], tile_mask(rows, keys)) for columns, keys in parts]


def load_state(ref, parts, values: Array | None) -> list[Array]:
  return [load(ref.at[rows, :], tile_mask(keys, values)) for rows, keys in parts]


def store_state(ref, S: list[Array], parts, values: Array | None, *at) -> None:
  for x, (rows, keys) in zip(S, parts, strict=True):
    store(ref.at[(*at, rows, slice(None))], x, tile_mask(keys, values))


def store_chunk_state(
  p: MatrixPlan, ref, S: list[Array], parts, values: Array | None, n: Array
) -> None:
  """Stores the state before chunk n, if n is a multiple of `p.every`."""
  if p.every > 1:
    wanted = jnp.full(p.v_tile, lax.rem(n, jnp.int32(p.every))) == 0
    values = wanted if values is None else wanted & values
  store_state(ref, S, parts, values, lax.div(n, jnp.int32(p.every)))


def identity_from(p: MatrixPlan, start: int, column: Array) -> list[Array]:
  """Returns the columns `column` of a state that holds the identity in columns `start` to start +
  K, else zeros.
  """
  rows = (i * p.k_tile + iota((p.k_tile, p.v_tile), 0) for i in range(p.NK))
  return [jnp.where(row == column[None, :] - start, 1.0, 0.0).astype(f32) for row in rows]


def scores_of(product: Products, x: list[Array], y: list[Array]) -> Float[Array, "C C"]:
  """Returns x y^T, by tiles of K."""
  return sum(product.inner(a, b) for a, b in zip(x[1:], y[1:], strict=True)) + product.inner(
    x[0], y[0]
  )


def read_state(product: Products, x: list[Array], S: list[Array]) -> Float[Array, "C V"]:
  """Returns x S, by tiles of K."""
  return sum(product(a, b) for a, b in zip(x[1:], S[1:], strict=True)) + product(x[0], S[0])
