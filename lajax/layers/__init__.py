"""Flax NNX layers: parameters, projections, gates and caches around the operations of `lajax`.

Every layer is `layer(x, state=None, *, segment_ids=None) -> (y, state)`, and `layer.init_state(batch)` gives the state before
the first token. Any split of a sequence into calls that pass the state on gives the same as one call.
"""

from lajax.layers.deltanet import DeltaNet
from lajax.layers.features import FEATURE_MAPS
from lajax.layers.gated_deltanet import GatedDeltaNet
from lajax.layers.gla import GLA
from lajax.layers.kimi_delta_attention import KimiDeltaAttention
from lajax.layers.linear_attention import LinearAttention
from lajax.layers.mamba2 import Mamba2
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import GatedRMSNorm
from lajax.layers.retnet import RetNet
from lajax.layers.short_conv import ShortConv
from lajax.layers.softmax_attention import SoftmaxAttention
from lajax.layers.state import LayerState

__all__ = [
  "FEATURE_MAPS",
  "GLA",
  "DeltaNet",
  "GatedDeltaNet",
  "GatedRMSNorm",
  "KimiDeltaAttention",
  "LayerState",
  "LinearAttention",
  "Mamba2",
  "Mixer",
  "RetNet",
  "ShortConv",
  "SoftmaxAttention",
]
