"""Recurrences in plain JAX: loops over tokens and chunks, a rule per family, single-token steps."""

from lajax.recurrence.attention import attend
from lajax.recurrence.steps import (
  delta_product_step,
  delta_rule_step,
  dplr_step,
  gated_oja_step,
  linear_attention_step,
  linear_recurrence_step,
  log_linear_attention_step,
  mamba3_step,
  mesa_step,
  mlstm_step,
  momentum_delta_rule_step,
  normalized_linear_attention_step,
  preconditioned_delta_rule_step,
)

__all__ = [
  "attend",
  "delta_product_step",
  "delta_rule_step",
  "dplr_step",
  "gated_oja_step",
  "linear_attention_step",
  "linear_recurrence_step",
  "log_linear_attention_step",
  "mamba3_step",
  "mesa_step",
  "mlstm_step",
  "momentum_delta_rule_step",
  "normalized_linear_attention_step",
  "preconditioned_delta_rule_step",
]
