"""Reading of a config.json: every option is understood, or known to have no effect, or an error."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lajax.models.config import ModelConfig
from lajax.models.tables import Tables

REQUIRED: Any = object()  # default of an option that must be given


def words(text: str) -> frozenset[str]:
  """Returns the words of a text: names of options."""
  return frozenset(text.split())


# Options without effect on the numbers of a text model, in every family: names, ids of tokens, how
# a model was initialised or trained, what a call returns, and sizes of tables that are not stored.
NO_EFFECT = words(
  """
  architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype initializer_range
  transformers_version use_cache max_position_embeddings model_type output_router_logits
  router_aux_loss_coef tokenizer_class _name_or_path output_attentions output_hidden_states
  return_dict _attn_implementation_autoset use_return_dict torchscript use_bfloat16 pruned_heads
  is_decoder is_encoder_decoder add_cross_attention chunk_size_feed_forward id2label label2id
  problem_type finetuning_task task_specific_params prefix sep_token_id decoder_start_token_id
  """
)


class Options:
  """The options of a config.json, or of a dict inside it; remembers which were read.

  Args:
    given: the dict.
    path: what messages call it, "text_config." for a nested one.
  """

  def __init__(self, given: Mapping[str, Any], path: str = ""):
    self.given, self.path = given, path
    self.read: set[str] = set()
    self.nested: list[Options] = []

  def get(self, name: str, default: Any = REQUIRED) -> Any:
    """Returns an option; its default where it is absent."""
    self.read.add(name)
    if name in self.given:
      return self.given[name]
    if default is REQUIRED:
      raise ValueError(f"config.json must have the option `{self.path}{name}`; it has none.")
    return default

  def one_of(self, name: str, allowed: Iterable[Any], default: Any = REQUIRED) -> Any:
    """Returns an option; ValueError where its value is none of those that are implemented."""
    value, allowed = self.get(name, default), list(allowed)
    if value not in allowed:
      known = " or ".join(map(repr, allowed))
      raise ValueError(
        f"the option `{self.path}{name}` of config.json is implemented for {known}; got {value!r}."
      )
    return value

  def inside(self, name: str) -> "Options | None":
    """Returns the options of a nested dict; None where it is absent or null."""
    value = self.get(name, None)
    if value is None:
      return None
    if not isinstance(value, Mapping):
      raise ValueError(f"the option `{self.path}{name}` must be a dict; got {value!r}.")
    self.nested.append(Options(value, f"{self.path}{name}."))
    return self.nested[-1]

  def finish(self, no_effect: Iterable[str] = ()) -> None:
    """ValueError that names the options which were not read and may have an effect."""
    allowed = NO_EFFECT | set(no_effect)
    unread = [
      options.path + name
      for options in (self, *self._all_nested())
      for name in options.given
      if name not in options.read and name not in allowed
    ]
    if unread:
      raise ValueError(
        f"config.json has options that this family does not know: {', '.join(unread)}. "
        "They may change the numbers; remove those that do not."
      )

  def _all_nested(self):
    for options in self.nested:
      yield options
      yield from options._all_nested()


@dataclasses.dataclass(frozen=True)
class Family:
  """A published architecture.

  Attributes:
    model_types: values of `model_type` in its config.json.
    read: makes the config of a model from the options.
    tables: makes the table of tensors from the options.
    no_effect: options that change no number of a text model, beside `NO_EFFECT`.
  """

  model_types: tuple[str, ...]
  read: Callable[[Options], ModelConfig]
  tables: Callable[[Options], Tables]
  no_effect: frozenset[str] = frozenset()


# --- options that many families share -------------------------------------------------------------


def layer_kinds(c: Options, names: Mapping[str, str], otherwise: Callable[[int], str]) -> list[str]:
  """Returns the kind of each layer: `layer_types`, translated by `names`, or a rule of its number.

  Args:
    c: the options, with `num_hidden_layers`.
    names: from the words of `layer_types` to kinds.
    otherwise: gives the kind of layer number n where `layer_types` is absent.
  """
  count = c.get("num_hidden_layers")
  given = c.get("layer_types", None)
  if given is None:
    return [otherwise(n) for n in range(count)]
  if len(given) != count or not set(given) <= set(names):
    raise ValueError(
      f"`{c.path}layer_types` must be {count} words of {', '.join(names)}; got {given}."
    )
  return [names[word] for word in given]


def rope(c: Options, theta: float = 10_000.0, fraction: float = 1.0) -> tuple[float, float]:
  """Returns the base of rotary positions, and the fraction of a head's channels that they turn.

  Args:
    c: the options; `rope_parameters` in new files, `rope_theta` and `partial_rotary_factor` in old
      ones.
    theta, fraction: where they are absent.
  """
  theta, fraction = c.get("rope_theta", theta), c.get("partial_rotary_factor", fraction)
  c.one_of("rope_scaling", [None], None)
  inside = c.inside("rope_parameters")
  if inside is not None:
    inside.one_of("rope_type", ["default"], "default")
    inside.read |= {"mrope_section", "mrope_interleaved"}  # for positions of images
    theta = inside.get("rope_theta", theta)
    fraction = inside.get("partial_rotary_factor", fraction)
  return float(theta), float(fraction)


def bfloat16(x: float) -> float:
  """Returns a number rounded to bfloat16."""
  return float(np.asarray(x, jnp.bfloat16))
