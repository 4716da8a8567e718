"""Models of one's own: a config.json that spells out a `ModelConfig`, tensors named by path."""

import dataclasses
from typing import Any

import lajax.layers as L
from lajax.models import config as configs
from lajax.models.config import MixerConfig, ModelConfig
from lajax.models.families.options import Family, Options
from lajax.models.tables import Tables, head, same

MODEL_TYPE = "lajax"
CLASSES = {
  c.__name__: c
  for c in vars(configs).values()
  if isinstance(c, type) and dataclasses.is_dataclass(c)
}


def published(config: ModelConfig) -> dict[str, Any]:
  """Returns the config.json of a config."""
  return {"model_type": MODEL_TYPE, "model": _written(dataclasses.replace(config, published=None))}


def _written(x: Any) -> Any:
  """Returns a value as JSON has it: a dataclass is a dict that names its class."""
  if isinstance(x, MixerConfig) and getattr(L, x.layer.__name__, None) is not x.layer:
    raise ValueError(f"`layer` must be a class of lajax.layers to be written; got {x.layer!r}.")
  if dataclasses.is_dataclass(x):
    fields = {f.name: _written(getattr(x, f.name)) for f in dataclasses.fields(x)}
    return {"class": type(x).__name__, **fields}
  if isinstance(x, type):
    return x.__name__
  return [_written(y) for y in x] if isinstance(x, tuple | list) else x


def _read(x: Any) -> Any:
  if isinstance(x, list):
    return tuple(_read(y) for y in x)
  if not isinstance(x, dict):
    return x
  fields = {name: _read(value) for name, value in x.items() if name != "class"}
  if x.get("class") not in CLASSES:
    raise ValueError(f"`class` must be one of {', '.join(CLASSES)}; got {x.get('class')!r}.")
  if "layer" in fields:
    fields["layer"] = getattr(L, fields["layer"], None)
  return CLASSES[x["class"]](**fields)


def read(c: Options) -> ModelConfig:
  return _read(c.get("model"))


def tables(c: Options) -> Tables:
  return Tables(
    model=[*same("embedding", "embedding"), *same("norm.weight", "norm.weight"), *head("head")],
    block=(),
    parts=None,
    prefix="layers.{layer}.",
  )


FAMILIES = (Family((MODEL_TYPE,), read, tables),)
