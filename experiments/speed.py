"""How fast is each operation, in each of its forms, beside the plainest code and other libraries?

    python experiments/speed.py

times every op × form at batch 1, 4096 tokens, 4 heads of width 64, float32, and the baselines of `speed_baselines.py` in the
same run: the forward pass, and the loss sum(o o) + sum(state state) with the gradients of all inputs. Then one token of
decoding, far into a sequence. `--scaling` adds the time of the chunked form over the number of tokens, and as much time again.
About 4 minutes on two idle CPU cores; the last line says how much was waiting (more than half of the CPU time is compilation).

Expected on two CPU cores: of each op with a matrix state `chunked` has the fastest forward+backward, at least 3 times as fast
as a naive token scan; its time grows linearly (slope at most 1.05, attention apart); decoding does not feel the position.

All programs are compiled first, one after the other, then run in rounds, each once a round, so that a change of the machine's
load meets all of them alike. Figures are medians over the rounds; the ratio is the median over the rounds of (the reference's
time / the row's) in the same round, the reference being the naive token scan of the same op and number of tokens (for
attention, the quadratic softmax). Associative scans keep a map for every token and compile slowly: they are timed for two ops,
where needed at fewer tokens with a reference of as many; `--associative all` times them for every op.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import no_gpu  # isort: skip  # noqa: F401  # before jax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from recall_results import append, versions
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from speed_baselines import ASSOCIATIVE_SCAN, PLAIN, QUADRATIC, TOKEN_SCAN, Baseline, TorchTimer, installed

import lajax
import lajax.recurrence as R

FORMS = ("recurrent", "associative", "chunked", "auto", "pallas")
MAPS_MIB = 64  # forms that keep a map for every token are timed at as many tokens as fit in this
PATIENCE = 6.0  # seconds: no longer sequence is tried for an op once one run takes more than a quarter of this
CALLS = 10  # decode steps timed together
DECODE_ROUNDS = 40  # for each of the config's
POOL = 64  # different tokens that a decoded sequence is made of


# --- the ops ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Op:
  call: Callable[..., tuple]  # (**inputs, impl=) -> (outputs, state)
  draw: Callable[..., dict[str, np.ndarray]]  # (generator, config, T) -> inputs
  step: Callable[..., tuple] | None  # (state, **inputs without T) -> (state, output)
  map_size: Callable[[Any], int]  # config -> numbers in the maps that an associative scan keeps for one token


def _qkv(rng, c, T):
  draw = lambda width: rng.standard_normal((c.batch, T, c.heads, width))
  return {"q": draw(c.width), "k": draw(c.width), "v": draw(c.value_width or c.width)}


def _log_decay(rng, *shape):
  return -np.log1p(np.exp(-rng.standard_normal(shape))) / 16  # log sigmoid / 16, as in GLA


def _positive(rng, c, T):
  x = _qkv(rng, c, T)
  return x | {name: np.abs(x[name]) + 0.1 for name in "qk"}


def _delta(rng, c, T):
  x = _qkv(rng, c, T)
  k = x["k"] / np.linalg.norm(x["k"], axis=-1, keepdims=True)
  return x | {"k": k, "beta": 1 / (1 + np.exp(-rng.standard_normal((c.batch, T, c.heads))))}


def _gated(draw: Callable, gate: str):
  extra = lambda c: (c.width,) if gate == "channel" else ()
  return lambda rng, c, T: draw(rng, c, T) | {"g": _log_decay(rng, c.batch, T, c.heads, *extra(c))}


def _elementwise(rng, c, T):
  shape = (c.batch, T, c.heads * c.width)
  return {"x": rng.standard_normal(shape), "log_a": _log_decay(rng, *shape)}


_additive_map = lambda c: c.batch * c.heads * c.width * (c.value_width or c.width)
_matrix_map = lambda c: _additive_map(c) + c.batch * c.heads * c.width * c.width
_linear = functools.partial(Op, lajax.linear_attention, step=R.linear_attention_step, map_size=_additive_map)
_corrected = functools.partial(Op, lajax.delta_rule, step=R.delta_rule_step, map_size=_matrix_map)

OPS: dict[str, Op] = {
  "linear_attention": _linear(draw=_qkv),
  "simple_gla": _linear(draw=_gated(_qkv, "head")),
  "gla": _linear(draw=_gated(_qkv, "channel")),
  "normalized": Op(lajax.normalized_linear_attention, _positive, R.normalized_linear_attention_step, _additive_map),
  "delta_rule": _corrected(draw=_delta),
  "gated_delta_rule": _corrected(draw=_gated(_delta, "head")),
  "kda": _corrected(draw=_gated(_delta, "channel")),
  "linear_recurrence": Op(
    lajax.linear_recurrence, _elementwise, R.linear_recurrence_step, lambda c: 2 * c.batch * c.heads * c.width
  ),
  "attention": Op(lambda impl, **x: (lajax.attention(**x, impl=impl), ()), _qkv, None, lambda c: 0),
}
MEANING = {
  "linear_attention": "no decay",
  "simple_gla": "linear attention, one decay a head",
  "gla": "one decay a channel",
  "normalized": "linear attention over q . z",
  "kda": "delta rule, one decay a channel",
}


# --- the configuration -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
  """Times every operation of lajax in every form, beside baselines."""

  ops: tuple[str, ...] = tuple(OPS)
  """Names of ops, or all."""
  forms: tuple[str, ...] | None = None
  """Forms (values of impl); None: all, pallas only on a GPU."""
  associative: tuple[str, ...] = ("simple_gla", "linear_recurrence")
  """Ops whose associative scans are timed, or all: they take long to compile."""
  length: int = 4096
  """Tokens."""
  batch: int = 1
  """Sequences."""
  heads: int = 4
  """Heads; linear_recurrence has heads times width channels."""
  width: int = 64
  """Channels of a head's queries and keys."""
  value_width: int | None = None
  """Channels of a head's values; None: as the keys (jax.nn.dot_product_attention knows only that)."""
  dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
  """Of the inputs."""
  repeats: int = 5
  """Rounds in which every program runs once."""
  no_baselines: bool = False
  """Only the forms of lajax."""
  scaling: bool = False
  """Also time the chunked form over the numbers of tokens in --lengths."""
  lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
  """Of --scaling."""
  positions: tuple[int, ...] = (100, 100_000)
  """Tokens before the one whose decoding is timed."""
  out: pathlib.Path | None = None
  """File that gets a JSON line for every row."""
  device: Literal["auto", "cpu", "gpu"] = "auto"
  """Where to run; auto: a GPU if JAX sees one."""


