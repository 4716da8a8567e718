"""The ordering table of recall.py: flags, stacked training, resuming, verdicts, figures."""

import dataclasses
import io
import itertools
import pathlib
import sys
import threading

import numpy as np
import pytest
from rich.console import Console

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

from recall import stacked, suite, suite_report  # noqa: E402
from recall.ordering import QUICK, ROWS, Row, options, tracking_row  # noqa: E402
from recall.suite_config import parse, plan  # noqa: E402
from recall.trials import Trial, line_of, of_trials  # noqa: E402
from recall.variants import VARIANTS  # noqa: E402
from results import append, read  # noqa: E402

from lajax.tasks import TASKS  # noqa: E402

SMALL = options("parity", length=6)


def small_trial(**change) -> Trial:
  """Returns a trial of one layer of softmax attention, 8 channels wide, on rows of 6 bits."""
  test = options("parity", length=9, scored="last")
  trial = Trial(
    row="G", mixer="softmax", seed=0, learning_rate=1e-2, task="parity", train=SMALL,
    tests=(("length 9", test),), conv_first=False, conv_size=None, d_model=8, num_heads=1, key_width=4,
    value_width=8, batch=4, steps=3, clip=1.0, eval_every=2, eval_rows=16, stop_at=None,
    stop_checks=1, block=2, together=1,
  )  # fmt: skip
  return dataclasses.replace(trial, **change)


def fake_line(trial: Trial, accuracy: float = 0.5) -> dict:
  curve = [[1, accuracy / 2, 1.0], [3, accuracy, 0.5]]
  tests = dict.fromkeys([label for label, _ in trial.tests], accuracy)
  numbers = dict(all_correct=accuracy, steps=3, seconds=1.0, parameters=9, state_bytes=8)
  numbers |= dict(stacked=2, compile_seconds=1.0)
  return line_of(trial, dict(accuracy=accuracy, accuracy_by_test=tests, curve=curve, **numbers))


# --- flags and rows ---


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ("--rows A Z", "--rows: unknown Z; known: A, B, C, D, E, G, H, I"),
    ("--rows", "--rows needs at least one value"),
    ("--task chess", "--task: unknown chess; known: parity, modular, s3,"),
    ("--task parity --mixers tofu", "--mixers: unknown tofu; known: softmax, softmax_conv"),
    ("--rows C --mixers kda", "--rows C have none of --mixers"),
    ("--task parity --test-lengths 0", "--test-lengths must be at least 1"),
    ("--task flip_flop --test-lengths 33", "`length` must be even"),
    ("--learning-rates 0.01 nan", "--learning-rates must be positive; got nan"),
    ("--d-model 6", "--d-model must be a multiple of 4, the heads of a row; got 6"),
    ("--seeds 0", "--seeds must be at least 1; got 0"),
    ("--workers 0", "--workers must be at least 1; got 0"),
    ("--rows A --out setup.cfg/x", "--out setup.cfg/x: cannot make this folder"),
    ("--sedes 1", "--sedes"),
  ],
)
def test_a_bad_flag_gets_one_line(arguments, says, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "setup.cfg").write_text("a file where a folder is asked for")
  with pytest.raises(SystemExit) as end:
    suite.prepare(arguments.split())
  out, error = capsys.readouterr()
  assert end.value.code == 2
  assert out == ""
  assert error.startswith("recall.py: error: ")
  assert error.count("\n") == 1
  assert says in error


def test_the_default_is_every_row_and_quick_is_four_of_them():
  config, trials = parse([]), plan(parse([]))
  assert {trial.row for trial in trials} == set(ROWS)
  runs = len(config.learning_rates or ()) * 3
  assert [len(stack) for stack in suite.stacks_of(trials)] == [runs] * sum(
    len(row.mixers) for row in ROWS.values()
  )
  quick = plan(parse(["--quick"]))
  assert {trial.row for trial in quick} == set(QUICK)
  assert all(len(stack) == 1 for stack in suite.stacks_of(quick))
  assert {trial.row for trial in plan(parse(["--quick", "--rows", "B"]))} == {"B"}
  assert set(quick) <= set(trials)  # the long command trains none of them again


def test_rows_name_known_mixers_and_their_tests_count_every_answer():
  for row in ROWS.values():
    assert set(row.mixers) <= set(VARIANTS)
    assert row.has_claim
  flip_flop = tracking_row("flip_flop", ("softmax",), (), 4)
  assert [label for label, _ in flip_flop.tests] == [f"length {32 * 2**n}" for n in range(7)]
  for row in (ROWS["D"], flip_flop):
    mask = np.asarray(TASKS[row.task].bind(dict(row.train))(suite.jax.random.key(0), 3)[2])
    assert mask.sum(1).max() <= stacked.answers_per_row(row.task, row.train)


