"""Trains a run: compiled steps and scores, the loop with its clock, log and checkpoints."""

import concurrent.futures
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from lm.checkpoints import Checkpoints, checkpoints_in, parameters_in
from lm.data import Batches, Rows, Text, batches_of, pack
from lm.model import ByteModel, build
from lm.optimizer import optimizer_of
from lm.run import Run
from lm.schedule import Progress, learning_rate
from results import append, read

LOG_EVERY = 10  # steps per line of the log
EVALUATIONS = 8  # during a run
# The draw of the first parameters runs once: without LLVM's optimisation it compiles 5 s faster.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Show = Callable[[str, float], None]  # text, share of the run that is over


class Moment(NamedTuple):
  """A time on two clocks, in seconds."""

  wall: float  # of `time.perf_counter()`
  cpu: float  # of `time.process_time()`, which adds the cores up


class Carry(NamedTuple):
  """All arrays that a step changes."""

  parameters: Any
  rest: Any  # variables of the model that are not trained
  moments: Any  # of the optimizer


class Program:
  """Compiled step and score of a run."""

  def __init__(self, run: Run):
    started = time.perf_counter()
    self.run, self.optimizer = run, optimizer_of(run)
    self.graph = nnx.graphdef(nnx.eval_shape(lambda: build(run, nnx.Rngs(0))))
    self.init = jax.jit(self._init, compiler_options=QUICK)
    self.score_batch = max(1, run.batch * run.length // run.eval_length)
    carry = jax.eval_shape(self.init, key_of(run.seed))
    step = jax.jit(self._step, donate_argnums=0)
    score = jax.jit(self._bits)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # XLA compiles on one core each
      compiled = [
        pool.submit(lambda f=f, args=args: f.lower(*args).compile())
        for f, args in (
          (step, (carry, _shapes(run.batch, run.length), 1.0)),
          (score, (carry, _shapes(self.score_batch, run.eval_length))),
        )
      ]
    self.step, self.score = (future.result() for future in compiled)
    self.compile_seconds = time.perf_counter() - started

  def _init(self, key) -> Carry:
    _, parameters, rest = nnx.split(build(self.run, nnx.Rngs(key)), nnx.Param, ...)
    return Carry(parameters, rest, self.optimizer.init(parameters))

  def model(self, carry: Carry) -> ByteModel:
    """Returns the model with the parameters of a carry."""
    return nnx.merge(self.graph, carry.parameters, carry.rest)

  def _bits(self, carry: Carry, rows: Rows):
    """Returns the bits of all targets, and their number."""
    logits, _ = self.model(carry)(rows.inputs, segment_ids=rows.documents)
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    is_token = rows.documents >= 0
    return jnp.where(is_token, losses, 0).sum() / math.log(2), is_token.sum()

  def _step(self, carry: Carry, rows: Rows, rate) -> tuple[Carry, jax.Array]:
    """Takes a step at a fraction of the peak learning rate. Returns bits per byte before it too."""

    def loss(parameters):
      bits, count = self._bits(carry._replace(parameters=parameters), rows)
      return bits / jnp.maximum(count, 1).astype(bits.dtype)

    bits, gradient = jax.value_and_grad(loss)(carry.parameters)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # Optax's code
      update, moments = self.optimizer.update(gradient, carry.moments, carry.parameters)
    parameters = jax.tree.map(lambda p, u: p + rate * u, carry.parameters, update)
    return Carry(parameters, carry.rest, moments), bits

  def bits_per_byte(self, carry: Carry, rows: Rows) -> float:
    """Returns bits per byte of packed documents."""
    scores = [self.score(carry, part) for part in batches_of(rows, self.score_batch)]
    bits, count = np.sum([jax.device_get(score) for score in scores], axis=0)
    return float(bits / count)


def key_of(seed: int) -> jax.Array:
  """Returns the key of a run's first parameters. XLA compiles "rbg" in a tenth of the time."""
  return jax.random.key(seed, impl="rbg")


def _shapes(batch: int, length: int) -> Rows:
  shape: Any = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  return Rows(shape, shape, shape)


def train(
  program: Program,
  text: Text,
  folder: pathlib.Path,
  *,
  started: Moment,
  reserve: float = 0.0,
  checkpoint_minutes: float = 2.0,
  show: Show = lambda text, share: None,
) -> tuple[Carry, dict]:
  """Trains a run from its first step, or from its latest checkpoint. Returns arrays and metrics.

  Args:
    program: the compiled run.
    text: what it is trained on.
    folder: of the run: its log and its checkpoints.
    started: when the run began in this process; its clock is that of `--minutes`.
    reserve: seconds of these minutes that are needed after training and scoring.
    checkpoint_minutes: minutes between two checkpoints.
    show: called with a line of text and the share of the run that is over.
  """
  run, log = program.run, Log(folder / "log.jsonl")
  batches = Batches(text.training, run.batch, run.length, run.seed)
  held_out = pack(text.held_out, run.eval_length)
  some = some_rows(held_out, run.eval_rows)
  with checkpoints_in(folder) as checkpoints:
    carry, done = first_carry(program, checkpoints)
    step, progress = done["step"], Progress(run, started.wall, done["seconds"], log.shares())
    training, scored, saved = done["training_seconds"], None, time.perf_counter()
    numbers = lambda: dict(
      step=step,
      seconds=progress.seconds,
      cpu_seconds=done["cpu_seconds"] + time.process_time() - started.cpu,
      training_seconds=training,
    )
    while (share := progress.at(step)) < 1:
      if scored is None or math.floor(share * EVALUATIONS) > scored:
        at, scored = time.perf_counter(), math.floor(share * EVALUATIONS)
        bits = program.bits_per_byte(carry, some)
        per_row = (time.perf_counter() - at) / len(some.inputs)
        progress.reserve = reserve + 1.1 * per_row * len(held_out.inputs)
        log.add(dict(step=step, seconds=progress.seconds, held_out=bits))
        show(f"held-out {bits:.3f} bits per byte after {step} steps", share)
      if time.perf_counter() - saved > 60 * checkpoint_minutes:
        checkpoints.save(step, carry, numbers())
        saved = time.perf_counter()
      at, first, bits, shares = time.perf_counter(), step, [], []
      while share < 1 and len(bits) < LOG_EVERY:
        carry, loss = program.step(carry, batches.at(step), learning_rate(run, step, share))
        bits.append(float(loss))
        shares.append(share)
        step += 1
        share = progress.at(step)
      training += time.perf_counter() - at
      log.add(dict(step=first, seconds=progress.seconds, bits=bits, shares=shares))
      rate = len(bits) * run.batch * run.length / (time.perf_counter() - at)
      show(f"{np.mean(bits):.3f} bits per byte in training, {rate:,.0f} tokens/s", share)
      if not math.isfinite(bits[-1]):
        raise FloatingPointError(
          f"the loss is not finite after {step} steps; lower --learning-rate or "
          "--muon-learning-rate, or the same flags with another --seed."
        )
    checkpoints.save(step, carry, numbers())
    metrics = dict(
      bits_per_byte=program.bits_per_byte(carry, held_out),
      held_out_bytes=sum(map(len, text.held_out)),
      training_bytes=sum(map(len, text.training)),
      steps=step,
      tokens=step * run.batch * run.length,
      tokens_per_second=step * run.batch * run.length / training,
      compile_seconds=program.compile_seconds,
      seconds=progress.seconds,
      cpu_seconds=numbers()["cpu_seconds"],
      **log.curves(),
    )
  return carry, metrics


def first_carry(program: Program, checkpoints: Checkpoints) -> tuple[Carry, dict]:
  """Returns the arrays and numbers of the latest checkpoint, or those of a run that begins."""
  run = program.run
  carry = program.init(key_of(run.seed))
  if checkpoints.step is not None:
    return checkpoints.restore(carry)
  if run.init is not None:
    carry = carry._replace(parameters=parameters_in(run.init, carry.parameters))
  return carry, dict(step=0, seconds=0.0, cpu_seconds=0.0, training_seconds=0.0)


def some_rows(rows: Rows, count: int) -> Rows:
  """Returns `count` rows, evenly spread over the files; all if there are fewer."""
  number = len(rows.inputs)
  chosen = np.arange(min(count, number)) * number // min(count, number)
  return Rows(*(x[chosen] for x in rows))


class Log:
  """The lines of a run as it goes: bits per byte of each step and its share, held-out scores.

  A resumed run writes the steps after its checkpoint again; the later line of a step counts.
  """

  def __init__(self, path: pathlib.Path):
    self.path, self.lines = path, read(path)

  def add(self, line: dict) -> None:
    self.lines.append(line)
    append(self.path, line)

  def by_step(self, name: str) -> dict[int, float]:
    """Returns the numbers that stand under `name` in lists, by step."""
    return {
      line["step"] + n: x for line in self.lines if name in line for n, x in enumerate(line[name])
    }

  def shares(self) -> dict[int, float]:
    return self.by_step("shares")

  def curves(self) -> dict[str, list]:
    """Returns points for the figure: [step, seconds, bits per byte] in training and held out."""
    points = lambda name: {line["step"]: line for line in self.lines if name in line}
    training = [[n, x["seconds"], float(np.mean(x["bits"]))] for n, x in points("bits").items()]
    held_out = [[n, x["seconds"], x["held_out"]] for n, x in points("held_out").items()]
    return dict(curve=sorted(held_out), training_curve=sorted(training))
