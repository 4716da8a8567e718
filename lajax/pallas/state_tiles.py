"""A state that one program has all keys of, as a list of tiles of K; so are the keys of a chunk."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas.plan import Plan
from lajax.pallas.tiles import Products, both, give, inside, iota, take

f32 = jnp.float32


def decays(p: Plan, g_ref, at, tokens, *kinds: Callable[[Array], Array]) -> list[Array | float]:
  """By token [C 1], of these kinds; 1 with one a channel, which keys and queries have in them."""
  if p.gate != "head":
    return [1.0 for _ in kinds]
  g = take(g_ref.at[at], tokens).astype(f32)
  return [kind(g)[:, None] for kind in kinds]


def total_decay(p: Plan, g_ref, at, tokens, part) -> Array:
  """Of a chunk and a tile of K, [] or [K 1]."""
  if p.gate == "none":
    return jnp.ones((), f32)
  if p.gate == "head":
    return jnp.exp(jnp.sum(take(g_ref.at[at], tokens).astype(f32)))
  rows, keys = part
  return jnp.exp(jnp.sum(take(g_ref.at[at, rows], both(tokens, keys)).astype(f32), axis=0))[:, None]


def parts_of(p: Plan, i: Array | int = 0) -> list[tuple[Any, Array | None]]:
  """Where each part of the i-th tile of K is, or each tile of all of K, and which of its columns are keys."""
  if p.k_part == 0:
    return [(pl.ds(i * p.k_tile, p.k_tile), p.keys(i)) for i in range(p.NK)]
  starts = range(0, p.k_tile, p.k_part)
  keys = lambda start: inside(i * p.k_tile + start, p.k_part, p.K, p.K % p.k_tile == 0)
  return [(pl.ds(start, p.k_part), keys(start)) for start in starts]


def take_parts(ref, at, rows: Array | None, parts) -> list[Array]:
  """[rows K] of a ref, by tiles of K."""
  return [take(ref.at[at, columns], both(rows, keys)) for columns, keys in parts]


def take_state(ref, parts, values: Array | None) -> list[Array]:
  return [take(ref.at[rows, :], both(keys, values)) for rows, keys in parts]


def give_state(ref, S: list[Array], parts, values: Array | None, *at) -> None:
  for x, (rows, keys) in zip(S, parts, strict=True):
    give(ref.at[(*at, rows, slice(None))], x, both(keys, values))


def keep_state(p: Plan, ref, S: list[Array], parts, values: Array | None, n: Array) -> None:
  """The state before chunk n, where that is one of those that are kept."""
  if p.every > 1:
    wanted = jnp.full(p.v_tile, lax.rem(n, jnp.int32(p.every))) == 0
    values = wanted if values is None else wanted & values
  give_state(ref, S, parts, values, lax.div(n, jnp.int32(p.every)))


def identity_from(p: Plan, start: int, column: Array) -> list[Array]:
  """A state of zeros in which the identity begins at that column, of which a tile has those of `column`."""
  rows = (i * p.k_tile + iota((p.k_tile, p.v_tile), 0) for i in range(p.NK))
  return [jnp.where(row == column[None, :] - start, 1.0, 0.0).astype(f32) for row in rows]


def scores_of(product: Products, x: list[Array], y: list[Array]) -> Float[Array, "C C"]:
  return sum(product.inner(a, b) for a, b in zip(x[1:], y[1:], strict=True)) + product.inner(
    x[0], y[0]
  )


def read_state(product: Products, x: list[Array], S: list[Array]) -> Float[Array, "C V"]:
  return sum(product(a, b) for a, b in zip(x[1:], S[1:], strict=True)) + product(x[0], S[0])
