"""The configuration of `speed.py`, its command line, and the device that it runs on."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import sys
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import tyro
from speed_cases import CORE, OPS

FORMS = ("recurrent", "associative", "chunked", "auto", "pallas")


@dataclasses.dataclass(frozen=True)
class Config:
  """Times every operation of lajax in every form, beside baselines."""

  ops: tuple[str, ...] = tuple(CORE)
  """Names of ops; all: also those that are not timed by default."""
  forms: tuple[str, ...] | None = None
  """Forms (values of impl); None: all, pallas only on a GPU."""
  associative: tuple[str, ...] = ("simple_gla", "linear_recurrence")
  """Ops whose associative scans are timed, or all: they take long to compile."""
  length: int = 4096
  """Tokens."""
  batch: int = 1
  """Sequences."""
  heads: int = 4
  """Heads; linear_recurrence has heads times width channels."""
  width: int = 64
  """Channels of a head's queries and keys."""
  value_width: int | None = None
  """Channels of a head's values; None: as the keys (jax.nn.dot_product_attention knows only that)."""
  dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
  """Of the inputs."""
  repeats: int = 5
  """Rounds in which every program runs once."""
  no_baselines: bool = False
  """Only the forms of lajax."""
  scaling: bool = False
  """Also time the chunked form over the numbers of tokens in --lengths."""
  lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
  """Of --scaling."""
  keep_memory: Literal["scaling", "always", "never"] = "scaling"
  """When freed memory stays in the process, on a CPU (allocator.py); scaling: in --scaling, which has a process of its own."""
  positions: tuple[int, ...] = (100, 100_000)
  """Tokens before the one whose decoding is timed."""
  out: pathlib.Path | None = None
  """File that gets a JSON line for every row."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Where to run; auto: a GPU if JAX sees one."""


def parse(arguments: list[str]) -> Config:
  """The configuration of a command line. One line for a bad flag."""
  messages = io.StringIO()
  try:
    with contextlib.redirect_stderr(messages):
      config = tyro.cli(
        Config, args=arguments, prog="speed.py", config=(tyro.conf.FlagCreatePairsOff,)
      )
  except SystemExit as end:
    if not end.code:  # --help
      raise
    box = [text.strip("│ ") for text in messages.getvalue().splitlines()[1:]]
    fail(
      " ".join(itertools.takewhile(lambda text: text.strip("─╰╯"), box))
    )  # what follows a rule repeats the help
  every = {name: tuple(OPS) for name in ("ops", "associative") if getattr(config, name) == ("all",)}
  config = dataclasses.replace(config, **every)
  if not config.ops or config.forms == ():
    fail("--ops and --forms need at least one value")
  for flag, given, known in (
    ("ops", config.ops, (*OPS, "all")),
    ("associative", config.associative, (*OPS, "all")),
    ("forms", config.forms or FORMS, FORMS),
  ):
    unknown = [name for name in given if name not in known]
    if unknown:
      fail(f"--{flag}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
  for name in (
    "length",
    "batch",
    "heads",
    "width",
    "value_width",
    "repeats",
    "lengths",
    "positions",
  ):
    value = getattr(config, name)
    least = min(value, default=0) if isinstance(value, tuple) else value
    if least is not None and least < 1:
      fail(f"--{name.replace('_', '-')} must be at least 1; got {value}")
  if config.scaling and len(set(config.lengths)) < 2:
    fail(f"--lengths needs at least two different lengths for a slope; got {config.lengths}")
  return config


def fail(message: str) -> NoReturn:
  print(f"speed.py: error: {message}", file=sys.stderr)
  raise SystemExit(2)


def choose_device(config: Config) -> None:
  if config.dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if config.device != "auto":
    try:
      jax.config.update("jax_default_device", jax.devices(config.device)[0])
    except RuntimeError:
      fail(
        f"--device {config.device}: JAX sees no such device, only {', '.join(map(str, jax.devices()))}"
      )


def device():
  return next(iter(jnp.zeros(()).devices()))


def platform() -> str:
  return device().platform


def describe_device() -> str:
  """The device's kind; of a CPU, the processor's name and the cores that this process may use."""
  if platform() != "cpu":
    return device().device_kind
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  name = next(
    (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU"
  )
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return f"{name}, {cores} cores"


def as_json(config: Config) -> dict:
  return json.loads(json.dumps(dataclasses.asdict(config), default=str))
