"""The command `lm.py`: trains the runs that are missing, then prints the table of all."""

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import before_jax
import cli
from lm.config import PROG, Config, parse, plan
from lm.data import Text, files_of, split, standard_library
from lm.model import cost_of, product_speed
from lm.references import references
from lm.report import bits_over_time, table
from lm.run import Run, line_of, of_runs
from lm.sampling import write
from lm.training import Moment, Program, train
from results import append, read, save
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from speed.allocator import keep_freed_memory

SECONDS_FOR_SAMPLES = 30.0  # of a run's minutes, kept for compiling and running the sampler


def main() -> None:
  keep_freed_memory()  # the system zeroes the pages of new arrays: an eighth of the time of a step
  config, runs, text = prepare(sys.argv[1:])
  out, console = config.out, cli.console(150)
  try:
    train_missing(config, runs, text, console)
  except KeyboardInterrupt as stop:
    stop.add_note(
      f"Checkpoints and logs are in {out}; the same command goes on from the latest checkpoint."
    )
    raise
  except FloatingPointError as error:
    cli.fail(PROG, str(error))
  lines = of_runs(read(out / "results.jsonl"), runs)
  console.print(table(lines))
  save(bits_over_time(lines), out / "bits_per_byte.png")
  console.print(f"{out}: results.jsonl, bits_per_byte.png, {', '.join(run.name for run in runs)}")


def prepare(arguments: Sequence[str]) -> tuple[Config, list[Run], Text]:
  """Returns the configuration, its runs and the text. An error is one line."""
  config = parse(arguments)
  try:
    text = split(files_of(config.text) if config.text else standard_library())
    runs = plan(config)
    cli.use_device(config.device)
    cli.make_folder(config.out)
  except ValueError as error:
    cli.fail(PROG, str(error))
  return config, runs, text


def train_missing(config: Config, runs: list[Run], text: Text, console: Console) -> None:
  """Trains the runs that have no line of results, and writes the line of each as it ends."""
  results, started = config.out / "results.jsonl", Moment(before_jax.STARTED, 0.0)
  for run in runs:
    if of_runs(read(results), [run]):
      console.print(f"{run.name} stands in {results} already; delete its line to train it again.")
      continue
    line, texts = train_one(config, run, text, started, console)
    append(results, line)
    for sample in texts:
      console.rule(f"written by the model after {config.prompt!r}")
      console.print(sample.decode(errors="replace"), markup=False)
    started = Moment(time.perf_counter(), time.process_time())


def train_one(
  config: Config, run: Run, text: Text, started: Moment, console: Console
) -> tuple[dict, list[bytes]]:
  """Trains a run. Returns its line of results, and what the model writes."""
  speed = product_speed(run)
  with concurrent.futures.ThreadPoolExecutor(1) as pool, bar(console) as show:
    others = pool.submit(references, text.training, text.held_out)
    cost = cost_of(run)
    show(f"{', '.join(run.mixers)}: {cost.parameters:,} parameters, compiling", 0)
    program = Program(run)
    carry, metrics = train(
      program,
      text,
      config.out / run.name,
      started=started,
      reserve=SECONDS_FOR_SAMPLES * bool(config.samples),
      checkpoint_minutes=config.checkpoint_minutes,
      show=show,
    )
    metrics |= dict(
      references=others.result(),
      mixers=run.mixers,
      parameters=cost.parameters,
      ngram_parameters=cost.ngram_parameters,
      operations_per_token=cost.operations,
      product_speed=speed,
      utilisation=cost.operations * metrics["tokens_per_second"] / speed,
    )
    texts = []
    if config.samples:
      show("writing samples", 1)
      prompt = config.prompt.encode()
      texts = write(program.model(carry), prompt, config.samples, config.sample_bytes)
  return line_of(run, metrics), texts


@contextlib.contextmanager
def bar(console: Console) -> Iterator[Callable[[str, float], None]]:
  """Shows a line of text and a bar: on a terminal in place, in a log the held-out scores alone."""
  columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
  live = console.is_terminal
  with Progress(*columns, console=console, transient=True, disable=not live) as progress:
    task = progress.add_task("", total=1.0)

    def show(text: str, share: float) -> None:
      progress.update(task, description=text, completed=min(share, 1.0))
      if "in training" not in text:
        console.print(f"{share:4.0%} {text}")

    yield show
