"""MQAR with rows of several sizes side by side, and what the solvers of recall tasks share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_number, check_whole
from lajax.tasks.draws import below, choose, distinct, draw_bits, indices, place, power_law
from lajax.tasks.mqar import check_mqar, mqar, mqar_chance
from lajax.tasks.spec import Config, Rows, TaskSpec

# Sizes (length, pairs) of the public benchmark's mixture, and its 100,000 + 4 × 20,000 train rows.
MQAR_TRAIN_SIZES = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
MQAR_TRAIN_WEIGHTS = (5, 1, 1, 1, 1)
MQAR_TEST_SIZES = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))


def mqar_mixture(
  key,
  batch: int,
  *,
  vocab_size: int,
  sizes: tuple[tuple[int, int], ...] = MQAR_TRAIN_SIZES,
  weights: tuple[float, ...] | None = None,
  filler: str = "zeros",
  power: float = 0.01,
) -> Rows:
  """Makes rows of `mqar` of several sizes side by side.

  Each row draws a size (length, pairs) and is a row of `mqar` of that size, followed by blanks up
  to the longest length. The public benchmark holds one size per batch instead; one shape for all
  compiles once, and a causal model cannot see the blanks.

  Args:
    key, batch, vocab_size, filler, power: as in `mqar`. Noise ends where the row's size ends.
    sizes: pairs (length, pairs); each must be right for `mqar`.
    weights: a positive number per size, proportional to its probability. None is uniform, or
      5, 1, 1, 1, 1 for the default sizes: the public benchmark trains on 100,000 rows of the first
      and 20,000 of each other.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L], L the longest length.

  Raises:
    ValueError: a size is wrong for `mqar`, or `weights` are not positive numbers, one per size.

  Example:
    A row of length 12 with two pairs: key 1 has the value 5, key 2 the value 4.

    >>> inputs, targets, mask = mqar_mixture(
    ...   jax.random.key(0), 1, vocab_size=8, sizes=((8, 1), (12, 2)), weights=(1, 3))
    >>> print(inputs, targets[mask])
    [[1 5 2 4 0 0 0 0 1 0 2 0]] [5 4]

  Zoology, arXiv:2312.04927; the sizes are those of its public code.
  """
  check_key("key", key)
  sizes = _checked_sizes(sizes, vocab_size, filler, power)
  weights = _checked_weights(weights, sizes)
  return _mixture(key, check_whole("batch", batch), sizes, weights, filler, vocab_size, power)


def _checked_sizes(sizes, vocab_size, filler, power):
  pairs_of_ints = isinstance(sizes, tuple | list) and all(
    isinstance(size, tuple | list) and len(size) == 2 for size in sizes
  )
  if not pairs_of_ints or not sizes:
    raise ValueError(
      f"`sizes` must be pairs (length, pairs), as ((64, 4), (64, 8)); got {sizes!r}."
    )
  for length, pairs in sizes:
    check_mqar(vocab_size=vocab_size, length=length, pairs=pairs, filler=filler, power=power)
  return tuple((int(length), int(pairs)) for length, pairs in sizes)


def _checked_weights(weights, sizes):
  if weights is None:
    return MQAR_TRAIN_WEIGHTS if sizes == MQAR_TRAIN_SIZES else (1,) * len(sizes)
  if not isinstance(weights, tuple | list) or len(weights) != len(sizes):
    raise ValueError(
      f"`weights` must be {len(sizes)} positive numbers, one per size; got {weights!r}."
    )
  return tuple(check_number("weights", weight, above=0) for weight in weights)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _mixture(key, batch, sizes, weights, filler, vocab_size, power):
  length, most = max(size[0] for size in sizes), max(size[1] for size in sizes)
  slots, half = max((n - 2 * k) // 2 for n, k in sizes), vocab_size // 2
  counts = (1, most, most, slots, length if filler == "noise" else 0)
  of_size, of_keys, of_values, of_slots, of_filler = draw_bits(key, batch, *counts)
  own = jnp.array(sizes, jnp.int32)[choose(of_size, weights)[:, 0]]
  own_length, own_pairs = own[:, :1], own[:, 1:]
  keys = 1 + distinct(of_keys, half - 1)
  values = half + distinct(of_values, vocab_size - half)
  slot = power_law(of_slots, most, power, (own_length - 2 * own_pairs) // 2)
  order = indices(most)[None]
  # Pairs beyond the row's own are placed at L, which leaves them out.
  written = jnp.where(order < own_pairs, 2 * order, length)
  asked = jnp.where(order < own_pairs, 2 * own_pairs + 2 * slot, length)
  blank = jnp.zeros((batch, length), jnp.int32)
  inputs = place(place(place(blank, written, keys), written + 1, values), asked, keys)
  targets = place(blank, asked, values)
  if filler == "noise":
    inside = indices(length)[None] < own_length
    inputs = jnp.where((inputs == 0) & inside, below(of_filler, vocab_size), inputs)
  return inputs, targets, targets > 0


def solve_first(inputs: np.ndarray, config: Config) -> np.ndarray:
  """Answers with the token behind the first occurrence of each token."""
  return np.array([read_back(row, width=1, latest=False) for row in inputs])


def read_back(row, width: int, *, latest: bool, least: int = 0) -> list[int]:
  """Reads a row from left to right with a dict from the last tokens to what came behind them."""
  memory: dict[tuple, int] = {}
  answers = []
  for t, token in enumerate(row):
    name = tuple(row[max(t - width, 0) : t])
    if latest and token >= least:
      memory[name] = token
    elif not latest and name[-1:] != (0,):
      memory.setdefault(name, token)
    answers.append(memory.get(tuple(row[max(t + 1 - width, 0) : t + 1]), 0))
  return answers


def one_of_pairs(config: Config) -> float:
  """Returns 1 / K, the accuracy of naming one value that counts at every query."""
  return mqar_chance(pairs=config["pairs"])


def vocabulary_of(config: Config) -> int:
  return config["vocab_size"] + config.get("noise_tokens", 0)


def _mixture_chance(config: Config) -> float:
  """Returns rows / queries: naming one value of the row is right once per row."""
  sizes = tuple(tuple(size) for size in config["sizes"])
  weights = _checked_weights(config.get("weights"), sizes)
  asked = sum(weight * pairs for weight, (_, pairs) in zip(weights, sizes, strict=True))
  return sum(weights) / asked


SPECS = (
  TaskSpec(
    mqar, solve_first, one_of_pairs, vocabulary_of, dict(vocab_size=64, length=64, pairs=8)
  ),
  TaskSpec(
    mqar_mixture, solve_first, _mixture_chance, vocabulary_of,
    dict(vocab_size=8192, sizes=MQAR_TRAIN_SIZES),
  ),
)  # fmt: skip
