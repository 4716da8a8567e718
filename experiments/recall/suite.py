"""The command `recall.py`: trains the runs that are missing, then prints and draws the table."""

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

import cli
import jax
from recall.ordering import Row
from recall.stacked import Stack
from recall.suite_config import PROG, Config, parse, plan, table_rows
from recall.suite_report import figure, print_report
from recall.trials import Trial, line_of, of_trials
from results import append, read, save
from rich.console import Console
from speed.allocator import keep_freed_memory

MEASURED_STEPS = 8


def main() -> None:
  keep_freed_memory()  # the system zeroes the pages of new arrays
  config, trials = prepare(sys.argv[1:])
  console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
  rows = table_rows(config)
  if config.measure:
    measure_stacks(trials, console)
    return
  path, started = config.out / "results.jsonl", (time.perf_counter(), time.process_time())
  try:
    train_missing(trials, path, workers(config), console)
  except KeyboardInterrupt as stop:
    done = len(of_trials(read(path), trials))
    stop.add_note(
      f"{done} of {len(trials)} runs stand in {path}; the same command trains the others, "
      "and the interrupted ones from their start."
    )
    raise
  lines = of_trials(read(path), trials)
  print_report(lines, rows, console)
  draw(lines, rows, config.out, console)
  wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
  console.print(f"{wall:.0f} seconds in all, {cpu:.0f} CPU seconds")


def prepare(arguments: Sequence[str]) -> tuple[Config, list[Trial]]:
  """Returns the configuration and its trials; device and folder are ready. An error is one line."""
  config = parse(arguments)
  try:
    cli.use_device(config.device)
    trials = plan(config)
    cli.make_folder(config.out)
  except ValueError as error:
    cli.fail(PROG, str(error))
  return config, trials


def workers(config: Config) -> int:
  """Returns the number of mixers that train at the same time."""
  if config.workers is not None:
    return config.workers
  return (os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1


def stacks_of(trials: Sequence[Trial]) -> list[list[Trial]]:
  """Returns the trials that share a program, in order."""
  groups = itertools.groupby(trials, key=lambda trial: trial.program)
  return [list(group) for _, group in groups]


def train_missing(
  trials: Sequence[Trial], path: pathlib.Path, number: int, console: Console
) -> None:
  """Trains the trials that have no line of results, and writes the lines of each stack at its end.

  `number` stacks train at the same time, each in a thread of its own.
  """
  done = of_trials(read(path), trials)
  finished = [line["config"] for line in done]
  missing = [trial for trial in trials if trial.as_json() not in finished]
  if done:
    console.print(
      f"{len(done)} of {len(trials)} runs stand in {path} already; delete it to train them again."
    )
  stop = threading.Event()
  with concurrent.futures.ThreadPoolExecutor(number) as pool:
    jobs = [pool.submit(train_stack, stack, stop, console.print) for stack in stacks_of(missing)]
    try:
      for job in concurrent.futures.as_completed(jobs):
        for line in job.result():
          append(path, line)
    except BaseException:
      stop.set()
      pool.shutdown(wait=False, cancel_futures=True)
      raise


class Stopped(Exception):
  """Another thread ended the training."""


def train_stack(
  trials: Sequence[Trial], stop: threading.Event, say: Callable[[str], None]
) -> list[dict]:
  """Returns the lines of trials that are trained as one stack."""

  def check(*_) -> None:
    if stop.is_set():
      raise Stopped

  check()
  stack = Stack(trials)
  lines = [
    line_of(trial, metrics) for trial, metrics in zip(trials, stack.train(check), strict=True)
  ]
  say(summary(lines))
  return lines


def summary(lines: Sequence[dict]) -> str:
  """Returns what the console prints for a finished stack."""
  accuracies = ", ".join(
    f"{rate:.2g}: " + " ".join(f"{line['accuracy']:.3f}" for line in group)
    for rate, group in itertools.groupby(lines, key=lambda line: line["learning_rate"])
  )
  first = lines[0]
  return (
    f"{first['row']} {first['mixer']}: accuracy by learning rate {accuracies}; "
    f"compiled in {first['compile_seconds']:.0f} s, trained {first['stacked']} runs "
    f"in {first['seconds']:.0f} s"
  )


def draw(lines: list[dict], rows: dict[str, Row], out: pathlib.Path, console: Console) -> None:
  """Draws one figure per row that has lines."""
  names = []
  for letter, row in rows.items():
    of_row = [line for line in lines if line["row"] == letter]
    if of_row:
      names.append(f"{letter}.png")
      save(figure(letter, row, of_row), out / names[-1])
  console.print(f"{out}: results.jsonl, {', '.join(names)}")


def measure_stacks(trials: Sequence[Trial], console: Console) -> None:
  """Prints the trained rows per CPU second of a stack, and of its first run by itself.

  By itself, a run computes all rows of a step at once. The better of three times counts.
  """
  console.print("rows per CPU second, by row and mixer: stacked, one run at a time, ratio")
  for stack in stacks_of(trials):
    alone = [dataclasses.replace(stack[0], block=stack[0].batch, together=1)]
    speeds = [rows_per_cpu_second(runs) for runs in (stack, alone)]
    console.print(
      f"{stack[0].row} {stack[0].mixer}: {len(stack)} runs stacked {speeds[0]:,.0f}, "
      f"one run {speeds[1]:,.0f}, ratio {speeds[0] / speeds[1]:.2f}"
    )


def rows_per_cpu_second(trials: Sequence[Trial]) -> float:
  stack = Stack(trials)
  return max(stack.timed(MEASURED_STEPS) for _ in range(3))
