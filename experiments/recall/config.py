"""The flags of `mqar.py`, and the training runs that they ask for."""

import argparse
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import cli
from recall.mixers import DEFAULT_MIXERS, MIXERS
from recall.presets import PRESETS
from recall.runs import Run
from recall.training import measure

from lajax.tasks import check_mqar

PROG = "mqar.py"
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Config:
  """Trains token mixers on multi-query associative recall and compares them."""

  preset: Literal["quick", "zoology-fig2", "based-fig2", "log-linear-table2", "kimi-fig4"] = "quick"
  """Settings to start from; the other flags override them."""
  mixers: tuple[str, ...] = DEFAULT_MIXERS
  """Names of mixers, or all."""
  vocab_size: int = 64
  """Size of the vocabulary: 0 is blank, the lower half are keys, the upper half are values."""
  length: tuple[int, ...] = (64,)
  """Tokens per row. The n-th goes with the n-th of pairs, batch and steps; one alone serves all."""
  pairs: tuple[int, ...] = (8,)
  """Key-value pairs per row, and so many queries."""
  mixture: bool = False
  """Train one model on all lengths and pairs, drawn for every step, instead of a model for each."""
  shares: tuple[float, ...] = (1.0,)
  """Relative frequency of each length in a mixture."""
  test_length: tuple[int, ...] = ()
  """Lengths of the held-out rows; empty: those of training."""
  test_pairs: tuple[int, ...] = ()
  """Pairs of the held-out rows; empty: those of training."""
  filler: Literal["zeros", "noise"] = "zeros"
  """Fill the rest of a row with blanks, or with random tokens of the whole vocabulary."""
  power: float = 0.01
  """Exponent of the positions of queries: probability ∝ (slot + 1)^(power - 1)."""
  d_model: tuple[int, ...] = (64,)
  """Model widths."""
  num_heads: int = 1
  """Heads of the mixer."""
  key_width: int | None = 16
  """Channels of keys and queries per head; None: d_model / num_heads."""
  value_width: int | None = None
  """Channels of values per head, except in softmax attention; None: d_model / num_heads."""
  output_gate: bool = False
  """Keep the output gates of layers that have one: more than the recurrence is then compared."""
  batch: tuple[int, ...] = (64,)
  """Rows per step."""
  steps: tuple[int, ...] = (600,)
  """Largest number of training steps."""
  learning_rates: tuple[float, ...] | None = None
  """Peak learning rates; None: the mixer's own, 0.01, but 0.005 for kda. With several, the table
  shows the best of each mixer, a second one all."""
  schedule: Literal["onecycle", "cosine"] = "onecycle"
  """Follow a cosine to zero, with (onecycle) or without a warm-up over a tenth of the steps."""
  weight_decay: float = 0.0
  """Weight decay of AdamW."""
  clip: float | None = 1.0
  """Largest norm of the gradient; None: no limit."""
  seeds: int | None = None
  """Number of runs of each mixer, with seeds 0, 1, ...; None: 3, but 1 with --mixers all."""
  eval_every: int = 25
  """Steps between two scores on held-out rows."""
  eval_rows: int = 512
  """Held-out rows per score."""
  stop_at: float | None = 0.999
  """Stop a run once its held-out accuracy is this high; None: never."""
  stop_checks: int = 2
  """Number of scores in succession that must be this high."""
  out: pathlib.Path | None = None
  """Folder of the results; None: runs/mqar, or runs/mqar-PRESET."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""

  @property
  def folder(self) -> pathlib.Path:
    name = "mqar" if self.preset == "quick" else f"mqar-{self.preset}"
    return self.out or pathlib.Path("runs", name)


def parse(arguments: Sequence[str]) -> Config:
  """Returns a preset's values, overridden by the flags. A bad flag ends the program."""
  presets = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
  presets.add_argument("--preset", nargs="?")
  name = presets.parse_known_args(arguments)[0].preset
  config = cli.parse(preset_config(name if name in PRESETS else "quick"), arguments, PROG)
  if config.mixers == ("all",):
    seeds = 1 if config.seeds is None else config.seeds
    config = dataclasses.replace(config, mixers=tuple(MIXERS), seeds=seeds)
  return config


def preset_config(name: str) -> Config:
  return dataclasses.replace(Config(), preset=name, **PRESETS[name].flags)


def is_plain(config: Config) -> bool:
  """Returns whether only the mixers, seeds, folder and device differ from the preset."""
  free = dict(mixers=config.mixers, seeds=config.seeds, out=config.out, device=config.device)
  return config == dataclasses.replace(preset_config(config.preset), **free)


