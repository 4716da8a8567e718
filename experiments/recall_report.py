"""The table and the figures of the recall experiments, made from the lines of results alone."""

import pathlib
import statistics
from collections.abc import Iterable

from matplotlib.figure import Figure
from recall_mixers import MIXERS
from recall_presets import Preset
from rich.console import Console
from rich.table import Table

CELL = ("mixer", "d_model", "train_rows")
LINES = ("-", "--", ":", "-.")


def print_report(lines: list[dict], preset: Preset, console: Console, *, check_order: bool) -> None:
  """The tables, what was published, and whether the order that must come out did."""
  tables = (
    main_table(lines, published_texts(lines, preset)),
    rate_table(lines),
    test_rows_table(lines),
  )
  for table in tables:
    if table is not None:
      console.print(table)
  for published in preset.published:
    console.print(f"published: {published.source}, by {published.axis}")
    if published.axis == "state_bytes":
      for mixer, figures in published.accuracy.items():
        console.print(
          f"  {mixer}: " + ", ".join(f"{text} at {size:,.0f}" for size, text in figures.items())
        )
  if preset.unstated:
    console.print(f"note: {preset.unstated}")
  if check_order:
    for mixer, held, text in order(lines, preset):
      console.print(f"{'as expected' if held else 'NOT AS EXPECTED'}: {mixer} {text}")


def order(lines: list[dict], preset: Preset) -> list[tuple[str, bool, str]]:
  """For each mixer of the preset's expectation that was run: its name, whether it held, and the figures."""
  found = {
    mixer: mean(best_rate(cell), "accuracy") for (mixer,), cell in group(lines, "mixer").items()
  }
  at_least = [
    (m, found[m] >= bar, f"{found[m]:.3f} ≥ {bar}")
    for m, bar in preset.at_least.items()
    if m in found
  ]
  below = [
    (m, found[m] < bar, f"{found[m]:.3f} < {bar}") for m, bar in preset.below.items() if m in found
  ]
  return at_least + below


def published_texts(lines: list[dict], preset: Preset) -> dict[tuple, str]:
  """The published figure that stands beside each row of the table, where there is one."""
  texts = {}
  for (mixer, d_model, rows), _ in group(lines, *CELL).items():
    for published in preset.published:
      places = {"d_model": d_model, "length": rows[0][0]}
      text = published.accuracy.get(mixer, {}).get(places.get(published.axis, 0))
      if text and published.length in (None, rows[0][0]):
        texts[mixer, d_model, rows] = text
  return texts


