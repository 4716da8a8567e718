"""Kimi Linear: Kimi Delta Attention and latent attention without positions, 3:1."""

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
)
from lajax.models.families.options import Family, Options, layer_kinds, words
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, conv, experts, head, linear, same, swiglu

# `head_dim` and `qk_head_dim` follow from other options; there are no positions, so no base.
NO_EFFECT = words(
  "head_dim qk_head_dim model_max_length pretraining_tp rope_theta use_grouped_topk"
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_bias", [False], False)
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("mla_use_nope", [True], True)
  c.one_of("rope_scaling", [None], None)
  c.one_of("q_lora_rank", [None], None)
  c.one_of("num_nextn_predict_layers", [0], 0)
  norm = NormConfig(c.get("rms_norm_eps", 1e-5))
  linear_config = c.inside("linear_attn_config")
  heads = c.get("num_attention_heads")
  c.one_of("num_key_value_heads", [heads], heads)
  mixers = {
    "kda": _kda(c, linear_config, norm.eps),
    "mla": MixerConfig(
      L.MLA,
      {
        "num_heads": heads,
        "head_dim": c.get("qk_nope_head_dim"),
        "rope_dim": c.get("qk_rope_head_dim"),
        "value_dim": c.get("v_head_dim"),
        "kv_rank": c.get("kv_lora_rank"),
        "rope_theta": None,
        "norm_eps": 1e-6,
      },
    ),
  }
  full = set() if linear_config is None else set(linear_config.get("full_attn_layers"))
  kinds = layer_kinds(
    c,
    {"linear_attention": "kda", "full_attention": "mla"},
    lambda n: "mla" if n + 1 in full else "kda",
  )
  dense = c.get("first_k_dense_replace", 1)
  c.one_of("moe_layer_freq", [1], 1)
  mlp_kinds = c.get("mlp_layer_types", None) or [
    "dense" if n < dense else "sparse" for n in range(len(kinds))
  ]
  mlps = {"dense": MLPConfig(c.get("intermediate_size")), "sparse": _moe(c)}
  return ModelConfig(
    c.get("vocab_size"),
    c.get("hidden_size"),
    tuple(
      BlockConfig((mixers[kind],), mlps[mlp], norm)
      for kind, mlp in zip(kinds, mlp_kinds, strict=True)
    ),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def _kda(c: Options, inside: Options | None, eps: float) -> MixerConfig:
  """Sizes stand in `linear_attn_config` of released files, beside the others in new ones."""
  if inside is None:
    heads, width = c.get("linear_num_heads"), c.get("linear_head_dim")
    taps = c.get("linear_conv_kernel_dim")
  else:
    heads, width = inside.get("num_heads"), inside.get("head_dim")
    taps = inside.get("short_conv_kernel_size")
    inside.get("kda_layers", None)  # the layers that are not in full_attn_layers
  options = {"num_heads": heads, "head_dim": width, "conv_size": taps, "norm_eps": eps}
  return MixerConfig(L.KimiDeltaAttention, options | {"gate_bias": False})


def _moe(c: Options) -> MoEConfig:
  c.one_of("moe_router_activation_func", ["sigmoid"], "sigmoid")
  width = c.get("moe_intermediate_size")
  return MoEConfig(
    width,
    c.get("num_experts"),
    c.get("num_experts_per_token"),
    router="sigmoid",
    selection_bias=True,
    num_groups=c.get("num_expert_group", 1),
    top_groups=c.get("topk_group", 1),
    normalize=c.get("moe_renormalize", True),
    scale=c.get("routed_scaling_factor", 1.0),
    shared=MLPConfig(width * c.get("num_shared_experts")),
  )


def tables(c: Options) -> Tables:
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
      L.KimiDeltaAttention: [
        *linear("self_attn.q_proj", "in_proj.q"),
        *linear("self_attn.k_proj", "in_proj.k"),
        *linear("self_attn.v_proj", "in_proj.v"),
        *conv("self_attn.q_conv1d", "conv.q"),
        *conv("self_attn.k_conv1d", "conv.k"),
        *conv("self_attn.v_conv1d", "conv.v"),
        *linear("self_attn.b_proj", "in_proj.beta"),
        *linear("self_attn.f_a_proj", "in_proj.f"),
        *linear("self_attn.f_b_proj", "decay_proj"),
        *linear("self_attn.g_a_proj", "in_proj.gate"),
        *linear("self_attn.g_b_proj", "gate_proj"),
        *same("self_attn.A_log", "A_log", shape=(1, 1, -1, 1)),
        *same("self_attn.dt_bias", "dt_bias", shape=(-1,)),
        *same("self_attn.o_norm.weight", "norm.weight"),
        *linear("self_attn.o_proj", "out_proj"),
      ],
      L.MLA: [
        *linear("self_attn.q_proj", "in_proj.q"),
        *linear("self_attn.kv_a_proj_with_mqa", "in_proj.c", "in_proj.r"),
        *same("self_attn.kv_a_layernorm.weight", "norm.weight"),
        *linear("self_attn.kv_b_proj", "up_proj"),
        *linear("self_attn.o_proj", "out_proj"),
      ],
      MLP: swiglu("mlp."),
      MixtureOfExperts: [
        *linear("block_sparse_moe.gate", "router"),
        *same("block_sparse_moe.gate.e_score_correction_bias", "selection_bias"),
        *experts("block_sparse_moe.experts.{expert}.w1.weight", "gate"),
        *experts("block_sparse_moe.experts.{expert}.w2.weight", "down"),
        *experts("block_sparse_moe.experts.{expert}.w3.weight", "up"),
        *swiglu("block_sparse_moe.shared_experts.", "shared."),
      ],
    },
  )


FAMILIES = (Family(("kimi_linear",), read, tables, NO_EFFECT),)
