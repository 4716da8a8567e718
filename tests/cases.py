"""The table of cases that all tests of the ops iterate over, and how a case runs.

A case is an op, a kind of gate and a sampler of inputs (`samplers.py`). Its *rows* are kinds of
values (ordinary gates, gates of -inf, equal keys, ...) that stand side by side in the batch axis:
one compiled function serves all of them, and each row is held to the budget (`budget.py`) by
itself. A new op, or a new member of a family, is one row in `CASES`.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import equations
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import packed
import pytest
import samplers

# Test files take these names from here.
# ruff: isort: off
from budget import BUDGET, CANCELLATION, GATES, REFLECTION  # noqa: F401
from budget import Result, misses, relative_rms  # noqa: F401
from packed import LAYOUTS, documents, layout  # noqa: F401
from samplers import KEY_ROWS, ROWS, Shape
# ruff: isort: on

import lajax
import lajax.recurrence

# --- the table ------------------------------------------------------------------------------------

IMPLS = ("recurrent", "associative", "chunked")


@dataclasses.dataclass(frozen=True)
class Case:
  """One op with one kind of gate, a sampler of `samplers.py` and an equation of `equations.py`."""

  op: str
  gate: str
  sample: Callable
  equation: Callable
  rows: tuple[str, ...]
  impls: tuple[str, ...] = IMPLS
  options: tuple[tuple[str, Any], ...] = ()
  chunked: bool = True  # takes chunk_size
  stateful: bool = True
  untimed: tuple[str, ...] = ("initial_state", "sink")  # arguments without an axis T
  shared: tuple[str, ...] = ("sink",)  # arguments without an axis B: the same for all rows
  output: Callable = lambda arrays: arrays["v"].shape  # shape of o
  cancelling: tuple[str, ...] = ()  # gradients that may cancel to nothing: `budget.CANCELLATION`

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
  sample=samplers.linear_recurrence,
  equation=equations.scan(lambda h, t: np.exp(t["log_a"]) * h + t["x"], lambda h, t, scale: h),
  chunked=False,
  output=lambda arrays: arrays["x"].shape,
)
_attention = functools.partial(
  Case,
  "attention",
  sample=samplers.attention,
  chunked=False,
  stateful=False,
  output=lambda arrays: (*arrays["q"].shape[:3], arrays["v"].shape[-1]),
  cancelling=("dq", "dk", "dlog_forget", "dsink"),
)
_normalized = functools.partial(
  Case,
  "normalized_linear_attention",
  sample=samplers.normalized,
  equation=equations.scan(equations.add_normalized, equations.read_normalized),
  cancelling=("dq", "dk"),
)
_delta_product = functools.partial(
  Case,
  "delta_product",
  sample=samplers.delta_product,
  equation=equations.scan(equations.correct_often, equations.read),
  output=lambda arrays: (*arrays["q"].shape[:2], *arrays["v"].shape[3:]),
)
_matrix = lambda op, gate, update, rows: Case(
  op, gate, getattr(samplers, op), equations.scan(update, equations.read), rows
)

_ALL = [
  _recurrence("vector", rows=GATED),
  _recurrence("matrix", rows=("plain", "mixed")),
  *(_matrix("linear_attention", gate, equations.add, rows) for gate, rows in MATRIX_GATES),
  *(_normalized(gate, rows=rows) for gate, rows in MATRIX_GATES),
  *(
    _matrix("delta_rule", gate, equations.correct, (*rows, *KEY_ROWS))
    for gate, rows in MATRIX_GATES
  ),
  Case(
    "linear_attention", "bonus", samplers.bonus, equations.reading_before, GATED,
    shared=("bonus",), untimed=("initial_state", "bonus"),
  ),
  Case(
    "delta_rule", "erase_write", samplers.erase_write,
    equations.scan(equations.correct_channels, equations.read), ("plain", "mixed", "inf"),
    options=(("beta", None),),
  ),
  *(
    Case(
      "preconditioned_delta_rule", gate, samplers.preconditioned_delta_rule,
      equations.scan(equations.correct_preconditioned, equations.read_first), rows,
    )
    for gate, rows in (("head", ("plain", "mixed", "inf")), ("channel", ("plain", "mixed", "inf")))
  ),
  Case(
    "momentum_delta_rule", "head", samplers.momentum_delta_rule,
    equations.scan(equations.correct_with_momentum, equations.read_first),
    ("plain", "mixed", "forget", "inf", "steep"),
  ),
  _delta_product("none", rows=("plain",)),
  _delta_product("head", rows=("plain", "mixed", "inf")),
  _matrix("gated_oja", "head", equations.correct_values, ("plain", "mixed", "inf")),
  _matrix("gated_oja", "channel", equations.correct_values, GATED),
  *(_matrix("dplr", gate, equations.add_low_rank, rows) for gate, rows in MATRIX_GATES),
  Case(
    "mlstm", "head", samplers.mlstm,
    equations.scan(equations.add_stabilised, equations.read_stabilised), GATED[:-1],
    cancelling=("dq", "dk"),
  ),
  *(
    Case(
      "mamba3", gate, samplers.mamba3,
      equations.scan(equations.add_trapezoid, equations.read_trapezoid), rows,
      options=(("scale", None),),
    )
    for gate, rows in (("head", ("plain", "mixed", "inf")), ("ranks", ("plain", "mixed")))
  ),
  Case(
    "mesa", "head", samplers.mesa, equations.ridge_regression, ("plain", "mixed", "inf"),
    options=(("scale", None),), shared=("ridge",), untimed=("initial_state", "ridge"),
  ),
  *(
    Case(
      "log_linear_attention", gate, samplers.log_linear_attention, equations.log_linear, rows,
      options=(("scale", None),),
    )
    for gate, rows in (("head", ("plain", "mixed", "inf")), ("delta", ("plain", "mixed")))
  ),
  _attention("none", equation=equations.softmax, rows=("plain",)),
  _attention(
    "forget", equation=equations.softmax,
    rows=("plain", "mixed", "forget", "cliff", "inf", "zero"),
  ),
  _attention(
    "window_sink", equation=functools.partial(equations.softmax, window=7), rows=("plain",),
    options=(("window", 7),),
  ),
]  # fmt: skip
CASES = {case.id: case for case in _ALL}

CORE = (  # the cases that the fast tests run through everything
  "linear_recurrence-vector",
  "linear_attention-head",
  "linear_attention-channel",
  "normalized_linear_attention-head",
  "delta_rule-head",
  "delta_rule-channel",
  "attention-forget",
)
FAMILIES = (  # the cases that the fast tests run once or twice: every update of a state
  *CORE,
  "linear_attention-bonus",
  "delta_rule-erase_write",
  "delta_product-head",
  "gated_oja-channel",
  "dplr-channel",
  "mlstm-head",
)


def some_fast(values: Iterable, fast: Container, name: Callable[[Any], str] = str) -> list:
  """pytest parameters: the values whose names are in `fast` fast, the others slow."""
  return [
    pytest.param(
      *(x if type(x) is tuple else (x,)),  # one value per name; a NamedTuple is one value
      id=name(x),
      marks=() if name(x) in fast else pytest.mark.slow,
    )
    for x in values
  ]


def core_first(case_ids: Sequence[str] | None = None) -> list:
  """pytest parameters: the core cases fast, the others slow."""
  return some_fast(case_ids or CASES, CORE)


# --- arguments of a case --------------------------------------------------------------------------

# Every call at the base shape has this batch size, whatever the number of rows of its case: one
# compiled function, and one reference, serves many tests.
BATCH = 10
BASE = Shape()


def batch(case: Case, first: int = 0) -> tuple[str, ...]:
  """A full batch of a case's rows, from the `first`-th on, in turn; each has values of its own."""
  return tuple(case.rows[(first + n) % len(case.rows)] for n in range(BATCH))