# --- training ---


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_a_stack_in_blocks_gives_what_its_runs_give_alone():
  trials = [small_trial(seed=seed, learning_rate=rate) for rate, seed in ((1e-2, 0), (0.1, 1))]
  first, second = stacked.Stack(trials).train()
  alone = stacked.Stack([dataclasses.replace(trials[1], block=4, together=None)]).train()[0]
  assert [point[0] for point in alone["curve"]] == [2, 3]
  assert first["curve"] != second["curve"]
  np.testing.assert_allclose(second["curve"], alone["curve"], rtol=1e-4)
  assert second["accuracy_by_test"] == alone["accuracy_by_test"]


def test_a_run_that_answers_is_frozen_while_the_others_go_on(monkeypatch):
  accuracy = iter([[0.2, 1.0], [0.3, 0.4], [0.5, 0.6]])  # the last one is the final score
  trials = [small_trial(seed=seed, eval_every=1, steps=2, stop_at=0.9) for seed in range(2)]
  stack = object.__new__(stacked.Stack)  # without the programs
  stack.trials, stack.run, stack.sizes, stack.compile_seconds = tuple(trials), trials[0], {}, 0.0
  stack.keys, stack.rates, trained = None, None, []

  def advance(carry, keys, rates, active, *_):
    trained.append(active.tolist())
    return carry, np.ones(2)

  score = lambda *_: [np.array(next(accuracy)), np.zeros(2)]
  for name, f in (("_init", lambda _: None), ("_advance", advance), ("score", score)):
    monkeypatch.setattr(stack, name, f, raising=False)
  first, second = stack.train()
  assert trained == [[True, True], [True, False]]
  assert [point[:2] for point in first["curve"]] == [[1, 0.2], [2, 0.3]]
  assert [point[:2] for point in second["curve"]] == [[1, 1.0]]
  assert (first["steps"], second["steps"]) == (2, 1)
  assert (first["accuracy"], second["accuracy"]) == (0.5, 0.6)
  assert second["stopped_early"]


def test_trials_of_two_programs_are_no_stack():
  with pytest.raises(ValueError, match="seed and learning rate alone"):
    stacked.Stack([small_trial(), small_trial(steps=5)])


class FakeStack:
  """Stands for the training of a stack: notes its trials."""

  trained: list[Trial]

  def __init__(self, trials):
    self.trials = trials

  def train(self, check):
    check()
    FakeStack.trained += self.trials
    unnamed = ("row", "task", "mixer", "seed", "learning_rate", "config", "versions")
    lines = [fake_line(trial) for trial in self.trials]
    return [{name: x for name, x in line.items() if name not in unnamed} for line in lines]


def test_a_run_whose_line_exists_is_not_trained_again(tmp_path, monkeypatch):
  monkeypatch.setattr(suite, "Stack", FakeStack)
  FakeStack.trained = []
  path, console = tmp_path / "results.jsonl", Console(file=io.StringIO())
  trials = [small_trial(seed=seed, mixer=m) for m in ("linear", "gla") for seed in range(3)]
  append(path, fake_line(trials[1]))
  suite.train_missing(trials, path, 2, console)
  assert sorted(FakeStack.trained, key=str) == sorted(trials[:1] + trials[2:], key=str)
  assert "1 of 6 runs stand in" in console.file.getvalue().replace("\n", " ")
  assert [line["seed"] for line in of_trials(read(path), trials)] == [0, 1, 2] * 2
  suite.train_missing(trials, path, 2, console)
  assert len(FakeStack.trained) == 5
  changed = [dataclasses.replace(trials[0], steps=4), dataclasses.replace(trials[0], block=4)]
  suite.train_missing([*trials, *changed], path, 1, console)
  assert FakeStack.trained[5:] == changed


def test_an_error_in_one_stack_ends_the_command_and_keeps_the_lines(tmp_path, monkeypatch):
  class Broken(FakeStack):
    def train(self, check):
      if self.trials[0].mixer == "gla":
        raise FloatingPointError
      return super().train(check)

  monkeypatch.setattr(suite, "Stack", Broken)
  FakeStack.trained = []
  trials = [small_trial(mixer=mixer) for mixer in ("linear", "gla", "kda")]
  path = tmp_path / "results.jsonl"
  with pytest.raises(FloatingPointError):
    suite.train_missing(trials, path, 1, Console(file=io.StringIO()))
  assert of_trials(read(path), trials)[:1] == [fake_line(trials[0])]
  stop = threading.Event()
  stop.set()
  with pytest.raises(suite.Stopped):
    suite.train_stack(trials[:1], stop, print)


