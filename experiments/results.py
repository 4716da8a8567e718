"""Files of results: one JSON object per run, with its whole configuration; figures."""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("lajax", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
  """Versions of Python and of the packages, the device, and the command of this process."""
  found = {"python": platform.python_version(), "device": describe_device(), "command": command()}
  for package in PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def command() -> str:
  """Returns the command line of this process, with the script's path from the repository's root."""
  arguments = sys.orig_argv[1:]
  if arguments and pathlib.Path(arguments[0]).is_absolute():
    script = pathlib.Path(arguments[0])
    arguments[0] = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
  return shlex.join(["python", *arguments])


def device():
  """Returns the device that JAX computes on by default."""
  return next(iter(jnp.zeros(()).devices()))


def describe_device() -> str:
  """Returns the kind of the device; for a CPU, its name and the number of usable cores."""
  if device().platform != "cpu":
    return device().device_kind
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return f"{names[0] if names else 'CPU'}, {cores} cores"


def as_json(config) -> dict:
  """Returns the fields of a dataclass as JSON gives them back: tuples as lists, paths as text."""
  return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def read(path: pathlib.Path) -> list[dict]:
  """Returns the JSON objects of a file, in order. Skips other lines, such as interrupted ones."""
  if not path.exists():
    return []
  lines = []
  for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
    try:
      line = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
      continue
    if isinstance(line, dict):
      lines.append(line)
  return lines


def append(path: pathlib.Path, line: dict) -> None:
  """Adds a line. After an interrupted one, the new line still begins on a line of its own."""
  path.parent.mkdir(parents=True, exist_ok=True)
  cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
  with path.open("a", encoding="utf-8") as file:
    file.write("\n" * cut_off + json.dumps(line, allow_nan=False) + "\n")


def write(path: pathlib.Path, lines: Iterable[dict]) -> None:
  """Writes a whole file of lines, in place of an earlier one."""
  text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
  replace(path, lambda new: new.write_text(text, encoding="utf-8"))


def save(figure, path: pathlib.Path) -> None:
  """Writes a matplotlib figure as PNG, in place of an earlier one."""
  replace(path, lambda new: figure.savefig(new, dpi=150, format="png"))


def replace(path: pathlib.Path, make: Callable[[pathlib.Path], object]) -> None:
  """Lets `make` write a file, then renames it to `path`, which never holds half of it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    make(new)
    os.replace(new, path)
  finally:
    new.unlink(missing_ok=True)


def has_numbers(line: dict, names: Iterable) -> bool:
  """Returns whether a line has a finite number under each of these names."""
  values = [line.get(name) for name in names]
  return all(
    isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in values
  )


def is_curve(curve: Any) -> bool:
  """Returns whether `curve` is a list of [step, accuracy, loss], whose loss may be None."""
  return (
    isinstance(curve, list)
    and bool(curve)
    and all(isinstance(point, list) and len(point) == 3 for point in curve)
    and all(has_numbers(dict(enumerate(point)), [0, 1]) for point in curve)
  )


def latest(lines: Iterable[dict], configs: Iterable[dict]) -> list[dict]:
  """Returns the latest line of each config that has one, in the order of the configs."""
  key = functools.partial(json.dumps, sort_keys=True)
  by_config = {key(line["config"]): line for line in lines}
  return [by_config[k] for k in map(key, configs) if k in by_config]