def main() -> None:
  config = parse(sys.argv[1:])
  choose_device(config)
  run(config, Console(width=None if sys.stdout.isatty() else 160, highlight=False))


def run(config: Config, console: Console) -> None:
  started = time.perf_counter()
  config = dataclasses.replace(config, forms=config.forms or FORMS[: 5 if platform() == "gpu" else 4])
  others, missing = ({}, "") if config.no_baselines else installed()
  rows = plan(config, others)
  measured = measure(config, rows, console)
  console.print(forms_table(config, measured))
  for note in [*notes(config, measured), *([missing] if missing else [])]:
    console.print(note)
  lines = [row.as_line() for row in measured]
  decoded = decode(config)
  if decoded:
    console.print(decode_table(config, decoded))
  lines += decoded
  if config.scaling:
    scaled = scaling(config, console)
    console.print(scaling_table(config, scaled))
    lines += scaled
  console.print(f"Wall time of one process on a shared machine: {describe_device()}, jax {jax.__version__}.")
  if config.out:
    for line in lines:
      append(config.out, line | {"config": as_json(config), "versions": versions() | {"device": describe_device()}})
    console.print(f"{len(lines)} lines added to {config.out}")
  console.print(f"{time.perf_counter() - started:.0f} seconds in all, {time.process_time():.0f} of CPU time")


