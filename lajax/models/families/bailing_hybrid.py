"""Ling 3: Kimi Delta Attention with a bounded decay, latent attention with positions, 5:1."""

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
from lajax.models.tables import Tables, conv, experts, head, linear, same, swiglu

# Layers of multi-token prediction are left out.
NO_EFFECT = words(
  "model_max_length mtp_loss_scaling_factor num_nextn_predict_layers pretraining_tp qk_head_dim"
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_bias", [False], False)
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("q_lora_rank", [None], None)
  norm = NormConfig(c.get("rms_norm_eps", 1e-6))
  heads = c.get("num_attention_heads")
  c.one_of("num_key_value_heads", [heads], heads)
  theta, _ = rope(c, 6_000_000.0)
  taps = c.get("short_conv_kernel_size", 4)
  width = c.get("head_dim", None)
  mixers = {
    "kda": MixerConfig(
      L.KimiDeltaAttention,
      {
        "num_heads": c.get("linear_num_heads", heads),
        "head_dim": c.get("linear_head_dim", width),
        "full_rank": True,
        "gate_bias": False,
        "lower_bound": c.get("kda_lower_bound") if c.get("kda_safe_gate") else None,
        "conv_size": c.get("linear_conv_kernel_dim", taps),
        "norm_eps": norm.eps,
      },
    ),
    "mla": MixerConfig(
      L.MLA,
      {
        "num_heads": heads,
        "head_dim": c.get("qk_nope_head_dim"),
        "rope_dim": c.get("qk_rope_head_dim"),
        "value_dim": c.get("v_head_dim"),
        "kv_rank": c.get("kv_lora_rank"),
        "rope_theta": theta,
        "rope_pairs": "neighbours",
        "head_gate": True,
        "norm_eps": 1e-6,
      },
    ),
  }
  group = c.get("layer_group_size", 6)
  kinds = layer_kinds(
    c,
    {"linear_attention": "kda", "full_attention": "mla"},
    lambda n: "mla" if (n + 1) % group == 0 else "kda",
  )
  first = c.get("first_k_dense_replace", 2)
  mlp_kinds = c.get("mlp_layer_types", None) or [
    "dense" if n < first else "sparse" for n in range(len(kinds))
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


def _moe(c: Options) -> MoEConfig:
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
      *same("model.word_embeddings.weight", "embedding"),
      *same("model.norm.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[
      *same("input_layernorm.weight", "mixer_norm.weight"),
      *same("post_attention_layernorm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.KimiDeltaAttention: [
        *linear("attention.q_proj", "in_proj.q"),
        *linear("attention.k_proj", "in_proj.k"),
        *linear("attention.v_proj", "in_proj.v"),
        *linear("attention.f_proj", "in_proj.f"),
        *linear("attention.g_proj", "in_proj.gate"),
        *linear("attention.b_proj", "in_proj.beta"),
        *conv("attention.q_conv1d", "conv.q"),
        *conv("attention.k_conv1d", "conv.k"),
        *conv("attention.v_conv1d", "conv.v"),
        *same("attention.A_log", "A_log"),
        *same("attention.dt_bias", "dt_bias", shape=(-1,)),
        *same("attention.o_norm.weight", "norm.weight"),
        *linear("attention.dense", "out_proj"),
      ],
      L.MLA: [
        *linear("attention.q_proj", "in_proj.q"),
        *linear("attention.kv_a_proj_with_mqa", "in_proj.c", "in_proj.r"),
        *same("attention.kv_a_layernorm.weight", "norm.weight"),
        *linear("attention.kv_b_proj", "up_proj"),
        *linear("attention.g_proj", "in_proj.gate"),
        *linear("attention.dense", "out_proj"),
      ],
      MLP: swiglu("mlp."),
      MixtureOfExperts: [
        *linear("mlp.gate", "router"),
        *same("mlp.gate.expert_bias", "selection_bias"),
        *experts("mlp.experts.{expert}.gate_proj.weight", "gate"),
        *experts("mlp.experts.{expert}.up_proj.weight", "up"),
        *experts("mlp.experts.{expert}.down_proj.weight", "down"),
        *swiglu("mlp.shared_experts.", "shared."),
      ],
    },
    ignored=("mtp.",),
  )


FAMILIES = (Family(("bailing_hybrid",), read, tables, NO_EFFECT),)
