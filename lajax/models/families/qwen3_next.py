"""Qwen3-Next: as Qwen 3.5, with other tensors and a rule for which layers have experts."""

import lajax.layers as L
from lajax.models.config import MLPConfig, ModelConfig
from lajax.models.families import qwen3_5
from lajax.models.families.options import Family, Options
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, conv, head, linear, same, swiglu


def read(c: Options) -> ModelConfig:
  c.one_of("use_sliding_window", [False], False)
  step, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers", None) or []
  is_sparse = lambda n: n not in dense and (n + 1) % step == 0
  mlp, moe = MLPConfig(c.get("intermediate_size")), qwen3_5.moe(c)
  mlps = [moe if is_sparse(n) else mlp for n in range(c.get("num_hidden_layers"))]
  return qwen3_5.hybrid(c, mlps, c.get("tie_word_embeddings", False))


def tables(c: Options) -> Tables:
  heads = c.get("linear_num_key_heads")
  names = ("in_proj.q", "in_proj.k", "in_proj.v", "in_proj.gate")
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
      L.GatedDeltaNet: [
        *linear("linear_attn.in_proj_qkvz", *names, groups=heads),
        *linear("linear_attn.in_proj_ba", "in_proj.beta", "in_proj.a", groups=heads),
        *conv("linear_attn.conv1d", "conv.q", "conv.k", "conv.v"),
        *same("linear_attn.A_log", "A_log"),
        *same("linear_attn.dt_bias", "dt_bias"),
        *same("linear_attn.norm.weight", "norm.weight"),
        *linear("linear_attn.out_proj", "out_proj"),
      ],
      L.SoftmaxAttention: qwen3_5.attention_rows(c),
      MLP: swiglu("mlp."),
      MixtureOfExperts: qwen3_5.moe_rows(),
    },
    other_parts={MixtureOfExperts: qwen3_5.moe_rows(stacked=True)},
    ignored=("mtp.",),
  )


FAMILIES = (Family(("qwen3_next",), read, tables),)
