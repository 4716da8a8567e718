"""Tests of the kernels on a real GPU, for what the interpreter cannot show.

`python experiments/on_gpu.py` runs them.
"""

import itertools

import cases
import jax
import numpy as np
import pallas_cases
import pytest
from cases import CASES, Shape

import lajax

pytestmark = pytest.mark.gpu
KERNELS = [
  f"{op}-{gate}"
  for op in ("linear_attention", "delta_rule", "dplr")
  for gate in ("none", "head", "channel")
]
SHAPES = (
  Shape(),
  Shape(T=130, H=2, HV=4, K=128, V=128),
  Shape(T=65, H=1, HV=2, K=192, V=72),
  Shape(T=1, H=2, HV=4, K=100, V=72),  # the kernel of one token
)


ALL = [  # all that the kernels take
  pytest.param(case_id, shape, dtype, id=f"{case_id}-T{shape.T}-K{shape.K}-V{shape.V}-{dtype}")
  for case_id, shape, dtype in itertools.product(KERNELS, SHAPES, ["float32", "bfloat16"])
  if shape.K <= 128 or dtype == "bfloat16" or case_id.startswith("linear_attention")
]


@pytest.mark.parametrize(("case_id", "shape", "dtype"), ALL)
def test_outputs_states_and_gradients(case_id, shape, dtype):
  """To the budget of the interpreted kernels: float32 products are full float32 here too."""
  assert not pallas_cases.misses(case_id, shape, dtype, True, cases.batch(CASES[case_id]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["linear_attention", "delta_rule"])
def test_a_declared_bound(op, dtype):
  case, shape = CASES[f"{op}-channel"], SHAPES[1]
  arrays, ids = cases.bounded_inputs(case.id, -5.0, shape), cases.packed_ids(shape.T)
  got = cases.evaluate(case, "pallas", dtype, arrays, ids, bound=-5.0)
  want = cases.reference(case, arrays, ids, values=dtype)
  assert not cases.misses(case, got, want, dtype, ("bounded",) * cases.BATCH)


@pytest.mark.parametrize("case_id", KERNELS)
def test_same_bits_every_time(case_id):
  case = CASES[case_id]
  given, cts = pallas_cases.rounded(case, cases.inputs(case_id, SHAPES[1]), "bfloat16")
  first, second = (jax.device_get(pallas_cases.compiled(case)(given, None, cts)) for _ in range(2))
  for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_more_than_65535_programs():
  """More programs than a GPU takes on any axis of a launch but the first."""
  q = jax.random.normal(jax.random.key(0), (70_000, 17, 1, 16))
  run = jax.jit(lambda impl: lajax.linear_attention(q, q, q, impl=impl)[0], static_argnums=0)
  assert (
    cases.relative_rms(np.asarray(run("pallas")), np.asarray(run("chunked")))
    < cases.BUDGET["float32"]["value"]
  )
