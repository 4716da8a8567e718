"""The legend of axis letters, and the one check that builds every message about a shape or a dtype.

| letter | meaning |
|---|---|
| B | batch |
| T | tokens |
| S | tokens of the keys, where they may differ from T |
| H | heads of the queries and keys (linear ops); heads of the queries (attention) |
| HV | heads of the values, gates and states: a multiple of H |
| HK | heads of the keys and values (attention): a divisor of H |
| K | key width = rows of the state |
| V | value width = columns of the state |
| D | model width, or the channels of an elementwise recurrence |
| C, N | length of a chunk, number of chunks |
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

IMPLS = ("auto", "recurrent", "associative", "chunked", "pallas")


def check(sizes: Mapping[str, int] | None = None, /, **arrays) -> dict[str, int]:
  """Checks arrays against axis letters and returns the size of every letter.

  Args:
    sizes: sizes that letters already have.
    **arrays: `name=(array, letters)` or `name=(array, letters, kind)`; `letters` may offer alternatives of different rank,
      "B T H | B T H K"; the first array that has a letter fixes its size. `kind` is "float" (default) or "int". An array
      that is None is passed over.

  Raises:
    ValueError: an array has the wrong dtype, rank or size; the message names it, what it must be, and what was got.
  """
  known = dict(sizes or {})
  source = dict.fromkeys(known, "the options")
  for name, (x, letters, *kind) in arrays.items():
    if x is None:
      continue
    _check_dtype(name, x, kind[0] if kind else "float")
    options = [option.split() for option in letters.split("|")]
    match = next((axes for axes in options if len(axes) == np.ndim(x)), None)
    if match is None:
      wanted = " or ".join(f"[{' '.join(axes)}]" for axes in options)
      raise ValueError(f"`{name}` must be {wanted}; got rank {np.ndim(x)}, shape {tuple(x.shape)}.")
    wrong = [
      axis for axis, size in zip(match, x.shape, strict=True) if known.get(axis, size) != size
    ]
    if wrong:
      expected = tuple(known.get(axis, size) for axis, size in zip(match, x.shape, strict=True))
      axes = " and ".join(wrong)
      raise ValueError(
        f"`{name}` must be [{' '.join(match)}] = {expected} to match {source[wrong[0]]}; got {tuple(x.shape)}: "
        f"{'axis' if len(wrong) == 1 else 'axes'} {axes} {'differs' if len(wrong) == 1 else 'differ'}."
      )
    for axis, size in zip(match, x.shape, strict=True):
      if axis not in known:
        known[axis], source[axis] = size, f"`{name}`"
  return known


def _check_dtype(name: str, x, kind: str) -> None:
  if not hasattr(x, "dtype") or not hasattr(x, "shape"):
    raise ValueError(
      f"`{name}` must be an array; got {type(x).__name__}. Pass it through jnp.asarray."
    )
  base = jnp.floating if kind == "float" else jnp.integer
  if not jnp.issubdtype(x.dtype, base):
    remedy = f"Cast it, as in {name}.astype({'jnp.float32' if kind == 'float' else 'jnp.int32'})."
    raise ValueError(
      f"`{name}` must have {'a floating' if kind == 'float' else 'an integer'} dtype; got {x.dtype}. {remedy}"
    )


def check_multiple(small: str, large: str, sizes: Mapping[str, int], names: tuple[str, str]) -> int:
  """How many heads of the larger count share one of the smaller; ValueError where that is no whole number."""
  few, many = sizes[small], sizes[large]
  if few == 0 or many % few:
    raise ValueError(
      f"the {many} heads of {names[1]} ({large}) must be a multiple of the {few} heads of {names[0]} ({small}); "
      f"repeat or drop heads so that {large} = n * {small}."
    )
  return many // few


def check_not_nan(segment_ids=None, /, **gates) -> None:
  """ValueError for a NaN in a gate of a real token, where its values can be seen (not under jit, grad or vmap)."""
  for name, x in gates.items():
    if x is None or isinstance(x, Tracer) or isinstance(segment_ids, Tracer):
      continue
    with jax.ensure_compile_time_eval():
      bad = jnp.isnan(x)
      if segment_ids is not None:
        bad &= (segment_ids >= 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
      count = int(bad.sum())
    if count:
      raise ValueError(
        f"`{name}` must hold no NaN; got {count} of {x.size} values. Look at what computes `{name}`."
      )


def check_parts(name: str, parts, letters: Sequence[str]) -> Sequence:
  """The parts of a state that is a tuple, or as many None for None; ValueError where it is another thing, or half of one."""
  if parts is None:
    return (None,) * len(letters)
  wanted = f"({', '.join(letters)})"
  if not isinstance(parts, (tuple, list)) or len(parts) != len(letters):
    got = f"a tuple of {len(parts)}" if isinstance(parts, (tuple, list)) else type(parts).__name__
    raise ValueError(f"`{name}` must be None or the tuple {wanted} that a call returns; got {got}.")
  missing = [letter for letter, part in zip(letters, parts, strict=True) if part is None]
  if missing:
    raise ValueError(
      f"`{name}` must be None or the whole tuple {wanted}; got None for {', '.join(missing)}."
    )
  return parts


def check_strengths(beta, erase, write) -> None:
  """ValueError unless there is `beta` alone, or both `erase` and `write`."""
  if (beta is None) == (erase is None) or (erase is None) != (write is None):
    raise ValueError(
      "give either `beta`, or (with beta=None) both `erase` and `write`; got another mixture of the three."
    )


def check_option(name: str, value, allowed: Sequence) -> None:
  if value not in allowed:
    raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def _finite(value) -> bool:
  """Whether it is a finite number, of Python or NumPy."""
  return (
    isinstance(value, int | float | np.number)
    and not isinstance(value, bool)
    and bool(np.isfinite(value))
  )


def check_not_negative(name: str, value) -> None:
  """ValueError where a number is not one, is not finite, or is below 0."""
  if not _finite(value) or value < 0:
    raise ValueError(f"`{name}` must be a number of at least 0; got {value!r}.")


def scale_of(scale, sizes: Mapping[str, int]) -> float | jax.Array:
  """The factor of the queries: a number, or an array without axes; None for K^-1/2. ValueError else."""
  if scale is None:
    return max(sizes["K"], 1) ** -0.5
  kinds = jnp.floating, jnp.integer
  if (
    isinstance(scale, jax.Array | np.ndarray)
    and scale.ndim == 0
    and any(jnp.issubdtype(scale.dtype, x) for x in kinds)
  ):
    return jnp.asarray(scale)
  if not _finite(scale):
    got = (
      f"shape {scale.shape} of {scale.dtype}"
      if isinstance(scale, jax.Array | np.ndarray)
      else repr(scale)
    )
    raise ValueError(
      f"`scale` must be a finite number, an array of one without axes, or None for K^-1/2; got {got}."
    )
  return float(scale)


def check_positive(name: str, value) -> None:
  """ValueError where an optional whole number is given and is not one, or is below 1."""
  whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  if value is not None and (not whole or value < 1):
    raise ValueError(
      f"`{name}` must be a whole number of at least 1, or None for the default; got {value!r}."
    )
