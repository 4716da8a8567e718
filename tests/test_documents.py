"""A number that is not finite stays in its document, and does not reach earlier tokens."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape

import lajax
from lajax.recurrence import linear_attention
from lajax.recurrence.chunks import chunked
from lajax.recurrence.documents import not_finite, reached
from lajax.recurrence.tokens import recurrent

SHAPE = Shape(T=40, HV=2, K=4, V=3)
LENGTH, BAD = 20, 10  # of the first of two documents, and its token that is not finite
IDS = {
  "packed": np.repeat(np.arange(2), LENGTH)[None].astype(np.int32),
  "whole": np.zeros((1, 2 * LENGTH), np.int32),
}
FAMILIES = (
  "linear_recurrence-vector",
  "linear_attention-head",
  "linear_attention-channel",
  "linear_attention-bonus",
  "normalized_linear_attention-head",
  "delta_rule-head",
  "delta_rule-erase_write",
  "dplr-channel",
  "gated_oja-channel",
  "mlstm-head",
)


@functools.cache
def inputs(case_id):
  """(arrays of one row, and the same with a bad number in one argument per row, names of rows)."""
  case = CASES[case_id]
  one = cases.inputs(case_id, SHAPE, ("plain",))
  rows = []
  for name in one:
    for value in (np.nan, np.inf) if name in ("v", "x") else (np.nan,):
      if name not in case.shared:
        rows.append((name, value))
  repeat = lambda name, x: x if name in case.shared else np.repeat(x, len(rows), axis=0)
  arrays = {name: jax.tree.map(functools.partial(repeat, name), x) for name, x in one.items()}
  for n, (name, value) in enumerate(rows):
    where = (n,) if name in case.untimed else (n, BAD)
    for x in jax.tree.leaves(arrays[name])[:1]:
      x[where] = value
  return one, arrays, rows


@functools.cache
def compiled(case_id, impl):
  """Outputs, the final state and the gradients of sum(o^2) + sum(state^2)."""
  case = CASES[case_id]
  op = functools.partial(getattr(lajax, case.op), impl=impl, **dict(case.options))

  def loss(arrays, ids):
    o, state = op(**arrays, segment_ids=ids)
    square = lambda x: (x * x).sum()
    return square(o) + sum(map(square, jax.tree.leaves(state))), (o, state)

  return cases.quick_jit(jax.value_and_grad(loss, has_aux=True))


def run(case_id, impl, arrays, ids):
  arrays = jax.tree.map(lambda x: np.asarray(x, np.float32), arrays)
  B = cases.tokens(CASES[case_id], arrays)[0]
  (_, (o, state)), gradients = compiled(case_id, impl)(arrays, np.repeat(ids, B, axis=0))
  return np.asarray(o), state, gradients


def close(got, want):
  return np.allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case_id", cases.some_fast(FAMILIES, ("delta_rule-head",)))
def test_bad_numbers_stay_in_their_document(case_id):
  """NaN in each argument in turn, infinity too: it shows in its document, and in no other one.

  `test_laws` holds all implementations to the second half of this.
  """
  case = CASES[case_id]
  one, arrays, rows = inputs(case_id)
  one = {
    name: x if name in case.shared else jax.tree.map(lambda a: np.repeat(a, len(rows), 0), x)
    for name, x in one.items()
  }
  for layout, ids in IDS.items():
    want, got = run(case_id, "chunked", one, ids), run(case_id, "chunked", arrays, ids)
    for n, (name, _) in enumerate(rows):
      text = f"{layout}: {name}"
      if name not in case.untimed:
        assert close(got[0][n, :BAD], want[0][n, :BAD]), f"{text}: an earlier token"
        # A rule that reads before its token's decay shows a bad decay one token later.
        assert not np.isfinite(got[0][n, BAD : BAD + 2]).all(), f"{text}: NaN is lost"
      if layout == "whole":
        continue
      assert close(got[0][n, LENGTH:], want[0][n, LENGTH:]), f"{text}: the next document"
      for x, y in zip(*map(jax.tree.leaves, (got[1], want[1])), strict=True):
        assert close(x[n], y[n]), f"{text}: the final state"
      for argument, dx in got[2].items():
        if argument not in case.untimed:
          dy = want[2][argument]
          assert close(dx[n, LENGTH:], dy[n, LENGTH:]), f"{text}: d{argument} of the next document"
      if name not in case.untimed:
        assert not np.isfinite(np.asarray(got[2][name])[n, BAD]).all(), (
          f"{text}: gradient is finite"
        )


@pytest.mark.parametrize("impl", ["recurrent", "associative", "chunked"])
def test_bad_cotangents_stay_in_their_document(impl):
  """A loss that is NaN at token 30 gives NaN to the second document, from that token back."""
  one, _, _ = inputs("linear_attention-head")
  arrays = jax.tree.map(lambda x: np.asarray(x, np.float32), one)

  def gradient(arrays, ids, factor):
    loss = lambda arrays: (
      lajax.linear_attention(**arrays, segment_ids=ids, impl=impl)[0] * factor[None, :, None, None]
    ).sum()
    return jax.grad(loss)(arrays)["v"]

  factor = np.ones(2 * LENGTH, np.float32)
  gradient = cases.quick_jit(gradient)
  want = gradient(arrays, IDS["packed"], factor)
  factor[30] = np.nan
  got = gradient(arrays, IDS["packed"], factor)
  assert close(got[:, :LENGTH], want[:, :LENGTH])
  assert close(got[:, 31:], want[:, 31:])
  assert np.isnan(got[:, LENGTH:31]).all()


@pytest.mark.parametrize(
  ("packed", "bad_state", "reverse", "want"),
  [
    (False, False, False, [0, 1, 1, 1, 1, 1, 1, 1]),
    (False, False, True, [1, 1, 1, 1, 1, 1, 0, 0]),
    (False, True, False, [1, 1, 1, 1, 1, 1, 1, 1]),
    (False, True, True, [1, 1, 1, 1, 1, 1, 1, 1]),
    (True, False, False, [0, 1, 1, 0, 0, 1, 1, 0]),
    (True, False, True, [1, 1, 0, 1, 1, 1, 0, 0]),
    (True, True, False, [1, 1, 1, 0, 0, 1, 1, 0]),  # the first state belongs to the first document
    (True, True, True, [1, 1, 0, 1, 1, 1, 0, 1]),  # and the last one to the last document
  ],
)
def test_tokens_that_a_bad_number_reaches(packed, bad_state, reverse, want):
  """In two heads: bad tokens at 1 and 5 in the first, none in the second, whose state is finite."""
  bad = np.zeros((1, 8, 2), bool)
  bad[0, [1, 5], 0] = True
  document = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2]]) if packed else None
  found = reached(jnp.asarray(bad), jnp.array([[bad_state, False]]), document, reverse=reverse)
  assert found[0, :, 0].tolist() == want
  assert not found[0, :, 1].any()


def test_infinite_decays_are_finite_numbers():
  g = jnp.array([[[-jnp.inf]], [[jnp.nan]], [[jnp.inf]], [[-1.0]]])
  tokens = linear_attention.AdditiveTokens(None, None, None, g)
  assert not_finite(tokens, 1, ("g",))[:, 0, 0].tolist() == [False, True, True, False]


# --- symbolic sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "case_id", cases.some_fast(["linear_attention-head", "delta_rule-head"], ())
)
def test_export_with_a_symbolic_batch(case_id):
  """One exported function, and its gradient, serve every batch size."""
  case = CASES[case_id]
  arrays = jax.tree.map(
    lambda x: np.asarray(x, np.float32), dict(cases.inputs(case_id, SHAPE, ("plain",) * 3))
  )
  op = functools.partial(getattr(lajax, case.op), impl="chunked")
  gradient = cases.quick_jit(jax.grad(lambda arrays: (op(**arrays)[0] ** 2).sum()))
  (b,) = jax.export.symbolic_shape("b")
  symbolic = jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), arrays)
  exported = jax.export.export(gradient)(symbolic)
  for B in (1, 3):
    some = jax.tree.map(lambda x, B=B: x[:B], arrays)
    got, want = exported.call(some), gradient(some)
    assert all(jax.tree.leaves(jax.tree.map(close, got, want)))


@pytest.mark.parametrize("loop", [chunked, recurrent])
def test_export_with_a_symbolic_length_is_refused(loop):
  arrays = cases.inputs("linear_attention-head", SHAPE, ("plain",))
  (t,) = jax.export.symbolic_shape("t")
  symbol = lambda name: jax.ShapeDtypeStruct((1, t, *arrays[name].shape[2:]), np.float32)
  tokens = linear_attention.AdditiveTokens(*map(symbol, "qkvg"))
  state = jax.ShapeDtypeStruct(arrays["initial_state"].shape, np.float32)
  run = jax.jit(lambda tokens, state: loop(linear_attention.rule, tokens, state))
  with pytest.raises(NotImplementedError, match="symbol t here"):
    jax.export.export(run)(tokens, state)
