"""Flax NNX layers: parameters, projections, gates and caches around the operations of `lajax`.

Every layer is `layer(x, state=None, *, segment_ids=None) -> (y, state)`, and
`layer.init_state(batch)` gives the state before the first token. Any split of a sequence into calls
that pass the state on gives the same as one call.
"""

from lajax.layers.based import Based, ReBased
from lajax.layers.bidirectional import BidirectionalLinearAttention, EfficientAttention
from lajax.layers.comba import Comba
from lajax.layers.cosformer import CosFormer
from lajax.layers.delta_product import DeltaProduct
from lajax.layers.deltanet import DeltaNet
from lajax.layers.double_gated_conv import DoubleGatedConv
from lajax.layers.features import FEATURE_MAPS
from lajax.layers.forgetting_attention import ForgettingAttention
from lajax.layers.gated_deltanet import GatedDeltaNet
from lajax.layers.gated_deltanet2 import GatedDeltaNet2
from lajax.layers.gated_oja import GatedOja
from lajax.layers.gla import GLA
from lajax.layers.griffin import GriffinBlock
from lajax.layers.hedgehog import Hedgehog
from lajax.layers.hgrn import HGRN, hgrn_lower_bounds
from lajax.layers.hgrn2 import HGRN2
from lajax.layers.kimi_delta_attention import KimiDeltaAttention
from lajax.layers.lightning import Lightning
from lajax.layers.linear_attention import LinearAttention
from lajax.layers.log_linear import LogLinearGatedDeltaNet, LogLinearMamba2
from lajax.layers.mamba import Mamba
from lajax.layers.mamba2 import Mamba2
from lajax.layers.mamba3 import Mamba3
from lajax.layers.mesanet import MesaNet
from lajax.layers.mixer import Mixer
from lajax.layers.mla import MLA
from lajax.layers.mlstm import MLSTM
from lajax.layers.momentum_deltanet import MomentumDeltaNet
from lajax.layers.parameters import GatedRMSNorm
from lajax.layers.performer import Performer
from lajax.layers.preconditioned import PreconditionedGatedDeltaNet, PreconditionedKDA
from lajax.layers.qdelta import QDelta
from lajax.layers.retnet import RetNet
from lajax.layers.rglru import RGLRU
from lajax.layers.rwkv6 import RWKV6
from lajax.layers.rwkv7 import RWKV7
from lajax.layers.short_conv import ShortConv
from lajax.layers.softmax_attention import SoftmaxAttention
from lajax.layers.state import LayerState

__all__ = [
  "FEATURE_MAPS",
  "GLA",
  "HGRN",
  "HGRN2",
  "MLA",
  "MLSTM",
  "RGLRU",
  "RWKV6",
  "RWKV7",
  "Based",
  "BidirectionalLinearAttention",
  "Comba",
  "CosFormer",
  "DeltaNet",
  "DeltaProduct",
  "DoubleGatedConv",
  "EfficientAttention",
  "ForgettingAttention",
  "GatedDeltaNet",
  "GatedDeltaNet2",
  "GatedOja",
  "GatedRMSNorm",
  "GriffinBlock",
  "Hedgehog",
  "KimiDeltaAttention",
  "LayerState",
  "Lightning",
  "LinearAttention",
  "LogLinearGatedDeltaNet",
  "LogLinearMamba2",
  "Mamba",
  "Mamba2",
  "Mamba3",
  "MesaNet",
  "Mixer",
  "MomentumDeltaNet",
  "Performer",
  "PreconditionedGatedDeltaNet",
  "PreconditionedKDA",
  "QDelta",
  "ReBased",
  "RetNet",
  "ShortConv",
  "SoftmaxAttention",
  "hgrn_lower_bounds",
]
