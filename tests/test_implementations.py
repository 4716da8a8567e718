"""Every implementation of every op against `recurrent` in float64, by one budget.

Outputs, states and all gradients are compared, always under jit.
"""

import functools

import cases
import jax
import numpy as np
import pytest
from cases import BATCH, CASES, Shape

import lajax

DTYPES = ("float32", "bfloat16", "float64")
BASE = Shape()


def parameters(table):
  """pytest parameters from (values..., fast?)."""
  return [
    pytest.param(*row, marks=() if fast else pytest.mark.slow, id="-".join(map(str, row)))
    for *row, fast in table
  ]


@functools.cache
def base_reference(case_id: str, values: str, packed: bool, first: int = 0) -> cases.Result:
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE, cases.batch(case, first))
  return cases.reference(case, arrays, cases.packed_ids(BASE.T) if packed else None, values=values)


LOG_DECAYS = ("g", "log_a", "log_forget", "f")


def gradients_where_all_is_forgotten(arrays, got: cases.Result) -> dict[str, float]:
  """Largest gradient of a log decay at tokens with exp(g) = 0, if it is not 0.

  It is 0 exactly: a caller's chain rule multiplies it by g, which may be -1e4 or -inf. The error
  budget is relative to a whole row and does not see it.
  """
  found = {}
  for name in LOG_DECAYS:
    if name in arrays:
      worst = np.abs(got.gradients[name][np.exp(arrays[name]) == 0]).max(initial=0.0)
      found |= {f"d{name}": worst} if worst != 0 else {}
  return found


def check_dtypes(got: cases.Result, dtype: str):
  """o has v's dtype, states are float32 at least, gradients have the dtype of their argument."""
  wide = np.float64 if dtype == "float64" else np.float32
  of = lambda name: cases.rounded(name, np.zeros(()), dtype).dtype
  assert got.o.dtype == of("v")
  assert all(x.dtype == wide for x in jax.tree.leaves(got.state))
  for name, tree in got.gradients.items():
    assert all(x.dtype == of(name) for x in jax.tree.leaves(tree)), f"d{name}"


# --- every implementation, gate, dtype and kind of values -----------------------------------------


FEW = ("linear_recurrence-vector", "delta_rule-head")  # fast through every implementation


def _implementations():
  """Without segment ids. Fast: `chunked` in float32 for the core cases, float32 for two. Slow:
  `chunked` in float64 for every family; bfloat16 and all of float32 for the core cases."""
  for case_id, case in CASES.items():
    core, few, family = (case_id in ids for ids in (cases.CORE, FEW, cases.FAMILIES))
    for impl in case.impls:
      for dtype in DTYPES:
        main = impl == "chunked" or dtype == "float32"
        if (impl, dtype) == ("recurrent", "float64"):  # the reference itself
          continue
        if few or (core and main) or (family and (impl, dtype) == ("chunked", "float64")):
          fast = dtype == "float32" and (few or (core and impl == "chunked"))
          fast |= (case_id, impl, dtype) == ("delta_rule-head", "chunked", "bfloat16")
          yield case_id, impl, dtype, fast


@pytest.mark.parametrize(("case_id", "impl", "dtype"), parameters(_implementations()))
def test_implementation_equals_reference(case_id, impl, dtype):
  case = CASES[case_id]
  rows = cases.batch(case)
  arrays = cases.inputs(case_id, BASE, rows)
  got = cases.evaluate(case, impl, dtype, arrays)
  check_dtypes(got, dtype)
  assert not cases.misses(case, got, base_reference(case_id, dtype, False), dtype, rows)
  assert not gradients_where_all_is_forgotten(arrays, got)


def _packed_implementations():
  """Fast: `chunked` in float32 for four cases. Slow: for all; `associative` for the core cases;
  other rows of values in the same layouts, bfloat16 and float64 for two."""
  few = (*FEW, "linear_attention-channel", "delta_rule-channel")
  for case_id in CASES:
    yield case_id, "chunked", "float32", 0, case_id in few
    if case_id in cases.CORE:
      yield case_id, "associative", "float32", 0, False
    if case_id in FEW:
      yield case_id, "chunked", "float32", 3, False
      yield case_id, "chunked", "bfloat16", 0, False
      yield case_id, "chunked", "float64", 0, False


@pytest.mark.parametrize(
  ("case_id", "impl", "dtype", "first"), parameters(_packed_implementations())
)
def test_packed_documents_equal_reference(case_id, impl, dtype, first):
  """Each row has a layout of `packed.LAYOUTS`, a kind of values and an initial state."""
  case = CASES[case_id]
  rows = cases.batch(case, first)
  arrays = cases.inputs(case_id, BASE, rows)
  got = cases.evaluate(case, impl, dtype, arrays, cases.packed_ids(BASE.T))
  assert not cases.misses(case, got, base_reference(case_id, dtype, True, first), dtype, rows)
  assert not gradients_where_all_is_forgotten(arrays, got)


