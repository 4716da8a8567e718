"""Trains a stack of recall models, equal but for seed and learning rate, as one program.

The parameters of the S models are stacked, [S ..]. A step computes the models one after the other
and their rows block by block, so that the arrays of a block stay in the processor's cache:
`recall.py --measure` prints what that is worth. On an accelerator all models and rows of a step
are computed at once.

A model that answers the held-out rows is frozen, and costs nothing from then on.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from recall.mixers import Sizes
from recall.trials import Options, Trial
from recall.variants import VARIANTS

from lajax.models import GatedShortConv, RecallModel, recall_loss
from lajax.tasks import TASKS

HELD_OUT = 2**31 - 1  # the seed of the held-out rows
BLOCK = 16  # rows at once on a CPU


def rows_at_once(batch: int) -> tuple[int, int | None]:
  """Returns the rows and the models that this kind of device computes at once."""
  if jax.default_backend() != "cpu":
    return batch, None
  return math.gcd(batch, BLOCK), 1


def build(trial: Trial, rngs: nnx.Rngs) -> RecallModel:
  """Returns a model of the mixer, behind a short gated convolution or alone."""
  widths = (trial.d_model, trial.num_heads, trial.key_width, trial.value_width)
  mixer = VARIANTS[trial.mixer].make(Sizes(*widths, trial.longest, False, trial.conv_size))
  first = [functools.partial(GatedShortConv, trial.d_model)] if trial.conv_first else []
  vocab_size = TASKS[trial.task].vocab_size(dict(trial.train))
  return RecallModel(vocab_size, trial.d_model, [*first, mixer], rngs=rngs)


def measure(trial: Trial) -> dict[str, int]:
  """Returns the number of parameters, and the bytes of the decode state of one row with caches."""

  def shapes():
    model = build(trial, nnx.Rngs(0))
    return nnx.state(model, nnx.Param), model.init_state(1)

  parameters, state = map(jax.tree.leaves, jax.eval_shape(shapes))
  size_of = lambda x: x.size * x.dtype.itemsize
  return dict(parameters=sum(x.size for x in parameters), state_bytes=sum(map(size_of, state)))


def answers_per_row(task: str, options: Options) -> int:
  """Returns the largest number of masked positions in a row."""
  config = dict(options)
  if config.get("scored") == "last" or task == "mod_arith":
    return 1
  if "pairs" in config:
    return config["pairs"]
  return config["length"]


def schedule(steps: int) -> optax.Schedule:
  """Returns the learning rate at each step, as a fraction of its peak: one cycle."""
  warmup = max(1, round(0.1 * steps))
  return optax.warmup_cosine_decay_schedule(0.04, 1.0, warmup, max(steps, warmup + 1), 1e-4)


def unoptimized() -> dict | None:
  """Returns the compiler options for a program that runs once on a CPU."""
  return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


class Stack:
  """Compiled steps and scores of S models; `train` runs them."""

  def __init__(self, trials: Sequence[Trial]):
    if len({trial.program for trial in trials}) != 1:
      raise ValueError("`trials` must differ in seed and learning rate alone.")
    started = time.perf_counter()
    self.trials, self.run = tuple(trials), trials[0].program
    self.sizes = measure(self.run)
    clip = optax.identity() if self.run.clip is None else optax.clip_by_global_norm(self.run.clip)
    self.optimizer = optax.chain(
      clip, optax.scale_by_adam(), optax.scale_by_schedule(schedule(self.run.steps))
    )
    self.graph = nnx.graphdef(nnx.eval_shape(lambda: build(self.run, nnx.Rngs(0))))
    self.keys = jax.vmap(jax.random.key)(np.array([trial.seed for trial in trials]))
    self.rates = jnp.array([trial.learning_rate for trial in trials], jnp.float32)
    everyone = np.ones(len(trials), bool)
    # Draws the parameters once, so that compiling is all that costs: without LLVM's optimisation.
    self._init = jax.jit(jax.vmap(self._initial), compiler_options=unoptimized())
    carry, key = jax.eval_shape(self._init, self.keys), jax.random.key(0)
    first = np.int32(0)
    self._advance = (
      jax.jit(self._train, donate_argnums=0)
      .lower(carry, self.keys, self.rates, everyone, first, first)
      .compile()
    )
    self._scores = [
      jax.jit(functools.partial(self._score, options)).lower(carry[0], key, everyone).compile()
      for _, options in self.run.tests
    ]
    self.compile_seconds = time.perf_counter() - started

  def _initial(self, key):
    _, parameters, rest = nnx.split(build(self.run, nnx.Rngs(key)), nnx.Param, ...)
    return (parameters, rest), self.optimizer.init(parameters)

  def _rows(self, options: Options, key, batch: int):
    return TASKS[self.run.task].make(key, batch, **dict(options))

  def _over_models(self, one: Callable, active, otherwise: Callable, *arrays):
    """Returns one(*arrays) of each active model, and otherwise(*arrays) of the frozen ones."""
    call = lambda model: jax.lax.cond(model[0], one, otherwise, *model[1:])
    if self.run.together is None:
      return jax.vmap(call)((active, *arrays))
    return jax.lax.map(call, (active, *arrays), batch_size=_some(self.run.together))

  def _loss(self, parameters, rest, rows, total):
    """Returns the share of a block of rows in the mean over all `total` masked positions."""
    model = nnx.merge(self.graph, parameters, rest)
    mean, right = recall_loss(model, *rows, count=answers_per_row(self.run.task, self.run.train))
    return mean * (right >= 0).sum().astype(jnp.float32) / total

  def _gradient(self, parameters, rest, key):
    """Returns the mean loss of a batch and its gradient, computed block by block."""
    run, rows = self.run, self._rows(self.run.train, key, self.run.batch)
    gradient = jax.value_and_grad(self._loss)
    total = jnp.maximum(rows[2].sum(), 1).astype(jnp.float32)
    if run.block == run.batch:
      return gradient(parameters, rest, rows, total)
    blocks = [x.reshape(-1, run.block, *x.shape[1:]) for x in rows]

    def add(so_far, block):
      return jax.tree.map(jnp.add, so_far, gradient(parameters, rest, block, total)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters)
    return jax.lax.scan(add, zeros, blocks)[0]

  def _train(self, carry, keys, rates, active, first, count):
    """Takes `count` steps of each active model from step `first`, and returns the mean losses."""

    def one(carry, key, rate):
      def step(i, state):
        ((parameters, rest), moments), total = state
        loss, gradient = self._gradient(parameters, rest, jax.random.fold_in(key, 1 + first + i))
        with jax.numpy_dtype_promotion("standard"):  # Optax's own code mixes dtypes
          update, moments = self.optimizer.update(gradient, moments, parameters)
        parameters = jax.tree.map(lambda p, u: p - rate * u, parameters, update)
        return ((parameters, rest), moments), total + loss

      carry, total = jax.lax.fori_loop(0, count, step, (carry, jnp.zeros(())))
      return carry, total / jnp.maximum(count, 1).astype(jnp.float32)

    frozen = lambda carry, *_: (carry, jnp.zeros(()))
    return self._over_models(one, active, frozen, carry, keys, rates)

  def _score(self, options: Options, models, key, active):
    """Returns accuracy and all-correct rate of each active model on the same held-out rows."""
    length, trained = dict(options)["length"], dict(self.run.train)["length"]
    batch = max(1, BLOCK * trained // max(length, trained))  # as on every device
    number = max(1, min(self.run.eval_rows, 4 * self.run.eval_rows * trained // length) // batch)

    def one(parameters, rest):
      model = nnx.merge(self.graph, parameters, rest)

      def block(sums, key):
        count = answers_per_row(self.run.task, options)
        right = recall_loss(model, *self._rows(options, key, batch), count=count)[1]
        counts = (right == 1).sum(), (right >= 0).sum(), (right != 0).all(-1).sum()
        return jax.tree.map(jnp.add, sums, tuple(x.astype(jnp.int32) for x in counts)), None

      zeros = (jnp.zeros((), jnp.int32),) * 3
      (hits, asked, whole), _ = jax.lax.scan(block, zeros, jax.random.split(key, number))
      real = lambda x: x.astype(jnp.float32)
      return real(hits) / real(jnp.maximum(asked, 1)), real(whole) / (number * batch)

    frozen = lambda *_: (jnp.ones(()), jnp.ones(()))
    return self._over_models(one, active, frozen, *models)

  def score(self, which: int, carry, fold: int, active) -> list[np.ndarray]:
    """Returns accuracies and all-correct rates [S] on the rows of a test."""
    key = jax.random.fold_in(jax.random.key(HELD_OUT), fold)
    return jax.device_get(self._scores[which](carry[0], key, active))

  def timed(self, steps: int) -> float:
    """Returns the trained rows per CPU second of this process over `steps` steps of all models."""
    everyone, carry = np.ones(len(self.trials), bool), self._init(self.keys)
    arguments = self.keys, self.rates, everyone, np.int32(0)
    carry = jax.block_until_ready(self._advance(carry, *arguments, np.int32(1))[0])
    started = time.process_time()
    jax.block_until_ready(self._advance(carry, *arguments, np.int32(steps)))
    return steps * self.run.batch * len(self.trials) / (time.process_time() - started)

  def train(self, on_progress: Callable[[int, np.ndarray], None] = lambda *_: None) -> list[dict]:
    """Trains until the steps are taken or all models answer. Returns the metrics of each model.

    `on_progress` is called after each score with the step and the accuracies [S]. An error that it
    raises ends the training.
    """
    run, number = self.run, len(self.trials)
    started = time.perf_counter(), time.process_time()
    carry = self._init(self.keys)
    active, losses, accuracy = np.ones(number, bool), np.full(number, math.inf), np.zeros(number)
    curves: list[list] = [[] for _ in range(number)]
    taken = 0
    while taken < run.steps and active.any():
      count = min(run.eval_every, run.steps - taken)
      step = np.int32(taken), np.int32(count)
      carry, new = self._advance(carry, self.keys, self.rates, active, *step)
      losses = np.where(active, jax.device_get(new), losses)
      taken += count
      accuracy = np.where(active, self.score(0, carry, 0, active)[0], accuracy)
      for n in np.flatnonzero(active):
        curves[n].append([taken, float(accuracy[n]), _finite(losses[n])])
        active[n] = math.isfinite(losses[n]) and not _saturated(curves[n], run)
      on_progress(taken, accuracy)
    everyone = np.ones(number, bool)  # fresh rows: those of fold 0 decided when to stop
    finals = [self.score(n, carry, 1, everyone) for n in range(len(run.tests))]
    seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    rows = run.batch * sum(curve[-1][0] for curve in curves)
    shared = dict(
      seconds=seconds,
      stacked=number,
      stack_rows_per_second=rows / seconds,
      process_cpu_seconds=cpu,
      compile_seconds=self.compile_seconds,
      **self.sizes,
    )
    return [
      dict(
        accuracy=float(finals[0][0][n]),
        all_correct=float(finals[0][1][n]),
        accuracy_by_test={
          label: float(final[0][n]) for (label, _), final in zip(run.tests, finals, strict=True)
        },
        steps=curves[n][-1][0],
        stopped_early=curves[n][-1][0] < run.steps,
        loss=_finite(losses[n]),
        curve=curves[n],
        **shared,
      )
      for n in range(number)
    ]


def _some(together: int | None) -> int | None:
  """Returns the batch size of `jax.lax.map`; None, a plain loop, for one model at a time."""
  return None if together == 1 else together


def _finite(loss) -> float | None:
  return float(loss) if math.isfinite(loss) else None


def _saturated(curve: list, run: Trial) -> bool:
  last = curve[-run.stop_checks :]
  reached = [run.stop_at is not None and point[1] >= run.stop_at for point in last]
  return len(last) == run.stop_checks and all(reached)