@functools.cache
def inputs(
  case_id: str, shape: Shape = BASE, rows: tuple[str, ...] | None = None
) -> dict[str, Any]:
  """The rows of a case, stacked along the batch axis, in float64."""
  case = CASES[case_id]
  drawn = []
  for n, row in enumerate(rows or batch(case)):
    rng = np.random.default_rng(zlib.crc32(f"{case.id}/{row}/{n}/{shape}".encode()))
    drawn.append(case.sample(rng, case.gate, row, shape))
  stacked = {
    name: jax.tree.map(lambda *x: np.concatenate(x), *(d[name] for d in drawn)) for name in drawn[0]
  }
  return stacked | {name: drawn[0][name] for name in case.shared if name in drawn[0]}


def bounded_inputs(case_id: str, bound: float, shape: Shape):
  """A batch of a case's arrays whose rows have decays of every kind that the bound allows."""
  arrays = dict(inputs(case_id, shape, ("plain",) * BATCH))
  rng = np.random.default_rng(0)
  u = rng.uniform(size=arrays["g"].shape)
  kinds = (
    bound * u,
    np.full_like(u, bound),
    np.where(u < 0.5, bound, -1e-3 * u),
    np.where(u < 0.03, bound, 0.0),
    -1e-3 * u,
  )
  arrays["g"] = np.stack([kinds[n % len(kinds)][n] for n in range(BATCH)])
  return arrays


