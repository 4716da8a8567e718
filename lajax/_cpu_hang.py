"""A guard against a hang of jaxlib 0.10 on machines with few cores.

On jaxlib 0.10.x a jitted gradient of plain batched matmuls and one scan can stop for ever at 0 %
load on a CPU with two cores, sometimes in the first call, sometimes in a later one. jaxlib 0.11 and
later do not. The concurrency-optimised scheduler of XLA:CPU is what hangs; without it the same
programs run, no slower.

XLA reads its flags when the CPU client is made. So importing lajax before the first JAX computation
adds the flag in time. A program that sets XLA_FLAGS itself must do so before it imports lajax, or
keep what is there: `os.environ["XLA_FLAGS"] += " --xla_..."`. An assignment after the import
drops the flag, and nothing can warn of it.
"""

import os
import warnings

import jaxlib
from jax._src import xla_bridge

FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"
FEW = 4  # cores up to which the hang has been seen


def _affected(version: str) -> bool:
  major, minor = (int(part) for part in version.split(".")[:2])
  return (major, minor) < (0, 11)


def _cores() -> int:
  """Number of cores that this process may use: in a container fewer than the machine has."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def guard() -> None:
  """Turns the scheduler off where it can hang, unless the user has chosen; warns if it cannot."""
  flags = os.environ.get("XLA_FLAGS", "").strip()
  if not _affected(jaxlib.__version__) or FLAG in flags:
    return
  if xla_bridge.backends_are_initialized():
    if "cpu" in xla_bridge.backends() and _cores() <= FEW:
      _warn(
        "lajax was imported after JAX had started its CPU client",
        "Import lajax before the first JAX computation",
      )
  elif not flags or flags.startswith("-"):
    os.environ["XLA_FLAGS"] = f"{flags} --{FLAG}=false".strip()
  elif _cores() <= FEW and not _file_chooses(
    flags
  ):  # XLA reads a file of that name; it stays as it is
    _warn(f"XLA_FLAGS names a file, {flags}, without the flag", f"Add --{FLAG}=false to the file")


def _file_chooses(path: str) -> bool:
  """Says whether a file of flags decides on the scheduler."""
  try:
    with open(path) as file:
      return FLAG in file.read()
  except OSError:
    return False  # XLA says so itself


def _warn(why: str, remedy: str) -> None:
  warnings.warn(
    f"{why}; jaxlib {jaxlib.__version__} can then hang on few cores. {remedy}, or set "
    f"XLA_FLAGS=--{FLAG}=false, or use jaxlib 0.11 or later.",
    RuntimeWarning,
    stacklevel=4,
  )
