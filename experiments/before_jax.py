"""Prepares the process of a script: import this module before jax.

1. On a machine without an NVIDIA driver, an installed CUDA plug-in stays silent. Otherwise each of
   its libraries reports that it found no driver, and JAX prints a traceback unless JAX_PLATFORMS is
   set.
2. Ctrl-C prints one line instead of a traceback, during the imports that follow too. A script says
   in that line what becomes of its results: it adds a note to the KeyboardInterrupt.
3. `STARTED` is `time.perf_counter()` when the script began, for scripts with a limit of time: the
   imports take seconds.
"""

import ctypes
import os
import pathlib
import sys
import time
import types

STARTED = time.perf_counter()


def has_driver() -> bool:
  try:
    ctypes.CDLL("libcuda.so.1")
  except OSError:
    return False
  return True


def hide_plugins() -> None:
  """Registers plug-ins that do nothing, so that JAX loads none of the installed ones."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  for version in ("12", "13"):
    plugin = types.ModuleType(f"jax_plugins.xla_cuda{version}")
    plugin.initialize = lambda: None  # type: ignore[attr-defined]
    sys.modules.setdefault(plugin.__name__, plugin)
    # None in sys.modules makes the import of this name an ImportError.
    sys.modules.setdefault(f"jax_cuda{version}_plugin", None)  # type: ignore[arg-type]


def report(kind, error, traceback) -> None:
  """Prints one line for Ctrl-C, and Python's traceback for any other error."""
  if not issubclass(kind, KeyboardInterrupt):
    sys.__excepthook__(kind, error, traceback)
    return
  notes = " ".join(getattr(error, "__notes__", []))
  print(f"\n{pathlib.Path(sys.argv[0]).name}: stopped. {notes}".rstrip(), file=sys.stderr)


sys.excepthook = report
if "jax" not in sys.modules and not has_driver():
  hide_plugins()
