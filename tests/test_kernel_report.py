"""Compiles the kernels for GPUs that are not here, lowers all of them, and checks the committed
report.
"""

import contextlib
import json

import jax
import pytest

from lajax.pallas import compiled, model, programs, report
from lajax.pallas.compiled import ARCHITECTURES, Facts
from lajax.pallas.programs import GATED, KERNELS, WITHOUT_PRODUCTS, Case, Shape, kernels

compiles = pytest.mark.skipif(
  compiled.compiler() is None or not jax.__version__.startswith("0.10."),
  reason="needs NVIDIA's compiler, of the extra `test`, and JAX 0.10, which shows what it compiles",
)
FOUND = json.loads((report.DOCS / "kernels.json").read_text())


def check(rows):
  """No spills, no stack, shared memory within the limit, tensor cores exactly where there are
  products.
  """
  for row in rows:
    assert row.spills == row.stack == 0, row
    assert 0 < row.registers <= 255, row
    assert row.shared <= ARCHITECTURES[row.architecture].shared_per_block, row
    assert row.blocks >= 1, row
    products = row.mma + row.wgmma + row.tcgen05
    if row.kernel not in WITHOUT_PRODUCTS:
      # float32 means products of tf32 parts alone; bfloat16 has products of bfloat16 too.
      assert products > row.tf32 if row.dtype == "bfloat16" else products == row.tf32 > 0, row


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
  ("architecture", "dtype", "family", "gate", "D"),
  [
    ("sm_90a", "bfloat16", "linear_attention", "head", 128),
    ("sm_86", "float32", "dplr", "channel", 64),
    ("sm_80", "bfloat16", "attention", "none", 128),
    ("sm_90a", "float32", "linear_recurrence", "none", 128),
    ("sm_80", "float32", "gated_rms_norm", "none", 128),
  ],
)
def test_compiled_kernels(architecture, dtype, family, gate, D):
  case = Case(family, gate, D, dtype)
  rows = compiled.facts([architecture], [case])
  assert {row.kernel for row in rows} == set(kernels(case))
  check(rows)


def described():
  """Describes a GPU, which later versions of JAX need for lowering where there is none; earlier
  ones do not ask.
  """
  try:
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
  except ImportError:
    return contextlib.nullcontext()
  gpu = ARCHITECTURES["sm_90a"]
  device = AbstractDevice(device_kind=gpu.name, num_cores=gpu.cores, platform="gpu")
  return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def _lowered():
  """Yields all families; of those with time splits, the other number of splits too. Two are fast."""
  for family in KERNELS:
    marks = () if family in ("linear_attention", "norm") else pytest.mark.slow
    wanted = {"train", "decode", "decode before", "decode by channel"}
    yield pytest.param(family, wanted, id=family, marks=marks)
    if family in GATED:
      yield pytest.param(family, {"splits", "whole"}, id=f"{family}-splits", marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "wanted"), [*_lowered()])
def test_kernels_are_lowered_for_a_gpu(family, wanted):
  """Also by versions of JAX whose compilation for a GPU cannot be looked at here."""
  made = programs.programs(family, "none", Shape(B=1, T=128, H=2), "bfloat16")
  for name in wanted & set(made):
    with described():
      lowered = jax.jit(made[name].call).trace(*made[name].args).lower(lowering_platforms=("cuda",))
    names = model.kernel_names(made[name].call, *made[name].args)
    assert set(names) <= set(KERNELS[family])
    assert lowered.as_text().count("custom_call") == len(names) > 0


def test_the_report_in_docs_is_whole():
  rows = [Facts(**row) for row in FOUND["kernels"]]
  want = {
    (case, kernel, name)
    for case in programs.cases()
    for kernel in kernels(case)
    for name in ARCHITECTURES
  }
  assert {
    (Case(row.family, row.gate, row.D, row.dtype), row.kernel, row.architecture) for row in rows
  } == want
  check(rows)


def test_steps_by_kernels_take_less_memory_and_memory_linear_in_tokens():
  """In the committed report: XLA's plans for an H100."""
  temp = {(row["layer"], row["impl"], row["T"]): row["temp"] for row in FOUND["steps"]}
  for layer in report.STEPS["layers"]:
    for T in report.LENGTHS:
      assert temp[layer, "pallas", T] < temp[layer, "chunked", T]
    first, last = report.LENGTHS[-2:]
    for impl in report.STEPS["impls"]:
      assert temp[layer, impl, last] / temp[layer, impl, first] <= 1.05 * last / first


def test_a_model_counts_what_kernels_move_and_compute():
  """One launch of the norm reads two arrays and the weight, and writes one array."""
  shape = Shape(B=1, T=64, H=2, D=64)
  made = programs.programs("gated_rms_norm", "none", shape, "bfloat16")["forward"]
  (found,) = model.launches(made.call, *made.args)
  assert found.kernel == "norm_forward"
  assert found.moved == 3 * 128 * 64 * 2 + 64 * 4
  gpu = ARCHITECTURES["sm_90a"]
  assert model.seconds(found, gpu, "bfloat16") == found.moved / gpu.bandwidth
  made = programs.programs("linear_attention", "none", shape, "bfloat16")
  (alone,) = model.launches(made["forward"].call, *made["forward"].args)
  scan = model.launches(made["train"].call, *made["train"].args)[0]
  assert alone.kernel == scan.kernel == "linear_outputs"
  # In training it also stores the state before each head's only chunk, in bfloat16.
  assert scan.moved - alone.moved == 2 * 64 * 64 * 2
  # Per head: scores, two reads, by them and from the state, and one write.
  products = 4 * 2 * 64**3
  assert 2 * products < alone.operations < 2.1 * products
