"""What the kernels compile to, for GPUs that are not here, and whether the report in docs/ is that of these kernels."""

import contextlib
import json

import jax
import pytest

from lajax.pallas import compiled, model, programs, report
from lajax.pallas.compiled import ARCHITECTURES, Facts
from lajax.pallas.programs import KERNELS, WITHOUT_PRODUCTS, Case, Shape, kernels

compiles = pytest.mark.skipif(
  compiled.compiler() is None or not jax.__version__.startswith("0.10."),
  reason="needs NVIDIA's compiler, of the extra `test`, and JAX 0.10, which shows what it compiles",
)
FOUND = json.loads((report.DOCS / "kernels.json").read_text())


# Hopper's warp groups share a product of 64 x 16 here: its large pass is cut in two, each of the small ones is made by both, so
# that each of the two products is 2 x 2 x 4 + 4 instructions, twice over no multiple of three.
BOTH_GROUPS = {
  (kernel, gate, 64, "float32", "sm_90a"): (72, 40)
  for kernel in (
    "delta_cotangents", "delta_cotangents_in_segments", "delta_summaries_back",
    "dplr_cotangents", "dplr_cotangents_in_segments", "dplr_summaries_back",
  )
  for gate in ("none", "head")
}  # fmt: skip


def check(rows):
  """No spills, no stack, shared memory within the limit, tensor cores where there are products; float32 by three tf32."""
  for row in rows:
    assert row.spills == row.stack == 0, row
    assert 0 < row.registers <= 255, row
    assert row.shared <= ARCHITECTURES[row.architecture].shared_per_block, row
    assert row.blocks >= 1, row
    products = row.mma + row.wgmma + row.tcgen05
    if row.kernel not in WITHOUT_PRODUCTS:
      assert products > row.tf32 if row.dtype == "bfloat16" else products == row.tf32 > 0, row
      three = products % 3 == 0 or (row.mma, row.wgmma) == BOTH_GROUPS.get(row[1:6])
      assert row.dtype == "bfloat16" or three, row


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
  ("architecture", "dtype", "family", "gate", "D"),
  [
    ("sm_90a", "bfloat16", "linear_attention", "head", 128),
    ("sm_90a", "bfloat16", "delta_rule", "head", 128),
    ("sm_86", "float32", "dplr", "channel", 64),
    ("sm_80", "bfloat16", "attention", "none", 128),
    ("sm_90a", "float32", "linear_recurrence", "none", 128),
    ("sm_90a", "bfloat16", "short_conv", "none", 128),
    ("sm_80", "float32", "gated_rms_norm", "none", 128),
  ],
)
def test_compiled_kernels(architecture, dtype, family, gate, D):
  case = Case(family, gate, D, dtype)
  rows = compiled.facts([architecture], [case])
  assert {row.kernel for row in rows} == set(kernels(case))
  check(rows)


def described():
  """A GPU that later versions of JAX want to know of where there is none; earlier ones do not ask."""
  try:
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
  except ImportError:
    return contextlib.nullcontext()
  gpu = ARCHITECTURES["sm_90a"]
  device = AbstractDevice(device_kind=gpu.name, num_cores=gpu.cores, platform="gpu")
  return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


LAUNCHES = {
  "linear_attention": 3,
  "delta_rule": 6,
  "dplr": 6,
  "attention": 3,
  "linear_recurrence": 6,
}  # both ways; else 2
IN_SEGMENTS = {
  "linear_attention": 4,
  "delta_rule": 5,
  "dplr": 5,
}  # of what goes through them, both ways


@pytest.mark.parametrize("family", KERNELS)
def test_kernels_are_lowered_for_a_gpu(family):
  """Also by versions of JAX whose compilation for a GPU cannot be looked at here."""
  made = programs.programs(family, "none", Shape(B=1, T=128, H=2), "bfloat16")
  for name in set(made) - {"forward"}:
    with described():
      lowered = jax.jit(made[name].call).trace(*made[name].args).lower(lowering_platforms=("cuda",))
    wanted = {"decode": 1, "segments": IN_SEGMENTS.get(family)}.get(name, LAUNCHES.get(family, 2))
    assert lowered.as_text().count("custom_call") == wanted


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
  assert (report.DOCS / "kernels.md").read_text() == report.markdown(FOUND)


