"""The mixers of the recall experiments, one row each: a row added here appears in every flag, table and figure."""

import dataclasses
import functools
from collections.abc import Callable

import lajax.layers as L


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a mixer is made for: model width, heads, the widths of a head's keys and values, the longest row it will see."""

  d_model: int
  num_heads: int
  key_width: int
  value_width: int
  length: int


def linear(kind: Callable, **options) -> Callable[[Sizes], Callable]:
  """For a layer whose state is key width by value width: from sizes to a maker that wants nothing but `rngs`."""

  def make(s: Sizes) -> Callable:
    widths = dict(head_dim=s.key_width, expand_v=s.value_width / s.key_width)
    return functools.partial(kind, s.d_model, num_heads=s.num_heads, **widths, **options)

  return make


def softmax(s: Sizes) -> Callable:
  """Its values are as wide as its keys."""
  return functools.partial(
    L.SoftmaxAttention, s.d_model, num_heads=s.num_heads, head_dim=s.key_width, max_length=s.length
  )


def mamba2(s: Sizes) -> Callable:
  """Its head is as wide as the values, its state dimension is the keys'."""
  return functools.partial(L.Mamba2, s.d_model, num_heads=s.num_heads, head_dim=s.value_width, state_dim=s.key_width)


MIXERS: dict[str, Callable[[Sizes], Callable]] = {
  "softmax": softmax,
  "linear": linear(L.LinearAttention),
  "retnet": linear(L.RetNet),
  "gla": linear(L.GLA),
  "mamba2": mamba2,
  "deltanet": linear(L.DeltaNet),
  "gated_deltanet": linear(L.GatedDeltaNet),
  "kda": linear(L.KimiDeltaAttention),
}

DEFAULT_MIXERS = ("softmax", "linear", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
