"""OLMo-Hybrid: pre-norm Gated DeltaNet with negative eigenvalues and post-norm attention, 3:1."""

import dataclasses

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  NormConfig,
  ResidualConfig,
)
from lajax.models.families.options import Family, Options, layer_kinds, rope, words
from lajax.models.mlp import MLP
from lajax.models.tables import Tables, conv, head, linear, same, swiglu

NO_EFFECT = words(
  "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min"
)
# The tensors of a block's two norms, by its kind.
NORMS = {
  "linear": ("attention_layer_norm.weight", "feedforward_layer_norm.weight"),
  "attention": ("feedforward_layer_norm.weight", "post_feedforward_layernorm.weight"),
}


def _kinds(c: Options) -> list[str]:
  names = {"linear_attention": "linear", "full_attention": "attention"}
  return layer_kinds(c, names, lambda n: "attention" if n % 4 == 3 else "linear")


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  norm = NormConfig(c.get("rms_norm_eps", 1e-6))
  D, heads, K = c.get("hidden_size"), c.get("num_attention_heads"), c.get("linear_key_head_dim")
  has_positions = c.given.get("rope_parameters") is not None
  theta, _ = rope(c)
  delta = MixerConfig(
    L.GatedDeltaNet,
    {
      "num_heads": c.get("linear_num_key_heads"),
      "num_v_heads": c.get("linear_num_value_heads"),
      "head_dim": K,
      "expand_v": c.get("linear_value_head_dim") / K,
      "conv_size": c.get("linear_conv_kernel_dim", 4),
      "allow_negative_eigenvalues": c.get("linear_allow_neg_eigval", True),
      "norm_eps": 1e-5,  # the original's, whatever rms_norm_eps is
    },
  )
  attention = MixerConfig(
    L.SoftmaxAttention,
    {
      "num_heads": heads,
      "num_kv_heads": c.get("num_key_value_heads", heads),
      "head_dim": D // heads,
      "rope_theta": theta if has_positions else None,
      "qk_norm": True,
      "qk_norm_whole": True,
      "use_bias": c.get("attention_bias", False),
      "norm_eps": norm.eps,
    },
  )
  post = ResidualConfig("post")
  linear_block = BlockConfig((delta,), MLPConfig(c.get("intermediate_size")), norm)
  blocks = {
    "linear": linear_block,
    "attention": dataclasses.replace(
      linear_block, mixers=(attention,), mixer_residual=post, mlp_residual=post
    ),
  }
  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(blocks[kind] for kind in _kinds(c)),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def tables(c: Options) -> Tables:
  kinds = _kinds(c)

  def names(layer: int, name: str) -> str:
    mixer_norm, mlp_norm = NORMS[kinds[layer]]
    return {"mixer_norm": mixer_norm, "mlp_norm": mlp_norm}.get(name, name)

  return Tables(
    model=[
      *same("model.embed_tokens.weight", "embedding"),
      *same("model.norm.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[*same("mixer_norm", "mixer_norm.weight"), *same("mlp_norm", "mlp_norm.weight")],
    parts={
      L.GatedDeltaNet: [
        *linear("linear_attn.q_proj", "in_proj.q"),
        *linear("linear_attn.k_proj", "in_proj.k"),
        *linear("linear_attn.v_proj", "in_proj.v"),
        *linear("linear_attn.g_proj", "in_proj.gate"),
        *linear("linear_attn.b_proj", "in_proj.beta"),
        *linear("linear_attn.a_proj", "in_proj.a"),
        # transformers writes the joined convolutions as three equal parts, whatever q, k and v are
        *conv(tuple(f"linear_attn.{x}_conv1d" for x in "qkv"), "conv.q", "conv.k", "conv.v"),
        *same("linear_attn.A_log", "A_log"),
        *same("linear_attn.dt_bias", "dt_bias"),
        *same("linear_attn.o_norm.weight", "norm.weight"),
        *linear("linear_attn.o_proj", "out_proj"),
      ],
      L.SoftmaxAttention: [
        *linear("self_attn.q_proj", "in_proj.q"),
        *linear("self_attn.k_proj", "in_proj.k"),
        *linear("self_attn.v_proj", "in_proj.v"),
        *same("self_attn.q_norm.weight", "q_norm.weight"),
        *same("self_attn.k_norm.weight", "k_norm.weight"),
        *linear("self_attn.o_proj", "out_proj"),
      ],
      MLP: swiglu("mlp."),
    },
    names=names,
  )


FAMILIES = (Family(("olmo_hybrid",), read, tables, NO_EFFECT),)
