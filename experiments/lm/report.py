"""Table and figure of the language models, made from the lines of results alone."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table


def table(lines: Sequence[dict]) -> Table:
  """Makes a table: one row per run, and one per reference on the same bytes."""
  bytes_read = f"{lines[0]['held_out_bytes']:,} held-out bytes"
  result = Table(title=f"Bits per byte of {bytes_read}")
  result.add_column("model", no_wrap=True)
  columns = ("bits per byte", "parameters", "of them n-grams", "steps", "tokens", "tokens/s")
  for column in (*columns, "FLOPs used", "CPU s", "s"):
    result.add_column(column, justify="right")
  for line in lines:
    result.add_row(
      label(line),
      f"{line['bits_per_byte']:.3f}",
      f"{line['parameters']:,}",
      f"{line['ngram_parameters']:,}",
      f"{line['steps']:,}",
      f"{line['tokens']:,}",
      f"{line['tokens_per_second']:,.0f}",
      f"{line['utilisation']:.0%}",
      f"{line['cpu_seconds']:,.0f}",
      f"{line['seconds']:,.0f}",
    )
  result.add_section()
  for name, bits in lines[0]["references"].items():
    result.add_row(name, f"{bits:.3f}")
  return result


def label(line: dict) -> str:
  """Returns the pattern of a run: "3 kda, 1 mla"."""
  mixers, found = line["mixers"], []
  for n, mixer in enumerate(mixers):
    if n and mixer == mixers[n - 1]:
      found[-1][0] += 1
    else:
      found.append([1, mixer])
  return ", ".join(f"{count} {mixer}" for count, mixer in found)


def bits_over_time(lines: Sequence[dict]) -> Figure:
  """Draws held-out and training bits per byte over minutes, and the references as level lines."""
  figure = Figure(figsize=(7.5, 4.5), layout="constrained")
  axis = figure.subplots()
  for n, line in enumerate(lines):
    minutes = lambda points: [point[1] / 60 for point in points]
    value = lambda points: [point[2] for point in points]
    training, held_out = line["training_curve"], line["curve"]
    style: dict[str, Any] = dict(color=f"C{n}", label=f"{label(line)}: {line['bits_per_byte']:.3f}")
    axis.plot(minutes(training), value(training), color=f"C{n}", alpha=0.25, linewidth=0.8)
    end = [[line["steps"], line["seconds"], line["bits_per_byte"]]]
    axis.plot(minutes(held_out + end), value(held_out + end), "o-", markersize=4, **style)
  for n, (name, bits) in enumerate(lines[0]["references"].items()):
    level: dict[str, Any] = dict(
      color=f"C{len(lines) + n}", linestyle=(":", "--", "-.")[n % 3], linewidth=1
    )
    axis.axhline(bits, label=f"{name}: {bits:.3f}", **level)
  lowest = min(*(line["bits_per_byte"] for line in lines), *lines[0]["references"].values())
  axis.set(xlabel="minutes", ylabel="bits per byte", ylim=(lowest - 0.1, 4))
  axis.set_title("Held-out files (points) and training (faint)", fontsize=10)
  axis.legend(fontsize=8)
  axis.grid(alpha=0.3)
  return figure
