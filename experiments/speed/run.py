"""Runs the sections of `speed.py` one after the other, and prints them."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
import sys
import time

import cli
import jax
from results import append, as_json, describe_device, versions
from rich.console import Console
from speed.allocator import keep_freed_memory
from speed.baselines import installed
from speed.compiling import compile_times
from speed.config import IMPLS, PROG, Config, parse, platform, prepare
from speed.report import compile_table, decode_table, notes, ops_table, scaling_table
from speed.timing import decode, measure, plan, scaling


def main() -> None:
  config = parse(sys.argv[1:])
  kept = config.keep_memory == "always" and keep_freed_memory()
  try:
    prepare(config)
    cli.make_folder(config.out)
  except ValueError as error:
    cli.fail(PROG, str(error))
  try:
    run(config, cli.console(160), kept)
  except KeyboardInterrupt as stop:
    stop.add_note("Nothing was saved: a new start measures everything again.")
    raise


def run(config: Config, console: Console, kept: bool = False) -> None:
  """Measures and prints. `kept`: this process keeps the memory that it frees."""
  started = time.perf_counter()
  lines = [] if config.compile else time_ops(config, console, kept)
  if not config.no_compile:
    compiled = compile_times(console)
    console.print(compile_table(compiled))
    lines += compiled
  console.print(
    f"Wall time of one process on a shared machine: {describe_device()}, jax {jax.__version__}."
  )
  made = {"config": as_json(config), "versions": versions()}
  for line in lines:
    append(config.out / "results.jsonl", {"memory_kept": kept} | line | made)
  console.print(f"{config.out}: {len(lines)} lines added to results.jsonl")
  console.print(
    f"{time.perf_counter() - started:.0f} seconds in all, {sum(os.times()[:4]):.0f} of CPU time"
  )


def time_ops(config: Config, console: Console, kept: bool) -> list[dict]:
  """Times the ops and prints their tables: implementations and baselines, decoding, scaling."""
  impls = config.forms or IMPLS[: 5 if platform() == "gpu" else 4]
  config = dataclasses.replace(config, forms=impls)
  others, missing = ({}, "") if config.no_baselines else installed(platform())
  measured = measure(config, plan(config, others), console)
  console.print(ops_table(config, measured))
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
  return lines


def scaling_apart(config: Config) -> tuple[list[dict], bool]:
  """Runs `scaling` in a process that keeps freed memory. Returns the lines, and whether it did."""
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(
    1,
    mp_context=context,
    initializer=signal.signal,  # Ctrl-C ends that process at once, without a traceback of its own
    initargs=(signal.SIGINT, signal.SIG_DFL),
  ) as process:
    kept = process.submit(keep_freed_memory).result()  # before the first computation there
    return process.submit(_scaling, config).result(), kept


def _scaling(config: Config) -> list[dict]:
  prepare(config)
  return scaling(config, cli.console(160))
