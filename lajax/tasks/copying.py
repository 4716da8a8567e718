"""Copying: in reverse order, from stacks, and past blanks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_whole
from lajax.tasks.draws import below, draw_bits, indices, place, power_law
from lajax.tasks.spec import Config, Rows, TaskSpec


def palindrome(key, batch: int, *, vocab_size: int, length: int) -> Rows:
  """Makes rows of a word, a separator and the word backwards.

      x_1 .. x_n 0 x_n .. x_2 ,  target x_n at 0, then x_{n-1} .. x_1

  The second half is written in the row, as a language model sees it: each answer is the next token.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    vocab_size: V; 0 is the separator, the symbols 1 … V-1 are drawn independently.
    length: L = 2n, even.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True from the separator on.

  Raises:
    ValueError: `vocab_size` is below 2, or `length` is odd or below 2.

  Example:
    The word 4 7 4 3, the separator, and the word from its end but for the last symbol.

    >>> inputs, targets, mask = palindrome(jax.random.key(0), 1, vocab_size=10, length=8)
    >>> print(inputs, targets[mask])
    [[4 7 4 3 0 3 4 7]] [3 4 7 4]

  Kimi Linear, arXiv:2510.26692, figure 4. The paper does not print the size of its vocabulary.
  """
  check_key("key", key)
  batch = check_whole("batch", batch)
  vocab_size = check_whole("vocab_size", vocab_size, 2)
  length = check_whole("length", length, 2)
  if length % 2:
    raise ValueError(f"`length` must be even, a word and its mirror; got {length}.")
  return _palindrome(key, batch, vocab_size, length)


def stack(key, batch: int, *, length: int, stacks: int = 64, symbols: int = 32) -> Rows:
  """Makes rows of pushes and pops on many stacks; the answer of a pop is the symbol on top.

  An operation is three tokens: push or pop, the stack, the symbol. The target of a pop stands at
  its stack's token; the popped symbol follows in the row, as a language model sees it. Stacks and
  symbols are uniform. An empty stack is pushed; any other is pushed or popped with equal
  probability, so its height is the absolute value of a random walk. A row that is short for its
  number of stacks may hold no pop.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, at least 6; the last L mod 3 tokens are blank.
    stacks: S, number of stacks.
    symbols: E, number of symbols. Tokens: 0 is blank, 1 push, 2 pop, 3 … S+2 name the stacks,
      S+3 … S+E+2 are the symbols.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at the stack of every pop.

  Raises:
    ValueError: a size is no whole number of at least 1, or `length` is below 6.

  Example:
    Stack 3 is pushed 7, 6 and 5; the pop gives 5.

    >>> inputs, targets, mask = stack(jax.random.key(0), 1, length=12, stacks=1, symbols=4)
    >>> print(inputs.reshape(4, 3), targets[mask])
    [[1 3 7]
     [1 3 6]
     [1 3 5]
     [2 3 5]] [5]

  Kimi Linear, arXiv:2510.26692, figure 4: 64 stacks. The number of symbols, and how the operations
  are drawn, are choices made here.
  """
  check_key("key", key)
  batch, length = check_whole("batch", batch), check_whole("length", length, 6)
  stacks = check_whole("stacks", stacks, high=2**30)
  return _stack(key, batch, length, stacks, check_whole("symbols", symbols, high=2**30))


def selective_copy(key, batch: int, *, vocab_size: int, length: int, copies: int) -> Rows:
  """Makes rows of a few symbols scattered among blanks, which are then asked for in order.

  The last n = `copies` tokens are markers, the same token each. n positions before them, drawn
  uniformly, hold a symbol each; the target at marker i is symbol i. No answer stands in the row
  behind its marker.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    vocab_size: V; 0 is blank, 1 … V-2 are the symbols, drawn independently, V-1 is the marker.
    length: L, markers included, at least 2 `copies`.
    copies: n, the number of symbols.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], True at the markers.

  Raises:
    ValueError: `vocab_size` is below 3, or `length` is too small.

  Example:
    The symbols 4, 1, 1 among blanks, then three markers 7.

    >>> inputs, targets, mask = selective_copy(
    ...   jax.random.key(0), 1, vocab_size=8, length=10, copies=3)
    >>> print(inputs, targets[mask])
    [[0 4 0 0 1 1 0 7 7 7]] [4 1 1]

  Mamba, arXiv:2312.00752, section 4.1.1, which has V = 16, n = 16 and 4096 tokens before the
  markers.
  """
  check_key("key", key)
  batch, copies = check_whole("batch", batch), check_whole("copies", copies)
  vocab_size = check_whole("vocab_size", vocab_size, 3)
  if check_whole("length", length) < 2 * copies:
    raise ValueError(
      f"`length` must be at least 2 copies = {2 * copies}, the symbols and their markers; got "
      f"{length}. Use a longer row or fewer copies."
    )
  return _selective_copy(key, batch, vocab_size, int(length), copies)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _palindrome(key, batch, vocab_size, length):
  word = 1 + below(draw_bits(key, batch, length // 2)[0], vocab_size - 1)
  mirror, blank = word[:, ::-1], jnp.zeros_like(word)
  inputs = jnp.concatenate([word, blank[:, :1], mirror[:, :-1]], 1)
  targets = jnp.concatenate([blank, mirror], 1)
  return inputs, targets, targets > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _stack(key, batch, length, stacks, symbols):
  count = length // 3
  of_stack, of_sign, of_symbol = draw_bits(key, batch, count, count, count)
  time = jnp.broadcast_to(indices(count), (batch, count))
  # All operations of one stack side by side, in their order.
  name, time, sign, symbol = jax.lax.sort(
    [below(of_stack, stacks), time, 2 * below(of_sign, 2) - 1, below(of_symbol, symbols)],
    num_keys=2,
  )
  begins = jnp.concatenate([jnp.ones((batch, 1), bool), name[:, 1:] != name[:, :-1]], 1)
  place_of = indices(count)[None]
  start = jax.lax.cummax(jnp.where(begins, place_of, 0), axis=1)
  walk = jnp.cumsum(sign, 1, dtype=jnp.int32)
  walk -= jnp.take_along_axis(walk - sign, start, 1)
  height, before = abs(walk), abs(walk - sign)
  # A level of a stack is pushed and popped in turn: a pop takes what the operation before it in
  # that level has pushed.
  is_pop = (height < before).astype(jnp.int32)
  keys = [name, jnp.maximum(height, before), time, symbol, is_pop]
  name, _, time, symbol, is_pop = jax.lax.sort(keys, num_keys=3)
  symbol = jnp.where(is_pop == 1, jnp.roll(symbol, 1, axis=1), symbol)
  _, name, symbol, is_pop = jax.lax.sort([time, name, symbol, is_pop], num_keys=1)

  name, symbol = 3 + name, 3 + stacks + symbol
  blank, rest = jnp.zeros_like(name), ((0, 0), (0, length - 3 * count))
  inputs = jnp.stack([1 + is_pop, name, symbol], -1).reshape(batch, -1)
  targets = jnp.stack([blank, is_pop * symbol, blank], -1).reshape(batch, -1)
  inputs, targets = jnp.pad(inputs, rest), jnp.pad(targets, rest)
  return inputs, targets, targets > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _selective_copy(key, batch, vocab_size, length, copies):
  of_symbol, of_position = draw_bits(key, batch, copies, length - copies)
  symbols = 1 + below(of_symbol, vocab_size - 2)
  position = jnp.sort(power_law(of_position, copies, 1.0), axis=1)  # power 1: uniform
  marked = indices(length)[None] >= length - copies
  inputs = jnp.broadcast_to(jnp.where(marked, vocab_size - 1, 0), (batch, length))
  targets = jnp.zeros((batch, length), jnp.int32).at[:, length - copies :].set(symbols)
  return place(inputs.astype(jnp.int32), position, symbols), targets, targets > 0


def _solve_palindrome(inputs: np.ndarray, config: Config) -> np.ndarray:
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    word: list[int] = []
    reading = True
    for t, token in enumerate(row):
      reading = reading and token != 0
      if reading:
        word.append(token)
      else:
        out[t] = word.pop()
  return answers


def _solve_stack(inputs: np.ndarray, config: Config) -> np.ndarray:
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    contents: dict[int, list[int]] = {}
    for t in range(0, len(row) - 1, 3):
      operation, name, *symbol = row[t : t + 3]
      if operation == 1:
        contents.setdefault(name, []).extend(symbol)
      elif operation == 2:
        out[t + 1] = contents[name].pop()
  return answers


def _solve_selective_copy(inputs: np.ndarray, config: Config) -> np.ndarray:
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    symbols: list[int] = []
    for t, token in enumerate(row):
      if 0 < token < config["vocab_size"] - 1:
        symbols.append(token)
      elif token:
        out[t] = symbols.pop(0)
  return answers


SPECS = (
  TaskSpec(
    palindrome, _solve_palindrome, lambda config: 1 / (config["vocab_size"] - 1),
    lambda config: config["vocab_size"], dict(vocab_size=64, length=64),
  ),
  TaskSpec(
    stack, _solve_stack, lambda config: 1 / config["symbols"],
    lambda config: 3 + config["stacks"] + config["symbols"],
    dict(length=256, stacks=64, symbols=32),
  ),
  TaskSpec(
    selective_copy, _solve_selective_copy, lambda config: 1 / (config["vocab_size"] - 2),
    lambda config: config["vocab_size"], dict(vocab_size=16, length=256, copies=16),
  ),
)  # fmt: skip
