"""The flags of `lm.py`, and the training runs that they ask for."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Literal

import cli
import jax
from flax import nnx
from lm.checkpoints import parameters_in
from lm.model import MIXERS, build, parameters_of
from lm.run import HYBRID, Run

PROG = "lm.py"
COMPARED = (("softmax",) * 4, ("kda",) * 4, HYBRID)
COUNTS = ("steps", "layers", "d_model", "num_heads", "key_width", "value_width", "mlp_width")
COUNTS += ("conv_size", "chunk_size", "batch", "length", "accumulate", "eval_rows", "eval_length")
POSITIVE = ("minutes", "learning_rate", "muon_learning_rate", "clip", "checkpoint_minutes")
NOT_NEGATIVE = ("weight_decay", "warmup", "samples", "seed")


@dataclasses.dataclass(frozen=True)
class Config(Run):
  """Trains a byte-level language model on text files, and prints its bits per byte."""

  compare: bool = False
  """Train softmax attention, linear attention and a 3:1 hybrid at equal numbers of parameters."""
  samples: int = 2
  """Number of texts that the model writes in the end."""
  sample_bytes: int = 300
  """Bytes of each."""
  prompt: str = "def "
  """Start of each."""
  checkpoint_minutes: float = 2.0
  """Minutes between two checkpoints."""
  out: pathlib.Path = pathlib.Path("runs", "lm")
  """Folder of the results."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""


def parse(arguments: Sequence[str]) -> Config:
  """Returns the values of the flags. A bad flag ends the program."""
  return cli.parse(Config(), arguments, PROG)


def plan(config: Config) -> list[Run]:
  """Returns the runs of a configuration. Raises a ValueError for flags that are wrong."""
  check(config)
  run = Run(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Run)})
  if run.init is not None:
    parameters_in(run.init, jax.eval_shape(lambda: nnx.state(build(run, nnx.Rngs(0)), nnx.Param)))
  wanted = parameters_of(run)  # traces the model, so that the layers check their own arguments now
  if not config.compare:
    return [run]
  return [
    with_parameters(dataclasses.replace(run, pattern=pattern), wanted) for pattern in COMPARED
  ]


def with_parameters(run: Run, wanted: int) -> Run:
  """Returns the run with the width of the MLPs that brings its parameters closest to `wanted`."""
  per_channel = 3 * run.d_model * len(run.mixers)  # gate, up and down projection of each SwiGLU
  more = round((wanted - parameters_of(run)) / per_channel)
  return dataclasses.replace(run, mlp_width=max(1, run.mlp_width + more))


def check(config: Config) -> None:
  """Raises a ValueError for flags that are wrong by themselves."""
  cli.check_known(config, "pattern", tuple(MIXERS))
  cli.check_at_least_one(config, *COUNTS)
  for name in POSITIVE:
    if not 0 < getattr(config, name) < math.inf:
      raise ValueError(f"{cli.flag(name)} must be positive; got {getattr(config, name)}")
  for name in NOT_NEGATIVE:
    if not 0 <= getattr(config, name) < math.inf:
      raise ValueError(f"{cli.flag(name)} must be at least 0; got {getattr(config, name)}")
  if config.samples and config.sample_bytes < 1:
    raise ValueError(f"--sample-bytes must be at least 1; got {config.sample_bytes}")
  wrong = [order for order in config.ngrams if order not in (2, 3, 4)]
  if wrong:
    raise ValueError(f"--ngrams must be among 2, 3 and 4 bytes; got {wrong[0]}")
  if config.ngram_rows < 2 or config.ngram_rows & (config.ngram_rows - 1):
    raise ValueError(f"--ngram-rows must be a power of two, at least 2; got {config.ngram_rows}")
  if config.steps is not None and config.steps % config.accumulate:
    raise ValueError(
      f"--steps must be a multiple of --accumulate {config.accumulate}; got {config.steps}"
    )
  if config.init is not None and not config.init.is_dir():
    raise ValueError(f"--init {config.init}: no such folder")
  if config.init is not None and config.compare:
    raise ValueError("--init starts one model from a checkpoint; leave --compare out")
