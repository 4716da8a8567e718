"""The kernels of the elementwise recurrence: interpreted on a CPU against `recurrent` in
float64.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape, quick_jit
from pallas_cases import not_zero

import lajax
from lajax import pallas
from lajax.pallas import linear_recurrence as kernels
from lajax.pallas.model import kernel_names

BASE = Shape()
VECTOR = CASES["linear_recurrence-vector"]


def misses(case, shape, dtype, packed, rows):
  arrays = cases.inputs(case.id, shape, rows)
  ids = cases.packed_ids(shape.T)[: len(rows)] if packed else None
  got = cases.evaluate(case, "pallas", dtype, arrays, ids)
  want = cases.reference(case, arrays, ids, values=dtype)
  return cases.misses(case, got, want, dtype, rows) | not_zero(arrays, got.gradients)


@pytest.fixture
def splits(monkeypatch):
  """Time split into eight tokens each, at a length that no other test has: so nothing compiled
  before is used.
  """
  monkeypatch.setattr(kernels, "LEAST", 8)
  return Shape(T=99)


@pytest.mark.slow
def test_packed_documents_of_every_kind_of_values():
  """Outputs, states, all gradients: documents, padding, decays of -inf, sizes no powers of two."""
  assert not misses(VECTOR, BASE, "float32", True, cases.batch(VECTOR))


def test_packed_documents_in_time_splits(splits):
  """The same through summaries, their combination, and the replay."""
  assert kernels._plan(jax.ShapeDtypeStruct((10, splits.T, 20), jnp.float32))[-2:] == (11, 9)
  assert not misses(VECTOR, splits, "float32", True, cases.batch(VECTOR))


def test_a_last_token_that_begins_a_document(monkeypatch):
  """The last split is shorter: behind the last token neither a decay nor a document begins."""
  monkeypatch.setattr(kernels, "LEAST", 8)
  T = 41
  p = kernels._plan(jax.ShapeDtypeStruct((1, T, 5), jnp.float32))
  assert (p.S, p.L, p.ragged) == (5, 9, True)
  rng = np.random.default_rng(0)
  draw = lambda *shape: np.float32(rng.standard_normal(shape))
  arrays = {"x": draw(1, T, 5), "log_a": -abs(draw(1, T, 5)), "initial_state": draw(1, 5)}
  ids = np.int32([[0] * (T - 1) + [1]])
  cts = draw(1, T, 5), draw(1, 5)

  def run(impl, arrays):
    op = functools.partial(lajax.linear_recurrence, segment_ids=ids, impl=impl)
    out, pull = jax.vjp(lambda arrays: op(**arrays), arrays)
    return out, pull(cts)[0]

  got, want = (quick_jit(functools.partial(run, impl))(arrays) for impl in ("pallas", "recurrent"))
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case_id", "dtype", "packed"),
  [
    ("linear_recurrence-vector", "float32", False),
    ("linear_recurrence-matrix", "bfloat16", False),
    ("linear_recurrence-matrix", "bfloat16", True),
  ],
)
def test_dtypes(case_id, dtype, packed, splits):
  case = CASES[case_id]
  assert not misses(case, BASE, dtype, packed, cases.batch(case))


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape", [Shape(T=1, V=7), Shape(T=17, V=33), Shape(T=65, V=130)], ids=lambda s: f"T{s.T}-D{s.V}"
)
def test_sizes(shape, splits):
  assert not misses(VECTOR, shape, "float32", False, VECTOR.rows[:5:2])


@pytest.mark.slow
def test_vmap_and_checkpoint():
  """Mapped over an axis in front, with the forward pass computed again in the backward pass: the
  same numbers.
  """
  op = functools.partial(lajax.linear_recurrence, impl="pallas")

  def gradients(f, arrays, cts):
    out, pull = jax.vjp(lambda arrays: f(**arrays), arrays)
    return out, pull(cts)[0]

  arrays = jax.tree.map(np.float32, cases.inputs(VECTOR.id, BASE))
  cts = jax.tree.map(np.float32, cases.cotangents(VECTOR, arrays))
  whole = quick_jit(functools.partial(gradients, op))(arrays, cts)
  part = lambda x: x.reshape(2, -1, *x.shape[1:])
  mapped = quick_jit(jax.vmap(functools.partial(gradients, jax.checkpoint(op))))
  got = mapped(*jax.tree.map(part, (arrays, cts)))
  for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
    assert cases.relative_rms(x.reshape(want.shape), want) < 1e-6


def test_time_is_cut_where_there_are_few_channels():
  """By the shape alone: enough programs to keep a GPU busy, splits of no fewer than 64 tokens."""
  plan = lambda *shape: kernels._plan(jax.ShapeDtypeStruct(shape, jnp.float32))
  assert plan(8, 4096, 8192).S == 1
  assert plan(1, 100, 128).S == 1
  assert plan(1, 65536, 2048).S == 64
  assert plan(1, 4096, 64).S == 64
  for p in (plan(1, 1000, 2048), plan(3, 70_001, 96), plan(1, 129, 8)):
    assert (p.S - 1) * p.L < p.T <= p.S * p.L


@pytest.mark.parametrize(("length", "forward"), [(100, 1), (200, 3)])
def test_number_of_launches(length, forward):
  x = jnp.ones((2, length, 8))
  op = lambda x, log_a: lajax.linear_recurrence(x, log_a, impl="pallas")[0]
  assert len(kernel_names(op, x, -x)) == forward
  assert len(kernel_names(lambda *args: jax.vjp(op, *args)[1](x), x, -x)) == 2 * forward


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  x, wide = array(2, 64, 20), array(2, 64, 20, dtype=jnp.float64)
  assert pallas.supports_linear_recurrence(x, x) is None
  assert "float64" in pallas.supports_linear_recurrence(x, wide)
  assert "2^31 programs" in pallas.supports_linear_recurrence(
    array(2**20, 1, 2**17), array(2**20, 1, 2**17)
  )
  with (
    jax.enable_x64(True),
    pytest.raises(NotImplementedError, match=r"float64.*impl='chunked' or impl='auto'\.$"),
  ):
    lajax.linear_recurrence(jnp.ones((1, 2, 3), jnp.float64), jnp.zeros((1, 2, 3)), impl="pallas")


def test_no_tokens_and_no_channels():
  for shape in ((2, 0, 3), (2, 3, 0)):
    h, last = lajax.linear_recurrence(jnp.ones(shape), jnp.zeros(shape), impl="pallas")
    assert h.shape == shape
    assert last.shape == (shape[0], shape[2])
    assert not last.any()


def test_second_derivatives_are_refused_with_a_sentence():
  x = jnp.ones((1, 4, 5))
  first = jax.grad(lambda x: lajax.linear_recurrence(x, -x, impl="pallas")[0].sum())
  with pytest.raises(NotImplementedError, match=r"first derivatives only.*impl='recurrent'"):
    jax.grad(lambda x: first(x).sum())(x)
