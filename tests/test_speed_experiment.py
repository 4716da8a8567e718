"""The speed experiment: its baselines compute what lajax does, its tables have every row, bad flags give one line."""

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

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import speed  # noqa: E402
from speed_baselines import PLAIN  # noqa: E402
from speed_cases import CORE, OPS  # noqa: E402
from speed_config import FORMS, Config, parse  # noqa: E402
from speed_report import forms_table  # noqa: E402
from speed_timing import Row, decode, inputs_of, measure, plan, reference_of  # noqa: E402

TINY = Config(length=3, batch=1, heads=2, width=4, repeats=2, positions=(3, 9))


@pytest.mark.parametrize("op", OPS)
def test_baselines_agree_with_lajax(op):
  inputs = inputs_of(TINY, op, TINY.length)
  form = functools.partial(OPS[op].call, impl="recurrent")
  calls = {"recurrent": form} | {name: baseline.call for name, baseline in PLAIN[op].items()}
  together = lambda inputs: {name: call(**inputs) for name, call in calls.items()}
  results = quick_jit(together)(inputs)
  want = results.pop("recurrent")
  for name, got in results.items():
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-4 * float(abs(b).max()), rtol=0, err_msg=name)


@pytest.mark.parametrize(
  ("arguments", "ops"), [([], CORE), (["--ops", "all"], OPS)], ids=["default", "all"]
)
def test_table_has_every_op_in_every_form(arguments, ops):
  config = parse(["--forms", *FORMS, *arguments])
  rows = plan(config, {})
  assert {(row.op, row.name) for row in rows} >= {(op, form) for op in ops for form in FORMS}
  assert len({(row.op, row.name, row.length) for row in rows}) == len(rows)
  table = forms_table(config, rows)
  assert table.row_count == len(rows)
  assert set(table.columns[0].cells) == set(ops)
  for row in rows:  # each row's reference stands at as many tokens, unless nothing there is timed
    if row.name != "associative" or row.op in config.associative:
      assert (row.op, reference_of(row.op), row.length) in {(r.op, r.name, r.length) for r in rows}


def test_decoding_takes_inputs_without_tokens():
  lines = decode(dataclasses.replace(TINY, ops=("rwkv6",), repeats=1))
  assert [(line["op"], line["position"]) for line in lines] == [("rwkv6", 3), ("rwkv6", 9)]


def test_run_prints_figures_and_writes_lines(tmp_path):
  text = io.StringIO()
  out = tmp_path / "speed.jsonl"
  config = parse(
    [
      *(
        "--ops",
        "linear_recurrence",
        "--length",
        "16",
        "--heads",
        "1",
        "--width",
        "4",
        "--repeats",
        "2",
      ),
      *(
        "--positions",
        "3",
        "9",
        "--forms",
        "recurrent",
        "auto",
        "pallas",
        "--out",
        str(out),
        "--associative",
      ),
      *("simple_gla", "--scaling", "--lengths", "16", "32"),
    ]
  )
  speed.run(config, Console(file=text, width=160))
  lines = [json.loads(line) for line in out.read_text().splitlines()]
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


def test_a_form_that_an_op_does_not_have_says_so():
  (row,) = measure(TINY, [Row("gated_oja", "pallas", TINY.length)], Console(file=io.StringIO()))
  assert row.both is None
  assert "no kernel" in row.why_not


@pytest.mark.skipif(
  platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told to keep memory"
)
def test_kept_memory_is_not_taken_anew():
  code = """
import resource
from allocator import keep_freed_memory
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
    (["--forms", "fast"], "unknown fast; known: recurrent"),
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
