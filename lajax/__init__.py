"""lajax: linear attention for JAX."""

from lajax import _cpu_hang

_cpu_hang.guard()  # before anything that could start a JAX client

from lajax.bidirectional import bidirectional_linear_attention, efficient_attention  # noqa: E402
from lajax.ops import (  # noqa: E402
  attention,
  delta_product,
  delta_rule,
  dplr,
  gated_oja,
  linear_attention,
  linear_recurrence,
  mlstm,
  normalized_linear_attention,
)

__all__ = [
  "attention",
  "bidirectional_linear_attention",
  "delta_product",
  "delta_rule",
  "dplr",
  "efficient_attention",
  "gated_oja",
  "linear_attention",
  "linear_recurrence",
  "mlstm",
  "normalized_linear_attention",
]
