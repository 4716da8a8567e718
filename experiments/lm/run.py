"""A training run: everything that decides its result, its folder, and its line of results."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable
from typing import Literal

from results import has_numbers, versions

HYBRID = ("kda", "kda", "kda", "mla")
NUMBERS = ("bits_per_byte", "parameters", "steps", "tokens", "seconds", "cpu_seconds")
NUMBERS += ("tokens_per_second", "utilisation", "compile_seconds")


@dataclasses.dataclass(frozen=True)
class Run:
  """Everything that decides the result of a training run. Its line of results is found by it."""

  minutes: float = 10.0
  """Length of a run: imports, compilation, training, held-out files and samples together."""
  steps: int | None = None
  """Number of training steps, instead of --minutes."""
  text: tuple[pathlib.Path, ...] = ()
  """Files and folders to train on; empty: the sources of Python's standard library."""
  init: pathlib.Path | None = None
  """Folder of a run, such as runs/lm/NAME, whose parameters are the first ones of this run."""
  pattern: tuple[str, ...] = HYBRID
  """Mixers of the layers: kda, gated_deltanet, mla, softmax."""
  layers: int | None = None
  """Number of layers, for which the pattern is repeated and cut; None: the pattern once."""
  d_model: int = 128
  """Model width."""
  num_heads: int = 2
  """Heads of every mixer."""
  key_width: int = 32
  """Channels of keys and queries per head."""
  value_width: int = 64
  """Channels of values per head, except in softmax attention."""
  mlp_width: int = 384
  """Hidden channels of the SwiGLU MLPs."""
  conv_size: int | None = None
  """Width of the short convolutions of kda and gated_deltanet; None: none."""
  chunk_size: int = 16
  """Tokens per chunk of kda and gated_deltanet."""
  ngrams: tuple[int, ...] = (2, 3, 4)
  """Lengths of n-grams, in bytes, that have hashed embeddings; --ngrams without a value: none."""
  ngram_rows: int = 16384
  """Rows of each table of n-gram embeddings; a power of two."""
  batch: int = 8
  """Rows per step."""
  length: int = 256
  """Tokens per row."""
  accumulate: int = 1
  """Steps whose gradients are averaged for one update of the parameters."""
  optimizer: Literal["muon", "adam"] = "muon"
  """muon: Muon for the matrices of the layers, AdamW for the others; adam: AdamW for all."""
  learning_rate: float = 0.008
  """Peak learning rate of AdamW."""
  muon_learning_rate: float = 0.04
  """Peak learning rate of Muon."""
  weight_decay: float = 0.0
  """Weight decay of the matrices of the layers."""
  warmup: int = 40
  """Steps until the peak learning rate, which then falls to 0 in a straight line."""
  clip: float = 1.0
  """Largest norm of the gradient."""
  bf16: bool = False
  """Compute in bfloat16; parameters, norms, gates and states stay in float32."""
  seed: int = 0
  """Seed of the parameters and of the order of the text."""
  eval_rows: int = 48
  """Rows of the held-out files that are scored during training; all of them are in the end."""
  eval_length: int = 1024
  """Tokens per row of the held-out files. A file is cut where a row ends."""

  @property
  def mixers(self) -> tuple[str, ...]:
    """Name of the mixer of each layer."""
    count = self.layers or len(self.pattern)
    return tuple(self.pattern[n % len(self.pattern)] for n in range(count))

  @property
  def name(self) -> str:
    """Name of the run's folder: the pattern, and a hash of all that decides the result."""
    text = json.dumps(self.as_json(), sort_keys=True)
    return "-".join((*self.pattern, hashlib.sha256(text.encode()).hexdigest()[:8]))

  def as_json(self) -> dict:
    """Returns the fields as JSON gives them back: tuples as lists, paths as text."""
    names = [field.name for field in dataclasses.fields(Run)]
    return json.loads(json.dumps({name: getattr(self, name) for name in names}, default=str))


def line_of(run: Run, metrics: dict) -> dict:
  """Returns the line of results of a run."""
  return (
    {"task": "lm", "name": run.name} | metrics | {"config": run.as_json(), "versions": versions()}
  )


def of_runs(lines: Iterable[dict], runs: Iterable[Run]) -> list[dict]:
  """Returns the results of these runs in their order; the latest line where a run has several."""
  by_name = {line["name"]: line for line in lines if is_result(line)}
  return [by_name[run.name] for run in runs if run.name in by_name]


def is_result(line: dict) -> bool:
  """Returns whether a line has all that tables and figures are made from."""
  curve, others = line.get("curve"), line.get("references")
  return (
    isinstance(line.get("config"), dict)
    and isinstance(line.get("name"), str)
    and has_numbers(line, NUMBERS)
    and isinstance(others, dict)
    and has_numbers(others, others)
    and isinstance(curve, list)
    and all(
      isinstance(point, list) and has_numbers(dict(enumerate(point)), range(3)) for point in curve
    )
  )
