"""Compiles the kernels for GPUs that need not be here: registers, spills, shared memory,
instructions.

Another process compiles. It sees no GPU, and has the flags that it needs from its start. Needs JAX
0.10, since later versions do not write out the PTX of Triton's kernels, and `pip install -e
".[test]"`, which brings NVIDIA's compiler. Needs no GPU and no driver.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from lajax.pallas.programs import KERNELS, Case, Shape, kernels, programs

LOG = "stderr.log"
OWN = ("input_reduce_fusion", "gemm_fusion")  # kernels of XLA's own that go through Triton too


class GPU(NamedTuple):
  """Data-sheet numbers of one GPU of an architecture.

  Rates are those of dense products with float32 sums.
  """

  name: str
  capability: tuple[int, int]
  cores: int
  shared_per_block: int
  shared_per_core: int
  threads_per_core: int
  bandwidth: float  # bytes per second
  cache: int
  clock: float  # GHz
  memory: int
  bfloat16: float  # operations per second
  tf32: float


GB = 1 << 30
ARCHITECTURES = {
  "sm_80": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 167936, 2048,
    2039e9, 41943040, 1.41, 80 * GB, 312e12, 156e12),
  "sm_86": GPU("NVIDIA GeForce RTX 3090", (8, 6), 82, 101376, 102400, 1536,
    936e9, 6291456, 1.695, 24 * GB, 71e12, 35.6e12),
  "sm_89": GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 102400, 1536,
    1008e9, 75497472, 2.52, 24 * GB, 165e12, 82.6e12),
  "sm_90a": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 233472, 2048,
    3352e9, 52428800, 1.98, 80 * GB, 989e12, 495e12),
  "sm_100a": GPU("NVIDIA B200", (10, 0), 148, 232448, 233472, 2048,
    8000e9, 132644864, 1.965, 180 * GB, 2250e12, 1125e12),
}  # fmt: skip
REGISTERS = 65536  # per core (SM)
RESERVED = 1024  # bytes of shared memory that the system takes from each block


class Facts(NamedTuple):
  """Facts of one compiled kernel."""

  family: str
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
  tf32: int  # those of all these that multiply tf32

  @property
  def blocks(self) -> int:
    """Number of blocks of this kernel that one core (SM) holds at once."""
    gpu, threads = ARCHITECTURES[self.architecture], 32 * self.warps
    by_registers = REGISTERS // (-(-self.registers // 8) * 8 * threads)
    return min(
      by_registers,
      gpu.shared_per_core // (self.shared + RESERVED),
      gpu.threads_per_core // threads,
      32,
    )


def compiler() -> pathlib.Path | None:
  """Returns the folder of NVIDIA's compiler, or None where the extra that brings it is not
  installed.
  """
  try:
    import nvidia
  except ImportError:
    return None
  folders = [pathlib.Path(root) / "cuda_nvcc" for root in nvidia.__path__]
  return next((folder for folder in folders if (folder / "bin" / "ptxas").exists()), None)


def facts(architectures: Iterable[str], cases: Iterable[Case]) -> list[Facts]:
  """Compiles the kernels of these cases, forward, backward and decode, for these architectures."""
  wanted = {"architectures": list(architectures), "cases": [list(case) for case in cases]}
  rows = [Facts(*row) for row in _elsewhere("kernels", wanted)]
  return sorted(
    rows, key=lambda row: (list(KERNELS).index(row.family), KERNELS[row.family].index(row.kernel))
  )


def step_memory(
  architecture: str, layers: Sequence[str], impls: Sequence[str], lengths: Sequence[int]
) -> list[dict]:
  """Returns XLA's temporary memory in bytes of a layer's forward and backward pass.

  d_model is 2048, the dtype bfloat16, the input one row of T tokens.
  """
  wanted = {
    "architecture": architecture,
    "layers": list(layers),
    "impls": list(impls),
    "lengths": list(lengths),
  }
  return _elsewhere("steps", wanted)


def _elsewhere(job: str, wanted: dict[str, Any]) -> list:
  toolkit = compiler()
  if toolkit is None:
    raise RuntimeError('no CUDA compiler is installed; pip install -e ".[test]" brings one.')
  with tempfile.TemporaryDirectory() as folder:
    path = os.pathsep.join(
      filter(None, [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    dump = f" --xla_dump_to={folder}" if job == "kernels" else ""
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={toolkit} --xla_gpu_autotune_level=0{dump}",
      "TF_CPP_MIN_LOG_LEVEL": "0",
      # This log is the only place that tells the shared memory of each kernel.
      "TF_CPP_VMODULE": "xtile_compiler=2",
      "PYTHONPATH": path,
    }
    log = pathlib.Path(folder) / LOG
    with log.open("w") as stderr:
      done = subprocess.run(
        [
          sys.executable,
          "-m",
          "lajax.pallas.compiled",
          job,
          json.dumps(wanted | {"folder": folder, "toolkit": str(toolkit)}),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
      )
    if done.returncode:
      raise RuntimeError(f"the compilation failed:\n{log.read_text()[-4000:]}")
  return json.loads(done.stdout.splitlines()[-1])


# --- in the process that compiles -----------------------------------------------------------------


def _compile_kernels(wanted: dict[str, Any]) -> list[Facts]:
  folder, toolkit = pathlib.Path(wanted["folder"]), pathlib.Path(wanted["toolkit"])
  found = []
  for architecture in wanted["architectures"]:
    array = _arrays_on(architecture)
    for case in map(Case._make, wanted["cases"]):
      made = programs(case.family, case.gate, Shape(D=case.D), case.dtype, array)
      left = set(kernels(case))
      for name in [name for name in made if name != "forward"]:  # `train` contains it
        program = made[name]
        logged = (folder / LOG).stat().st_size
        jax.jit(program.call, donate_argnums=program.donated).lower(*program.args).compile()
        rows = _read(folder, (folder / LOG).read_text()[logged:], toolkit, KERNELS[case.family])
        for kernel, *rest in rows:
          if kernel in left:  # a kernel that is launched several times counts once
            left.remove(kernel)
            own = case.family, kernel, case.gate, case.D, case.dtype, architecture
            found.append(Facts(*own, *rest))
        for path in folder.iterdir():
          if path.name != LOG:
            path.unlink()
  return found


def _compile_steps(wanted: dict[str, Any]) -> list[dict]:
  from flax import nnx

  import lajax.layers as L

  array, D = _arrays_on(wanted["architecture"]), 2048
  rows = []
  for name in wanted["layers"]:
    for impl in wanted["impls"]:
      make = lambda name=name, impl=impl: getattr(L, name)(
        D, impl=impl, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
      )
      graph, shapes = nnx.split(nnx.eval_shape(make))
      params = jax.tree.map(lambda x: array(x.shape, x.dtype), shapes)

      def loss(params, x, graph=graph):
        return nnx.merge(graph, params)(x)[0].astype(jnp.float32).mean()

      for T in wanted["lengths"]:
        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        memory = step.lower(params, array((1, T, D), jnp.bfloat16)).compile().memory_analysis()
        if memory is None:
          raise RuntimeError(
            f"XLA gave no memory plan of {name} with impl={impl!r} at T = {T}; the report needs "
            "JAX 0.10."
          )
        rows.append({"layer": name, "impl": impl, "T": T, "temp": memory.temp_size_in_bytes})
  return rows


def _arrays_on(architecture: str):
  jax.devices()
  target = _described(ARCHITECTURES[architecture])
  topology = topologies.get_topology_desc(
    platform="cuda", topology_name="", target_config=target, topology="1x1x1"
  )
  sharding = SingleDeviceSharding(topology.devices[0])
  return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _described(gpu: GPU) -> str:
  major, minor = gpu.capability
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024  threads_per_warp: 32
      shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.shared_per_block}
      shared_memory_per_core: {gpu.shared_per_core}
      threads_per_core_limit: {gpu.threads_per_core}  core_count: {gpu.cores}  fpus_per_core: 128
      block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
      memory_bandwidth: {gpu.bandwidth:.0f}  l2_cache_size: {gpu.cache}  clock_rate_ghz: {gpu.clock}
      device_memory_size: {gpu.memory}
      registers_per_core_limit: 65536  registers_per_block_limit: 65536
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
    runtime_version {{ major: 12 minor: 8 patch: 0 }}
    device_description_str: "{gpu.name}"
  """


