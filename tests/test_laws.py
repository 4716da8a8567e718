"""Laws between one call of an op and another, for every implementation.

* A split sequence with the state passed on equals the whole; decoding equals prefill.
* Outputs do not depend on later tokens, bit for bit.
* Padding is inert, bit for bit; documents are independent, also of NaN and inf in other documents.
* Gates of zero leave the state as it is, bit for bit.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, CASES, Shape, quick_jit

BASE = Shape()
STATEFUL = [id for id, case in CASES.items() if case.stateful]


def assert_same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


# --- split = whole --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("case_id", "at"), [("linear_recurrence-vector", 64), ("delta_rule-head", 63)]
)
def test_split_equals_whole(case_id, at):
  """Two calls in one program against one call: outputs, final state, every gradient."""
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE)
  cts = cases.cotangents(case, arrays)
  call = cases.call_of(case, "chunked")

  def two(arrays):
    first, second = cases.cut(case, arrays, slice(at)), cases.cut(case, arrays, slice(at, None))
    o1, state = call(first)
    o2, state = call(second | {"initial_state": state})
    return jnp.concatenate([o1, o2], axis=1), state

  @quick_jit
  def run(arrays, cts):
    out, pull = jax.vjp(two, arrays)
    return out, pull(jax.tree.map(lambda ct, x: ct.astype(x.dtype), cts, out))[0]

  out, gradients = jax.device_get(
    run(cases.numbers(case_id), jax.tree.map(lambda x: x.astype(np.float32), cts))
  )
  want = cases.reference(case, arrays, None, cts, values="float32")
  assert not cases.misses(case, cases.Result(*out, gradients), want, "float32", cases.batch(case))


@pytest.mark.parametrize("at", [1, 63, 64])
@pytest.mark.parametrize("case_id", cases.core_first(STATEFUL))
def test_parts_equal_whole(case_id, at):
  """The same for every case, by padding: each call has the base shape and a part of the tokens.

  The compiled function of all packed tests serves here too. The first call is run again with the
  cotangent of its final state, which is the second call's gradient of the initial state.
  """
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE)
  o, state = cases.cotangents(case, arrays)
  early = np.broadcast_to(np.arange(BASE.T) < at, (BATCH, BASE.T))
  first, second = np.where(early, 0, -1), np.where(early, -1, 0)
  passed_on = cases.evaluate(case, "chunked", "float32", arrays, first, (o, state)).state
  b = cases.evaluate(
    case, "chunked", "float32", arrays | {"initial_state": passed_on}, second, (o, state)
  )
  a = cases.evaluate(case, "chunked", "float32", arrays, first, (o, b.gradients["initial_state"]))
  # Outputs and gradients of padding are 0, so the two calls' add up.
  gradients = {
    name: x if name == "initial_state" else x + b.gradients[name] for name, x in a.gradients.items()
  }
  got = cases.Result(a.o + b.o, b.state, gradients)
  want = cases.reference(case, arrays, None, (o, state), values="float32")
  assert not cases.misses(case, got, want, "float32", cases.batch(case))


@pytest.mark.parametrize("case_id", ["linear_recurrence-vector", "delta_rule-head", "mlstm-head"])
def test_decoding_equals_prefill(case_id):
  """`*_step` in a `lax.scan` on every kind of gate; `test_steps.py` has all steps."""
  case = CASES[case_id]
  arrays = cases.numbers(case_id)
  state = arrays.pop("initial_state")
  fixed = {name: arrays.pop(name) for name in case.shared if name in arrays} | dict(case.options)

  @quick_jit
  def decode(state, tokens):
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, o = jax.lax.scan(lambda s, x: case.step()(s, **x, **fixed), state, tokens)
    return jnp.moveaxis(o, 0, 1), state

  o, state = jax.device_get(decode(state, arrays))
  want = cases.reference(case, cases.inputs(case_id, BASE), values="float32")
  got = cases.Result(o, state, {})
  assert not cases.misses(case, got, want, "float32", cases.batch(case))


# --- causality, padding, documents: bit for bit ---------------------------------------------------


@pytest.mark.parametrize("case_id", cases.core_first())
def test_causality(case_id):
  """Later tokens change no bit of an output, and get no gradient from an earlier output."""
  case, at = CASES[case_id], 70
  arrays = cases.inputs(case_id, BASE)
  o, state = cases.cotangents(case, arrays)
  state = jax.tree.map(np.zeros_like, state)
  early = np.copy(o)
  early[:, at:] = 0
  later = lambda x: np.concatenate([x[:, :at], x[:, at:][:, ::-1]], axis=1)
  other = {name: x if name in case.untimed else later(x) for name, x in arrays.items()}
  ids = np.zeros((BATCH, BASE.T), np.int32)  # to share the compiled function of packed rows
  a = cases.evaluate(case, "chunked", "float32", arrays, ids, (early, state))
  b = cases.evaluate(case, "chunked", "float32", other, ids, (early, state))
  assert_same_bits(a.o[:, :at], b.o[:, :at])
  for name, x in a.gradients.items():
    if name not in case.untimed:
      np.testing.assert_array_equal(
        x[:, at:], 0.0, err_msg=f"d{name} of tokens that no output has read"
      )


@pytest.mark.parametrize("case_id", cases.core_first())
def test_padding_is_inert(case_id):
  """NaN and noise in the padding change no bit of the results, and get no gradient."""
  case = CASES[case_id]
  ids = cases.packed_ids(BASE.T)
  arrays = cases.inputs(case_id, BASE)

  def filled(x):
    per_token = lambda y: y.reshape(*y.shape, *(1,) * (x.ndim - 2))
    noise = 100 * np.cos(np.arange(x.size)).reshape(x.shape)
    filling = np.where(per_token(np.arange(BASE.T)[None] % 2 == 0), noise, np.nan)
    return np.where(per_token(ids < 0), filling, x)

  other = {name: x if name in case.untimed else filled(x) for name, x in arrays.items()}
  a = cases.evaluate(case, "chunked", "float32", arrays, ids)
  b = cases.evaluate(case, "chunked", "float32", other, ids)
  assert_same_bits(a, b)
  assert not a.o[ids < 0].any()
  for name, x in a.gradients.items():
    if name not in case.untimed:
      assert not x[ids < 0].any(), f"d{name} in the padding"


@pytest.mark.parametrize("case_id", cases.core_first())
def test_documents_do_not_touch_each_other(case_id):
  """Other tokens in every second document change no bit of the others, forward and backward.

  Gradients of gates are held to the budget instead: they are sums over tokens, whose rounding may
  differ.
  """
  case = CASES[case_id]
  # what is written is a hundred times larger; Oja's rule is unstable for long v
  loud = ("k",) if case.op == "gated_oja" else ("v", "x")
  ids = cases.packed_ids(BASE.T)
  arrays = cases.inputs(case_id, BASE)
  changed = np.zeros(ids.shape, bool)
  for row, n in zip(changed, ids, strict=True):
    for document in cases.documents(n)[1::2]:
      row[document] = True

  def change(name, x):
    if name in case.untimed:
      return x
    other = np.roll(x, 1, axis=0) * (100 if name in loud else 1)
    return np.where(changed.reshape(ids.shape + (1,) * (x.ndim - 2)), other, x)

  a = cases.evaluate(case, "chunked", "float32", arrays, ids)
  b = cases.evaluate(
    case, "chunked", "float32", {name: change(name, x) for name, x in arrays.items()}, ids
  )
  same = ~changed
  np.testing.assert_array_equal(a.o[same], b.o[same])
  for name, x in a.gradients.items():
    if name in case.untimed:
      continue
    if name in cases.GATES:
      assert (
        cases.relative_rms(b.gradients[name][same], x[same]) <= cases.BUDGET["float32"]["gate"]
      ), f"d{name}"
    else:
      np.testing.assert_array_equal(x[same], b.gradients[name][same], err_msg=f"d{name}")


def _guarded():
  """Fast: `chunked` for the core cases, all implementations for one. Slow: `chunked` for every case,
  the other implementations for every family."""
  for case_id, case in CASES.items():
    for impl in case.impls if case_id in cases.FAMILIES else ("chunked",):
      fast = case_id == "linear_recurrence-vector" or (impl == "chunked" and case_id in cases.CORE)
      marks = () if fast else pytest.mark.slow
      yield pytest.param(case_id, impl, marks=marks)


def _poisons(case, arrays) -> list[tuple[str, float]]:
  """(argument, value) per row: NaN in every argument and in both cotangents, then inf.

  "o" is the output's cotangent and "state" that of the final state.
  """
  names = [name for name in arrays if name not in case.shared]
  values = [name for name in names if name not in ("initial_state", *cases.GATES)]
  cotangents = ("o", "state") if case.stateful else ("o",)
  poisons = [(name, np.nan) for name in (*names, *cotangents)] + [(name, np.inf) for name in values]
  return poisons[:BATCH]


def _changes(case, a, b, row: int, outside, before, dtype: str) -> list[str]:
  """Names of results of a row that differ between a and b, where they must not.

  `outside` marks the tokens of other documents, `before` those whose output must be the same.
  """
  budget = cases.BUDGET[dtype]
  found = [] if np.array_equal(a.o[row, before], b.o[row, before]) else ["o"]
  for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
    found += [] if np.array_equal(x[row], y[row]) else ["state"]
  for name, x in a.gradients.items():
    if name not in case.untimed:
      # a gate's is a sum over tokens, of another rounding
      allowed = budget["gate"] if name in cases.GATES else 0.0
      error = cases.relative_rms(b.gradients[name][row, outside], x[row, outside])
      found += [] if error <= allowed else [f"d{name}"]
  if case.stateful and outside[0]:  # the first document alone begins with the initial state
    states = (jax.tree.leaves(x.gradients["initial_state"]) for x in (a, b))
    errors = [cases.relative_rms(y[row], x[row], floor=1.0) for x, y in zip(*states, strict=True)]
    found += [] if max(errors) <= budget["gradient"] else ["dinitial_state"]
  return found


@pytest.mark.parametrize(("case_id", "impl"), [*_guarded()])
def test_nan_stays_in_its_document(case_id, impl):
  """One NaN or inf changes no other document, and no output before it.

  Every row has the layout "documents" and one poisoned number: in the second or third document, in
  the initial state, which the first document alone begins with, or in the cotangent of the final
  state, which the last document alone ends with.
  """
  case = CASES[case_id]
  ids = np.broadcast_to(cases.layout("documents", BASE.T), (BATCH, BASE.T))
  arrays = cases.inputs(case_id, BASE)
  o, state = cases.cotangents(case, arrays)
  given = arrays | {"o": o, "state": state}
  other = {name: jax.tree.map(np.copy, x) for name, x in given.items()}
  where = {}  # row -> (poison, its token)
  for row, (name, value) in enumerate(_poisons(case, arrays)):
    at = {"initial_state": 0, "state": BASE.T - 1}.get(name, (10, 40)[row % 2])
    for x in jax.tree.leaves(other[name]):
      (x[row] if name in ("initial_state", "state") else x[row, at]).flat[0] = value
    where[row] = f"{name}: {value}", at

  dtype = "float64" if impl == "recurrent" else "float32"  # the compiled function of the reference
  poisoned = other.pop("o"), other.pop("state")
  a = cases.evaluate(case, impl, dtype, arrays, ids, (o, state))
  b = cases.evaluate(case, impl, dtype, other, ids, poisoned)
  changes = {}
  for row, (poison, at) in where.items():
    outside = ids[row] != ids[row, at]
    before = outside | (np.arange(BASE.T) < at) | poison.startswith(("o:", "state:"))
    found = _changes(case, a, b, row, outside, before, dtype)
    changes |= {poison: found} if found else {}
  assert not changes


@pytest.mark.parametrize("case_id", cases.core_first())
def test_documents_equal_separate_calls(case_id):
  """Each document of a packed row against a call of its own: outputs, last state, gradients."""
  case = CASES[case_id]
  ids = np.broadcast_to(cases.layout("padded_inside", BASE.T), (BATCH, BASE.T))
  arrays = cases.inputs(case_id, BASE)
  cts = cases.cotangents(case, arrays)
  want = cases.evaluate(case, "chunked", "float32", arrays, ids, cts)
  found = cases.documents(ids[0])
  for n, where in enumerate(found):
    # the document's tokens first, then padding
    own = np.concatenate([where, np.setdiff1d(np.arange(BASE.T), where)])
    alone = {name: x if name in case.untimed else x[:, own] for name, x in arrays.items()}
    o, state = cts
    if case.stateful and n > 0:
      alone["initial_state"] = jax.tree.map(np.zeros_like, arrays["initial_state"])
    if n < len(found) - 1:
      state = jax.tree.map(np.zeros_like, state)
    alone_ids = np.broadcast_to(np.where(np.arange(BASE.T) < len(where), 0, -1), ids.shape)
    got = cases.evaluate(case, "chunked", "float32", alone, alone_ids, (o[:, own], state))
    inside = slice(len(where))
    gradients = {k: x[:, inside] for k, x in got.gradients.items() if k not in case.untimed}
    wanted = {k: x[:, where] for k, x in want.gradients.items() if k not in case.untimed}
    last = n == len(found) - 1
    a = cases.Result(got.o[:, inside], got.state if last else (), gradients)
    b = cases.Result(want.o[:, where], want.state if last else (), wanted)
    # of the whole batch: a gradient of one row may cancel to nothing
    assert not cases.misses(case, a, b, "float32"), f"document {n}"


def _many(case_id: str, T: int, ids: np.ndarray):
  case = CASES[case_id]
  shape = Shape(T=T, H=1, HV=1, K=4, V=3)
  arrays = cases.numbers(case_id, shape, ("plain",), "float64")
  o, state = case.equation(jax.tree.map(lambda x: x[0], arrays), ids, None)
  got = cases.evaluate(case, "chunked", "float32", arrays, ids[None])
  # twice the budget: the equation is given the inputs before their rounding to float32
  budget = 2 * cases.BUDGET["float32"]["value"]
  assert cases.relative_rms(got.o[0], o) <= budget
  for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(got.state), strict=True):
    assert cases.relative_rms(theirs[0], mine) <= budget
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got.gradients))


@pytest.mark.slow
@pytest.mark.parametrize("case_id", ["linear_recurrence-vector", "delta_rule-head"])
def test_seventy_thousand_documents(case_id):
  """More documents than 16 bits count, of one, two or three tokens."""
  lengths = np.random.default_rng(0).choice([1, 2, 3], p=[0.9, 0.05, 0.05], size=70_000)
  ids = np.repeat(np.arange(70_000, dtype=np.int32), lengths)
  _many(case_id, len(ids), ids)


@pytest.mark.slow
@pytest.mark.parametrize("case_id", ["linear_recurrence-vector", "delta_rule-head"])
def test_a_document_longer_than_65536(case_id):
  ids = np.concatenate([np.zeros(70_001, np.int32), np.ones(99, np.int32)])
  _many(case_id, len(ids), ids)


# --- zero gates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["recurrent", "associative", "chunked"])
@pytest.mark.parametrize(
  "case_id", ["linear_recurrence-vector", "linear_attention-head", "delta_rule-head"]
)
def test_zero_gates_leave_the_state_untouched(case_id, impl):
  """Without decay and writes, the final state is the initial state, bit for bit."""
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE)
  silent = {
    name: np.zeros_like(x) for name, x in arrays.items() if name in ("g", "log_a", "beta", "x")
  }
  if case.op == "linear_attention":
    silent["v"] = np.zeros_like(arrays["v"])
  got = cases.evaluate(case, impl, "float32", arrays | silent)
  assert_same_bits(got.state, cases.rounded("initial_state", arrays["initial_state"], "float32"))
