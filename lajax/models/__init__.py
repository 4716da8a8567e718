"""Models assembled from the layers, and the generation of tokens."""

from lajax.models.generate import Completion, complete, generate
from lajax.models.recall import GatedShortConv, RecallModel, masked_positions, recall_loss
from lajax.models.sampling import sample

__all__ = [
  "Completion",
  "GatedShortConv",
  "RecallModel",
  "complete",
  "generate",
  "masked_positions",
  "recall_loss",
  "sample",
]
