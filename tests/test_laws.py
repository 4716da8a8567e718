"""Laws between one call of an op and another, for every implementation.

* A split sequence with the state passed on equals the whole; decoding equals prefill.
* Outputs do not depend on later tokens, bit for bit.
* Padding is inert, bit for bit; documents are independent, also of NaN and inf in other documents.
* Gates of zero leave the state as it is, bit for bit.
* jit, grad, vmap, remat, scan and forward mode compose.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, CASES, Shape, quick_jit

import lajax

BASE = Shape()
STATEFUL = [id for id, case in CASES.items() if case.stateful]


def numbers(case_id: str, shape: Shape = BASE, rows=None, dtype: str = "float32") -> dict:
  """Inputs in one dtype, as numpy arrays."""
  arrays = cases.inputs(case_id, shape, rows)
  return {
    n: jax.tree.map(functools.partial(cases.rounded, n, dtype=dtype), x) for n, x in arrays.items()
  }


def assert_same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def op(case, impl: str, **options):
  """The op as (arrays, segment_ids) -> (o, state)."""

  def run(arrays, segment_ids=None):
    out = getattr(lajax, case.op)(
      **arrays, segment_ids=segment_ids, impl=impl, **dict(case.options), **options
    )
    return out if case.stateful else (out, ())

  return run


# --- split = whole --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("case_id", "at"), [("linear_recurrence-vector", 64), ("delta_rule-head", 63)]
)
def test_split_equals_whole(case_id, at):
  """Two calls in one program against one call: outputs, final state, every gradient."""
  case = CASES[case_id]
  arrays = cases.inputs(case_id, BASE)
  cts = cases.cotangents(case, arrays)
  call = op(case, "chunked")

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
    run(numbers(case_id), jax.tree.map(lambda x: x.astype(np.float32), cts))
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


@pytest.mark.parametrize("case_id", cases.core_first(STATEFUL))
def test_decoding_equals_prefill(case_id):
  """`*_step` in a `lax.scan`, one token at a time, against one call."""
  case = CASES[case_id]
  arrays = numbers(case_id)
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
  early = np.where(np.arange(BASE.T)[:, None, None] < at, o, 0.0) if o.ndim == 4 else o * 1.0
  if o.ndim != 4:
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
  """Fast: `chunked` for every family, the other implementations for three cases."""
  for case_id, case in CASES.items():
    few = case_id in ("linear_recurrence-vector", "delta_rule-head", "attention-forget")
    for impl in case.impls:
      fast = few or (impl == "chunked" and case_id in cases.FAMILIES)
      marks = () if fast else pytest.mark.slow
      yield pytest.param(case_id, impl, marks=marks)


def _poisons(case, arrays) -> list[tuple[str, float]]:
  """(argument, value) per row: NaN in every argument and in the output's cotangent, then inf."""
  names = [name for name in arrays if name not in case.shared]
  values = [name for name in names if name not in ("initial_state", *cases.GATES)]
  poisons = [(name, np.nan) for name in (*names, "o")] + [(name, np.inf) for name in values]
  return poisons[:BATCH]


@pytest.mark.parametrize(("case_id", "impl"), [*_guarded()])
def test_nan_stays_in_its_document(case_id, impl):
  """One NaN or inf changes no other document, and no output before it.

  Every row has the layout "documents" and one poisoned number: in the second or third document, or
  in the initial state, which the first document alone begins with.
  """
  case = CASES[case_id]
  ids = np.broadcast_to(cases.layout("documents", BASE.T), (BATCH, BASE.T))
  arrays = cases.inputs(case_id, BASE)
  o, state = cases.cotangents(case, arrays)
  other = {name: jax.tree.map(np.copy, x) for name, x in (arrays | {"o": o}).items()}
  poisons = _poisons(case, arrays)
  where = [
    0 if name == "initial_state" else (10, 40)[row % 2] for row, (name, _) in enumerate(poisons)
  ]
  for row, (at, (name, value)) in enumerate(zip(where, poisons, strict=True)):
    for x in jax.tree.leaves(other[name]):
      (x[row] if name == "initial_state" else x[row, at]).flat[0] = value

  dtype = "float64" if impl == "recurrent" else "float32"  # the compiled function of the reference
  poisoned_o = other.pop("o")
  a = cases.evaluate(case, impl, dtype, arrays, ids, (o, state))
  b = cases.evaluate(case, impl, dtype, other, ids, (poisoned_o, state))
  reached = {}
  for row, (at, (name, value)) in enumerate(zip(where, poisons, strict=True)):
    outside = ids[row] != ids[row, at]
    same = np.ones(BASE.T, bool) if name == "o" else outside | (np.arange(BASE.T) < at)
    found = [] if np.array_equal(a.o[row, same], b.o[row, same]) else ["o"]
    for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
      found += [] if np.array_equal(x[row], y[row]) else ["state"]
    for argument, x in a.gradients.items():
      if argument not in case.untimed:
        x, y = x[row, outside], b.gradients[argument][row, outside]
        gate = argument in cases.GATES  # a sum over tokens, of another rounding
        budget = cases.BUDGET[dtype]["gate"] if gate else 0.0
        found += [] if cases.relative_rms(y, x) <= budget else [f"d{argument}"]
    reached |= {f"{name}: {value}": found} if found else {}
  assert not reached


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
  arrays = numbers(case_id, shape, ("plain",), "float64")
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


# --- transformations ------------------------------------------------------------------------------

SMALL = Shape(T=33, H=1, HV=2, K=4, V=6)


