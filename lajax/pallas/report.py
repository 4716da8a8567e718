"""What the compiler makes of every kernel, for GPUs that need not be here: `python -m lajax.pallas.report`.

Compiles forward and backward of `linear_attention` for each architecture, head width, dtype and kind of gate, and one
token of its decoding; prints a table of registers, spills, stack, shared memory and tensor-core instructions, and
writes it into docs/kernels.md and docs/kernels.json. These are facts of compilation, not measurements. About ten
minutes on two cores.

Needs JAX 0.10 (later ones keep the PTX of Triton's kernels to themselves) and `pip install -e ".[test]"`, which
brings NVIDIA's compiler; no GPU and no driver.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

LOG = "stderr.log"
KERNELS = ("carry_states", "read_outputs", "carry_cotangents", "read_dv", "pairs_dq_dk_dg", "decode")
DOCS = pathlib.Path(__file__).parents[2] / "docs"


class GPU(NamedTuple):
  """Public data-sheet numbers of one GPU of an architecture."""

  name: str
  capability: tuple[int, int]
  cores: int
  shared_per_block: int
  shared_per_core: int
  threads_per_core: int
  bandwidth: int  # bytes a second
  cache: int
  clock: float  # GHz
  memory: int


ARCHITECTURES = {
  "sm_80": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 2048, 2039 * 10**9, 41943040, 1.41, 80 << 30),
  "sm_86": GPU("NVIDIA GeForce RTX 3090", (8, 6), 82, 101376, 102400, 1536, 936 * 10**9, 6291456, 1.695, 24 << 30),
  "sm_89": GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 102400, 1536, 1008 * 10**9, 75497472, 2.52, 24 << 30),
  "sm_90a": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 233472, 2048, 3352 * 10**9, 52428800, 1.98, 80 << 30),
  "sm_100a": GPU("NVIDIA B200", (10, 0), 148, 232448, 233472, 2048, 8000 * 10**9, 132644864, 1.965, 180 << 30),
}
WIDTHS, DTYPES, GATES = (64, 128, 256), ("bfloat16", "float32"), ("none", "head", "channel")


class Facts(NamedTuple):
  """What became of one kernel."""

  kernel: str
  gate: str
  D: int  # K and V
  dtype: str
  architecture: str
  warps: int
  registers: int
  spills: int  # bytes, stores and loads
  stack: int  # bytes
  shared: int  # bytes
  mma: int  # warp-level tensor-core instructions
  wgmma: int  # those of a warp group, on Hopper
  tcgen05: int  # those of Blackwell
  tf32: int  # of all of them, those on tf32


def compiler() -> pathlib.Path | None:
  """The folder of NVIDIA's compiler, if the extra that brings it is installed."""
  try:
    import nvidia
  except ImportError:
    return None
  folders = [pathlib.Path(root) / "cuda_nvcc" for root in nvidia.__path__]
  return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)


def facts(
  architectures: Iterable[str] = tuple(ARCHITECTURES),
  widths: Iterable[int] = WIDTHS,
  dtypes: Iterable[str] = DTYPES,
  gates: Iterable[str] = GATES,
) -> list[Facts]:
  """Compiles in another process, which sees no GPU and has the flags that it needs from its start."""
  toolkit = compiler()
  if toolkit is None:
    raise RuntimeError('no CUDA compiler is installed; pip install -e ".[test]" brings one.')
  wanted = dict(
    architectures=list(architectures), widths=list(widths), dtypes=list(dtypes), gates=list(gates), toolkit=str(toolkit)
  )
  with tempfile.TemporaryDirectory() as folder:
    path = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={toolkit} --xla_gpu_autotune_level=0 --xla_dump_to={folder}",
      "TF_CPP_MIN_LOG_LEVEL": "0",
      "TF_CPP_VMODULE": "xtile_compiler=2",  # logs the shared memory of each kernel, which nothing else tells
      "PYTHONPATH": path,
    }
    log = pathlib.Path(folder) / LOG
    with log.open("w") as stderr:
      done = subprocess.run(
        [sys.executable, "-m", "lajax.pallas.report", "--compile", json.dumps(wanted | {"folder": folder})],
        env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False,
      )  # fmt: skip
    if done.returncode:
      raise RuntimeError(f"the compilation failed:\n{log.read_text()[-4000:]}")
  return [Facts(*row) for row in json.loads(done.stdout.splitlines()[-1])]


# --- in the process that compiles ------------------------------------------------------------------------------------


def _compile_all(wanted: dict[str, Any]) -> list[Facts]:
  folder, toolkit = pathlib.Path(wanted["folder"]), pathlib.Path(wanted["toolkit"])
  found = []
  for architecture in wanted["architectures"]:
    for D in wanted["widths"]:
      for dtype in wanted["dtypes"]:
        for gate in wanted["gates"]:
          for program in _programs(architecture, D, dtype, gate):
            logged = (folder / LOG).stat().st_size
            program.compile()
            found += [
              Facts(kernel, gate, D, dtype, architecture, *rest)
              for kernel, *rest in _read(folder, (folder / LOG).read_text()[logged:], toolkit)
            ]
            for path in folder.iterdir():
              if path.name != LOG:
                path.unlink()
  return sorted(found, key=lambda row: KERNELS.index(row.kernel))


