"""Configuration of the experiment, its model and its requests."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

import cli
import numpy as np
from flax import nnx

import lajax.layers as L
from lajax.models import LanguageModel, MixerConfig, hybrid_config

PROG = "serve.py"
VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Config:
  """Measures an engine against one-by-one generation and static batches."""

  slots: tuple[int, ...] = (1, 2, 4, 8, 16)
  """Requests that run at once."""
  requests: int = 48
  """Requests of each measurement."""
  prompt: int = 64
  """Tokens of the longest prompt; the shortest has little more than half."""
  max_tokens: int = 96
  """New tokens of the longest request; the shortest has little more than half."""
  load: float = 0.7
  """Arrivals of requests, as a part of those that the engine can serve at most."""
  prefix: int = 2000
  """Tokens of the prefix that requests share."""
  prefix_requests: int = 8
  """Requests that share it."""
  prefill_piece: int = 128
  """Tokens of a prompt per call."""
  draft_tokens: int = 4
  """Drafted tokens that are verified in one call."""
  layers: int = 4
  """Layers: three of Kimi Delta Attention, then one of MLA, repeated."""
  d_model: int = 256
  """Width of the model, with heads of 64 channels."""
  seed: int = 0
  """Seed of the parameters, the requests and their arrivals."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Device to run on; auto: a GPU if JAX sees one."""
  out: pathlib.Path = pathlib.Path("runs", "serve")
  """Folder of the results."""


def parse(arguments: Sequence[str]) -> Config:
  """Returns the configuration of a command line; a bad flag ends the program with one line."""
  config = cli.parse(Config(), arguments, PROG)
  try:
    at_least_one = [f.name for f in dataclasses.fields(Config) if f.name not in OTHERS]
    cli.check_at_least_one(config, *at_least_one)
    if config.d_model % 64:
      raise ValueError(f"--d-model must be a multiple of 64; got {config.d_model}")
    if not 0 < config.load < 1:
      raise ValueError(f"--load must be between 0 and 1; got {config.load}")
  except ValueError as error:
    cli.fail(PROG, str(error))
  return dataclasses.replace(config, slots=tuple(sorted(set(config.slots))))


OTHERS = ("load", "seed", "device", "out")


def model_of(config: Config, max_length: int) -> LanguageModel:
  """Returns a model without training; its caches have `max_length` places in `lajax.generate`."""
  heads = dict(num_heads=config.d_model // 64, head_dim=64)
  kda = MixerConfig(L.KimiDeltaAttention, heads)
  mla = MixerConfig(L.MLA, dict(**heads, kv_rank=64, rope_dim=32, max_length=max_length))
  pattern = hybrid_config(VOCABULARY, config.d_model, [kda] * 3 + [mla], config.layers)
  return LanguageModel(pattern, rngs=nnx.Rngs(config.seed))


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request."""

  prompt: list[int]
  max_tokens: int


def requests_of(config: Config) -> list[Asked]:
  """Returns requests of random lengths."""
  rng = np.random.default_rng(config.seed)
  between = lambda longest: int(rng.integers(min(longest, longest // 2 + 2), longest + 1))
  return [
    Asked(rng.integers(0, VOCABULARY, between(config.prompt)).tolist(), between(config.max_tokens))
    for _ in range(config.requests)
  ]


def with_prefix(config: Config) -> list[Asked]:
  """Returns requests whose prompts share their beginning."""
  rng = np.random.default_rng(config.seed + 1)
  prefix = rng.integers(0, VOCABULARY, config.prefix).tolist()
  requests = (requests_of(config) * config.prefix_requests)[: config.prefix_requests]
  return [dataclasses.replace(r, prompt=prefix + r.prompt) for r in requests]
