"""Which token mixers can look up eight things at once?

    python experiments/mqar.py

trains softmax attention, linear attention (elu+1), GLA, Mamba-2, DeltaNet, Gated DeltaNet and KDA on multi-query associative
recall (64 tokens, 64 positions, 8 pairs), three seeds each, on fresh rows in every step, then prints a table and draws two
figures, in about four minutes on two cores; `--mixers all` trains every mixer there is, one seed each. Expected: softmax
attention, DeltaNet, Gated DeltaNet and KDA answer at least 99 % of the queries, elu+1 linear attention fewer than 85 %. The
last lines say whether that came out.

Results go to `runs/mqar/results.jsonl`, one line a run with its whole configuration. A run whose line is there is not run
again: stop it and start it as you like. `--help` lists the flags; `--preset` sets those of a published experiment, which
other flags then override. The table and the figures are made from the lines alone.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import pathlib
import sys
import time
from typing import Literal, NoReturn

import no_gpu  # isort: skip  # noqa: F401  # before jax
import jax
import tyro
from recall_mixers import DEFAULT_MIXERS, MIXERS
from recall_presets import PRESETS
from recall_report import accuracy_against_state, accuracy_over_steps, print_report
from recall_results import append, line_of, of_runs, read
from recall_training import Program, Run, measure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lajax.tasks import check_mqar

SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Config:
  """Trains token mixers on multi-query associative recall and compares them."""

  preset: Literal["quick", "zoology-fig2", "based-fig2", "log-linear-table2", "kimi-fig4"] = "quick"
  """The settings to start from; the other flags override them."""
  mixers: tuple[str, ...] = DEFAULT_MIXERS
  """Names of mixers, or all."""
  vocab_size: int = 64
  """Tokens: 0 is blank, the lower half are keys, the upper half values."""
  length: tuple[int, ...] = (64,)
  """Tokens in a row. Lengths, pairs, batches and steps go together one to one; a single one serves all."""
  pairs: tuple[int, ...] = (8,)
  """Key-value pairs in a row."""
  mixture: bool = False
  """One model for all lengths and pairs, drawn anew for every step, instead of a model for each."""
  shares: tuple[float, ...] = (1.0,)
  """How often each is drawn in a mixture."""
  test_length: tuple[int, ...] = ()
  """Lengths of the rows that a model is scored on; empty: as trained."""
  test_pairs: tuple[int, ...] = ()
  """Pairs of the rows that a model is scored on; empty: as trained."""
  filler: Literal["zeros", "noise"] = "zeros"
  """What stands where nothing is written or asked: blanks, or tokens of the whole vocabulary."""
  power: float = 0.01
  """Exponent of the queries' places: probability ∝ (slot + 1)^(power - 1)."""
  d_model: tuple[int, ...] = (64,)
  """Model widths."""
  num_heads: int = 1
  """Heads of the mixer."""
  key_width: int | None = 16
  """Channels of a head's keys and queries; None: d_model / num_heads."""
  value_width: int | None = None
  """Channels of a head's values (softmax attention has as many as its keys); None: d_model / num_heads."""
  output_gate: bool = False
  """Keep the output gates of the layers that have one: what is compared is then no longer the recurrence alone."""
  batch: tuple[int, ...] = (64,)
  """Rows in a step."""
  steps: tuple[int, ...] = (600,)
  """Training steps at most."""
  learning_rates: tuple[float, ...] = (1e-2,)
  """Peak learning rates; with several, the table shows the best of each mixer and the whole curve."""
  schedule: Literal["onecycle", "cosine"] = "onecycle"
  """Warm up over a tenth of the steps, then cosine to zero; or cosine from the start."""
  weight_decay: float = 0.0
  """Of AdamW."""
  clip: float | None = 1.0
  """Largest norm of the gradient; None: no limit."""
  seeds: int | None = None
  """Runs of each mixer, with seeds 0, 1, ...; None: 3, but 1 with --mixers all."""
  eval_every: int = 25
  """Steps between two scores on held-out rows."""
  eval_rows: int = 512
  """Held-out rows in a score."""
  stop_at: float | None = 0.999
  """Stop a run once its held-out accuracy is this high; None: never."""
  stop_checks: int = 2
  """How many scores in succession must be so high."""
  out: pathlib.Path | None = None
  """Folder of the results; None: runs/mqar, or runs/mqar-PRESET."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Where to run; auto: a GPU if JAX sees one."""


