"""The mixers of the recall experiments, one row each: a row added here appears in every flag, table and figure.

What is compared is the recurrence, so all recurrent mixers have the same short convolution on their queries, keys and values.
An output gate, where the layer has one, is the flag `--output-gate`'s.
"""

import dataclasses
import functools
from collections.abc import Callable

import lajax.layers as L


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What a mixer is made for: widths of the model and of a head, the longest row it will see, whether gates stay."""

  d_model: int
  num_heads: int
  key_width: int
  value_width: int
  length: int
  output_gate: bool


def linear(kind: Callable, *, gated: bool = False, **options) -> Callable[[Sizes], Callable]:
  """For a layer whose state is key width by value width: from sizes to a maker that wants nothing but `rngs`.

  `gated`: the layer comes with an output gate, which then is there or not as the sizes say.
  """

  def make(s: Sizes) -> Callable:
    widths = dict(head_dim=s.key_width, expand_v=s.value_width / s.key_width, conv_size=4)
    gate = dict(use_gate=s.output_gate) if gated else {}
    return functools.partial(kind, s.d_model, num_heads=s.num_heads, **widths, **gate, **options)

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
  "retnet": linear(L.RetNet, gated=True),
  "gla": linear(L.GLA, gated=True),
  "mamba2": mamba2,
  "deltanet": linear(L.DeltaNet),
  "gated_deltanet": linear(L.GatedDeltaNet, gated=True),
  "kda": linear(L.KimiDeltaAttention, gated=True),
}

DEFAULT_MIXERS = ("softmax", "linear", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
