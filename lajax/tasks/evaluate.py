"""Scores of any model on any task: no training, no checkout, no framework."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


class Task(Protocol):
  """What every task is once its sizes are given, as in `functools.partial(mqar, vocab_size=64, length=64, pairs=8)`."""

  def __call__(
    self, key: PRNGKeyArray, batch: int
  ) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, "B L"]]: ...


@dataclasses.dataclass(frozen=True)
class Score:
  """Result of `evaluate`.

  Attributes:
    accuracy: share of the masked positions, over all rows, whose largest logit is the target.
    all_correct: share of the rows in which every masked position is right.
    rows: number of rows the two are taken over.
  """

  accuracy: float
  all_correct: float
  rows: int


def evaluate(
  model_fn: Callable[[Int[Array, "B L"]], Float[Array, "B L V"]],
  task: Task,
  *,
  key: PRNGKeyArray | None = None,
  rows: int = 1024,
  batch: int = 128,
) -> Score:
  """Scores `model_fn` on fresh rows of `task`.

  Args:
    model_fn: any callable from tokens int32 [B L] to logits [B L V]; it need not be JAX's, NumPy arrays will do.
    task: a task with its sizes given, `task(key, batch) -> inputs, targets, mask`.
    key: the random key of the rows; the same key gives the same rows. Default `jax.random.key(0)`.
    rows: number of rows, a multiple of `batch`.
    batch: B, the rows of one call of `model_fn`.

  Returns:
    A `Score`: accuracy over the masked positions, and the share of rows that are wholly right.

  Raises:
    ValueError: `rows` is no positive multiple of `batch`, or the logits are not [B L V].
  """
  if batch < 1 or rows < 1 or rows % batch:
    raise ValueError(
      f"`rows` must be a positive multiple of `batch`; got rows={rows}, batch={batch}."
    )
  keys = jax.random.split(jax.random.key(0) if key is None else key, rows // batch)
  hits = asked = whole = 0
  for one in keys:
    inputs, targets, mask = task(one, batch)
    logits = jnp.asarray(model_fn(inputs))
    if logits.ndim != 3 or logits.shape[:2] != inputs.shape:
      raise ValueError(
        f"`model_fn` must return logits [B L V] with [B L] = {inputs.shape}; got {logits.shape}."
      )
    counts = count_hits(logits.argmax(-1), targets, mask)
    hits, asked, whole = hits + int(counts[0]), asked + int(counts[1]), whole + int(counts[2])
  return Score(accuracy=hits / max(asked, 1), all_correct=whole / rows, rows=rows)


@jax.jit
def count_hits(answers: Int[Array, "B P"], targets: Int[Array, "B P"], mask: Bool[Array, "B P"]):
  """Masked positions answered rightly, masked positions, and rows without a wrong answer: three int32 scalars."""
  right = answers == targets
  return (right & mask).sum(), mask.sum(), (right | ~mask).all(-1).sum()
