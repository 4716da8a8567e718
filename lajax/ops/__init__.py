"""The operations: check the arguments, choose the form, run it. Shapes are [B T H D]; `lajax._shapes` has the letters.

Forms, in every operation: `impl="recurrent"` is the printed equation, token by token; `"associative"` is
`jax.lax.associative_scan` over tokens, and keeps T states; `"chunked"` is matrix products inside chunks and a scan over the
chunks; `"pallas"` is for GPU kernels. `"auto"` takes what suits the device and the shapes. A named form never falls back.

Gradients: every form can be differentiated in all float arguments, `"recurrent"` and `"chunked"` also forwards; `"chunked"` and
`"pallas"` have first derivatives only, and `"pallas"`, which `"auto"` takes on NVIDIA GPUs, in reverse mode alone. Log decays may be anything in [-inf, 0]; a positive one is computed as asked for. Each new T compiles
once; nothing is tuned at run time.
"""

from lajax.ops.delta import delta_product, delta_rule, dplr, gated_oja
from lajax.ops.elementwise import linear_recurrence
from lajax.ops.linear import linear_attention, mlstm, normalized_linear_attention
from lajax.ops.softmax import attention

__all__ = [
  "attention",
  "delta_product",
  "delta_rule",
  "dplr",
  "gated_oja",
  "linear_attention",
  "linear_recurrence",
  "mlstm",
  "normalized_linear_attention",
]
