"""What every test starts from: JAX on the CPU, lajax imported before the first computation, x64 off as users have it.

Tests in float64 enter `jax.enable_x64(True)` themselves (`cases.evaluate` does), or take the fixture `x64`; the flag is
never set for the process, so that a test of float32 runs exactly what a user runs.
"""

import contextlib
import ctypes
import gc
import os
import pathlib

import hypothesis
import pytest


def has_driver() -> bool:
  try:
    ctypes.CDLL("libcuda.so.1")
  except OSError:
    return False
  return True


@contextlib.contextmanager
def quiet_plugin():
  """Without a driver, JAX does not look for GPUs, and the notes of an installed CUDA plug-in's libraries are dropped."""
  if has_driver():
    yield
    return
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  stderr = os.dup(2)
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)


with quiet_plugin():
  import lajax  # noqa: F401, I001  (before the CPU client starts: its guard against the hang of jaxlib 0.10 sets a flag)
  import jax

  jax.devices()

# Tracing makes many small objects that live: looking through all of them for cycles at Python's pace takes a quarter of it.
gc.freeze()
gc.set_threshold(50_000, 20, 20)

hypothesis.settings.register_profile(
  "lajax",
  derandomize=True,
  deadline=None,
  database=None,
  phases=[
    hypothesis.Phase.explicit,
    hypothesis.Phase.generate,
  ],  # an example may compile: no search for a smaller one
  suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("lajax")


@pytest.fixture
def x64():
  """float64 for one test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def quick_compiles():
  """Code that jits by itself (experiments, README's examples) compiles without LLVM's optimisation, as `cases.quick_jit` does."""
  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, jax.default_backend() == "cpu")
  yield
  jax.config.update(name, before)


TOGETHER = {  # files that share compiled functions: one process runs them, as it does the tests of any one file
  **dict.fromkeys(
    ("test_forms", "test_laws", "test_traps", "test_properties", "test_oracle"), "forms"
  ),
  **dict.fromkeys(("test_pallas", "test_pallas_delta", "test_pallas_dplr"), "kernels"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  if config.getoption("dist") != "loadfile":
    return None
  from xdist.scheduler import LoadFileScheduling

  class LoadFilesTogether(LoadFileScheduling):
    def _split_scope(self, nodeid):
      file = super()._split_scope(nodeid)
      return TOGETHER.get(pathlib.PurePath(file).stem, file)

  return LoadFilesTogether(config, log)


def pytest_collection_modifyitems(items):
  """Tests marked `gpu` run where JAX finds a GPU, and say so where it does not."""
  if jax.default_backend() != "gpu":
    for item in items:
      if item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.skip(reason="needs a GPU; this machine has none"))
