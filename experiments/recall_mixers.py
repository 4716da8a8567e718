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


def shifting(kind: Callable) -> Callable[[Sizes], Callable]:
  """For a layer that mixes each token with the one before, instead of a short convolution; its gate is part of it."""

  def make(s: Sizes) -> Callable:
    widths = dict(head_dim=s.key_width, expand_v=s.value_width / s.key_width)
    return functools.partial(kind, s.d_model, num_heads=s.num_heads, **widths)

  return make


def softmax(s: Sizes) -> Callable:
  """Its values are as wide as its keys."""
  return functools.partial(
    L.SoftmaxAttention, s.d_model, num_heads=s.num_heads, head_dim=s.key_width, max_length=s.length
  )


def cosformer(s: Sizes) -> Callable:
  """It must know the longest row."""
  return linear(L.CosFormer, max_length=s.length)(s)


def hgrn(s: Sizes) -> Callable:
  """Its state has no keys: it is as wide as all values."""
  width = s.num_heads * s.value_width
  return functools.partial(L.HGRN, s.d_model, width=width, conv_size=4, use_gate=s.output_gate)


def forgetting(s: Sizes) -> Callable:
  """As softmax attention."""
  return functools.partial(
    L.ForgettingAttention,
    s.d_model,
    num_heads=s.num_heads,
    head_dim=s.key_width,
    max_length=s.length,
  )


def mla(s: Sizes) -> Callable:
  """Without positions, as softmax attention here; its cache is as large as the keys and values of that."""
  shared = dict(
    kv_rank=s.num_heads * s.key_width, rope_dim=s.num_heads * s.key_width, rope_theta=None
  )
  widths = dict(num_heads=s.num_heads, head_dim=s.key_width, value_dim=s.value_width)
  return functools.partial(L.MLA, s.d_model, **widths, **shared, max_length=s.length)


def mamba(s: Sizes) -> Callable:
  """As many channels as all values have, each with a state as wide as the keys."""
  return functools.partial(L.Mamba, s.d_model, s.num_heads * s.value_width, state_dim=s.key_width)


def griffin(s: Sizes) -> Callable:
  """Its state is one number a channel."""
  return functools.partial(L.GriffinBlock, s.d_model, s.num_heads * s.value_width, s.num_heads)


def mamba2(s: Sizes) -> Callable:
  """Its head is as wide as the values, its state dimension is the keys'."""
  return functools.partial(
    L.Mamba2, s.d_model, num_heads=s.num_heads, head_dim=s.value_width, state_dim=s.key_width
  )


MIXERS: dict[str, Callable[[Sizes], Callable]] = {
  "softmax": softmax,
  "linear": linear(L.LinearAttention),
  "performer": linear(L.Performer, num_features=64),
  "cosformer": cosformer,
  "based": linear(L.Based),
  "rebased": linear(L.ReBased),
  "hedgehog": linear(L.Hedgehog),
  "lightning": linear(L.Lightning, gated=True),
  "hgrn": hgrn,
  "hgrn2": linear(L.HGRN2, gated=True),
  "retnet": linear(L.RetNet, gated=True),
  "gla": linear(L.GLA, gated=True),
  "mamba": mamba,
  "mamba2": mamba2,
  "deltanet": linear(L.DeltaNet),
  "gated_deltanet": linear(L.GatedDeltaNet, gated=True),
  "kda": linear(L.KimiDeltaAttention, gated=True),
  "griffin": griffin,
  "forgetting": forgetting,
  "mla": mla,
  "delta_product": linear(L.DeltaProduct, gated=True),
  "gated_deltanet2": linear(L.GatedDeltaNet2, gated=True),
  "gated_oja": linear(L.GatedOja, gated=True),
  "comba": linear(L.Comba, gated=True),
  "mlstm": linear(L.MLSTM, gated=True),
  "rwkv6": shifting(L.RWKV6),
  "rwkv7": shifting(L.RWKV7),
}

DEFAULT_MIXERS = ("softmax", "linear", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
