"""Multi-query associative recall (MQAR): read K key-value pairs, then answer K queries for them.

A row of length L over a vocabulary of V tokens (0 is blank, keys 1 … V/2-1, values V/2 … V-1):

    k1 v1 k2 v2 … kK vK │ slot 0 │ slot 1 │ … │ slot (L-2K)/2 - 1

Every slot holds two tokens. K distinct slots are drawn one after the other, in the order of the
keys, with probability proportional to (slot + 1)^(power - 1). The i-th drawn slot begins with key
i, and the target AT that position is value i. The answer is never written in the inputs. All other
tokens are filler.

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré, "Zoology: Measuring and Improving Recall
in Efficient Language Models", ICLR 2024, arXiv:2312.04927, algorithm 1 and appendix E. The
distribution is that of the public generator; here the whole row, filler included, is a function of
the random key.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from lajax._shapes import check_key, check_number, check_whole
from lajax.tasks.draws import below, distinct, draw_bits, indices, interleave, power_law

FILLERS = ("zeros", "noise")


def mqar(
  key: PRNGKeyArray,
  batch: int,
  *,
  vocab_size: int,
  length: int,
  pairs: int,
  filler: str = "zeros",
  power: float | Float[Array, ""] = 0.01,
) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, "B L"]]:
  """Makes rows of multi-query associative recall.

  The rows are a pure function of `key`. Row i does not depend on `batch`, so a larger batch
  continues a smaller one. A new `batch`, `length`, `pairs` or `filler` compiles anew.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    vocab_size: V; the keys are 1 … V//2-1, the values V//2 … V-1, 0 is blank.
    length: L, even, at least 4 `pairs`.
    pairs: K, the number of key-value pairs per row, and of queries per row.
    filler: content of the other positions: "zeros" (blanks; figure 2 of Zoology) or "noise"
      (uniform over the whole vocabulary; figure 2 of Based, arXiv:2402.18668). Noise may repeat a
      key or a value; such a token is not a query.
    power: a in the probability of slots ∝ (slot + 1)^(a - 1), at most 1e6 in absolute value: 1 is
      uniform, the default 0.01 is nearly 1 / (slot + 1).

  Returns:
    inputs int32 [B L], targets int32 [B L] (0 at positions without a query), mask bool [B L] (True
    at the K queries of each row).

  Raises:
    ValueError: a size is not a whole number of at least 1, the row cannot be laid out (L is odd or
      less than 4K), the vocabulary has too few keys, or `filler`, `power` or `key` is wrong.

  Example:
    Key 1 has the value 4, and 2 the value 7; both are asked for, and the rest is blank.

    >>> inputs, targets, mask = mqar(jax.random.key(0), 1, vocab_size=8, length=10, pairs=2)
    >>> print(inputs, targets[mask])
    [[1 4 2 7 1 0 0 0 2 0]] [4 7]
  """
  check_key("key", key)
  batch = check_whole("batch", batch)
  check_mqar(vocab_size=vocab_size, length=length, pairs=pairs, filler=filler, power=power)
  # As Python numbers: equal sizes of other types share one compilation.
  return _rows(key, batch, int(length), int(pairs), filler, int(vocab_size), power)


def mqar_chance(*, pairs: int) -> float:
  """Returns the accuracy of a reader that knows the row's values but not their keys: 1 / K.

  Args:
    pairs: K, the number of key-value pairs per row.
  """
  return 1 / check_whole("pairs", pairs)


def check_mqar(
  *,
  vocab_size: int,
  length: int,
  pairs: int,
  filler: str = "zeros",
  power: float | Float[Array, ""] = 0.01,
) -> None:
  """Raises a ValueError if `mqar`, whose arguments these are, makes no such rows."""
  vocab_size = check_whole("vocab_size", vocab_size, 0)
  length = check_whole("length", length)
  pairs = check_whole("pairs", pairs)
  if not isinstance(power, Tracer):
    check_number("power", power, -1e6, 1e6)  # (power - 1) log(slot + 1) must be finite in float32
  if length % 2:
    raise ValueError(
      f"`length` must be even, since a slot is two tokens; got {length}. Use {length + 1}."
    )
  if 4 * pairs > length:
    raise ValueError(
      f"4 * pairs must be at most `length`: a pair takes two tokens, and a query two; "
      f"got 4 * {pairs} > {length}. "
      f"Use at most {length // 4} pairs, or a length of at least {4 * pairs}."
    )
  keys = vocab_size // 2 - 1  # the values are as many, and one more: no value is blank
  if keys < pairs:
    raise ValueError(
      f"`vocab_size` is too small: {vocab_size} gives {max(keys, 0)} keys "
      f"(1 … vocab_size // 2 - 1) for {pairs} distinct ones. Use at least {2 * pairs + 2}."
    )
  if not isinstance(filler, str) or filler not in FILLERS:
    raise ValueError(f"`filler` must be one of {', '.join(FILLERS)}; got {filler!r}.")


# The vocabulary and the power are traced: other values of them need no other compilation.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _rows(key, batch, length, pairs, filler, vocab_size, power):
  half, slots = vocab_size // 2, (length - 2 * pairs) // 2
  noise = length if filler == "noise" else 0
  of_keys, of_values, of_slots, of_filler = draw_bits(key, batch, pairs, pairs, slots, noise)
  keys = 1 + distinct(of_keys, half - 1)
  values = half + distinct(of_values, vocab_size - half)
  drawn = power_law(of_slots, pairs, power)[:, :, None] == indices(slots)[None, None]  # [B K slots]

  # A slot's second token is never a query. These sums compile faster than a scatter of queries.
  def in_slots(x):
    first = jnp.where(drawn, x[:, :, None], 0).sum(1, dtype=jnp.int32)
    return jnp.pad(interleave(first), ((0, 0), (2 * pairs, 0)))

  written = jnp.pad(interleave(keys, values), ((0, 0), (0, length - 2 * pairs)))
  inputs, targets = written + in_slots(keys), in_slots(values)
  if noise:
    inputs = jnp.where(inputs == 0, below(of_filler, vocab_size), inputs)
  return inputs, targets, targets > 0
