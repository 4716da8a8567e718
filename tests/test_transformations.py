"""Ops under JAX's transformations: forward mode, vmap, remat, scan and grouped heads."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape, quick_jit

SMALL = Shape(T=33, H=1, HV=2, K=4, V=6)


def small(case_id: str, rows=("plain", "mixed"), dtype: str = "float32") -> dict:
  return cases.numbers(case_id, SMALL, rows, dtype)


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
  run = cases.call_of(case, impl)

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
  run = cases.call_of(case, impl)

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
  run = cases.call_of(case, impl)

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
  arrays = cases.numbers("delta_rule-head", Shape(T=33, H=2, HV=4, K=4, V=6), ("plain",))
  repeated = arrays | {name: np.repeat(arrays[name], 2, axis=2) for name in ("q", "k")}
  run = quick_jit(cases.call_of(CASES["delta_rule-head"], impl))
  for a, b in zip(run(arrays), run(repeated), strict=True):
    assert cases.relative_rms(a, b) <= cases.BUDGET["float32"]["value"]


@pytest.mark.parametrize("case_id", CASES)
def test_auto_gives_the_shapes_of_recurrent(case_id):
  """`auto` never raises, also for one token."""
  case = CASES[case_id]
  for T in (1, SMALL.T):
    arrays = cases.cut(case, small(case_id, ("plain",)), slice(T))
    out = jax.eval_shape(cases.call_of(case, "auto"), arrays)
    want = jax.eval_shape(cases.call_of(case, "recurrent"), arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
      lambda x: (x.shape, x.dtype), want
    )
