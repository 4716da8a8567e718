"""The two tables that all tests of the ops iterate over: the cases, and the error budget.

A case is an op, a kind of gate and a sampler of inputs. Its *rows* are kinds of values (ordinary gates, gates of -inf, equal
keys, ...) that stand side by side in the batch axis: one compiled function then answers for all of them, and each row is
held to the budget by itself. A new op, or a new member of a family, is one row in `CASES`.

Comparisons are by relative RMS against `impl="recurrent"` in float64, on the same (rounded) inputs.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equations
import jax
import ml_dtypes
import numpy as np
import pytest

import lajax
import lajax.recurrence

# --- the error budget ------------------------------------------------------------------------------------------------

BUDGET = {  # relative RMS: of outputs and states, of gradients of q k v x and of states, of gradients of gates
  "float64": {"value": 1e-12, "gradient": 1e-11, "gate": 1e-10},
  "float32": {"value": 5e-6, "gradient": 1e-5, "gate": 5e-5},
  "bfloat16": {"value": 5e-3, "gradient": 8e-3, "gate": 2e-2},
}
GATES = ("g", "beta", "log_a", "log_forget", "sink", "erase", "write", "i", "f")

# A normalised average does not move with its weights where one key has them all: its dq, dk and dlog_forget are then 0 as a
# difference of terms of size 1. Against a result that small, rounding is measured relative to this size instead.
CANCELLATION = 0.1

# One key for all tokens and beta = 2 without decay: every token reflects the state, an eigenvalue of -1. A relative error e in
# k . k, which the chunked form computes once for each pair of equal tokens, then enters every token alike and adds up to 2 T e:
# with T = 100 and one float32 rounding (6e-8) of each of the product and the inverse, 2.4e-5. `recurrent` forms S^T k afresh
# in each token, and its errors average.
REFLECTION = 20.0  # times the budget, in float32, for rows of that kind


def relative_rms(got, want, floor: float = 0.0) -> float:
  """RMS of got - want over RMS of want. An exact zero must be met exactly, unless there is a floor."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
  if not np.isfinite(got).all():
    return np.inf
  error = np.sqrt(np.mean((got - want) ** 2)) if want.size else 0.0
  size = max(np.sqrt(np.mean(want**2)), floor) if want.size else 0.0
  return 0.0 if error == 0 else float(error / size) if size else np.inf


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes by the letters of `lajax._shapes`; the batch size is the number of rows."""

  T: int = 100
  H: int = 1
  HV: int = 2
  K: int = 12
  V: int = 20


ROWS = {  # log decays (and everything else drawn as usual)
  "plain": lambda rng, shape: -0.3 * rng.exponential(size=shape),
  "mixed": lambda rng, shape: rng.choice([0, 0, -1e-4, -0.1, -1, -5, -20], size=shape),
  "forget": lambda rng, shape: np.full(shape, -20.0),
  "cliff": lambda rng, shape: np.where(rng.random(shape) < 0.1, -1e4, -0.1 * rng.random(shape)),
  "inf": lambda rng, shape: np.where(rng.random(shape) < 0.1, -np.inf, -0.1 * rng.random(shape)),
  "zero": lambda rng, shape: np.zeros(shape),
  # Half of the tokens at -1e8, then small ones: a suffix sum formed as "total - prefix" loses the small ones altogether.
  "steep": lambda rng, shape: (
    np.where(np.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2)) < 32, -1e8, -1 / 32.0)
    + np.zeros(shape)
  ),
  "positive": lambda rng, shape: np.full(
    shape, 0.01
  ),  # a caller's error that must stay finite, and equal to recurrent
}
KEY_ROWS = {  # delta rule: what the keys and the write strengths are
  "repeated": lambda k, beta: (np.broadcast_to(k[:, :1], k.shape), np.ones_like(beta)),
  "reflected": lambda k, beta: (np.broadcast_to(k[:, :1], k.shape), 2 * np.ones_like(beta)),
}


def _normal(rng, *shape):
  return rng.standard_normal(shape)


def _unit(rng, *shape):
  x = rng.standard_normal(shape)
  return x / np.sqrt((x * x).sum(-1, keepdims=True))


def _decays(rng, gate: str, row: str, s: Shape) -> dict[str, np.ndarray]:
  if gate == "none":
    return {}
  return {"g": ROWS[row](rng, (1, s.T, s.HV) if gate == "head" else (1, s.T, s.HV, s.K))}


def _linear_attention(rng, gate, row, s):
  return {
    "q": _normal(rng, 1, s.T, s.H, s.K),
    "k": _normal(rng, 1, s.T, s.H, s.K),
    "v": _normal(rng, 1, s.T, s.HV, s.V),
    **_decays(rng, gate, row, s),
    "initial_state": _normal(rng, 1, s.HV, s.K, s.V),
  }


def _normalized(rng, gate, row, s):
  positive = lambda *shape: 0.1 + np.abs(_normal(rng, *shape))  # features, as of elu + 1
  return _linear_attention(rng, gate, row, s) | {
    "q": positive(1, s.T, s.H, s.K),
    "k": positive(1, s.T, s.H, s.K),
    "initial_state": (_normal(rng, 1, s.HV, s.K, s.V), positive(1, s.HV, s.K)),
  }


def _delta_rule(rng, gate, row, s):
  k, beta = _unit(rng, 1, s.T, s.H, s.K), rng.uniform(0, 2 if row == "zero" else 1, (1, s.T, s.HV))
  if row in KEY_ROWS:
    k, beta = KEY_ROWS[row](k, beta)
  decays = _decays(rng, gate, "plain" if row in KEY_ROWS else row, s)
  return _linear_attention(rng, "none", row, s) | {"k": k, "beta": beta} | decays


def _bonus(rng, gate, row, s):
  inputs = _linear_attention(rng, "channel", row, s)
  return inputs | {"bonus": _normal(rng, s.H, s.K)}


def _gates_a_channel(rng, gate, row, s):
  inputs = _delta_rule(rng, "channel", row, s)
  inputs.pop("beta")
  erase, write = rng.uniform(size=(1, s.T, s.HV, s.K)), rng.uniform(size=(1, s.T, s.HV, s.V))
  return inputs | {"erase": erase, "write": write}


def _gated_oja(rng, gate, row, s):
  inputs = _linear_attention(rng, "none", row, s)
  decays = (
    {}
    if gate == "none"
    else {"g": ROWS[row](rng, (1, s.T, s.HV) if gate == "head" else (1, s.T, s.HV, s.V))}
  )
  return (
    inputs | {"v": _unit(rng, 1, s.T, s.HV, s.V), "beta": rng.uniform(size=(1, s.T, s.HV))} | decays
  )


def _delta_product(rng, gate, row, s, R=2):
  inputs = _linear_attention(rng, gate, row, s)
  return inputs | {
    "k": _unit(rng, 1, s.T, R, s.H, s.K),
    "v": _normal(rng, 1, s.T, R, s.HV, s.V),
    "beta": rng.uniform(0, 2, (1, s.T, R, s.HV)),
  }


def _dplr(rng, gate, row, s):
  kappa = _unit(rng, 1, s.T, s.H, s.K)
  inputs = _linear_attention(rng, gate, row, s)
  return inputs | {"a": -kappa, "b": kappa * rng.uniform(size=(1, s.T, s.H, s.K))}


def _mlstm(rng, gate, row, s):
  """n . q is of either sign, but not near zero, where the output has a pole; exp(-m) is above it for some tokens."""
  inputs = _normalized(rng, "none", row, s)
  q = inputs["q"] * rng.choice([-1, 1], (1, s.T, s.H, 1))
  i, f = 2 * _normal(rng, 1, s.T, s.HV) - 1, ROWS[row](rng, (1, s.T, s.HV))
  return inputs | {
    "q": q,
    "i": i,
    "f": f,
    "initial_state": (*inputs["initial_state"], _normal(rng, 1, s.HV)),
  }


def _linear_recurrence(rng, gate, row, s):
  trailing = (s.V,) if gate == "vector" else (s.V, 12)  # [B T D], or Mamba's [B T D N]
  return {
    "x": _normal(rng, 1, s.T, *trailing),
    "log_a": ROWS[row](rng, (1, s.T, *trailing)),
    "initial_state": _normal(rng, 1, *trailing),
  }


def _attention(rng, gate, row, s):
  heads = s.HV  # here the queries have more heads than the keys
  qkv = {
    "q": _normal(rng, 1, s.T, heads, s.K),
    "k": _normal(rng, 1, s.T, s.H, s.K),
    "v": _normal(rng, 1, s.T, s.H, s.V),
  }
  if gate == "forget":
    return qkv | {"log_forget": ROWS[row](rng, (1, s.T, heads))}
  return qkv | ({"sink": _normal(rng, heads)} if gate == "window_sink" else {})


# --- the table of cases ----------------------------------------------------------------------------------------------

LINEAR = ("recurrent", "associative", "chunked")


@dataclasses.dataclass(frozen=True)
class Case:
  """One op with one kind of gate. `sample(rng, gate, row, shape)` draws one row of inputs, as float64 arrays."""

  op: str
  gate: str
  sample: Callable
  equation: Callable
  rows: tuple[str, ...]
  impls: tuple[str, ...] = LINEAR
  options: tuple[tuple[str, Any], ...] = ()
  chunked: bool = True  # takes chunk_size
  stateful: bool = True
  untimed: tuple[str, ...] = ("initial_state", "sink")  # arguments without an axis T
  shared: tuple[str, ...] = ("sink",)  # arguments without an axis B: the same for all rows
  output: Callable = lambda arrays: arrays["v"].shape  # shape of o
  cancelling: tuple[str, ...] = ()  # gradients that may cancel to nothing; see CANCELLATION

  @property
  def id(self) -> str:
    return f"{self.op}-{self.gate}"

  def step(self) -> Callable:
    return getattr(lajax.recurrence, f"{self.op}_step")


GATED = tuple(ROWS)
MATRIX_GATES = [("none", ("plain",)), ("head", GATED), ("channel", GATED)]
_recurrence = functools.partial(
  Case,
  "linear_recurrence",
  sample=_linear_recurrence,
  equation=equations.scan(lambda h, t: np.exp(t["log_a"]) * h + t["x"], lambda h, t, scale: h),
  chunked=False,
  output=lambda arrays: arrays["x"].shape,
)
_softmax_attention = functools.partial(
  Case,
  "attention",
  sample=_attention,
  chunked=False,
  stateful=False,
  output=lambda arrays: (*arrays["q"].shape[:3], arrays["v"].shape[-1]),
  cancelling=("dq", "dk", "dlog_forget", "dsink"),
)

CASES = {
  case.id: case
  for case in [
    _recurrence("vector", rows=GATED),
    _recurrence("matrix", rows=("plain", "mixed")),
    *(
      Case("linear_attention", gate, _linear_attention, equations.scan(equations.add, equations.read), rows)
      for gate, rows in MATRIX_GATES
    ),
    *(
      Case(
        "normalized_linear_attention",
        gate,
        _normalized,
        equations.scan(equations.add_normalized, equations.read_normalized),
        rows,
        cancelling=("dq", "dk"),
      )
      for gate, rows in MATRIX_GATES
    ),
    *(
      Case("delta_rule", gate, _delta_rule, equations.scan(equations.correct, equations.read), (*rows, *KEY_ROWS))
      for gate, rows in MATRIX_GATES
    ),
    Case(
      "linear_attention", "bonus", _bonus, equations.reading_before, GATED,
      shared=("bonus",), untimed=("initial_state", "bonus"),
    ),
    Case(
      "delta_rule", "erase_write", _gates_a_channel, equations.scan(equations.correct_channels, equations.read),
      ("plain", "mixed", "inf"), options=(("beta", None),),
    ),
    *(
      Case(
        "delta_product", gate, _delta_product, equations.scan(equations.correct_often, equations.read), rows,
        output=lambda arrays: (*arrays["q"].shape[:2], *arrays["v"].shape[3:]),
      )
      for gate, rows in (("none", ("plain",)), ("head", ("plain", "mixed", "inf")))
    ),
    *(
      Case("gated_oja", gate, _gated_oja, equations.scan(equations.correct_values, equations.read), rows)
      for gate, rows in (("head", ("plain", "mixed", "inf")), ("channel", GATED))
    ),
    *(Case("dplr", gate, _dplr, equations.scan(equations.add_low_rank, equations.read), rows) for gate, rows in MATRIX_GATES),
    Case(  # the derivative by m is <C, dC> + <n, dn> at the start, less the same at the end
      "mlstm", "head", _mlstm, equations.scan(equations.add_stabilised, equations.read_stabilised), GATED[:-1],
      cancelling=("dq", "dk"),
    ),
    _softmax_attention("none", equation=equations.softmax, rows=("plain",)),
    _softmax_attention("forget", equation=equations.softmax, rows=("plain", "mixed", "forget", "cliff", "inf", "zero")),
    _softmax_attention(
      "window_sink", equation=functools.partial(equations.softmax, window=7), rows=("plain",), options=(("window", 7),)
    ),
  ]
}  # fmt: skip


CORE = (  # the cases that the fast tests run through everything; the others they run once
  "linear_recurrence-vector",
  "linear_attention-head",
  "linear_attention-channel",
  "normalized_linear_attention-head",
  "delta_rule-head",
  "delta_rule-channel",
  "attention-forget",
)


def core_first(case_ids: Sequence[str] | None = None) -> list:
  """pytest parameters: the core cases fast, the others slow."""
  return [
    pytest.param(id, marks=() if id in CORE else pytest.mark.slow) for id in case_ids or CASES
  ]


BATCH = 10  # of every call at the base shape, whatever the number of rows: so one reference serves many tests


def batch(case: Case, first: int = 0) -> tuple[str, ...]:
  """The rows of a case, beginning with the first-th, repeated (with other values) until the batch is full."""
  return tuple(case.rows[(first + n) % len(case.rows)] for n in range(BATCH))


@functools.cache
def inputs(
  case_id: str, shape: Shape = Shape(), rows: tuple[str, ...] | None = None
) -> dict[str, Any]:
  """The rows of a case, stacked along the batch axis, in float64."""
  case = CASES[case_id]
  drawn = []
  for n, row in enumerate(rows or batch(case)):
    rng = np.random.default_rng(zlib.crc32(f"{case.id}/{row}/{n}/{shape}".encode()))
    drawn.append(case.sample(rng, case.gate, row, shape))
  together = {
    name: jax.tree.map(lambda *x: np.concatenate(x), *(d[name] for d in drawn)) for name in drawn[0]
  }
  return together | {name: drawn[0][name] for name in case.shared if name in drawn[0]}


def cotangents(case: Case, arrays: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
  """Of the output and of the final state, about 1 in size."""
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.standard_normal(shape)
  o = draw(case.output(arrays))
  return o, jax.tree.map(lambda s: draw(s.shape), arrays["initial_state"]) if case.stateful else ()


def rounded(name: str, x: np.ndarray, dtype: str) -> np.ndarray:
  """The values that an implementation in `dtype` is given; in the bf16 runs decays and states stay float32."""
  if dtype == "bfloat16" and name not in ("g", "log_a", "log_forget", "initial_state"):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)
  return np.asarray(x, np.float64 if dtype == "float64" else np.float32)


# --- running an op ---------------------------------------------------------------------------------------------------


class Result(NamedTuple):
  """Numpy arrays: what the op gives, and the gradients of <cotangents, what it gives>."""

  o: Any
  state: Any
  gradients: dict[str, Any]

  def named(self) -> dict[str, np.ndarray]:
    """Every array under a name: o, state, state.1, dq, dinitial_state, ..."""
    trees = {"o": self.o, "state": self.state} | {
      f"d{name}": x for name, x in self.gradients.items()
    }
    return {
      name + (f".{i}" if i else ""): leaf
      for name, tree in trees.items()
      for i, leaf in enumerate(jax.tree.leaves(tree))
    }


@functools.cache
def quick() -> dict[str, Any]:
  """Compiler options without LLVM's optimisation and without the fusion emitters (a flag that newer jaxlibs lack).

  XLA compiles up to ten times faster so, by the same passes over the program. The slow tests compile as users do, and so do
  all tests on a GPU.
  """
  if jax.default_backend() != "cpu":
    return {}
  options = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
  }

  def known(name):
    try:
      jax.jit(lambda x: x, compiler_options={name: options[name]}).lower(1.0).compile()
    except jax.errors.JaxRuntimeError:
      return False
    return True

  return {name: value for name, value in options.items() if known(name)}


def quick_jit(f: Callable) -> Callable:
  return jax.jit(f, compiler_options=quick())


@functools.cache
def compiled(
  case: Case, impl: str, options: tuple[tuple[str, Any], ...] = (), optimize: bool = False
) -> Callable:
  """jit of (arrays, segment_ids, cotangents) -> ((o, state), gradients): every comparison runs under jit."""
  op = functools.partial(getattr(lajax, case.op), impl=impl, **dict(case.options + options))

  def run(arrays, segment_ids, cts):
    def outputs(arrays):
      out = op(**arrays, segment_ids=segment_ids)
      return out if case.stateful else (out, ())

    out, pull = jax.vjp(outputs, arrays)
    return out, pull(jax.tree.map(lambda ct, x: ct.astype(x.dtype), cts, out))[0]

  return jax.jit(run, compiler_options=None if optimize else quick())


def evaluate(
  case: Case,
  impl: str,
  dtype: str,
  arrays,
  segment_ids=None,
  cts=None,
  *,
  values=None,
  optimize=False,
  **options,
) -> Result:
  """Runs an op and its vjp in `dtype`, on arrays rounded to `values` (default `dtype`) before."""
  cts = cotangents(case, arrays) if cts is None else cts
  cast = lambda name, x: rounded(name, rounded(name, x, values or dtype), dtype)
  arrays = {name: jax.tree.map(functools.partial(cast, name), x) for name, x in arrays.items()}
  cts = cast("o", cts[0]), jax.tree.map(functools.partial(cast, "initial_state"), cts[1])
  ids = None if segment_ids is None else np.asarray(segment_ids, np.int32)
  run = compiled(case, impl, tuple(sorted(options.items())), optimize)
  with jax.enable_x64(dtype == "float64"):
    out, gradients = jax.device_get(run(arrays, ids, cts))
  return Result(*out, gradients)


def reference(case: Case, arrays, segment_ids=None, cts=None, values: str = "float64") -> Result:
  """`recurrent` in float64. One compiled function serves it with and without documents."""
  ids = np.zeros(tokens(case, arrays), np.int32) if segment_ids is None else segment_ids
  return evaluate(case, "recurrent", "float64", arrays, ids, cts, values=values)


def tokens(case: Case, arrays) -> tuple[int, int]:
  """(B, T)"""
  return next(x.shape[:2] for name, x in arrays.items() if name not in case.untimed)


def cut(case: Case, tree: Mapping[str, Any], span: slice) -> dict[str, Any]:
  """Some of the tokens of a case's inputs, or of its gradients."""
  return {
    name: x if name in case.untimed else jax.tree.map(lambda a: a[:, span], x)
    for name, x in tree.items()
  }


