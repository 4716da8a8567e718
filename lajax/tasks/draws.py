"""Random draws that the tasks share, all from random bits: one call of the generator per task.

Bits are uint32 [B N]. Row i of the bits does not depend on B, so a larger batch continues a
smaller one.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def draw_bits(key, batch: int, *counts: int):
  """Returns uint32 [B n] for each n of `counts`.

  One call makes all bits: a call of the generator costs more to compile than most of a task.
  """
  bits = jax.random.bits(key, (batch, sum(counts)), jnp.uint32)
  ends = [sum(counts[: n + 1]) for n in range(len(counts) - 1)]
  return jnp.split(bits, ends, axis=1)


def indices(count: int):
  """Returns 0 … count-1 as int32, with and without x64."""
  return jnp.arange(count, dtype=jnp.int32)


def below(bits, bound):
  """Makes uniform numbers of 0 … bound-1. The bias of the remainder is below bound / 2^32."""
  return (bits % jnp.asarray(bound, jnp.uint32)).astype(jnp.int32)


def uniform(bits):
  """Makes uniform float32 numbers strictly between 0 and 1."""
  return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def choose(bits, weights):
  """Draws numbers of 0 … n-1 with probabilities proportional to n static weights."""
  total, edge, chosen = sum(weights), 0.0, jnp.zeros(bits.shape, jnp.int32)
  x = uniform(bits)
  for weight in weights[:-1]:
    edge += weight / total
    chosen += (x > edge).astype(jnp.int32)
  return chosen


def shuffled(bits):
  """Returns a random permutation of 0 … n-1 in each row."""
  return jnp.argsort(bits, axis=1).astype(jnp.int32)


def distinct(bits, size):
  """Draws [B K] different numbers of 0 … size-1, every ordered choice equally likely.

  Draw i names one of the size - i numbers that are left, by its rank among them (a Lehmer code).
  The earlier draws are then put back, the latest first. This turns ranks into numbers: a number at
  or above the one put back moves up by one.
  """
  count = bits.shape[1]
  order = indices(count)[None]
  rank = below(bits, size - order)

  def put_back(i, number):
    j = count - 1 - i
    return jnp.where((order > j) & (number >= rank[:, j, None]), number + 1, number)

  return jax.lax.fori_loop(0, count, put_back, rank)


def power_law(bits, count: int, power, slots=None):
  """Draws [B count] different slots, one after the other among those left.

  The probability of a slot is proportional to (slot + 1)^(power - 1). The largest values of log p +
  Gumbel noise, from the largest down, are exactly such draws in their order. `slots` [B 1] leaves
  each row its first slots only: the draws beyond their number have no meaning.
  """
  number = jnp.arange(1, bits.shape[1] + 1, dtype=jnp.float32)
  log_p = (jnp.asarray(power, jnp.float32) - 1) * jnp.log(number)
  score = log_p[None] - jnp.log(-jnp.log(uniform(bits)))
  if slots is not None:
    score = jnp.where(number[None] <= slots.astype(jnp.float32), score, -jnp.inf)
  return jax.lax.top_k(score, count)[1].astype(jnp.int32)


def interleave(first, second: ArrayLike = 0):
  """Joins [B N] and [B N] to [B 2N], alternately."""
  return jnp.stack([first, jnp.broadcast_to(second, first.shape)], -1).reshape(len(first), -1)


def place(into, positions, values):
  """Writes values [B N] at positions [B N] of each row; a position of at least L is left out."""
  rows = indices(len(into))[:, None]
  return into.at[rows, positions].set(values, mode="drop")