def plan(config: Config) -> list[Run]:
  """Returns the runs of a configuration, those that share a compilation side by side."""
  check(config)
  runs = list(all_runs(config))
  for length, pairs in {rows for run in runs for rows in (*run.train_rows, *run.test_rows)}:
    check_mqar(
      vocab_size=config.vocab_size,
      length=length,
      pairs=pairs,
      filler=config.filler,
      power=config.power,
    )
  for run in {(run.mixer, run.d_model): run for run in runs}.values():
    measure(run)  # traces the model, so that the layers check their own arguments now
  return runs


def check(config: Config) -> None:
  """Raises a ValueError for flags that are wrong by themselves."""
  if not config.mixers:
    raise ValueError("--mixers needs at least one value")
  unknown = [name for name in config.mixers if name not in MIXERS]
  if unknown:
    raise ValueError(f"unknown mixer {', '.join(unknown)}; known: {', '.join(MIXERS)}, or all")
  cli.check_at_least_one(config, "seeds", "num_heads", "eval_every", "eval_rows", "stop_checks")
  cli.check_at_least_one(config, "key_width", "value_width", "batch", "steps", "d_model")
  odd = [width for width in config.d_model if width % config.num_heads]
  if odd:
    raise ValueError(
      f"--d-model must be a multiple of --num-heads {config.num_heads}; got {odd[0]}"
    )
  for name in ("learning_rates", "shares", "clip"):
    value = getattr(config, name)
    numbers = value if isinstance(value, tuple) else (value,)  # None: a default
    wrong = [x for x in numbers if x is not None and not 0 < x < math.inf]
    if not numbers or wrong:
      got = wrong[0] if wrong else "no value"
      raise ValueError(f"{cli.flag(name)} must be positive; got {got}")
  for name in ("weight_decay", "stop_at"):
    value = getattr(config, name)
    if value is not None and not 0 <= value < math.inf:
      raise ValueError(f"{cli.flag(name)} must be at least 0; got {value}")


def all_runs(config: Config) -> Iterator[Run]:
  """Yields every combination of rows, model width, mixer, learning rate and seed."""
  rates = lambda name: config.learning_rates or (MIXERS[name].learning_rate,)
  for (train_rows, shares, batch, steps), d_model, (mixer, rate), seed in itertools.product(
    trainings(config),
    config.d_model,
    [(name, rate) for name in config.mixers for rate in rates(name)],
    range(config.seeds or SEEDS),
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
      test_rows=test_rows(config) or train_rows,
      shares=shares,
      batch=batch,
      steps=steps,
      **{name: getattr(config, name) for name in SAME},
    )


SAME = ("output_gate", "vocab_size", "filler", "power", "schedule", "weight_decay", "clip")
SAME += ("eval_every", "eval_rows", "stop_at", "stop_checks")


def trainings(config: Config) -> list[tuple[tuple, tuple[float, ...], int, int]]:
  """Returns (rows, shares, batch, steps) for each kind of rows, or once for a mixture."""
  names = ("length", "pairs", "batch", "steps")
  values = side_by_side(**{name: getattr(config, name) for name in names})
  rows = tuple((length, pairs) for length, pairs, _, _ in values)
  if not config.mixture:
    return [(((length, pairs),), (1.0,), batch, steps) for length, pairs, batch, steps in values]
  if len({(batch, steps) for _, _, batch, steps in values}) > 1:
    raise ValueError("--mixture trains one model: give one --batch and one --steps")
  shares = config.shares * (len(rows) if len(config.shares) == 1 else 1)
  if len(shares) != len(rows):
    raise ValueError(
      f"--shares needs one positive number for each of the {len(rows)} kinds of rows; "
      f"got {config.shares}"
    )
  return [(rows, shares, *values[0][2:])]


def test_rows(config: Config) -> tuple[tuple[int, int], ...]:
  """Returns (length, pairs) of the held-out rows; empty where they are those of training."""
  if not config.test_length and not config.test_pairs:
    return ()
  return tuple(
    side_by_side(
      test_length=config.test_length or config.length, test_pairs=config.test_pairs or config.pairs
    )
  )


def side_by_side(**flags: tuple) -> list[tuple]:
  """Joins the n-th values of several flags; a flag with a single value serves all."""
  count = max(map(len, flags.values()))
  if any(len(values) not in (1, count) for values in flags.values()):
    found = ", ".join(f"{cli.flag(name)} has {len(values)}" for name, values in flags.items())
    raise ValueError(f"flags that go together need one value or as many as the others: {found}")
  repeated = [values * (count if len(values) == 1 else 1) for values in flags.values()]
  return list(zip(*repeated, strict=True))
