"""Figures and tables of the suite of recall and state-tracking tasks, `recall.py`."""

import re
from collections.abc import Sequence

from page.chart import Axis, Chart, Series, points_of
from page.lines import Line, by_setting, text_of
from page.recalls import ACCURACY, against_rate, label, over_steps
from page.table import MISSING, Table, numbers, spreads, table, words
from recall.ordering import ROWS
from recall.report import best_rate, group
from recall.suite_report import expected, verdict

# `block` and `together` say how runs share a program, which changes no result.
FREE = ("mixer", "seed", "learning_rate", "block", "together")
OUTCOMES = {True: "pass", False: "FAIL", None: "incomplete"}


def settings(lines: Sequence[Line]) -> list[tuple[str, list[dict]]]:
  """Returns (description, lines) for each row of the table, or task."""
  found = []
  for difference, rows in by_setting(lines, FREE):
    name, task = rows[0]["row"], rows[0]["task"]
    train = text_of(rows[0]["config"].get("train")).replace("_", " ")
    text = f"{name}: {ROWS[name].title}" if name in ROWS else f"{task}: {train}"
    found.append((text, difference, rows))
  texts = [text for text, _, _ in found]
  return [
    (f"{text}; {difference}" if texts.count(text) > 1 else text, rows)
    for text, difference, rows in found
  ]


def charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (setting, rows) in enumerate(settings(lines)):
    found.append(over_steps(f"steps-{n}", setting, rows))
    found += over_lengths(f"lengths-{n}", setting, rows)
    found += against_rate(f"rate-{n}", setting, rows)
  return found


def over_lengths(key: str, setting: str, lines: list[dict]) -> list[Chart]:
  """Accuracy against the length of held-out rows, if there are several; at the best rate."""
  series = []
  for (mixer,), cell in group(lines, "mixer").items():
    values = [
      (int(length[1]), accuracy)
      for line in best_rate(cell)
      for name, accuracy in line["accuracy_by_test"].items()
      if (length := re.fullmatch(r"length (\d+)", name))
    ]
    series.append(Series(label(mixer), points_of(values)))
  if all(len(s.points) < 2 for s in series):
    return []
  x = Axis("tokens of a held-out row", log=True, own_ticks=True)
  note = "Lines are means over the seeds, bands reach from the lowest to the highest seed."
  title = "Accuracy against the length of the test"
  return [Chart(key, title, setting, x, ACCURACY, tuple(series), note)]


def verdicts(lines: Sequence[Line]) -> Table:
  """Makes the table of rows that have a claim: whether it came out, with margin and spread."""
  shown = [(s, rows[0]["row"], rows) for s, rows in settings(lines) if rows[0]["row"] in ROWS]
  found = [verdict(ROWS[name], rows) for _, name, rows in shown]
  columns = {
    "row": words(setting for setting, _, _ in shown),
    "outcome": words(OUTCOMES[v.held] for v in found),
    "margin": numbers((v.margin for v in found), ".3f"),
    "spread": numbers((v.spread for v in found), ".3f"),
    "reasons": words("; ".join(v.reasons) for v in found),
  }
  note = "Margin: the accuracy between the worst mixer that must answer and the best one that must "
  note += "not, or between neighbours of an order. Spread: the largest deviation over the seeds."
  return table("Did the known order come out?", columns, note)


def tables(lines: Sequence[Line]) -> list[Table]:
  """The verdicts, then one table per row: mixers at the rate with the best mean accuracy."""
  found = [verdicts(lines)] if any(line.values["row"] in ROWS for line in lines) else []
  for setting, rows in settings(lines):
    cells = [best_rate(cell) for cell in group(rows, "mixer").values()]
    of = lambda name, cells=cells: [[line[name] for line in seeds] for seeds in cells]
    first = lambda name, cells=cells: [seeds[0][name] for seeds in cells]
    columns = {
      "mixer": words(map(label, first("mixer"))),
      "must be": words(expected(ROWS[rows[0]["row"]], m) for m in first("mixer"))
      if rows[0]["row"] in ROWS
      else [MISSING] * len(cells),
      "accuracy": spreads(of("accuracy")),
      "all correct": spreads(of("all_correct")),
    }
    for name in dict.fromkeys(name for line in rows for name in line["accuracy_by_test"]):
      columns[name] = spreads(
        [s["accuracy_by_test"][name] for s in seeds if name in s["accuracy_by_test"]]
        for seeds in cells
      )
    columns |= {
      "steps": spreads(of("steps"), ".0f"),
      "seeds": numbers(map(len, cells)),
      "learning rate": numbers(first("learning_rate"), ".3g"),
      "parameters": numbers(first("parameters"), ",.0f"),
      "state bytes": numbers(first("state_bytes"), ",.0f"),
    }
    note = "Means ± standard deviations over seeds, at the mixer’s best learning rate."
    found.append(table(setting, columns, note))
  return found
