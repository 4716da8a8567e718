"""Tables, verdicts and figures of `recall.py`, made from the lines of results alone."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from recall.ordering import Row
from recall.report import best_rate, curve_at, group, mean, spread
from recall.variants import VARIANTS
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Verdict on a row, and what decides: the smallest distance that had to be kept.

  `margin` is the accuracy between the worst mixer that must answer and the best one that must not,
  or between neighbours of an order. `spread` is the largest standard deviation over the seeds among
  the mixers of the row, each at its best learning rate. None: the runs of a mixer are missing.
  """

  held: bool | None
  margin: float | None
  spread: float
  reasons: tuple[str, ...]


def verdict(row: Row, lines: Sequence[dict]) -> Verdict:
  """Judges a row by its lines, each mixer at the learning rate with its best mean accuracy."""
  best = {mixer: best_rate(cell) for (mixer,), cell in group(lines, "mixer").items()}
  missing = [mixer for mixer in row.mixers if mixer not in best]
  if missing:
    return Verdict(None, None, 0.0, (f"not trained: {', '.join(missing)}",))
  found = {mixer: mean(seeds, "accuracy") for mixer, seeds in best.items()}
  deviation = max(spread(best[mixer], "accuracy") for mixer in row.mixers)
  reasons = [f"{m} {found[m]:.3f} < {row.at_least}" for m in row.reach if found[m] < row.at_least]
  reasons += [f"{m} {found[m]:.3f} ≥ {row.below}" for m in row.fail if found[m] >= row.below]
  steps = [found[a] - found[b] for a, b in itertools.pairwise(row.descending)]
  gaps = [min(steps)] if steps else []
  if row.reach and row.fail:
    gaps.append(min(found[m] for m in row.reach) - max(found[m] for m in row.fail))
  margin = min(gaps, default=None)
  if margin is not None and margin <= deviation:
    reasons.append(f"margin {margin:.3f} is not above the spread {deviation:.3f}")
  return Verdict(not reasons, margin, deviation, tuple(reasons))


def print_report(lines: list[dict], rows: Mapping[str, Row], console: Console) -> None:
  """Prints the accuracies of each row, those at every learning rate and test, and the verdicts."""
  by_row = {letter: [line for line in lines if line["row"] == letter] for letter in rows}
  by_row = {letter: of_row for letter, of_row in by_row.items() if of_row}
  console.print(accuracy_table(by_row, rows))
  for letter, of_row in by_row.items():
    tests = test_table(letter, rows[letter], of_row)
    if tests is not None:
      console.print(tests)
  for letter in by_row:
    if rows[letter].has_claim:
      console.print(verdict_text(letter, rows[letter], by_row[letter]))


def verdict_text(letter: str, row: Row, lines: Sequence[dict]) -> str:
  """Returns one line: "pass A: recall of 8 pairs: margin 0.15, spread 0.01"."""
  found = verdict(row, lines)
  word = {True: "pass", False: "FAIL", None: "incomplete"}[found.held]
  numbers = "" if found.margin is None else f"margin {found.margin:.3f}, spread {found.spread:.3f}"
  return f"{word} {letter}: {row.title}: {'; '.join(filter(None, (numbers, *found.reasons)))}"


def accuracy_table(by_row: Mapping[str, list[dict]], rows: Mapping[str, Row]) -> Table:
  """Makes a table: one line per row and mixer, with the accuracy at every learning rate."""
  table = Table(title="Accuracy by learning rate: mean ± standard deviation over seeds (* best)")
  table.add_column("row")
  table.add_column("mixer", no_wrap=True)
  table.add_column("must be", justify="right")
  rates = sorted({line["learning_rate"] for lines in by_row.values() for line in lines})
  for rate in rates:
    table.add_column(f"{rate:.2g}", justify="right")
  for column in ("steps", "state bytes"):
    table.add_column(column, justify="right")
  for letter, lines in by_row.items():
    for (mixer,), cell in group(lines, "mixer").items():
      best, by_rate = best_rate(cell), group(cell, "learning_rate")
      shown = []
      for rate in rates:
        seeds = by_rate.get((rate,))
        star = "*" if seeds == best else " "
        value = "" if seeds is None else f"{mean(seeds, 'accuracy'):.3f}"
        shown.append(f"{value} ± {spread(seeds, 'accuracy'):.3f}{star}" if seeds else "")
      table.add_row(
        letter,
        mixer,
        expected(rows[letter], mixer),
        *shown,
        f"{mean(best, 'steps'):.0f}",
        f"{best[0]['state_bytes']:,}",
      )
    table.add_section()
  return table