def _read(
  folder: pathlib.Path, log: str, toolkit: pathlib.Path, kernels: Sequence[str]
) -> Iterator[tuple]:
  """Yields (kernel, warps, registers, ..) of each of our kernels, from XLA's dump of a program, its
  log, and ptxas.
  """
  number = lambda pattern, text: int(m[1]) if (m := re.search(pattern, text)) else 0
  modules = sorted(
    folder.glob("*.ir-no-opt.ll"), key=lambda path: number(r"\.(\d+)\.ir-no-opt", path.name)
  )
  defined = [re.findall(r"define .*?@(\w+)\(", path.read_text()) for path in modules]
  by_triton = [
    name for names in defined for name in names if _kernel(name, kernels) or name.startswith(OWN)
  ]
  shared = dict(
    zip(by_triton, map(int, re.findall(r"Shared memory usage: (\d+) B", log)), strict=True)
  )
  for path in sorted(folder.glob("*.ptx")):
    text = path.read_text()
    target = re.search(r"\.target (\w+)", text)
    if target is None:  # a program that only copies
      continue
    command = [toolkit / "bin" / "ptxas", "-v", "-arch", target[1], path, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL))
    reports = re.findall(
      r"Compiling entry function '(\w+)' for(.*?)(?=Compiling entry function|\Z)", said, re.DOTALL
    )
    for name, report in reports:
      if not _kernel(name, kernels):
        continue
      tensor = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", bodies[name])
      yield (
        _kernel(name, kernels),
        number(r"\.(?:req|max)ntid\s+(\d+)", bodies[name]) // 32,
        number(r"Used (\d+) registers", report),
        number(r"(\d+) bytes spill stores", report) + number(r"(\d+) bytes spill loads", report),
        number(r"(\d+) bytes stack frame", report),
        shared[name],
        *(sum(x.startswith(kind) for x in tensor) for kind in ("mma.sync", "wgmma", "tcgen05")),
        sum("tf32" in x for x in tensor),
      )


def _kernel(name: str, kernels: Sequence[str]) -> str | None:
  """Returns the name of the kernel that a function of a program is; None for one of XLA's own."""
  return next(
    (kernel for kernel in sorted(kernels, key=len, reverse=True) if name.startswith(kernel)), None
  )


if __name__ == "__main__":
  job, wanted = sys.argv[1], json.loads(sys.argv[2])
  print(json.dumps({"kernels": _compile_kernels, "steps": _compile_steps}[job](wanted)))
