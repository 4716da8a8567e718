"""A declared lower bound of log decays: faster chunks and kernels, the same numbers, clear errors."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, BUDGET, CASES, Shape
from flax import nnx

import lajax
import lajax.layers as L
from lajax.pallas import model, tiles
from lajax.recurrence.decays import LOWEST_BOUND

BOUNDED = (
  "delta_rule-channel",
  "linear_attention-channel",
  "delta_rule-erase_write",
  "linear_attention-bonus",
)


BASE, TILED = Shape(), Shape(T=33, K=40, V=33)  # TILED: kernels take K in several tiles


@pytest.mark.parametrize(
  ("case_id", "impl", "dtype", "shape"),
  [
    ("delta_rule-channel", "chunked", "float32", BASE),
    *(
      pytest.param(*row, marks=pytest.mark.slow)
      for row in (
        ("delta_rule-channel", "chunked", "float64", Shape(T=67)),
        ("delta_rule-channel", "chunked", "bfloat16", BASE),
        ("linear_attention-channel", "chunked", "float32", BASE),
        ("linear_attention-channel", "chunked", "float64", BASE),
        ("delta_rule-erase_write", "chunked", "float32", BASE),
        ("linear_attention-bonus", "chunked", "float32", BASE),
        ("delta_rule-channel", "pallas", "float32", BASE),
        ("delta_rule-channel", "pallas", "bfloat16", TILED),
        ("linear_attention-channel", "pallas", "bfloat16", BASE),
        ("linear_attention-bonus", "pallas", "float32", BASE),
      )
    ),
  ],
)
def test_bounded_equals_recurrent(case_id, impl, dtype, shape):
  case = CASES[case_id]
  arrays, ids = cases.bounded_inputs(case_id, LOWEST_BOUND, shape), cases.packed_ids(shape.T)
  got = cases.evaluate(case, impl, dtype, arrays, ids, bound=LOWEST_BOUND)
  want = cases.reference(case, arrays, ids, values=dtype)
  assert not cases.misses(case, got, want, dtype, ("bounded",) * BATCH)


@pytest.mark.parametrize("impl", ["chunked", pytest.param("pallas", marks=pytest.mark.slow)])
def test_gradients_of_gates_at_the_bound_beside_weak_ones(impl):
  """A gate's gradient is a difference of sums over a block of 16 tokens: at a decay of e^-5 it is
  small beside them, and it must not be their rounding.
  """
  case_id = "delta_rule-channel"
  case, arrays = CASES[case_id], cases.bounded_inputs(case_id, LOWEST_BOUND, BASE)
  ids = cases.packed_ids(BASE.T)  # those of the test above, which has compiled both
  got = cases.evaluate(case, impl, "float32", arrays, ids, bound=LOWEST_BOUND).gradients["g"]
  want = cases.reference(case, arrays, ids, values="float32").gradients["g"]
  at_bound = arrays["g"] == LOWEST_BOUND
  assert at_bound.any()
  error = cases.relative_rms(got[at_bound], want[at_bound])
  assert error <= BUDGET["float32"]["gate"]


@pytest.mark.parametrize("C", [16, 32])
def test_factors_of_kernels_make_the_decays(C):
  """Each pair of tokens below the diagonal is in one item, whose factors make the decay between."""
  rng = np.random.default_rng(C)
  kinds = rng.uniform(-5, 0, (C, 3)), np.full((C, 1), -5.0), rng.choice([-5.0, -1e-3], (C, 3))
  g = np.concatenate(kinds, axis=1)
  sums = np.cumsum(g, axis=0)
  between, below = np.exp(sums[:, None] - sums[None]), np.tri(C, k=-1, dtype=bool)

  @cases.quick_jit
  def items(g):
    return [
      (reader, writer, tiles.crosses_halves(C, h, bounded=True))
      for h, reader, writer in tiles.halves(g, bounded=True)
      if h < C
    ]

  found = np.zeros_like(between)
  for reader, writer, keep in jax.device_get(items(g.astype(np.float32))):
    assert max(np.abs(np.log(x)).max() for x in (reader, writer)) <= 80
    pairs = np.float64(reader)[:, None] * np.float64(writer)[None]
    found += np.where(keep[..., None], pairs, 0)
  np.testing.assert_allclose(found[below], between[below], rtol=2e-6)
  assert not found[~below].any()


def solving_work(f, *args) -> int:
  """Operations of the first launch, which makes the scores."""
  return model.launches(f, *args)[0].operations


def test_kernels_multiply_less_under_a_bound():
  given = arguments(-1.0) | {"impl": "pallas"}
  work = lambda **options: solving_work(
    lambda g: lajax.delta_rule(**(given | {"g": g}), **options), given["g"]
  )
  assert work(bound=-5.0) < 0.7 * work()
  assert work(bound=-50.0) == work()


def test_a_layer_passes_its_bound_to_kernels():
  def work(lower_bound):
    options = {"lower_bound": lower_bound, "conv_size": None, "impl": "pallas"}
    make = lambda: L.KimiDeltaAttention(8, 1, 8, **options, rngs=nnx.Rngs(0))
    graph, params = nnx.split(nnx.eval_shape(make))
    x = jax.ShapeDtypeStruct((1, 20, 8), jnp.float32)
    return solving_work(lambda params, x: nnx.merge(graph, params)(x)[0], params, x)

  assert work(-5.0) < 0.7 * work(-5.5)


def arguments(g):
  given = cases.arguments("delta_rule-channel") | {"impl": "chunked"}
  return given | {"g": jnp.broadcast_to(jnp.asarray(g, jnp.float32), given["g"].shape)}


@pytest.mark.parametrize("bound", [0.0, 2, np.nan, -np.inf, "-5", True])
def test_a_bound_is_a_negative_number(bound):
  with pytest.raises(ValueError, match="`bound` must be a"):
    lajax.delta_rule(**arguments(-1.0), bound=bound)


@pytest.mark.parametrize("impl", ["recurrent", "associative", "chunked", "pallas"])
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


@pytest.mark.parametrize("impl", ["chunked", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_broken_promise_under_jit_is_seen(impl):
  """Where no value can be checked, the numbers are not finite instead of slightly wrong."""
  given = arguments(-100.0) | {"impl": impl}
  o, _ = cases.quick_jit(lambda g: lajax.delta_rule(**(given | {"g": g}), bound=-5.0))(given["g"])
  assert not np.isfinite(o).all()
