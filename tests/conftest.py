"""Settings of every test: lajax imported before the first computation, x64 off as users have it.

Tests in float64 enter `jax.enable_x64(True)` themselves (`cases.evaluate` does), or take the
fixture `x64`. The flag is never set for the process: a test of float32 runs what a user runs.
"""

import collections
import gc
import pathlib
import sys

import hypothesis
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "experiments"))
# The order matters: `before_jax` silences an installed CUDA plug-in where there is no driver, and
# lajax sets its flag against the hang of jaxlib 0.10 before the CPU client starts.
import before_jax  # noqa: F401, I001
import lajax  # noqa: F401
import jax

# The whole suite computes as users with strict settings do: arrays of different ranks or dtypes mix
# only where the code says so.
STRICT_PROMOTION = True
if STRICT_PROMOTION:
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tracing makes many small objects that live long. Fewer searches for cycles among them save a sixth
# of the time of tests that mostly trace (13.8 s of test_annotations and test_layers_promises).
gc.freeze()
gc.set_threshold(50_000, 20, 20)

hypothesis.settings.register_profile(
  "lajax",
  derandomize=True,
  deadline=None,
  database=None,
  # an example may compile: no search for a smaller one
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
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
  """Compiles code that jits by itself without LLVM's optimisation, as `cases.quick_jit` does."""
  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, jax.default_backend() == "cpu")
  yield
  jax.config.update(name, before)


# Files that share compiled functions: one process runs them, as it runs the tests of any one file.
SHARING = {
  **dict.fromkeys(
    ("test_implementations", "test_laws", "test_traps", "test_properties", "test_oracle"), "ops"
  ),
  **dict.fromkeys(("test_serve", "test_serve_faults", "test_serve_drafts"), "serve"),
  **dict.fromkeys(("test_pallas", "test_pallas_delta", "test_pallas_dplr"), "kernels"),
}


SLOW_ROWS = 2  # slow rows of one test in a plain run; the others are `exhaustive`


def mark_exhaustive(items):
  """Marks slow rows of a test as `exhaustive`, beyond a number of them spread evenly over all.

  A plain run leaves them out: they repeat a law on further layers, cases and sizes.
  """
  rows = collections.defaultdict(list)
  for item in items:
    if item.get_closest_marker("slow"):
      rows[item.path, item.originalname].append(item)
  for found in rows.values():
    count = min(SLOW_ROWS, len(found))
    kept = {round(n * (len(found) - 1) / max(1, count - 1)) for n in range(count)}
    for n, item in enumerate(found):
      if n not in kept:
        item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest the markers
def pytest_collection_modifyitems(items):
  """Groups tests by file for `--dist loadgroup`, unless they name a group of their own.

  A test marked `gpu` says where no GPU is found.
  """
  mark_exhaustive(items)
  has_gpu = jax.default_backend() == "gpu"
  for item in items:
    file = item.path.stem
    if not item.get_closest_marker("xdist_group"):
      item.add_marker(pytest.mark.xdist_group(SHARING.get(file, file)))
    if item.get_closest_marker("gpu") and not has_gpu:
      item.add_marker(pytest.mark.skip(reason="needs a GPU; this machine has none"))
