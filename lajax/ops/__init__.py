"""The operations: check the arguments, choose the implementation, run it. Shapes are [B T H D];
`lajax._shapes` has the letters.

Implementations, in every operation: `impl="recurrent"` is the printed equation, token by token;
"associative" is `jax.lax.associative_scan` over tokens, and stores T states; "chunked" is matrix
products inside chunks and a scan over the chunks; "pallas" runs GPU kernels, interpreted where no
GPU is. "auto" takes what suits the device and the shapes. A named implementation never falls back:
it says what it cannot do.

Gradients: every implementation can be differentiated in all float arguments and in the initial
state. "recurrent" and "associative" have all orders, "chunked" has first derivatives in both modes,
"pallas" (which "auto" takes on NVIDIA GPUs) first derivatives in reverse mode. Log decays may be
anything in [-inf, 0]; a positive one is computed as asked for. Each new T compiles once; nothing is
tuned at run time.

On explicit meshes (`jax.make_mesh`) an output has the layout of its values, and a final state that
of `initial_state` if it is given.
"""

from lajax.ops.bidirectional import bidirectional_linear_attention, efficient_attention
from lajax.ops.delta import delta_product, delta_rule, dplr, gated_oja
from lajax.ops.documents import loss_mask, segment_ids
from lajax.ops.elementwise import linear_recurrence
from lajax.ops.linear import linear_attention, mlstm, normalized_linear_attention
from lajax.ops.log_linear import log_linear_attention
from lajax.ops.mamba3 import mamba3
from lajax.ops.mesa import mesa
from lajax.ops.momentum import momentum_delta_rule
from lajax.ops.norm import gated_rms_norm
from lajax.ops.preconditioned import preconditioned_delta_rule
from lajax.ops.short_conv import short_conv
from lajax.ops.softmax import attention

__all__ = [
  "attention",
  "bidirectional_linear_attention",
  "delta_product",
  "delta_rule",
  "dplr",
  "efficient_attention",
  "gated_oja",
  "gated_rms_norm",
  "linear_attention",
  "linear_recurrence",
  "log_linear_attention",
  "loss_mask",
  "mamba3",
  "mesa",
  "mlstm",
  "momentum_delta_rule",
  "normalized_linear_attention",
  "preconditioned_delta_rule",
  "segment_ids",
  "short_conv",
]
