"""Synthetic tasks, pure functions of a random key.

A task is `task(key, batch, **sizes) -> inputs, targets, mask`: `inputs` and `targets` are int32
[B L], `mask` is bool [B L]. A target stands at the position whose output must give it.
`evaluate(model_fn, task)` scores any callable from tokens to logits. `TASKS` describes each task by
name: its default config, a symbolic solver, the accuracy of chance, the size of its vocabulary.
"""

from lajax.tasks.arithmetic import SPECS as _ARITHMETIC
from lajax.tasks.arithmetic import mod_arith
from lajax.tasks.copying import SPECS as _COPYING
from lajax.tasks.copying import palindrome, selective_copy, stack
from lajax.tasks.evaluate import Score, Task, count_hits, evaluate, stale_rate
from lajax.tasks.flip_flops import SPECS as _FLIP_FLOPS
from lajax.tasks.flip_flops import flip_flop, undo_flip_flop
from lajax.tasks.grammar import SPECS as _GRAMMAR
from lajax.tasks.grammar import selective_next
from lajax.tasks.groups import GROUPS, group, group_order, modular, parity
from lajax.tasks.groups import SPECS as _GROUPS
from lajax.tasks.mixture import MQAR_TEST_SIZES, MQAR_TRAIN_SIZES, MQAR_TRAIN_WEIGHTS, mqar_mixture
from lajax.tasks.mixture import SPECS as _MQAR
from lajax.tasks.mqar import FILLERS, check_mqar, mqar, mqar_chance
from lajax.tasks.recall import SPECS as _RECALL
from lajax.tasks.recall import compositional, noisy_recall, overwrite
from lajax.tasks.s3_words import SPECS as _S3_WORDS
from lajax.tasks.s3_words import s3_pairs
from lajax.tasks.spec import TaskSpec

TASKS: dict[str, TaskSpec] = {
  spec.name: spec
  for specs in (_MQAR, _RECALL, _COPYING, _GROUPS, _S3_WORDS, _FLIP_FLOPS, _ARITHMETIC, _GRAMMAR)
  for spec in specs
}

__all__ = [
  "FILLERS",
  "GROUPS",
  "MQAR_TEST_SIZES",
  "MQAR_TRAIN_SIZES",
  "MQAR_TRAIN_WEIGHTS",
  "TASKS",
  "Score",
  "Task",
  "TaskSpec",
  "check_mqar",
  "compositional",
  "count_hits",
  "evaluate",
  "flip_flop",
  "group",
  "group_order",
  "mod_arith",
  "modular",
  "mqar",
  "mqar_chance",
  "mqar_mixture",
  "noisy_recall",
  "overwrite",
  "palindrome",
  "parity",
  "s3_pairs",
  "selective_copy",
  "selective_next",
  "stack",
  "stale_rate",
  "undo_flip_flop",
]
