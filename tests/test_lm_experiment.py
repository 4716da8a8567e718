"""The experiment on real text: split, packing, references, resuming, flags, lines of results."""

import collections
import dataclasses
import io
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from lm.command import main, prepare  # noqa: E402
from lm.config import COMPARED, parse, plan  # noqa: E402
from lm.data import Batches, batches_of, files_of, pack, split, standard_library  # noqa: E402
from lm.model import build, parameters_of, row_of  # noqa: E402
from lm.optimizer import is_matrix  # noqa: E402
from lm.references import witten_bell  # noqa: E402
from lm.report import bits_over_time, label, table  # noqa: E402
from lm.run import Run, line_of, of_runs  # noqa: E402
from lm.sampling import write  # noqa: E402
from lm.schedule import Progress, learning_rate  # noqa: E402
from lm.training import Log  # noqa: E402
from page.kinds import problem_of  # noqa: E402
from results import read  # noqa: E402

TINY = "--d-model 16 --num-heads 1 --key-width 8 --value-width 8 --mlp-width 16 --ngram-rows 16"
TINY += " --batch 2 --length 32 --eval-length 32 --eval-rows 2 --warmup 2"
DOCUMENTS = (b"abc", b"defgh", b"i")


# --- text ---


@pytest.fixture
def folder(tmp_path):
  """40 files, two of them empty: the 20th and the 40th are held out."""
  (tmp_path / "text").mkdir()
  for n in range(1, 41):
    text = b"" if n in (3, 40) else b"def f%d(x): return %d * x\n" % (n, n) * 8
    (tmp_path / "text" / f"{n:02}.py").write_bytes(text)
  return tmp_path / "text"


def test_each_20th_file_is_held_out_and_empty_ones_count(folder):
  text = split(files_of([folder, folder / "01.py"]))
  assert [data[:6] for data in text.held_out] == [b"def f2"]
  assert len(text.training) == 37
  assert not set(text.held_out) & set(text.training)


def test_standard_library_has_no_tests():
  paths = standard_library()
  assert len(paths) > 500
  assert {"test", "tests"}.isdisjoint(part for path in paths for part in path.parts[-3:])
  assert paths == sorted(paths)


def test_each_byte_is_predicted_once_from_those_before_it():
  rows = pack(DOCUMENTS, 4)
  assert [x.shape for x in rows] == [(3, 4)] * 3
  inputs, targets, documents = (x.ravel() for x in rows)
  assert bytes(targets[:9].astype(np.uint8)) == b"".join(DOCUMENTS)
  assert documents.tolist() == [0] * 3 + [1] * 5 + [2] + [-1] * 3
  for n, document in enumerate(DOCUMENTS):
    for place, token in enumerate(inputs[documents == n]):
      last = (bytes(4) + document)[place : place + 4]
      assert int(token).to_bytes(4, "big") == last


def test_batches_depend_on_seed_and_step_alone():
  documents = [bytes([n]) * (5 * n) for n in range(1, 9)]
  batches = Batches(documents, batch=3, length=12, seed=4)
  at = [batches.at(step) for step in range(12)]
  for step in (11, 0, 5):
    again = Batches(documents, batch=3, length=12, seed=4).at(step)
    jax.tree.map(np.testing.assert_array_equal, again, at[step])
  epoch = np.concatenate([x.targets[x.documents >= 0] for x in at[: batches.steps_per_epoch]])
  assert batches.steps_per_epoch == 5
  counts = np.bincount(epoch, minlength=9)
  assert (counts[1:] <= 5 * np.arange(1, 9)).all()  # no byte twice in an epoch
  other = Batches(documents, batch=3, length=12, seed=5).at(0)
  assert (other.targets != at[0].targets).any()


def test_last_batch_is_filled_with_padding():
  parts = list(batches_of(pack(DOCUMENTS, 2), 2))
  assert [x.inputs.shape for x in parts] == [(2, 2)] * 3
  assert sum((x.documents >= 0).sum() for x in parts) == 9


def test_row_of_an_ngram_depends_on_its_bytes_alone():
  tokens = np.arange(0, 2**31, 2**22 + 12345, dtype=np.int32)[None]
  for order in (2, 3, 4):
    rows = np.asarray(row_of(tokens, order, 64))
    assert rows.min() >= 0
    assert rows.max() < 64
    assert len(np.unique(rows)) > 50
    same = tokens & np.int32(2 ** min(8 * order, 31) - 1)
    np.testing.assert_array_equal(rows, row_of(same, order, 64))


# --- references ---


def counted(training, held_out, order: int) -> float:
  """Witten-Bell as its equation stands, with dictionaries."""
  counts = collections.defaultdict(collections.Counter)
  for document in training:
    for n in range(order + 1):
      for place, byte in enumerate(document):
        counts[(bytes(order) + document)[order + place - n : order + place]][byte] += 1

  def probability(byte, context):
    shorter = probability(byte, context[1:]) if context else 1 / 256
    seen = counts.get(context)
    if seen is None:
      return shorter
    return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen))

  bits, number = 0.0, 0
  for document in held_out:
    for place, byte in enumerate(document):
      bits -= math.log2(probability(byte, (bytes(order) + document)[place : place + order]))
      number += 1
  return bits / number


