"""Ten kinds of wrong argument, and the check that lajax refuses each with one clear sentence."""

import math
import pathlib
import traceback
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

import lajax

PACKAGE = pathlib.Path(lajax.__file__).parent

# Wrong where a whole number of at least 1 is expected.
COUNTS = {
  "none": None,
  "text": "8",
  "fraction": 1.5,
  "zero": 0,
  "negative": -1,
  "nan": math.nan,
  "inf": math.inf,
  "bool": True,
  "array": np.ones(2),
  "type": jnp.float32,
}
# Wrong where a finite number is expected.
NUMBERS = {
  "none": None,
  "text": "0.5",
  "nan": math.nan,
  "inf": math.inf,
  "minus inf": -math.inf,
  "bool": True,
  "huge": 10**400,
  "complex": 1j,
  "array": np.ones(2),
  "nan in an array": jnp.float32(math.nan),
}


# Wrong in the options of ops, by name.
OPTIONS = {
  "impl": {"text": "fast", "none": None, "number": 3, "list": ["chunked"], "array": np.ones(2)},
  "chunk_size": {kind: x for kind, x in COUNTS.items() if kind != "none"} | {"huge": 2**40},
  "window": {kind: x for kind, x in COUNTS.items() if kind != "none"} | {"huge": 2**31},
  "scale": {kind: x for kind, x in NUMBERS.items() if kind != "none"},
  "eps": NUMBERS | {"negative": -1e-6},
  "cg_steps": {kind: x for kind, x in COUNTS.items() if kind != "none"},
  "base": NUMBERS | {"zero": 0.0},
  "center": NUMBERS,
  "causal": {"none": None, "text": "yes", "number": 1, "float": 0.0, "array": np.ones(2)},
  "normalization": {"none": None, "text": "none", "number": 3, "array": np.ones(2)},
}


def arrays(
  right, *, optional: bool = False, gate: bool = False, free: tuple[int, ...] = ()
) -> dict:
  """Wrong in the place of an array of an op.

  Args:
    right: the array that is right.
    optional: whether None is right.
    gate: whether NaN is wrong.
    free: axes whose size no other argument fixes.
  """
  other = jnp.ones(right.shape, jnp.float32 if right.dtype == jnp.int32 else jnp.int32)
  longer = {}
  for axis in set(range(right.ndim)) - set(free):
    shape = [size + (n == axis) for n, size in enumerate(right.shape)]
    longer[f"axis {axis} longer"] = jnp.full(shape, -0.5).astype(right.dtype)
  return {
    **({} if optional else {"none": None}),
    "text": "x",
    "list": np.asarray(right).tolist(),
    "number": 7,
    "bool": jnp.ones(right.shape, bool),
    "complex": jnp.ones(right.shape, jnp.complex64),
    "dtype": other,
    "rank too small": right[0],
    "rank too large": right[..., None],
    **({"nan": jnp.full(right.shape, jnp.nan)} if gate else {}),
    **longer,
  }


def parts(right: tuple) -> dict:
  """Wrong in the place of a state that is a tuple of arrays."""
  found = {"half": right[:1], "text": "x", "number": 7}
  for n, part in enumerate(right):
    for kind, wrong in arrays(part).items():
      found[f"part {n}, {kind}"] = (*right[:n], wrong, *right[n + 1 :])
  return found


def matrices(shape: tuple[int, ...], dtype) -> dict:
  """Wrong where an array of this shape and dtype must match other arrays."""
  dtype = jnp.dtype(dtype)
  other = jnp.float32 if dtype != jnp.float32 else jnp.int32
  return {
    "none": None,
    "text": "x",
    "list": [[1]],
    "number": 1,
    "rank too small": jnp.ones(shape[1:], dtype),
    "rank too large": jnp.ones((1, *shape), dtype),
    "one row": jnp.ones((1, *shape[1:]), dtype),
    "one token too many": jnp.ones((shape[0], shape[1] + 1, *shape[2:]), dtype),
    "empty": jnp.ones((0, *shape[1:]), dtype),
    "dtype": jnp.ones(shape, other),
  }


def accepted(call: Callable, right: Mapping, name: str, wrong: Mapping) -> list[str]:
  """Returns the wrong values of argument `name` that `call` does not refuse, or not clearly.

  A clear refusal is a ValueError, TypeError or NotImplementedError raised by lajax whose single
  sentence names the argument and says what was got.
  """
  faults = []
  for kind, value in wrong.items():
    where = f"{getattr(call, '__name__', call)}({name}={kind})"
    try:
      call(**{**right, name: value})
    except (ValueError, TypeError, NotImplementedError) as error:
      file = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
      text = str(error)
      if PACKAGE not in file.parents:
        faults.append(f"{where}: {type(error).__name__} raised by {file.name}: {text[:80]}")
      elif f"`{name}" not in text or ("got" not in text and "gives" not in text) or "\n" in text:
        faults.append(f"{where}: unclear: {text}")
    except Exception as error:
      faults.append(f"{where}: {type(error).__name__}: {error}")
    else:
      faults.append(f"{where}: accepted")
  return faults
