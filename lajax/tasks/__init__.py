"""Synthetic tasks, pure functions of a random key.

A task is `task(key, batch, **sizes) -> inputs, targets, mask`: `inputs` and `targets` are int32
[B L], `mask` is bool [B L]. A target stands at the position whose output must give it.
`evaluate(model_fn, task)` scores any callable from tokens to logits.
"""

from lajax.tasks.evaluate import Score, Task, count_hits, evaluate
from lajax.tasks.mqar import FILLERS, check_mqar, mqar, mqar_chance

__all__ = [
  "FILLERS",
  "Score",
  "Task",
  "check_mqar",
  "count_hits",
  "evaluate",
  "mqar",
  "mqar_chance",
]
