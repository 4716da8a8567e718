"""Tiny models, requests and engines of the tests of `lajax.serve`; the tokens of requests alone."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lajax.layers as L
from lajax.models import LanguageModel, MixerConfig, RecallModel, complete, hybrid_config
from lajax.serve import Engine

V, D = 17, 16
SIZES = dict(slots=4, prefill_piece=4, max_length=16, page_size=8)
GATED_DELTANET = MixerConfig(L.GatedDeltaNet, {"num_heads": 2, "head_dim": 8, "impl": "recurrent"})
SOFTMAX = MixerConfig(
  L.SoftmaxAttention, {"num_heads": 2, "head_dim": 8, "rope_theta": 100.0, "max_length": 32}
)


def language_model(*pattern: MixerConfig):
  config = hybrid_config(V, D, pattern, mlp=16, tied_head=False)
  return LanguageModel(config, rngs=nnx.Rngs(0))


def windowed():
  """A model whose states are lists of [B ..], not stacked; its window is a ring of 5 tokens."""
  window = functools.partial(L.SoftmaxAttention, D, 2, 8, rope_theta=100.0, window=5)
  return RecallModel(V, D, [functools.partial(L.HGRN2, D, 2, 8), window], rngs=nnx.Rngs(0))


MAKE = {
  "linear": lambda: language_model(GATED_DELTANET, GATED_DELTANET),
  "hybrid": lambda: language_model(GATED_DELTANET, SOFTMAX),
  "window": windowed,
}


@functools.cache
def model(name: str, seed: int = 0, dtype: str | None = None):
  """A model with parameters large enough that its tokens differ."""
  graph, p = nnx.split(nnx.eval_shape(MAKE[name]))
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), dtype or x.dtype)
  return nnx.merge(graph, jax.tree.map(draw, p))


class Markov(nnx.Module):
  """Model whose logits are a row of a table by the last token; its state counts the tokens."""

  def __init__(self, table):
    self.vocab_size = len(table)
    self.table = nnx.Param(jnp.asarray(table, jnp.float32))

  def __call__(self, tokens, state=None, *, segment_ids=None):
    state = self.init_state(tokens.shape[0]) if state is None else state
    return self.table[...][tokens], state + (segment_ids >= 0).sum(axis=1, dtype=jnp.int32)

  def init_state(self, batch):
    return jnp.zeros(batch, jnp.int32)


class Asked(NamedTuple):
  """A request: its prompt and options."""

  prompt: list[int]
  options: dict


def asked(rng: np.random.Generator, longest: int = 9, most: int = 7) -> Asked:
  """A random request, at most so long, for at most so many tokens; a half is greedy."""
  options: dict = {"max_tokens": int(rng.integers(1, most + 1))}
  if rng.integers(2):
    options |= {"temperature": 0.8, "key": jax.random.key(int(rng.integers(1000)))}
    options |= {"top_p": 0.9, "min_p": 0.01, "stop_tokens": [3, 7]}
  return Asked(rng.integers(0, V, rng.integers(1, longest + 1)).tolist(), options)


def alone(model, request: Asked):
  """Tokens and log-probabilities of a request from `complete`."""
  options = dict(request.options)
  if "key" in options:
    options["key"] = options["key"][None]
  found = complete(model, [request.prompt], prefill_piece=4, **options)
  length = found.lengths[0]
  return found.tokens[0, :length].tolist(), found.logprobs[0, :length]


def engine(name: str, **options) -> Engine:
  return Engine(model(name), **SIZES | options)


def check_alone(handle, model, request: Asked) -> None:
  """Compares a finished request with the same one alone; a cancelled one with its beginning."""
  tokens, logprobs = alone(model, request)
  if handle.finish_reason == "cancelled":
    tokens = tokens[: len(handle.tokens)]
  assert handle.tokens == tokens
  # logits of size 10 to 100 in float32
  np.testing.assert_allclose(handle.logprobs, logprobs[: len(tokens)], atol=1e-3)
