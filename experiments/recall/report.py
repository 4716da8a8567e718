"""Tables and figures of the recall experiments, made from the lines of results alone."""

import statistics
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from recall.mixers import MIXERS
from recall.presets import Preset
from rich.console import Console
from rich.table import Table

CELL = ("mixer", "d_model", "train_rows")
LINES = ("-", "--", ":", "-.")


def print_report(lines: list[dict], preset: Preset, console: Console, *, check_order: bool) -> None:
  """Prints the tables, the published accuracies, and whether the expected order came out."""
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
  """Returns (mixer, whether its expectation held, figures) for each mixer that has one."""
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
  """Returns the published accuracy for each row of the main table that has one."""
  texts = {}
  for (mixer, d_model, rows), _ in group(lines, *CELL).items():
    for published in preset.published:
      places = {"d_model": d_model, "length": rows[0][0]}
      text = published.accuracy.get(mixer, {}).get(places.get(published.axis, 0))
      if text and published.length in (None, rows[0][0]):
        texts[mixer, d_model, rows] = text
  return texts


def group(lines: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
  """Groups lines by the values of some keys of their configuration, in order of appearance."""
  groups: dict[tuple, list[dict]] = {}
  for line in lines:
    groups.setdefault(tuple(_hashable(line["config"][key]) for key in keys), []).append(line)
  return groups


def best_rate(lines: list[dict]) -> list[dict]:
  """Returns the lines of the learning rate with the best mean accuracy over the seeds."""
  return max(group(lines, "learning_rate").values(), key=lambda seeds: mean(seeds, "accuracy"))


def mean(lines: list[dict], key: str) -> float:
  return statistics.fmean(line[key] for line in lines)


def spread(lines: list[dict], key: str) -> float:
  """Returns the standard deviation over the seeds."""
  return statistics.stdev(line[key] for line in lines) if len(lines) > 1 else 0.0


def rows_label(rows: Sequence) -> str:
  """Describes rows: "64 tokens, 8 key-value pairs", or the range of a mixture."""
  lengths, pairs = ([row[axis] for row in rows] for axis in (0, 1))
  both = lambda numbers: "-".join(map(str, sorted({min(numbers), max(numbers)})))
  mixture = "mixture: " * (len(rows) > 1)
  return f"{mixture}{both(lengths)} tokens, {both(pairs)} key-value pairs"


def main_table(lines: list[dict], published: dict[tuple, str]) -> Table:
  """Makes a table: one row per mixer, model width and kind of rows, at its best learning rate."""
  table = Table(
    title="Multi-query associative recall (mean ± standard deviation over seeds, on fresh rows)"
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
  """Makes a table of the accuracy at every learning rate; None if each mixer has only one."""
  rates = sorted({line["learning_rate"] for line in lines})
  if len(rates) < 2 or len({(line["mixer"], line["learning_rate"]) for line in lines}) == len(
    {line["mixer"] for line in lines}
  ):
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
  """Makes a table of the accuracy on every kind of held-out rows; None if there is only one."""
  names = list(dict.fromkeys(name for line in lines for name in line["accuracy_by_rows"]))
  if all(len(line["accuracy_by_rows"]) < 2 for line in lines):
    return None
  table = Table(title="Accuracy by held-out rows: L tokens, K pairs (best learning rate)")
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


# --- figures ---


def styles(lines: list[dict]) -> dict[str, dict]:
  """Returns the label, colour and line of each mixer: no two of a figure look alike."""
  mixers = {line["mixer"] for line in lines}
  present = [mixer for mixer in MIXERS if mixer in mixers]
  return {
    mixer: dict(
      label=MIXERS[mixer].label, color=f"C{i % 10}", linestyle=LINES[i // 10 % len(LINES)]
    )
    for i, mixer in enumerate(present)
  }


def accuracy_over_steps(lines: list[dict]) -> Figure:
  """Draws one panel per kind of rows and model width: mean over the seeds, band of all seeds."""
  panels, style = group(lines, "train_rows", "d_model"), styles(lines)
  figure, axes = _panels(len(panels), "Multi-query associative recall: accuracy during training")
  for axis, ((rows, d_model), panel) in zip(axes, panels.items(), strict=True):
    for (mixer,), cell in group(panel, "mixer").items():
      curves = [line["curve"] for line in best_rate(cell)]
      steps = sorted({point[0] for curve in curves for point in curve})
      at = [[curve_at(curve, step) for curve in curves] for step in steps]
      axis.plot(steps, [statistics.fmean(values) for values in at], **style[mixer])
      low, high = [min(values) for values in at], [max(values) for values in at]
      axis.fill_between(steps, low, high, color=style[mixer]["color"], alpha=0.15, linewidth=0)
    axis.set_title(f"{rows_label(rows)}\nmodel width {d_model}", fontsize=10)
    axis.set(xlabel="training steps", ylabel="accuracy on held-out rows", ylim=(0, 1.02))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(alpha=0.3)
  _legend(figure)
  return figure


def accuracy_against_state(lines: list[dict], preset: Preset) -> Figure:
  """Draws one point per mixer and model width, in one panel per kind of rows.

  Hollow points are published figures of papers that state the bytes of the state.
  """
  panels, style = group(lines, "train_rows"), styles(lines)
  figure, axes = _panels(
    len(panels), "Multi-query associative recall: accuracy against the size of the decode state"
  )
  for axis, ((rows,), panel) in zip(axes, panels.items(), strict=True):
    sizes: list[float] = []
    for (mixer,), cells in group(panel, "mixer").items():
      points = [best_rate(cell) for cell in group(cells, "d_model").values()]
      x = [seeds[0]["state_bytes"] for seeds in points]
      y = [mean(seeds, "accuracy") for seeds in points]
      all_seeds = [[line["accuracy"] for line in seeds] for seeds in points]
      below = [value - min(seeds) for value, seeds in zip(y, all_seeds, strict=True)]
      above = [max(seeds) - value for value, seeds in zip(y, all_seeds, strict=True)]
      # Later mixers are drawn smaller, so that equal points show as rings.
      behind = (len(style) - list(style).index(mixer)) / len(style)
      marker = dict(marker="o", markersize=4 + 9 * behind, capsize=3)
      axis.errorbar(x, y, yerr=[below, above], **marker, **style[mixer])
      sizes += x
    for published in preset.published:
      for mixer, figures in published.accuracy.items() if published.axis == "state_bytes" else ():
        colour = style[mixer]["color"] if mixer in style else "0.5"
        values, label = [float(text) for text in figures.values()], MIXERS[mixer].label
        published_style = dict(fillstyle="none", color=colour, label=f"{label} (published)")
        axis.plot(list(figures), values, "o--", **published_style)
        sizes += figures
    axis.set_title(rows_label(rows), fontsize=10)
    axis.set(
      xlabel="bytes of decode state per row",
      ylabel="accuracy on held-out rows",
      xscale="log",
      ylim=(0, 1.05),
    )
    _ticks_in_bytes(axis, sizes)
    axis.grid(alpha=0.3)
  _legend(figure)
  return figure


def _ticks_in_bytes(axis, sizes: Sequence[float]) -> None:
  """Labels a few powers of two on a logarithmic axis, far enough apart not to touch."""
  low, high = min(sizes) / 2, max(sizes) * 2
  axis.set_xlim(low, high)
  powers = [2**n for n in range(60) if low <= 2**n <= high]
  axis.xaxis.set_major_locator(FixedLocator(powers[:: -(-len(powers) // 6)]))
  axis.xaxis.set_minor_locator(NullLocator())
  axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_label(size)))


def bytes_label(size: float) -> str:
  for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if size >= scale:
      return f"{size / scale:g} {unit}"
  return f"{size:g} B"


def _legend(figure: Figure) -> None:
  """Puts one legend beside all panels, where it hides no line."""
  entries = {}
  for axis in figure.axes:
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
      entries.setdefault(label, handle)
  figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=8)


def _panels(count: int, title: str):
  columns = min(count, 4)
  rows = -(-count // columns)
  figure = Figure(figsize=(3 + 5 * columns, 0.4 + 4 * rows), layout="constrained")
  figure.suptitle(title)
  axes = figure.subplots(rows, columns, squeeze=False).flatten()
  for axis in axes[count:]:
    axis.remove()
  return figure, axes[:count]


def curve_at(curve: list, step: int) -> float:
  """Returns the accuracy at a step; a run that stopped early keeps its last accuracy."""
  before = [accuracy for at, accuracy, _ in curve if at <= step]
  return before[-1] if before else curve[0][1]


def _hashable(value):
  return tuple(map(_hashable, value)) if isinstance(value, list) else value
