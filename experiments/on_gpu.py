"""Do the kernels work on this GPU, and how fast are they?

    python experiments/on_gpu.py

runs the tests marked `gpu`, then times the kernels, and writes the output to `docs/gpu.md`. It
times `impl="pallas"` against `chunked`, XLA's own attention and, where they are importable,
jax-linear-attention and the Triton kernels of flash-linear-attention, at the shapes that their
owners publish figures for. About ten minutes.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
from results import replace

PROG = "on_gpu.py"
ROOT = pathlib.Path(__file__).parents[1]
OPS = "linear_attention simple_gla gla delta_rule gated_delta_rule kda kda_bounded rwkv7 attention"
SHAPES = (  # batch, tokens, heads, K = V
  (1, 4096, 8, 128),
  (4, 4096, 16, 64),
  (1, 65536, 8, 128),
)


@dataclasses.dataclass(frozen=True)
class Config:
  """Tests the kernels on this GPU and times them."""

  short: bool = False
  """Time only the first shape."""
  out: pathlib.Path = ROOT / "docs" / "gpu.md"
  """File for the output."""


def commands(short: bool) -> dict[str, list[str]]:
  """Returns the commands by their headlines."""
  found = {"Tests": shlex.split("-m pytest -q -n 0 -m gpu -p no:cacheprovider")}
  for batch, length, heads, width in SHAPES[:1] if short else SHAPES:
    long = length > 4096  # quadratic attention and token scans take too long there
    ops = OPS.removesuffix(" attention") if long else OPS
    found[f"B {batch}, T {length}, {heads} heads, K = V = {width}, bfloat16"] = shlex.split(
      "experiments/speed.py --device gpu --dtype bfloat16 --forms chunked pallas --no-compile "
      f"--batch {batch} --length {length} --heads {heads} --width {width} "
      f"--ops {ops} --associative linear_recurrence {'--no-baselines' if long else ''}"
    )
  return {headline: [sys.executable, *command] for headline, command in found.items()}


def device() -> str:
  """Returns "kind of GPU, version of JAX"; empty without a GPU.

  Asks in a process of its own: JAX would reserve most of the GPU's memory in this one.
  """
  code = (
    "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, jax.__version__, sep='|')"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
  platform, *found = done.stdout.strip().split("|")
  return f"{found[0]}, jax {found[1]}" if platform == "gpu" else ""


def main() -> int:
  config = cli.parse(Config(), sys.argv[1:], PROG)
  found = device()
  if not found:
    cli.fail(
      PROG, 'JAX sees no GPU; pip install -e ".[cuda12]" or ".[cuda13]" on a machine that has one.'
    )
  parts = [f"# Measured on {found}", "Made by `python experiments/on_gpu.py`."]
  failed = 0
  try:
    for headline, command in commands(config.short).items():
      print(f"--- {headline}", flush=True)
      done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
      output = done.stdout + (done.stderr if done.returncode else "")
      print(output, flush=True)
      failed += done.returncode != 0
      parts += [f"## {headline}", f"```\n{output.rstrip()}\n```"]
      text = "\n\n".join(parts) + "\n"
      # After each part, since a rented machine may be taken back at any time.
      replace(config.out, lambda new, text=text: new.write_text(text, encoding="utf-8"))
  except KeyboardInterrupt as stop:
    stop.add_note(f"{config.out} has the parts that were finished; a new start begins again.")
    raise
  return 1 if failed else 0


if __name__ == "__main__":
  raise SystemExit(main())
