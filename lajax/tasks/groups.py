"""Word problems: the product of all elements so far. Parity, counting, permutations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from lajax._shapes import check_key, check_option, check_whole
from lajax.tasks.draws import below, draw_bits, indices
from lajax.tasks.spec import Config, Rows, TaskSpec

GROUPS = ("S3", "S4", "A5", "S5")
SCORED = ("all", "last")


def parity(key, batch: int, *, length: int, scored: str = "all") -> Rows:
  """Makes rows of bits whose target is the parity of all bits so far.

      y_t = (x_1 + .. + x_t) mod 2

  Args:
    key: a JAX random key.
    batch: B, the number of rows.
    length: L, at least 1.
    scored: "all" masks every position as True, "last" the last one alone.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L].

  Raises:
    ValueError: a size is no whole number of at least 1, or `scored` is neither of the two.

  Example:
    The target changes at each 1.

    >>> inputs, targets, mask = parity(jax.random.key(0), 1, length=8)
    >>> print(inputs, targets)
    [[1 0 0 1 1 1 1 0]] [[1 1 1 0 1 0 1 1]]

  Grazzi et al., arXiv:2411.12537, section 5.1, who score the last position.
  """
  return modular(key, batch, modulus=2, length=length, scored=scored)


def modular(key, batch: int, *, modulus: int, length: int, scored: str = "all") -> Rows:
  """Makes rows of residues whose target is their sum so far: `group` with "Z_n", n = `modulus`.

      y_t = (x_1 + .. + x_t) mod m

  Args:
    key, batch, length, scored: as in `parity`. `length` times `modulus` must be below 2^31.
    modulus: m, at least 2; the number of tokens.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L].

  Raises:
    ValueError: a size is no whole number, too small or too large, or `scored` is wrong.

  Example:
    The sums 2, 4, 5, 5, 5, 8, 10, 13 modulo 5.

    >>> inputs, targets, mask = modular(jax.random.key(0), 1, modulus=5, length=8)
    >>> print(inputs, targets)
    [[2 2 1 0 0 3 2 3]] [[2 4 0 0 0 3 0 3]]

  Grazzi et al., arXiv:2411.12537: counting modulo m needs complex eigenvalues for m > 2.
  """
  batch, length = check_words(key, batch, length, scored)
  modulus = check_whole("modulus", modulus, 2)
  if modulus * length >= 2**31:
    raise ValueError(
      f"`modulus` times length must be below 2^31, to fit 32 bits; got {modulus} * {length}."
    )
  return _modular(key, batch, length, modulus, scored)


def group(
  key, batch: int, *, group: str, length: int, elements: str = "all", scored: str = "all"
) -> Rows:
  """Makes rows of elements of a group whose target is their product so far.

      y_t = x_t y_{t-1} ,  y_0 = identity ,  (x y)(i) = x(y(i))

  Tokens are the elements: the permutations in lexicographic order, so 0 is the identity.

  Args:
    key, batch, length, scored: as in `parity`.
    group: "S3", "S4", "S5" (all permutations), "A5" (the even ones), or "Z_n" as in "Z_60".
    elements: what the rows hold, uniformly: "all" elements, or of S3, S4 and S5 only the "swaps" of
      two, and the identity. Without the identity, the length alone would give the parity.

  Returns:
    inputs int32 [B L], targets int32 [B L], mask bool [B L].

  Raises:
    ValueError: the group is unknown or has no swaps, a size is wrong, or an option is.

  Example:
    The product 3, the rotation 120, stays through two identities; the swap 5, 210, makes it 2.

    >>> inputs, targets, mask = group(jax.random.key(0), 1, group="S3", length=8)
    >>> print(inputs, targets)
    [[3 0 0 5 3 5 5 4]] [[3 3 3 2 5 0 5 2]]

  Word problems of Merrill et al., arXiv:2404.08819; the swaps of Grazzi et al., arXiv:2411.12537,
  and all elements of DeltaProduct, arXiv:2502.10297.
  """
  batch, length = check_words(key, batch, length, scored)
  order = group_order(group)
  check_option("elements", elements, ("all", "swaps"))
  if elements == "swaps" and group[0] != "S":
    raise ValueError(
      f"`elements` must be 'all' for {group}, which has no swaps; got 'swaps'. Use S3, S4 or S5."
    )
  if group not in GROUPS:
    return modular(key, batch, modulus=order, length=length, scored=scored)
  return _group(key, batch, length, group, elements, scored)


def group_order(group: str) -> int:
  """Returns the number of elements of a group of the task `group`.

  Args:
    group: "S3", "S4", "A5", "S5", or "Z_n" with n from 2 to 65535.
  """
  known = isinstance(group, str)
  if known and group in GROUPS:
    return len(permutations(group))
  if known and group.startswith("Z_") and group[2:].isdecimal() and 2 <= int(group[2:]) < 2**16:
    return int(group[2:])
  raise ValueError(
    f"`group` must be one of {', '.join(GROUPS)}, or Z_n with n from 2 to 65535; got {group!r}."
  )


def permutations(group: str) -> list[tuple[int, ...]]:
  """Returns the elements of "S3", "S4", "A5" or "S5" in lexicographic order."""
  everything = itertools.permutations(range(int(group[1])))
  return [p for p in everything if group[0] == "S" or not _inversions(p) % 2]


def _inversions(p) -> int:
  return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p)))


@functools.cache
def products(group: str) -> np.ndarray:
  """Returns [G G]: the element x y for the elements x and y."""
  known = np.array(permutations(group))
  base = len(known[0]) ** np.arange(len(known[0]))[::-1]
  names = known @ base  # ascending, as the order is lexicographic
  return np.searchsorted(names, known[:, known] @ base).astype(np.int32)


def check_words(key, batch, length, scored, least: int = 1) -> tuple[int, int]:
  check_key("key", key)
  check_option("scored", scored, SCORED)
  return check_whole("batch", batch), check_whole("length", length, least)


def mask_of(batch, length, scored):
  first = 0 if scored == "all" else length - 1
  return jnp.broadcast_to(indices(length) >= first, (batch, length))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _modular(key, batch, length, modulus, scored):
  inputs = below(draw_bits(key, batch, length)[0], modulus)
  return inputs, jnp.cumsum(inputs, 1, dtype=jnp.int32) % modulus, mask_of(batch, length, scored)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _group(key, batch, length, group, elements, scored):
  swaps = [n for n, p in enumerate(permutations(group)) if _moved(p) <= 2]
  used = jnp.array(swaps if elements == "swaps" else range(group_order(group)), jnp.int32)
  inputs = used[below(draw_bits(key, batch, length)[0], len(used))]
  return inputs, prefix_products(inputs, products(group)), mask_of(batch, length, scored)


def _moved(p) -> int:
  return sum(i != x for i, x in enumerate(p))


def prefix_products(x, table):
  """Returns x_t x_{t-1} .. x_1 of elements [B L], by a table [G G] of products; 0 is the identity.

  Two scans of about sqrt(L) steps: inside all blocks at once, then over the blocks.
  """
  batch, length = x.shape
  width = max(int(length**0.5), 1)
  blocks = -(-length // width)
  table = jnp.asarray(table)
  x = jnp.pad(x, ((0, 0), (0, blocks * width - length))).reshape(batch, blocks, width)
  multiply = lambda before, y: (table[y, before], table[y, before])
  shift = lambda before, y: (table[y, before], before)
  inside = jax.lax.scan(multiply, jnp.zeros_like(x[..., 0]), jnp.moveaxis(x, 2, 0))[1]  # [W B N]
  before = jax.lax.scan(shift, jnp.zeros_like(x[:, 0, 0]), inside[-1].T)[1]  # [N B]
  return jnp.moveaxis(table[inside, before.T[None]], 0, 2).reshape(batch, -1)[:, :length]


def _solve_modular(inputs: np.ndarray, config: Config) -> np.ndarray:
  modulus = config.get("modulus", 2)
  return np.array([[s % modulus for s in itertools.accumulate(map(int, row))] for row in inputs])


def solve_group(inputs: np.ndarray, config: Config) -> np.ndarray:
  if config["group"] not in GROUPS:
    return _solve_modular(inputs, {"modulus": group_order(config["group"])})
  known = permutations(config["group"])
  apply = lambda state, p: tuple(p[i] for i in state)
  words = [itertools.accumulate((known[token] for token in row), apply) for row in inputs]
  return np.array([[known.index(state) for state in word] for word in words])


SPECS = (
  TaskSpec(
    parity, _solve_modular, lambda config: 1 / 2, lambda config: 2, dict(length=32),
    "scaled accuracy",
  ),
  TaskSpec(
    modular, _solve_modular, lambda config: 1 / config["modulus"],
    lambda config: config["modulus"], dict(modulus=5, length=32), "scaled accuracy",
  ),
  TaskSpec(
    group, solve_group, lambda config: 1 / group_order(config["group"]),
    lambda config: group_order(config["group"]), dict(group="S3", length=32),
  ),
)  # fmt: skip
