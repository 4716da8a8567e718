"""On a machine with a GPU: the tests marked `gpu`, then the times of the kernels; what is printed goes to docs/gpu.md.

    python experiments/on_gpu.py

Times `impl="pallas"` against `chunked`, XLA's own attention and, where they are importable, jax-linear-attention and the
Triton kernels of flash-linear-attention, at the shapes that their owners publish figures for. About ten minutes.
"""

import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
OPS = (
  "linear_attention",
  "simple_gla",
  "gla",
  "delta_rule",
  "gated_delta_rule",
  "kda",
  "rwkv7",
  "attention",
)
SHAPES = (  # batch, tokens, heads, K = V
  (1, 4096, 8, 128),
  (4, 4096, 16, 64),
  (1, 65536, 8, 128),
)


def commands(short: bool) -> dict[str, list[str]]:
  """What is run, by its headline."""
  found = {
    "Tests": [
      sys.executable,
      "-m",
      "pytest",
      "-q",
      "-n",
      "0",
      "-m",
      "gpu",
      "-p",
      "no:cacheprovider",
    ]
  }
  for batch, length, heads, width in SHAPES[:1] if short else SHAPES:
    ops = OPS if length <= 4096 else OPS[:-1]
    found[f"B {batch}, T {length}, {heads} heads, K = V = {width}, bfloat16"] = [
      sys.executable,
      "experiments/speed.py",
      "--device",
      "gpu",
      "--dtype",
      "bfloat16",
      "--forms",
      "chunked",
      "pallas",
      "--batch",
      str(batch),
      "--length",
      str(length),
      "--heads",
      str(heads),
      "--width",
      str(width),
      "--ops",
      *ops,
      "--associative",
      "linear_recurrence",
      *(["--no-baselines"] if length > 4096 else []),
    ]
  return found


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--short", action="store_true", help="one shape only")
  parser.add_argument(
    "--out", type=pathlib.Path, default=ROOT / "docs" / "gpu.md", help="the file that is written"
  )
  args = parser.parse_args()
  import jax

  if jax.default_backend() != "gpu":
    print(
      'on_gpu.py: error: JAX sees no GPU; pip install -e ".[cuda12]" or ".[cuda13]" on a machine that has one.',
      file=sys.stderr,
    )
    return 2
  parts = [
    f"# Measured on {jax.devices()[0].device_kind}",
    f"jax {jax.__version__}. Made by `python experiments/on_gpu.py`.",
  ]
  failed = 0
  for headline, command in commands(args.short).items():
    print(f"--- {headline}", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + (done.stderr if done.returncode else "")
    print(said, flush=True)
    failed += done.returncode != 0
    parts += [f"## {headline}", f"```\n{said.rstrip()}\n```"]
    args.out.write_text("\n\n".join(parts) + "\n")  # after each part: a machine may be taken back
  return 1 if failed else 0


if __name__ == "__main__":
  raise SystemExit(main())