# --- tables and figures ---

CLAIM = Row("a row", "parity", SMALL, (("length 6", SMALL),), reach=("kda",), fail=("gla",))
ORDER = dataclasses.replace(CLAIM, reach=(), fail=(), descending=("kda", "gla"))


def lines_of(**accuracies) -> list[dict]:
  """Returns a line for each seed of each mixer, at a good and a bad learning rate."""
  return [
    fake_line(small_trial(mixer=mixer, seed=seed, learning_rate=rate), accuracy * good)
    for mixer, of_seeds in accuracies.items()
    for rate, good in ((1e-3, 0.1), (1e-2, 1.0))
    for seed, accuracy in enumerate(of_seeds)
  ]


@pytest.mark.parametrize(
  ("row", "accuracies", "held", "says"),
  [
    (CLAIM, dict(kda=[1.0, 0.99], gla=[0.5, 0.4]), True, "margin 0.545, spread 0.071"),
    (CLAIM, dict(kda=[1.0, 0.9], gla=[0.5, 0.4]), False, "kda 0.950 < 0.99"),
    (CLAIM, dict(kda=[1.0, 1.0], gla=[0.9, 0.9]), False, "gla 0.900 ≥ 0.85"),
    (CLAIM, dict(kda=[1.0, 1.0]), None, "not trained: gla"),
    (ORDER, dict(kda=[0.8, 0.8], gla=[0.6, 0.6]), True, "margin 0.200, spread 0.000"),
    (ORDER, dict(kda=[0.5, 0.5], gla=[0.6, 0.6]), False, "margin -0.100"),
  ],
  ids=["holds", "too low", "too high", "missing", "order", "wrong order"],
)
def test_a_verdict_follows_from_the_lines(row, accuracies, held, says):
  lines = lines_of(**accuracies)
  found = suite_report.verdict(row, lines)
  assert found.held is held
  text = suite_report.verdict_text("X", row, lines)
  assert text.startswith({True: "pass X: ", False: "FAIL X: ", None: "incomplete X: "}[held])
  assert says in text


def test_a_margin_within_the_spread_fails():
  row = dataclasses.replace(CLAIM, at_least=0.7)
  text = suite_report.verdict_text("X", row, lines_of(kda=[1.0, 0.5], gla=[0.5, 0.5]))
  assert "FAIL X" in text
  assert "margin 0.250 is not above the spread 0.354" in text


def test_tables_show_every_rate_and_what_is_demanded():
  lines = lines_of(kda=[1.0, 0.9], gla=[0.5, 0.5])
  console = Console(file=io.StringIO(), width=150)
  suite_report.print_report(lines, {"G": CLAIM}, console)
  text = console.file.getvalue()
  for part in ("0.950 ± 0.071*", "0.095 ± 0.007 ", "≥ 0.99", "< 0.85", "FAIL G: a row"):
    assert part in text
  lengths = tracking_row("parity", ("kda",), (32, 64), 4)
  trial = small_trial(mixer="kda", row="parity", tests=lengths.tests)
  console = Console(file=io.StringIO(), width=150)
  suite_report.print_report([fake_line(trial)], {"parity": lengths}, console)
  assert "length 64" in console.file.getvalue()
  assert "pass" not in console.file.getvalue()


def test_figures_show_steps_rates_and_lengths():
  drawn = suite_report.figure("G", CLAIM, lines_of(kda=[1.0, 0.9], gla=[0.5, 0.5]))
  assert "G: a row" in drawn.get_suptitle()
  assert [axis.get_xlabel() for axis in drawn.axes] == ["training steps", "peak learning rate"]
  assert all(len(axis.get_lines()) == 2 for axis in drawn.axes)
  row = tracking_row("parity", ("kda",), (32, 64, 2048), 4)
  trial = small_trial(mixer="kda", row="parity", tests=row.tests)
  (line,) = suite_report.figure("parity", row, [fake_line(trial)]).axes[2].get_lines()
  assert list(line.get_xdata()) == [32, 64, 2048]
  drawn.draw_without_rendering()
  assert all(a != b for a, b in itertools.pairwise(drawn.legends[0].get_texts()))
