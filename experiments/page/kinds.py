"""Kinds of lines: how each is recognised, and the figures and tables that it gives.

A further kind is one row in `KINDS`, under the value of `task` in its lines. The suite of tasks of
`recall.py` is one kind: its lines name their row.
"""

import dataclasses
from collections.abc import Callable, Sequence

import lm.run
import recall.runs
import recall.trials
from page import costs, language, recalls, served, speeds, suites
from page.chart import Chart
from page.lines import Line
from page.table import Table
from results import has_numbers


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of lines.

  Attributes:
    experiment: heading of its section; kinds of one experiment and file share a section.
    command: what makes such lines.
    complete: whether a line has all that figures and tables are made from.
    decides: names that, with the configuration, tell runs apart.
    charts: figures of lines.
    tables: tables of lines.
  """

  experiment: str
  command: str
  complete: Callable[[dict], bool]
  decides: tuple[str, ...]
  charts: Callable[[Sequence[Line]], list[Chart]]
  tables: Callable[[Sequence[Line]], list[Table]]


def has(texts: str, numbers: str = "", optional: str = "") -> Callable[[dict], bool]:
  """Returns a check of a line: texts, numbers, and numbers that may be missing or null."""

  def check(line: dict) -> bool:
    given = [name for name in optional.split() if line.get(name) is not None]
    return (
      isinstance(line.get("config"), dict)
      and all(isinstance(line.get(name), str) for name in texts.split())
      and has_numbers(line, [*numbers.split(), *given])
    )

  return check


def is_model(config: dict) -> bool:
  """Returns whether a configuration has what groups the runs of a recall experiment."""
  return isinstance(config.get("mixer"), str) and has_numbers(config, ["learning_rate", "d_model"])


def is_recall(line: dict) -> bool:
  """Returns whether a line is that of a training run on a recall task."""
  if not recall.runs.is_result(line) or not is_model(line["config"]):
    return False
  rows = line["config"].get("train_rows")
  return (
    isinstance(rows, list)
    and bool(rows)
    and all(isinstance(row, list) and len(row) == 2 for row in rows)
    and all(has_numbers(dict(enumerate(row)), [0, 1]) for row in rows)
  )


def is_suite(line: dict) -> bool:
  """Returns whether a line is that of a training run of the suite of tasks."""
  return recall.trials.is_result(line) and has("task")(line) and is_model(line["config"])


def is_lm(line: dict) -> bool:
  """Returns whether a line is that of a training run of a language model."""
  mixers, training = line.get("mixers"), line.get("training_curve", [])
  return (
    lm.run.is_result(line)
    and has("name", optional="held_out_bytes ngram_parameters")(line)
    and isinstance(mixers, list)
    and isinstance(training, list)
    and all(isinstance(p, list) and has_numbers(dict(enumerate(p)), range(3)) for p in training)
  )


def is_timed_op(line: dict) -> bool:
  """Returns whether a line has the times of an op: all rounds of each time that it has."""
  rounds = lambda name: (
    isinstance(line.get(name), list)
    and has_numbers(dict(enumerate(line[name])), range(max(1, len(line[name]))))
  )
  return has("op name", "length", "ratio compile_seconds temp_mib forward_ms both_ms")(
    line
  ) and all(
    line.get(f"{part}_ms") is None or rounds(f"{part}_seconds") for part in ("forward", "both")
  )


def is_scaling(line: dict) -> bool:
  """Returns whether a line has the time of a sequence, which is not empty."""
  return has("op", "length both_ms", "slope")(line) and line["length"] > 0


def is_served(line: dict) -> bool:
  """Returns whether a line has the speed of a way to serve, and all of its latencies or none."""
  latencies = any(name in line for name in served.TIMES)
  return has("way", f"slots tokens_per_second {' '.join(served.TIMES) if latencies else ''}")(line)


SIZES = "state_bytes conv_bytes cache_bytes carried_bytes decode_operations prefill_operations"
SPEED = ("Speed of ops", "python experiments/speed.py")
COST = ("Cost of the context", "python experiments/cost.py")
SERVE = ("Serving", "python experiments/serve.py")

KINDS: dict[str, Kind] = {
  "mqar": Kind(
    "Multi-query associative recall",
    "python experiments/mqar.py",
    is_recall,
    (),
    recalls.charts,
    recalls.tables,
  ),
  "recall": Kind(
    "Recall and state tracking",
    "python experiments/recall.py",
    is_suite,
    (),
    suites.charts,
    suites.tables,
  ),
  "lm": Kind(
    "Byte-level language models",
    "python experiments/lm.py",
    is_lm,
    (),
    language.charts,
    language.tables,
  ),
  "speed": Kind(*SPEED, is_timed_op, ("op", "name", "length"), speeds.op_charts, speeds.op_tables),
  "speed_decode": Kind(
    *SPEED,
    has("op", "position step_us"),
    ("op", "position"),
    speeds.decode_charts,
    speeds.decode_tables,
  ),
  "speed_scaling": Kind(
    *SPEED, is_scaling, ("op", "length"), speeds.scaling_charts, speeds.scaling_tables
  ),
  "speed_compile": Kind(
    *SPEED,
    has("name", "d_model length compile_seconds compile_cpu_seconds"),
    ("name", "d_model", "length"),
    speeds.compile_charts,
    speeds.compile_tables,
  ),
  "cost": Kind(
    *COST,
    has("model", f"length parameters {SIZES}"),
    ("model", "length"),
    costs.charts,
    costs.tables,
  ),
  "decode": Kind(
    "Time of the next token",
    "python experiments/cost.py --measure",
    has("model", "length parameters milliseconds cpu_milliseconds bytes expected_bytes"),
    ("model", "length"),
    costs.measured_charts,
    costs.measured_tables,
  ),
  "slots": Kind(*SERVE, is_served, ("way", "slots"), served.charts, served.tables),
  "prefix": Kind(
    *SERVE,
    has("way", "first_median", "tokens_per_second hit_rate cache_bytes"),
    ("way", "cache"),
    served.prefix_charts,
    served.prefix_tables,
  ),
  "drafts": Kind(
    *SERVE, has("", " ".join(served.DRAFTS)), (), served.draft_charts, served.draft_tables
  ),
}


def name_of(line: dict) -> str:
  """Returns the kind of a line, a name in KINDS if it is known."""
  return "recall" if isinstance(line.get("row"), str) else str(line.get("task", ""))


def problem_of(line: dict) -> str:
  """Returns why a line gives no figure, or "" if it does."""
  if isinstance(line.get("step"), int) and ("bits" in line or "held_out" in line):
    return "a log of lm.py; the line of its run has the curve"
  name = name_of(line)
  if not name:
    return 'it has no "task"'
  if name not in KINDS:
    return f'unknown task "{name}"; known: {", ".join(KINDS)}'
  if not KINDS[name].complete(line):
    return f'a line of the task "{name}" that lacks some of its values'
  return ""
