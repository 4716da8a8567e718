"""LFM2, dense and mixture of experts: double-gated short convolutions and attention."""

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
)
from lajax.models.families.options import Family, Options, layer_kinds, rope, words
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, conv, experts, linear, same

NO_EFFECT = words(
  """
  block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
  block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc
  """
)


def read(c: Options) -> ModelConfig:
  norm = NormConfig(c.get("norm_eps", 1e-5))
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  theta, _ = rope(c, c.get("theta", 1_000_000.0))
  mixers = {
    "conv": MixerConfig(
      L.DoubleGatedConv,
      {"conv_size": c.get("conv_L_cache", 3), "use_bias": c.get("conv_bias", False)},
    ),
    "attention": MixerConfig(
      L.SoftmaxAttention,
      {
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads", heads),
        "head_dim": D // heads,
        "rope_theta": theta,
        "qk_norm": True,
        "norm_eps": norm.eps,
      },
    ),
  }
  full = c.get("full_attn_idxs", None) or []
  names = {"conv": "conv", "full_attention": "attention"}
  kinds = layer_kinds(c, names, lambda n: "attention" if n in full else "conv")
  is_moe = c.get("model_type") == "lfm2_moe"
  dense = MLPConfig(c.get("intermediate_size") if is_moe else _mlp_width(c))
  num_dense, moe = (c.get("num_dense_layers"), _moe(c)) if is_moe else (len(kinds), dense)
  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(
      BlockConfig((mixers[kind],), dense if n < num_dense else moe, norm)
      for n, kind in enumerate(kinds)
    ),
    norm,
    tied_head=c.one_of("tie_word_embeddings", [True], c.get("tie_embedding", True)),
  )


def _mlp_width(c: Options) -> int:
  """Two thirds of the width that is said, times a factor, rounded up to a multiple."""
  width = c.get("intermediate_size", None) or c.get("block_ff_dim")
  c.get("block_ff_dim", None)
  factor, multiple = c.get("block_ffn_dim_multiplier", 1.0), c.get("block_multiple_of", 256)
  if not c.get("block_auto_adjust_ff_dim", True):
    return width
  width = int(2 * width / 3)
  width = width if factor is None else int(factor * width)
  return -(-width // multiple) * multiple


def _moe(c: Options) -> MoEConfig:
  return MoEConfig(
    c.get("moe_intermediate_size"),
    c.get("num_experts"),
    c.get("num_experts_per_tok"),
    router="sigmoid",
    selection_bias=c.get("use_expert_bias", True),
    normalize=c.get("norm_topk_prob", True),
    normalize_eps=1e-6,
    scale=c.get("routed_scaling_factor", 1.0),
  )


def tables(c: Options) -> Tables:
  return Tables(
    model=[
      *same("model.embed_tokens.weight", "embedding"),
      *same("model.embedding_norm.weight", "norm.weight"),
    ],
    block=[
      *same("operator_norm.weight", "mixer_norm.weight"),
      *same("ffn_norm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.DoubleGatedConv: [
        *linear("conv.in_proj", "in_proj.b", "in_proj.c", "in_proj.u"),
        *conv("conv.conv", "conv.u"),
        *linear("conv.out_proj", "out_proj"),
      ],
      L.SoftmaxAttention: [
        *linear("self_attn.q_proj", "in_proj.q"),
        *linear("self_attn.k_proj", "in_proj.k"),
        *linear("self_attn.v_proj", "in_proj.v"),
        *same("self_attn.q_layernorm.weight", "q_norm.weight"),
        *same("self_attn.k_layernorm.weight", "k_norm.weight"),
        *linear("self_attn.out_proj", "out_proj"),
      ],
      MLP: [
        *linear("feed_forward.w1", "gate"),
        *linear("feed_forward.w2", "down"),
        *linear("feed_forward.w3", "up"),
      ],
      MixtureOfExperts: [
        *linear("feed_forward.gate", "router"),
        *same("feed_forward.expert_bias", "selection_bias"),
        *experts("feed_forward.experts.{expert}.w1.weight", "gate"),
        *experts("feed_forward.experts.{expert}.w2.weight", "down"),
        *experts("feed_forward.experts.{expert}.w3.weight", "up"),
      ],
    },
  )


FAMILIES = (Family(("lfm2", "lfm2_moe"), read, tables, NO_EFFECT),)
