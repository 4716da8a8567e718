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
feel the position.

--scaling has a process of its own on a CPU, in which memory that is freed stays (`allocator.py`). As glibc is by default,
the system takes large arrays back after each call and zeroes their pages when they are needed again: a fifth of the time
of the cheapest ops at 32k tokens, whose slope is then up to 1.10. `--keep-memory never` shows that, `always` keeps memory
in the main part too: what takes much of it gains most, the naive scans a third. For a program of your own that computes
on a CPU with such arrays:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_ARENA_MAX=1 python ...

All programs are compiled first, one after the other, then run in rounds, each once a round, so that a change of the
machine's load meets all of them alike. Figures are medians over the rounds; the ratio is the median over the rounds
of (the reference's time / the row's) in the same round, the reference being the naive token scan of the same op and
number of tokens (for attention, the quadratic softmax). Associative scans keep a map for every token and compile
slowly: they are timed for two ops, where needed at fewer tokens with a reference of as many; `--associative all`
times them for every op.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
import time

import no_gpu  # isort: skip  # noqa: F401  # before jax
import jax
from allocator import keep_freed_memory
from recall_results import append, versions
from rich.console import Console
from speed_baselines import installed
from speed_config import FORMS, Config, as_json, choose_device, describe_device, parse, platform
from speed_report import decode_table, forms_table, notes, scaling_table
from speed_timing import decode, measure, plan, scaling


def main() -> None:
  config = parse(sys.argv[1:])
  kept = config.keep_memory == "always" and keep_freed_memory()
  choose_device(config)
  run(config, new_console(), kept)


def new_console() -> Console:
  return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def run(config: Config, console: Console, kept: bool = False) -> None:
  started = time.perf_counter()
  config = dataclasses.replace(
    config, forms=config.forms or FORMS[: 5 if platform() == "gpu" else 4]
  )
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
    apart = platform() == "cpu" and config.keep_memory == "scaling"
    scaled, scaling_kept = scaling_apart(config) if apart else (scaling(config, console), kept)
    console.print(scaling_table(config, scaled, scaling_kept))
    lines += [line | {"memory_kept": scaling_kept} for line in scaled]
  console.print(
    f"Wall time of one process on a shared machine: {describe_device()}, jax {jax.__version__}."
  )
  if config.out:
    for line in lines:
      made = {"config": as_json(config), "versions": versions() | {"device": describe_device()}}
      append(config.out, {"memory_kept": kept} | line | made)
    console.print(f"{len(lines)} lines added to {config.out}")
  console.print(
    f"{time.perf_counter() - started:.0f} seconds in all, {sum(os.times()[:4]):.0f} of CPU time"
  )


def scaling_apart(config: Config) -> tuple[list[dict], bool]:
  """`scaling` in a process of its own, which keeps freed memory where it can, and whether it did."""
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
    kept = process.submit(keep_freed_memory).result()  # before the first computation there
    return process.submit(_scaling, config).result(), kept


def _scaling(config: Config) -> list[dict]:
  choose_device(config)
  return scaling(config, new_console())


if __name__ == "__main__":
  main()
