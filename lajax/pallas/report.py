"""Facts about the kernels without a GPU: `python -m lajax.pallas.report` writes docs/kernels.md and
docs/kernels.json.

Three tables: what the compiler makes of every kernel on five architectures
(`lajax.pallas.compiled`); what the kernels move and compute, and the time that takes by a GPU's
data sheet (`lajax.pallas.model`); the temporary memory of whole training steps of two layers on an
H100. All are facts of compilation, or a model; none is a measurement.

To compile all families takes about an hour on two cores. After a change of one family, name it:
`--families dplr`; after a change of one kind of gate, `--gates bounded` too. A bare `--families`
compiles none and writes the tables again. Needs JAX 0.10 and `pip install -e ".[test]"`.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from lajax.pallas import compiled, model, programs
from lajax.pallas.compiled import ARCHITECTURES, Facts
from lajax.pallas.programs import GATES, KERNELS, Case, Shape

DOCS = pathlib.Path(__file__).parents[2] / "docs"
STEPS = {"layers": ("GatedDeltaNet", "KimiDeltaAttention"), "impls": ("chunked", "pallas")}
LENGTHS = (4096, 16384, 65536, 262144, 1048576)


# --- the model ------------------------------------------------------------------------------------


class Modelled(NamedTuple):
  """Model of one pass of a family at one shape."""

  family: str
  gate: str
  B: int
  T: int
  H: int
  D: int
  dtype: str
  direction: str
  launches: int
  moved: float  # bytes that the launches move, each array of a launch once, over the least possible
  operations: int
  milliseconds: dict[str, float]  # by data sheets, per architecture


def modelled(case: Case, shape: Shape) -> list[Modelled]:
  """Returns the passes of a case: forward, forward with residuals where it differs, backward."""
  made = programs.programs(case.family, case.gate, shape, case.dtype)
  forward = model.launches(made["forward"].call, *made["forward"].args)
  both = model.launches(made["train"].call, *made["train"].args)
  (out, gradients) = jax.eval_shape(made["train"].call, *made["train"].args)
  inputs, cotangents = made["forward"].args, made["train"].args[len(made["forward"].args) :]
  least = model.array_bytes(inputs, out)
  passes = [
    ("forward", forward, least),
    ("forward, to be differentiated", both[: len(forward)], least),
  ]
  passes = passes[: 1 if passes[0][1] == passes[1][1] else 2]
  rows = []
  for direction, found, least in (
    *passes,
    ("backward", both[len(forward) :], model.array_bytes(inputs, cotangents, gradients)),
  ):
    times = {
      name: 1e3 * sum(model.seconds(launch, gpu, case.dtype) for launch in found)
      for name, gpu in ARCHITECTURES.items()
    }
    moved = sum(launch.moved for launch in found)
    B, T, H, D = shape
    rows.append(
      Modelled(
        case.family,
        case.gate,
        B,
        T,
        H,
        D,
        case.dtype,
        direction,
        len(found),
        moved / least,
        sum(launch.operations for launch in found),
        times,
      )
    )
  return rows


class Figure(NamedTuple):
  """Time that others have measured with their own kernels, in bfloat16."""

  architecture: str
  family: str
  gate: str
  shape: Shape
  forward: float  # milliseconds
  both: float  # of forward and backward, milliseconds
  of: str


FIGURES = (
  Figure(
    "sm_90a", "delta_rule", "head", Shape(1, 4096, 8, 128), 0.077, 0.253, "jax-linear-attention"
  ),
  Figure(
    "sm_90a", "delta_rule", "head", Shape(4, 4096, 16, 64), 0.146, 0.532, "jax-linear-attention"
  ),
  Figure("sm_90a", "delta_rule", "head", Shape(1, 65536, 8, 128), 0.416, 1.472, "FlashQLA"),
  Figure(
    "sm_90a",
    "linear_attention",
    "channel",
    Shape(4, 4096, 16, 64),
    0.259,
    1.066,
    "jax-linear-attention",
  ),
  Figure(
    "sm_90a", "delta_rule", "channel", Shape(1, 4096, 8, 128), 0.169, 0.569, "jax-linear-attention"
  ),
  Figure(
    "sm_90a",
    "linear_attention",
    "head",
    Shape(1, 4096, 8, 128),
    0.032,
    0.142,
    "jax-linear-attention",
  ),
)


# --- the tables -----------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def compiled_table(rows: Sequence[Facts]) -> str:
  names = list(dict.fromkeys(row.architecture for row in rows))
  cells: dict[tuple, dict[str, str]] = {}
  for row in rows:
    tensor = row.mma + row.wgmma + row.tcgen05
    cell = (
      f"{row.warps}w {row.registers}r {row.spills + row.stack}s {row.shared / 1024:.0f}K "
      f"{tensor}t {row.blocks}b"
    )
    cells.setdefault((row.family, row.kernel, row.gate, row.D, row.dtype), {})[row.architecture] = (
      cell
    )
  header = ["family", "kernel", "gate", "D", "dtype", *names]
  return table(
    header, ([*key, *(by.get(name, "–") for name in names)] for key, by in cells.items())
  )


def model_table(rows: Sequence[Modelled]) -> str:
  header = ["family", "gate", "D", "dtype", "pass", "launches", "moved / least", "Gop"]
  header += [f"{name} ms" for name in ARCHITECTURES]
  line = lambda row: [
    row.family, row.gate, row.D, row.dtype, row.direction, row.launches, f"{row.moved:.2f}",
    f"{row.operations / 1e9:.1f}", *(f"{row.milliseconds[name]:.3f}" for name in ARCHITECTURES),
  ]  # fmt: skip
  return table(header, map(line, rows))


def figures_table() -> str:
  header = [
    "GPU",
    "family",
    "gate",
    "B, T, heads, K = V",
    "forward: model / best known ms",
    "forward + backward",
    "best known is of",
  ]
  rows = []
  for figure in FIGURES:
    found = modelled(Case(figure.family, figure.gate, figure.shape.D, "bfloat16"), figure.shape)
    forward, *_ = times = [row.milliseconds[figure.architecture] for row in found]
    both = sum(times[-2:])
    gpu = ARCHITECTURES[figure.architecture].name
    rows.append(
      [
        gpu,
        figure.family,
        figure.gate,
        ", ".join(map(str, figure.shape)),
        f"{forward:.3f} / {figure.forward:.3f}",
        f"{both:.3f} / {figure.both:.3f}",
        figure.of,
      ]
    )
  return table(header, rows)


def steps_table(rows: Sequence[dict]) -> str:
  lengths = list(dict.fromkeys(row["T"] for row in rows))
  mib = {(row["layer"], row["impl"], row["T"]): f"{row['temp'] / 2**20:,.0f}" for row in rows}
  keys = dict.fromkeys((row["layer"], row["impl"]) for row in rows)
  return table(
    ["layer", "impl", *(f"T = {T:,}" for T in lengths)],
    ([*key, *(mib[*key, T] for T in lengths)] for key in keys),
  )


def markdown(found: dict) -> str:
  return f"""# What the kernels are, without a GPU

