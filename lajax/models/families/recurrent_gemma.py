"""RecurrentGemma (Griffin): RG-LRU blocks and sliding-window multi-query attention, 2:1."""

import lajax.layers as L
from lajax.models.config import BlockConfig, MixerConfig, MLPConfig, ModelConfig, NormConfig
from lajax.models.families.options import Family, Options, bfloat16, rope, words
from lajax.models.mlp import MLP
from lajax.models.tables import Tables, conv, linear, same, swiglu

NO_EFFECT = words("w_init_variance_scale final_w_init_variance_scale")


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_activation", ["gelu_pytorch_tanh"], "gelu_pytorch_tanh")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("embeddings_scale_by_sqrt_dim", [True], True)
  norm = NormConfig(c.get("rms_norm_eps", 1e-6), unit_offset=True)
  D, heads = c.get("hidden_size"), c.get("num_attention_heads")
  K = c.get("head_dim", D // heads)
  theta, fraction = rope(c, fraction=0.5)
  mixers = {
    "recurrent": MixerConfig(
      L.GriffinBlock,
      {
        "lru_width": c.get("lru_width", None) or D,
        "num_blocks": heads,
        "conv_size": c.get("conv1d_width", 4),
        "use_bias": True,
      },
    ),
    "attention": MixerConfig(
      L.SoftmaxAttention,
      {
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads", heads),
        "head_dim": K,
        "window": c.get("attention_window_size", 2048),
        "rope_theta": theta,
        "rope_dim": int(K * fraction),
        "use_bias": c.get("attention_bias", False),
        "out_bias": True,
      },
    ),
  }
  old = c.get("_block_types", ("recurrent", "recurrent", "attention"))
  pattern = c.get("block_types", None) or old
  mlp = MLPConfig(c.get("intermediate_size") // 2, "gelu_tanh", use_bias=True)
  blocks = [
    BlockConfig((mixers[pattern[n % len(pattern)]],), mlp, norm)
    for n in range(c.get("num_hidden_layers"))
  ]
  return ModelConfig(
    c.get("vocab_size"),
    D,
    tuple(blocks),
    norm,
    tied_head=c.one_of("tie_word_embeddings", [True], True),
    embedding_multiplier=bfloat16(D**0.5),
    soft_cap=c.get("logits_soft_cap", 30.0),
  )


def tables(c: Options) -> Tables:
  block = "temporal_block."
  gates = (f"{block}rg_lru.recurrent_gate_weight", f"{block}rg_lru.input_gate_weight")
  biases = (f"{block}rg_lru.recurrent_gate_bias", f"{block}rg_lru.input_gate_bias")
  return Tables(
    model=[
      *same("model.embed_tokens.weight", "embedding"),
      *same("model.final_norm.weight", "norm.weight"),
    ],
    block=[
      *same("temporal_pre_norm.weight", "mixer_norm.weight"),
      *same("channel_pre_norm.weight", "mlp_norm.weight"),
    ],
    parts={
      L.GriffinBlock: [
        *linear(f"{block}linear_x", "in_proj.u"),
        *linear(f"{block}linear_y", "in_proj.gate"),
        *linear(f"{block}linear_out", "out_proj"),
        *conv(f"{block}conv_1d", "conv.u"),
        *same(gates, "rglru.gates"),
        *same(biases, "rglru.gates_bias"),
        *same(f"{block}rg_lru.recurrent_param", "rglru.Lambda"),
      ],
      L.SoftmaxAttention: [
        *linear(f"{block}q_proj", "in_proj.q"),
        *linear(f"{block}k_proj", "in_proj.k"),
        *linear(f"{block}v_proj", "in_proj.v"),
        *linear(f"{block}o_proj", "out_proj"),
      ],
      MLP: swiglu("mlp_block."),
    },
  )


FAMILIES = (Family(("recurrent_gemma",), read, tables, NO_EFFECT),)
