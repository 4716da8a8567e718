"""Configs of language models: frozen dataclasses that say what every layer of a model is.

A `ModelConfig` holds one `BlockConfig` per layer. A block mixes tokens, then applies an MLP; either
part may be absent. `hybrid_config` makes the config of a repeated pattern.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from lajax._shapes import (
  check_flag,
  check_not_negative,
  check_number,
  check_option,
  check_positive,
  check_whole,
)

PLACES = ("pre", "post", "normed")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
ROUTERS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class NormConfig:
  """RMSNorm over the model width.

  Attributes:
    eps: added inside the root.
    unit_offset: multiply by 1 + weight instead of weight.
  """

  eps: float = 1e-6
  unit_offset: bool = False

  def __post_init__(self):
    check_not_negative("eps", self.eps)
    check_flag("unit_offset", self.unit_offset)


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
  """The way in which a part f of a block joins the residual stream x.

  pre:     x <- alpha x + beta f(norm(x))
  post:    x <- alpha x + beta norm(f(x))
  normed:  h = norm(x) ;  x <- alpha h + beta f(h)   (MiniMax)
  """

  place: str = "pre"
  alpha: float = 1.0
  beta: float = 1.0

  def __post_init__(self):
    check_option("place", self.place, PLACES)
    check_number("alpha", self.alpha)
    check_number("beta", self.beta)


@dataclasses.dataclass(frozen=True)
class MixerConfig:
  """A layer of `lajax.layers`, with its options.

      y = out_multiplier * layer(in_multiplier * x)

  Attributes:
    layer: the class, such as `lajax.layers.KimiDeltaAttention`.
    options: its keyword arguments by name, without d_model, dtype, param_dtype and rngs; values
      must be hashable.
    in_multiplier, out_multiplier: factors of the inputs and outputs.
    buffers: numbers that differ from layer to layer, by the name of the `nnx.Variable` of the layer
      that they fill. Layers that differ in nothing else are stacked.
  """

  layer: type
  options: Any = ()
  in_multiplier: float = 1.0
  out_multiplier: float = 1.0
  buffers: Any = ()

  def __post_init__(self):
    if not (isinstance(self.layer, type) and issubclass(self.layer, nnx.Module)):
      raise ValueError(
        f"`layer` must be a layer class such as lajax.layers.GatedDeltaNet; got {self.layer!r}."
      )
    for name in ("options", "buffers"):
      object.__setattr__(self, name, _frozen(name, getattr(self, name)))
    check_number("in_multiplier", self.in_multiplier)
    check_number("out_multiplier", self.out_multiplier)

  @property
  def keywords(self) -> dict[str, Any]:
    """The options as keyword arguments."""
    return dict(self.options)


@dataclasses.dataclass(frozen=True)
class MLPConfig:
  """y = down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.

  Attributes:
    width: channels between the two projections.
    activation: "silu", "gelu", "gelu_tanh" or "relu2" (relu squared).
    gated: with a gate.
    use_bias: biases on the projections.
    gate_multiplier, down_multiplier: factors of the gate before its activation, and of y.
  """

  width: int
  activation: str = "silu"
  gated: bool = True
  use_bias: bool = False
  gate_multiplier: float = 1.0
  down_multiplier: float = 1.0

  def __post_init__(self):
    check_whole("width", self.width)
    check_option("activation", self.activation, ACTIVATIONS)
    check_flag("gated", self.gated)
    check_flag("use_bias", self.use_bias)
    check_number("gate_multiplier", self.gate_multiplier)
    check_number("down_multiplier", self.down_multiplier)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """Mixture of experts: each token goes through the `top_k` MLPs that a router chooses.

      y = sum_{e chosen} w_e MLP_e(x) + shared(x)

  Attributes:
    width: channels inside one expert.
    num_experts: E.
    top_k: experts per token.
    activation, gated: of the experts, as in `MLPConfig`.
    router: "softmax" over all experts, or "sigmoid" of each.
    selection_bias: a bias per expert that takes part in the choice and not in the weights.
    num_groups, top_groups: experts are in `num_groups` equal groups; only those of the `top_groups`
      groups with the largest sum of their best two scores may be chosen.
    normalize: weights are divided by their sum plus `normalize_eps`.
    scale: factor of the weights.
    shared: an MLP that every token goes through, or None.
    shared_gate: multiply the shared MLP by sigmoid(x w).
    latent: width of the space in which the routed experts work, with a projection into it and out
      of it; None for d_model.
  """

  width: int
  num_experts: int
  top_k: int
  activation: str = "silu"
  gated: bool = True
  router: str = "softmax"
  selection_bias: bool = False
  num_groups: int = 1
  top_groups: int = 1
  normalize: bool = True
  normalize_eps: float = 1e-20
  scale: float = 1.0
  shared: MLPConfig | None = None
  shared_gate: bool = False
  latent: int | None = None

  def __post_init__(self):
    check_whole("width", self.width)
    experts = check_whole("num_experts", self.num_experts)
    check_whole("top_k", self.top_k, 1, experts)
    check_option("activation", self.activation, ACTIVATIONS)
    check_option("router", self.router, ROUTERS)
    for name in ("gated", "selection_bias", "normalize", "shared_gate"):
      check_flag(name, getattr(self, name))
    groups = check_whole("num_groups", self.num_groups, 1, experts)
    check_whole("top_groups", self.top_groups, 1, groups)
    check_number("scale", self.scale)
    check_positive("latent", self.latent)
    if experts % groups:
      raise ValueError(f"`num_groups` must divide num_experts = {experts}; got {groups}.")
    if self.top_k > experts // groups * self.top_groups:
      raise ValueError(
        f"`top_k` must be at most the experts of the chosen groups, "
        f"{experts // groups * self.top_groups}; got {self.top_k}."
      )
    if self.shared_gate and self.shared is None:
      raise ValueError("`shared_gate` must be False without a shared MLP; got True.")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
  """One layer of a model: mixers, then an MLP, each part joined to the residual stream.

  Attributes:
    mixers: run in parallel on the same inputs, their outputs are added; () for none.
    mlp: an MLP or a mixture of experts; None for none.
    norm: of both parts.
    mixer_residual, mlp_residual: how the parts join the stream.
  """

  mixers: tuple[MixerConfig, ...] = ()
  mlp: MLPConfig | MoEConfig | None = None
  norm: NormConfig = NormConfig()
  mixer_residual: ResidualConfig = ResidualConfig()
  mlp_residual: ResidualConfig = ResidualConfig()

  def __post_init__(self):
    mixers = (self.mixers,) if isinstance(self.mixers, MixerConfig) else self.mixers
    if not isinstance(mixers, Sequence) or not all(isinstance(m, MixerConfig) for m in mixers):
      raise ValueError(f"`mixers` must be a tuple of MixerConfigs; got {mixers!r}.")
    object.__setattr__(self, "mixers", tuple(mixers))
    _check_kind("mlp", self.mlp, MLPConfig | MoEConfig | None)
    _check_kind("norm", self.norm, NormConfig)
    _check_kind("mixer_residual", self.mixer_residual, ResidualConfig)
    _check_kind("mlp_residual", self.mlp_residual, ResidualConfig)
    if not self.mixers and self.mlp is None:
      raise ValueError("a block must have a mixer or an MLP; got neither.")

  @property
  def structure(self) -> "BlockConfig":
    """The config without the numbers in which stacked layers may differ."""
    mixers = tuple(dataclasses.replace(m, buffers=()) for m in self.mixers)
    return dataclasses.replace(self, mixers=mixers)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A language model: embedding, blocks, final norm, head.

      x = embedding_multiplier * E[tokens] ;  x <- block(x) for each block
      logits = cap(logits_multiplier * norm(x) W),  cap(z) = soft_cap tanh(z / soft_cap)

  Attributes:
    vocab_size: number of tokens, and of logits.
    d_model: D, the model width.
    blocks: one config per layer.
    norm: the final norm.
    tied_head: W is the embedding, transposed.
    embedding_multiplier, logits_multiplier: factors.
    soft_cap: bound of the logits; None for none.
    published: the text of the `config.json` that this config was read from, or None.
  """

  vocab_size: int
  d_model: int
  blocks: tuple[BlockConfig, ...]
  norm: NormConfig = NormConfig()
  tied_head: bool = False
  embedding_multiplier: float = 1.0
  logits_multiplier: float = 1.0
  soft_cap: float | None = None
  published: str | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    check_whole("vocab_size", self.vocab_size)
    check_whole("d_model", self.d_model)
    if not isinstance(self.blocks, Sequence) or not self.blocks:
      raise ValueError(
        f"`blocks` must be a tuple of at least one BlockConfig; got {self.blocks!r}."
      )
    for n, block in enumerate(self.blocks):
      _check_kind(f"blocks[{n}]", block, BlockConfig)
    object.__setattr__(self, "blocks", tuple(self.blocks))
    _check_kind("norm", self.norm, NormConfig)
    check_flag("tied_head", self.tied_head)
    check_number("embedding_multiplier", self.embedding_multiplier)
    check_number("logits_multiplier", self.logits_multiplier)
    if self.soft_cap is not None:
      check_number("soft_cap", self.soft_cap, above=0)


