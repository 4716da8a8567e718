"""Figures and tables of the language models of `lm.py`."""

from collections.abc import Sequence

from lm import report
from page.chart import Axis, Chart, Series, points_of
from page.lines import Line, differences, without
from page.table import MISSING, Table, numbers, table, words


def labels(lines: Sequence[dict]) -> list[str]:
  """Returns the pattern of each run; runs of one pattern add what tells them apart."""
  patterns = [report.label(line) for line in lines]
  configs = [without(line["config"], ("pattern", "layers")) for line in lines]
  found = []
  for n, pattern in enumerate(patterns):
    same = [m for m, other in enumerate(patterns) if other == pattern]
    text = differences([configs[m] for m in same])[same.index(n)]
    found.append(f"{pattern}; {text}" if text else pattern)
  return found


def charts(lines: Sequence[Line]) -> list[Chart]:
  """Bits per byte over steps and over minutes, beside the references."""
  runs = [line.values for line in lines]
  y = Axis("bits per byte", log=True)
  note = "Points are held-out files, faint lines the loss in training, level dashes the references "
  note += "on the same held-out bytes."
  found = []
  for key, place, factor, name in (
    ("over-steps", 0, 1.0, "training steps"),
    ("over-minutes", 1, 1 / 60, "minutes"),
  ):
    ends = [max(p[place] for p in [*run["curve"], end(run)]) for run in runs]
    series, x = [], Axis(name, low=0.0)
    for label, run in zip(labels(runs), runs, strict=True):
      of = lambda points, place=place, factor=factor: points_of(
        (factor * p[place], p[2]) for p in points
      )
      series.append(Series(label, of([*run["curve"], end(run)])))
      series.append(Series(label, of(run.get("training_curve", [])), "faint", like=label))
    for reference, bits in references(runs).items():
      series.append(
        Series(reference, points_of([(0.0, bits), (factor * max(ends), bits)]), "level")
      )
    found.append(Chart(key, f"Bits per byte over {name}", "", x, y, tuple(series), note))
  return found


def end(run: dict) -> list[float]:
  return [run["steps"], run["seconds"], run["bits_per_byte"]]


def references(runs: Sequence[dict]) -> dict[str, float]:
  """Returns bits per byte of the references; those of other held-out files name their bytes."""
  found: dict[str, float] = {}
  for run in runs:
    for name, bits in run["references"].items():
      other = found.get(name, bits) != bits
      found[f"{name} ({run.get('held_out_bytes', 0):,} bytes)" if other else name] = bits
  return found


def tables(lines: Sequence[Line]) -> list[Table]:
  runs = [line.values for line in lines]
  others = references(runs)
  of = lambda name, form=",.4g": (
    numbers((run.get(name) for run in runs), form) + [MISSING] * len(others)
  )
  columns = {
    "model": words([*labels(runs), *others]),
    "bits per byte": numbers([*(run["bits_per_byte"] for run in runs), *others.values()], ".3f"),
    "held-out bytes": of("held_out_bytes", ",.0f"),
    "parameters": of("parameters", ",.0f"),
    "of them n-grams": of("ngram_parameters", ",.0f"),
    "steps": of("steps", ",.0f"),
    "tokens": of("tokens", ",.0f"),
    "tokens/s": of("tokens_per_second", ",.0f"),
    "FLOPs used": of("utilisation", ".0%"),
    "CPU s": of("cpu_seconds", ",.0f"),
    "s": of("seconds", ",.0f"),
  }
  note = "FLOPs used: operations of the model per second, as a part of those of a matrix product."
  return [table("Models and references", columns, note)]
