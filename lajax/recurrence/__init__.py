"""Recurrences in plain jnp: the loops (`drive`), one rule a family, and their single-token steps for decoding."""

from lajax.recurrence.attention import attend
from lajax.recurrence.steps import (
  delta_rule_step,
  linear_attention_step,
  linear_recurrence_step,
  normalized_linear_attention_step,
)

__all__ = [
  "attend",
  "delta_rule_step",
  "linear_attention_step",
  "linear_recurrence_step",
  "normalized_linear_attention_step",
]
