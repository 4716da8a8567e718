"""Modular arithmetic: the value of an expression, with or without brackets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_flag, check_key, check_whole
from lajax.tasks.draws import below, draw_bits, indices, place
from lajax.tasks.spec import Config, Rows, TaskSpec

PLUS, MINUS, TIMES, EQUALS, OPEN, CLOSE = 1, 2, 3, 4, 5, 6


def mod_arith(
  key, batch: int, *, length: int, min_length: int | None = None, modulus: int = 5,
  brackets: bool = False, multiply: bool | None = None,
) -> Rows:  # fmt: skip
  """Makes rows of an expression, "=" and blanks; the target at "=" is the value modulo m.

  Without brackets, digits and operators alternate, and * binds more than + and -. With brackets, an
  expression of n tokens is

  * d, -d, (d) or (-d) for n = 1, 2, 3 or 4, where d is a digit;
  * (a op b) for n > 4, where the length of a is uniform in 1 … n-4, and b has the rest.

  Digits and operators are uniform.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, at least 2. The number of tokens with "=" is uniform in `min_length` … L; without
      brackets an odd number is lowered by one.
    min_length: at least 2, at most L; None is L.
    modulus: m, from 2 to 2^15. Tokens: 0 is blank, 1 +, 2 -, 3 *, 4 =. Without brackets the digit d
      is the token 5 + d; with brackets 5 is (, 6 is ), and d is 7 + d.
    brackets: whether there are brackets.
    multiply: whether * is drawn; None is without brackets only, as in the public generators.

  Returns:
    inputs int32 [B L], targets int32 [B L] (the token of a digit), mask bool [B L], True at "=".

  Raises:
    ValueError: a length or the modulus is out of range, or a flag is none.

  Example:
    ((4) + (0)) is 4, whose token is 11.

    >>> inputs, targets, mask = mod_arith(jax.random.key(0), 1, length=10, brackets=True)
    >>> print(inputs, targets[mask])
    [[ 5  5 11  6  1  5  7  6  6  4]] [11]

  Delétang et al., arXiv:2207.02098; xLSTM, arXiv:2405.04517; Grazzi et al., arXiv:2411.12537, train
  lengths 3 to 40, test lengths 40 to 256. With m = 5 there are 10 tokens, and 12 with brackets, as
  in the public generators. Chance is 1/m, as in scaled accuracies; short expressions with * are 0
  somewhat more often.
  """
  check_key("key", key)
  batch, length = check_whole("batch", batch), check_whole("length", length, 2)
  shortest = length if min_length is None else check_whole("min_length", min_length, 2, length)
  modulus = check_whole("modulus", modulus, 2, 2**15)
  brackets = check_flag("brackets", brackets)
  multiply = not brackets if multiply is None else check_flag("multiply", multiply)
  rows = _brackets if brackets else _flat
  return rows(key, batch, length, shortest, modulus, multiply)


def _operate(op, a, b, modulus: int):
  """Returns a op b modulo m; 0 <= a, b < m <= 2^15, so that the product fits 32 bits."""
  value = jnp.where(op == PLUS, a + b, jnp.where(op == MINUS, a - b + modulus, a * b))
  return value % modulus


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _flat(key, batch, length, shortest, modulus, multiply):
  count = length // 2
  of_length, of_digit, of_op = draw_bits(key, batch, 1, count, count)
  own = (shortest + below(of_length, length - shortest + 1)) // 2  # number of digits
  digit = below(of_digit, modulus)
  op = PLUS + below(of_op, 3 if multiply else 2)  # op i stands behind digit i

  def read(carry, now):
    total, term = carry
    op, digit, i = now  # the operator before the digit; the row's own digits only
    grown = jnp.where(op == TIMES, _operate(op, term, digit, modulus), digit)
    grown = jnp.where(op == MINUS, -digit, grown) % modulus
    total_now = jnp.where(op == TIMES, total, (total + term) % modulus)
    active = i < own[:, 0]
    return (jnp.where(active, total_now, total), jnp.where(active, grown, term)), None

  before = jnp.pad(op, ((0, 0), (1, 0)), constant_values=PLUS)[:, :-1]
  zeros = jnp.zeros(batch, jnp.int32)
  total, term = jax.lax.scan(read, (zeros, zeros), (before.T, digit.T, indices(count)))[0]

  tokens = jnp.stack([5 + digit, op], -1).reshape(batch, -1)
  tokens = jnp.pad(tokens, ((0, 0), (0, length % 2)))
  return _finished(tokens, 2 * own - 1, 5 + (total + term) % modulus)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _brackets(key, batch, length, shortest, modulus, multiply):
  """Cuts all expressions of one depth at once, then computes their values from the deepest up.

  An expression is known by its first token: no two begin at the same one. `size` [B L] is the
  length of the expression that has just been made there, or 0.
  """
  of_length, of_cut, of_token = draw_bits(key, batch, 1, length, length)
  own = shortest + below(of_length, length - shortest + 1) - 1  # tokens of the whole expression
  position = indices(length)[None]
  digit, op = below(of_token, modulus), PLUS + below(of_token, 3 if multiply else 2)
  blank = jnp.zeros((batch, length), jnp.int32)

  def cut(state):
    size, tokens, right, sign, depth, level = state
    # Leaves: d, -d, (d), (-d).
    opened, minus = (size == 3) | (size == 4), (size == 2) | (size == 4)
    at = position + opened.astype(jnp.int32) + minus.astype(jnp.int32)
    is_leaf = (size > 0) & (size < 5)
    only = lambda here, at: jnp.where(here, at, length)
    tokens = place(tokens, only(minus, at - 1), jnp.full_like(at, MINUS))
    tokens = place(tokens, only(opened, position + size - 1), jnp.full_like(at, CLOSE))
    value = jnp.take_along_axis(digit, jnp.minimum(at, length - 1), 1)
    tokens = place(tokens, only(is_leaf, at), 7 + value)
    sign = jnp.where(is_leaf, jnp.where(minus, -value, value) % modulus, sign)
    # Others: ( a op b ), a of `left` tokens.
    splits = size >= 5
    left = 1 + below(of_cut, jnp.maximum(size - 4, 1))
    middle = position + 1 + left
    tokens = place(tokens, only(splits, middle), jnp.take_along_axis(op, middle % length, 1))
    tokens = place(tokens, only(splits, position + size - 1), jnp.full_like(at, CLOSE))
    tokens = jnp.where(splits | opened, OPEN, tokens)
    right = jnp.where(splits, middle + 1, right)
    depth = jnp.where(splits, level, depth)
    inner = place(blank, only(splits, position + 1), left)
    inner = place(inner, only(splits, middle + 1), size - left - 3)
    return inner, tokens, right, sign, depth, level + 1

  whole = blank.at[:, 0].set(own[:, 0])
  state = (whole, blank, blank, blank, blank - 1, jnp.int32(0))
  _, tokens, right, value, depth, level = jax.lax.while_loop(lambda s: s[0].any(), cut, state)

  def compute(i, value):
    first, second = jnp.roll(value, -1, axis=1), jnp.take_along_axis(value, right, 1)
    operator = jnp.take_along_axis(tokens, jnp.maximum(right - 1, 0), 1)
    result = _operate(operator, first, second, modulus)
    return jnp.where(depth == level - 1 - i, result, value)

  value = jax.lax.fori_loop(0, level, compute, value)
  return _finished(tokens, own, 7 + value[:, 0])


def _finished(tokens, own, answer):
  """Puts "=" behind the first `own` [B 1] tokens, blanks behind it, and the answer [B] there."""
  position = indices(tokens.shape[1])[None]
  mask = position == own
  inputs = jnp.where(position < own, tokens, jnp.where(mask, EQUALS, 0))
  return inputs, jnp.where(mask, answer[:, None], 0), mask


def _solve(inputs: np.ndarray, config: Config) -> np.ndarray:
  modulus, first = config.get("modulus", 5), 7 if config.get("brackets", False) else 5
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    at = np.flatnonzero(row == EQUALS)
    out[at] = [first + _value(row[:end].tolist(), first, modulus) for end in at]
  return answers


def _value(tokens: list[int], first: int, modulus: int) -> int:
  """Reads an expression from left to right: [total, product, operator, sign] per open bracket."""
  frames, after_value = [[0, 0, PLUS, 1]], False
  for token in tokens:
    if token < EQUALS:
      frames[-1][2 if after_value else 3] = token if after_value else -1
      after_value = False
    elif token == OPEN and first > OPEN:
      frames.append([0, 0, PLUS, 1])
    else:
      value = sum(frames.pop()[:2]) if token == CLOSE and first > CLOSE else token - first
      total, product, operator, sign = frames[-1]
      if operator == TIMES:
        frames[-1] = [total, product * sign * value % modulus, PLUS, 1]
      else:
        frames[-1] = [total + product, sign * value * (-1 if operator == MINUS else 1), PLUS, 1]
      after_value = True
  return sum(frames[0][:2]) % modulus


def _vocabulary(config: Config) -> int:
  return (7 if config.get("brackets", False) else 5) + config.get("modulus", 5)


SPECS = (
  TaskSpec(
    mod_arith, _solve, lambda config: 1 / config.get("modulus", 5), _vocabulary,
    dict(length=40, min_length=3, modulus=5, brackets=False), "scaled accuracy",
  ),
)  # fmt: skip
