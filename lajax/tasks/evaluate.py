"""Scores of any model on any task: no training, no checkpoint, no framework."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from lajax._shapes import check, check_given, check_key, check_number, check_whole


class Task(Protocol):
  """A task with its sizes, as in `functools.partial(mqar, vocab_size=64, length=64, pairs=8)`."""

  def __call__(
    self, key: PRNGKeyArray, batch: int
  ) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, "B L"]]: ...


@dataclasses.dataclass(frozen=True)
class Score:
  """Result of `evaluate`.

  Attributes:
    accuracy: share of the masked positions, over all rows, whose largest logit is the target.
    all_correct: share of the rows in which every masked position is right.
    rows: number of rows.
  """

  accuracy: float
  all_correct: float
  rows: int

  def scaled(self, chance: float) -> float:
    """Returns the accuracy on a scale from 0, chance, to 1: (accuracy - chance) / (1 - chance).

    The scale of table 5b of Mamba-3, arXiv:2603.15569. A score below chance is negative.

    Args:
      chance: accuracy of a guess, at least 0 and below 1.

    Raises:
      ValueError: `chance` is no such number.
    """
    if not 0 <= check_number("chance", chance) < 1:
      raise ValueError(f"`chance` must be at least 0 and below 1; got {chance}.")
    return (self.accuracy - chance) / (1 - chance)


def evaluate(
  model_fn: Callable[[Int[Array, "B L"]], Float[Array, "B L V"]],
  task: Task,
  *,
  key: PRNGKeyArray | None = None,
  rows: int = 1024,
  batch: int = 128,
) -> Score:
  """Scores `model_fn` on fresh rows of `task`.

      accuracy = (masked positions with argmax(logits) = target) / (masked positions)

  Args:
    model_fn: any callable from tokens int32 [B L] to logits [B L V]. The logits may be a NumPy
      array.
    task: a task with its sizes given, `task(key, batch) -> inputs, targets, mask`.
    key: random key of the rows; equal keys give equal rows. Default `jax.random.key(0)`.
    rows: number of rows, a multiple of `batch`.
    batch: B, the number of rows per call of `model_fn`.

  Returns:
    A `Score`: accuracy over the masked positions, and the share of rows that are entirely right.

  Raises:
    ValueError: `rows` is not a positive multiple of `batch`, `task` does not return B rows of
      inputs, targets and mask or masks no position, or the logits are not [B L V].
  """
  hits = asked = whole = 0
  for _, answers, targets, mask in _answered(model_fn, task, key, rows, batch):
    counts = count_hits(answers, targets, mask)
    hits, asked, whole = hits + int(counts[0]), asked + int(counts[1]), whole + int(counts[2])
  if not asked:
    raise ValueError(_nothing_asked(rows))
  return Score(accuracy=hits / asked, all_correct=whole / rows, rows=rows)


def stale_rate(
  model_fn: Callable[[Int[Array, "B L"]], Float[Array, "B L V"]],
  task: Task,
  *,
  key: PRNGKeyArray | None = None,
  rows: int = 1024,
  batch: int = 128,
) -> float:
  """Returns how often a model answers with an older value of the key that is asked for.

      rate = (masked positions with a stale answer) / (masked positions)

  A stale answer is a wrong one that stands directly behind an earlier occurrence of the key in the
  row. In `overwrite` these are the values that were written over.

  Args:
    model_fn, task, key, rows, batch: as in `evaluate`; equal keys give the rows of `evaluate`.

  Raises:
    ValueError: as in `evaluate`.
  """
  stale = asked = 0
  for inputs, answers, targets, mask in _answered(model_fn, task, key, rows, batch):
    stale += int(_count_stale(inputs, answers, targets, mask))
    asked += int(mask.sum())
  if not asked:
    raise ValueError(_nothing_asked(rows))
  return stale / asked


@jax.jit
def _count_stale(inputs, answers, targets, mask):
  """Counts over a scan of the positions j of keys: no array [B L L]."""
  position = jnp.arange(inputs.shape[1])[None]

  def seen_at(seen, j):
    key, value = inputs[:, j, None], inputs[:, j + 1, None]
    return seen | ((inputs == key) & (answers == value) & (position > j + 1)), None

  seen = jax.lax.scan(seen_at, mask & False, position[0, :-1])[0]
  return (seen & mask & (answers != targets)).sum(dtype=jnp.int32)


def _nothing_asked(rows: int) -> str:
  return (
    f"`task` must mask at least one position as True; got none in {rows} rows. "
    "`mask` is True at the positions that are scored."
  )


def _answered(model_fn, task: Task, key, rows: int, batch: int):
  """Checks the arguments of `evaluate` and yields inputs, answers, targets, mask per batch."""
  for name, f in (("model_fn", model_fn), ("task", task)):
    if not callable(f):
      raise ValueError(f"`{name}` must be a callable; got {type(f).__name__}.")
  batch, rows = check_whole("batch", batch), check_whole("rows", rows)
  if rows % batch:
    raise ValueError(
      f"`rows` must be a positive multiple of `batch`; got rows={rows}, batch={batch}."
    )
  if key is not None:
    check_key("key", key)
  keys = jax.random.split(jax.random.key(0) if key is None else key, rows // batch)
  for one in keys:
    inputs, targets, mask = _rows_of(task, one, batch)
    logits = model_fn(inputs)
    if isinstance(logits, tuple | list) or not hasattr(logits, "shape"):
      raise ValueError(
        f"`model_fn` must return one array of logits [B L V]; got {type(logits).__name__}. "
        "Of a model that also returns a state, pass `lambda tokens: model(tokens)[0]`."
      )
    if logits.ndim != 3 or logits.shape[:2] != inputs.shape or logits.shape[2] == 0:
      raise ValueError(
        f"`model_fn` must return logits [B L V] with [B L] = {tuple(inputs.shape)}; "
        f"got {tuple(logits.shape)}."
      )
    yield inputs, jnp.asarray(logits).argmax(-1).astype(jnp.int32), targets, mask


def _rows_of(task: Task, key, batch: int):
  result = task(key, batch)
  parts = result if isinstance(result, tuple | list) else (result,)
  kinds = [jnp.integer, jnp.integer, jnp.bool_]
  right = len(parts) == 3 and all(
    hasattr(x, "shape") and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, kind)
    for x, kind in zip(parts, kinds, strict=True)
  )
  shape = parts[0].shape if right else ()
  if len(shape) != 2 or shape[0] != batch or any(x.shape != shape for x in parts):
    got = ", ".join(map(_described, parts))
    raise ValueError(
      "`task` must return inputs int32 [B L], targets int32 [B L] and mask bool [B L] "
      f"with B = {batch} = `batch`; got {got}."
    )
  return tuple(map(jnp.asarray, parts))


def _described(x) -> str:
  is_array = hasattr(x, "shape") and hasattr(x, "dtype")
  return f"{x.dtype} {tuple(x.shape)}" if is_array else type(x).__name__


def count_hits(
  answers: Int[Array, "B P"], targets: Int[Array, "B P"], mask: Bool[Array, "B P"]
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
  """Counts right answers.

      hits = sum(mask and answers = targets)

  Args:
    answers: int [B P], the tokens that a model answers with.
    targets: int [B P], the right tokens.
    mask: bool [B P], True at the positions that are scored.

  Returns:
    Three int32 scalars: masked positions with the right answer, masked positions, rows without a
      wrong answer.

  Raises:
    ValueError: the arrays are not int, int and bool of one shape [B P].
  """
  given = {"answers": (answers, "B P", "int"), "targets": (targets, "B P", "int")}
  given["mask"] = (mask, "B P", "bool")
  check_given(**given)
  check(**given)
  return _count_hits(answers, targets, mask)


@jax.jit
def _count_hits(answers, targets, mask):
  right = answers == targets
  counts = (right & mask).sum(), mask.sum(), (right | ~mask).all(-1).sum()
  return tuple(x.astype(jnp.int32) for x in counts)