def expected(row: Row, mixer: str) -> str:
  """Returns what a row demands of a mixer: "≥ 0.99", "< 0.85", or its place in an order."""
  if mixer in row.reach:
    return f"≥ {row.at_least}"
  if mixer in row.fail:
    return f"< {row.below}"
  return f"{row.descending.index(mixer) + 1}." if mixer in row.descending else ""


def test_table(letter: str, row: Row, lines: Sequence[dict]) -> Table | None:
  """Makes a table of the accuracy on each kind of held-out rows; None if there is one kind."""
  names = list(lines[0]["accuracy_by_test"])
  if len(names) < 2:
    return None
  table = Table(title=f"{letter}: {row.title}: accuracy by held-out rows (best learning rate)")
  table.add_column("mixer", no_wrap=True)
  for name in names:
    table.add_column(name, justify="right")
  for (mixer,), cell in group(lines, "mixer").items():
    seeds = [line["accuracy_by_test"] for line in best_rate(cell)]
    table.add_row(mixer, *(f"{mean(seeds, name):.3f}" for name in names))
  return table


def figure(letter: str, row: Row, lines: Sequence[dict]) -> Figure:
  """Draws a row: accuracy over the steps, at every learning rate, and by length if there are some.

  Lines are means over the seeds, bands and bars go from the lowest seed to the highest.
  """
  lengths = {name: int(name.split()[1]) for name, _ in row.tests if name.startswith("length ")}
  panels = 3 if len(lengths) > 1 else 2
  drawn = Figure(figsize=(3 + 4.5 * panels, 4.4), layout="constrained")
  drawn.suptitle(f"{letter}: {row.title}" if row.has_claim else row.title)
  over_steps, over_rates, *over_lengths = drawn.subplots(1, panels, sharey=True)
  for n, ((mixer,), cell) in enumerate(group(lines, "mixer").items()):
    style = dict(color=f"C{n % 10}", linestyle="-" if n < 10 else "--")
    best = best_rate(cell)
    curves = [line["curve"] for line in best]
    steps = sorted({point[0] for curve in curves for point in curve})
    at = [[curve_at(curve, step) for curve in curves] for step in steps]
    _band(over_steps, steps, at, label=VARIANTS[mixer].label, **style)
    rates = sorted(group(cell, "learning_rate").items())
    at = [[line["accuracy"] for line in seeds] for _, seeds in rates]
    _band(over_rates, [rate for (rate,), _ in rates], at, marker="o", **style)
    for axis in over_lengths:
      names = sorted(lengths, key=lengths.__getitem__)
      at = [[line["accuracy_by_test"][name] for line in best] for name in names]
      _band(axis, [lengths[name] for name in names], at, marker="o", **style)
  over_steps.set(xlabel="training steps", ylabel="accuracy on held-out rows", ylim=(0, 1.03))
  over_rates.set(xlabel="peak learning rate", xscale="log")
  for axis in over_lengths:
    axis.set(xlabel="tokens per held-out row", xscale="log")
  for axis in drawn.axes:
    axis.grid(alpha=0.3)
  drawn.legend(loc="outside right center", fontsize=8)
  return drawn


def _band(axis, x, values: list[list[float]], **style) -> None:
  """Draws the mean of each list over x, and a band from its smallest to its largest number."""
  axis.plot(x, [sum(of_x) / len(of_x) for of_x in values], **style)
  low, high = [min(of_x) for of_x in values], [max(of_x) for of_x in values]
  axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