def cotangents(case: Case, arrays: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
  """Cotangents of the output and of the final state, about 1 in size."""
  rng = np.random.default_rng(0)
  draw = lambda shape: rng.standard_normal(shape)
  o = draw(case.output(arrays))
  return o, jax.tree.map(lambda s: draw(s.shape), arrays["initial_state"]) if case.stateful else ()


def packed_ids(T: int) -> np.ndarray:
  """Segment ids [BATCH T], one layout per row."""
  return packed.packed_rows(BATCH, T)


def rounded(name: str, x: np.ndarray, dtype: str) -> np.ndarray:
  """Values that an op receives in `dtype`; in bfloat16, decays and states stay float32."""
  if dtype == "bfloat16" and name not in (
    "g",
    "g_precond",
    "g_momentum",
    "log_a",
    "log_forget",
    "initial_state",
  ):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)
  return np.asarray(x, np.float64 if dtype == "float64" else np.float32)


def numbers(case_id: str, shape: Shape = BASE, rows=None, dtype: str = "float32") -> dict:
  """Inputs in one dtype, as NumPy arrays."""
  arrays = inputs(case_id, shape, rows)
  return {n: jax.tree.map(functools.partial(rounded, n, dtype=dtype), x) for n, x in arrays.items()}


def tokens(case: Case, arrays) -> tuple[int, int]:
  """(B, T)"""
  return next(x.shape[:2] for name, x in arrays.items() if name not in case.untimed)


def cut(case: Case, tree: Mapping[str, Any], span: slice) -> dict[str, Any]:
  """Some of the tokens of a case's inputs, or of its gradients."""
  return {
    name: x if name in case.untimed else jax.tree.map(lambda a: a[:, span], x)
    for name, x in tree.items()
  }


# --- well-formed arguments of every public op -----------------------------------------------------

# Every letter has a size of its own, so that a message about sizes names one axis.
WELL_FORMED = Shape(T=5, H=2, HV=4, K=3, V=6)
_ONLY_QKV = ("bidirectional_linear_attention", "efficient_attention")


def arguments(case_id: str, shape: Shape = WELL_FORMED, rows=("plain", "plain")) -> dict[str, Any]:
  """Keyword arguments of a call: float32 arrays, one document per row, the case's options."""
  case = CASES[case_id]
  drawn = inputs(case_id, shape, rows)
  arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn)
  ids = {"segment_ids": jnp.zeros(tokens(case, drawn), jnp.int32)}
  return arrays | ids | dict(case.options)


def well_formed(op: str) -> dict[str, Any]:
  """Well-formed keyword arguments of a public op: float32, B T H HV K V = 2 5 2 4 3 6.

  Every array that the op accepts in one call is given: a decay per head, the initial state, segment
  ids, and for attention a sink and a forget gate. The values are valid: decays <= 0, unit keys,
  positive features.
  """
  if op in _ONLY_QKV:
    given = arguments("linear_attention-none")
    return {name: given[name] for name in ("q", "k", "v", "segment_ids")}
  if op == "attention":
    return arguments("attention-forget") | {"sink": arguments("attention-window_sink")["sink"]}
  if op == "linear_attention":
    return arguments("linear_attention-head") | {
      "bonus": arguments("linear_attention-bonus")["bonus"]
    }
  found = arguments(f"{op}-{'vector' if op == 'linear_recurrence' else 'head'}")
  return {name: x for name, x in found.items() if x is not None}


# --- running an op --------------------------------------------------------------------------------


@functools.cache
def quick() -> dict[str, Any]:
  """Compiler options without LLVM's optimisation and without the fusion emitters.

  XLA then compiles up to ten times faster, with the same passes over the program. All tests on a
  GPU compile as users do. An option that this jaxlib does not know is left out.
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


def call_of(case: Case, impl: str, options: tuple[tuple[str, Any], ...] = ()) -> Callable:
  """The op of a case as (arrays, segment_ids) -> (o, state)."""
  op = functools.partial(getattr(lajax, case.op), impl=impl, **dict(case.options + options))

  def call(arrays, segment_ids=None):
    out = op(**arrays, segment_ids=segment_ids)
    return out if case.stateful else (out, ())

  return call


@functools.cache
def compiled(
  case: Case, impl: str, options: tuple[tuple[str, Any], ...] = (), optimize: bool = False
) -> Callable:
  """Jitted (arrays, segment_ids, cotangents) -> ((o, state), gradients)."""
  call = call_of(case, impl, options)

  def run(arrays, segment_ids, cts):
    out, pull = jax.vjp(lambda arrays: call(arrays, segment_ids), arrays)
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
  """Runs an op and its vjp in `dtype`, on arrays first rounded to `values` (default: `dtype`)."""
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
  """`recurrent` in float64. One compiled function serves rows with and without documents."""
  ids = np.zeros(tokens(case, arrays), np.int32) if segment_ids is None else segment_ids
  return evaluate(case, "recurrent", "float64", arrays, ids, cts, values=values)
