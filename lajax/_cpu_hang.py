"""A guard against a hang of jaxlib 0.10 on machines with few cores.

On jaxlib 0.10.x a jitted gradient of plain batched matmuls and one scan can stop for ever at 0 % load on a CPU with two
cores (sometimes in the first call, sometimes in a later one). jaxlib 0.11 and later do not. The concurrency-optimised
scheduler of XLA:CPU is what hangs; without it the same programs run, no slower. XLA reads its flags when the CPU client is
made, so importing lajax before the first JAX computation is enough.
"""

import os
import warnings

import jaxlib
from jax._src import xla_bridge

FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def _affected(version: str) -> bool:
  major, minor = (int(part) for part in version.split(".")[:2])
  return (major, minor) < (0, 11)


def guard() -> None:
  """Turns the scheduler off where it can hang, unless the user has chosen; warns if it is too late."""
  flags = os.environ.get("XLA_FLAGS", "")
  if not _affected(jaxlib.__version__) or FLAG in flags:
    return
  if not xla_bridge.backends_are_initialized():
    os.environ["XLA_FLAGS"] = f"{flags} --{FLAG}=false".strip()
  elif "cpu" in xla_bridge.backends() and (os.cpu_count() or 1) <= 4:
    warnings.warn(
      f"lajax was imported after JAX had started its CPU client; jaxlib {jaxlib.__version__} can then hang on few cores. "
      f"Import lajax before the first JAX computation, or set XLA_FLAGS=--{FLAG}=false, or use jaxlib 0.11 or later.",
      RuntimeWarning,
      stacklevel=3,
    )
