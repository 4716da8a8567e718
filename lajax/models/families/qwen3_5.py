"""Qwen 3.5, 3.6 and 3.8, dense and mixture of experts: Gated DeltaNet and gated attention, 3:1.

The text model alone: tensors of the vision tower and of multi-token prediction are left out.
"""

from collections.abc import Sequence

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
from lajax.models.tables import Row, Tables, conv, experts, head, linear, same, swiglu

NO_EFFECT = words(
  """
  image_token_id video_token_id vision_start_token_id vision_end_token_id vision_config
  language_model_only mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype
  """
)


def _text(c: Options) -> Options:
  """Returns the options of the text model."""
  return c.inside("text_config") or c


def read(c: Options) -> ModelConfig:
  outer, c = c, _text(c)
  tied = c.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
  mlp = moe(c) if "num_experts" in c.given else MLPConfig(c.get("intermediate_size"))
  c.one_of("mlp_only_layers", [[]], [])
  return hybrid(c, [mlp] * c.get("num_hidden_layers"), tied)


def hybrid(c: Options, mlps: Sequence[MLPConfig | MoEConfig], tied: bool) -> ModelConfig:
  """Returns the config of Gated DeltaNet and gated attention with these MLPs."""
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("attn_output_gate", [True], True)
  c.one_of("output_gate_type", ["swish", "silu"], "swish")  # of Gated DeltaNet
  norm = NormConfig(c.get("rms_norm_eps", 1e-6), unit_offset=True)
  heads, K = c.get("linear_num_key_heads"), c.get("linear_key_head_dim")
  delta = MixerConfig(
    L.GatedDeltaNet,
    {
      "num_heads": heads,
      "num_v_heads": c.get("linear_num_value_heads"),
      "head_dim": K,
      "expand_v": c.get("linear_value_head_dim") / K,
      "conv_size": c.get("linear_conv_kernel_dim", 4),
      "norm_eps": norm.eps,
    },
  )
  theta, fraction = rope(c, 10_000_000.0, 0.25)
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": c.get("num_attention_heads"),
      "num_kv_heads": c.get("num_key_value_heads"),
      "head_dim": c.get("head_dim"),
      "rope_theta": theta,
      "rope_dim": int(c.get("head_dim") * fraction),
      "qk_norm": True,
      "qk_norm_offset": True,
      "output_gate": True,
      "use_bias": c.get("attention_bias", False),
      "norm_eps": norm.eps,
    },
  )
  every = c.get("full_attention_interval", 4)
  kinds = layer_kinds(
    c,
    {"linear_attention": "linear", "full_attention": "full"},
    lambda n: "full" if (n + 1) % every == 0 else "linear",
  )
  mixers = {"linear": delta, "full": attention}
  return ModelConfig(
    c.get("vocab_size"),
    c.get("hidden_size"),
    tuple(BlockConfig((mixers[kind],), mlp, norm) for kind, mlp in zip(kinds, mlps, strict=True)),
    norm,
    tied_head=tied,
  )


def moe(c: Options) -> MoEConfig:
  return MoEConfig(
    c.get("moe_intermediate_size"),
    c.get("num_experts"),
    c.get("num_experts_per_tok"),
    normalize=c.get("norm_topk_prob", True),
    shared=MLPConfig(c.get("shared_expert_intermediate_size")),
    shared_gate=True,
  )


def tables(c: Options) -> Tables:
  prefix = "model." if _text(c) is c else "model.language_model."
  return Tables(
    model=[
      *same(f"{prefix}embed_tokens.weight", "embedding"),
      *same(f"{prefix}norm.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[
      *same("input_layernorm.weight", "mixer_norm.weight"),
      *same("post_attention_layernorm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.GatedDeltaNet: [
        *linear("linear_attn.in_proj_qkv", "in_proj.q", "in_proj.k", "in_proj.v"),
        *linear("linear_attn.in_proj_z", "in_proj.gate"),
        *linear("linear_attn.in_proj_b", "in_proj.beta"),
        *linear("linear_attn.in_proj_a", "in_proj.a"),
        *conv("linear_attn.conv1d", "conv.q", "conv.k", "conv.v"),
        *same("linear_attn.A_log", "A_log"),
        *same("linear_attn.dt_bias", "dt_bias"),
        *same("linear_attn.norm.weight", "norm.weight"),
        *linear("linear_attn.out_proj", "out_proj"),
      ],
      L.SoftmaxAttention: attention_rows(_text(c)),
      MLP: swiglu("mlp."),
      MixtureOfExperts: moe_rows(),
    },
    other_parts={MixtureOfExperts: moe_rows(stacked=True)},
    prefix=prefix + "layers.{layer}.",
    ignored=("model.visual.", "visual.", "mtp."),
  )


def attention_rows(c: Options) -> Sequence[Row]:
  """Rows of gated attention, whose queries and gates are joined head by head."""
  return [
    *linear("self_attn.q_proj", "in_proj.q", "in_proj.gate", groups=c.get("num_attention_heads")),
    *linear("self_attn.k_proj", "in_proj.k"),
    *linear("self_attn.v_proj", "in_proj.v"),
    *same("self_attn.q_norm.weight", "q_norm.weight"),
    *same("self_attn.k_norm.weight", "k_norm.weight"),
    *linear("self_attn.o_proj", "out_proj"),
  ]


def moe_rows(stacked: bool = False) -> Sequence[Row]:
  """Rows of a mixture of experts with a gated shared MLP.

  Transformers writes three matrices per expert. The published Qwen 3.5 and 3.6 files have `stacked`
  ones: two tensors for all experts of a layer.
  """
  one = [
    *experts("mlp.experts.{expert}.gate_proj.weight", "gate"),
    *experts("mlp.experts.{expert}.up_proj.weight", "up"),
    *experts("mlp.experts.{expert}.down_proj.weight", "down"),
  ]
  all_ = [
    *experts("mlp.experts.gate_up_proj", "gate", "up"),
    *experts("mlp.experts.down_proj", "down"),
  ]
  return [
    *linear("mlp.gate", "router"),
    *(all_ if stacked else one),
    *swiglu("mlp.shared_expert.", "shared."),
    *linear("mlp.shared_expert_gate", "shared_gate"),
  ]


FAMILIES = (
  Family(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), read, tables, NO_EFFECT),
)
