"""What do recurrent, hybrid and softmax models cost as the context grows?

    python experiments/cost.py

prints, for stacks of 28 layers of width 1536 with 16 heads of 96, their parameters, the bytes that they carry from token to
token, and the operations of a token; and draws bytes and operations against the context, from a thousand to ten million
tokens. Nothing is allocated: bytes are read off the real states, operations off the traced programs. Expected, in about
ten seconds: the 336 state matrices of "sophia" (KDA, KDA, KDA, MLA) are 3,096,576 numbers, 6.19 MB in bfloat16, whatever the
context; 28 layers of softmax attention carry 704.6 MB at 4,096 tokens, 7 of them a quarter. The last lines say whether that
came out.

Results go to `runs/cost/results.jsonl`, one line for each model and length, written anew each time, with `memory.png` and
`operations.png`. `--help` lists the flags.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Literal, NoReturn

import no_gpu  # isort: skip  # noqa: F401  # before jax
import jax.numpy as jnp
import tyro
from flax import nnx
from matplotlib.figure import Figure
from recall_results import append, versions
from rich.console import Console
from rich.table import Table

import lajax.layers as L
from lajax.cost import Cost, cost

# --- the models ------------------------------------------------------------------------------------------------------


def _heads(layer: Callable, **options) -> Callable:
  """A layer whose heads are all as the flags say."""
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

# Layers of a model, repeated to its depth. A row added here appears in every flag, table and figure.
STACKS: dict[str, tuple[Callable, ...]] = {
  "softmax": (softmax,),
  "mla": (mla,),
  "sophia": (kda, kda, kda, mla),
  "kda_softmax": (kda, kda, kda, softmax),
  "lightning_softmax": (*(lightning,) * 7, softmax),
  "griffin": (griffin, griffin, local),
  "gated_deltanet": (gated_deltanet,),
  "mamba2": (mamba2,),
  "mamba": (mamba,),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Compares the memory and the work of stacks of token mixers at growing lengths of context."""

  models: tuple[str, ...] = tuple(STACKS)
  """Names of stacks."""
  layers: int = 28
  """Layers in each."""
  num_heads: int = 16
  """Heads of a layer; the width of the model is heads times head_dim."""
  head_dim: int = 96
  """Channels of a head's keys, queries and values."""
  lengths: tuple[int, ...] = (1_000, 4_096, 10_000, 100_000, 1_000_000, 10_000_000)
  """Tokens of context; the table shows the second and the last."""
  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """Of projections and caches. The states of recurrences are float32 all the same."""
  out: pathlib.Path = pathlib.Path("runs", "cost")
  """Folder of the results."""

  @property
  def d_model(self) -> int:
    return self.num_heads * self.head_dim


def main() -> None:
  run(parse(sys.argv[1:]), Console(width=None if sys.stdout.isatty() else 180, highlight=False))


def run(config: Config, console: Console) -> None:
  started = time.perf_counter()
  costs = {
    (name, length): cost(stack(config, name), length)
    for name in config.models
    for length in config.lengths
  }
  write(config, costs)
  lines = [json.loads(line) for line in (config.out / "results.jsonl").read_text().splitlines()]
  console.print(table(config, lines))
  draw(lines, "carried_bytes", "bytes carried from token to token", config.out / "memory.png")
  draw(lines, "decode_operations", "operations of the next token", config.out / "operations.png")
  for held, text in facts(config, lines):
    console.print(f"{'as expected' if held else 'NOT AS EXPECTED'}: {text}")
  console.print(f"{config.out}: results.jsonl, memory.png, operations.png")
  console.print(f"{time.perf_counter() - started:.1f} seconds in all")


def parse(arguments: list[str]) -> Config:
  """The configuration of a command line. One line for a bad flag."""
  messages = io.StringIO()
  try:
    with contextlib.redirect_stderr(messages):
      config = tyro.cli(
        Config, args=arguments, prog="cost.py", config=(tyro.conf.FlagCreatePairsOff,)
      )
  except SystemExit as end:
    if not end.code:  # --help
      raise
    box = [text.strip("│| ") for text in messages.getvalue().splitlines()[1:]]
    rule = lambda text: not text.strip("─╰╯-+")
    said = itertools.takewhile(lambda text: not rule(text), itertools.dropwhile(rule, box))
    fail(" ".join(said))  # what follows a second rule repeats the help
  unknown = [name for name in config.models if name not in STACKS]
  if unknown:
    fail(f"--models: unknown {', '.join(unknown)}; known: {', '.join(STACKS)}")
  for name in ("models", "lengths"):
    if not getattr(config, name):
      fail(f"--{name} needs at least one value")
  for name in ("layers", "num_heads", "head_dim", "lengths"):
    value = getattr(config, name)
    if (min(value) if isinstance(value, tuple) else value) < 1:
      fail(f"--{name.replace('_', '-')} must be at least 1; got {value}")
  return dataclasses.replace(config, lengths=tuple(sorted(set(config.lengths))))


