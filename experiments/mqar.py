"""Trains token mixers to look up eight things at once, and prints who can (MQAR).

    python experiments/mqar.py

trains softmax attention, linear attention (elu+1), GLA, Mamba-2, DeltaNet, Gated DeltaNet and KDA
on multi-query associative recall (64 tokens, 64 positions, 8 pairs), with three seeds each and
fresh rows in every step. Then it prints a table and draws two figures. This takes about four
minutes on two cores; `--mixers all` trains all mixers, with one seed each. Expected: softmax
attention, DeltaNet, Gated DeltaNet and KDA answer at least 99 % of the queries, elu+1 linear
attention fewer than 85 %. The last lines say whether that came out.

Results go to `runs/mqar/results.jsonl`, one line per run with its whole configuration. A run whose
line exists is not trained again, so the command can be stopped with Ctrl-C and started again at any
time. `--help` lists the flags; `--preset` sets those of a published experiment, and other flags
override it. The table and the figures are made from the lines alone.
"""

import itertools
import pathlib
import sys
import time
from collections.abc import Sequence

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
from recall.config import PROG, Config, is_plain, parse, plan
from recall.presets import PRESETS
from recall.report import accuracy_against_state, accuracy_over_steps, print_report
from recall.runs import Run, line_of, of_runs
from recall.training import Program
from results import append, read, save
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def main() -> None:
  config, runs = prepare(sys.argv[1:])
  out = config.folder
  console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
  started = time.perf_counter()
  try:
    train_missing(runs, out / "results.jsonl", console)
  except KeyboardInterrupt as stop:
    done = len(of_runs(read(out / "results.jsonl"), runs))
    stop.add_note(
      f"{done} of {len(runs)} runs stand in {out / 'results.jsonl'}; "
      "the same command trains the others, and the interrupted one from its start."
    )
    raise
  lines = of_runs(read(out / "results.jsonl"), runs)
  preset = PRESETS[config.preset]
  print_report(lines, preset, console, check_order=is_plain(config))
  save(accuracy_over_steps(lines), out / "accuracy_over_steps.png")
  save(accuracy_against_state(lines, preset), out / "accuracy_against_state.png")
  console.print(f"{out}: results.jsonl, accuracy_over_steps.png, accuracy_against_state.png")
  console.print(f"{time.perf_counter() - started:.0f} seconds in all")


def prepare(arguments: Sequence[str]) -> tuple[Config, list[Run]]:
  """Returns the configuration and its runs; device and folder are ready. An error is one line."""
  config = parse(arguments)
  try:
    runs = plan(config)
    cli.use_device(config.device)
    cli.make_folder(config.folder)
  except ValueError as error:
    cli.fail(PROG, str(error))
  return config, runs


def train_missing(runs: list[Run], results: pathlib.Path, console: Console) -> None:
  """Trains the runs that have no line of results, and writes the line of each as it ends."""
  done = of_runs(read(results), runs)
  finished = [line["config"] for line in done]
  missing = [run for run in runs if run.as_json() not in finished]
  if done:
    console.print(
      f"{len(done)} of {len(runs)} runs stand in {results} already; delete it to train them again."
    )
  columns = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.completed}/{task.total}"),
    TimeElapsedColumn(),
  )
  with Progress(
    *columns, console=console, transient=True, disable=not console.is_terminal
  ) as progress:
    overall = progress.add_task("runs", total=len(missing))
    current = progress.add_task("")
    for program, group in itertools.groupby(missing, key=lambda run: run.program):
      progress.update(current, description=f"{program.mixer}: compiling", completed=0, total=None)
      compiled = Program(program)
      for run in group:
        name = f"{run.mixer}, seed {run.seed}, learning rate {run.learning_rate:.2g}"

        def show(step: int, accuracy: float, loss: float, name=name, steps=run.steps) -> None:
          text = f"{name}: accuracy {accuracy:.3f}, loss {loss:.3f}"
          progress.update(current, description=text, completed=step, total=steps)

        line = line_of(run, compiled.train(run.seed, run.learning_rate, show))
        append(results, line)
        progress.advance(overall)
        console.print(summary(name, line))


def summary(name: str, line: dict) -> str:
  """Returns the line that the console prints for a finished run."""
  compiled = f" (compiled in {line['compile_seconds']:.0f} s)" if line["seed"] == 0 else ""
  return (
    f"{name}: accuracy {line['accuracy']:.3f} after {line['steps']} steps, "
    f"{line['seconds']:.0f} s, {line['rows_per_second']:,.0f} rows/s{compiled}"
  )


if __name__ == "__main__":
  main()
