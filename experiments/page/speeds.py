"""Figures and tables of `speed.py`: ops, decoding, scaling, compile times."""

from collections.abc import Callable, Sequence

from page.chart import Axis, Chart, Point, Series, curves
from page.lines import Line, by_setting
from page.table import Table, numbers, table, words

FREE = ("ops", "forms", "associative", "positions", "lengths", "scaling", "compile", "no_compile")
FREE += ("no_baselines", "keep_memory")


def titled(title: str, setting: str) -> str:
  return f"{title}: {setting}" if setting else title


def dots(
  lines: Sequence[dict], row: str, label: Callable[[dict], str], spread: Callable[[dict], Sequence]
) -> tuple[tuple[str, ...], tuple[Series, ...]]:
  """Returns the names of rows, and a series per label: (middle, lowest, highest) of each line."""
  names = tuple(dict.fromkeys(line[row] for line in lines))
  points: dict[str, list[Point]] = {}
  for line in lines:
    middle, low, high = spread(line)
    point = Point(middle, names.index(line[row]), low, high)
    points.setdefault(label(line), []).append(point)
  return names, tuple(Series(name, tuple(found), "points") for name, found in points.items())


def op_charts(lines: Sequence[Line]) -> list[Chart]:
  """Time per op, one point per implementation and baseline, at each number of tokens."""
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, FREE)):
    for length in sorted({row["length"] for row in rows}, reverse=True):
      for key, title in (("both", "Forward and backward pass"), ("forward", "Forward pass")):
        timed = [
          row for row in rows if row["length"] == length and row.get(f"{key}_ms") is not None
        ]
        if not timed:
          continue
        spread = lambda row, key=key: (
          row[f"{key}_ms"],
          *(1e3 * end(row[f"{key}_seconds"]) for end in (min, max)),
        )
        names, series = dots(timed, "op", lambda row: row["name"], spread)
        title = f"{title} at {length:,} tokens"
        note = "Medians over the rounds; bars reach from the fastest to the slowest round."
        x, y = Axis("milliseconds", log=True), Axis("op", names=names)
        found.append(Chart(f"{key}-{length}-{n}", title, setting, x, y, series, note))
  return found


def op_tables(lines: Sequence[Line]) -> list[Table]:
  found = []
  for setting, rows in by_setting(lines, FREE):
    of = lambda name, form=",.2f", rows=rows: numbers((row.get(name) for row in rows), form)
    columns = {
      "op": words(row["op"] for row in rows),
      "implementation or baseline": words(row["name"] for row in rows),
      "tokens": of("length", ",.0f"),
      "forward ms": of("forward_ms"),
      "forward+backward ms": of("both_ms"),
      "ratio": of("ratio"),
      "compile s": of("compile_seconds", ",.1f"),
      "temporary MiB": of("temp_mib", ",.1f"),
      "why not timed": words(row.get("why_not") for row in rows),
    }
    note = (
      "Ratio: time of the naive token scan, for attention of the quadratic softmax, divided by "
    )
    note += "the row's; larger is faster."
    found.append(table(titled("Ops", setting), columns, note))
  return found


def decode_charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, FREE)):
    label = lambda row: f"at position {row['position']:,}"
    names, series = dots(rows, "op", label, lambda row: (row["step_us"],) * 3)
    x, y = Axis("microseconds per token", log=True), Axis("op", names=names)
    note = "Medians over the rounds."
    found.append(Chart(f"decode-{n}", "Decoding one token", setting, x, y, series, note))
  return found


def decode_tables(lines: Sequence[Line]) -> list[Table]:
  return [
    table(
      titled("Decoding", setting),
      {
        "op": words(row["op"] for row in rows),
        "position": numbers((row["position"] for row in rows), ",.0f"),
        "µs per token": numbers((row["step_us"] for row in rows), ",.1f"),
      },
    )
    for setting, rows in by_setting(lines, FREE)
  ]


def scaling_charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, FREE)):
    per_token = [row | {"us": 1e3 * row["both_ms"] / row["length"]} for row in rows]
    series = curves(per_token, "length", "us", lambda row: row["op"])
    x = Axis("tokens of a sequence", log=True, own_ticks=True)
    y = Axis("microseconds per token, forward and backward", log=True)
    found.append(Chart(f"scaling-{n}", "Time per token, chunked", setting, x, y, series))
  return found


def scaling_tables(lines: Sequence[Line]) -> list[Table]:
  return [
    table(
      titled("Scaling of the chunked implementation", setting),
      {
        "op": words(row["op"] for row in rows),
        "tokens": numbers((row["length"] for row in rows), ",.0f"),
        "forward+backward ms": numbers((row["both_ms"] for row in rows), ",.2f"),
        "µs per token": numbers((1e3 * row["both_ms"] / row["length"] for row in rows), ",.2f"),
        "slope": numbers((row.get("slope") for row in rows), ".3f"),
      },
      "Slope of log time over log tokens: 1 is linear.",
    )
    for setting, rows in by_setting(lines, FREE)
  ]


SECONDS = (("compile_seconds", "seconds"), ("compile_cpu_seconds", "CPU seconds"))


def compile_charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (_, rows) in enumerate(by_setting(lines, tuple(lines[0].values["config"]))):
    both = [
      dict(name=row["name"], what=what, value=row[key]) for key, what in SECONDS for row in rows
    ]
    names, series = dots(both, "name", lambda row: row["what"], lambda row: (row["value"],) * 3)
    x, y = Axis("seconds", low=0.0), Axis("layers", names=names)
    found.append(Chart(f"compile-{n}", "Compiling the gradient of layers", "", x, y, series))
  return found


def compile_tables(lines: Sequence[Line]) -> list[Table]:
  rows = [line.values for line in lines]
  columns = {
    "layers": words(row["name"] for row in rows),
    "model width": numbers((row["d_model"] for row in rows), ",.0f"),
    "tokens": numbers((row["length"] for row in rows), ",.0f"),
  }
  columns |= {what: numbers((row[key] for row in rows), ".1f") for key, what in SECONDS}
  return [table("Compile times", columns)]
