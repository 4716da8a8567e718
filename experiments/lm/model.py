"""The byte-level language model: a hybrid of `lajax.layers` behind an embedding of n-grams."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from lm.run import Run

import lajax.layers as L
from lajax._operations import operations

VOCABULARY = 256
LONGEST = 4  # bytes of an n-gram


def kda(run: Run) -> tuple[type, dict]:
  return L.KimiDeltaAttention, delta(run)


def gated_deltanet(run: Run) -> tuple[type, dict]:
  return L.GatedDeltaNet, delta(run)


def delta(run: Run) -> dict:
  return dict(
    num_heads=run.num_heads,
    head_dim=run.key_width,
    expand_v=run.value_width / run.key_width,
    conv_size=run.conv_size,
    chunk_size=run.chunk_size,
  )


def mla(run: Run) -> tuple[type, dict]:
  """Makes MLA without positions, as in Kimi Linear: the layers around it know the order."""
  return L.MLA, dict(
    num_heads=run.num_heads,
    head_dim=run.key_width,
    value_dim=run.value_width,
    kv_rank=run.value_width,
    rope_dim=run.key_width // 2,
    rope_theta=None,
    max_length=run.eval_length,
  )


def softmax(run: Run) -> tuple[type, dict]:
  return L.SoftmaxAttention, dict(
    num_heads=run.num_heads,
    head_dim=run.value_width,
    rope_theta=10_000.0,
    max_length=run.eval_length,
  )


MIXERS: dict[str, Callable[[Run], tuple[type, dict]]] = dict(
  kda=kda, gated_deltanet=gated_deltanet, mla=mla, softmax=softmax
)