def misses(
  case: Case, got: Result, want: Result, dtype: str, rows: Sequence[str] | None = None
) -> dict[str, list[str]]:
  """What misses the budget: by row of the batch (its number and kind of values), or of the batch as a whole."""
  parts = (
    {"batch": slice(None)} if rows is None else {f"{n} {row}": n for n, row in enumerate(rows)}
  )
  scaled = lambda name: REFLECTION if dtype == "float32" and name.endswith("reflected") else 1.0
  found = {
    name: _failures(case, got, want, dtype, part, scaled(name)) for name, part in parts.items()
  }
  return {name: lines for name, lines in found.items() if lines}


def _failures(
  case: Case, got: Result, want: Result, dtype: str, row: int | slice, scaled: float
) -> list[str]:
  lines = []
  wanted = want.named()
  for name, x in got.named().items():
    kind = "value" if name[0] != "d" else "gate" if name[1:] in GATES else "gradient"
    floor = CANCELLATION if name in case.cancelling else 0.0
    floor = (
      1.0 if (case.op, name) == ("mlstm", "dinitial_state.2") else floor
    )  # a difference of sums of K V products: of about 15
    part = ... if name[1:] in case.shared else row
    error, budget = relative_rms(x[part], wanted[name][part], floor), scaled * BUDGET[dtype][kind]
    if not error <= budget:
      lines.append(f"{name}: relative RMS {error:.2e}, budget {budget:.0e}")
  return lines