def hybrid_config(
  vocab_size: int,
  d_model: int,
  pattern: Sequence[MixerConfig | type],
  num_layers: int | None = None,
  *,
  mlp: MLPConfig | MoEConfig | int | None = None,
  norm_eps: float = 1e-6,
  tied_head: bool = True,
  embedding_multiplier: float = 1.0,
  soft_cap: float | None = None,
) -> ModelConfig:
  """Returns the config of a repeated pattern of mixers, each followed by an MLP, all pre-norm.

      kda = MixerConfig(lajax.layers.KimiDeltaAttention, {"num_heads": 4, "head_dim": 64})
      config = hybrid_config(256, 256, [kda, kda, kda, lajax.layers.MLA], num_layers=8)

  Args:
    vocab_size: number of tokens.
    d_model: D.
    pattern: mixers of successive layers; a layer class stands for its default options.
    num_layers: the pattern is repeated and cut to this many; None for once.
    mlp: a config, the width of a SwiGLU, 0 for no MLP, or None for a SwiGLU of width 8/3 D, rounded
      up to a multiple of 64.
    norm_eps: of all norms.
    tied_head, embedding_multiplier, soft_cap: of `ModelConfig`.

  Raises:
    ValueError: an argument is out of its range.
  """
  check_whole("d_model", d_model)
  if not isinstance(pattern, Sequence) or isinstance(pattern, str) or not pattern:
    raise ValueError(
      f"`pattern` must be a sequence of at least one layer class or MixerConfig; got {pattern!r}."
    )
  mixers = [m if isinstance(m, MixerConfig) else MixerConfig(m) for m in pattern]
  count = check_positive("num_layers", num_layers) or len(mixers)
  if mlp is None:
    mlp = -(-8 * d_model // 192) * 64
  if not isinstance(mlp, MLPConfig | MoEConfig):
    width = check_whole("mlp", mlp, 0)
    mlp = MLPConfig(width) if width else None
  norm = NormConfig(norm_eps)
  blocks = [BlockConfig((mixers[n % len(mixers)],), mlp, norm) for n in range(count)]
  return ModelConfig(
    vocab_size,
    d_model,
    tuple(blocks),
    norm,
    tied_head=tied_head,
    embedding_multiplier=embedding_multiplier,
    soft_cap=soft_cap,
  )


# --- periods --------------------------------------------------------------------------------------

REPEAT_COST = 0.5  # of a loop, in blocks that are traced


def periods(kinds: Sequence[Any]) -> list[tuple[int, int]]:
  """Cuts a sequence of layers into repeated patterns so that fewest layers are traced.

  Returns:
    (period, repeats) of each stack, in order: `period * repeats` layers, the layers of each repeat
    equal to those of the one before.
  """
  numbers: dict[Any, int] = {}
  layers = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
  count = len(layers)
  best: list[tuple[float, int, int]] = [(0.0, 0, 0)] * (count + 1)  # from a layer to the end
  for start in reversed(range(count)):
    options = [(1.0 + best[start + 1][0], 1, 1)]
    for period in range(1, (count - start) // 2 + 1):
      repeats, end = 1, start + period
      while layers[end : end + period] == layers[start : start + period]:
        repeats, end = repeats + 1, end + period
        options.append((period + REPEAT_COST + best[end][0], period, repeats))
    best[start] = min(options)
  found, start = [], 0
  while start < count:
    _, period, repeats = best[start]
    found.append((period, repeats))
    start += period * repeats
  return found


# --- checks ---------------------------------------------------------------------------------------


def _check_kind(name: str, value: Any, kind: Any) -> None:
  if not isinstance(value, kind):
    wanted = getattr(kind, "__name__", str(kind).replace("lajax.models.config.", ""))
    raise ValueError(f"`{name}` must be {wanted}; got {type(value).__name__}.")


def _frozen(name: str, options: Any) -> tuple[tuple[str, Any], ...]:
  """Returns options by name as sorted pairs, with lists as tuples."""
  pairs = options.items() if isinstance(options, Mapping) else options
  try:
    frozen = tuple(sorted((str(key), tuple(v) if isinstance(v, list) else v) for key, v in pairs))
    hash(frozen)
  except (TypeError, ValueError):
    raise ValueError(
      f"`{name}` must be a mapping of names to hashable values; got {options!r}."
    ) from None
  return frozen
