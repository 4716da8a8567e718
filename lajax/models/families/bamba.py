"""Bamba: Mamba-2 and grouped-query attention with rotary positions on part of a head."""

from collections.abc import Sequence

import lajax.layers as L
from lajax.models.config import BlockConfig, MixerConfig, MLPConfig, ModelConfig, NormConfig
from lajax.models.families.mamba2 import dt_limits, mamba2_rows
from lajax.models.families.options import Family, Options, layer_kinds, rope, words
from lajax.models.mlp import MLP
from lajax.models.tables import Row, Tables, head, linear, same, swiglu

NO_EFFECT = words(
  """
  mamba_chunk_size mamba_dt_rank mamba_expand num_logits_to_keep use_mamba_kernels
  z_loss_coefficient
  """
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  norm = NormConfig(c.get("rms_norm_eps", 1e-5))
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  theta, fraction = rope(c, fraction=0.5)
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": D // heads,
      "rope_theta": theta,
      "rope_dim": c.get("attn_rotary_emb", int(D // heads * fraction)),
      "use_bias": c.get("attention_bias", False),
    },
  )
  mixers = {"mamba": mamba2(c, norm.eps), "attention": attention}
  full = c.get("attn_layer_indices", None) or []
  names = {"linear_attention": "mamba", "full_attention": "attention"}
  kinds = layer_kinds(c, names, lambda n: "attention" if n in full else "mamba")
  mlp = MLPConfig(c.get("intermediate_size"), use_bias=c.get("mlp_bias", False))
  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(BlockConfig((mixers[kind],), mlp, norm) for kind in kinds),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def mamba2(c: Options, eps: float) -> MixerConfig:
  """Returns the mixer of the options `mamba_...`, whose norm is over all channels together."""
  return MixerConfig(
    L.Mamba2,
    {
      "num_heads": c.get("mamba_n_heads"),
      "head_dim": c.get("mamba_d_head"),
      "state_dim": c.get("mamba_d_state"),
      "num_groups": c.get("mamba_n_groups", 1),
      "conv_size": c.get("mamba_d_conv", 4),
      "conv_bias": c.get("mamba_conv_bias", True),
      "use_bias": c.get("mamba_proj_bias", False),
      "norm_groups": 1,
      "norm_eps": eps,
      "dt_limits": dt_limits(c),
    },
  )


def attention_rows(prefix: str) -> Sequence[Row]:
  """Rows of softmax attention whose projections have the usual names."""
  return [
    *linear(f"{prefix}q_proj", "in_proj.q"),
    *linear(f"{prefix}k_proj", "in_proj.k"),
    *linear(f"{prefix}v_proj", "in_proj.v"),
    *linear(f"{prefix}o_proj", "out_proj"),
  ]


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


FAMILIES = (Family(("bamba",), read, tables, NO_EFFECT),)
