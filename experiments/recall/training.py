"""Trains a recall model: one compilation for all seeds and learning rates of a mixer."""

import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from recall.mixers import MIXERS, Sizes
from recall.runs import Run

from lajax.models import GatedShortConv, RecallModel, recall_loss
from lajax.tasks import mqar

HELD_OUT = 2**31 - 1  # the seed of the held-out rows


def build(run: Run, rngs: nnx.Rngs) -> RecallModel:
  """Returns a model of two layers: a short gated convolution and the mixer."""
  sizes = Sizes(
    run.d_model, run.num_heads, run.key_width, run.value_width, run.longest, run.output_gate
  )
  mixer = MIXERS[run.mixer].make(sizes)
  return RecallModel(
    run.vocab_size, run.d_model, [functools.partial(GatedShortConv, run.d_model), mixer], rngs=rngs
  )


def measure(run: Run) -> dict[str, int]:
  """Returns the number of parameters, and the bytes of the decode state of one row with caches."""

  def shapes():
    model = build(run, nnx.Rngs(0))
    return nnx.state(model, nnx.Param), model.init_state(1)

  parameters, state = map(jax.tree.leaves, jax.eval_shape(shapes))
  return dict(
    parameters=sum(x.size for x in parameters),
    state_bytes=sum(x.size * x.dtype.itemsize for x in state),
  )


def schedule(run: Run) -> optax.Schedule:
  """Returns the learning rate at each step, as a fraction of its peak."""
  if run.schedule == "cosine":
    return optax.cosine_decay_schedule(1.0, run.steps)
  warmup = max(1, round(0.1 * run.steps))
  return optax.warmup_cosine_decay_schedule(0.04, 1.0, warmup, max(run.steps, warmup + 1), 1e-4)


