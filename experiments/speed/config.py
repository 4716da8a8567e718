"""The flags of `speed.py`, and the device that it runs on."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

import cli
import jax
from results import device
from speed.cases import CORE, OPS

PROG = "speed.py"
IMPLS = ("recurrent", "associative", "chunked", "auto", "pallas")


@dataclasses.dataclass(frozen=True)
class Config:
  """Times every operation in every implementation, beside baselines, and compiling layers."""

  ops: tuple[str, ...] = tuple(CORE)
  """Names of ops; all: also those that are not timed by default."""
  forms: tuple[str, ...] | None = None
  """Implementations (values of impl); None: all, but pallas only on a GPU."""
  associative: tuple[str, ...] = ("simple_gla", "linear_recurrence")
  """Ops whose associative scans are timed, or all. These scans take long to compile."""
  length: int = 4096
  """Tokens per sequence."""
  batch: int = 1
  """Sequences."""
  heads: int = 4
  """Heads; linear_recurrence has heads times width channels."""
  width: int = 64
  """Channels of queries and keys per head."""
  value_width: int | None = None
  """Channels of values per head; None: as many as keys."""
  dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
  """Dtype of the inputs."""
  repeats: int = 5
  """Rounds; every program runs once per round."""
  no_baselines: bool = False
  """Time only lajax."""
  compile: bool = False
  """Print only the compile times of layers."""
  no_compile: bool = False
  """Leave out the compile times of layers."""
  scaling: bool = False
  """Also time the chunked implementation at the numbers of tokens in --lengths."""
  lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
  """Numbers of tokens for --scaling."""
  keep_memory: Literal["scaling", "always", "never"] = "scaling"
  """Runs that keep freed memory in the process, on a CPU; scaling: only --scaling."""
  positions: tuple[int, ...] = (100, 100_000)
  """Positions at which the decoding of one token is timed."""
  out: pathlib.Path = pathlib.Path("runs", "speed")
  """Folder of the results."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""


def parse(arguments: Sequence[str]) -> Config:
  """Returns the configuration of a command line; a bad flag ends the program with one line."""
  config = cli.parse(Config(), arguments, PROG)
  every = {name: tuple(OPS) for name in ("ops", "associative") if getattr(config, name) == ("all",)}
  config = dataclasses.replace(config, **every)
  try:
    check(config)
  except ValueError as error:
    cli.fail(PROG, str(error))
  return config


def check(config: Config) -> None:
  """Raises a ValueError for values that no run can have."""
  cli.check_known(config, "ops", (*OPS, "all"))
  cli.check_known(config, "associative", (*OPS, "all"))
  if config.forms is not None:
    cli.check_known(config, "forms", IMPLS)
  cli.check_at_least_one(config, "length", "batch", "heads", "width", "value_width", "repeats")
  cli.check_at_least_one(config, "lengths", "positions")
  if config.scaling and len(set(config.lengths)) < 2:
    raise ValueError(
      f"--lengths needs at least two different lengths for a slope; got {config.lengths}"
    )
  if config.compile and (config.no_compile or config.scaling):
    other = "--no-compile" if config.no_compile else "--scaling"
    raise ValueError(f"--compile prints nothing but compile times; leave out {other}")


def prepare(config: Config) -> None:
  """Sets JAX's default device and its modes. Must run before the first computation."""
  # Compile times are those of programs that no earlier process has compiled.
  jax.config.update("jax_enable_compilation_cache", False)
  if config.dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  cli.use_device(config.device)


def platform() -> str:
  return device().platform
