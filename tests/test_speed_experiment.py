"""Speed experiment: baselines agree with lajax, tables are complete, bad flags give one line."""

import dataclasses
import functools
import io
import json
import pathlib
import platform
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import quick_jit
from rich.console import Console

import lajax.layers as L

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import cli  # noqa: E402
from page.kinds import problem_of  # noqa: E402
from speed import run as script  # noqa: E402
from speed.baselines import PLAIN  # noqa: E402
from speed.cases import CORE, OPS  # noqa: E402
from speed.compiling import STACKS, Stack, compile_times  # noqa: E402
from speed.config import IMPLS, Config, parse  # noqa: E402
from speed.report import compile_table, ops_table  # noqa: E402
from speed.timing import Row, decode, inputs_of, measure, plan, reference_of  # noqa: E402

TINY = Config(length=3, batch=1, heads=2, width=4, repeats=2, positions=(3, 9))


@pytest.mark.parametrize("op", OPS)
def test_baselines_agree_with_lajax(op):
  inputs = inputs_of(TINY, op, TINY.length)
  recurrent = functools.partial(OPS[op].call, impl="recurrent")
  calls = {"recurrent": recurrent} | {name: baseline.call for name, baseline in PLAIN[op].items()}
  together = lambda inputs: {name: call(**inputs) for name, call in calls.items()}
  results = quick_jit(together)(inputs)
  want = results.pop("recurrent")
  for name, got in results.items():
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-4 * float(abs(b).max()), rtol=0, err_msg=name)


@pytest.mark.parametrize(
  ("arguments", "ops"), [([], CORE), (["--ops", "all"], OPS)], ids=["default", "all"]
)
def test_table_has_every_op_in_every_implementation(arguments, ops):
  config = parse(["--forms", *IMPLS, *arguments])
  rows = plan(config, {})
  assert {(row.op, row.name) for row in rows} >= {(op, impl) for op in ops for impl in IMPLS}
  assert len({(row.op, row.name, row.length) for row in rows}) == len(rows)
  table = ops_table(config, rows)
  assert table.row_count == len(rows)
  assert set(table.columns[0].cells) == set(ops)
  for row in rows:  # each row's reference stands at as many tokens, unless nothing there is timed
    if row.name != "associative" or row.op in config.associative:
      assert (row.op, reference_of(row.op), row.length) in {(r.op, r.name, r.length) for r in rows}


def test_decoding_takes_inputs_without_tokens():
  lines = decode(dataclasses.replace(TINY, ops=("rwkv6",), repeats=1))
  assert [(line["op"], line["position"]) for line in lines] == [("rwkv6", 3), ("rwkv6", 9)]


@pytest.mark.slow
def test_run_prints_figures_and_writes_lines(tmp_path):
  text = io.StringIO()
  out = tmp_path / "speed"
  flags = "--ops linear_recurrence --length 16 --heads 1 --width 4 --repeats 2 --positions 3 9"
  flags += " --forms recurrent auto pallas --associative simple_gla --scaling --lengths 16 32"
  config = parse([*flags.split(), "--no-compile", "--out", str(out)])
  script.run(config, Console(file=text, width=160))
  lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
  assert [problem_of(line) for line in lines] == [""] * len(lines)
  rows = {line["name"]: line for line in lines if line["task"] == "speed"}
  assert list(rows) == ["recurrent", "auto", "pallas", "naive token scan"]
  for row in rows.values():
    figures = [
      row[key] for key in ("forward_ms", "both_ms", "ratio", "compile_seconds", "temp_mib")
    ]
    assert all(x >= 0 for x in figures)
    assert {"python", "jax", "jaxlib", "device"} <= set(row["versions"])
    assert row["config"]["length"] == 16
  assert rows["naive token scan"]["ratio"] == 1
  assert [line["position"] for line in lines if line["task"] == "speed_decode"] == [3, 9]
  assert [line["length"] for line in lines if line["task"] == "speed_scaling"] == [16, 32]
  kept = {line["task"]: line["memory_kept"] for line in lines}
  on_glibc = platform.libc_ver()[0] == "glibc" and jax.default_backend() == "cpu"
  assert kept == {"speed": False, "speed_decode": False, "speed_scaling": on_glibc}
  assert "losses differ" not in text.getvalue()
  assert "shared machine" in text.getvalue()


