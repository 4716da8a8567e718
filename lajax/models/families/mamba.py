"""Mamba and Falcon-Mamba: the selective state space as a whole model."""

from collections.abc import Sequence

import lajax.layers as L
from lajax.models.config import BlockConfig, MixerConfig, ModelConfig, NormConfig
from lajax.models.families.options import Family, Options, words
from lajax.models.tables import Row, Tables, conv, head, linear, same

# `expand` only gives a default of `intermediate_size`; the others are of initial parameters, of
# kernels, and of the dtype of the residual stream, which is float32 in a float32 model anyway.
NO_EFFECT = words(
  """
  expand d_inner d_model n_layer fused_add_norm pad_vocab_size_multiple rescale_prenorm_residual
  residual_in_fp32 ssm_cfg time_step_floor time_step_init_scheme time_step_max time_step_min
  time_step_scale use_associative_scan use_mambapy use_falcon_mambapy
  """
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("rms_norm", [True], True)
  is_falcon = c.get("model_type") == "falcon_mamba"
  norm = NormConfig(c.get("layer_norm_epsilon", 1e-5))
  D = c.get("hidden_size")
  options = {
    "inner_dim": c.get("intermediate_size", 2 * D),
    "state_dim": c.get("state_size", 16),
    "dt_rank": c.get("time_step_rank"),
    "conv_size": c.get("conv_kernel", 4),
    "conv_bias": c.get("use_conv_bias", True),
    "use_bias": c.get("use_bias", False),
  }
  if is_falcon:
    eps = c.get("mixer_rms_eps", 1e-6)
    options |= {"inner_norm": True, "inner_norm_weight": False, "norm_eps": eps}
  return ModelConfig(
    c.get("vocab_size"),
    D,
    (BlockConfig((MixerConfig(L.Mamba, options),), None, norm),) * c.get("num_hidden_layers"),
    norm,
    tied_head=c.get("tie_word_embeddings", True),
  )


def mamba_rows(prefix: str) -> Sequence[Row]:
  """Rows of a Mamba mixer whose tensors have the usual names."""
  return [
    *linear(f"{prefix}in_proj", "in_proj.u", "in_proj.z"),
    *conv(f"{prefix}conv1d", "conv.u"),
    *linear(f"{prefix}x_proj", "x_proj"),
    *linear(f"{prefix}dt_proj", "dt_proj"),
    *same(f"{prefix}dt_proj.bias", "dt_bias"),
    *same(f"{prefix}A_log", "A_log"),
    *same(f"{prefix}D", "D"),
    *linear(f"{prefix}out_proj", "out_proj"),
  ]


def tables(c: Options) -> Tables:
  return Tables(
    model=[
      *same("backbone.embeddings.weight", "embedding"),
      *same("backbone.norm_f.weight", "norm.weight"),
      *head("lm_head.weight"),
    ],
    block=same("norm.weight", "mixer_norm.weight"),
    parts={L.Mamba: mamba_rows("mixer.")},
    prefix="backbone.layers.{layer}.",
  )


FAMILIES = (Family(("mamba", "falcon_mamba"), read, tables, NO_EFFECT),)
