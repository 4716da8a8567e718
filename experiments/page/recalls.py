"""Figures and tables of the recall experiments, `mqar.py` and `recall.py`."""

import re
import statistics
from collections.abc import Sequence

from page.chart import Axis, Chart, Point, Series, points_of, size
from page.lines import Line, by_setting, command_of, differences
from page.table import MISSING, Cell, Table, numbers, spreads, table, words
from recall.mixers import MIXERS
from recall.presets import PRESETS, Preset
from recall.report import best_rate, curve_at, group, published_texts, rows_label
from recall.variants import VARIANTS

FREE = ("mixer", "seed", "learning_rate", "d_model", "key_width", "value_width")
ACCURACY = Axis("accuracy on held-out rows", low=0.0, high=1.0)


def label(mixer: str) -> str:
  """Returns the name of a mixer in figures; the name in its flag, if it is not known here."""
  known = VARIANTS.get(mixer) or MIXERS.get(mixer)
  return known.label if known else mixer


def preset_of(lines: Sequence[Line]) -> Preset | None:
  """Returns the preset that the lines' command, or else their folder, names."""
  for line in lines:
    found = re.search(r"--preset[ =](\S+)", command_of(line)) or re.match(
      r"(?:.*/)?mqar-([^/]+)/", line.file
    )
    if found and found[1] in PRESETS:
      return PRESETS[found[1]]
  return None


def settings(lines: Sequence[Line]) -> list[tuple[str, list[dict]]]:
  """Returns (description, lines) of each setting: rows, steps and all but mixers and widths."""
  found = by_setting(lines, FREE)
  kinds = [(rows_label(lines[0]["config"]["train_rows"]), lines) for _, lines in found]
  if len({kind for kind, _ in kinds}) == len(kinds):
    return kinds
  others = differences(
    [{k: v for k, v in lines[0]["config"].items() if k not in FREE} for _, lines in found]
  )
  return [(f"{kind}; {other}", lines) for (kind, lines), other in zip(kinds, others, strict=True)]


def charts(lines: Sequence[Line]) -> list[Chart]:
  found, preset = [], preset_of(lines)
  for n, (setting, rows) in enumerate(settings(lines)):
    for (d_model,), panel in group(rows, "d_model").items():
      found.append(over_steps(f"steps-{n}-{d_model}", f"{setting}, width {d_model}", panel))
    found.append(against_state(f"state-{n}", setting, rows, preset))
    found += against_rate(f"rate-{n}", setting, rows)
    found += by_rows(f"rows-{n}", setting, rows)
  return found


def over_steps(key: str, setting: str, lines: list[dict]) -> Chart:
  """Accuracy over training steps: mean and range over the seeds, at the best learning rate."""
  series = []
  for (mixer,), cell in group(lines, "mixer").items():
    runs = [line["curve"] for line in best_rate(cell)]
    steps = sorted({point[0] for curve in runs for point in curve})
    points = points_of((step, curve_at(curve, step)) for step in steps for curve in runs)
    series.append(Series(label(mixer), points))
  note = "Lines are means over the seeds, bands reach from the lowest to the highest seed. A run "
  note += "that stopped early keeps its last accuracy."
  x = Axis("training steps", low=0.0)
  return Chart(key, "Accuracy over training steps", setting, x, ACCURACY, tuple(series), note)


def against_state(key: str, setting: str, lines: list[dict], preset: Preset | None) -> Chart:
  """Accuracy against the bytes of the decode state; published ones as dashed lines."""
  series, sizes = [], set()
  for (mixer,), cells in group(lines, "mixer").items():
    best = [line for cell in group(cells, "d_model").values() for line in best_rate(cell)]
    points = points_of((line["state_bytes"], line["accuracy"]) for line in best)
    series.append(Series(label(mixer), points, "points"))
    sizes |= {line["state_bytes"] for line in best}
  for published in preset.published if preset else ():
    for mixer, texts in published.accuracy.items() if published.axis == "state_bytes" else ():
      values = [(place, float(text)) for place, text in texts.items()]
      name = f"{label(mixer)}, published"
      series.append(Series(name, points_of(values), "level", like=label(mixer)))
  x = Axis("bytes of decode state per row", log=True, own_ticks=True, write=size)
  title, note = (
    "Accuracy against the size of the state",
    "Bars reach from the lowest to the highest ",
  )
  return Chart(key, title, setting, x, ACCURACY, tuple(series), f"{note}seed.")


