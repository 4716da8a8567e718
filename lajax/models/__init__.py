"""Language models assembled from the layers: configs, checkpoints, generation; models of recall."""

from lajax.layers.parameters import Buffer
from lajax.models.checkpoints import from_config, load, save, tensors
from lajax.models.config import (
  BlockConfig,
  MixerConfig,
  MLPConfig,
  ModelConfig,
  MoEConfig,
  NormConfig,
  ResidualConfig,
  hybrid_config,
)
from lajax.models.families.sophia import sophia
from lajax.models.generate import Completion, complete, generate
from lajax.models.language_model import LanguageModel, ModelState, unrolled
from lajax.models.recall import GatedShortConv, RecallModel, masked_positions, recall_loss
from lajax.models.sampling import sample

__all__ = [
  "BlockConfig",
  "Buffer",
  "Completion",
  "GatedShortConv",
  "LanguageModel",
  "MLPConfig",
  "MixerConfig",
  "MoEConfig",
  "ModelConfig",
  "ModelState",
  "NormConfig",
  "RecallModel",
  "ResidualConfig",
  "complete",
  "from_config",
  "generate",
  "hybrid_config",
  "load",
  "masked_positions",
  "recall_loss",
  "sample",
  "save",
  "sophia",
  "tensors",
  "unrolled",
]
