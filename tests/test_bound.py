"""A declared lower bound of log decays: faster chunks, the same numbers, clear errors."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, BUDGET, CASES, Shape

import lajax
from lajax.recurrence.decays import LOWEST_BOUND

BOUNDED = (
  "delta_rule-channel",
  "linear_attention-channel",
  "delta_rule-erase_write",
  "linear_attention-bonus",
)


def bounded_inputs(case_id: str, bound: float, shape: Shape):
  """A batch of a case's arrays whose rows have decays of every kind that the bound allows."""
  arrays = dict(cases.inputs(case_id, shape, ("plain",) * BATCH))
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


@pytest.mark.parametrize(
  ("case_id", "dtype", "T"),
  [
    ("delta_rule-channel", "float32", 100),
    *(
      pytest.param(id, dtype, T, marks=pytest.mark.slow)
      for id, dtype, T in (
        ("delta_rule-channel", "float64", 67),
        ("delta_rule-channel", "bfloat16", 100),
        ("linear_attention-channel", "float32", 100),
        ("linear_attention-channel", "float64", 100),
        ("delta_rule-erase_write", "float32", 100),
        ("linear_attention-bonus", "float32", 100),
      )
    ),
  ],
)
def test_bounded_chunks_equal_recurrent(case_id, dtype, T):
  case, shape = CASES[case_id], Shape(T=T)
  arrays, ids = bounded_inputs(case_id, LOWEST_BOUND, shape), cases.packed_ids(T)
  got = cases.evaluate(case, "chunked", dtype, arrays, ids, bound=LOWEST_BOUND)
  want = cases.reference(case, arrays, ids, values=dtype)
  assert not cases.misses(case, got, want, dtype, ("bounded",) * BATCH)


def test_gradients_of_gates_at_the_bound_beside_weak_ones():
  """A gate's gradient is a difference of sums over a block of 16 tokens: at a decay of e^-5 it is
  small beside them, and it must not be their rounding.
  """
  case_id = "delta_rule-channel"
  case, arrays = CASES[case_id], bounded_inputs("delta_rule-channel", LOWEST_BOUND, Shape(T=100))
  got = cases.evaluate(case, "chunked", "float32", arrays, bound=LOWEST_BOUND).gradients["g"]
  want = cases.reference(case, arrays, values="float32").gradients["g"]
  at_bound = arrays["g"] == LOWEST_BOUND
  assert at_bound.any()
  error = cases.relative_rms(got[at_bound], want[at_bound])
  assert error <= BUDGET["float32"]["gate"]


def arguments(g):
  given = cases.arguments("delta_rule-channel") | {"impl": "chunked"}
  return given | {"g": jnp.broadcast_to(jnp.asarray(g, jnp.float32), given["g"].shape)}


@pytest.mark.parametrize("bound", [0.0, 2, np.nan, -np.inf, "-5", True])
def test_a_bound_is_a_negative_number(bound):
  with pytest.raises(ValueError, match="`bound` must be a"):
    lajax.delta_rule(**arguments(-1.0), bound=bound)


@pytest.mark.parametrize("impl", ["recurrent", "associative", "chunked"])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_decay_below_the_bound_is_an_error(impl, on_host):
  given = arguments(-6.0) | {"impl": impl}
  given["g"] = np.asarray(given["g"]) if on_host else given["g"]
  with pytest.raises(
    ValueError, match=r"no log decay below the declared bound -5\.0; got 120 of 120"
  ):
    lajax.delta_rule(**given, bound=-5.0)


def test_padding_may_lie_below_the_bound():
  given = arguments(-1.0)
  given["g"] = given["g"].at[:, 3].set(-jnp.inf)
  given["segment_ids"] = given["segment_ids"].at[:, 3].set(-1)
  with_bound, without = (lajax.delta_rule(**given, bound=b) for b in (-5.0, None))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), with_bound, without
  )


def test_a_lower_bound_than_the_fast_one_changes_nothing():
  given = arguments(-40.0)
  jax.tree.map(
    np.testing.assert_array_equal, lajax.delta_rule(**given, bound=-50.0), lajax.delta_rule(**given)
  )


def test_a_broken_promise_under_jit_is_seen():
  """Where no value can be checked, the numbers are not finite instead of slightly wrong."""
  given = arguments(-100.0)
  o, _ = jax.jit(lambda g: lajax.delta_rule(**(given | {"g": g}), bound=-5.0))(given["g"])
  assert not np.isfinite(o).all()