def test_context_model_equals_a_count_by_hand():
  # Order 0: a twice, b once, two kinds. Order 1: \0 -> a; a -> a, b.
  a, b = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5
  bits = -(math.log2((1 + a) / 2) + math.log2((1 + 2 * b) / 4)) / 2
  assert math.isclose(witten_bell([b"aab"], [b"ab"], 1), bits, rel_tol=1e-12)


@pytest.mark.parametrize("order", [0, 3])
def test_context_model_equals_its_equation(order):
  training = [b"the cat sat on the mat", b"that hat", b"x"]
  held_out = [b"the hat on the cat", b"zzz that"]
  got, want = witten_bell(training, held_out, order), counted(training, held_out, order)
  assert math.isclose(got, want, rel_tol=1e-12)


# --- schedule and log ---


def test_recorded_shares_are_taken_again():
  run = Run(minutes=10.0)
  progress = Progress(run, time.perf_counter(), before=300.0, recorded={7: 0.25, 8: 0.5})
  assert [progress.at(7), progress.at(8)] == [0.25, 0.5]
  assert 0.5 < progress.at(9) < 0.7
  assert Progress(Run(steps=8), 0.0).at(6) == 0.75


def test_learning_rate_rises_then_falls_to_zero():
  run = Run(steps=100, warmup=9)
  rates = [learning_rate(run, step, step / 100) for step in range(101)]
  assert rates[0] == 0.1
  assert max(rates) == rates[9] == 0.91
  assert rates[100] == 0


def test_later_lines_of_a_log_count(tmp_path):
  log = Log(tmp_path / "log.jsonl")
  log.add(dict(step=0, seconds=1.0, bits=[8.0, 7.0], shares=[0.0, 0.1]))
  log.add(dict(step=2, seconds=2.0, bits=[6.0], shares=[0.2]))
  log.add(dict(step=2, seconds=3.0, bits=[5.0, 4.0], shares=[0.2, 0.3]))
  log.add(dict(step=4, seconds=4.0, held_out=3.5))
  again = Log(tmp_path / "log.jsonl")
  assert again.shares() == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3}
  assert again.curves() == dict(
    curve=[[4, 4.0, 3.5]], training_curve=[[0, 1.0, 7.5], [2, 3.0, 4.5]]
  )


# --- flags ---


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ("--minutes 0", "--minutes must be positive; got 0"),
    ("--steps 0", "--steps must be at least 1; got 0"),
    ("--pattern kda tofu", "--pattern: unknown tofu; known: kda, gated_deltanet, mla, softmax"),
    ("--pattern", "--pattern needs at least one value"),
    ("--ngrams 2 5", "--ngrams must be among 2, 3 and 4 bytes; got 5"),
    ("--ngram-rows 100", "--ngram-rows must be a power of two, at least 2; got 100"),
    ("--text nowhere", "--text nowhere: no such file or folder"),
    ("--text setup.cfg", "--text needs at least 20 files"),
    ("--init nowhere", "--init nowhere: no such folder"),
    ("--init . --compare", "leave --compare out"),
    ("--learning-rate nan", "--learning-rate must be positive; got nan"),
    ("--weight-decay -1", "--weight-decay must be at least 0; got -1"),
    ("--steps 7 --accumulate 2", "--steps must be a multiple of --accumulate 2; got 7"),
    ("--key-width 31 --pattern softmax --value-width 31", "`head_dim` must be even"),
    ("--optimizer sgd", "'muon', 'adam'"),
    ("--stpes 3", "--stpes"),
    ("--out setup.cfg/x", "--out setup.cfg/x: cannot make this folder"),
  ],
)
def test_a_bad_flag_gets_one_line(arguments, says, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "setup.cfg").write_text("a file where a folder is asked for")
  with pytest.raises(SystemExit) as end:
    prepare(arguments.split())
  assert end.value.code == 2
  out, error = capsys.readouterr()
  assert out == ""
  assert error.startswith("lm.py: error: ")
  assert error.count("\n") == 1
  assert says in error


def test_compared_models_have_equal_numbers_of_parameters():
  runs = plan(parse(["--compare"]))
  assert [run.pattern for run in runs] == list(COMPARED)
  numbers = [parameters_of(run) for run in runs]
  assert max(numbers) < 1.01 * min(numbers)
  assert len({run.name for run in runs}) == 3


def test_muon_takes_the_matrices_of_the_layers():
  parameters = nnx.state(nnx.eval_shape(lambda: build(Run(), nnx.Rngs(0))), nnx.Param)
  chosen = jax.tree_util.tree_leaves_with_path(is_matrix(parameters))
  names = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in chosen}
  assert any(x for name, x in names.items() if "in_proj/q" in name)
  assert any(x for name, x in names.items() if "mlp/down" in name)
  for part in ("embedding", "ngrams", "head", "norm", "A_log", "dt_bias", "beta"):
    assert not any(x for name, x in names.items() if part in name), part


