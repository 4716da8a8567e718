"""Published architectures: one file each, found by the `model_type` of a config.json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lajax.models.config import ModelConfig
from lajax.models.families import (
  bailing_hybrid,
  bamba,
  falcon_h1,
  granitemoehybrid,
  jamba,
  kimi_linear,
  lfm2,
  mamba,
  mamba2,
  minimax,
  nemotron_h,
  olmo_hybrid,
  own,
  qwen3_5,
  qwen3_next,
  recurrent_gemma,
)
from lajax.models.families.options import Family, Options

FAMILIES: tuple[Family, ...] = (
  *qwen3_5.FAMILIES,
  *kimi_linear.FAMILIES,
  *nemotron_h.FAMILIES,
  *granitemoehybrid.FAMILIES,
  *bamba.FAMILIES,
  *mamba2.FAMILIES,
  *qwen3_next.FAMILIES,
  *minimax.FAMILIES,
  *recurrent_gemma.FAMILIES,
  *jamba.FAMILIES,
  *bailing_hybrid.FAMILIES,
  *olmo_hybrid.FAMILIES,
  *falcon_h1.FAMILIES,
  *lfm2.FAMILIES,
  *mamba.FAMILIES,
  *own.FAMILIES,
)
BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(published: Mapping[str, Any]) -> Family:
  """Returns the family of a config.json; ValueError if it is of none."""
  model_type = published.get("model_type")
  if model_type not in BY_MODEL_TYPE:
    known = ", ".join(sorted(BY_MODEL_TYPE))
    raise ValueError(f"`model_type` must be one of {known}; got {model_type!r}.")
  return BY_MODEL_TYPE[model_type]


def read_config(published: Mapping[str, Any]) -> ModelConfig:
  """Returns the config of a model as a config.json describes it.

  Raises:
    ValueError: an option is not understood, or has a value that is not implemented.
  """
  family = family_of(published)
  options = Options(published)
  config = family.read(options)
  options.finish(family.no_effect)
  if family in own.FAMILIES:
    return config
  return dataclasses.replace(config, published=json.dumps(published))


def published_config(config: ModelConfig) -> dict[str, Any]:
  """Returns the config.json that a config was read from, or one that spells it out."""
  return own.published(config) if config.published is None else json.loads(config.published)
