"""What the kernels are, without a GPU: `python -m lajax.pallas.report` writes docs/kernels.md and docs/kernels.json.

Three tables. What the compiler makes of every kernel, on five architectures (`lajax.pallas.compiled`). What the kernels
move and compute, and the time that this takes by a GPU's data sheet (`lajax.pallas.model`). The temporary memory of whole
training steps of two layers on an H100. All are facts of compilation, or a model; none is a measurement. Compiles again the families
whose kernels have changed: all of them take about an hour on two cores. Needs JAX 0.10 and `pip install -e ".[test]"`.
"""

import argparse
import ast
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from lajax.pallas import compiled, model, programs
from lajax.pallas.compiled import ARCHITECTURES, Facts
from lajax.pallas.programs import KERNELS, Case, Shape

FOLDER = pathlib.Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
MODULES = {family: family for family in KERNELS} | {"gated_rms_norm": "norm"}
STEPS = {"layers": ("GatedDeltaNet", "KimiDeltaAttention"), "impls": ("chunked", "pallas")}
LENGTHS = (4096, 16384, 65536, 262144, 1048576)


def fingerprint(family: str) -> str:
  """A digest of the source of a family's kernels, without comments, docstrings and layout: its report belongs to them."""
  digest = hashlib.sha256()
  for path in sorted(_sources(FOLDER / f"{MODULES[family]}.py")):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
      if (
        isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and ast.get_docstring(node, clean=False) is not None
      ):
        node.body = node.body[1:]
    digest.update(_dump(tree).encode())
  return digest.hexdigest()


def _dump(node) -> str:
  """As `ast.dump`, whose text differs between versions of Python: only fields that hold something, and none of types."""
  if isinstance(node, list):
    return f"[{','.join(map(_dump, node))}]"
  if not isinstance(node, ast.AST):
    return repr(node)
  held = (
    (name, value) for name, value in ast.iter_fields(node) if value is not None and value != []
  )
  return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in held)})"


def _sources(path: pathlib.Path) -> set[pathlib.Path]:
  """This file of the package's kernels, and those that it imports."""
  found, left = set(), {path}
  while left:
    path = left.pop()
    found.add(path)
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("lajax.pallas"):
        continue
      module = (node.module or "").removeprefix("lajax.pallas").removeprefix(".")
      names = [module] if module else [alias.name for alias in node.names]
      left |= {FOLDER / f"{name}.py" for name in names} - found
  return found


# --- the model -------------------------------------------------------------------------------------------------------


class Modelled(NamedTuple):
  """One pass of a family at one shape: what its launches move over the least possible, and the time by data sheets."""

  family: str
  gate: str
  B: int
  T: int
  H: int
  D: int
  dtype: str
  direction: str
  launches: int
  moved: float  # over the least possible, each array of a launch once
  operations: int
  milliseconds: dict[str, float]  # by architecture


def modelled(case: Case, shape: Shape) -> list[Modelled]:
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
  """A time that others have measured with their own kernels, in bfloat16: forward, and forward + backward, in ms."""

  architecture: str
  family: str
  gate: str
  shape: Shape
  forward: float
  both: float
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


# --- the tables ------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def compiled_table(rows: Sequence[Facts]) -> str:
  names = list(dict.fromkeys(row.architecture for row in rows))
  cells: dict[tuple, dict[str, str]] = {}
  for row in rows:
    tensor = row.mma + row.wgmma + row.tcgen05
    cell = f"{row.warps}w {row.registers}r {row.spills + row.stack}s {row.shared / 1024:.0f}K {tensor}t {row.blocks}b"
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

Made by `python -m lajax.pallas.report` (JAX 0.10). These are facts of compilation and a model, **not measurements**.

## Compiled

B = 4, T = 4096, 8 heads, K = V = D. In a cell: warps, registers a thread, bytes spilled and of stack, shared memory in
KiB, tensor-core instructions, and blocks that one core (SM) holds at once.

{compiled_table([Facts(**row) for row in found["kernels"]])}

## Bytes, operations, and the time of a roofline

B = 4, T = 4096, 8 heads, K = V = D. Least: inputs and outputs of the pass once. Moved: each array of each launch once, as
if what programs share stayed in the cache; a forward pass that will be differentiated also keeps the states of its chunks. ms: of each launch the longer of its bytes by the GPU's bandwidth and its operations by its tensor cores' rate, both from its data sheet. (Not of attention:
how long its loops are depends on what is masked.)

{model_table([Modelled(**row) for row in found["model"]])}

The model beside what others measured with kernels of their own (bfloat16). No kernel reaches its roofline; the distance says
how much room a measurement may take.

{found["figures"]}

## Whole training steps

XLA's temporary memory in MiB, forward and backward of one layer with d_model 2048 in bfloat16, one row of T tokens, compiled
for one H100.

{steps_table(found["steps"])}
"""


def as_json(found: dict) -> str:
  """One line a row."""
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
    nargs="+",
    choices=KERNELS,
    help="compile these; default: those whose kernels changed",
  )
  parser.add_argument("--steps", action="store_true", help="compile the training steps again, too")
  args = parser.parse_args()
  path = args.docs / "kernels.json"
  found = json.loads(path.read_text()) if path.exists() else {}
  digests = found.get("fingerprints", {})
  changed = args.families or [
    family for family in KERNELS if digests.get(family) != fingerprint(family)
  ]
  cases = list(programs.cases())
  for family in changed:
    print(f"compiling {family} ..", flush=True)
    rows = compiled.facts(ARCHITECTURES, [case for case in cases if case.family == family])
    kept = [row for row in found.get("kernels", []) if row["family"] != family]
    every = [*kept, *(row._asdict() for row in rows)]
    found["kernels"] = sorted(every, key=lambda row: list(KERNELS).index(row["family"]))
    found["fingerprints"] = found.get("fingerprints", {}) | {family: fingerprint(family)}
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