Made by `python -m lajax.pallas.report` (JAX 0.10). These are facts of compilation and a model,
**not measurements**.

## Compiled

B = 4, T = 4096, 8 heads, K = V = D. In a cell: warps (w), registers per thread (r), bytes spilled
and of stack (s), shared memory in KiB (K), tensor-core instructions (t), and blocks that one core
(SM) holds at once (b). The gate "bounded" is a decay per channel of which no log is below -5; the
kernels that are not listed with it are those of "channel".

{compiled_table([Facts(**row) for row in found["kernels"]])}

## Bytes, operations, and the time of a roofline

B = 4, T = 4096, 8 heads, K = V = D.

* Least: the bytes of the inputs and outputs of the pass, each once.
* Moved: the bytes of each array of each launch once, as if what programs share stayed in the cache.
  A forward pass that will be differentiated also stores the states of its chunks.
* ms: the sum over the launches of the longer of two times, that of the bytes at the GPU's bandwidth
  and that of the operations at the rate of its tensor cores. Both rates are from its data sheet.

Attention is left out: the length of its loops depends on what is masked.

{model_table([Modelled(**row) for row in found["model"]])}

The model beside what others measured with their own kernels (bfloat16). No kernel reaches its
roofline: the distance is the room that a measurement may take.

{found["figures"]}

## Whole training steps

XLA's temporary memory in MiB for the forward and backward pass of one layer with d_model 2048 in
bfloat16 and one row of T tokens, compiled for one H100.

{steps_table(found["steps"])}
"""


def as_json(found: dict) -> str:
  """Returns JSON with one line per row."""
  lines = lambda rows: "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
  parts = {
    name: lines(value) if isinstance(value, list) else json.dumps(value)
    for name, value in found.items()
  }
  return "{" + ",\n".join(f"{json.dumps(name)}: {part}" for name, part in parts.items()) + "}\n"


def main() -> None:
  parser = argparse.ArgumentParser(
    description="What the kernels are, without a GPU: compiled, modelled."
  )
  parser.add_argument(
    "--docs", type=pathlib.Path, default=DOCS, help="where kernels.md and kernels.json go"
  )
  parser.add_argument(
    "--families",
    nargs="*",
    choices=KERNELS,
    help="compile these; none without a name; default: all",
  )
  parser.add_argument(
    "--gates", nargs="+", default=GATES, choices=GATES, help="compile these alone; default: all"
  )
  parser.add_argument("--steps", action="store_true", help="compile the training steps again, too")
  args = parser.parse_args()
  path = args.docs / "kernels.json"
  found = json.loads(path.read_text()) if path.exists() else {}
  cases = list(programs.cases())
  for family in KERNELS if args.families is None else args.families:
    print(f"compiling {family} ..", flush=True)
    anew = [case for case in cases if case.family == family and case.gate in args.gates]
    rows, replaced = compiled.facts(ARCHITECTURES, anew), {case.gate for case in anew}
    others = [
      row
      for row in found.get("kernels", [])
      if row["family"] != family or row["gate"] not in replaced
    ]
    every = [*others, *(row._asdict() for row in rows)]
    place = lambda row: (
      list(KERNELS).index(row["family"]),
      KERNELS[row["family"]].index(row["kernel"]),
    )
    found["kernels"] = sorted(every, key=place)
    path.write_text(as_json(found))
  modelled_cases = [case for case in cases if case.family != "attention"]
  found["model"] = [
    row._asdict() for case in modelled_cases for row in modelled(case, Shape(D=case.D))
  ]
  found["figures"] = figures_table()
  if args.steps or "steps" not in found:
    print("compiling training steps ..", flush=True)
    found["steps"] = compiled.step_memory("sm_90a", STEPS["layers"], STEPS["impls"], LENGTHS)
  path.write_text(as_json(found))
  (args.docs / "kernels.md").write_text(markdown(found))
  print(f"{args.docs / 'kernels.md'}, {path.name}")


if __name__ == "__main__":
  main()
