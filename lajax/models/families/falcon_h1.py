"""Falcon-H1: Mamba-2 and attention in parallel in every layer, with multipliers."""

import lajax.layers as L
from lajax.models.config import BlockConfig, MixerConfig, MLPConfig, ModelConfig, NormConfig
from lajax.models.families.bamba import attention_rows
from lajax.models.families.mamba2 import dt_limits, mamba2_rows
from lajax.models.families.options import Family, Options, rope, words
from lajax.models.mlp import MLP
from lajax.models.tables import Tables, head, same, swiglu

NO_EFFECT = words("mamba_chunk_size mamba_expand mlp_expansion_factor num_logits_to_keep")


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("attn_layer_indices", [None], None)
  c.one_of("mamba_use_mlp", [True], True)
  use_norm = c.get("mamba_rms_norm", False)
  c.one_of("mamba_norm_before_gate", [False] if use_norm else [False, True], False)
  norm = NormConfig(c.get("rms_norm_eps", 1e-5))
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  K = c.get("head_dim", None) or D // heads
  theta, fraction = rope(c, 100_000.0)
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": K,
      "rope_theta": theta,
      "rope_dim": int(K * fraction),
      "key_multiplier": c.get("key_multiplier", 1.0),
      "use_bias": c.get("attention_bias", False),
    },
    in_multiplier=c.get("attention_in_multiplier", 1.0),
    out_multiplier=c.get("attention_out_multiplier", 1.0),
  )
  M, width = c.get("mamba_n_heads"), c.get("mamba_d_head")
  c.one_of("mamba_d_ssm", [M * width], M * width)
  groups, use_bias = c.get("mamba_n_groups", 1), c.get("mamba_proj_bias", False)
  c.one_of("projectors_bias", [use_bias], use_bias)
  mamba = MixerConfig(
    L.Mamba2,
    {
      "num_heads": M,
      "head_dim": width,
      "state_dim": c.get("mamba_d_state"),
      "num_groups": groups,
      "conv_size": c.get("mamba_d_conv", 4),
      "conv_bias": c.get("mamba_conv_bias", True),
      "use_bias": use_bias,
      "use_norm": use_norm,
      "norm_groups": groups,
      "norm_eps": norm.eps,
      "dt_limits": dt_limits(c),
      "multipliers": c.get("ssm_multipliers", (1.0,) * 5),
    },
    in_multiplier=c.get("ssm_in_multiplier", 1.0),
    out_multiplier=c.get("ssm_out_multiplier", 1.0),
  )
  gate, down = c.get("mlp_multipliers", (1.0, 1.0))
  mlp = MLPConfig(
    c.get("intermediate_size"),
    use_bias=c.get("mlp_bias", False),
    gate_multiplier=gate,
    down_multiplier=down,
  )
  return ModelConfig(
    c.get("vocab_size"),
    D,
    (BlockConfig((mamba, attention), mlp, norm),) * c.get("num_hidden_layers"),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
    embedding_multiplier=c.get("embedding_multiplier", 1.0),
    logits_multiplier=c.get("lm_head_multiplier", 1.0),
  )


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
      L.Mamba2: mamba2_rows("mamba."),
      L.SoftmaxAttention: attention_rows("self_attn."),
      MLP: swiglu("feed_forward."),
    },
  )


FAMILIES = (Family(("falcon_h1",), read, tables, NO_EFFECT),)
