"""A training run, and its line of results: a run whose line exists is not trained again."""

import dataclasses
import json
from collections.abc import Iterable

from results import has_numbers, is_curve, latest, versions

NUMBERS = ("learning_rate", "accuracy", "all_correct", "steps", "seconds", "rows_per_second")
NUMBERS += ("rows_per_cpu_second", "compile_seconds", "parameters", "state_bytes")


@dataclasses.dataclass(frozen=True)
class Run:
  """Everything that decides the result of a training run. Its line of results is found by it."""

  mixer: str
  seed: int
  learning_rate: float
  d_model: int
  num_heads: int
  key_width: int
  value_width: int
  output_gate: bool
  vocab_size: int
  train_rows: tuple[tuple[int, int], ...]  # (length, pairs) of the rows in training
  test_rows: tuple[tuple[int, int], ...]  # (length, pairs) of the held-out rows
  shares: tuple[float, ...]  # how often each of train_rows is drawn
  filler: str
  power: float
  batch: int
  steps: int
  schedule: str
  weight_decay: float
  clip: float | None
  eval_every: int
  eval_rows: int
  stop_at: float | None
  stop_checks: int
  task: str = "mqar"

  @property
  def program(self) -> "Run":
    """Run without seed and learning rate: runs with equal `program` share one compilation."""
    return dataclasses.replace(self, seed=0, learning_rate=0.0)

  @property
  def longest(self) -> int:
    return max(length for length, _ in (*self.train_rows, *self.test_rows))

  def as_json(self) -> dict:
    """Returns the fields as JSON gives them back: lists instead of tuples."""
    return json.loads(json.dumps(dataclasses.asdict(self)))


def line_of(run: Run, metrics: dict) -> dict:
  """Returns the line of results of a run."""
  names = {"task": run.task, "mixer": run.mixer, "seed": run.seed}
  names["learning_rate"] = run.learning_rate
  return names | metrics | {"config": run.as_json(), "versions": versions()}


def of_runs(lines: Iterable[dict], runs: Iterable[Run]) -> list[dict]:
  """Returns the results of these runs in their order; the latest line where a run has several."""
  return latest((line for line in lines if is_result(line)), [run.as_json() for run in runs])


def is_result(line: dict) -> bool:
  """Returns whether a line has all that tables and figures are made from."""
  by_rows = line.get("accuracy_by_rows")
  return (
    isinstance(line.get("config"), dict)
    and isinstance(line.get("mixer"), str)
    and has_numbers(line, NUMBERS)
    and (line.get("steps_to_99", "") is None or has_numbers(line, ["steps_to_99"]))
    and isinstance(by_rows, dict)
    and bool(by_rows)
    and has_numbers(by_rows, by_rows)
    and is_curve(line.get("curve"))
  )