def group(lines: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
  """Lines by the values of some keys of their configuration, in order of appearance."""
  groups: dict[tuple, list[dict]] = {}
  for line in lines:
    groups.setdefault(tuple(_hashable(line["config"][key]) for key in keys), []).append(line)
  return groups


def best_rate(lines: list[dict]) -> list[dict]:
  """The lines of the learning rate with the best mean accuracy."""
  return max(group(lines, "learning_rate").values(), key=lambda seeds: mean(seeds, "accuracy"))


def mean(lines: list[dict], key: str) -> float:
  return statistics.fmean(line[key] for line in lines)


def spread(lines: list[dict], key: str) -> float:
  """Standard deviation over the seeds."""
  return statistics.stdev(line[key] for line in lines) if len(lines) > 1 else 0.0


def rows_label(rows) -> str:
  return " ".join(f"L{length} K{pairs}" for length, pairs in rows)


def main_table(lines: list[dict], published: dict[tuple, str]) -> Table:
  """One row a mixer, model width and kind of rows: its best learning rate, mean ± standard deviation over the seeds."""
  table = Table(
    title="Multi-query associative recall (mean ± standard deviation over seeds, on rows never seen)"
  )
  several_sizes = len(group(lines, "d_model", "train_rows")) > 1
  columns = [
    "mixer",
    *(["rows", "width"] if several_sizes else []),
    "accuracy",
    "all correct",
    "steps to 99 %",
    "steps",
  ]
  columns += [
    "rows/s",
    "rows/CPU-s",
    "parameters",
    "state bytes",
    "learning rate",
    *(["published"] if published else []),
  ]
  for column in columns:
    table.add_column(
      column, justify="left" if column in ("mixer", "rows") else "right", no_wrap=column == "mixer"
    )
  for (mixer, d_model, rows), cell in group(lines, *CELL).items():
    seeds = best_rate(cell)
    reached = [line["steps_to_99"] for line in seeds if line["steps_to_99"] is not None]
    steps_to_99 = f"{statistics.fmean(reached):.0f}" if len(reached) == len(seeds) else "-"
    if 0 < len(reached) < len(seeds):
      steps_to_99 = f"{statistics.fmean(reached):.0f} ({len(reached)} of {len(seeds)})"
    table.add_row(
      mixer,
      *([rows_label(rows), str(d_model)] if several_sizes else []),
      f"{mean(seeds, 'accuracy'):.3f} ± {spread(seeds, 'accuracy'):.3f}",
      f"{mean(seeds, 'all_correct'):.3f}",
      steps_to_99,
      f"{mean(seeds, 'steps'):.0f}",
      f"{mean(seeds, 'rows_per_second'):,.0f}",
      f"{mean(seeds, 'rows_per_cpu_second'):,.0f}",
      f"{seeds[0]['parameters']:,}",
      f"{seeds[0]['state_bytes']:,}",
      f"{seeds[0]['learning_rate']:.2g}",
      *([published.get((mixer, d_model, rows), "")] if published else []),
    )
  return table


def rate_table(lines: list[dict]) -> Table | None:
  """Mean accuracy at every learning rate, the best of each row marked; None where there was only one rate."""
  rates = sorted({line["learning_rate"] for line in lines})
  if len(rates) < 2:
    return None
  table = Table(title="Accuracy by learning rate (* best)")
  table.add_column("mixer", no_wrap=True)
  several_sizes = len(group(lines, "d_model", "train_rows")) > 1
  if several_sizes:
    table.add_column("rows")
    table.add_column("width", justify="right")
  for rate in rates:
    table.add_column(f"{rate:.2g}", justify="right")
  for (mixer, d_model, rows), cell in group(lines, *CELL).items():
    best = best_rate(cell)[0]["learning_rate"]
    by_rate = {rate: seeds for (rate,), seeds in group(cell, "learning_rate").items()}
    shown = [
      f"{mean(by_rate[rate], 'accuracy'):.3f}{'*' if rate == best else ' '}"
      if rate in by_rate
      else ""
      for rate in rates
    ]
    table.add_row(mixer, *([rows_label(rows), str(d_model)] if several_sizes else []), *shown)
  return table


def test_rows_table(lines: list[dict]) -> Table | None:
  """Accuracy on every kind of test row; None where there is only one."""
  names = list(dict.fromkeys(name for line in lines for name in line["accuracy_by_rows"]))
  if all(len(line["accuracy_by_rows"]) < 2 for line in lines):
    return None
  table = Table(title="Accuracy by test rows (best learning rate)")
  table.add_column("mixer", no_wrap=True)
  table.add_column("width", justify="right")
  for name in names:
    table.add_column(name, justify="right")
  for (mixer, d_model, _), cell in group(lines, *CELL).items():
    seeds = best_rate(cell)
    value = lambda name, seeds=seeds: statistics.fmean(
      line["accuracy_by_rows"][name] for line in seeds
    )
    shown = [f"{value(name):.3f}" if name in seeds[0]["accuracy_by_rows"] else "" for name in names]
    table.add_row(mixer, str(d_model), *shown)
  return table


def styles(lines: list[dict]) -> dict[str, dict]:
  """How each mixer of a figure is drawn: in a colour of its own, or, where there are more than ten, with a line of its own."""
  mixers = {line["mixer"] for line in lines}
  present = [mixer for mixer in MIXERS if mixer in mixers]
  return {
    mixer: dict(color=f"C{i % 10}", linestyle=LINES[i // 10 % len(LINES)])
    for i, mixer in enumerate(present)
  }


def accuracy_over_steps(lines: list[dict], path: pathlib.Path) -> None:
  """One panel for each kind of rows and model width; line: mean over seeds, band: lowest to highest."""
  panels, style = group(lines, "train_rows", "d_model"), styles(lines)
  figure, axes = _panels(len(panels))
  for axis, ((rows, d_model), panel) in zip(axes, panels.items(), strict=True):
    for (mixer,), cell in group(panel, "mixer").items():
      curves = [line["curve"] for line in best_rate(cell)]
      steps = sorted({point[0] for curve in curves for point in curve})
      at = [[_at(curve, step) for curve in curves] for step in steps]
      axis.plot(steps, [statistics.fmean(values) for values in at], label=mixer, **style[mixer])
      colour = style[mixer]["color"]
      axis.fill_between(
        steps, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.15, linewidth=0
      )
    axis.set(
      title=f"{rows_label(rows)}, width {d_model}",
      xlabel="steps",
      ylabel="accuracy",
      ylim=(0, 1.02),
    )
    axis.grid(alpha=0.3)
  axes[0].legend(fontsize=8)
  figure.savefig(path, dpi=150)


def accuracy_against_state(lines: list[dict], path: pathlib.Path, preset: Preset) -> None:
  """One point for each mixer, width and kind of rows; hollow: published figures, where state bytes were given."""
  panels, style = group(lines, "train_rows"), styles(lines)
  figure, axes = _panels(len(panels))
  for axis, ((rows,), panel) in zip(axes, panels.items(), strict=True):
    for (mixer,), cells in group(panel, "mixer").items():
      points = [best_rate(cell) for cell in group(cells, "d_model").values()]
      x, y = (
        [seeds[0]["state_bytes"] for seeds in points],
        [mean(seeds, "accuracy") for seeds in points],
      )
      error = [
        [
          value - min(line["accuracy"] for line in seeds)
          for value, seeds in zip(y, points, strict=True)
        ],
        [
          max(line["accuracy"] for line in seeds) - value
          for value, seeds in zip(y, points, strict=True)
        ],
      ]
      axis.errorbar(x, y, yerr=error, marker="o", label=mixer, capsize=3, **style[mixer])
    for published in preset.published:
      for mixer, figures in published.accuracy.items() if published.axis == "state_bytes" else ():
        colour = style[mixer]["color"] if mixer in style else "0.5"
        values, label = [float(text) for text in figures.values()], f"{mixer} (published)"
        axis.plot(list(figures), values, "o--", fillstyle="none", color=colour, label=label)
    axis.set(
      title=rows_label(rows),
      xlabel="bytes of decode state, one row",
      ylabel="accuracy",
      xscale="log",
      ylim=(0, 1.05),
    )
    axis.grid(alpha=0.3, which="both")
  axes[0].legend(fontsize=8)
  figure.savefig(path, dpi=150)


def _panels(count: int):
  columns = min(count, 4)
  rows = -(-count // columns)
  figure = Figure(figsize=(1 + 5 * columns, 4 * rows), layout="constrained")
  axes = figure.subplots(rows, columns, squeeze=False).flatten()
  for axis in axes[count:]:
    axis.remove()
  return figure, axes[:count]


def _at(curve: list, step: int) -> float:
  """A run that stopped early keeps its last accuracy."""
  return (
    [accuracy for at, accuracy, _ in curve if at <= step][-1]
    if curve[0][0] <= step
    else curve[0][1]
  )


def _hashable(value):
  return tuple(map(_hashable, value)) if isinstance(value, list) else value