def against_rate(key: str, setting: str, lines: list[dict]) -> list[Chart]:
  """Accuracy at every learning rate, if a mixer has several."""
  found = []
  for (d_model,), panel in group(lines, "d_model").items():
    cells = group(panel, "mixer")
    if all(len(group(cell, "learning_rate")) < 2 for cell in cells.values()):
      continue
    series = [
      Series(label(mixer), points_of((line["learning_rate"], line["accuracy"]) for line in cell))
      for (mixer,), cell in cells.items()
    ]
    title, place = "Accuracy by learning rate", f"{setting}, width {d_model}"
    x = Axis("peak learning rate", log=True, own_ticks=True, write=lambda rate: f"{rate:.2g}")
    found.append(Chart(f"{key}-{d_model}", title, place, x, ACCURACY, tuple(series)))
  return found


def by_rows(key: str, setting: str, lines: list[dict]) -> list[Chart]:
  """Accuracy on each kind of held-out rows, if there are several."""
  names = list(dict.fromkeys(name for line in lines for name in line["accuracy_by_rows"]))
  if len(names) < 2:
    return []
  found = []
  for (d_model,), panel in group(lines, "d_model").items():
    series = []
    for (mixer,), cell in group(panel, "mixer").items():
      points = []
      for n, name in enumerate(names):
        values = [
          line["accuracy_by_rows"][name]
          for line in best_rate(cell)
          if name in line["accuracy_by_rows"]
        ]
        if values:
          points.append(Point(statistics.fmean(values), n, min(values), max(values)))
      series.append(Series(label(mixer), tuple(points), "points"))
    title, place = "Accuracy by held-out rows", f"{setting}, width {d_model}"
    y = Axis("length L and pairs K of the rows", names=tuple(names))
    found.append(Chart(f"{key}-{d_model}", title, place, ACCURACY, y, tuple(series)))
  return found


def tables(lines: Sequence[Line]) -> list[Table]:
  """One row per setting, mixer and width, at the learning rate with the best mean accuracy."""
  cells, shown, preset = [], [], preset_of(lines)
  for setting, found in settings(lines):
    texts = published_texts(found, preset) if preset else {}
    for key, cell in group(found, "mixer", "d_model", "train_rows").items():
      cells.append(best_rate(cell))
      shown.append((setting, texts.get(key)))
  of = lambda name: [[line[name] for line in seeds] for seeds in cells]
  first = lambda name: [seeds[0][name] for seeds in cells]
  config = lambda name: [seeds[0]["config"][name] for seeds in cells]
  columns = {"mixer": words(label(seeds[0]["mixer"]) for seeds in cells)}
  if len({setting for setting, _ in shown}) > 1:
    columns["rows"] = words(setting for setting, _ in shown)
  columns |= {
    "width": numbers(config("d_model")),
    "accuracy": spreads(of("accuracy")),
    "published": words(text for _, text in shown),
    "all correct": spreads(of("all_correct")),
    "steps to 99\u00a0%": [reached(values) for values in of("steps_to_99")],
    "steps": spreads(of("steps"), ".0f"),
    "seeds": numbers(len(seeds) for seeds in cells),
    "learning rate": numbers(first("learning_rate"), ".3g"),
    "parameters": numbers(first("parameters"), ",.0f"),
    "state bytes": numbers(first("state_bytes"), ",.0f"),
    "rows/s": numbers(map(statistics.fmean, of("rows_per_second")), ",.0f"),
    "rows/CPU-s": numbers(map(statistics.fmean, of("rows_per_cpu_second")), ",.0f"),
  }
  note = "Means ± standard deviations over seeds, at the mixer's best learning rate."
  sources = [published.source for published in preset.published] if preset else []
  if sources:
    note += f" Published: {'; '.join(sources)}."
  if preset and preset.unstated:
    note += f" {preset.unstated[:1].upper()}{preset.unstated[1:].rstrip('.')}."
  return [table("Results", columns, note)]


def reached(steps: Sequence[float | None]) -> Cell:
  """Makes a cell of the mean over the seeds that reached 99 %, and of their number if not all."""
  known = [n for n in steps if n is not None]
  if not known:
    return MISSING
  mean = statistics.fmean(known)
  some = f" ({len(known)} of {len(steps)})" * (len(known) < len(steps))
  return Cell(f"{mean:.0f}{some}", mean)
