"""Figures and tables of `serve.py`: throughput, latency, shared prefixes, drafts."""

from collections.abc import Sequence

from page.chart import Axis, Chart, Series, curves, points_of
from page.lines import Line, by_setting, text_of
from page.speeds import dots, titled
from page.table import Table, numbers, table, words
from serving.report import WAYS

SLOTS = Axis("slots", log=True, own_ticks=True)
TIMES = {
  "first_median": "first token, median",
  "first_95": "first token, 95th percentile",
  "between_median": "between tokens, median",
  "between_95": "between tokens, 95th percentile",
}
DRAFTS = {
  "step": "a step",
  "accepted": "verified, all right",
  "rejected": "verified, not all right",
  "stored": "token by token, all states stored",
}


def way_name(row: dict) -> str:
  way: str = row["way"]
  return WAYS.get(way, way)


def charts(lines: Sequence[Line]) -> list[Chart]:
  """Tokens per second, and latencies at random arrivals, against the slots."""
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, ("slots",))):
    many = [row for row in rows if row["way"] != "one by one"]
    slots = [row["slots"] for row in many] or [1]
    speed = curves(many, "slots", "tokens_per_second", way_name)
    alone = [row["tokens_per_second"] for row in rows if row["way"] == "one by one"]
    ends = [(place, value) for value in alone for place in (min(slots), max(slots))]
    if ends:
      speed += (Series(WAYS["one by one"], points_of(ends), "level"),)
    y = Axis("tokens per second", low=0.0)
    title = "Throughput, all requests at once"
    found.append(Chart(f"throughput-{n}", title, setting, SLOTS, y, speed))
    timed = [row for row in rows if "first_median" in row]
    if timed:
      scaled = [
        {name: 1e3 * row[name] for name in TIMES} | {"slots": row["slots"]} for row in timed
      ]
      series = tuple(
        curves(scaled, "slots", name, lambda row, text=text: text)[0]
        for name, text in TIMES.items()
      )
      title, y = "Latency of the engine at random arrivals", Axis("milliseconds", log=True)
      found.append(Chart(f"latency-{n}", title, setting, SLOTS, y, series))
  return found


def tables(lines: Sequence[Line]) -> list[Table]:
  found = []
  for setting, rows in by_setting(lines, ("slots",)):
    base = next((row["tokens_per_second"] for row in rows if row["way"] == "one by one"), None)
    speeds = [row["tokens_per_second"] for row in rows]
    columns = {
      "way": words(map(way_name, rows)),
      "slots": numbers(row["slots"] for row in rows),
      "tokens/s": numbers(speeds, ",.0f"),
      "to one by one": numbers((x / base if base else None for x in speeds), ".1f"),
    }
    for name, text in TIMES.items():
      columns[f"{text}, ms"] = numbers((row.get(name) for row in rows), ",.1f", 1e3)
    found.append(table(titled("Requests of random lengths", setting), columns))
  return found


def prefix_name(row: dict) -> str:
  way = way_name(row)
  if row["way"] != "engine":
    return way
  return f"{way}, {'with' if row['cache'] else 'without'} a cache"


def prefix_charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, ("slots",))):
    named = [row | {"name": prefix_name(row)} for row in rows]
    spread = lambda row: (1e3 * row["first_median"],) * 3
    names, series = dots(named, "name", lambda row: "first token", spread)
    x, y = Axis("milliseconds, median", low=0.0), Axis("way", names=names)
    title = "First token behind a shared prefix"
    found.append(Chart(f"prefix-{n}", title, setting, x, y, series))
  return found


def prefix_tables(lines: Sequence[Line]) -> list[Table]:
  found = []
  for setting, rows in by_setting(lines, ("slots",)):
    columns = {
      "way": words(map(prefix_name, rows)),
      "first token, ms": numbers((row["first_median"] for row in rows), ",.1f", 1e3),
      "tokens/s": numbers((row.get("tokens_per_second") for row in rows), ",.0f"),
      "hit rate": numbers((row.get("hit_rate") for row in rows), ".0%"),
      "cache MB": numbers((row.get("cache_bytes") for row in rows), ",.1f", 1e-6),
    }
    found.append(table(titled("Requests that share a prefix", setting), columns))
  return found


def draft_charts(lines: Sequence[Line]) -> list[Chart]:
  found = []
  for n, (setting, rows) in enumerate(by_setting(lines, ("slots",))):
    parts = [
      dict(name=text, value=1e3 * row[name]) for row in rows for name, text in DRAFTS.items()
    ]
    names, series = dots(parts, "name", lambda row: "time", lambda row: (row["value"],) * 3)
    x, y = Axis("milliseconds", low=0.0), Axis("call", names=names)
    found.append(Chart(f"drafts-{n}", "Verification of drafts", setting, x, y, series))
  return found


def draft_tables(lines: Sequence[Line]) -> list[Table]:
  rows = [line.values for line in lines]
  columns = {"drafted tokens": words(text_of(row["config"].get("draft_tokens")) for row in rows)}
  columns |= {
    f"{text}, ms": numbers((row[name] for row in rows), ",.2f", 1e3)
    for name, text in DRAFTS.items()
  }
  return [table("Verification of drafts", columns)]
