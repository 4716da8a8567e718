"""Words of S3 × S3 with pairs of neighbours that the training never shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_option, check_whole
from lajax.tasks.draws import below, draw_bits, indices
from lajax.tasks.groups import check_words, mask_of, prefix_products, products, solve_group
from lajax.tasks.spec import Config, Rows, TaskSpec

# S3 in lexicographic order: 012, 021, 102, 120, 201, 210. 2 is the swap of the first two points.
_GENERATORS = (12, 18, 24, 2, 3, 4)


def s3_pairs(
  key, batch: int, *, length: int, split: str = "train", held_out: int = 1, scored: str = "all"
) -> Rows:
  """Makes words of S3 × S3 in which some pairs of neighbours are kept for the test.

      y_t = x_t y_{t-1} ,  y_0 = identity

  The six generators are a swap and the two rotations of each factor, the other factor unchanged. A
  token is an element: 6 a + b for the elements a and b of S3 in the order of `group`. Generator j
  is never followed by the generators j+1 … j+held_out (mod 6) in the split "train". A row of
  "test" has independent generators, and at least one such pair.

  Args:
    key, batch, scored: as in `parity`.
    length: L, at least 2.
    split: "train" or "test".
    held_out: number of successors per generator that the training never shows, 0 to 4.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L].

  Raises:
    ValueError: a size is no whole number, too small or too large, or an option is wrong.

  Example:
    2, 3, 4 act on the second factor of S3, and 12, 18, 24 on the first.

    >>> inputs, targets, mask = s3_pairs(jax.random.key(0), 1, length=8)
    >>> print(inputs, targets)
    [[ 2 18  3 12 24 18  4  3]] [[ 2 20 23 11 35 11  8 11]]

  Lee, arXiv:2606.07254: training length 8, test lengths up to 2^20, the last position scored. Which
  generators and which pairs, is a choice made here.
  """
  batch, length = check_words(key, batch, length, scored, least=2)
  check_option("split", split, ("train", "test"))
  held_out = check_whole("held_out", held_out, 0)
  if held_out > 4:
    raise ValueError(
      f"`held_out` must be at most 4, so that two successors of six are left; got {held_out}."
    )
  if split == "test" and not held_out:
    raise ValueError("`held_out` must be at least 1 for the split 'test'; got 0.")
  return _s3_pairs(key, batch, length, split, held_out, scored)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _s3_pairs(key, batch, length, split, held_out, scored):
  of_word, of_pair = draw_bits(key, batch, length, 3)
  if split == "train":
    # Generator j is followed by j + held_out + 1 … j + 6 (mod 6): a sum of random steps.
    steps = held_out + 1 + below(of_word, 6 - held_out)
    word = jnp.cumsum(steps.at[:, 0].set(below(of_word[:, 0], 6)) % 6, 1, dtype=jnp.int32) % 6
  else:
    word = below(of_word, 6)
    at, first, step = below(of_pair[:, :1], length - 1), below(of_pair[:, 1:2], 6), of_pair[:, 2:]
    second = (first + 1 + below(step, held_out)) % 6
    here = indices(length)[None] - at
    word = jnp.where(here == 0, first, jnp.where(here == 1, second, word))
  inputs = jnp.array(_GENERATORS, jnp.int32)[word]
  table = products("S3")
  targets = 6 * prefix_products(inputs // 6, table) + prefix_products(inputs % 6, table)
  return inputs, targets, mask_of(batch, length, scored)


def _solve_s3_pairs(inputs: np.ndarray, config: Config) -> np.ndarray:
  first, second = (solve_group(part, {"group": "S3"}) for part in (inputs // 6, inputs % 6))
  return 6 * first + second


SPECS = (
  TaskSpec(
    s3_pairs, _solve_s3_pairs, lambda config: 1 / 36, lambda config: 36,
    dict(length=8, split="train", held_out=1),
  ),
)  # fmt: skip
