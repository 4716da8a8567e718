"""Models assembled from the layers."""

from lajax.models.recall import GatedShortConv, RecallModel, masked_positions, recall_loss

__all__ = ["GatedShortConv", "RecallModel", "masked_positions", "recall_loss"]
