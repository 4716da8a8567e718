"""Jamba: Mamba with norms inside and attention without positions, 7:1; experts in every other."""

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
)
from lajax.models.families.bamba import attention_rows
from lajax.models.families.mamba import mamba_rows
from lajax.models.families.options import Family, Options, words
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, experts, head, linear, same, swiglu

NO_EFFECT = words(
  """
  calc_logits_for_entire_prompt n_ctx num_logits_to_keep use_associative_scan use_mamba_kernels
  use_mambapy
  """
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("sliding_window", [None], None)
  c.one_of("mamba_inner_layernorms", [True], True)
  norm = NormConfig(c.get("rms_norm_eps", 1e-6))
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  mamba = MixerConfig(
    L.Mamba,
    {
      "inner_dim": c.get("mamba_expand", 2) * D,
      "state_dim": c.get("mamba_d_state", 16),
      "dt_rank": c.get("mamba_dt_rank"),
      "conv_size": c.get("mamba_d_conv", 4),
      "conv_bias": c.get("mamba_conv_bias", True),
      "use_bias": c.get("mamba_proj_bias", False),
      "inner_norm": True,
      "norm_eps": norm.eps,
    },
  )
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": D // heads,
    },
  )
  dense = MLPConfig(c.get("intermediate_size"))
  count, chosen = c.get("num_experts", 16), c.get("num_experts_per_tok", 2)
  moe = MoEConfig(dense.width, count, chosen, normalize=False) if count > 1 else dense
  is_attention = _every(c.get("attn_layer_period", 8), c.get("attn_layer_offset", 4))
  is_moe = _every(c.get("expert_layer_period", 2), c.get("expert_layer_offset", 1))
  blocks = [
    BlockConfig((attention if is_attention(n) else mamba,), moe if is_moe(n) else dense, norm)
    for n in range(c.get("num_hidden_layers"))
  ]
  return ModelConfig(
    c.get("vocab_size"), D, tuple(blocks), norm, tied_head=c.get("tie_word_embeddings", False)
  )


def _every(period: int, offset: int):
  return lambda n: n % period == offset


def tables(c: Options) -> Tables:
  return Tables(
    model=[
      *same("model.embed_tokens.weight", "embedding"),
      *same("model.final_layernorm.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[
      *same("input_layernorm.weight", "mixer_norm.weight"),
      *same("pre_ff_layernorm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.Mamba: [
        *mamba_rows("mamba."),
        *same("mamba.dt_layernorm.weight", "dt_norm.weight"),
        *same("mamba.b_layernorm.weight", "B_norm.weight"),
        *same("mamba.c_layernorm.weight", "C_norm.weight"),
      ],
      L.SoftmaxAttention: attention_rows("self_attn."),
      MLP: swiglu("feed_forward."),
      MixtureOfExperts: [
        *linear("feed_forward.router", "router"),
        *experts("feed_forward.experts.{expert}.gate_proj.weight", "gate"),
        *experts("feed_forward.experts.{expert}.up_proj.weight", "up"),
        *experts("feed_forward.experts.{expert}.down_proj.weight", "down"),
      ],
    },
  )


FAMILIES = (Family(("jamba",), read, tables, NO_EFFECT),)
