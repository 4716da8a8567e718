"""lajax: linear attention for JAX."""

from lajax import _cpu_hang

_cpu_hang.guard()  # before anything that could start a JAX client

from lajax.ops import (  # noqa: E402
  attention,
  delta_rule,
  linear_attention,
  linear_recurrence,
  normalized_linear_attention,
)

__all__ = ["attention", "delta_rule", "linear_attention", "linear_recurrence", "normalized_linear_attention"]