def _equations():
  """Fast: packed rows of every family, which share a compiled function with the references."""
  for case_id in CASES:
    yield case_id, True, case_id in cases.FAMILIES
    yield case_id, False, case_id in FEW


@pytest.mark.parametrize(("case_id", "packed"), parameters(_equations()))
def test_reference_is_the_equation(case_id, packed):
  """Outputs and states of `recurrent` against the printed equation in NumPy."""
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE, cases.batch(case))
  ids = cases.packed_ids(BASE.T) if packed else np.zeros((BATCH, BASE.T), np.int32)
  got = base_reference(case_id, "float64", packed)
  for n in range(BATCH):
    row = {
      name: x if name in case.shared else jax.tree.map(lambda a, n=n: a[n], x)
      for name, x in arrays.items()
    }
    o, state = case.equation(row, ids[n], None)
    mine = {"o": o} | {f"state.{i}": x for i, x in enumerate(jax.tree.leaves(state))}
    theirs = {"o": got.o[n]} | {
      f"state.{i}": x[n] for i, x in enumerate(jax.tree.leaves(got.state))
    }
    for name, x in theirs.items():
      error = cases.relative_rms(x, mine[name])
      assert error <= cases.BUDGET["float64"]["value"], f"row {n}, {name}: {error:.1e}"


DERIVED = Shape(T=9, K=3, V=2)


@pytest.mark.parametrize("case_id", cases.core_first())
def test_gradients_are_those_of_the_equation(case_id):
  """Gradient of `recurrent` along one direction, against central differences of the equation."""
  case, rows, e = CASES[case_id], ("plain",), 1e-5
  arrays = cases.inputs(case_id, DERIVED, rows)
  rng = np.random.default_rng(0)
  direction = {
    name: jax.tree.map(lambda x: rng.standard_normal(x.shape), x) for name, x in arrays.items()
  }
  cts = cases.cotangents(case, arrays)
  ids = np.array([0, 0, 0, -1, 0, 1, 1, 1, 1], np.int32)

  def value(step):
    moved = {
      name: jax.tree.map(lambda x, d: x + step * d, x, direction[name])
      for name, x in arrays.items()
    }
    row = {
      name: x if name in case.shared else jax.tree.map(lambda a: a[0], x)
      for name, x in moved.items()
    }
    o, state = case.equation(row, ids, None)
    products = jax.tree.map(lambda ct, x: (ct[0] * x).sum(), cts, (o, state))
    return sum(jax.tree.leaves(products))

  got = cases.reference(case, arrays, ids[None], cts)
  products = [
    jax.tree.map(lambda d, x: (d * x).sum(), direction[name], x)
    for name, x in got.gradients.items()
  ]
  slope = (value(e) - value(-e)) / (2 * e)
  assert abs(sum(jax.tree.leaves(products)) - slope) < 1e-7 * max(1, abs(slope))


# --- sizes ----------------------------------------------------------------------------------------

LENGTHS = (1, 2, 17, 65)


def _lengths():
  """Fast: four cases, each with a length of its own. Slow: all lengths of two cases, one token of
  three more families."""
  fast = {
    ("linear_recurrence-vector", 17),
    ("linear_attention-channel", 65),
    ("delta_rule-head", 63),
    ("attention-forget", 1),
  }
  table = {(case_id, T) for case_id in FEW for T in LENGTHS} | fast
  table |= {(case_id, 1) for case_id in ("dplr-channel", "gated_oja-channel", "mlstm-head")}
  for case_id, T in sorted(table):
    yield case_id, "chunked", T, (case_id, T) in fast
  for case_id in (*FEW, "attention-forget"):
    yield case_id, "associative", 63, False


@pytest.mark.parametrize(("case_id", "impl", "T"), parameters(_lengths()))
def test_any_length(case_id, impl, T):
  """The reference is computed in the base shape with padding from T on, to share a compilation."""
  case = CASES[case_id]
  rows = cases.batch(case)
  whole = cases.inputs(case_id, BASE, rows)
  o, state = cases.cotangents(case, whole)
  ids = np.broadcast_to(np.where(np.arange(BASE.T) < T, 0, -1), (BATCH, BASE.T))
  want = cases.reference(case, whole, ids, values="float32")
  want = want._replace(o=want.o[:, :T], gradients=cases.cut(case, want.gradients, slice(T)))
  got = cases.evaluate(
    case, impl, "float32", cases.cut(case, whole, slice(T)), None, (o[:, :T], state)
  )
  assert not cases.misses(case, got, want, "float32", rows)


