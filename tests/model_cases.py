"""The oracle's tiny checkpoints, and how tests call their models: one program for all lengths."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import lajax

HERE = pathlib.Path(__file__).parent
# Beside the repository, where the project's shared files are; a copy in tests/ comes first.
PLACES = (
  HERE / "oracle",
  HERE.parent.parent / "shared" / "oracle",
  pathlib.Path("/work/shared/oracle"),
)
ROOT = next((p for p in PLACES if (p / "models").is_dir()), None)
needs_oracle = pytest.mark.skipif(
  ROOT is None, reason="the oracle's models are not on this machine"
)

PIECE = 24  # tokens per call
PADS = 5  # on the left, in the test of padding
QUICK = ("qwen3_5_tied", "kimi_linear")  # in the fast part of the suite
FOLDERS = (
  "qwen3_5_tied", "qwen3_5_moe", "qwen3_5_multimodal", "kimi_linear", "kimi_linear_96", "nemotron_h_moe",
  "granite_h_dense", "granite_h_moe", "bamba_two", "mamba2", "qwen3_next", "minimax", "recurrent_gemma",
  "jamba", "bailing_groups", "olmo_hybrid", "falcon_h1_plain", "lfm2_three", "mamba", "falcon_mamba_two",
)  # fmt: skip
# The originals of these return the stream after each layer, without the embedding.
WITHOUT_EMBEDDING = ("mamba", "mamba2", "falcon_mamba_two")


def folders(quick: tuple[str, ...] = QUICK) -> list:
  return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in FOLDERS]


@dataclasses.dataclass(frozen=True)
class Oracle:
  """A folder of the oracle."""

  name: str

  @property
  def folder(self) -> pathlib.Path:
    assert ROOT is not None
    return ROOT / "models" / self.name

  @functools.cached_property
  def io(self) -> dict[str, np.ndarray]:
    with np.load(self.folder / "io.npz") as file:
      return dict(file)

  @functools.cached_property
  def meta(self) -> dict[str, Any]:
    return json.loads((self.folder / "meta.json").read_text())

  @property
  def tokens(self) -> np.ndarray:
    return self.io["input_ids"].astype(np.int32)

  @property
  def tolerance(self) -> float:
    """Absolute, of logits: 5 times the original's own spread over ways to compute them."""
    spread = self.meta["max_abs_diff"]
    return max(5 * max(spread["step"], spread["float64"]), 2e-5)


@functools.lru_cache(maxsize=2)  # tests of one folder follow each other
def oracle(name: str) -> Oracle:
  return Oracle(name)


@functools.lru_cache(maxsize=2)
def loaded(name: str) -> lajax.models.LanguageModel:
  return lajax.models.load(oracle(name).folder)


def in_pieces(model, tokens: np.ndarray, ids: np.ndarray | None = None, piece: int = PIECE):
  """Returns hidden states [layers+1 B T D], logits and the state, from calls of `piece` tokens.

  All calls have the same shapes, a state and ids, so that one program serves every length.
  """
  ids = np.zeros_like(tokens) if ids is None else ids
  B, T = tokens.shape
  end = -T % piece
  tokens = np.pad(tokens, ((0, 0), (0, end)))
  ids = np.pad(ids, ((0, 0), (0, end)), constant_values=-1)
  state, found = model.init_state(B, 128), []
  for start in range(0, T, piece):
    part = slice(start, start + piece)
    streams, state = model.hidden_states(tokens[:, part], state, segment_ids=ids[:, part])
    found.append(np.asarray(streams))
  streams = np.concatenate(found, axis=2)[:, :, :T]
  return streams, np.asarray(model.logits(jax.numpy.asarray(streams[-1]))), state


def worst(x, y) -> float:
  return float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max())


def layer_states(model, state) -> list:
  """Returns the states of each layer's mixers, in order."""
  return [
    tuple(jax.tree.map(lambda x, r=r: np.asarray(x[r]), s) for s in of_block)
    for stack, of_stack in zip(model.stacks, state, strict=True)
    for r in range(stack.repeats)
    for of_block in of_stack
  ]
