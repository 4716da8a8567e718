"""Published architectures: one file each, found by the `model_type` of a config.json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lajax.models.config import ModelConfig
from lajax.models.families import qwen3_5
from lajax.models.families.options import Family, Options

FAMILIES: tuple[Family, ...] = (*qwen3_5.FAMILIES,)
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
  return dataclasses.replace(config, published=json.dumps(published))
