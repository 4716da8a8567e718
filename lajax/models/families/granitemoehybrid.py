"""Granite 4 H: Mamba-2 and attention, a shared MLP with or without experts beside it."""

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
  ResidualConfig,
)
from lajax.models.families.bamba import attention_rows, mamba2
from lajax.models.families.mamba2 import mamba2_rows
from lajax.models.families.options import Family, Options, layer_kinds, rope, words
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, experts, head, linear, same

NO_EFFECT = words("mamba_chunk_size mamba_expand init_method")


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("normalization_function", ["rmsnorm"], "rmsnorm")
  positions = c.one_of("position_embedding_type", ["rope", "nope", None], None)
  norm = NormConfig(c.get("rms_norm_eps", 1e-6))
  theta, fraction = rope(c)
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": D // heads,
      "rope_theta": theta if positions == "rope" else None,
      "rope_dim": int(D // heads * fraction) if positions == "rope" else None,
      "scale": c.get("attention_multiplier"),
      "use_bias": c.get("attention_bias", False),
    },
  )
  mixers = {"mamba": mamba2(c, norm.eps), "attention": attention}
  kinds = layer_kinds(
    c,
    {
      "mamba": "mamba",
      "linear_attention": "mamba",
      "attention": "attention",
      "full_attention": "attention",
    },
    lambda n: "mamba",
  )
  residual = ResidualConfig(beta=c.get("residual_multiplier", 1.0))
  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(BlockConfig((mixers[kind],), _mlp(c), norm, residual, residual) for kind in kinds),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
    embedding_multiplier=c.get("embedding_multiplier", 1.0),
    logits_multiplier=1 / c.get("logits_scaling", 1.0),
  )


def _mlp(c: Options) -> MLPConfig | MoEConfig:
  shared = MLPConfig(c.get("shared_intermediate_size"))
  width, count, chosen = (
    c.get("intermediate_size"),
    c.get("num_local_experts"),
    c.get("num_experts_per_tok"),
  )
  return MoEConfig(width, count, chosen, shared=shared) if count else shared


def tables(c: Options) -> Tables:
  shared = lambda module="": [
    *linear("shared_mlp.input_linear", f"{module}gate", f"{module}up"),
    *linear("shared_mlp.output_linear", f"{module}down"),
  ]
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
      L.Mamba2: mamba2_rows("mamba."),
      L.SoftmaxAttention: attention_rows("self_attn."),
      MLP: shared(),
      MixtureOfExperts: [
        *linear("block_sparse_moe.router.layer", "router"),
        *experts("block_sparse_moe.input_linear.weight", "gate", "up"),
        *experts("block_sparse_moe.output_linear.weight", "down"),
        *shared("shared."),
      ],
    },
  )


FAMILIES = (Family(("granitemoehybrid",), read, tables, NO_EFFECT),)
