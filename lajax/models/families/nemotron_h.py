"""Nemotron-H and Nemotron 3: Mamba-2, attention, MLP and mixture of experts, each its own layer."""

import math

import lajax.layers as L
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
)
from lajax.models.families.mamba2 import dt_limits, mamba2_rows
from lajax.models.families.options import Family, Options, words
from lajax.models.mlp import MLP
from lajax.models.moe import MixtureOfExperts
from lajax.models.tables import Tables, experts, head, linear, same

# There are no positions, so the options of rotary positions have no effect.
NO_EFFECT = words(
  """
  chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layers_block_type
  num_logits_to_keep num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual
  residual_in_fp32 rope_theta time_step_floor time_step_max time_step_rank use_mamba_kernels
  mtp_hybrid_override_pattern
  """
)
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


def read(c: Options) -> ModelConfig:
  c.one_of("mlp_hidden_act", ["relu2"], "relu2")
  c.one_of("mamba_hidden_act", ["silu"], "silu")
  c.one_of("attention_dropout", [0.0], 0.0)
  c.one_of("hidden_dropout", [0.0], 0.0)
  c.one_of("sliding_window", [None], None)
  eps = c.get("layer_norm_epsilon", 1e-5)
  c.one_of("norm_eps", [eps], eps)
  c.one_of("rms_norm_eps", [eps], eps)
  states, groups = c.get("ssm_state_size"), c.get("n_groups", 1)
  c.one_of("mamba_d_state", [states], states)  # second names of these two
  c.one_of("mamba_state_dim", [states], states)
  c.one_of("mamba_num_groups", [groups], groups)
  norm = NormConfig(eps)
  kinds = _kinds(c)
  use_bias = c.get("use_bias", False)
  mixers = {
    "mamba": MixerConfig(
      L.Mamba2,
      {
        "num_heads": c.get("mamba_num_heads"),
        "head_dim": c.get("mamba_head_dim"),
        "state_dim": states,
        "num_groups": groups,
        "conv_size": c.get("conv_kernel", 4),
        "conv_bias": c.get("use_conv_bias", True),
        "use_bias": c.get("mamba_proj_bias", use_bias),
        "norm_groups": groups,
        "norm_eps": eps,
        "dt_limits": _dt_limits(c),
      },
    ),
    "attention": MixerConfig(
      L.SoftmaxAttention,
      {
        "num_heads": c.get("num_attention_heads"),
        "num_kv_heads": c.get("num_key_value_heads"),
        "head_dim": c.get("head_dim", c.get("attention_head_dim", 128)),
        "use_bias": c.get("attention_bias", False),
      },
    ),
  }
  dense = MLPConfig(
    c.get("intermediate_size"), "relu2", gated=False, use_bias=c.get("mlp_bias", False)
  )
  mlps = {"mlp": dense, "moe": _moe(c) if "moe" in kinds else None}
  return ModelConfig(
    c.get("vocab_size"),
    c.get("hidden_size"),
    tuple(
      BlockConfig((mixers[kind],) if kind in mixers else (), mlps.get(kind), norm) for kind in kinds
    ),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def _kinds(c: Options) -> list[str]:
  """Returns the kind of each layer, from a string of letters or a list of words."""
  letters = c.get("hybrid_override_pattern", None)
  if letters is not None:
    kinds = [LETTERS[letter] for letter in letters]
  else:
    kinds = [WORDS.get(word, word) for word in c.get("layers_block_type")]
  unknown = set(kinds) - set(LETTERS.values())
  if unknown:
    raise ValueError(f"`layers_block_type` has kinds that are not implemented: {sorted(unknown)}.")
  c.one_of("num_hidden_layers", [len(kinds)], len(kinds))
  return kinds


def _dt_limits(c: Options) -> tuple[float, float]:
  """The step size is at least `time_step_min`, in decoding too (the original leaves it out)."""
  low, high = dt_limits(c) or (0.0, math.inf)
  return (max(low, c.get("time_step_min", 0.001)), high)


def _moe(c: Options) -> MoEConfig:
  shared = c.get("n_shared_experts", 1) * c.get("moe_shared_expert_intermediate_size")
  return MoEConfig(
    c.get("moe_intermediate_size"),
    c.get("n_routed_experts"),
    c.get("num_experts_per_tok"),
    activation="relu2",
    gated=False,
    router="sigmoid",
    selection_bias=True,
    num_groups=c.get("n_group", 1),
    top_groups=c.get("topk_group", 1),
    normalize=c.get("norm_topk_prob", True),
    scale=c.get("routed_scaling_factor", 1.0),
    shared=MLPConfig(shared, "relu2", gated=False),
    latent=c.get("moe_latent_size", None),
  )


def tables(c: Options) -> Tables:
  return Tables(
    model=[
      *same("backbone.embeddings.weight", "embedding"),
      *same("backbone.norm_f.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=[*same("norm.weight", "mixer_norm.weight"), *same("norm.weight", "mlp_norm.weight")],
    parts={
      L.Mamba2: mamba2_rows("mixer."),
      L.SoftmaxAttention: [
        *linear("mixer.q_proj", "in_proj.q"),
        *linear("mixer.k_proj", "in_proj.k"),
        *linear("mixer.v_proj", "in_proj.v"),
        *linear("mixer.o_proj", "out_proj"),
      ],
      MLP: [*linear("mixer.up_proj", "up"), *linear("mixer.down_proj", "down")],
      MixtureOfExperts: [
        *linear("mixer.gate", "router"),
        *same("mixer.gate.e_score_correction_bias", "selection_bias"),
        *experts("mixer.experts.{expert}.up_proj.weight", "up"),
        *experts("mixer.experts.{expert}.down_proj.weight", "down"),
        *linear("mixer.shared_experts.up_proj", "shared.up"),
        *linear("mixer.shared_experts.down_proj", "shared.down"),
        *linear("mixer.fc1_latent_proj", "latent_in"),
        *linear("mixer.fc2_latent_proj", "latent_out"),
      ],
    },
    prefix="backbone.layers.{layer}.",
    ignored=("mtp.",),
  )


FAMILIES = (Family(("nemotron_h",), read, tables, NO_EFFECT),)