def _programs(architecture: str, D: int, dtype: str, gate: str) -> Iterator[Any]:
  """The lowered programs: forward and backward, and one token of decoding."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  from lajax.pallas.linear_attention import decode, linear_attention

  jax.devices()
  target = _described(ARCHITECTURES[architecture])
  device = topologies.get_topology_desc(
    platform="cuda", topology_name="", target_config=target, topology="1x1x1"
  ).devices[0]
  B, T, H, f32 = 4, 4096, 8, jnp.float32
  array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
  gates = {"none": (), "head": (H,), "channel": (H, D)}[gate]
  q, state, g = array(dtype, B, T, H, D), array(f32, B, H, D, D), array(f32, B, T, *gates) if gates else None

  def train(q, k, v, g, state, do, dlast):
    out, pull = jax.vjp(linear_attention, q, k, v, g, state)
    return out, pull((do, dlast))

  yield jax.jit(train).lower(q, q, q, g, state, q, state)
  token, g = array(dtype, B, H, D), array(f32, B, *gates) if gates else None
  yield jax.jit(decode, donate_argnums=0).lower(state, token, token, token, g)


def _described(gpu: GPU) -> str:
  major, minor = gpu.capability
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024  threads_per_warp: 32
      shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.shared_per_block}
      shared_memory_per_core: {gpu.shared_per_core}
      threads_per_core_limit: {gpu.threads_per_core}  core_count: {gpu.cores}  fpus_per_core: 128
      block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
      memory_bandwidth: {gpu.bandwidth}  l2_cache_size: {gpu.cache}  clock_rate_ghz: {gpu.clock}
      device_memory_size: {gpu.memory}
      registers_per_core_limit: 65536  registers_per_block_limit: 65536
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
    runtime_version {{ major: 12 minor: 8 patch: 0 }}
    device_description_str: "{gpu.name}"
  """


def _read(folder: pathlib.Path, log: str, toolkit: pathlib.Path) -> Iterator[tuple]:
  """(kernel, warps, registers, ..) of each of our kernels: from XLA's dump of one program, its log, and ptxas."""
  number = lambda pattern, text: int(m[1]) if (m := re.search(pattern, text)) else 0
  modules = sorted(folder.glob("*.ir-no-opt.ll"), key=lambda path: number(r"\.(\d+)\.ir-no-opt", path.name))
  defined = [re.findall(r"define .*?@(\w+)\(", path.read_text()) for path in modules]
  compiled = [name for names in defined for name in names if _kernel(name)]
  shared = dict(zip(compiled, map(int, re.findall(r"Shared memory usage: (\d+) B", log)), strict=True))
  for path in sorted(folder.glob("*.ptx")):
    text = path.read_text()
    target = re.search(r"\.target (\w+)", text)
    if target is None:  # a program of copies alone
      continue
    command = [toolkit / "bin" / "ptxas", "-v", "-arch", target[1], path, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL))
    reports = re.findall(r"Compiling entry function '(\w+)' for(.*?)(?=Compiling entry function|\Z)", said, re.DOTALL)
    for name, report in reports:
      if not _kernel(name):
        continue
      tensor = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", bodies[name])
      yield (
        _kernel(name), number(r"\.(?:req|max)ntid\s+(\d+)", bodies[name]) // 32,
        number(r"Used (\d+) registers", report),
        number(r"(\d+) bytes spill stores", report) + number(r"(\d+) bytes spill loads", report),
        number(r"(\d+) bytes stack frame", report), shared[name],
        *(sum(x.startswith(kind) for x in tensor) for kind in ("mma.sync", "wgmma", "tcgen05")),
        sum("tf32" in x for x in tensor),
      )  # fmt: skip


def _kernel(name: str) -> str | None:
  """Which of our kernels a function of a program is; None for one of XLA's own."""
  return next((kernel for kernel in KERNELS if name.startswith(kernel)), None)


# --- the table -------------------------------------------------------------------------------------------------------


def markdown(rows: list[Facts]) -> str:
  header = ["kernel", "gate", "D", "dtype", *dict.fromkeys(row.architecture for row in rows)]
  cells: dict[tuple, dict[str, str]] = {}
  for row in rows:
    tensor = row.mma + row.wgmma + row.tcgen05
    cell = f"{row.warps}w {row.registers}r {row.spills + row.stack}s {row.shared / 1024:.0f}K {tensor}t"
    cells.setdefault((row.kernel, row.gate, row.D, row.dtype), {})[row.architecture] = cell
  lines = ["| " + " | ".join(map(str, header)) + " |", "|" + "---|" * len(header)]
  for key, by in cells.items():
    lines.append("| " + " | ".join([*map(str, key), *(by.get(name, "–") for name in header[4:])]) + " |")
  return f"""# What the kernels compile to

Made by `python -m lajax.pallas.report`: facts of compilation (JAX 0.10, B = 4, T = 4096, 8 heads, K = V = D), no
measurements. In a cell: warps, registers a thread, bytes spilled and of stack, shared memory in KiB, tensor-core
instructions.

{chr(10).join(lines)}
"""


def main() -> None:
  parser = argparse.ArgumentParser(description="What the compiler makes of every kernel, for GPUs elsewhere.")
  parser.add_argument("--compile", help=argparse.SUPPRESS)
  parser.add_argument("--docs", type=pathlib.Path, default=DOCS, help="where kernels.md and kernels.json go")
  args = parser.parse_args()
  if args.compile:
    print(json.dumps(_compile_all(json.loads(args.compile))))
    return
  rows = facts()
  text = markdown(rows)
  print(text)
  (args.docs / "kernels.md").write_text(text)
  (args.docs / "kernels.json").write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
  main()
