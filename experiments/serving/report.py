"""Tables, figure and ratios of the experiment, made from the lines of results alone."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.table import Table
from serving.config import Config

AIM = 5.0  # of both ratios
WAYS = {"one by one": "one by one", "static": "static batches", "engine": "engine"}


def of_task(lines: Sequence[dict], task: str) -> list[dict]:
  return [line for line in lines if line["task"] == task]


def milliseconds(line: dict, name: str) -> str:
  return f"{1e3 * line[name]:,.1f}" if name in line else "–"


def throughput_table(lines: Sequence[dict]) -> Table:
  """Makes the table of ways and slots; latencies are those at random arrivals."""
  result = Table(title="Requests of random lengths")
  result.add_column("way", no_wrap=True)
  columns = ["slots", "tokens/s", "to one by one", "first token ms", "95 %", "between ms", "95 %"]
  for column in columns:
    result.add_column(column, justify="right")
  found = of_task(lines, "slots")
  base = found[0]["tokens_per_second"]
  for line in found:
    speed = line["tokens_per_second"]
    times = ("first_median", "first_95", "between_median", "between_95")
    cells = [str(line["slots"]), f"{speed:,.0f}", f"{speed / base:.1f}"]
    result.add_row(WAYS[line["way"]], *cells, *(milliseconds(line, name) for name in times))
  return result


def prefix_table(lines: Sequence[dict]) -> Table:
  """Makes the table of a shared prefix."""
  result = Table(title="Requests that share a prefix")
  result.add_column("way", no_wrap=True)
  for column in ("first token ms", "tokens/s", "hit rate", "cache MB"):
    result.add_column(column, justify="right")
  for line in of_task(lines, "prefix"):
    name = WAYS[line["way"]]
    if line["way"] == "engine":
      name += ", with a cache" if line["cache"] else ", without a cache"
    speed = f"{line['tokens_per_second']:,.0f}" if "tokens_per_second" in line else "–"
    rate = f"{line['hit_rate']:.0%}" if "hit_rate" in line else "–"
    size = f"{line['cache_bytes'] / 1e6:,.1f}" if "cache_bytes" in line else "–"
    result.add_row(name, milliseconds(line, "first_median"), speed, rate, size)
  return result


def draft_lines(config: Config, lines: Sequence[dict]) -> list[str]:
  """Returns sentences on the time of verification."""
  (line,) = of_task(lines, "drafts")
  ms = lambda name: f"{1e3 * line[name]:.1f} ms"
  return [
    f"one row: a step {ms('step')}; {config.draft_tokens} drafted tokens verified in "
    f"{ms('accepted')} if all are right, {ms('rejected')} if not (the call and a second one); one "
    f"token after the other, with all states stored: {ms('stored')}"
  ]


def facts(config: Config, lines: Sequence[dict]) -> list[tuple[bool, str]]:
  """Compares the two ratios with what is expected."""
  found = of_task(lines, "slots")
  slots = max(config.slots)
  best = next(x for x in found if x["way"] == "engine" and x["slots"] == slots)
  ratio = best["tokens_per_second"] / found[0]["tokens_per_second"]
  text = f"{slots} slots: {ratio:.1f} times the tokens/s of one by one"
  results = [(ratio >= AIM, f"{text} ≥ {AIM:.0f}")] if slots >= 16 else [(True, text)]
  first = {(x["way"], x["cache"]): x["first_median"] for x in of_task(lines, "prefix")}
  ratio = first["engine", False] / first["engine", True]
  text = f"a known prefix of {config.prefix:,} tokens: the first token {ratio:.1f} times earlier"
  results += [(ratio >= AIM, f"{text} ≥ {AIM:.0f}")] if config.prefix >= 2000 else [(True, text)]
  return results


def draw(lines: Sequence[dict]) -> Figure:
  """Draws tokens per second and the time to the first token against the slots."""
  figure = Figure(figsize=(9, 4), layout="constrained")
  speed, delay = figure.subplots(1, 2)
  found = of_task(lines, "slots")
  speed.axhline(found[0]["tokens_per_second"], color="C0", label=WAYS["one by one"])
  for color, way in (("C1", "static"), ("C2", "engine")):
    points = [(x["slots"], x["tokens_per_second"]) for x in found if x["way"] == way]
    speed.plot(*zip(*points, strict=True), "o-", color=color, label=WAYS[way])
  speed.set(xlabel="slots", ylabel="tokens per second", title="All requests at once")
  engine = [x for x in found if x["way"] == "engine"]
  for name, label in (("first", "first token"), ("between", "between tokens")):
    for part, style in (("median", "o-"), ("95", "o:")):
      points = [(x["slots"], 1e3 * x[f"{name}_{part}"]) for x in engine]
      text = f"{label}, {'median' if part == 'median' else '95 %'}"
      color = "C2" if name == "first" else "C3"
      delay.plot(*zip(*points, strict=True), style, color=color, label=text)
  delay.set(xlabel="slots", ylabel="milliseconds", yscale="log", title="Random arrivals, engine")
  for axis in (speed, delay):
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
  return figure
