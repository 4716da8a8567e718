"""The solvers of the mesa layer: conjugate gradients to their stated tolerance, implicit gradients."""

import functools

import cases
import jax
import numpy as np
import pytest
from cases import CASES, Shape

import lajax

SHAPE = Shape(T=40, H=1, HV=2, K=16, V=5)


@functools.cache
def gradient_of(cg_steps):
  """Outputs, final state and gradients of their squares, in the inputs' dtype."""
  op = functools.partial(lajax.mesa, cg_steps=cg_steps, impl="chunked")

  def loss(arrays, ids):
    o, state = op(**arrays, segment_ids=ids)
    return sum((x * x).sum() for x in (o, *state)), (o, state)

  return cases.quick_jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float64", 1e-11)])
@pytest.mark.slow
def test_conjugate_gradients_meet_their_tolerance(dtype, bound):
  """30 steps against the exact solution: outputs, and all gradients, which are implicit."""
  arrays = cases.numbers("mesa-head", SHAPE, ("plain", "zero", "mixed"), dtype)
  ids = np.broadcast_to(np.repeat([0, -1, 1], [17, 3, 20]), (3, 40))
  with jax.enable_x64(dtype == "float64"):
    exact, close = (jax.device_get(gradient_of(steps)(arrays, ids)) for steps in (None, 30))
  errors = jax.tree.map(cases.relative_rms, close, exact)
  assert max(jax.tree.leaves(errors)) < bound


@pytest.mark.slow
def test_too_few_steps_are_no_solution():
  arrays = cases.numbers("mesa-head", SHAPE, ("plain", "zero", "mixed"))
  (_, (few, _)), _ = gradient_of(2)(arrays, None)
  (_, (exact, _)), _ = gradient_of(None)(arrays, None)
  assert 1e-3 < cases.relative_rms(few, exact) < 0.5


def test_default_scale():
  arrays = cases.numbers("mesa-head", Shape(T=3), ("plain",))
  call = cases.quick_jit(
    lambda arrays: (lajax.mesa(**arrays)[0], lajax.mesa(**arrays, scale=1.0)[0])
  )
  np.testing.assert_array_equal(*call(arrays))
  assert CASES["mesa-head"].options == (("scale", None),)
