"""Tables of `speed.py`: ops with notes, decoding, scaling, compile times of layers."""

import itertools
import statistics
from collections.abc import Sequence

from results import describe_device
from rich.table import Table
from speed.cases import OPS
from speed.config import Config
from speed.timing import TRANSITIONS_MIB, Row, milliseconds


def ops_table(config: Config, rows: Sequence[Row]) -> Table:
  value_width = config.value_width or config.width
  sizes = (
    f"batch {config.batch}, {config.heads} heads, K {config.width}, V {value_width}, {config.dtype}"
  )
  table = Table(title=f"Speed: {sizes}; {describe_device()}; median of {config.repeats} rounds")
  for name in ("op", "implementation or baseline"):
    table.add_column(name, no_wrap=True)
  for name in (
    "tokens",
    "forward ms",
    "fwd+bwd ms",
    "lowest - highest",
    "ratio",
    "compile s",
    "temp MiB",
  ):
    table.add_column(name, justify="right", no_wrap=True)
  for row, following in itertools.zip_longest(rows, rows[1:]):
    number = lambda x, form=".1f": "-" if x is None else format(x, form)
    spread = "-" if not row.both else f"{1e3 * min(row.both):.1f} - {1e3 * max(row.both):.1f}"
    table.add_row(
      row.op,
      row.name if row.baseline is None else f"  {row.name}",
      str(row.length),
      number(milliseconds(row.forward)),
      number(milliseconds(row.both)),
      spread,
      number(row.ratio, ".2f"),
      number(row.compile_seconds),
      number(row.temp_mib, ".0f"),
      end_section=following is not None and following.op != row.op,
    )
  return table


def notes(config: Config, rows: Sequence[Row]) -> list[str]:
  """Returns sentences on the table: ops, columns, rows without times, losses that differ."""
  found = [f"{name}: {OPS[name].meaning}." for name in config.ops if OPS[name].meaning]
  found = [" ".join(found)] if found else []
  found.append(
    "fwd+bwd: forward+backward of the loss sum(o o) + sum(state state) with the gradients of all "
    "inputs; compile and temp are its compile time and temporary memory. ratio: the time of the "
    "naive token scan (for attention, of the quadratic softmax) at as many tokens, divided by the "
    "row's: larger is faster."
  )
  if any(row.both and row.length != config.length for row in rows):
    found.append(
      f"Rows of fewer than {config.length} tokens: associative scans keep a transition for every "
      f"token, and are timed where these fit in {TRANSITIONS_MIB} MiB; recurrent attention reads "
      "all keys for each query."
    )
  for why, group in itertools.groupby(
    sorted(rows, key=lambda row: row.why_not), key=lambda row: row.why_not
  ):
    if why:
      found.append(f"{', '.join(f'{row.op} {row.name}' for row in group)}: {why}")
  tolerance = 1e-3 if config.dtype in ("float32", "float64") else 0.1
  for (op, T), group in itertools.groupby(rows, key=lambda row: (row.op, row.length)):
    losses = {row.name: row.loss for row in group if row.loss is not None}
    first = next(iter(losses.values()), 0.0)
    odd = [
      f"{name} {loss:.6g}"
      for name, loss in losses.items()
      if not abs(loss - first) <= tolerance * abs(first)
    ]
    if odd:
      found.append(
        f"{op} at {T} tokens: these losses differ from {next(iter(losses))}'s {first:.6g}: "
        f"{', '.join(odd)}"
      )
  return found


def decode_table(config: Config, lines: list[dict]) -> Table:
  table = Table(title=f"Decoding one token: µs per token (state donated; {describe_device()})")
  table.add_column("op", no_wrap=True)
  for position in config.positions:
    table.add_column(f"at position {position:,}", justify="right")
  table.add_column("last / first", justify="right")
  for op, group in itertools.groupby(lines, key=lambda line: line["op"]):
    group = list(group)
    rounds = zip(group[-1]["step_seconds"], group[0]["step_seconds"], strict=True)
    quotient = statistics.median(last / first for last, first in rounds)
    table.add_row(op, *(f"{line['step_us']:.1f}" for line in group), f"{quotient:.2f}")
  return table


def scaling_table(config: Config, lines: list[dict], memory_kept: bool) -> Table:
  memory = "; freed memory stays in the process" if memory_kept else ""
  table = Table(title=f"Chunked, forward+backward: µs per token ({describe_device()}{memory})")
  table.add_column("op", no_wrap=True)
  lengths = sorted(set(config.lengths))
  for T in lengths:
    table.add_column(f"{T} tokens", justify="right")
  table.add_column("slope of log time over log tokens", justify="right")
  for op, group in itertools.groupby(lines, key=lambda line: line["op"]):
    group = list(group)
    per_token = {line["length"]: 1e3 * line["both_ms"] / line["length"] for line in group}
    slope = "-" if group[0]["slope"] is None else f"{group[0]['slope']:.3f}"
    table.add_row(op, *(f"{per_token[T]:.1f}" if T in per_token else "-" for T in lengths), slope)
  return table


def compile_table(lines: list[dict]) -> Table:
  sizes = f"d_model {lines[0]['d_model']}, {lines[0]['length']} tokens" if lines else ""
  table = Table(title=f"Compiling jit(grad): {sizes}")
  table.add_column("layers", no_wrap=True)
  table.add_column("seconds", justify="right")
  table.add_column("CPU seconds", justify="right")
  for line in lines:
    seconds = (line["compile_seconds"], line["compile_cpu_seconds"])
    table.add_row(line["name"], *(f"{x:.1f}" for x in seconds))
  return table
