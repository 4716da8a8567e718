"""Keeps an installed CUDA plug-in silent on a machine without an NVIDIA driver. Import it before jax.

Otherwise each of the plug-in's libraries writes that it found no driver, and with no JAX_PLATFORMS there is a trace too.
"""

import ctypes
import os
import sys
import types


def has_driver() -> bool:
  try:
    ctypes.CDLL("libcuda.so.1")
  except OSError:
    return False
  return True


def hide_plugins() -> None:
  """JAX, when it is imported, finds plug-ins that do nothing, and none of their libraries."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  for version in ("12", "13"):
    plugin = types.ModuleType(f"jax_plugins.xla_cuda{version}")
    plugin.initialize = lambda: None  # type: ignore[attr-defined]
    sys.modules.setdefault(plugin.__name__, plugin)
    sys.modules.setdefault(f"jax_cuda{version}_plugin", None)  # type: ignore[arg-type]  # importing it is an ImportError


if "jax" not in sys.modules and not has_driver():
  hide_plugins()