def main() -> None:
  config = parse(sys.argv[1:])
  runs = plan(config)
  choose_device(config.device)
  out = config.out or pathlib.Path(
    "runs", "mqar" if config.preset == "quick" else f"mqar-{config.preset}"
  )
  console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
  started = time.perf_counter()
  train_missing(runs, out / "results.jsonl", console)
  lines = of_runs(read(out / "results.jsonl"), runs)
  preset = PRESETS[config.preset]
  print_report(lines, preset, console, check_order=is_plain(config))
  accuracy_over_steps(lines, out / "accuracy_over_steps.png")
  accuracy_against_state(lines, out / "accuracy_against_state.png", preset)
  console.print(f"{out}: results.jsonl, accuracy_over_steps.png, accuracy_against_state.png")
  console.print(f"{time.perf_counter() - started:.0f} seconds in all")


def parse(arguments: list[str]) -> Config:
  """The configuration of a command line: the preset's values, then the flags. One line for a bad flag."""
  presets = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
  presets.add_argument("--preset", nargs="?")
  name = presets.parse_known_args(arguments)[0].preset
  default = preset_config(name if name in PRESETS else "quick")
  messages = io.StringIO()
  try:
    with contextlib.redirect_stderr(messages):
      config = tyro.cli(
        Config,
        args=arguments,
        default=default,
        prog="mqar.py",
        config=(tyro.conf.FlagCreatePairsOff,),
      )
  except SystemExit as end:
    if not end.code:  # --help
      raise
    box = [text.strip("│ ") for text in messages.getvalue().splitlines()[1:]]
    said = itertools.takewhile(
      lambda text: text.strip("─╰╯"), box
    )  # what follows a rule repeats the help
    fail(" ".join(said))
  if config.mixers == ("all",):
    config = dataclasses.replace(
      config, mixers=tuple(MIXERS), seeds=1 if config.seeds is None else config.seeds
    )
  return config


def preset_config(name: str) -> Config:
  return dataclasses.replace(Config(), preset=name, **PRESETS[name].flags)


def is_plain(config: Config) -> bool:
  """Whether these are the preset's own settings, whatever the mixers, the number of seeds and the folder."""
  free = dict(mixers=config.mixers, seeds=config.seeds, out=config.out, device=config.device)
  return config == dataclasses.replace(preset_config(config.preset), **free)


def plan(config: Config) -> list[Run]:
  """The runs of a configuration, those that share a program next to each other. One line for what cannot be."""
  try:
    runs = list(_runs(config))
    for length, pairs in {rows for run in runs for rows in (*run.train_rows, *run.test_rows)}:
      check_mqar(vocab_size=config.vocab_size, length=length, pairs=pairs, filler=config.filler)
    for run in {(run.mixer, run.d_model): run for run in runs}.values():
      measure(run)  # the model's shapes, so that a layer's own checks speak
  except ValueError as error:
    fail(str(error))
  return runs