def test_an_implementation_that_an_op_does_not_have_says_so():
  (row,) = measure(TINY, [Row("gated_oja", "pallas", TINY.length)], Console(file=io.StringIO()))
  assert row.both is None
  assert "no kernel" in row.why_not


@pytest.mark.skipif(
  platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told to keep memory"
)
def test_kept_memory_is_not_taken_anew():
  code = """
import resource
from speed.allocator import keep_freed_memory
def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(4):
    bytes([1]) * 2**26
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
freed, kept = faults(), keep_freed_memory()
faults()
print(kept, freed, faults())
"""
  run = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT / "experiments",
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  kept, freed, after = run.stdout.split()
  assert kept == "True"
  assert int(after) <= 4  # pages, of 4 times 64 MiB
  assert int(freed) > 100


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--lenth", "4"], "--lenth"),
    (["--ops", "lstm"], "unknown lstm; known: linear_attention"),
    (["--forms", "fast"], "--forms: unknown fast; known: recurrent"),
    (["--forms"], "--forms needs at least one value"),
    (["--compile", "--scaling"], "--compile prints nothing but compile times; leave out --scaling"),
    (["--length", "0"], "--length must be at least 1; got 0"),
    (["--lengths", "64", "--scaling"], "two different lengths"),
    (["--dtype", "int8"], "dtype"),
  ],
)
def test_bad_flags_give_one_line(arguments, said, capsys):
  with pytest.raises(SystemExit) as end:
    parse(arguments)
  assert end.value.code == 2
  message = capsys.readouterr().err
  assert message.startswith("speed.py: error: ")
  assert said in message
  assert message.count("\n") == 1


def test_the_results_need_a_folder():
  with pytest.raises(ValueError, match=r"--out speed\.jsonl: must be a folder; it gets a file"):
    cli.make_folder(pathlib.Path("speed.jsonl"))


@pytest.mark.parametrize(
  ("command", "folder"),
  [
    pytest.param([str(ROOT / "experiments" / "speed.py")], None, id="script"),
    pytest.param(["-m", "experiments.speed"], ROOT, id="module", marks=pytest.mark.slow),
    pytest.param(["-m", "speed"], ROOT / "experiments", id="inner", marks=pytest.mark.slow),
  ],
)
def test_the_script_and_the_folder_of_its_name_are_one_program(command, folder, tmp_path):
  done = subprocess.run(
    [sys.executable, *command, "--length", "0"],
    cwd=folder or tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr == "speed.py: error: --length must be at least 1; got 0\n"
  assert done.stdout == ""


@pytest.mark.usefixtures("quick_compiles")
def test_compile_times_of_layers_are_printed(monkeypatch, tmp_path):
  assert [stack.name for stack in STACKS] == [
    "1 x SoftmaxAttention",
    "1 x GatedDeltaNet",
    "1 x KimiDeltaAttention",
    "4 x KimiDeltaAttention",
    "8 x KimiDeltaAttention",
  ]
  monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests of this process need them
  text = io.StringIO()
  layer = functools.partial(L.SoftmaxAttention, num_heads=1, head_dim=4)
  small = [Stack(functools.update_wrapper(layer, L.SoftmaxAttention), 2)]
  tiny = functools.partial(compile_times, stacks=small, d_model=4, tokens=8)
  monkeypatch.setattr(script, "compile_times", tiny)
  script.run(parse(["--compile", "--out", str(tmp_path)]), Console(file=text, width=160))
  (line,) = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
  assert problem_of(line) == ""
  assert (line["task"], line["name"], line["layers"]) == (
    "speed_compile",
    "2 x SoftmaxAttention",
    2,
  )
  assert line["compile_seconds"] > 0
  assert "Compiling jit(grad): d_model 4, 8 tokens" in " ".join(text.getvalue().split())
  assert f"{line['compile_seconds']:.1f}" in text.getvalue()
  assert compile_table([line]).row_count == 1
