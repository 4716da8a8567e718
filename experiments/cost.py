"""Counts what recurrent, hybrid and softmax models cost as the context grows.

    python experiments/cost.py

compares stacks of 28 layers of width 1536 with 16 heads of 96 channels. For each stack it prints
the parameters, the bytes that are carried from token to token, and the operations per token, and
draws bytes and operations against the context, from a thousand to ten million tokens. Nothing is
allocated: bytes are read off the real states, operations off the traced programs. It takes about
ten seconds.

The stack "sophia" is the hybrid [KDA, KDA, KDA, MLA] x 7: three layers of Kimi Delta Attention,
then one of multi-head latent attention, the pattern of Kimi Linear (arXiv:2510.26692) at this
width.

Expected: the 21 x 16 = 336 state matrices of sophia's KDA layers are 3,096,576 numbers, whatever
  the context. lajax keeps
them in float32, 12.4 MB; in bfloat16 they would be 6.19 MB. 28 layers of softmax attention carry
704.6 MB at 4,096 tokens, 7 of them a quarter of that. The last lines say whether this came out.

Results go to `runs/cost/results.jsonl`, one line per model and length, written anew each time, with
`memory.png` and `operations.png`. `--help` lists the flags.

    python experiments/cost.py --measure

times what the first command counts, on this machine: the next token behind 1k, 16k and 256k tokens,
of stacks of four layers with two heads of 64 channels, in float32. The stacks are KDA, KDA with
every fourth layer softmax attention, and softmax attention. The step is jitted, and its state is
donated. No context is read: states and caches are random numbers, and the counters say how many
tokens they stand for. It takes about a minute and 2 GiB.

Expected: 256k tokens take KDA at most 1.1 times as long as 1k, since its state is the same; and the
bytes of the arrays are those that `lajax.cost` computes, exactly.

Results of this command go to `runs/cost/decode.jsonl`, with `decode.png`.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
import decoding
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure
from results import as_json, read, save, versions, write
from rich.console import Console
from rich.table import Table

import lajax.layers as L
from lajax.cost import Cost, cost

PROG = "cost.py"

# --- the models ---


def _heads(layer: Callable, **options) -> Callable:
  """Serves a layer with the number and width of heads that the flags give."""
  return lambda c: functools.partial(layer, c.d_model, c.num_heads, c.head_dim, **options)


softmax = _heads(L.SoftmaxAttention)
mla = _heads(L.MLA, rope_theta=None)  # a latent of 512 and 64 shared channels, as in Kimi Linear
kda = _heads(L.KimiDeltaAttention)
gated_deltanet = _heads(L.GatedDeltaNet)
lightning = _heads(L.Lightning)
mamba = lambda c: functools.partial(L.Mamba, c.d_model)
mamba2 = lambda c: functools.partial(L.Mamba2, c.d_model, 2 * c.num_heads, c.head_dim)
griffin = lambda c: functools.partial(L.GriffinBlock, c.d_model, num_blocks=c.num_heads)
local = _heads(L.SoftmaxAttention, num_kv_heads=1, window=2048, rope_theta=10_000.0)


@dataclasses.dataclass(frozen=True)
class Stack:
  """A pattern of layers, repeated to the depth of the model, and its name in figures."""

  label: str
  layers: tuple[Callable, ...]


# A row added here appears in every flag, table and figure.
STACKS: dict[str, Stack] = {
  "softmax": Stack("softmax attention", (softmax,)),
  "mla": Stack("MLA", (mla,)),
  "sophia": Stack("sophia: KDA, KDA, KDA, MLA", (kda, kda, kda, mla)),
  "kda_softmax": Stack("KDA, KDA, KDA, softmax", (kda, kda, kda, softmax)),
  "lightning_softmax": Stack("7 Lightning, softmax", (*(lightning,) * 7, softmax)),
  "griffin": Stack("Griffin, Griffin, local attention", (griffin, griffin, local)),
  "kda": Stack("KDA", (kda,)),
  "gated_deltanet": Stack("Gated DeltaNet", (gated_deltanet,)),
  "mamba2": Stack("Mamba-2", (mamba2,)),
  "mamba": Stack("Mamba", (mamba,)),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Compares the memory and the work of stacks of token mixers at growing lengths of context."""

  models: tuple[str, ...] = tuple(STACKS)
  """Names of stacks; sophia is [KDA, KDA, KDA, MLA], repeated."""
  layers: int = 28
  """Layers per stack."""
  num_heads: int = 16
  """Heads per layer; the width of the model is heads times head_dim."""
  head_dim: int = 96
  """Channels of keys, queries and values per head."""
  lengths: tuple[int, ...] = (1_000, 4_096, 10_000, 100_000, 1_000_000, 10_000_000)
  """Tokens of context; the table shows the second and the last."""
  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """Dtype of projections and caches. States of recurrences are float32 in any case."""
  measure: bool = False
  """Time the next token behind each length, instead of counting. The other defaults are smaller."""
  out: pathlib.Path = pathlib.Path("runs", "cost")
  """Folder of the results."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""

  @property
  def d_model(self) -> int:
    return self.num_heads * self.head_dim


MEASURED = Config(
  models=("kda", "kda_softmax", "softmax"),
  layers=4,
  num_heads=2,
  head_dim=64,
  lengths=(1_000, 16_000, 256_000),
  dtype="float32",
)
FLAT = 1.1  # most that a linear stack's longest context may take, in units of the shortest


def main() -> None:
  config = parse(sys.argv[1:])
  try:
    cli.use_device(config.device)
    cli.make_folder(config.out)
  except ValueError as error:
    cli.fail(PROG, str(error))
  try:
    (measure if config.measure else run)(config, cli.console(180))
  except KeyboardInterrupt as stop:
    stop.add_note("A new start computes everything again, in a minute at most.")
    raise


def run(config: Config, console: Console) -> None:
  started = time.perf_counter()
  costs = {
    (name, length): cost(stack(config, name), length)
    for name in config.models
    for length in config.lengths
  }
  results = config.out / "results.jsonl"
  write(results, lines_of(config, costs))
  lines = read(results)
  console.print(table(config, lines))
  described = describe(config)
  draw(lines, "carried_bytes", f"Memory during decoding: {described}", config.out / "memory.png")
  draw(lines, "decode_operations", f"Work per token: {described}", config.out / "operations.png")
  for name in config.models:
    if len(STACKS[name].layers) > 1:
      console.print(f"{name}: the layers {STACKS[name].label.split(': ')[-1]}, repeated")
  cli.print_facts(console, facts(config, lines))
  console.print(f"{config.out}: results.jsonl, memory.png, operations.png")
  console.print(f"{time.perf_counter() - started:.1f} seconds in all")


def measure(config: Config, console: Console) -> None:
  """Times decode steps, compares bytes, and writes lines, table and figure."""
  started = time.perf_counter()
  found = []
  for name in config.models:
    layers = decoding.make_layers(layer_makers(config, name))
    timings = decoding.time_stack(layers, config.d_model, config.lengths)
    for length, timing in timings.items():
      counted = cost(layers, length, prefill=False)
      line = dict(task="decode", model=name, length=length, parameters=counted.parameters)
      found.append(line | dataclasses.asdict(timing) | dict(expected_bytes=counted.carried.bytes))
  path = config.out / "decode.jsonl"
  write(path, [line | dict(config=as_json(config), versions=versions()) for line in found])
  lines = read(path)
  console.print(measured_table(config, lines))
  title = f"Time per token: {describe(config)}"
  draw(lines, "milliseconds", title, config.out / "decode.png")
  cli.print_facts(console, measured_facts(config, lines))
  console.print(f"{config.out}: decode.jsonl, decode.png")
  console.print(f"{time.perf_counter() - started:.1f} seconds in all")


def parse(arguments: Sequence[str]) -> Config:
  """Returns the configuration of a command line; a bad flag ends the program with one line."""
  default = MEASURED if "--measure" in arguments else Config()
  config = cli.parse(default, arguments, PROG)
  try:
    cli.check_known(config, "models", tuple(STACKS))
    cli.check_at_least_one(config, "layers", "num_heads", "head_dim", "lengths")
  except ValueError as error:
    cli.fail(PROG, str(error))
  return dataclasses.replace(config, lengths=tuple(sorted(set(config.lengths))))


def stack(config: Config, name: str) -> list[nnx.Module]:
  """Makes the layers without values of parameters. Equal layers are one object: traced once."""
  makers = layer_makers(config, name)
  made = {make: nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))) for make in makers}
  return [made[make] for make in makers]


def layer_makers(config: Config, name: str) -> list[Callable[[nnx.Rngs], nnx.Module]]:
  """Returns a function from random streams to a layer, for each layer of a stack."""
  dtype = jnp.dtype(config.dtype)
  make = lambda layer: lambda rngs: layer(config)(dtype=dtype, param_dtype=dtype, rngs=rngs)
  layers = STACKS[name].layers
  made = {layer: make(layer) for layer in layers}
  return [made[layer] for layer in itertools.islice(itertools.cycle(layers), config.layers)]


def lines_of(config: Config, costs: dict[tuple[str, int], Cost]) -> list[dict]:
  """Returns one line of results for each model and length."""
  lines = []
  for (model, length), found in costs.items():
    line = dict(task="cost", model=model, length=length, parameters=found.parameters)
    for part in ("state", "conv", "cache", "carried"):
      size = getattr(found, part)
      line |= {f"{part}_numbers": size.numbers, f"{part}_bytes": size.bytes}
    line |= dict(decode_operations=found.decode, prefill_operations=found.prefill)
    lines.append(line | dict(config=as_json(config), versions=versions()))
  return lines


# --- tables and figures, from the lines alone ---


def describe(config: Config) -> str:
  heads = f"{config.num_heads} heads of {config.head_dim} channels"
  return f"{config.layers} layers, {heads}, {config.dtype}"


def table(config: Config, lines: list[dict]) -> Table:
  shown = sorted({config.lengths[min(1, len(config.lengths) - 1)], config.lengths[-1]})
  result = Table(title=f"{describe(config)} (operations per token: multiplications and additions)")
  columns = ["model", "parameters", "state numbers", "state (float32)", "conv"]
  for length in shown:
    at = tokens(length)
    columns += [f"cache at {at}", f"decode at {at}", f"prefill of {at}"]
  for column in columns:
    result.add_column(column, justify="left" if column == "model" else "right")
  for model in config.models:
    of = {line["length"]: line for line in lines if line["model"] == model}
    first = of[shown[0]]
    cells = [f"{first['parameters'] / 1e6:,.1f} M", f"{first['state_numbers']:,}"]
    cells += [size(first["state_bytes"]), size(first["conv_bytes"])]
    for length in shown:
      line = of[length]
      cells.append(size(line["cache_bytes"]))
      work = (line["decode_operations"], line["prefill_operations"])
      cells += [f"{operations / 1e6:,.0f} M" for operations in work]
    result.add_row(model, *cells)
  return result


def measured_table(config: Config, lines: list[dict]) -> Table:
  first, last = min(config.lengths), max(config.lengths)
  result = Table(title=f"Time per token: {describe(config)} (ms, and CPU ms of all cores)")
  columns = ["model", "parameters"]
  for length in config.lengths:
    at = tokens(length)
    columns += [f"carried at {at}", f"ms at {at}", "CPU ms"]
  for column in [*columns, f"{tokens(last)} / {tokens(first)}"]:
    result.add_column(column, justify="left" if column == "model" else "right")
  for model in config.models:
    of = {line["length"]: line for line in lines if line["model"] == model}
    cells = [f"{of[first]['parameters']:,}"]
    for length in config.lengths:
      line = of[length]
      cells += [
        size(line["bytes"]),
        f"{line['milliseconds']:.3f}",
        f"{line['cpu_milliseconds']:.3f}",
      ]
    result.add_row(model, *cells, f"{of[last]['milliseconds'] / of[first]['milliseconds']:.2f}")
  return result


def size(count: int) -> str:
  """Formats bytes in decimal units."""
  for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if count >= scale:
      digits = 1 if count >= 10 * scale else 2
      return f"{count / scale:,.{digits}f} {unit}"
  return f"{count} B"


def tokens(length: int) -> str:
  """Formats a number of tokens: 4,096, 10k, 10M."""
  for unit, scale in (("M", 10**6), ("k", 10**3)):
    if length >= scale and not length % scale:
      return f"{length // scale}{unit}"
  return f"{length:,}"


LABELS = {
  "carried_bytes": "bytes carried from token to token",
  "decode_operations": "operations of the next token",
  "milliseconds": "milliseconds of the next token",
}


def draw(lines: list[dict], key: str, title: str, path: pathlib.Path) -> None:
  """Draws one line per model against the length of context."""
  figure = Figure(figsize=(9, 4.8), layout="constrained")
  axis = figure.subplots()
  for model in dict.fromkeys(line["model"] for line in lines):
    points = [(line["length"], line[key]) for line in lines if line["model"] == model]
    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=STACKS[model].label)
  axis.set(xlabel="tokens of context", ylabel=LABELS[key], xscale="log", yscale="log", title=title)
  axis.grid(alpha=0.3, which="major")
  figure.legend(loc="outside right upper", fontsize=8)
  save(figure, path)


def facts(config: Config, lines: list[dict]) -> list[tuple[bool, str]]:
  """Compares with the figures of the docstring, where the settings are those of the docstring."""
  default = Config()
  names = ("layers", "num_heads", "head_dim", "dtype")
  same = all(getattr(config, name) == getattr(default, name) for name in names)
  found = {line["model"]: line for line in lines if line["length"] == 4096} if same else {}
  results = []
  if "sophia" in found:
    numbers, kept = found["sophia"]["state_numbers"], found["sophia"]["state_bytes"]
    counts = {line["state_numbers"] for line in lines if line["model"] == "sophia"}
    text = f"sophia: {numbers:,} numbers of state = 336 x 96 x 96, {size(kept)} in float32, as kept"
    in_half = f"{size(2 * numbers)} if kept in bfloat16"
    results.append((counts == {336 * 96 * 96} and kept == 4 * numbers, f"{text} ({in_half})"))
  if "softmax" in found:
    cache = found["softmax"]["cache_bytes"]
    text = f"softmax: {cache / 1e6:.1f} MB = {cache / 2**20:.0f} MiB of cache at 4,096 tokens"
    results.append((cache == 672 * 2**20, text))
    if "kda_softmax" in found:
      part = found["kda_softmax"]["cache_bytes"]
      results.append((4 * part == cache, f"kda_softmax: {part / 1e6:.1f} MB of cache, a quarter"))
  return results


def measured_facts(config: Config, lines: list[dict]) -> list[tuple[bool, str]]:
  """Compares bytes with `lajax.cost`, and the time of linear stacks at the ends of the lengths."""
  first, last = min(config.lengths), max(config.lengths)
  results = []
  for model in config.models:
    of = {line["length"]: line for line in lines if line["model"] == model}
    if of[first]["bytes"] == of[last]["bytes"] and first < last:
      ratio = of[last]["milliseconds"] / of[first]["milliseconds"]
      relation = "<=" if ratio <= FLAT else ">"
      text = (
        f"{model}: {tokens(last)} tokens take {ratio:.2f} {relation} {FLAT} times {tokens(first)}"
      )
      results.append((ratio <= FLAT, text))
  differ = [line for line in lines if line["bytes"] != line["expected_bytes"]]
  text = f"bytes of {len(lines)} states are those of lajax.cost"
  if differ:
    text = ", ".join(
      f"{line['model']} at {tokens(line['length'])}: {line['bytes']:,} bytes, lajax.cost says"
      f" {line['expected_bytes']:,}"
      for line in differ
    )
  return [*results, (not differ, text)]


if __name__ == "__main__":
  main()
