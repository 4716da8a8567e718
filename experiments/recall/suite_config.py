"""The flags of `recall.py`, and the trials that they ask for."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import cli
import jax
from recall.ordering import QUICK, ROWS, TRACKING, Row, tracking_row
from recall.stacked import rows_at_once
from recall.trials import Trial
from recall.variants import VARIANTS

from lajax.tasks import TASKS

PROG = "recall.py"
TRACKERS = ("softmax", "mamba2", "deltanet", "deltanet_negative", "delta_product", "rwkv7")


@dataclasses.dataclass(frozen=True)
class Config:
  """Trains token mixers on recall and state tracking, and says whether the known order came out."""

  rows: tuple[str, ...] = tuple(ROWS)
  """Rows of the table."""
  quick: bool = False
  """Rows A, D, G and I with one seed and one learning rate, unless other flags say more."""
  task: str | None = None
  """Train on this task instead, and score --test-lengths."""
  mixers: tuple[str, ...] = ()
  """Only these mixers; empty: all of each row, and for --task those that papers compare."""
  test_lengths: tuple[int, ...] = ()
  """Lengths of the held-out rows of --task; empty: 1, 2, 4, .. 64 times the length of training."""
  seeds: int | None = None
  """Number of runs per mixer and learning rate, with seeds 0, 1, ..; None: 3, or 1 if quick."""
  learning_rates: tuple[float, ...] | None = None
  """Peak learning rates, each trained for every mixer; None: 0.003 0.01 0.03, or 0.01 if quick."""
  steps: int | None = None
  """Largest number of training steps; None: those of each row, 400 for --task."""
  batch: int | None = None
  """Rows per step; None: those of each row."""
  d_model: int = 64
  """Model width, and width of the values."""
  eval_rows: int = 512
  """Held-out rows per score; fewer where they are longer than the rows of training."""
  workers: int | None = None
  """Mixers that train at the same time; None: one per processor, one on an accelerator."""
  measure: bool = False
  """Train nothing. Time the first mixers of --rows: stacked, and one run at a time."""
  out: pathlib.Path = pathlib.Path("runs", "recall")
  """Folder of the results."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""


def parse(arguments: Sequence[str]) -> Config:
  """Returns the flags. A bad flag ends the program."""
  config = cli.parse(Config(), arguments, PROG)
  if config.quick and config.rows == Config().rows:
    config = dataclasses.replace(config, rows=QUICK)
  rates = (1e-2,) if config.quick else (3e-3, 1e-2, 3e-2)
  return dataclasses.replace(
    config,
    seeds=(1 if config.quick else 3) if config.seeds is None else config.seeds,
    learning_rates=rates if config.learning_rates is None else config.learning_rates,
  )


def check(config: Config) -> None:
  """Raises a ValueError for flags that are wrong by themselves."""
  cli.check_known(config, "rows", list(ROWS))
  if config.mixers:
    cli.check_known(config, "mixers", list(VARIANTS))
  if config.task is not None and config.task not in TRACKING:
    raise ValueError(f"--task: unknown {config.task}; known: {', '.join(TRACKING)}")
  if config.d_model % 4:
    raise ValueError(f"--d-model must be a multiple of 4, the heads of a row; got {config.d_model}")
  cli.check_at_least_one(config, "seeds", "steps", "batch", "d_model", "eval_rows", "workers")
  if config.test_lengths:
    cli.check_at_least_one(config, "test_lengths")
  rates = config.learning_rates or ()
  wrong = [rate for rate in rates if not 0 < rate < math.inf]
  if not rates or wrong:
    raise ValueError(f"--learning-rates must be positive; got {wrong[0] if wrong else 'no value'}")


def table_rows(config: Config) -> dict[str, Row]:
  """Returns the rows to train by their letters, or the row of --task."""
  if config.task is not None:
    mixers, steps = config.mixers or TRACKERS, config.steps or 400
    return {config.task: tracking_row(config.task, mixers, config.test_lengths, steps)}
  return {letter: ROWS[letter] for letter in ROWS if letter in config.rows}


def plan(config: Config) -> list[Trial]:
  """Returns the trials of a configuration, those that are stacked side by side."""
  check(config)
  trials = []
  for letter, row in table_rows(config).items():
    batch = config.batch or row.batch
    block, together = rows_at_once(batch)
    steps = config.steps or row.steps
    shared: dict[str, Any] = dict(
      row=letter,
      task=row.task,
      train=row.train,
      tests=row.tests,
      conv_first=row.conv_first,
      d_model=config.d_model,
      conv_size=row.conv_size,
      num_heads=row.num_heads,
      key_width=row.key_width,
      value_width=config.d_model // row.num_heads,
      batch=batch,
      steps=steps,
      clip=1.0,
      eval_every=min(row.eval_every, steps),
      eval_rows=config.eval_rows,
      stop_at=0.999,
      stop_checks=2,
      block=block,
      together=together,
    )
    for mixer in (name for name in row.mixers if not config.mixers or name in config.mixers):
      of_mixer = [
        Trial(mixer=mixer, seed=seed, learning_rate=rate, **shared)
        for rate in config.learning_rates or ()
        for seed in range(config.seeds or 1)
      ]
      trials += of_mixer
    if trials:
      check_rows(trials[-1])
  if not trials:
    raise ValueError(f"--rows {' '.join(table_rows(config))} have none of --mixers")
  return trials


def check_rows(trial: Trial) -> None:
  """Raises the ValueError of a task whose options are wrong."""
  for options in (trial.train, *(own for _, own in trial.tests)):
    make = TASKS[trial.task].bind(dict(options))
    jax.eval_shape(lambda make=make: make(jax.random.key(0), 1))
