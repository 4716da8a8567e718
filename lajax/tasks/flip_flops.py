"""Flip-flops: the bit written last, with and without undoing writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_whole
from lajax.tasks.draws import below, choose, draw_bits, indices, interleave, uniform
from lajax.tasks.spec import Config, Rows, TaskSpec

# Tokens 0 and 1 are the bits.
WRITE, IGNORE, READ, UNDO = 2, 3, 4, 5
P_IGNORE, P_READ, P_WRITE = 0.8, 0.1, 0.1
P_UNDO = P_WRITE / 2  # where a write can be undone, a write has the other half


def flip_flop(key, batch: int, *, length: int) -> Rows:
  """Makes rows of instructions, each with a bit: write it, ignore it, or read the last one written.

  The first instruction writes and the last one reads; any other ignores with probability .8,
  reads with .1 and writes with .1. The target at a read is the bit written last. The right bit
  follows in the row, as a language model sees it.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, even, at least 4. Tokens: 0 and 1 are the bits, 2 write, 3 ignore, 4 read.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at every read.

  Raises:
    ValueError: `length` is odd or below 4.

  Example:
    1 is written (2), bits are ignored (3), and 1 is read (4) twice.

    >>> inputs, targets, mask = flip_flop(jax.random.key(0), 1, length=12)
    >>> print(inputs, targets[mask])
    [[2 1 4 1 3 1 3 0 3 1 4 1]] [1 1]

  Liu et al., arXiv:2306.00946, FFL(.8).
  """
  check_key("key", key)
  batch, length = check_whole("batch", batch), check_whole("length", length, 4)
  if length % 2:
    raise ValueError(f"`length` must be even, pairs of instruction and bit; got {length}.")
  return _flip_flop(key, batch, length)


def undo_flip_flop(key, batch: int, *, length: int, undos: int | None = None) -> Rows:
  """Makes rows of a flip-flop whose writes can be undone: a read gives the bit on top of a stack.

  An instruction is a write with its bit, an ignored bit, a read (one token, the bit does not
  follow) or an undo (one token), which removes the last write that is left. The probabilities are
  .05, .8, .1 and .05; where one write is left, there is no undo and the write has .1. The row
  begins with a write and ends with a read; where one token is left before that, it is a read or an
  undo.

  With `undos` D, the row tests depth instead: D + 1 writes, D undos, ignored bits, and the read.
  Where one token is left over, it is a read behind the undos.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, at least 3, or 3 `undos` + 3. Tokens: 0 and 1 are the bits, 2 write, 3 ignore,
      4 read, 5 undo.
    undos: D of the test of depth, or None.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at every read.

  Raises:
    ValueError: `length` is too small, or `undos` is no whole number of at least 1.

  Example:
    1, 0 and 0 are written, two writes are undone (5), and 1 is left.

    >>> inputs, targets, mask = undo_flip_flop(jax.random.key(0), 1, length=12, undos=2)
    >>> print(inputs, targets[mask])
    [[2 1 2 0 2 0 5 5 4 3 1 4]] [1 1]

  Zhou, arXiv:2604.05923, and its public generator: trained on lengths 1 to 50. Rows here all have
  one length; each read is scored, so shorter prefixes are trained too.
  """
  check_key("key", key)
  batch = check_whole("batch", batch)
  if undos is None:
    return _undo(key, batch, check_whole("length", length, 3))
  undos = check_whole("undos", undos, high=2**29)
  return _undo_depth(key, batch, check_whole("length", length, 3 * undos + 3), undos)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _flip_flop(key, batch, length):
  count = length // 2
  of_instruction, of_bit = draw_bits(key, batch, count, count)
  instruction = WRITE + choose(of_instruction, (P_WRITE, P_IGNORE, P_READ))  # in the tokens' order
  instruction = instruction.at[:, 0].set(WRITE).at[:, -1].set(READ)
  bit, time = below(of_bit, 2), indices(count)[None]
  last = jax.lax.cummax(jnp.where(instruction == WRITE, time, 0), axis=1)
  reads = instruction == READ
  bit = jnp.where(reads, jnp.take_along_axis(bit, last, 1), bit)
  mask = interleave(reads, False)
  return interleave(instruction, bit), interleave(jnp.where(reads, bit, 0)), mask


@functools.partial(jax.jit, static_argnums=(1, 2))
def _undo(key, batch, length):
  of_instruction, of_bit = draw_bits(key, batch, length, length)
  # Edges between the parts of a uniform number: below the first ignore, then read, write, undo.
  row = functools.partial(jnp.array, dtype=jnp.float32)
  deep = row([P_IGNORE, P_IGNORE + P_READ, 1 - P_UNDO])
  shallow = row([P_IGNORE, P_IGNORE + P_READ, 1.0])
  # One token before the end, neither an ignored bit nor a write fits.
  read_first = P_READ / (P_READ + P_UNDO)
  deep_end, shallow_end = row([0.0, read_first, read_first]), row([0.0, 1.0, 1.0])
  names = jnp.array([IGNORE, READ, WRITE, UNDO], jnp.int32)

  def emit(carry, now):
    height, has_bit = carry
    x, bit, t = now
    ends = t == length - 2
    at_height_1 = jnp.where(ends, shallow_end, shallow)
    edges = jnp.where((height > 1)[:, None], jnp.where(ends, deep_end, deep), at_height_1[None])
    token = names[(x[:, None] >= edges).sum(1)]
    token = jnp.where(t == 0, WRITE, jnp.where(t == length - 1, READ, token))
    token = jnp.where(has_bit, bit, token)
    height += (token == WRITE).astype(jnp.int32) - (token == UNDO).astype(jnp.int32)
    return (height, (token == WRITE) | (token == IGNORE)), (token, height)

  begin = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
  now = uniform(of_instruction).T, below(of_bit, 2).T, indices(length)
  tokens, heights = (x.T for x in jax.lax.scan(emit, begin, now)[1])

  # A read at a height gives the bit of the last write to that height.
  time = jnp.broadcast_to(indices(length), tokens.shape)
  _, time, token, bit = jax.lax.sort(
    [heights, time, tokens, jnp.roll(tokens, -1, axis=1)], num_keys=2
  )
  order = indices(length)[None]
  last = jax.lax.cummax(jnp.where(token == WRITE, order, 0), axis=1)
  _, bit = jax.lax.sort([time, jnp.take_along_axis(bit, last, 1)], num_keys=1)
  reads = tokens == READ
  return tokens, jnp.where(reads, bit, 0), reads


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _undo_depth(key, batch, length, undos):
  rest = length - 3 * undos - 3
  one = lambda token, count: jnp.full((batch, count), token, jnp.int32)
  bit = below(draw_bits(key, batch, length // 2)[0], 2)
  written, ignored = bit[:, : undos + 1], bit[:, undos + 1 : undos + 1 + rest // 2]
  parts = [
    interleave(one(WRITE, undos + 1), written),
    one(UNDO, undos),
    one(READ, rest % 2),
    interleave(one(IGNORE, rest // 2), ignored),
    one(READ, 1),
  ]
  inputs = jnp.concatenate(parts, 1)
  reads = inputs == READ
  return inputs, jnp.where(reads, written[:, :1], 0), reads


def _solve(inputs: np.ndarray, config: Config) -> np.ndarray:
  """Solves both tasks: a flip-flop is one whose writes are never undone."""
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    written: list[int] = []
    for t, token in enumerate(row):
      if t and row[t - 1] == WRITE:
        written.append(token)
      elif token == UNDO:
        written.pop()
      elif token == READ:
        out[t] = written[-1]
  return answers


SPECS = (
  TaskSpec(flip_flop, _solve, lambda config: 1 / 2, lambda config: 5, dict(length=50)),
  TaskSpec(undo_flip_flop, _solve, lambda config: 1 / 2, lambda config: 6, dict(length=50)),
)
