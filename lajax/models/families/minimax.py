"""MiniMax-Text-01: lightning and softmax attention, 7:1; the residual is taken after the norm."""

import jax
import numpy as np

import lajax.layers as L
from lajax.layers.lightning import lightning_slopes
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
  ResidualConfig,
)
from lajax.models.families.bamba import attention_rows
from lajax.models.families.options import Family, Options, layer_kinds, rope, words
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Derived, Tables, experts, head, linear, same

# The jitter is noise of training, and is refused; a shared MLP of width 0 is none.
NO_EFFECT = words("block_size shared_moe_mode")


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("router_jitter_noise", [0.0], 0.0)
  c.one_of("sliding_window", [None], None)
  c.one_of("postnorm", [True], True)
  c.one_of("shared_intermediate_size", [0], 0)
  c.one_of("attention_bias", [False], False)
  norm = NormConfig(c.get("rms_norm_eps", 1e-5))
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  K, count = c.get("head_dim", None) or D // heads, c.get("num_hidden_layers")
  theta, fraction = rope(c, 1_000_000.0)
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": K,
      "rope_theta": theta,
      "rope_dim": c.get("rotary_dim", int(K * fraction)),
    },
  )
  kinds = layer_kinds(
    c,
    {"linear_attention": "linear", "full_attention": "full"},
    lambda n: "full" if n % 8 == 7 else "linear",
  )
  moe = MoEConfig(
    c.get("intermediate_size"), c.get("num_local_experts"), c.get("num_experts_per_tok")
  )
  residuals = {
    kind: ResidualConfig(
      "normed", c.get(f"{name}_alpha_factor", 1.0), c.get(f"{name}_beta_factor", 1.0)
    )
    for kind, name in (("linear", "linear_attn"), ("full", "full_attn"), ("mlp", "mlp"))
  }

  def mixer(layer: int) -> MixerConfig:
    if kinds[layer] == "full":
      return attention
    options = {"num_heads": heads, "head_dim": K, "scale": 1.0, "norm_eps": 1e-6}
    slopes = lightning_slopes(heads, layer, count)
    return MixerConfig(L.Lightning, options, buffers={"slopes": tuple(slopes.tolist())})

  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(
      BlockConfig((mixer(n),), moe, norm, residuals[kind], residuals["mlp"])
      for n, kind in enumerate(kinds)
    ),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def _decay(slopes: np.ndarray, distance: np.ndarray) -> np.ndarray:
  """Returns e^(-slope distance), [H *distance], and 0 where the distance is negative."""
  slopes = slopes.astype(np.float32).reshape(-1, *(1,) * distance.ndim)
  exponent = -slopes * distance[None].astype(np.float32)
  decay = np.exp(exponent.astype(np.float64))
  return np.where(distance[None] < 0, 0.0, decay).astype(np.float32)


def tables(c: Options) -> Tables:
  n = np.arange(c.get("block_size", 256)) + 1
  return Tables(
    model=[
      *same("model.embed_tokens.weight", "embedding"),
      *same("model.norm.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[
      *same("input_layernorm.weight", "mixer_norm.weight"),
      *same("post_attention_layernorm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.Lightning: [
        *linear(
          "self_attn.qkv_proj",
          "in_proj.q",
          "in_proj.k",
          "in_proj.v",
          groups=c.get("num_attention_heads"),
        ),
        *linear("self_attn.output_gate", "in_proj.gate"),
        *same("self_attn.norm.weight", "norm.weight"),
        *same("self_attn.slope_rate", "slopes", shape=(-1, 1, 1)),
        *linear("self_attn.out_proj", "out_proj"),
      ],
      L.SoftmaxAttention: attention_rows("self_attn."),
      MixtureOfExperts: [
        *linear("block_sparse_moe.gate", "router"),
        *experts("block_sparse_moe.experts.{expert}.w1.weight", "gate"),
        *experts("block_sparse_moe.experts.{expert}.w2.weight", "down"),
        *experts("block_sparse_moe.experts.{expert}.w3.weight", "up"),
      ],
    },
    derived={
      L.Lightning: [
        Derived(f"self_attn.{name}_decay", "self_attn.slope_rate", compute)
        for name, compute in (
          ("query", lambda m: _decay(_slopes(m), n)[..., None]),
          ("key", lambda m: _decay(_slopes(m), len(n) - n)[..., None]),
          ("diagonal", lambda m: _decay(_slopes(m), n[:, None] - n)[None]),
        )
      ]
    },
  )


def _slopes(mixer: L.Lightning) -> np.ndarray:
  """Returns the slopes of one layer; zeros of an abstract one, whose shapes alone are asked for."""
  slopes = mixer.slopes.get_value()
  if isinstance(slopes, jax.ShapeDtypeStruct):
    return np.zeros(slopes.shape, np.float32)
  return np.asarray(slopes)


FAMILIES = (Family(("minimax",), read, tables, NO_EFFECT),)
