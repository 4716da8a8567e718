"""Properties over random gates, documents, splits and shapes; every run draws the same examples."""

import cases
import hypothesis.strategies as st
import numpy as np
import pytest
from cases import BATCH, CASES, Shape
from hypothesis import given, settings

BASE = Shape()
STATEFUL = ["linear_recurrence-vector", "linear_attention-channel", "delta_rule-head"]
VALUES = [-np.inf, -1e4, -20.0, -1.0, -1e-4, 0.0]


@st.composite
def gates(draw):
  """One decay per token, from stretches of (value, tokens)."""
  stretches = draw(
    st.lists(st.tuples(st.sampled_from(VALUES), st.integers(1, 40)), min_size=1, max_size=8)
  )
  return np.resize(np.concatenate([np.full(n, value) for value, n in stretches]), BASE.T)


@st.composite
def segment_ids(draw):
  """Documents and padding in any order and length."""
  pieces = draw(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 60)), min_size=1, max_size=8))
  return np.resize(np.concatenate([np.full(n, i, np.int32) for i, n in pieces]), BASE.T)


def gate_of(arrays) -> str:
  return next(name for name in ("g", "log_a", "log_forget") if name in arrays)


@pytest.mark.parametrize(
  "case_id",
  cases.some_fast([*STATEFUL, "attention-forget"], ("delta_rule-head", "linear_recurrence-vector")),
)
@settings(max_examples=4)
@given(data=st.data())
def test_any_gates_and_documents(case_id, data):
  """An example is ten rows, each with decays and documents of its own."""
  case = CASES[case_id]
  arrays = dict(cases.inputs(case_id, BASE, ("plain",) * BATCH))
  gate = gate_of(arrays)
  decays = np.stack([data.draw(gates()) for _ in range(BATCH)])
  arrays[gate] = arrays[gate] * 0 + decays.reshape(*decays.shape, *(1,) * (arrays[gate].ndim - 2))
  ids = np.stack([data.draw(segment_ids()) for _ in range(BATCH)])
  got = cases.evaluate(case, "chunked", "float32", arrays, ids)
  assert not cases.misses(
    case, got, cases.reference(case, arrays, ids, values="float32"), "float32"
  )


@pytest.mark.parametrize("case_id", STATEFUL)
@settings(max_examples=4)
@given(at=st.integers(1, BASE.T - 1), decays=gates())
def test_any_split(case_id, at, decays):
  """Two calls that pass the state on give the outputs and the state of one call."""
  case = CASES[case_id]
  arrays = dict(cases.inputs(case_id, BASE, ("plain",) * BATCH))
  gate = gate_of(arrays)
  arrays[gate] = arrays[gate] * 0 + decays.reshape(1, -1, *(1,) * (arrays[gate].ndim - 2))
  parts = [np.where(np.arange(BASE.T) < at, 0, -1), np.where(np.arange(BASE.T) < at, -1, 0)]
  spread = lambda ids: np.broadcast_to(ids, (BATCH, BASE.T))
  first = cases.evaluate(case, "chunked", "float32", arrays, spread(parts[0]))
  second = cases.evaluate(
    case, "chunked", "float32", arrays | {"initial_state": first.state}, spread(parts[1])
  )
  want = cases.reference(case, arrays, values="float32")
  got = cases.Result(first.o + second.o, second.state, {})  # the output of padding is 0
  assert not cases.misses(case, got, want, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("case_id", [*STATEFUL, "attention-forget"])
@settings(max_examples=4)
@given(
  T=st.integers(1, 150),
  H=st.integers(1, 2),
  groups=st.integers(1, 3),
  K=st.integers(1, 20),
  V=st.integers(1, 20),
  row=st.sampled_from(["plain", "mixed", "cliff", "inf"]),
  impl=st.sampled_from(["associative", "chunked"]),
)
def test_any_shape(case_id, T, H, groups, K, V, row, impl):
  case = CASES[case_id]
  arrays = cases.inputs(case_id, Shape(T, H, H * groups, K, V), (row,))
  got = cases.evaluate(case, impl, "float64", arrays)
  assert not cases.misses(case, got, cases.reference(case, arrays), "float64")