def parse(arguments: list[str]) -> Config:
  """The configuration of a command line. One line for a bad flag."""
  messages = io.StringIO()
  try:
    with contextlib.redirect_stderr(messages):
      config = tyro.cli(Config, args=arguments, prog="speed.py", config=(tyro.conf.FlagCreatePairsOff,))
  except SystemExit as end:
    if not end.code:  # --help
      raise
    box = [text.strip("│ ") for text in messages.getvalue().splitlines()[1:]]
    fail(" ".join(itertools.takewhile(lambda text: text.strip("─╰╯"), box)))  # what follows a rule repeats the help
  every = {name: tuple(OPS) for name in ("ops", "associative") if getattr(config, name) == ("all",)}
  config = dataclasses.replace(config, **every)
  if not config.ops or config.forms == ():
    fail("--ops and --forms need at least one value")
  for flag, given, known in (
    ("ops", config.ops, (*OPS, "all")),
    ("associative", config.associative, (*OPS, "all")),
    ("forms", config.forms or FORMS, FORMS),
  ):
    unknown = [name for name in given if name not in known]
    if unknown:
      fail(f"--{flag}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
  for name in ("length", "batch", "heads", "width", "value_width", "repeats", "lengths", "positions"):
    value = getattr(config, name)
    least = min(value, default=0) if isinstance(value, tuple) else value
    if least is not None and least < 1:
      fail(f"--{name.replace('_', '-')} must be at least 1; got {value}")
  if config.scaling and len(set(config.lengths)) < 2:
    fail(f"--lengths needs at least two different lengths for a slope; got {config.lengths}")
  return config


def fail(message: str) -> NoReturn:
  print(f"speed.py: error: {message}", file=sys.stderr)
  raise SystemExit(2)


def choose_device(config: Config) -> None:
  if config.dtype == "float64":
    jax.config.update("jax_enable_x64", True)
  if config.device != "auto":
    try:
      jax.config.update("jax_default_device", jax.devices(config.device)[0])
    except RuntimeError:
      fail(f"--device {config.device}: JAX sees no such device, only {', '.join(map(str, jax.devices()))}")


def device():
  return next(iter(jnp.zeros(()).devices()))


def platform() -> str:
  return device().platform


def describe_device() -> str:
  """The device's kind; of a CPU, the processor's name and the cores that this process may use."""
  if platform() != "cpu":
    return device().device_kind
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return f"{name}, {cores} cores"


def as_json(config: Config) -> dict:
  return json.loads(json.dumps(dataclasses.asdict(config), default=str))


# --- forms and baselines ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
  """One op in one form, or one baseline, at so many tokens; the figures are None where it cannot run."""

  op: str
  name: str
  length: int
  baseline: Baseline | None = None
  forward: list[float] | None = None  # seconds, one a round
  both: list[float] | None = None
  ratio: float | None = None
  compile_seconds: float | None = None
  temp_mib: float | None = None
  loss: float | None = None
  why_not: str = ""

  def as_line(self) -> dict:
    kind = "form" if self.baseline is None else "baseline"
    times = {"forward_ms": _ms(self.forward), "both_ms": _ms(self.both)}
    rounds = {"forward_seconds": self.forward, "both_seconds": self.both}
    names = ("ratio", "compile_seconds", "temp_mib", "why_not")
    where = {"task": "speed", "op": self.op, "kind": kind, "name": self.name, "length": self.length}
    return where | times | {name: getattr(self, name) for name in names} | rounds


def _ms(seconds: list[float] | None) -> float | None:
  return None if seconds is None else 1e3 * statistics.median(seconds)


def plan(config: Config, others: dict[str, dict[str, Baseline]]) -> list[Row]:
  """The rows: of each op the forms, then its baselines, then at fewer tokens what keeps a map for every token."""
  rows = []
  for op in config.ops:
    baselines = {} if config.no_baselines else PLAIN[op] | others.get(op, {})
    if op not in config.associative:
      baselines = {name: baseline for name, baseline in baselines.items() if name != ASSOCIATIVE_SCAN}
    short = short_length(config, op)
    names: list[tuple[str, Baseline | None]] = [(form, None) for form in config.forms or FORMS]
    names += baselines.items()
    few = [(name, baseline) for name, baseline in names if needs_short(op, name)]
    if short == config.length or not few:
      rows += [Row(op, name, config.length, baseline) for name, baseline in names]
      continue
    rows += [Row(op, name, config.length, baseline) for name, baseline in names if not needs_short(op, name)]
    untimed = op not in config.associative and [name for name, _ in few] == ["associative"]
    if reference_of(op) in baselines and not untimed:
      few.append((reference_of(op), baselines[reference_of(op)]))
    rows += [Row(op, name, short, baseline) for name, baseline in few]
  return rows


def reference_of(op: str) -> str:
  return QUADRATIC if op == "attention" else TOKEN_SCAN


def needs_short(op: str, name: str) -> bool:
  """Whether this keeps a map for every token or, as attention query by query, takes very long."""
  return name in ("associative", ASSOCIATIVE_SCAN) or (op, name) == ("attention", "recurrent")


def short_length(config: Config, op: str) -> int:
  """As many tokens, halving, as an associative scan's maps fit in MAPS_MIB for; of attention a quarter."""
  T = config.length
  if op == "attention":
    return max(1, T // 4)
  while T > 64 and 4 * T * OPS[op].map_size(config) > MAPS_MIB * 2**20:
    T //= 2
  return T


@functools.lru_cache(maxsize=4)
def inputs_of(config: Config, op: str, T: int) -> dict[str, jax.Array]:
  drawn = OPS[op].draw(np.random.default_rng(0), config, T)
  return {name: jnp.asarray(x, dtype=config.dtype) for name, x in drawn.items()}


def loss_of(result) -> jax.Array:
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return jnp.stack([(wide(x) ** 2).sum() for x in jax.tree.leaves(result)]).sum()


class JaxProgram:
  """The compiled forward pass, and loss with all gradients, of one function of an op's inputs."""

  def __init__(self, call: Callable, inputs: dict[str, jax.Array], same_as: Iterable["JaxProgram"] = ()):
    self.inputs = inputs
    started = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(lambda inputs: loss_of(call(**inputs)))).lower(inputs)
    self.text = lowered.as_text()
    self.twin = next((other for other in same_as if other.text == self.text), None)
    if self.twin is not None:
      return
    self.both_compiled = lowered.compile()
    self.compile_seconds = time.perf_counter() - started
    self.forward_compiled = jax.jit(lambda inputs: call(**inputs)).lower(inputs).compile()
    memory = self.both_compiled.memory_analysis()
    self.temp_mib = None if memory is None else memory.temp_size_in_bytes / 2**20

  def forward(self) -> None:
    jax.block_until_ready(self.forward_compiled(self.inputs))

  def both(self) -> float:
    loss, _ = jax.block_until_ready(self.both_compiled(self.inputs))
    return float(loss)


def measure(config: Config, rows: Sequence[Row], console: Console) -> list[Row]:
  """Compiles every row's programs, runs each once, then in rounds; fills the rows' figures."""
  timed: dict[int, Any] = {}  # by the row's place
  twins: list[tuple[Row, Row]] = []
  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    task = progress.add_task("compiling", total=len(rows))
    for n, row in enumerate(rows):
      progress.update(task, description=f"compiling {row.op}, {row.name}", completed=n)
      if row.name == "associative" and row.op not in config.associative:
        row.why_not = "not timed, as it takes long to compile; --associative all does"
        continue
      earlier = {m: p for m, p in timed.items() if rows[m].op == row.op and isinstance(p, JaxProgram)}
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
      except RuntimeError as error:  # code of other libraries that writes in place cannot be differentiated
        if not isinstance(program, TorchTimer):
          raise
        row.why_not = f"no gradients: {str(error).splitlines()[0]}"
      if isinstance(program, JaxProgram):
        row.compile_seconds, row.temp_mib = program.compile_seconds, program.temp_mib
    progress.update(task, description="timing", completed=0, total=config.repeats * len(timed))
    for n in timed:
      rows[n].forward, rows[n].both = [], None if rows[n].loss is None else []
    for _, (n, program) in itertools.product(range(config.repeats), timed.items()):
      for run, times in ((program.forward, rows[n].forward), (program.both, rows[n].both)):
        if times is not None:
          times.append(seconds_of(run))
      progress.advance(task)
  for row, twin in twins:
    copied = {name: getattr(twin, name) for name in ("forward", "both", "compile_seconds", "temp_mib", "loss")}
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
  with jax.default_matmul_precision("default" if half else "highest"):  # as lajax computes: no tf32 for float32
    return JaxProgram(row.baseline.call, inputs)


def seconds_of(run: Callable) -> float:
  started = time.perf_counter()
  run()
  return time.perf_counter() - started


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
  same = [r for r in rows if (r.op, r.name, r.length) == (row.op, reference_of(row.op), row.length)]
  if not same or not same[0].both or not row.both:
    return None
  return statistics.median(theirs / ours for theirs, ours in zip(same[0].both, row.both, strict=True))


def forms_table(config: Config, rows: Sequence[Row]) -> Table:
  value_width = config.value_width or config.width
  sizes = f"batch {config.batch}, {config.heads} heads, K {config.width}, V {value_width}, {config.dtype}"
  table = Table(title=f"Speed: {sizes}; {describe_device()}; median of {config.repeats} rounds")
  for name in ("op", "form or baseline"):
    table.add_column(name, no_wrap=True)
  for name in ("tokens", "forward ms", "f+b ms", "lowest - highest", "ratio", "compile s", "temp MiB"):
    table.add_column(name, justify="right", no_wrap=True)
  for row, following in itertools.zip_longest(rows, rows[1:]):
    number = lambda x, form=".1f": "-" if x is None else format(x, form)
    spread = "-" if not row.both else f"{1e3 * min(row.both):.1f} - {1e3 * max(row.both):.1f}"
    table.add_row(
      row.op,
      row.name if row.baseline is None else f"  {row.name}",
      str(row.length),
      number(_ms(row.forward)),
      number(_ms(row.both)),
      spread,
      number(row.ratio, ".2f"),
      number(row.compile_seconds),
      number(row.temp_mib, ".0f"),
      end_section=following is not None and following.op != row.op,
    )
  return table


def notes(config: Config, rows: Sequence[Row]) -> list[str]:
  """What the table cannot say."""
  found = [f"{name}: {meaning}." for name, meaning in MEANING.items() if name in config.ops]
  found = [" ".join(found)] if found else []
  found.append(
    "f+b: loss sum(o o) + sum(state state) and the gradients of all inputs. ratio: f+b of the naive token scan (attention: "
    "of the quadratic softmax) at the same tokens over the row's, so larger is faster. compile and temp: of f+b."
  )
  if any(row.both and row.length != config.length for row in rows):
    found.append(
      f"Rows of fewer than {config.length} tokens: associative scans, which keep a map for every token, where all maps exceed "
      f"{MAPS_MIB} MiB; attention's recurrent form, which reads all keys for each query. Not timed at {config.length}."
    )
  for why, group in itertools.groupby(sorted(rows, key=lambda row: row.why_not), key=lambda row: row.why_not):
    if why:
      found.append(f"{', '.join(f'{row.op} {row.name}' for row in group)}: {why}")
  tolerance = 1e-3 if config.dtype in ("float32", "float64") else 0.1
  for (op, T), group in itertools.groupby(rows, key=lambda row: (row.op, row.length)):
    losses = {row.name: row.loss for row in group if row.loss is not None}
    first = next(iter(losses.values()), 0.0)
    odd = [f"{name} {loss:.6g}" for name, loss in losses.items() if not abs(loss - first) <= tolerance * abs(first)]
    if odd:
      found.append(f"{op} at {T} tokens: these losses differ from {next(iter(losses))}'s {first:.6g}: {', '.join(odd)}")
  return found


# --- one token of decoding -------------------------------------------------------------------------------------------


def decode(config: Config) -> list[dict]:
  """Time of one `lajax.recurrence.*_step` from the states after so many tokens, by op and position."""
  lines = []
  for name in config.ops:
    op = OPS[name]
    if op.step is None:
      continue
    pool = inputs_of(config, name, POOL)
    token = {key: x[:, 0] for key, x in pool.items()}
    shapes = jax.eval_shape(functools.partial(op.call, impl="recurrent"), **pool)[1]
    step = jax.jit(functools.partial(_one_step, op.step), donate_argnums=0).lower(shapes, token).compile()
    advance = jax.jit(functools.partial(_many_steps, op.step))
    states = {position: advance(_zeros(shapes), pool, position) for position in config.positions}
    times: dict[int, list[float]] = {position: [] for position in states}
    for n, position in itertools.product(range(1 + DECODE_ROUNDS * config.repeats), states):
      state = states[position]
      started = time.perf_counter()
      for _ in range(CALLS):
        state, _ = step(state, token)
      states[position] = jax.block_until_ready(state)
      if n:  # the first round warms up
        times[position].append((time.perf_counter() - started) / CALLS)
    lines += [
      {"task": "speed_decode", "op": name, "position": position, "step_us": 1e6 * statistics.median(t), "step_seconds": t}
      for position, t in times.items()
    ]
  return lines


def _one_step(step: Callable, state, token):
  return step(state, **token)


def _many_steps(step: Callable, state, pool, count):
  """The state after so many tokens, taken from a pool in turn."""

  def body(n, state):
    token = {key: jax.lax.dynamic_index_in_dim(x, n % POOL, 1, keepdims=False) for key, x in pool.items()}
    return step(state, **token)[0]

  return jax.lax.fori_loop(0, count, body, state)


def _zeros(shapes):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def decode_table(config: Config, lines: list[dict]) -> Table:
  table = Table(title=f"Decoding one token, µs (state donated; {describe_device()})")
  table.add_column("op", no_wrap=True)
  for position in config.positions:
    table.add_column(f"at position {position:,}", justify="right")
  table.add_column("last / first", justify="right")
  for op, group in itertools.groupby(lines, key=lambda line: line["op"]):
    group = list(group)
    rounds = zip(group[-1]["step_seconds"], group[0]["step_seconds"], strict=True)
    quotient = statistics.median(last / first for last, first in rounds)
    table.add_row(op, *(f"{line['step_us']:.1f}" for line in group), f"{quotient:.2f}")
  return table


# --- time over the number of tokens ----------------------------------------------------------------------------------


def scaling(config: Config, console: Console) -> list[dict]:
  """Forward+backward of the chunked form at several numbers of tokens, by op, and the slope of log time over log tokens."""
  lines = []
  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    task = progress.add_task("scaling", total=len(config.ops))
    for name in config.ops:
      programs: dict[int, JaxProgram] = {}
      for T in sorted(set(config.lengths)):
        progress.update(task, description=f"scaling: {name}, {T} tokens")
        program = JaxProgram(functools.partial(OPS[name].call, impl="chunked"), inputs_of(config, name, T))
        program.both()
        programs[T] = program
        if seconds_of(program.both) > PATIENCE / 4:
          break
      times: dict[int, list[float]] = {T: [] for T in programs}
      for _, (T, program) in itertools.product(range(config.repeats), programs.items()):
        times[T].append(seconds_of(program.both))
      medians = [statistics.median(t) for t in times.values()]
      slope = float(np.polyfit(np.log(list(times)), np.log(medians), 1)[0]) if len(times) > 1 else None
      lines += [
        {"task": "speed_scaling", "op": name, "name": "chunked", "length": T, "both_ms": _ms(t), "both_seconds": t, "slope": slope}
        for T, t in times.items()
      ]
      progress.advance(task)
  return lines


def scaling_table(config: Config, lines: list[dict]) -> Table:
  table = Table(title=f"Chunked form, forward+backward, µs a token ({describe_device()})")
  table.add_column("op", no_wrap=True)
  lengths = sorted(set(config.lengths))
  for T in lengths:
    table.add_column(f"{T} tokens", justify="right")
  table.add_column("slope of log time over log tokens", justify="right")
  for op, group in itertools.groupby(lines, key=lambda line: line["op"]):
    group = list(group)
    a_token = {line["length"]: 1e3 * line["both_ms"] / line["length"] for line in group}
    slope = "-" if group[0]["slope"] is None else f"{group[0]['slope']:.3f}"
    table.add_row(op, *(f"{a_token[T]:.1f}" if T in a_token else "-" for T in lengths), slope)
  return table


if __name__ == "__main__":
  main()
