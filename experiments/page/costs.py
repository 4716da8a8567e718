"""Figures and tables of `cost.py`, counted and measured."""

from collections.abc import Sequence

from cost import STACKS
from page.chart import Axis, Chart, curves, number, size
from page.lines import Line, by_setting
from page.speeds import titled
from page.table import Cell, Table, numbers, table, words

FREE = ("models", "lengths", "measure")
CONTEXT = Axis("tokens of context", log=True, own_ticks=True)


def label(line: dict) -> str:
  model = line["model"]
  return STACKS[model].label if model in STACKS else model


def drawn(lines: Sequence[Line], figures: Sequence[tuple[str, str, str, Axis]]) -> list[Chart]:
  """Returns a chart of each value against the context, for each setting."""
  return [
    Chart(f"{key}-{n}", title, setting, CONTEXT, y, curves(rows, "length", name, label))
    for n, (setting, rows) in enumerate(by_setting(lines, FREE))
    for key, name, title, y in figures
  ]


def charts(lines: Sequence[Line]) -> list[Chart]:
  carried = Axis("bytes carried from token to token", log=True, write=size)
  operations = "multiplications and additions"
  return drawn(
    lines,
    [
      ("memory", "carried_bytes", "Memory during decoding", carried),
      ("operations", "decode_operations", "Work of the next token", Axis(operations, log=True)),
    ],
  )


def tables(lines: Sequence[Line]) -> list[Table]:
  found = []
  for setting, rows in by_setting(lines, FREE):
    of = lambda name, form=",.0f", rows=rows: numbers((row[name] for row in rows), form)
    bytes_of = lambda part, rows=rows: [
      Cell(size(row[f"{part}_bytes"]), row[f"{part}_bytes"]) for row in rows
    ]
    columns = {
      "model": words(map(label, rows)),
      "context": of("length"),
      "parameters": of("parameters"),
      "carried": bytes_of("carried"),
      "state": bytes_of("state"),
      "convolution": bytes_of("conv"),
      "cache": bytes_of("cache"),
    }
    for part, name in (("decode", "operations of the next token"), ("prefill", "of prefill")):
      counts = [row[f"{part}_operations"] for row in rows]
      columns[name] = [Cell(number(count), count) for count in counts]
    found.append(table(titled("Counted", setting), columns, "Bytes in decimal units."))
  return found


def measured_charts(lines: Sequence[Line]) -> list[Chart]:
  carried = Axis("bytes carried from token to token", log=True, write=size)
  return drawn(
    lines,
    [
      ("time", "milliseconds", "Time of the next token", Axis("milliseconds", log=True)),
      ("bytes", "bytes", "Measured bytes", carried),
    ],
  )


def measured_tables(lines: Sequence[Line]) -> list[Table]:
  found = []
  for setting, rows in by_setting(lines, FREE):
    of = lambda name, form=",.0f", rows=rows: numbers((row[name] for row in rows), form)
    columns = {
      "model": words(map(label, rows)),
      "context": of("length"),
      "parameters": of("parameters"),
      "ms per token": of("milliseconds", ",.3f"),
      "CPU ms per token": of("cpu_milliseconds", ",.3f"),
      "bytes": of("bytes"),
      "bytes by lajax.cost": of("expected_bytes"),
    }
    found.append(table(titled("Measured", setting), columns))
  return found
