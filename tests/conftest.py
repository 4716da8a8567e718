"""What every test starts from: JAX on the CPU, lajax imported before the first computation, x64 off as users have it.

Tests in float64 enter `jax.enable_x64(True)` themselves (`cases.evaluate` does), or take the fixture `x64`; the flag is
never set for the process, so that a test of float32 runs exactly what a user runs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: an installed CUDA plug-in then stays silent

import lajax  # noqa: F401, I001  (before the CPU client starts: its guard against the hang of jaxlib 0.10 sets a flag)
import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
  "lajax",
  derandomize=True,
  deadline=None,
  database=None,
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # an example may compile: no search for a smaller one
  suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("lajax")


@pytest.fixture
def x64():
  """float64 for one test."""
  with jax.enable_x64(True):
    yield


def pytest_collection_modifyitems(items):
  """Tests marked `gpu` run where JAX finds a GPU, and say so where it does not."""
  if jax.default_backend() != "gpu":
    for item in items:
      if item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.skip(reason="needs a GPU; this machine has none"))
