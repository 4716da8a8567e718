"""Letters of axes, words of the library, and the checks that build every message about an argument.

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
| R | corrections per token (products of the delta rule) |
| W | width of a short convolution, in tokens |
| C, N | length of a chunk, number of chunks |

| word | meaning |
|---|---|
| state | what a recurrence carries from token to token: S [K V] per value head |
| transition | A of the map S <- A S + B that one token applies to the state |
| update | B of that map |
| step | the map of one token, with its output |
| summary | the map of a whole chunk, with what its outputs need of the state |
| chunk | C tokens that are computed by matrix products |
| block | a group of chunks that are computed together |
| time split | a part of time that one program of a kernel goes through |
| document | one of several sequences packed into a row; `segment_ids` gives its id per token |
| padding | a token of id < 0: it reads, writes and decays nothing, and its output is 0 |
| decay | exp(g), the factor of the state per token; g is its natural logarithm, <= 0 |
| from start, to end | product of decays: from a chunk's first token to a token, and behind it |
| between, total | product of the decays between two tokens, and of a whole chunk |
| per head, per channel | one number for each value head; for each row (or column) of its state |
| write strength | beta: how far a delta rule moves the state's value at k towards v |
| scores | products of queries with keys inside a chunk, [C C] |
| triangle, inverse | I + N with N strictly lower triangular, [C C], and its inverse |
| residuals | what a forward pass stores for its backward pass |
| implementation | value of `impl`: how an op is computed; all give the same numbers |
| kernel | a GPU program of `lajax.pallas`; `impl="pallas"` runs kernels |
| gate | an array that scales: decays, write strengths, input and forget gates, output gates |
| normalizer | z, the decayed sum of keys by which a normalised output is divided |
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

IMPLS = ("auto", "recurrent", "associative", "chunked", "pallas")
INT32 = np.iinfo(np.int32)


# --- shapes ---


class Sizes:
  """Size of every letter: `sizes.B`, or `sizes["W-1"]` for a letter that is no name. Immutable."""

  __slots__ = ("_known", "_missing")

  def __init__(self, known: Mapping[str, int], missing: Mapping[str, str] | None = None):
    object.__setattr__(self, "_known", dict(known))
    object.__setattr__(self, "_missing", dict(missing or {}))

  def __getitem__(self, letter: str) -> int:
    if letter in self._known:
      return self._known[letter]
    for name, letters in self._missing.items():  # the caller left the array out that has the letter
      if letter in letters.split():
        raise ValueError(_missing_message(name, letters))
    raise KeyError(letter)

  def __getattr__(self, letter: str) -> int:
    if letter.startswith("_"):
      raise AttributeError(letter)
    try:
      return self[letter]
    except KeyError as error:
      raise AttributeError(f"no array has an axis {letter}") from error

  def __setattr__(self, letter, size):
    raise AttributeError("sizes are fixed; a call's sizes come from its arrays")

  def __repr__(self) -> str:
    return f"Sizes({', '.join(f'{letter}={size}' for letter, size in self._known.items())})"


def check(sizes: Mapping[str, int] | None = None, /, **arrays) -> Sizes:
  """Checks arrays against axis letters and returns the size of every letter.

  Args:
    sizes: sizes that letters already have.
    **arrays: `name=(array, letters)` or `name=(array, letters, kind)`; `letters` may offer
      alternatives of different rank, "B T H | B T H K"; the first array that has a letter fixes its
      size. `kind` is "float" (default), "int" or "bool". An array that is None is passed over, and
      a letter that only such an array has is an error when it is asked for. `check_given` refuses
      None.

  Raises:
    ValueError: an array has the wrong dtype, rank or size; the message names the array, what it
      must be, and what was got.
  """
  known = dict(sizes or {})
  source = dict.fromkeys(known, "the options")
  missing = {}
  for name, (x, letters, *kind) in arrays.items():
    if x is None:
      missing[name] = letters
      continue
    _check_dtype(name, x, letters, kind[0] if kind else "float")
    options = [option.split() for option in letters.split("|")]
    match = next((axes for axes in options if len(axes) == len(x.shape)), None)
    if match is None:
      others = [source[axis] for axis in options[0] if source.get(axis, "")[:1] == "`"]
      like = f" to match {others[0]}" if others else ""
      raise ValueError(
        f"`{name}` must be {_wanted(letters)}{like}; "
        f"got rank {len(x.shape)}, shape {tuple(x.shape)}."
      )
    wrong = [
      axis for axis, size in zip(match, x.shape, strict=True) if known.get(axis, size) != size
    ]
    if wrong:
      expected = tuple(known.get(axis, size) for axis, size in zip(match, x.shape, strict=True))
      axes = " and ".join(wrong)
      raise ValueError(
        f"`{name}` must be [{' '.join(match)}] = {expected} to match {source[wrong[0]]}; "
        f"got {tuple(x.shape)}: "
        f"{f'axis {axes} differs' if len(wrong) == 1 else f'axes {axes} differ'}."
      )
    for axis, size in zip(match, x.shape, strict=True):
      if axis not in known:
        known[axis], source[axis] = size, f"`{name}`"
  return Sizes(known, missing)


def check_given(**arrays) -> None:
  """ValueError where an array `name=(array, letters)` that a call cannot do without is None."""
  for name, (x, letters, *_) in arrays.items():
    if x is None:
      raise ValueError(_missing_message(name, letters))


def _wanted(letters: str) -> str:
  return " or ".join(f"[{' '.join(option.split())}]" for option in letters.split("|"))


def _missing_message(name: str, letters: str) -> str:
  return f"`{name}` must be an array {_wanted(letters)}; got None. It has no default."


def _check_dtype(name: str, x, letters: str, kind: str) -> None:
  if not hasattr(x, "dtype") or not hasattr(x, "shape"):
    raise ValueError(
      f"`{name}` must be an array {_wanted(letters)}; got {type(x).__name__}. "
      "Pass it through jnp.asarray."
    )
  if kind == "bool":
    if x.dtype != bool:
      raise ValueError(
        f"`{name}` must have the dtype bool; got {x.dtype}. Cast it, as in {name}.astype(bool)."
      )
    return
  base = jnp.floating if kind == "float" else jnp.integer
  if not jnp.issubdtype(x.dtype, base):
    remedy = f"Cast it, as in {name}.astype(jnp.float32)."
    if kind == "int":
      remedy = f"Cast it, as in {name}.astype(jnp.int32)."
      if x.dtype == bool:  # as integers, False would be document 0 and not padding
        remedy = (
          f"Make ids of a mask of tokens: jnp.where({name}, 0, -1), or lajax.segment_ids(mask=...)."
        )
    raise ValueError(
      f"`{name}` must have {'a floating' if kind == 'float' else 'an integer'} dtype; "
      f"got {x.dtype}. {remedy}"
    )


def check_multiple(small: str, large: str, sizes: Sizes, names: tuple[str, str]) -> int:
  """Returns how many heads of `large` share one of `small`; ValueError if it is no whole number."""
  few, many = sizes[small], sizes[large]
  if few == 0 or many % few:
    raise ValueError(
      f"the {many} heads of {names[1]} ({large}) must be a multiple of the {few} heads of "
      f"{names[0]} ({small}); got {large} = {many}, {small} = {few}. Repeat or drop heads so that "
      f"{large} = n * {small}."
    )
  return many // few


def check_known(sizes: Sizes, *letters: str) -> None:
  """NotImplementedError for a size that is a symbol of `jax.export`."""
  for letter in letters:
    if jax.export.is_symbolic_dim(sizes[letter]):
      raise NotImplementedError(
        f"the size of axis {letter} must be known; got the symbol {sizes[letter]}. "
        "Export one function per size; the batch may be a symbol."
      )


def check_parts(name: str, parts, letters: Sequence[str]) -> Sequence:
  """Returns the parts of a state that is a tuple, or as many None for None; ValueError else."""
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


# --- values ---


def check_not_nan(segment_ids=None, /, **gates) -> None:
  """ValueError for a NaN in a gate, but at padding; under jit, grad or vmap none can be seen."""
  _check_values(segment_ids, gates, "no NaN", jnp.isnan)


def check_below_infinity(segment_ids=None, /, **gates) -> None:
  """ValueError for +inf in a gate, but at padding, where values can be seen."""
  _check_values(segment_ids, gates, "no +inf, which has no weight relative to itself", jnp.isposinf)


def check_bound(bound, segment_ids=None, g=None) -> float | None:
  """Returns the declared lower bound of log decays, or None; ValueError for a decay below it."""
  if bound is None:
    return None
  if check_number("bound", bound) >= 0:
    raise ValueError(
      "`bound` must be a negative number that no log decay is below, such as -5.0, or None; got "
      f"{bound}."
    )
  if g is not None:
    wanted = f"no log decay below the declared bound {bound}"
    _check_values(segment_ids, {"g": g}, wanted, _Below(float(bound)))
  return float(bound)


@dataclasses.dataclass(frozen=True)
class _Below:
  """Says which values are below a bound, in their own dtype: -5.01 as bfloat16 is -5."""

  bound: float

  def __call__(self, x):
    return x < np.asarray(self.bound).astype(x.dtype)


def _check_values(segment_ids, gates, wanted: str, is_bad) -> None:
  for name, x in gates.items():
    if not hasattr(x, "dtype") or isinstance(x, Tracer) or isinstance(segment_ids, Tracer):
      continue
    count = _count(x, segment_ids, is_bad)
    if count:
      raise ValueError(
        f"`{name}` must hold {wanted}; got {count} of {x.size} values. "
        f"Look at what computes `{name}`."
      )


def _count(x, segment_ids, is_bad) -> int:
  """Number of bad values outside padding. On a CPU NumPy counts: a new length compiles nothing."""
  if not all(_on_host(a) for a in (x, segment_ids)):
    return int(_count_on_device(x, segment_ids, is_bad))
  on_host = is_bad if isinstance(is_bad, _Below) else getattr(np, is_bad.__name__)
  bad = on_host(np.asarray(x))
  if segment_ids is not None and bad.any():
    bad &= _like(np.asarray(segment_ids) >= 0, bad)
  return int(bad.sum())


@functools.partial(jax.jit, static_argnums=2)
def _count_on_device(x, segment_ids, is_bad):
  bad = is_bad(x)
  return (bad if segment_ids is None else bad & _like(segment_ids >= 0, bad)).sum()


def _like(mask, x):
  """mask [B T], with as many axes as x [B T ..]."""
  return mask.reshape(mask.shape + (1,) * (x.ndim - 2))


def _on_host(x) -> bool:
  """Says whether NumPy can read an array without a copy between devices."""
  if not isinstance(x, jax.Array):
    return True
  return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())


def check_ids(segment_ids) -> Any:
  """Returns document ids as an array that tells all documents apart: int32 where values can be
  seen.

  Ids that are traced keep their dtype, whose comparisons are exact. Code that stores an id in fewer
  bits calls `check_ids_fit` first.

  Raises:
    ValueError: an id does not fit 32 bits.
  """
  if segment_ids is None or isinstance(segment_ids, Tracer) or _fits_int32(segment_ids.dtype):
    return segment_ids
  ids = np.asarray(segment_ids)
  if ids.size and not (INT32.min <= ids.min() and ids.max() <= INT32.max):
    wrong = ids.max() if ids.max() > INT32.max else ids.min()
    raise ValueError(_ids_message(f"the id {wrong}"))
  return ids.astype(np.int32)


def check_ids_fit(segment_ids) -> None:
  """ValueError for traced ids of more bits than the int32 in which a state stores the last one."""
  if isinstance(segment_ids, Tracer) and not _fits_int32(segment_ids.dtype):
    raise ValueError(_ids_message(f"{segment_ids.dtype}, whose values cannot be seen in a trace"))


def _fits_int32(dtype) -> bool:
  return jnp.iinfo(dtype).max <= INT32.max


def _ids_message(got: str) -> str:
  return (
    f"`segment_ids` must be ids of at most {INT32.max} (int32; below 0 for padding); got {got}. "
    "Number the documents of each row from 0, then cast: segment_ids.astype(jnp.int32)."
  )


def check_strengths(beta, erase, write) -> None:
  """ValueError unless `beta` is given alone, or both `erase` and `write`."""
  if (beta is None) == (erase is None) or (erase is None) != (write is None):
    given = [n for n, x in (("beta", beta), ("erase", erase), ("write", write)) if x is not None]
    raise ValueError(
      "give either `beta`, or (with beta=None) both `erase` and `write`; "
      f"got {' and '.join(given) or 'none of the three'}."
    )


# --- options ---


def check_option(name: str, value, allowed: Sequence) -> None:
  """ValueError unless a string (or None) is one of those allowed."""
  if not (value is None or isinstance(value, str)) or value not in allowed:
    raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def check_flag(name: str, value) -> bool:
  """Returns a flag as a bool; ValueError for anything that is none."""
  if not isinstance(value, bool | np.bool_):
    raise ValueError(f"`{name}` must be True or False; got {_shown(value)}.")
  return bool(value)


def check_dtype_option(name: str, dtype, *, optional: bool = True):
  """Returns a floating dtype as it was given, or None; ValueError for anything else."""
  if dtype is None and optional:
    return None
  wanted = "a floating dtype such as jnp.bfloat16 or jnp.float32" + ", or None" * optional
  try:
    is_array = isinstance(dtype, jax.Array | np.ndarray | np.generic)  # has a dtype, but is none
    known = None if dtype is None or is_array else jnp.dtype(dtype)
  except TypeError:
    known = None
  if known is None or not jnp.issubdtype(known, jnp.floating):
    got = repr(dtype) if known is None else known.name
    raise ValueError(f"`{name}` must be {wanted}; got {got}.")
  return dtype


def check_rngs(rngs):
  """Returns the random streams of a layer; ValueError unless `nnx.Rngs` with one for parameters."""
  if not callable(getattr(rngs, "params", None)):
    got = "None" if rngs is None else type(rngs).__name__
    raise ValueError(
      f"`rngs` must be an nnx.Rngs with a stream for parameters, as nnx.Rngs(0); got {got}."
    )
  return rngs


def check_key(name: str, key) -> None:
  """ValueError unless an array is one JAX random key, typed or raw."""
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  raw = isinstance(key, jax.Array | np.ndarray) and dtype == jnp.uint32 and key.ndim == 1
  if not typed and not raw:
    got = type(key).__name__ if shape is None else f"shape {shape} of {dtype}"
    raise ValueError(
      f"`{name}` must be one JAX random key; got {got}. Make one by jax.random.key(0)."
    )


def check_number(
  name: str, value, low: float = -math.inf, high: float = math.inf, *, above: float | None = None
) -> float:
  """Returns a finite number as a float.

  Args:
    name: what the message calls the number.
    value: a Python or NumPy number, or an array of one without axes.
    low, high: the least and the greatest number allowed.
    above: what the number must be greater than; None for no such bound.

  Raises:
    ValueError: it is no number, not finite or out of bounds; a bool, text and None are no numbers.
  """
  number = _number(value)
  if number is None or not low <= number <= high or (above is not None and number <= above):
    bounds = [f"above {above:g}"] if above is not None else []
    bounds += [f"of at least {low:g}"] if low > -math.inf else []
    bounds += [f"of at most {high:g}"] if high < math.inf else []
    wanted = f"a number {' and '.join(bounds)}" if bounds else "a finite number"
    raise ValueError(f"`{name}` must be {wanted}; got {_shown(value)}.")
  return number


def check_numbers(name: str, values, letters: Sequence[str]) -> tuple[float, ...] | None:
  """Returns optional numbers, one per letter, as floats (inf among them); ValueError else."""
  if values is None:
    return None
  is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x == x
  if (
    not isinstance(values, tuple | list)
    or len(values) != len(letters)
    or not all(map(is_number, values))
  ):
    raise ValueError(
      f"`{name}` must be {len(letters)} numbers ({', '.join(letters)}), or None; "
      f"got {_shown(values)}."
    )
  return tuple(float(x) for x in values)


def check_not_negative(name: str, value) -> float:
  """Returns a finite number of at least 0; ValueError for anything else."""
  return check_number(name, value, 0.0)


def check_positive(name: str, value, high: int = 2**31 - 1) -> int | None:
  """Returns an optional whole number of at least 1 as an int, or None; ValueError else."""
  return None if value is None else _whole(name, value, 1, high, ", or None for the default")


def check_whole(name: str, value, low: int = 1, high: int = 2**31 - 1) -> int:
  """Returns a whole number as an int; ValueError for anything else, None among it."""
  return _whole(name, value, low, high, "")


def check_batch(batch) -> int:
  """Returns the rows of a state that is to be made; ValueError unless they are a whole number."""
  return check_whole("batch", batch, 0)


def _whole(name: str, value, low: int, high: int, otherwise: str) -> int:
  whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  if not whole or value < low:
    raise ValueError(
      f"`{name}` must be a whole number of at least {low}{otherwise}; got {_shown(value)}."
    )
  if value > high:
    raise ValueError(f"`{name}` must be a whole number of at most {high}; got {_shown(value)}.")
  return int(value)


def scale_of(scale, sizes) -> float | jax.Array:
  """Returns the factor of the queries: a float, or the traced array without axes; None is K^-1/2.

  Raises:
    ValueError: `scale` is no finite number.
  """
  if scale is None:
    return max(sizes["K"], 1) ** -0.5
  if isinstance(scale, Tracer) and scale.ndim == 0 and _is_real(scale.dtype):
    return scale
  number = _number(scale)
  if number is None:
    got = (
      f"shape {scale.shape} of {scale.dtype}"
      if isinstance(scale, jax.Array | np.ndarray) and (scale.ndim or isinstance(scale, Tracer))
      else _shown(scale)
    )
    raise ValueError(
      "`scale` must be a finite number, an array of one without axes, or None for K^-1/2; "
      f"got {got}."
    )
  return number


def _number(value) -> float | None:
  """Returns a finite number of Python, NumPy or JAX as a float; None for anything else."""
  if isinstance(value, bool | np.bool_ | Tracer):
    return None
  if isinstance(value, jax.Array | np.ndarray | np.generic):
    if value.ndim or not _is_real(value.dtype):
      return None
  elif not isinstance(value, int | float):
    return None
  try:
    number = float(value)
  except OverflowError:  # an int of more than 308 digits
    return None
  return number if math.isfinite(number) else None


def _is_real(dtype) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _shown(value: Any) -> str:
  """A value as a message shows it: cut where it is long."""
  if isinstance(value, Tracer):
    return "a traced array, whose value cannot be seen"
  try:
    text = repr(value)
  except ValueError:  # an int of more digits than Python prints
    return "an int of very many digits"
  return text if len(text) <= 60 else f"{text[:57]}..."