def small(case_id: str, rows=("plain", "mixed"), dtype: str = "float32") -> dict:
  return numbers(case_id, SMALL, rows, dtype)


def _forward_modes():
  for case_id in ("linear_recurrence-vector", "delta_rule-head"):
    yield pytest.param(case_id, "chunked")
  for case_id in (
    "linear_attention-channel",
    "normalized_linear_attention-head",
    "attention-forget",
  ):
    yield pytest.param(case_id, "chunked", marks=pytest.mark.slow)
  yield pytest.param("delta_rule-head", "recurrent", marks=pytest.mark.slow)


@pytest.mark.parametrize(("case_id", "impl"), [*_forward_modes()])
def test_forward_mode_equals_reverse_mode(case_id, impl, x64):
  """<ct, J t> = <J^T ct, t>, with documents; J^T ct is compared with the reference elsewhere."""
  case = CASES[case_id]
  arrays = small(case_id, dtype="float64")
  ids = np.stack([np.zeros(SMALL.T, np.int32), cases.layout("padded_inside", SMALL.T)])
  draw = np.random.default_rng(1).standard_normal
  tangents = jax.tree.map(lambda x: draw(x.shape), arrays)
  cts = cases.cotangents(case, arrays)
  run = op(case, impl)

  @quick_jit
  def both(arrays, tangents, cts):
    f = lambda arrays: run(arrays, ids)
    _, pushed = jax.jvp(f, (arrays,), (tangents,))
    _, pull = jax.vjp(f, arrays)
    return pushed, pull(cts)[0]

  pushed, pulled = jax.device_get(both(arrays, tangents, cts))
  dot = lambda a, b: sum(
    np.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
  assert dot(cts, pushed) == pytest.approx(dot(pulled, tangents), rel=1e-10)


def _transformations():
  yield pytest.param("delta_rule-head", "chunked")
  for case_id in ("linear_recurrence-vector", "linear_attention-channel", "attention-forget"):
    yield pytest.param(case_id, "chunked", marks=pytest.mark.slow)
  yield pytest.param("delta_rule-head", "associative", marks=pytest.mark.slow)


def _loss(case, impl):
  run = op(case, impl)

  def loss(arrays):
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(run(arrays)))

  return loss


@pytest.mark.parametrize(("case_id", "impl"), [*_transformations()])
def test_vmap_and_remat_change_nothing(case_id, impl):
  """Gradient of a rematerialised op under vmap against the gradient of one batch."""
  case = CASES[case_id]
  arrays = small(case_id)
  loss = _loss(case, impl)
  want = quick_jit(jax.grad(loss))(arrays)
  separate = {  # an outer axis of batches of one
    name: x if name in case.shared else jax.tree.map(lambda a: a[:, None], x)
    for name, x in arrays.items()
  }
  over = ({name: None if name in case.shared else 0 for name in arrays},)
  got = quick_jit(jax.vmap(jax.grad(jax.checkpoint(loss)), in_axes=over))(separate)
  for name, x in got.items():
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(want[name]), strict=True):
      a = a.sum(0) if name in case.shared else a[:, 0]
      assert (
        cases.relative_rms(a, b)
        <= cases.BUDGET["float32"]["gate" if name in cases.GATES else "gradient"]
      ), name


@pytest.mark.parametrize(("case_id", "impl"), [*_transformations()])
def test_scan_over_layers(case_id, impl):
  """Gradient through a `lax.scan` over layers whose body is the op, against a Python loop."""
  case = CASES[case_id]
  arrays = small(case_id)
  name = "x" if "x" in arrays else "v"
  run = op(case, impl)

  def layer(value, scale):
    o, _ = run(arrays | {name: value * scale})
    return jnp.tanh(jax.image.resize(o, value.shape, "nearest")), None

  scales = jnp.array([0.5, 1.0])
  scanned = lambda x: jax.lax.scan(layer, x, scales)[0].sum()
  looped = lambda x: layer(layer(x, scales[0])[0], scales[1])[0].sum()
  got, want = quick_jit(jax.grad(scanned))(arrays[name]), quick_jit(jax.grad(looped))(arrays[name])
  assert cases.relative_rms(got, want) <= cases.BUDGET["float32"]["gradient"]


@pytest.mark.parametrize(
  "impl",
  [*(pytest.param(i, marks=pytest.mark.slow) for i in ("recurrent", "associative")), "chunked"],
)
def test_grouped_heads_equal_repeated_heads(impl):
  """Head h of q and k serves value heads n h ... n h + n - 1: repeating q and k says the same."""
  arrays = numbers("delta_rule-head", Shape(T=33, H=2, HV=4, K=4, V=6), ("plain",))
  repeated = arrays | {name: np.repeat(arrays[name], 2, axis=2) for name in ("q", "k")}
  run = quick_jit(op(CASES["delta_rule-head"], impl))
  for a, b in zip(run(arrays), run(repeated), strict=True):
    assert cases.relative_rms(a, b) <= cases.BUDGET["float32"]["value"]


@pytest.mark.parametrize("case_id", CASES)
def test_auto_gives_the_shapes_of_recurrent(case_id):
  """`auto` never raises, also for one token."""
  case = CASES[case_id]
  for T in (1, SMALL.T):
    arrays = cases.cut(case, small(case_id, ("plain",)), slice(T))
    out = jax.eval_shape(op(case, "auto"), arrays)
    want = jax.eval_shape(op(case, "recurrent"), arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
      lambda x: (x.shape, x.dtype), want
    )
