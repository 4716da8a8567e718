"""Packed documents: where each one begins, and which tokens are padding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class Packing(NamedTuple):
  """How the tokens of each row fall into documents."""

  document: Int[Array, "B T"]  # 0 for the row's first document, one more after each change of id
  is_token: Bool[Array, "B T"]  # False for padding


def packing(segment_ids: Int[Array, "B T"]) -> Packing:
  """Returns the packing that `segment_ids` describe.

  A change of id between two tokens begins a new document. Padding (id < 0) neither begins nor ends
  one: it counts to the document of the token before it.
  """
  is_token = segment_ids >= 0
  position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  last_token = lax.cummax(jnp.where(is_token, position, -1), axis=1)
  before = jnp.concatenate([jnp.full_like(last_token[:, :1], -1), last_token[:, :-1]], axis=1)
  id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  begins = is_token & (before >= 0) & (segment_ids != id_before)
  return Packing(jnp.cumsum(begins, axis=1, dtype=jnp.int32), is_token)


def blank_padding(tokens, is_token: Bool[Array, "B T"]):
  """Replaces the padding of arrays [B T ..] by zeros, NaN included: a token of zeros is the identity."""
  blank = lambda x: jnp.where(
    is_token.reshape(is_token.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)
  )
  return jax.tree.map(blank, tokens)


def previous(document: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Document of the token before each; the initial state belongs to the first document."""
  return jnp.concatenate([jnp.zeros_like(document[:, :1]), document[:, :-1]], axis=1)