def check_shape(case_id: str, shape: Shape):
  """`chunked` in a shape of its own, on ordinary and, where the case has them, strong decays."""
  case = CASES[case_id]
  rows = tuple(row for row in ("plain", "mixed") if row in case.rows)
  arrays = cases.inputs(case_id, shape, rows)
  got = cases.evaluate(case, "chunked", "float32", arrays)
  assert not cases.misses(
    case, got, cases.reference(case, arrays, values="float32"), "float32", rows
  )


@pytest.mark.slow
@pytest.mark.parametrize("case_id", ["linear_attention-channel", "delta_rule-channel"])
def test_a_thousand_tokens(case_id):
  check_shape(case_id, Shape(T=1000))


def test_forget_gates_over_blocks_of_keys():
  """Three blocks: a gate is then inside a block, between two neighbours, and strictly between."""
  check_shape("attention-forget", Shape(T=600, H=1, HV=2, K=4, V=3))


WIDTHS = ((60, 100), (96, 12), (256, 320))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case_id", "widths"),
  [
    ("linear_attention-channel", WIDTHS[0]),
    ("delta_rule-head", WIDTHS[1]),
    ("delta_rule-head", WIDTHS[2]),
    ("dplr-channel", WIDTHS[0]),
  ],
)
def test_any_width(case_id, widths):
  check_shape(case_id, Shape(T=70, K=widths[0], V=widths[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case_id", "heads"),
  [
    ("linear_attention-head", (1, 4)),
    ("delta_rule-head", (3, 6)),
    ("delta_rule-channel", (1, 4)),
    ("attention-forget", (1, 4)),
    ("attention-forget", (3, 6)),
  ],
)
def test_any_grouping_of_heads(case_id, heads):
  check_shape(case_id, Shape(T=70, H=heads[0], HV=heads[1], K=8, V=12))


CHUNK_SIZES = [  # (case, chunk size, fast?); the default of each case is tested above
  ("delta_rule-head", 16, True),
  ("delta_rule-head", 128, False),
  ("delta_rule-channel", 16, False),
  ("delta_rule-channel", 128, False),
  ("linear_attention-head", 16, False),
  ("linear_attention-channel", 64, True),
  ("linear_attention-channel", 128, False),
  ("normalized_linear_attention-head", 32, False),
]


@pytest.mark.parametrize(("case_id", "chunk_size"), parameters(CHUNK_SIZES))
def test_any_chunk_size(case_id, chunk_size):
  case = CASES[case_id]
  rows = cases.batch(case)
  got = cases.evaluate(
    case, "chunked", "float32", cases.inputs(case_id, BASE, rows), chunk_size=chunk_size
  )
  assert not cases.misses(case, got, base_reference(case_id, "float32", False), "float32", rows)


# --- dtypes and options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("case_id", "dtype"),
  parameters(
    [(case_id, "float32", case_id in FEW) for case_id in cases.CORE]
    + [(case_id, "bfloat16", False) for case_id in cases.FAMILIES]
  ),
)
def test_dtypes_with_x64(case_id, dtype):
  """Float32 and bfloat16 arguments give the same dtypes with 64-bit mode on."""
  case = CASES[case_id]
  drawn = cases.inputs(case_id, Shape(T=20), ("plain",))
  arrays = {
    name: jax.tree.map(lambda x, name=name: cases.rounded(name, x, dtype), x)
    for name, x in drawn.items()
  }
  cts = jax.tree.map(lambda x: x.astype(np.float32), cases.cotangents(case, arrays))
  with jax.enable_x64(True):
    for impl in case.impls:
      out, gradients = jax.eval_shape(cases.compiled(case, impl), arrays, None, cts)
      check_dtypes(cases.Result(*out, gradients), dtype)


@pytest.mark.parametrize("impl", [pytest.param("recurrent", marks=pytest.mark.slow), "chunked"])
def test_scale_and_no_initial_state(impl):
  """`scale` is a factor of o and may be an array with a derivative; no initial state: zeros."""
  case = CASES["linear_attention-head"]
  arrays = {
    name: x[:1].astype(np.float32)
    for name, x in cases.inputs(case.id, Shape(T=20), ("plain",)).items()
  }
  none = {name: x for name, x in arrays.items() if name != "initial_state"}

  @cases.quick_jit
  def run(none):
    zeros = none | {"initial_state": np.zeros_like(arrays["initial_state"])}
    op = functools.partial(lajax.linear_attention, impl=impl)
    slope = jax.jacfwd(lambda scale: op(**none, scale=scale)[0])(0.7)
    return op(**none), op(**zeros), op(**none, scale=0.7), slope

  (o, state), with_zeros, scaled, slope = run(none)
  for got, want in (
    (with_zeros[0], o),
    (with_zeros[1], state),
    (scaled[0], 0.7 * np.sqrt(BASE.K) * o),
    (scaled[1], state),
    (slope, np.sqrt(BASE.K) * o),
  ):
    assert cases.relative_rms(got, want) <= 1e-6