def _runs(config: Config):
  unknown = [name for name in config.mixers if name not in MIXERS]
  if unknown:
    raise ValueError(f"unknown mixer {', '.join(unknown)}; known: {', '.join(MIXERS)}, or all")
  for name in ("mixers", "learning_rates", "d_model"):
    if not getattr(config, name):
      raise ValueError(f"--{name.replace('_', '-')} needs at least one value")
  for name in ("seeds", "num_heads", "eval_every", "eval_rows", "stop_checks"):
    value = getattr(config, name)
    if value is not None and value < 1:
      raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
  for name in ("key_width", "value_width"):
    if getattr(config, name) is not None and getattr(config, name) < 1:
      raise ValueError(
        f"--{name.replace('_', '-')} must be None or at least 1; got {getattr(config, name)}"
      )
  odd = [width for width in config.d_model if width < 1 or width % config.num_heads]
  if odd:
    raise ValueError(
      f"--d-model must be a positive multiple of --num-heads {config.num_heads}; got {odd[0]}"
    )
  if min(config.learning_rates) <= 0:
    raise ValueError(f"--learning-rates must be positive; got {min(config.learning_rates)}")

  cells = _together(
    length=config.length, pairs=config.pairs, batch=config.batch, steps=config.steps
  )
  for cell in cells:
    if min(cell["batch"], cell["steps"]) < 1:
      raise ValueError(
        f"--batch and --steps must be at least 1; got {cell['batch']} and {cell['steps']}"
      )
  rows = tuple((cell["length"], cell["pairs"]) for cell in cells)
  tests = None
  if config.test_length or config.test_pairs:
    tests = _together(
      test_length=config.test_length or config.length, test_pairs=config.test_pairs or config.pairs
    )
    tests = tuple((cell["test_length"], cell["test_pairs"]) for cell in tests)
  if config.mixture:
    if len({(cell["batch"], cell["steps"]) for cell in cells}) > 1:
      raise ValueError("--mixture trains one model: give one --batch and one --steps")
    shares = config.shares * (len(rows) if len(config.shares) == 1 else 1)
    if len(shares) != len(rows) or min(shares) <= 0:
      raise ValueError(
        f"--shares needs one positive number for each of the {len(rows)} kinds of rows; got {config.shares}"
      )
    trained = [(rows, shares, cells[0])]
  else:
    trained = [((row,), (1.0,), cell) for row, cell in zip(rows, cells, strict=True)]

  for (train_rows, shares, cell), d_model, mixer, rate, seed in itertools.product(
    trained, config.d_model, config.mixers, config.learning_rates, range(config.seeds or SEEDS)
  ):
    yield Run(
      mixer=mixer,
      seed=seed,
      learning_rate=rate,
      d_model=d_model,
      num_heads=config.num_heads,
      key_width=config.key_width or d_model // config.num_heads,
      value_width=config.value_width or d_model // config.num_heads,
      train_rows=train_rows,
      test_rows=tests or train_rows,
      shares=shares,
      batch=cell["batch"],
      steps=cell["steps"],
      **{name: getattr(config, name) for name in SAME},
    )


SAME = ("output_gate", "vocab_size", "filler", "power", "schedule", "weight_decay", "clip")
SAME += ("eval_every", "eval_rows", "stop_at", "stop_checks")


def _together(**values: tuple) -> list[dict]:
  """Flags with several values go together one to one; a flag with a single value serves all."""
  count = max(map(len, values.values()))
  for name, given in values.items():
    if len(given) not in (1, count):
      flags = ", ".join(
        f"--{name.replace('_', '-')} has {len(given)}" for name, given in values.items()
      )
      raise ValueError(f"flags that go together need one value or as many as the others: {flags}")
  whole = {name: given * (count if len(given) == 1 else 1) for name, given in values.items()}
  return [dict(zip(whole, each, strict=True)) for each in zip(*whole.values(), strict=True)]


def choose_device(name: str) -> None:
  if name == "auto":
    return
  try:
    jax.config.update("jax_default_device", jax.devices(name)[0])
  except RuntimeError:
    fail(f"--device {name}: JAX sees no such device, only {', '.join(map(str, jax.devices()))}")


def train_missing(runs: list[Run], results: pathlib.Path, console: Console) -> None:
  """Trains the runs that have no line yet, and writes each one's line as it ends."""
  done = of_runs(read(results), runs)
  finished = [line["config"] for line in done]
  missing = [run for run in runs if run.as_json() not in finished]
  if done:
    console.print(
      f"{len(done)} of {len(runs)} runs stand in {results} already; delete it to run them again."
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
        console.print(
          f"{name}: accuracy {line['accuracy']:.3f} after {line['steps']} steps, {line['seconds']:.0f} s, "
          f"{line['rows_per_second']:,.0f} rows/s"
          + (f" (compiled in {line['compile_seconds']:.0f} s)" * (not run.seed))
        )


def fail(message: str) -> NoReturn:
  print(f"mqar.py: error: {message}", file=sys.stderr)
  raise SystemExit(2)


if __name__ == "__main__":
  main()