# --- runs ---


def line(**changes) -> dict:
  metrics = dict(
    bits_per_byte=1.7, parameters=10, ngram_parameters=5, steps=3, tokens=6, seconds=4.0
  )
  metrics |= dict(cpu_seconds=5.0, tokens_per_second=2.0, utilisation=0.3, compile_seconds=1.0)
  metrics |= dict(held_out_bytes=7, references={"gzip": 2.0}, mixers=["kda", "kda", "mla"])
  metrics |= dict(curve=[[0, 1.0, 8.0]], training_curve=[[0, 1.0, 8.0], [1, 2.0, 7.0]])
  return line_of(Run(), metrics | changes)


def test_table_and_figure_are_made_from_lines():
  console = Console(file=io.StringIO(), width=150)
  console.print(table([line()]))
  printed = console.file.getvalue()
  assert "2 kda, 1 mla" in printed
  assert "1.700" in printed
  assert "gzip" in printed
  assert label(line()) == "2 kda, 1 mla"
  assert bits_over_time([line()]).axes
  bad = line(bits_per_byte=None)
  assert of_runs([bad, line()], [Run()]) == [line()]
  assert of_runs([bad], [Run()]) == []
  assert of_runs([line()], [dataclasses.replace(Run(), seed=1)]) == []


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_a_run_writes_one_line_is_not_trained_again_and_may_be_built_upon(
  folder, tmp_path, monkeypatch, capsys
):
  out = tmp_path / "out"
  small = f"--pattern softmax --steps 12 --samples 0 {TINY} --text {folder} --out {out}".split()
  monkeypatch.setattr(sys, "argv", ["lm.py", *small])
  main()
  lines = read(out / "results.jsonl")
  assert len(lines) == 1
  before = lines[0]
  assert {"config", "versions", "tokens_per_second", "utilisation"} <= set(before)
  assert problem_of(before) == ""
  assert before["steps"] == 12
  assert before["bits_per_byte"] < before["curve"][0][2]
  assert set(before["references"]) == {"gzip", "xz", "Witten-Bell, order 3"}
  assert (out / "bits_per_byte.png").stat().st_size > 0
  capsys.readouterr()
  main()
  assert len(read(out / "results.jsonl")) == 1
  assert "stands in" in capsys.readouterr().out

  start = ["--init", str(out / before["name"])]
  monkeypatch.setattr(sys, "argv", ["lm.py", *small, *start])
  main()
  after = read(out / "results.jsonl")[1]
  assert after["curve"][0][2] < before["curve"][0][2] - 0.1
  capsys.readouterr()
  with pytest.raises(SystemExit):
    prepare([*small, *start, "--mlp-width", "24"])
  assert "give the flags of the model that were given there" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_model_writes_after_a_prompt():
  run = plan(parse(["--pattern", "kda", "mla", *TINY.split()]))[0]
  model = build(run, nnx.Rngs(0))
  first, second = write(model, b"def ", 2, 5)
  assert first.startswith(b"def ")
  assert len(first) == 9
  assert first != second
  assert write(model, b"def ", 2, 5) == [first, second]


def steps_of(lines: list[dict]) -> dict[int, list[float]]:
  """Bits per byte by step, as often as the step was taken."""
  found = collections.defaultdict(list)
  for entry in lines:
    for n, bits in enumerate(entry.get("bits", [])):
      found[entry["step"] + n].append(bits)
  return found


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(folder, tmp_path):
  """The process is killed behind a checkpoint; the next one repeats the steps after it exactly."""
  out = tmp_path / "out"
  flags = f"--pattern softmax --minutes 5 --samples 0 --checkpoint-minutes 0.02 {TINY}"
  command = [sys.executable, str(ROOT / "experiments" / "lm.py"), *flags.split()]
  command += ["--text", str(folder), "--out", str(out)]
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),  # the second process compiles nothing
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }

  def run_until(condition) -> None:
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
      deadline = time.monotonic() + 120
      while not condition():
        assert process.poll() is None, "the process ended by itself"
        assert time.monotonic() < deadline, "no progress in two minutes"
        time.sleep(0.02)
      process.send_signal(signal.SIGKILL)

  log = lambda: next((read(path) for path in out.glob("*/log.jsonl")), [])
  steps = lambda: max(steps_of(log()), default=0)
  saved = lambda: max(
    (int(p.name) for p in out.glob("*/checkpoints/*") if p.name.isdigit()), default=0
  )
  run_until(lambda: saved() >= 10 and steps() >= saved() + 20)
  reached = steps()
  run_until(lambda: steps() > reached + 10)
  repeated = {step: bits for step, bits in steps_of(log()).items() if len(bits) > 1}
  assert len(repeated) >= 10
  assert min(repeated) > 0
  assert all(first == second for first, second in repeated.values())
