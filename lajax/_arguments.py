"""Checks of arguments: numbers, random keys, required arrays. Each raises a ValueError."""

import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lajax._shapes import check


def whole_number(name: str, value, least: int = 1, most: int | None = None) -> int:
  """Returns a whole number as an int; it may come from NumPy."""
  try:
    number = None if isinstance(value, bool | np.bool_) else operator.index(value)
  except TypeError:
    number = None
  if number is None or number < least or (most is not None and number > most):
    limit = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"`{name}` must be a whole number {limit}; got {describe(value)}.")
  return number


def finite_number(name: str, value) -> None:
  """Checks a real number that is finite in float32; of a traced one only shape and dtype."""
  if isinstance(value, jax.Array | np.ndarray):
    kinds = (jnp.floating, jnp.integer)
    real = value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
  else:
    real = isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
  limit = float(np.finfo(np.float32).max)
  if not real or not (isinstance(value, Tracer) or -limit <= value <= limit):
    raise ValueError(f"`{name}` must be a finite number; got {describe(value)}.")


def random_key(name: str, key) -> None:
  """Checks a JAX random key, typed or raw."""
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
  raw = isinstance(key, jax.Array | np.ndarray) and dtype == jnp.uint32 and len(key.shape) == 1
  if not typed and not raw:
    raise ValueError(
      f"`{name}` must be one JAX random key; got {describe(key)}. Make one by jax.random.key(0)."
    )


def arrays(sizes: Mapping[str, int] | None = None, /, **given) -> dict[str, int]:
  """Checks arrays as `_shapes.check` does, but refuses None and knows the kind "bool" too."""
  stand_ins = {}
  for name, (x, letters, kind) in given.items():
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
      raise ValueError(
        f"`{name}` must be an array [{letters}] of kind {kind}; got {describe(x)}. "
        "Pass it through jnp.asarray."
      )
    if kind == "bool":
      if x.dtype != jnp.bool_:
        raise ValueError(
          f"`{name}` must have the dtype bool; got {x.dtype}. Cast it, as in {name}.astype(bool)."
        )
      x, kind = jax.ShapeDtypeStruct(x.shape, jnp.int32), "int"
    stand_ins[name] = (x, letters, kind)
  return check(sizes, **stand_ins)


def describe(value: Any) -> str:
  """Describes a value in an error: shape and dtype of an array, else its text."""
  if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape != ():
    return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
  text = " ".join(repr(value).split())
  return text if len(text) <= 60 else f"{type(value).__name__} {text[:50]}..."
