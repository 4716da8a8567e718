"""A training run of `recall.py`, and its line of results: a run that has a line is done."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from results import has_numbers, is_curve, latest, versions

Options = tuple[tuple[str, Any], ...]  # of a task: names and values
NUMBERS = ("accuracy", "all_correct", "steps", "seconds", "parameters", "state_bytes")


@dataclasses.dataclass(frozen=True)
class Trial:
  """Everything that decides the result of a training run. Its line of results is found by it."""

  row: str  # of the table, or the name of a task
  mixer: str
  seed: int
  learning_rate: float
  task: str
  train: Options
  tests: tuple[tuple[str, Options], ...]  # label and options; the first one decides
  conv_first: bool  # a gated short convolution before the mixer
  conv_size: int | None  # of the short convolution inside the mixer; None: none
  d_model: int
  num_heads: int
  key_width: int
  value_width: int
  batch: int
  steps: int
  clip: float | None
  eval_every: int
  eval_rows: int
  stop_at: float | None
  stop_checks: int
  block: int  # rows whose gradient is computed at once
  together: int | None  # runs that are computed side by side; None: all

  @property
  def program(self) -> "Trial":
    """Trial without seed and rate: trials with equal `program` are trained by one program."""
    return dataclasses.replace(self, seed=0, learning_rate=0.0)

  @property
  def longest(self) -> int:
    return max(dict(options)["length"] for options in (self.train, *(t for _, t in self.tests)))

  def as_json(self) -> dict:
    """Returns the fields as JSON gives them back."""
    fields = dataclasses.asdict(self) | {"train": dict(self.train)}
    fields["tests"] = {label: dict(options) for label, options in self.tests}
    return json.loads(json.dumps(fields))


def line_of(trial: Trial, metrics: dict) -> dict:
  """Returns the line of results of a trial."""
  names = ("row", "task", "mixer", "seed", "learning_rate")
  named = {name: getattr(trial, name) for name in names}
  return named | metrics | {"config": trial.as_json(), "versions": versions()}


def of_trials(lines: Iterable[dict], trials: Iterable[Trial]) -> list[dict]:
  """Returns the results of these trials in their order; the latest line where one has several."""
  return latest((line for line in lines if is_result(line)), [trial.as_json() for trial in trials])


def is_result(line: dict) -> bool:
  """Returns whether a line has all that tables and figures are made from."""
  tests = line.get("accuracy_by_test")
  return (
    isinstance(line.get("config"), dict)
    and all(isinstance(line.get(name), str) for name in ("row", "mixer"))
    and has_numbers(line, (*NUMBERS, "seed", "learning_rate"))
    and isinstance(tests, dict)
    and bool(tests)
    and has_numbers(tests, tests)
    and is_curve(line.get("curve"))
  )
