"""The mixers of the recall experiments, one row each: a row added here appears in every flag, table and figure."""

import dataclasses
import functools
from collections.abc import Callable

import lajax.layers as L


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a mixer is made for: model width, heads, the width of a head's keys and values, the longest row it will see."""

  d_model: int
  num_heads: int
  key_width: int
  length: int


def layer(kind: Callable, **options) -> Callable[[Sizes], Callable]:
  """From sizes to a maker of the layer that wants nothing but `rngs`; keys and values are equally wide."""
  return lambda s: functools.partial(kind, s.d_model, num_heads=s.num_heads, head_dim=s.key_width, **options)


MIXERS: dict[str, Callable[[Sizes], Callable]] = {
  "softmax": lambda s: layer(L.SoftmaxAttention, max_length=s.length)(s),
  "linear": layer(L.LinearAttention),
  "retnet": layer(L.RetNet, expand_v=1.0),
  "gla": layer(L.GLA),
  "mamba2": lambda s: layer(L.Mamba2, state_dim=s.key_width)(s),
  "deltanet": layer(L.DeltaNet),
  "gated_deltanet": layer(L.GatedDeltaNet),
  "kda": layer(L.KimiDeltaAttention),
}

DEFAULT_MIXERS = ("softmax", "linear", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