def fail(message: str) -> NoReturn:
  print(f"cost.py: error: {message}", file=sys.stderr)
  raise SystemExit(2)


def stack(config: Config, name: str) -> list[nnx.Module]:
  """The layers of a model, without their parameters' values; alike ones are one object, so that they are counted once."""
  dtype = jnp.dtype(config.dtype)
  make = lambda kind: nnx.eval_shape(
    lambda: kind(config)(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
  )
  made = {kind: make(kind) for kind in STACKS[name]}
  return [made[kind] for kind in itertools.islice(itertools.cycle(STACKS[name]), config.layers)]


def write(config: Config, costs: dict[tuple[str, int], Cost]) -> None:
  """One line for each model and length, in a new file."""
  path = config.out / "results.jsonl"
  path.unlink(missing_ok=True)
  settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
  for (model, length), found in costs.items():
    line = dict(task="cost", model=model, length=length, parameters=found.parameters)
    for part in ("state", "conv", "cache", "carried"):
      size = getattr(found, part)
      line |= {f"{part}_numbers": size.numbers, f"{part}_bytes": size.bytes}
    line |= dict(decode_operations=found.decode, prefill_operations=found.prefill)
    append(path, line | dict(config=settings, versions=versions()))


# --- tables and figures, from the lines alone ------------------------------------------------------------------------


def table(config: Config, lines: list[dict]) -> Table:
  shown = sorted({config.lengths[min(1, len(config.lengths) - 1)], config.lengths[-1]})
  title = f"{config.layers} layers, {config.num_heads} heads of {config.head_dim}, {config.dtype}"
  result = Table(title=f"{title} (operations: multiplications and additions, a token)")
  columns = ["model", "parameters", "state numbers", "state", "conv"]
  for length in shown:
    columns += [
      f"cache at {tokens(length)}",
      f"decode at {tokens(length)}",
      f"prefill of {tokens(length)}",
    ]
  for column in columns:
    result.add_column(column, justify="left" if column == "model" else "right")
  for model in config.models:
    of = {line["length"]: line for line in lines if line["model"] == model}
    first = of[shown[0]]
    cells = [
      f"{first['parameters'] / 1e6:,.1f} M",
      f"{first['state_numbers']:,}",
      size(first["state_bytes"]),
    ]
    cells.append(size(first["conv_bytes"]))
    for length in shown:
      line = of[length]
      cells += [
        size(line["cache_bytes"]),
        *(f"{line[key] / 1e6:,.0f} M" for key in ("decode_operations", "prefill_operations")),
      ]
    result.add_row(model, *cells)
  return result


def size(count: int) -> str:
  """Bytes in decimal units."""
  for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if count >= scale:
      return (
        f"{count / scale:,.1f} {unit}" if count >= 10 * scale else f"{count / scale:,.2f} {unit}"
      )
  return f"{count} B"


def tokens(length: int) -> str:
  for unit, scale in (("M", 10**6), ("k", 10**3)):
    if length >= scale and not length % scale:
      return f"{length // scale}{unit}"
  return f"{length:,}"


def draw(lines: list[dict], key: str, label: str, path: pathlib.Path) -> None:
  figure = Figure(figsize=(7, 4.5), layout="constrained")
  axis = figure.subplots()
  for model in dict.fromkeys(line["model"] for line in lines):
    points = [(line["length"], line[key]) for line in lines if line["model"] == model]
    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=model)
  axis.set(xlabel="tokens of context", ylabel=label, xscale="log", yscale="log")
  axis.grid(alpha=0.3, which="major")
  axis.legend(fontsize=8)
  figure.savefig(path, dpi=150)


def facts(config: Config, lines: list[dict]) -> list[tuple[bool, str]]:
  """Whether the figures of the docstring came out, where these are the settings that they are for."""
  default = Config()
  same = all(
    getattr(config, name) == getattr(default, name)
    for name in ("layers", "num_heads", "head_dim", "dtype")
  )
  found = {line["model"]: line for line in lines if line["length"] == 4096} if same else {}
  results = []
  if "sophia" in found:
    numbers = found["sophia"]["state_numbers"]
    held = numbers == 336 * 96 * 96 and {numbers} == {
      line["state_numbers"] for line in lines if line["model"] == "sophia"
    }
    results.append(
      (
        held,
        f"sophia: {numbers:,} numbers of state = 336 x 96 x 96, {2 * numbers / 1e6:.2f} MB in bfloat16",
      )
    )
  if "softmax" in found:
    cache = found["softmax"]["cache_bytes"]
    results.append(
      (
        cache == 672 * 2**20,
        f"softmax: {cache / 1e6:.1f} MB = {cache / 2**20:.0f} MiB of cache at 4,096 tokens",
      )
    )
    if "kda_softmax" in found:
      part = found["kda_softmax"]["cache_bytes"]
      results.append((4 * part == cache, f"kda_softmax: {part / 1e6:.1f} MB of cache, a quarter"))
  return results


if __name__ == "__main__":
  main()
