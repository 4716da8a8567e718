"""Mamba-2 as a whole model, and what other families share with its mixer."""

import math
from collections.abc import Sequence

import lajax.layers as L
from lajax.models.config import BlockConfig, MixerConfig, ModelConfig, NormConfig
from lajax.models.families.options import Family, Options, words
from lajax.models.tables import Row, Tables, conv, head, linear, same

NO_EFFECT = words(
  """
  chunk_size residual_in_fp32 rescale_prenorm_residual time_step_rank time_step_min time_step_max
  time_step_floor intermediate_size
  """
)


def read(c: Options) -> ModelConfig:
  c.one_of("hidden_act", ["silu"], "silu")
  c.one_of("rms_norm", [True], True)
  norm = NormConfig(c.get("layer_norm_epsilon", 1e-5))
  D, heads, width = c.get("hidden_size"), c.get("num_heads"), c.get("head_dim")
  c.one_of("expand", [heads * width / D], 2)
  groups = c.get("n_groups", 1)
  mixer = MixerConfig(
    L.Mamba2,
    {
      "num_heads": heads,
      "head_dim": width,
      "state_dim": c.get("state_size"),
      "num_groups": groups,
      "conv_size": c.get("conv_kernel", 4),
      "conv_bias": c.get("use_conv_bias", True),
      "use_bias": c.get("use_bias", False),
      "norm_groups": groups,
      "norm_eps": norm.eps,
      "dt_limits": dt_limits(c),
    },
  )
  return ModelConfig(
    c.get("vocab_size"),
    D,
    (BlockConfig((mixer,), None, norm),) * c.get("num_hidden_layers"),
    norm,
    tied_head=c.get("tie_word_embeddings", False),
  )


def dt_limits(c: Options) -> tuple[float, float] | None:
  """Returns the bounds of the step size; None where they bound nothing."""
  low, high = (_number(x) for x in c.get("time_step_limit", (0.0, math.inf)))
  return None if low <= 0 and high >= 1e38 else (low, high)


def _number(x) -> float:
  """Returns a number of a config.json, where infinity is also written {"__float__": "Infinity"}."""
  return float(x["__float__"] if isinstance(x, dict) else x)


def mamba2_rows(prefix: str) -> Sequence[Row]:
  """Rows of a Mamba-2 mixer whose tensors have the usual names."""
  return [
    *linear(f"{prefix}in_proj", *(f"in_proj.{name}" for name in ("z", "u", "B", "C", "dt"))),
    *conv(f"{prefix}conv1d", "conv.u", "conv.B", "conv.C"),
    *same(f"{prefix}A_log", "A_log"),
    *same(f"{prefix}D", "D"),
    *same(f"{prefix}dt_bias", "dt_bias"),
    *same(f"{prefix}norm.weight", "norm.weight"),
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
    parts={L.Mamba2: mamba2_rows("mixer.")},
    prefix="backbone.layers.{layer}.",
  )


FAMILIES = (Family(("mamba2",), read, tables, NO_EFFECT),)