# --- documents -------------------------------------------------------------------------------------------------------

LAYOUTS = {  # segment ids of T tokens, from the lengths of the pieces: (id, tokens), the last piece taking the rest
  "one": [(0, None)],
  "documents": [(0, 1), (1, 16), (2, 64), (3, None)],
  "padded_right": [(0, 30), (1, 33), (-1, None)],
  "padded_left": [(-1, 5), (3, 40), (4, None)],
  "padded_inside": [
    (0, 10),
    (-1, 7),
    (0, 20),
    (-2, 1),
    (1, 30),
    (-1, 3),
    (2, None),
  ],  # within a document and between
  "repeated_boundaries": [
    (0, 20),
    (5, 44),
    (9, 1),
    (10, 1),
    (40, None),
  ],  # ids that jump: documents 1-4 are empty
  "returning": [
    (0, 17),
    (1, 30),
    (0, None),
  ],  # every change begins a new document, also one to an earlier id
  "singles": [(n, 1) for n in range(1000)],  # documents of one token
  "only_padding": [(-1, None)],
}


def layout(name: str, T: int) -> np.ndarray:
  return np.concatenate([np.full(T if n is None else n, i, np.int32) for i, n in LAYOUTS[name]])[:T]


@functools.cache
def packed_ids(T: int) -> np.ndarray:
  """One layout a row, for a whole batch."""
  names = itertools.islice(itertools.cycle(LAYOUTS), BATCH)
  return np.stack([layout(name, T) for name in names])


def documents(ids: np.ndarray) -> list[np.ndarray]:
  """The positions of each document of one row."""
  real = np.flatnonzero(ids >= 0)
  return [piece for piece in np.split(real, np.flatnonzero(np.diff(ids[real])) + 1) if len(piece)]
