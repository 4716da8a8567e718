"""Multi-query associative recall (MQAR): read K key-value pairs, then answer K queries for them.

A row of length L over a vocabulary of V tokens (0 is blank, keys 1 … V/2-1, values V/2 … V-1):

    k1 v1 k2 v2 … kK vK │ slot 0 │ slot 1 │ … │ slot (L-2K)/2 - 1

Every slot holds two tokens. K distinct slots are drawn, one after the other and in the order of the keys, with probability
proportional to (slot + 1)^(power - 1); the i-th drawn slot begins with key i, and the target AT that position is value i.
The answer is never written, and everything else is filler.

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré, "Zoology: Measuring and Improving Recall in Efficient Language
Models", ICLR 2024, arXiv:2312.04927, algorithm 1 and appendix E; the distribution is that of its public generator, except
that here the whole row, filler included, is a function of the key.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

FILLERS = ("zeros", "noise")


def mqar(
  key: PRNGKeyArray,
  batch: int,
  *,
  vocab_size: int,
  length: int,
  pairs: int,
  filler: str = "zeros",
  power: float = 0.01,
) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, "B L"]]:
  """Rows of multi-query associative recall, made on the fly: a pure function of `key`, compiled once per shape.

  Row i is the same whatever `batch` is, so a larger batch continues a smaller one.

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    vocab_size: V; the keys are 1 … V//2-1, the values V//2 … V-1, 0 is blank.
    length: L, even, at least 4 `pairs`.
    pairs: K, the number of key-value pairs, and of queries, in a row.
    filler: what fills the rest: "zeros" (blanks; figure 2 of Zoology) or "noise" (uniform over the whole vocabulary, so it
      may repeat a key or a value without asking for it; figure 2 of Based, arXiv:2402.18668).
    power: a in the slots' probability ∝ (slot + 1)^(a - 1): 1 is uniform, the default 0.01 nearly 1 / (slot + 1).

  Returns:
    inputs int32 [B L], targets int32 [B L] (0 where not asked), mask bool [B L] (True at the K queries of each row).

  Raises:
    ValueError: the row cannot be laid out (odd L, 4K > L), the vocabulary has too few keys or values, unknown filler.
  """
  check_mqar(vocab_size=vocab_size, length=length, pairs=pairs, filler=filler)
  return _rows(key, batch, vocab_size, length, pairs, filler, power)


def mqar_chance(*, pairs: int) -> float:
  """Accuracy of a reader that knows the row's values but not which key each belongs to: 1 / K."""
  return 1 / pairs


def check_mqar(*, vocab_size: int, length: int, pairs: int, filler: str = "zeros") -> None:
  """ValueError, in one line, where no row of these sizes exists."""
  if pairs < 1:
    raise ValueError(f"`pairs` must be at least 1; got {pairs}.")
  if length % 2:
    raise ValueError(
      f"`length` must be even, for a slot is two tokens; got {length}. Use {length + 1}."
    )
  if 4 * pairs > length:
    raise ValueError(
      f"4 * pairs must be at most `length`, two tokens a pair and two a query; got 4 * {pairs} > {length}. "
      f"Use at most {length // 4} pairs, or a length of at least {4 * pairs}."
    )
  keys = vocab_size // 2 - 1  # as many as values, less the blank
  if keys < pairs:
    raise ValueError(
      f"`vocab_size` is too small: {vocab_size} gives {max(keys, 0)} keys (1 … vocab_size // 2 - 1) for {pairs} distinct "
      f"ones. Use at least {2 * pairs + 2}."
    )
  if filler not in FILLERS:
    raise ValueError(f"`filler` must be one of {', '.join(FILLERS)}; got {filler!r}.")


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _rows(key, batch, vocab_size, length, pairs, filler, power):
  # One block of random bits for everything: a threefry call costs more to compile than all that is made of it.
  half, slots, noise = (
    vocab_size // 2,
    (length - 2 * pairs) // 2,
    length if filler == "noise" else 0,
  )
  bits = jax.random.bits(key, (batch, 2 * pairs + slots + noise), jnp.uint32)
  of_keys, of_values, of_slots, of_filler = jnp.split(
    bits, (pairs, 2 * pairs, 2 * pairs + slots), axis=1
  )
  keys = 1 + _distinct(of_keys, half - 1)
  values = half + _distinct(of_values, vocab_size - half)
  drawn = _power_law(of_slots, pairs, power)[:, :, None] == jnp.arange(slots)  # [B K slots]

  # A slot's second token is never asked; a scatter of the K queries would compile slower than these sums.
  read = lambda x: jnp.pad(_pairs((drawn * x[:, :, None]).sum(1), 0), ((0, 0), (2 * pairs, 0)))
  written = jnp.pad(_pairs(keys, values), ((0, 0), (0, length - 2 * pairs)))
  inputs, targets = written + read(keys), read(values)
  if noise:
    inputs = jnp.where(inputs == 0, _below(of_filler, vocab_size), inputs)
  return inputs, targets, targets > 0


def _pairs(first, second):
  """[B 2N] from [B N] and [B N], alternately."""
  return jnp.stack([first, jnp.broadcast_to(second, first.shape)], -1).reshape(len(first), -1)


def _below(bits, bound):
  """Uniform numbers of 0 … bound-1; the remainder's bias is below bound / 2^32."""
  return (bits % jnp.asarray(bound, jnp.uint32)).astype(jnp.int32)


def _distinct(bits, size: int):
  """[B K] different numbers of 0 … size-1, every ordered choice equally likely, in work that does not grow with `size`.

  Draw i names one of the size - i numbers that are left, by its rank among them (a Lehmer code). Putting the earlier draws
  back, the latest first, turns ranks into numbers: what stood at or above a number that is put back moves up by one.
  """
  count = bits.shape[1]
  order = jnp.arange(count)
  rank = _below(bits, size - order)

  def put_back(i, number):
    j = count - 1 - i
    return jnp.where((order > j) & (number >= rank[:, j, None]), number + 1, number)

  return jax.lax.fori_loop(0, count, put_back, rank)


def _power_law(bits, count: int, power):
  """[B count] different slots, drawn one after the other with probability ∝ (slot + 1)^(power - 1) among those left.

  The largest values of log p + Gumbel noise, from the largest down, are exactly such draws in their order.
  """
  uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # never 0 or 1
  log_p = (power - 1) * jnp.log(jnp.arange(1, bits.shape[1] + 1, dtype=jnp.float32))
  return jax.lax.top_k(log_p - jnp.log(-jnp.log(uniform)), count)[1]
