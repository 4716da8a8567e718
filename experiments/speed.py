"""How fast is each operation, in each of its forms, beside the plainest code and other libraries?

    python experiments/speed.py

times every core op × form at batch 1, 4096 tokens, 4 heads of width 64, float32, and the baselines of
`speed_baselines.py` in the same run: the forward pass, and the loss sum(o o) + sum(state state) with the gradients of
all inputs. Then one token of decoding, far into a sequence. `--ops all` adds the other methods (RWKV-6 and 7, Gated
DeltaNet 2, delta products, Oja's rule, Comba, mLSTM), and as much time again; `--scaling` the time of the chunked
form over the number of tokens, and as much again. About 4 minutes on two idle CPU cores; the last line says how much
was waiting (more than half of the CPU time is compilation).

Expected on two CPU cores: of each core op with a matrix state `chunked` has the fastest forward+backward, at least 3
times as fast as a naive token scan; its time grows linearly (slope at most 1.05, attention apart); decoding does not
feel the position. The cheapest ops may show a slope up to 1.09: glibc gives arrays of 16 MiB and more back to the system
after each call, and taking them anew, page by page, is a tenth of the time at 32k tokens. To leave that out:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python experiments/speed.py --scaling

All programs are compiled first, one after the other, then run in rounds, each once a round, so that a change of the
machine's load meets all of them alike. Figures are medians over the rounds; the ratio is the median over the rounds
of (the reference's time / the row's) in the same round, the reference being the naive token scan of the same op and
number of tokens (for attention, the quadratic softmax). Associative scans keep a map for every token and compile
slowly: they are timed for two ops, where needed at fewer tokens with a reference of as many; `--associative all`
times them for every op.
"""

import dataclasses
import sys
import time

import no_gpu  # isort: skip  # noqa: F401  # before jax
import jax
from recall_results import append, versions
from rich.console import Console
from speed_baselines import installed
from speed_config import FORMS, Config, as_json, choose_device, describe_device, parse, platform
from speed_report import decode_table, forms_table, notes, scaling_table
from speed_timing import decode, measure, plan, scaling


def main() -> None:
  config = parse(sys.argv[1:])
  choose_device(config)
  run(config, Console(width=None if sys.stdout.isatty() else 160, highlight=False))


def run(config: Config, console: Console) -> None:
  started = time.perf_counter()
  config = dataclasses.replace(config, forms=config.forms or FORMS[: 5 if platform() == "gpu" else 4])
  others, missing = ({}, "") if config.no_baselines else installed(platform())
  rows = plan(config, others)
  measured = measure(config, rows, console)
  console.print(forms_table(config, measured))
  for note in [*notes(config, measured), *([missing] if missing else [])]:
    console.print(note)
  lines = [row.as_line() for row in measured]
  decoded = decode(config)
  if decoded:
    console.print(decode_table(config, decoded))
  lines += decoded
  if config.scaling:
    scaled = scaling(config, console)
    console.print(scaling_table(config, scaled))
    lines += scaled
  console.print(f"Wall time of one process on a shared machine: {describe_device()}, jax {jax.__version__}.")
  if config.out:
    for line in lines:
      append(config.out, line | {"config": as_json(config), "versions": versions() | {"device": describe_device()}})
    console.print(f"{len(lines)} lines added to {config.out}")
  console.print(f"{time.perf_counter() - started:.0f} seconds in all, {time.process_time():.0f} of CPU time")


if __name__ == "__main__":
  main()
