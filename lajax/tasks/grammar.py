"""Next symbols of a grammar whose words are broken up by gaps and noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_number, check_whole
from lajax.tasks.draws import below, draw_bits, uniform
from lajax.tasks.spec import Config, Rows, TaskSpec

BLANK = 0


def selective_next(
  key, batch: int, *, length: int, symbols: int = 40, copies: int = 4, gap: float = 0.3,
  noise: float = 0.1, grammar: int = 0,
) -> Rows:  # fmt: skip
  """Makes rows of a walk through a grammar, with blanks and wrong symbols between its symbols.

  The grammar is a graph of `symbols` · `copies` states. Each state emits one symbol, and each
  symbol is that of `copies` states, so a symbol alone does not give its state. Half of the states
  have one successor, the others two with different symbols, equally likely. A row begins in state
  0. Each further token is

      a blank (probability gap), a noise symbol (probability noise), or the next state's symbol

  independently. A noise symbol is one that no successor of the current state emits, and leaves the
  state as it is: only who knows the state can tell noise from the grammar. The target is the next
  token. It is scored where that token is the grammar's and the only one possible; the state must
  have been carried past all gaps and noise until there.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, at least 2.
    symbols: number of symbols, at least 4; token 0 is the blank, 1 … `symbols` are the symbols.
    copies: states per symbol; 1 leaves nothing that the last symbol does not tell.
    gap, noise: probabilities; their sum must be at most 0.9.
    grammar: seed of the graph, a whole number; rows of one grammar train and test one model.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L].

  Raises:
    ValueError: a size is too small, or the probabilities are out of range.

  Example:
    The target is the token behind, where it is certain. 0 is a gap.

    >>> inputs, targets, mask = selective_next(jax.random.key(0), 1, length=12, symbols=5)
    >>> print(inputs, targets[mask])
    [[1 3 2 3 1 0 3 4 3 0 5 0]] [3 3 5]

  After SelectivBench, arXiv:2601.12598, cut down: there too, gaps and noise violate the rules of a
  random grammar whose symbols are ambiguous. How the grammar is drawn is a choice made here.
  """
  check_key("key", key)
  batch, length = check_whole("batch", batch), check_whole("length", length, 2)
  symbols = check_whole("symbols", symbols, 4, 2**12)
  copies = check_whole("copies", copies, 1, 2**8)
  grammar = check_whole("grammar", grammar, 0)
  gap, noise = check_number("gap", gap, 0.0, 0.9), check_number("noise", noise, 0.0, 0.9)
  if gap + noise > 0.9:
    raise ValueError(
      "`gap` and noise must add up to at most 0.9, so that the grammar goes on; "
      f"got {gap} + {noise}."
    )
  return _rows(key, batch, length, symbols, copies, gap, noise, grammar)


@functools.cache
def successors(symbols: int, copies: int, grammar: int) -> np.ndarray:
  """Returns [states 2]: the two successors of each state, the same one twice where there is one.

  State s emits the symbol 1 + s mod `symbols`. The first successors form one cycle of all states.
  """
  rng = np.random.default_rng(grammar)
  cycle = rng.permutation(symbols * copies)
  both = np.empty((symbols * copies, 2), np.int32)
  both[cycle, 0] = np.roll(cycle, -1)
  both[:, 1] = both[:, 0]
  branching = rng.permutation(symbols * copies)[: symbols * copies // 2]
  for state in branching:
    choices = np.arange(symbols * copies)
    both[state, 1] = rng.choice(choices[choices % symbols != both[state, 0] % symbols])
  return both


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6, 7))
def _rows(key, batch, length, symbols, copies, gap, noise, grammar):
  of_kind, of_choice = draw_bits(key, batch, length, length)
  table = jnp.asarray(successors(symbols, copies, grammar))

  def emit(state, now):
    x, choice = now
    is_gap, is_noise = x < gap, (x >= gap) & (x < gap + noise)
    both = table[state]  # [B 2]
    following = jnp.where(choice % 2 == 0, both[:, 0], both[:, 1])
    wrong = 1 + _other(choice, both % symbols, symbols)
    grammatical = ~is_gap & ~is_noise
    token = jnp.where(is_gap, BLANK, jnp.where(is_noise, wrong, 1 + following % symbols))
    sure = grammatical & (both[:, 0] == both[:, 1])
    return jnp.where(grammatical, following, state), (token.astype(jnp.int32), sure)

  begin = jnp.zeros(batch, jnp.int32)
  now = uniform(of_kind).T[1:], of_choice.T[1:]
  tokens, sure = (x.T for x in jax.lax.scan(emit, begin, now)[1])
  inputs = jnp.concatenate([jnp.ones((batch, 1), jnp.int32), tokens], 1)  # state 0 emits 1
  mask = jnp.pad(sure, ((0, 0), (0, 1)))
  return inputs, jnp.where(mask, jnp.roll(inputs, -1, axis=1), 0), mask


def _other(bits, taken, size: int):
  """Draws a number of 0 … size-1 that is none of two [B 2], which may be equal."""
  low, high = taken.min(1), taken.max(1)
  number = below(bits >> 1, jnp.where(low == high, size - 1, size - 2))
  number += (number >= low).astype(jnp.int32)
  return number + ((number >= high) & (low != high)).astype(jnp.int32)


def _solve(inputs: np.ndarray, config: Config) -> np.ndarray:
  """Follows the states, past every token that is no symbol of a successor."""
  symbols, copies = config.get("symbols", 40), config.get("copies", 4)
  table = successors(symbols, copies, config.get("grammar", 0))
  answers = np.zeros_like(inputs)
  for row, out in zip(inputs, answers, strict=True):
    state = 0
    for t, token in enumerate(row):
      if t:
        state = next((s for s in table[state] if 1 + s % symbols == token), state)
      out[t] = 1 + table[state][0] % symbols
  return answers


SPECS = (
  TaskSpec(
    selective_next, _solve, lambda config: 1 / config.get("symbols", 40),
    lambda config: 1 + config.get("symbols", 40), dict(length=200, symbols=40),
  ),
)  # fmt: skip
