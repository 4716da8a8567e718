"""Timing of ops: rows of the table, compiled programs, rounds, decoding, scaling."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from speed.baselines import ASSOCIATIVE_SCAN, PLAIN, QUADRATIC, TOKEN_SCAN, Baseline, TorchTimer
from speed.cases import OPS
from speed.config import IMPLS, Config, platform

# Programs that keep a transition per token are timed at fewer tokens, so that these fit in this.
TRANSITIONS_MIB = 64
# Seconds. Scaling tries no longer sequence once one run of an op takes more than a quarter of this.
PATIENCE = 6.0
CALLS = 10  # decode steps timed together
DECODE_ROUNDS = 40  # rounds of decoding per round of the configuration
POOL = 64  # different tokens that a decoded sequence is made of


@dataclasses.dataclass
class Row:
  """An op in one implementation, or a baseline. Figures are None where it cannot run."""

  op: str
  name: str
  length: int
  baseline: Baseline | None = None
  forward: list[float] | None = None  # seconds, one per round
  both: list[float] | None = None  # forward+backward
  ratio: float | None = None
  compile_seconds: float | None = None
  temp_mib: float | None = None
  loss: float | None = None
  why_not: str = ""

  def as_line(self) -> dict:
    kind = "implementation" if self.baseline is None else "baseline"
    times = {"forward_ms": milliseconds(self.forward), "both_ms": milliseconds(self.both)}
    rounds = {"forward_seconds": self.forward, "both_seconds": self.both}
    names = ("ratio", "compile_seconds", "temp_mib", "why_not")
    where = {"task": "speed", "op": self.op, "kind": kind, "name": self.name, "length": self.length}
    return where | times | {name: getattr(self, name) for name in names} | rounds


def milliseconds(seconds: list[float] | None) -> float | None:
  return None if seconds is None else 1e3 * statistics.median(seconds)


def plan(config: Config, others: dict[str, dict[str, Baseline]]) -> list[Row]:
  """Returns the rows of each op: implementations, baselines, and those at fewer tokens."""
  rows = []
  for op in config.ops:
    baselines = {} if config.no_baselines else PLAIN[op] | others.get(op, {})
    if op not in config.associative:
      baselines = {
        name: baseline for name, baseline in baselines.items() if name != ASSOCIATIVE_SCAN
      }
    short = short_length(config, op)
    names: list[tuple[str, Baseline | None]] = [(impl, None) for impl in config.forms or IMPLS]
    names += baselines.items()
    few = [(name, baseline) for name, baseline in names if needs_short(op, name)]
    if short == config.length or not few:
      rows += [Row(op, name, config.length, baseline) for name, baseline in names]
      continue
    rows += [
      Row(op, name, config.length, baseline)
      for name, baseline in names
      if not needs_short(op, name)
    ]
    untimed = op not in config.associative and [name for name, _ in few] == ["associative"]
    if reference_of(op) in baselines and not untimed:
      few.append((reference_of(op), baselines[reference_of(op)]))
    rows += [Row(op, name, short, baseline) for name, baseline in few]
  return rows


def reference_of(op: str) -> str:
  return QUADRATIC if op == "attention" else TOKEN_SCAN


def needs_short(op: str, name: str) -> bool:
  """Returns whether a row is timed at fewer tokens, since it needs much memory or time."""
  return name in ("associative", ASSOCIATIVE_SCAN) or (op, name) == ("attention", "recurrent")


def short_length(config: Config, op: str) -> int:
  """Halves the tokens until the transitions of an associative scan fit; a quarter for attention."""
  T = config.length
  if op == "attention":
    return max(1, T // 4)
  while T > 64 and 4 * T * OPS[op].transition_size(config) > TRANSITIONS_MIB * 2**20:
    T //= 2
  return T


@functools.lru_cache(maxsize=4)
def inputs_of(config: Config, op: str, T: int) -> dict[str, jax.Array]:
  drawn = OPS[op].draw(np.random.default_rng(0), config, T)
  return {name: jnp.asarray(x, dtype=config.dtype) for name, x in drawn.items()}


def loss_of(result) -> jax.Array:
  wide = lambda x: x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
  return jnp.stack([(wide(x) ** 2).sum() for x in jax.tree.leaves(result)]).sum()


class JaxProgram:
  """A function of an op's inputs, compiled as forward pass and as loss with all gradients.

  `twin` is the program among `same_as` with the same text, if there is one. It is then not compiled
  again.
  """

  def __init__(
    self,
    call: Callable,
    inputs: dict[str, jax.Array],
    same_as: Iterable["JaxProgram"] = (),
    *,
    forward_alone: bool = True,
  ):
    self.inputs = inputs
    started = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(lambda inputs: loss_of(call(**inputs)))).lower(inputs)
    self.text = lowered.as_text()
    self.twin = next((other for other in same_as if other.text == self.text), None)
    if self.twin is not None:
      return
    self.both_compiled = lowered.compile()
    self.compile_seconds = time.perf_counter() - started
    if forward_alone:
      self.forward_compiled = jax.jit(lambda inputs: call(**inputs)).lower(inputs).compile()
    memory = self.both_compiled.memory_analysis()
    self.temp_mib = None if memory is None else memory.temp_size_in_bytes / 2**20

  def forward(self, times: int = 1) -> None:
    for _ in range(times):
      out = self.forward_compiled(self.inputs)
    jax.block_until_ready(out)

  def both(self, times: int = 1) -> float:
    for _ in range(times):
      out = self.both_compiled(self.inputs)
    return float(jax.block_until_ready(out)[0])


def measure(config: Config, rows: Sequence[Row], console: Console) -> list[Row]:
  """Compiles the programs of every row, runs each once, then in rounds. Fills the figures."""
  timed: dict[int, Any] = {}  # by the row's place
  twins: list[tuple[Row, Row]] = []
  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    task = progress.add_task("compiling", total=len(rows))
    for n, row in enumerate(rows):
      progress.update(task, description=f"compiling {row.op}, {row.name}", completed=n)
      if row.name == "associative" and row.op not in config.associative:
        row.why_not = "not timed, as it takes long to compile; --associative all does"
        continue
      earlier = {
        m: p for m, p in timed.items() if rows[m].op == row.op and isinstance(p, JaxProgram)
      }
      try:
        program = build(config, row, earlier.values())
        if isinstance(program, JaxProgram) and program.twin is not None:
          twins += [(row, rows[m]) for m, p in earlier.items() if p is program.twin]
          continue
        program.forward()
        timed[n] = program
      except NotImplementedError as error:
        row.why_not = str(error)
        continue
      try:
        row.loss = program.both()
      except RuntimeError as error:
        # Code of other libraries that writes in place cannot be differentiated.
        if not isinstance(program, TorchTimer):
          raise
        row.why_not = f"no gradients: {str(error).splitlines()[0]}"
      if isinstance(program, JaxProgram):
        row.compile_seconds, row.temp_mib = program.compile_seconds, program.temp_mib
    on_gpu = platform() == "gpu"
    progress.update(task, description="timing", completed=0, total=config.repeats * len(timed))
    for n in timed:
      rows[n].forward, rows[n].both = [], None if rows[n].loss is None else []
    for _, (n, program) in itertools.product(range(config.repeats), timed.items()):
      for run, times in ((program.forward, rows[n].forward), (program.both, rows[n].both)):
        if times is not None:
          times.append(seconds_of(run, on_gpu))
      progress.advance(task)
  for row, twin in twins:
    copied = {
      name: getattr(twin, name)
      for name in ("forward", "both", "compile_seconds", "temp_mib", "loss")
    }
    for name, value in copied.items():
      setattr(row, name, value)
    row.why_not = f"the same program as {twin.name}"
  for row in rows:
    row.ratio = ratio(row, rows)
  return list(rows)


def build(config: Config, row: Row, earlier: Iterable[JaxProgram]) -> "JaxProgram | TorchTimer":
  inputs = inputs_of(config, row.op, row.length)
  if row.baseline is None:
    return JaxProgram(functools.partial(OPS[row.op].call, impl=row.name), inputs, earlier)
  if row.baseline.library == "torch":
    return TorchTimer(row.baseline.call, inputs, platform())
  half = config.dtype in ("bfloat16", "float16")
  # As lajax computes: float32 products without tf32.
  with jax.default_matmul_precision("default" if half else "highest"):
    return JaxProgram(row.baseline.call, inputs)


SHORT = 0.25  # seconds: shorter runs are repeated
BURST = 0.05  # seconds of runs in succession on a GPU


def seconds_of(run: Callable[[int], Any], on_gpu: bool) -> float:
  """Returns the wall time of one run.

  A short run is repeated at once, and the second time counts: it finds its memory as a training
    loop does. On a GPU the
  time is the mean over as many runs in succession as take BURST, so that starting one run hides
  behind another.
  """
  taken = _timed(run, 1)
  if taken < SHORT:
    taken = _timed(run, 1)
  if on_gpu and taken < BURST:
    times = math.ceil(BURST / taken)
    taken = _timed(run, times) / times
  return taken


def _timed(run: Callable[[int], Any], times: int) -> float:
  started = time.perf_counter()
  run(times)
  return time.perf_counter() - started


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
  same = [r for r in rows if (r.op, r.name, r.length) == (row.op, reference_of(row.op), row.length)]
  if not same or not same[0].both or not row.both:
    return None
  return statistics.median(
    theirs / ours for theirs, ours in zip(same[0].both, row.both, strict=True)
  )


def decode(config: Config) -> list[dict]:
  """Times one `lajax.recurrence.*_step` for each op, from the state at each position."""
  lines = []
  for name in config.ops:
    op = OPS[name]
    if op.step is None:
      continue
    pool = inputs_of(config, name, POOL)
    shared = {key: pool[key] for key in op.untimed}
    timed = {key: x for key, x in pool.items() if key not in shared}
    token = shared | {key: x[:, 0] for key, x in timed.items()}
    shapes = jax.eval_shape(functools.partial(op.call, impl="recurrent"), **pool)[1]
    step = (
      jax.jit(functools.partial(_one_step, op.step), donate_argnums=0)
      .lower(shapes, token)
      .compile()
    )
    advance = jax.jit(functools.partial(_many_steps, op.step))
    states = {
      position: advance(_zeros(shapes), timed, shared, position) for position in config.positions
    }
    times: dict[int, list[float]] = {position: [] for position in states}
    for n, position in itertools.product(range(1 + DECODE_ROUNDS * config.repeats), states):
      state = states[position]
      started = time.perf_counter()
      for _ in range(CALLS):
        state, _ = step(state, token)
      states[position] = jax.block_until_ready(state)
      if n:  # the first round warms up
        times[position].append((time.perf_counter() - started) / CALLS)
    for position, t in times.items():
      where = {"task": "speed_decode", "op": name, "position": position}
      lines.append(where | {"step_us": 1e6 * statistics.median(t), "step_seconds": t})
  return lines


def _one_step(step: Callable, state, token):
  return step(state, **token)


def _many_steps(step: Callable, state, pool, shared, count):
  """Returns the state after `count` tokens, which are taken from a pool in turn."""

  def body(n, state):
    token = {
      key: jax.lax.dynamic_index_in_dim(x, n % POOL, 1, keepdims=False) for key, x in pool.items()
    }
    return step(state, **shared, **token)[0]

  return jax.lax.fori_loop(0, count, body, state)


def _zeros(shapes):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def scaling(config: Config, console: Console) -> list[dict]:
  """Times forward+backward of the chunked implementation for each op and number of tokens.

  The slope is that of log time against log tokens: 1 is linear.
  """
  lines, on_gpu = [], platform() == "gpu"
  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    task = progress.add_task("scaling", total=len(config.ops))
    for name in config.ops:
      programs: dict[int, JaxProgram] = {}
      for T in sorted(set(config.lengths)):
        progress.update(task, description=f"scaling: {name}, {T} tokens")
        call = functools.partial(OPS[name].call, impl="chunked")
        program = JaxProgram(call, inputs_of(config, name, T), forward_alone=False)
        program.both()
        programs[T] = program
        if seconds_of(program.both, on_gpu) > PATIENCE / 4:
          break
      times: dict[int, list[float]] = {T: [] for T in programs}
      for _, (T, program) in itertools.product(range(config.repeats), programs.items()):
        times[T].append(seconds_of(program.both, on_gpu))
      medians = [statistics.median(t) for t in times.values()]
      slope = (
        float(np.polyfit(np.log(list(times)), np.log(medians), 1)[0]) if len(times) > 1 else None
      )
      for T, t in times.items():
        where = {"task": "speed_scaling", "op": name, "name": "chunked", "length": T}
        lines.append(where | {"both_ms": milliseconds(t), "both_seconds": t, "slope": slope})
      progress.advance(task)
  return lines