class Program:
  """Compiled steps and scores of a model; `train` runs them for one seed and learning rate."""

  def __init__(self, run: Run):
    started = time.perf_counter()
    self.run = run.program
    self.sizes = measure(run)
    self.optimizer = optax.chain(
      optax.identity() if run.clip is None else optax.clip_by_global_norm(run.clip),
      optax.scale_by_adam(),
      optax.add_decayed_weights(run.weight_decay),
      optax.scale_by_schedule(schedule(run)),
    )
    self.graph = nnx.graphdef(nnx.eval_shape(lambda: build(run, nnx.Rngs(0))))
    self._init = jax.jit(self._initial)
    carry, key = jax.eval_shape(self._initial, jax.random.key(0)), jax.random.key(0)
    self._advance = jax.jit(self._train_block, donate_argnums=0).lower(carry, key, 0.1, 1).compile()
    self._scores = [
      jax.jit(functools.partial(self._score, rows)).lower(carry[:2], key).compile()
      for rows in run.test_rows
    ]
    self.compile_seconds = time.perf_counter() - started

  def _initial(self, key):
    _, parameters, rest = nnx.split(build(self.run, nnx.Rngs(key)), nnx.Param, ...)
    return parameters, rest, self.optimizer.init(parameters)

  def _rows(self, rows: tuple[int, int], key, batch: int):
    length, pairs = rows
    run = self.run
    return mqar(
      key,
      batch,
      vocab_size=run.vocab_size,
      length=length,
      pairs=pairs,
      filler=run.filler,
      power=run.power,
    )

  def _loss(self, rows, parameters, rest, key):
    model = nnx.merge(self.graph, parameters, rest)
    return recall_loss(model, *self._rows(rows, key, self.run.batch), count=rows[1])[0]

  def _train_block(self, carry, key, learning_rate, count):
    """Takes `count` steps on fresh rows, and returns their mean loss too.

    In a mixture, each step draws the kind of its rows.
    """
    branches = [
      jax.value_and_grad(functools.partial(self._loss, rows)) for rows in self.run.train_rows
    ]
    log_shares = jnp.log(jnp.asarray(self.run.shares))

    def step(i, carry):
      (parameters, rest, moments), total = carry
      of_kind, of_rows = jax.random.split(jax.random.fold_in(key, i))
      kind = jax.random.categorical(of_kind, log_shares) if len(branches) > 1 else 0
      loss, gradient = jax.lax.switch(kind, branches, parameters, rest, of_rows)
      with jax.numpy_dtype_promotion("standard"):  # Optax's own code mixes dtypes
        update, moments = self.optimizer.update(gradient, moments, parameters)
      parameters = jax.tree.map(lambda p, u: p - learning_rate * u, parameters, update)
      return (parameters, rest, moments), total + loss

    carry, total = jax.lax.fori_loop(0, count, step, (carry, jnp.zeros(())))
    return carry, total / count

  def _score(self, rows, model, key):
    """Returns accuracy and all-correct rate over `eval_rows` rows, computed batch by batch."""
    batch = min(self.run.batch, self.run.eval_rows)
    model = nnx.merge(self.graph, *model)

    def one(key):
      right = recall_loss(model, *self._rows(rows, key, batch), count=rows[1])[1] == 1
      return right.mean(), right.all(-1).mean()

    accuracy, whole = jax.lax.map(one, jax.random.split(key, max(1, self.run.eval_rows // batch)))
    return accuracy.mean(), whole.mean()

  def score(self, carry, fold: int) -> dict[str, tuple[float, float]]:
    """Returns accuracy and all-correct rate on held-out rows, by kind of rows."""
    key = jax.random.fold_in(jax.random.key(HELD_OUT), fold)
    scores = [jax.device_get(score(carry[:2], key)) for score in self._scores]
    return {
      name_of(rows): (float(a), float(w))
      for rows, (a, w) in zip(self.run.test_rows, scores, strict=True)
    }

  def train(
    self, seed: int, learning_rate: float, on_progress: Callable[[int, float, float], None]
  ) -> dict:
    """Trains until the steps are taken or the held-out rows are answered. Returns the metrics."""
    run, carry = self.run, self._init(jax.random.key(seed))
    key = jax.random.fold_in(jax.random.key(seed), 1)
    curve, wall, cpu, taken = [], 0.0, 0.0, 0
    loss = math.inf
    while taken < run.steps:
      started = time.perf_counter(), time.process_time()
      count = min(run.eval_every, run.steps - taken)
      carry, loss = self._advance(carry, jax.random.fold_in(key, taken), learning_rate, count)
      loss = float(loss)
      wall, cpu = wall + time.perf_counter() - started[0], cpu + time.process_time() - started[1]
      taken += count
      scores = self.score(carry, 0)
      curve.append([taken, _mean(scores, 0), loss if math.isfinite(loss) else None])
      on_progress(taken, curve[-1][1], loss)
      if not math.isfinite(loss) or _saturated(curve, run):
        break
    final = self.score(carry, 1)  # fresh rows: those of fold 0 decided when to stop
    return dict(
      accuracy=_mean(final, 0),
      all_correct=_mean(final, 1),
      accuracy_by_rows={name: accuracy for name, (accuracy, _) in final.items()},
      steps=taken,
      steps_to_99=next((step for step, accuracy, _ in curve if accuracy >= 0.99), None),
      stopped_early=taken < run.steps,
      loss=loss if math.isfinite(loss) else None,
      seconds=wall,
      rows_per_second=taken * run.batch / wall,
      rows_per_cpu_second=taken * run.batch / max(cpu, 1e-9),
      compile_seconds=self.compile_seconds,
      curve=curve,
      **self.sizes,
    )


def name_of(rows: tuple[int, int]) -> str:
  length, pairs = rows
  return f"L{length} K{pairs}"


def _mean(scores: dict[str, tuple[float, float]], which: int) -> float:
  return sum(score[which] for score in scores.values()) / len(scores)


def _saturated(curve: list, run: Run) -> bool:
  last = curve[-run.stop_checks :]
  return (
    run.stop_at is not None
    and len(last) == run.stop_checks
    and all(point[1] >= run.stop_at for point in last)
  )
