"""Calls a function with arguments that are wrong in ten ways each, and returns what it did not say clearly.

A clear error is a ValueError, TypeError or NotImplementedError that lajax raises itself, that names the
argument and says what was got. Tables of functions live in the test files: a row is a function and
arguments that are right.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lajax

PACKAGE = str(pathlib.Path(lajax.__file__).parent)
CLEAR = (ValueError, TypeError, NotImplementedError)
HUGE = 10**400  # more than a float holds

NUMBERS = ["1", None, True, float("nan"), float("inf"), HUGE, 1j, [1.0], np.ones(3)]
OPTIONS = {  # wrong values of options, by name
  "impl": ["fast", None, 3, True, ["chunked"], np.ones(2)],
  "chunk_size": [0, -16, 2.5, True, "64", np.float32(3), np.ones(3), 2**40],
  "scale": [x for x in NUMBERS if x is not None] + [jnp.float32(np.nan), jnp.ones((2, 3))],
  "eps": [*NUMBERS, -1e-6],
  "window": [0, -1, 2.5, True, "8", 2**31, np.ones(3)],
  "causal": ["yes", None, 1, 0.0, np.ones(2)],
  "normalization": ["none", None, 3, np.ones(2)],
}


def wrong_arrays(x, *, optional: bool = False, gate: bool = False) -> Iterator[tuple[str, Any]]:
  """Kinds of wrong arrays in the place of a right one, each with a value."""
  if not optional:
    yield "None", None
  yield "text", "text"
  yield "a list", np.asarray(x).tolist()
  yield "a number", 7
  yield "booleans", jnp.ones(x.shape, bool)
  yield "complex numbers", jnp.ones(x.shape, jnp.complex64)
  if jnp.issubdtype(x.dtype, jnp.integer):
    yield "floats", jnp.ones(x.shape)
  else:
    yield "integers", jnp.ones(x.shape, jnp.int32)
  yield "an axis too few", x[0]
  yield "an axis too many", x[..., None]
  if gate:
    yield "NaN", jnp.full(x.shape, jnp.nan)


def wrong_axes(x, free: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
  """The array with one axis longer by one, for each axis whose size other arrays fix."""
  for axis in range(x.ndim):
    if axis not in free:
      shape = [size + (n == axis) for n, size in enumerate(x.shape)]
      yield f"axis {axis} longer", jnp.full(shape, -0.5 if x.dtype != jnp.int32 else 0, x.dtype)


def unclear(call: Callable, name: str, kind: str) -> str | None:
  """What a call with one wrong argument did instead of saying so; None if its error is clear."""
  try:
    jax.block_until_ready(call())
  except Exception as error:
    message = str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
      frame = frame.tb_next
    raised_by = "" if frame is None else frame.tb_frame.f_code.co_filename
    reasons = []
    if not isinstance(error, CLEAR):
      reasons.append(f"is a {type(error).__name__}")
    if not raised_by.startswith(PACKAGE):
      reasons.append(f"comes from {raised_by}")
    if f"`{name}" not in message:
      reasons.append("does not name the argument")
    if "got" not in message:
      reasons.append("does not say what was got")
    return f"{name}, {kind}: {', '.join(reasons)}: {message[:200]}" if reasons else None
  return f"{name}, {kind}: no error"


def wrong_arguments(
  call: Callable,
  good: Mapping[str, Any],
  name: str,
  *,
  optional: bool = False,
  gate: bool = False,
  free: tuple[int, ...] = (),
) -> list[str]:
  """What `call(**good)` does not say clearly when the argument `name` is wrong.

  Args:
    call: the function.
    good: arguments that are right; an array, a tuple of arrays (each part is made wrong), or an option.
    name: of the argument to make wrong; an option's wrong values are in `OPTIONS`.
    optional: whether None is right.
    gate: whether NaN is wrong.
    free: axes whose size no other argument fixes.
  """
  right = good.get(name)
  values: list[tuple[str, str, Any]] = []
  if isinstance(right, tuple):
    values += [(name, "half a tuple", right[:1]), (name, "text", "text"), (name, "a number", 7)]
    for n, part in enumerate(right):
      for kind, wrong in (*wrong_arrays(part, optional=True), *wrong_axes(part)):
        values.append((name, f"part {n}, {kind}", (*right[:n], wrong, *right[n + 1 :])))
  elif isinstance(right, jax.Array):
    kinds = (*wrong_arrays(right, optional=optional, gate=gate), *wrong_axes(right, free))
    values += [(name, kind, wrong) for kind, wrong in kinds]
  else:
    values += [(name, repr(wrong)[:30], wrong) for wrong in OPTIONS[name]]
  calls = ((kind, lambda wrong=wrong: call(**{**good, name: wrong})) for _, kind, wrong in values)
  return [line for kind, f in calls if (line := unclear(f, name, kind))]