@pytest.mark.parametrize("family", KERNELS)
def test_the_report_in_docs_belongs_to_these_kernels(family):
  """`python -m lajax.pallas.report` compiles again what has changed."""
  assert FOUND["fingerprints"][family] == report.fingerprint(family)


def test_steps_by_kernels_take_less_memory_and_memory_linear_in_tokens():
  """Of the committed figures: XLA's plans for an H100."""
  temp = {(row["layer"], row["impl"], row["T"]): row["temp"] for row in FOUND["steps"]}
  for layer in report.STEPS["layers"]:
    for T in report.LENGTHS:
      assert temp[layer, "pallas", T] < temp[layer, "chunked", T]
    first, last = report.LENGTHS[-2:]
    for impl in report.STEPS["impls"]:
      assert temp[layer, impl, last] / temp[layer, impl, first] <= 1.05 * last / first


def test_a_model_counts_what_kernels_move_and_compute():
  """Of one launch of the norm: two arrays read, one written, and the weight."""
  shape = Shape(B=1, T=64, H=2, D=64)
  made = programs.programs("gated_rms_norm", "none", shape, "bfloat16")["forward"]
  (found,) = model.launches(made.call, *made.args)
  assert found.kernel == "norm_forward"
  assert found.moved == 3 * 128 * 64 * 2 + 64 * 4
  gpu = ARCHITECTURES["sm_90a"]
  assert model.seconds(found, gpu, "bfloat16") == found.moved / gpu.bandwidth
  made = programs.programs("linear_attention", "none", shape, "bfloat16")
  (alone,) = model.launches(made["forward"].call, *made["forward"].args)
  attend = model.launches(made["train"].call, *made["train"].args)[0]
  assert alone.kernel == attend.kernel == "linear_outputs"
  assert (
    attend.moved - alone.moved == 2 * 64 * 64 * 2
  )  # the state before each head's one chunk, bfloat16
  products = 4 * 2 * 64**3  # of each head: scores, what they and the state read, what is written
  assert 2 * products < alone.operations < 2.1 * products


def test_a_forward_pass_moves_what_it_must():
  """Over the least possible, bfloat16, K = V = 128: the additive family 1.5, also with the states that it keeps; the other two 2.5."""
  moved = lambda family: [
    row.moved for row in report.modelled(Case(family, "head", 128, "bfloat16"), Shape())
  ]
  assert max(moved("linear_attention")[:2]) <= 1.5
  assert moved("delta_rule")[0] <= 2.5
  assert max(moved("dplr")[:2]) <= 2.5


def test_fingerprints_change_with_code_and_not_with_words(tmp_path, monkeypatch):
  source = (report.FOLDER / "norm.py").read_text()
  for name in ("launch.py", "tiles.py"):
    (tmp_path / name).write_text((report.FOLDER / name).read_text())
  monkeypatch.setattr(report, "FOLDER", tmp_path)
  digest = lambda text: (
    (tmp_path / "norm.py").write_text(text) and report.fingerprint("gated_rms_norm")
  )
  first = digest(source)
  assert digest("# a comment\n" + source) == first
  assert digest(source + "\nMORE = 1\n") != first


def test_blocks_at_once():
  """128 registers and 8 warps fill a core's registers twice."""
  row = Facts("f", "k", "none", 64, "bfloat16", "sm_80", 8, 128, 0, 0, 24 * 1024, 0, 0, 0, 0)
  assert row.blocks == 2
  assert row._replace(shared=100 * 1024).blocks == 1
  assert row.registers * row.warps * 32 * row.blocks <= compiled.REGISTERS
