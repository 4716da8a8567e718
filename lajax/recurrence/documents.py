"""Packed documents: where they begin, which tokens are padding, what is not finite in them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from lajax._numerics import NEGLIGIBLE, vary_like


class Packing(NamedTuple):
  """The division of each row's tokens into documents."""

  document: Int[Array, "B T"]  # 0 for the row's first document, one more after each change of id
  is_token: Bool[Array, "B T"]  # False for padding


def packing(segment_ids: Int[Array, "B T"]) -> Packing:
  """Returns the packing that `segment_ids` describe.

  A change of id between two tokens begins a new document. Padding (id < 0) neither begins nor ends
  one: it counts to the document of the token before it.
  """
  is_token = segment_ids >= 0
  upto = last_token(is_token)
  before = jnp.concatenate([jnp.full_like(upto[:, :1], -1), upto[:, :-1]], axis=1)
  id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  begins = is_token & (before >= 0) & (segment_ids != id_before)
  return Packing(jnp.cumsum(begins, axis=1, dtype=jnp.int32), is_token)


def last_token(is_token: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the last place up to each that is not padding; -1 where there is none."""
  position = jnp.arange(is_token.shape[1], dtype=jnp.int32)[None]
  return lax.cummax(jnp.where(is_token, position, -1), axis=1)


def blank_padding(tokens, is_token: Bool[Array, "B T"]):
  """Returns arrays [B T ..] with zeros in the place of padding, also of NaN in padding.

  A token of zeros is the identity.
  """
  blank = lambda x: jnp.where(
    is_token.reshape(is_token.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)
  )
  return jax.tree.map(blank, tokens)


def without_padding(o: Array, is_token: Bool[Array, "B T"] | None) -> Array:
  """Returns outputs [B T ..], zeros at padding; the outputs themselves without a mask."""
  return o if is_token is None else blank_padding(o, is_token)


def taken(first: Array, x: Array, place: Int[Array, "B N"]) -> Array:
  """Returns the entries of x [B T ..] at places counted from 1, and `first` [B ..] at place 0."""
  x = jnp.concatenate([first[:, None].astype(x.dtype), x], axis=1)
  return jnp.take_along_axis(x, place.reshape(*place.shape, *(1,) * (x.ndim - 2)), axis=1)


def at_last_token(first: Array, x: Array, is_token: Bool[Array, "B T"]) -> Array:
  """Returns the entry of x [B T ..] at the last token of each row; `first` [B ..] without one."""
  place = jnp.arange(1, is_token.shape[1] + 1, dtype=jnp.int32)[None]
  last = jnp.where(is_token, place, 0).max(1, keepdims=True, initial=0)
  return taken(first, x, last)[:, 0]


def positions(
  document: Int[Array, "B T"], is_token: Bool[Array, "B T"], first: Int[Array, "B"]
) -> Int[Array, "B T"]:
  """Returns the position of each token in its document, and of padding that of the token before it.

  `document` numbers the documents of a row; document 0 had `first` tokens before the row began.
  """
  rank = jnp.cumsum(is_token, axis=1, dtype=first.dtype) - 1  # among the tokens that are no padding
  begins = is_token & (document != previous(document))
  start = lax.cummax(jnp.where(begins, rank, 0), axis=1)
  return rank - start + jnp.where(document == 0, first[:, None], 0)


def previous(document: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the document of the token before each; the initial state belongs to the first one."""
  return jnp.concatenate([jnp.zeros_like(document[:, :1]), document[:, :-1]], axis=1)


# --- numbers that are not finite -----------------------------------------------------------------


def not_finite(tokens, HV: int, log_decays: tuple[str, ...] = ()) -> Bool[Array, "B T HV"]:
  """Returns which tokens [B T H or HV ..] have a number that is not finite, for each value head.

  In fields that `log_decays` names, -inf counts as finite.
  """

  def mark(path, x):
    x = jnp.maximum(x, NEGLIGIBLE) if _is_log(path, log_decays) else x
    x = any_not_finite(x, 3)
    return x if x.shape[2] == HV else jnp.repeat(x, HV // x.shape[2], axis=2)

  return functools.reduce(jnp.logical_or, jax.tree.leaves(jax.tree.map_with_path(mark, tokens)))


def any_not_finite(x: Array, axes: int) -> Array:
  """Returns whether entries of x along its first axes hold a number that is not finite.

  This is the sum over all other axes, of numbers small enough that no sum overflows: XLA's CPU
  compiler makes a faster loop of a product with a vector than of a reduction.
  """
  if x.ndim > axes:
    x = x.reshape(*x.shape[:axes], -1)
    weights = vary_like(jnp.full((x.shape[-1],), 2.0**-20, x.dtype), x)
    x = jnp.matmul(x, weights, precision=lax.Precision.HIGHEST)
  return ~jnp.isfinite(x)


def finite(tokens, log_decays: tuple[str, ...] = ()):
  """Returns the tokens with 0 in the place of numbers that are not finite."""
  return jax.tree.map_with_path(
    lambda path, x: jnp.where(_is_finite(path, x, log_decays), x, jnp.zeros((), x.dtype)), tokens
  )


def _is_finite(path, x: Array, log_decays: tuple[str, ...]) -> Array:
  return x < jnp.inf if _is_log(path, log_decays) else jnp.isfinite(x)


def _is_log(path, log_decays: tuple[str, ...]) -> bool:
  return bool(path) and getattr(path[-1], "name", None) in log_decays


def reached(
  bad: Bool[Array, "B T HV"],
  bad_state: Bool[Array, "B HV"],
  document: Int[Array, "B T"] | None = None,
  *,
  reverse: bool = False,
) -> Bool[Array, "B T HV"]:
  """Returns which tokens are bad, or come after a bad token or a bad first state in their document.

  With `reverse`, time runs backwards: the state is the last one, and tokens come before a bad one.
  """
  position = jnp.arange(bad.shape[1], dtype=jnp.int32)[None, :, None]
  if document is None:  # compares with one number per row: such a mask is cheap to form again
    if reverse:
      last = jnp.where(bad, position, -1).max(1)
      return position <= jnp.where(bad_state, bad.shape[1], last)[:, None]
    first = jnp.where(bad, position, bad.shape[1]).min(1)
    return position >= jnp.where(bad_state, 0, first)[:, None]
  if reverse:
    bad, document = jnp.flip(bad, 1), jnp.flip(document[:, -1:] - document, 1)
  begins = (document != previous(document))[..., None]
  start = lax.cummax(jnp.where(begins, position, 0), axis=1)
  after = lax.cummax(jnp.where(bad, position, -1), axis=1) >= start
  after = after | (bad_state[:, None] & (document == 0)[..., None])
  return jnp.flip(after, 1) if reverse else after
