"""Recall beyond MQAR: keys that are written again, noise, keys of two tokens.

Token 0 is blank. An answer never stands behind its query: it can only be read
where the row wrote it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_number, check_whole
from lajax.tasks.draws import (
  below,
  distinct,
  draw_bits,
  indices,
  interleave,
  place,
  power_law,
  shuffled,
)
from lajax.tasks.mixture import one_of_pairs, read_back, solve_first, vocabulary_of
from lajax.tasks.spec import Config, Rows, TaskSpec


def overwrite(
  key, batch: int, *, vocab_size: int, length: int, pairs: int, rewritten: int | None = None,
  writes: int = 2, power: float = 0.01,
) -> Rows:  # fmt: skip
  """Makes rows in which keys are written several times; the last value counts.

      W = pairs + rewritten (writes - 1)

  W key-value pairs come in random order, so that writes of different keys are interleaved and a
  value is written over at any age. Each key is then asked for once, in slots as in `mqar`. All W
  values of a row differ, so that `stale_rate` can tell an older value from other errors.

  Args:
    key, batch, power: as in `mqar`.
    vocab_size: V; keys are 1 … V//2-1, values V//2 … V-1, of which there must be W.
    length: L, at least 2 W + 2 `pairs`. L - 2 W must be even.
    pairs: K, the number of keys of a row, and of queries.
    rewritten: how many of the keys are written `writes` times, the others once. None is all.
    writes: how often a key is written.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at the K queries.

  Raises:
    ValueError: a size is no whole number, the row or the vocabulary is too small.

  Example:
    Key 1 is written with 6, then 5, and key 4 with 7, then 9.

    >>> inputs, targets, mask = overwrite(
    ...   jax.random.key(0), 1, vocab_size=10, length=12, pairs=2)
    >>> print(inputs, targets[mask])
    [[1 6 4 7 1 5 4 9 4 0 1 0]] [9 5]
  """
  check_key("key", key)
  batch = check_whole("batch", batch)
  pairs, writes = check_whole("pairs", pairs), check_whole("writes", writes)
  rewritten = pairs if rewritten is None else check_whole("rewritten", rewritten, 0, pairs)
  total = pairs + rewritten * (writes - 1)
  _check_vocabulary(vocab_size, 2 * max(pairs + 1, total), f"{pairs} keys and {total} values")
  _check_length(length, 2 * total + 2 * pairs, even=True)
  power = check_number("power", power, -1e6, 1e6)
  return _overwrite(key, batch, length, pairs, rewritten, writes, vocab_size, power)


def noisy_recall(
  key, batch: int, *, vocab_size: int, length: int, pairs: int, noise_tokens: int = 16
) -> Rows:
  """Makes rows in which pairs and queries lie scattered among noise that may be forgotten.

  A row is L / 2 slots of two tokens. Of 2K slots, drawn uniformly, the first K hold a pair each and
  the last K a query each: a key, in random order, and a noise token. All other tokens are noise,
  of a vocabulary of its own: a model can learn to write nothing there.

  Args:
    key, batch: as in `mqar`.
    vocab_size: V without noise; keys are 1 … V//2-1, values V//2 … V-1. Noise is V … V+noise-1.
    length: L, even, at least 4 `pairs`. The longer, the more noise.
    pairs: K, the number of pairs of a row, and of queries.
    noise_tokens: size of the vocabulary of noise.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at the K queries.

  Raises:
    ValueError: a size is no whole number, the row or the vocabulary is too small.

  Example:
    Key 2 has the value 3, and 1 the value 5; 6, 7 and 8 are noise.

    >>> inputs, targets, mask = noisy_recall(
    ...   jax.random.key(0), 1, vocab_size=6, length=12, pairs=2, noise_tokens=3)
    >>> print(inputs, targets[mask])
    [[2 3 1 5 1 8 8 8 2 6 6 7]] [5 3]

  After the noisy recall of MAD, arXiv:2403.17844, which has noise tokens of their own too; here the
  queries follow all pairs, as in `mqar`, and the noise is not a fixed share.
  """
  check_key("key", key)
  batch, pairs = check_whole("batch", batch), check_whole("pairs", pairs)
  noise_tokens = check_whole("noise_tokens", noise_tokens)
  _check_vocabulary(vocab_size, 2 * pairs + 2, f"{pairs} keys")
  _check_length(length, 4 * pairs, even=True)
  return _noisy(key, batch, length, pairs, vocab_size, noise_tokens)


def compositional(
  key, batch: int, *, vocab_size: int, length: int, pairs: int, parts: int, power: float = 0.01
) -> Rows:
  """Makes rows of recall whose keys are two tokens: neither of the two gives the value.

  K triples (a, b, value) come first, then slots of three tokens. K slots are drawn as in `mqar` and
  hold a key (a, b) each; the target stands at b. Both tokens of a key come from one alphabet of M
  parts, so (a, b) and (b, a) are different keys, and with K > M parts must be shared.

  Args:
    key, batch, power: as in `mqar`.
    vocab_size: V; parts are 1 … M, values M+1 … V-1.
    length: L, at least 6 `pairs`. Up to two tokens at the end are blank where (L - 3K) is no
      multiple of 3.
    pairs: K, the number of triples of a row, and of queries; at most M^2.
    parts: M, the number of tokens that keys are made of.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at the second token of a query.

  Raises:
    ValueError: a size is no whole number, the row, the alphabet or the vocabulary is too small.

  Example:
    The key (2, 2) has the value 3, and (1, 1) the value 5.

    >>> inputs, targets, mask = compositional(
    ...   jax.random.key(0), 1, vocab_size=6, length=12, pairs=2, parts=2)
    >>> print(inputs, targets[mask])
    [[2 2 3 1 1 5 2 2 0 1 1 0]] [3 5]
  """
  check_key("key", key)
  batch = check_whole("batch", batch)
  pairs, parts = check_whole("pairs", pairs), check_whole("parts", parts, high=2**15)
  if pairs > parts**2:
    raise ValueError(
      f"`pairs` must be at most parts^2 = {parts**2}, the number of keys; got {pairs}. "
      f"Use at least {math.isqrt(pairs - 1) + 1} parts."
    )
  _check_vocabulary(vocab_size, 1 + parts + pairs, f"a blank, {parts} parts and {pairs} values")
  _check_length(length, 6 * pairs)
  power = check_number("power", power, -1e6, 1e6)
  return _compositional(key, batch, length, pairs, parts, vocab_size, power)


def _check_vocabulary(vocab_size, least: int, contents: str) -> None:
  if check_whole("vocab_size", vocab_size) < least:
    raise ValueError(
      f"`vocab_size` must be at least {least}, to hold {contents}; got {vocab_size}. "
      "Use a larger vocabulary or fewer pairs."
    )


def _check_length(length, least: int, *, even: bool = False) -> None:
  if check_whole("length", length) < least or (even and length % 2):
    raise ValueError(
      f"`length` must be {'even and ' * even}at least {least}, so that all pairs and queries fit; "
      f"got {length}. Use a longer row or fewer pairs."
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6, 7))
def _overwrite(key, batch, length, pairs, rewritten, writes, vocab_size, power):
  half, total = vocab_size // 2, pairs + rewritten * (writes - 1)
  counts = (pairs, total, total, length // 2 - total)
  of_keys, of_values, of_order, of_slots = draw_bits(key, batch, *counts)
  keys = 1 + distinct(of_keys, half - 1)
  values = half + distinct(of_values, vocab_size - half)
  writer = jnp.concatenate([indices(pairs), indices(rewritten).repeat(writes - 1)])
  writer = writer[shuffled(of_order)]  # [B W]: which of the K keys each write is of
  own = writer[:, None] == indices(pairs)[None, :, None]  # [B K W]
  time = indices(total)[None, None]
  is_last = time == jnp.where(own, time, -1).max(2, keepdims=True)
  last = jnp.where(is_last, values[:, None], 0).sum(2, dtype=jnp.int32)
  written = interleave(jnp.take_along_axis(keys, writer, 1), values)
  blank = jnp.zeros((batch, length), jnp.int32).at[:, : 2 * total].set(written)
  asked = 2 * total + 2 * power_law(of_slots, pairs, power)
  targets = place(jnp.zeros_like(blank), asked, last)
  return place(blank, asked, keys), targets, targets > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _noisy(key, batch, length, pairs, vocab_size, noise_tokens):
  half = vocab_size // 2
  counts = (pairs, pairs, pairs, length // 2, length)
  of_keys, of_values, of_order, of_slots, of_noise = draw_bits(key, batch, *counts)
  keys = 1 + distinct(of_keys, half - 1)
  values = half + distinct(of_values, vocab_size - half)
  slot = 2 * jnp.sort(power_law(of_slots, 2 * pairs, 1.0), axis=1)  # power 1: uniform
  order = shuffled(of_order)
  written, asked = slot[:, :pairs], slot[:, pairs:]
  noise = vocab_size + below(of_noise, noise_tokens)
  inputs = place(place(noise, written, keys), written + 1, values)
  inputs = place(inputs, asked, jnp.take_along_axis(keys, order, 1))
  targets = place(jnp.zeros_like(noise), asked, jnp.take_along_axis(values, order, 1))
  return inputs, targets, targets > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _compositional(key, batch, length, pairs, parts, vocab_size, power):
  counts = (pairs, pairs, length // 3 - pairs)
  of_keys, of_values, of_slots = draw_bits(key, batch, *counts)
  names = distinct(of_keys, parts**2)
  first, second = 1 + names // parts, 1 + names % parts
  values = 1 + parts + distinct(of_values, vocab_size - 1 - parts)
  written = jnp.stack([first, second, values], -1).reshape(batch, -1)
  blank = jnp.zeros((batch, length), jnp.int32).at[:, : 3 * pairs].set(written)
  asked = 3 * pairs + 3 * power_law(of_slots, pairs, power)
  targets = place(jnp.zeros_like(blank), asked + 1, values)
  return place(place(blank, asked, first), asked + 1, second), targets, targets > 0


def _solve_overwrite(inputs: np.ndarray, config: Config) -> np.ndarray:
  """Answers with the last value that stood behind each token."""
  return np.array(
    [read_back(row, 1, latest=True, least=config["vocab_size"] // 2) for row in inputs]
  )


def _solve_compositional(inputs: np.ndarray, config: Config) -> np.ndarray:
  """Answers with the token behind the first occurrence of the last two tokens."""
  return np.array([read_back(row, width=2, latest=False) for row in inputs])


SPECS = (
  TaskSpec(
    overwrite, _solve_overwrite, one_of_pairs, vocabulary_of,
    dict(vocab_size=64, length=64, pairs=8),
  ),
  TaskSpec(
    noisy_recall, solve_first, one_of_pairs, vocabulary_of,
    dict(vocab_size=64, length=256, pairs=8, noise_tokens=16),
  ),
  TaskSpec(
    compositional, _solve_compositional, one_of_pairs, vocabulary_of,
    dict(vocab_size=64, length=64, pairs=8, parts=4),
  ),
)  # fmt: skip
