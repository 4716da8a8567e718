"""One token by the kernels, of ops, steps and layers: interpreted on a CPU against `recurrent` in
float64.
"""

import functools

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from flax import nnx
from pallas_cases import misses

import lajax
import lajax.layers as L
import lajax.recurrence
from lajax.pallas import launch
from lajax.pallas.model import kernel_names

ONE = Shape(T=1, H=2, HV=4, K=12, V=40)  # a tile of values and a part of one
LAUNCHES = {"delta_product": 2, "mamba3-ranks": 2}
OPS = {  # cases with a kernel of one token
  case_id: next((n for name, n in LAUNCHES.items() if case_id.startswith(name)), 1)
  for case_id in CASES
  if not case_id.startswith(
    ("attention", "linear_recurrence", "gated_oja", "momentum", "log_linear")
  )
}
FAST = ("linear_attention-bonus", "delta_rule-channel", "delta_rule-erase_write", "dplr-head")


@pytest.fixture
def gpu(monkeypatch):
  monkeypatch.setattr(launch, "_on_supported_gpu", lambda: True)
  jax.clear_caches()
  yield
  jax.clear_caches()


def call(case_id: str, impl: str):
  case = CASES[case_id]
  return functools.partial(getattr(lajax, case.op), impl=impl, **dict(case.options))


def arguments(case_id: str, dtype: str = "float32"):
  return cases.numbers(case_id, ONE, CASES[case_id].rows[:2], dtype=dtype)


@pytest.mark.parametrize(
  ("case_id", "dtype"),
  [
    pytest.param(
      case_id, dtype, marks=() if case_id in FAST and dtype == "float32" else pytest.mark.slow
    )
    for case_id in OPS
    for dtype in ("float32", "bfloat16")
  ],
)
def test_outputs_states_and_gradients(case_id, dtype):
  """All gates; grouped heads; K and V no powers of two."""
  rows = CASES[case_id].rows
  assert not misses(case_id, ONE, dtype, False, tuple(dict.fromkeys(rows))[:3])


def token(x, name: str, case: cases.Case):
  return x if name in (*case.untimed, *case.shared) else jax.tree.map(lambda a: a[:, 0], x)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case_id", cases.some_fast(OPS, FAST))
def test_auto_is_the_kernel_for_ops_and_steps(case_id):
  """And with float64 or a traced scale the equation, as on other devices."""
  case, arrays = CASES[case_id], arguments(case_id)
  kernels = lambda f, *args: [n for n in kernel_names(f, *args) if n.endswith("_decode")]
  auto = call(case_id, "auto")
  assert len(kernels(lambda x: auto(**x), arrays)) == OPS[case_id]
  own = {n: token(x, n, case) for n, x in arrays.items()}
  state, options = own.pop("initial_state"), dict(case.options)
  step = lambda state, x: case.step()(state, **x, **options)
  assert len(kernels(step, state, own)) == OPS[case_id]
  if "scale" not in options:
    of_scale = lambda x, scale: auto(**x, scale=scale)
    assert not kernels(of_scale, arrays, 0.5)
  with jax.enable_x64(True):
    assert not kernels(lambda x: auto(**x), arguments(case_id, "float64"))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
  "name",
  cases.some_fast(("linear_attention-bonus", "delta_rule-channel", "dplr-head", "mlstm-head"), ("delta_rule-channel",)),
)  # fmt: skip
def test_steps_by_the_kernel(name):
  """Outputs, states and gradients of a step are those of the op by its equation."""
  case, arrays = CASES[name], arguments(name)
  own = {n: token(x, n, case) for n, x in arrays.items()}

  def step(x):
    state = x["initial_state"]
    others = {n: a for n, a in x.items() if n != "initial_state"}
    state, o = case.step()(state, **others)
    return o[:, None], state

  def results(f):
    return cases.quick_jit(
      jax.value_and_grad(
        lambda x: (sum(jnp.sin(a).sum() for a in jax.tree.leaves(f(x))), f(x)), has_aux=True
      )
    )

  got, want = results(step)(own), results(lambda x: call(name, "recurrent")(**x))(arrays)
  want[1].update({n: token(x, n, case) for n, x in want[1].items()})
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)


def test_derivatives_of_any_order_in_both_modes():
  """They are those of the equation; the kernels of several tokens have the first, in reverse."""
  arrays = arguments("delta_rule-head")

  def curvature(impl):
    def loss(v):
      o, state = call("delta_rule-head", impl)(**arrays | {"v": v})
      return (o**4).sum() + (state**3).sum()

    return cases.quick_jit(lambda v: jax.jvp(jax.grad(loss), (v,), (v,))[1])(arrays["v"])

  got, want = curvature("pallas"), curvature("recurrent")
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * abs(want).max())


def test_padding_and_documents():
  """Padding with NaN changes no bit; a document that begins takes the initial state."""
  arrays = arguments("delta_rule-head")
  poisoned = {n: x if n == "initial_state" else x.copy() for n, x in arrays.items()}
  for name, x in poisoned.items():
    if name not in ("initial_state", "g", "beta"):  # these are checked for NaN
      x[1] = np.nan
  run = cases.quick_jit(lambda x, ids: call("delta_rule-head", "pallas")(**x, segment_ids=ids))
  o, state = run(poisoned, np.array([[7], [-1]]))
  whole = run(arrays, np.array([[0], [0]]))
  np.testing.assert_array_equal(o[0], whole[0][0])
  np.testing.assert_array_equal(state[0], whole[1][0])
  assert not o[1].any()
  np.testing.assert_array_equal(state[1], arrays["initial_state"][1])


def test_vmap_and_scan():
  """Over heads that stand in an axis of their own, and as the carry of a scan of steps."""
  arrays = arguments("linear_attention-head")
  one = lambda x: call("linear_attention-head", "pallas")(**x)
  twice = jax.tree.map(lambda x: np.stack([x, x[::-1]]), arrays)

  def again(x):
    def body(state, _):
      o, state = one(x | {"initial_state": state})
      return state, o

    return jax.lax.scan(body, x["initial_state"], None, length=2)

  mapped, (state, o) = cases.quick_jit(lambda x, y: (jax.vmap(one)(x), again(y)))(twice, arrays)
  want = call("linear_attention-head", "recurrent")
  first = want(**arrays)
  for x, y in zip(mapped, first, strict=True):
    np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x[1], y[::-1], rtol=1e-5, atol=1e-5)
  last = want(**arrays | {"initial_state": first[1]})
  for x, y in zip((o[1], state), last, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("gpu")
def test_what_the_kernel_does_not_take():
  """The equation computes it, or the kernels of several tokens where they are named."""
  q = jnp.ones((1, 1, 1, 300))
  attend = lambda q, impl="auto": lajax.linear_attention(q, q, q, impl=impl)
  assert not kernel_names(attend, q)
  with pytest.raises(NotImplementedError, match="K = 256, and K is 300"):
    attend(q, "pallas")
  k, v, beta = jnp.ones((1, 1, 9, 1, 4)), jnp.ones((1, 1, 9, 1, 4)), jnp.ones((1, 1, 9, 1))
  product = lambda impl: lambda k: lajax.delta_product(k[:, :, 0], k, v, beta, impl=impl)
  assert not kernel_names(product("auto"), k)  # nine launches
  assert "delta_outputs" in kernel_names(product("pallas"), k)
  many = jax.ShapeDtypeStruct((2**20, 2**12, 16, 16), jnp.float32)
  row = jax.ShapeDtypeStruct((2**20, 2**12, 16), jnp.float32)
  assert "2^31 programs" in lajax.pallas.supports_decode(many, {"q": row})


@pytest.mark.usefixtures("gpu")
def test_a_symbolic_batch_and_an_explicit_mesh_take_the_equation():
  attend = lambda q: lajax.linear_attention(q, q, q)[0]
  symbol = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 1, 2, 4"), jnp.float32)
  assert jax.export.export(jax.jit(attend))(symbol).out_avals[0].shape == symbol.shape
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  x = jax.device_put(
    jnp.ones((1, 1, 2, 4)), jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  )
  step = lambda x: lajax.recurrence.linear_attention_step(
    x[:, 0, :, :, None] * x[:, 0, :, None], *[x[:, 0]] * 3
  )
  assert not kernel_names(attend, x)
  assert not kernel_names(step, x)


LAYERS = {
  L.RetNet: 1,
  L.GLA: 1,
  L.RWKV6: 1,
  L.LinearAttention: 1,
  L.MLSTM: 1,
  L.Mamba2: 1,
  L.Mamba3: 1,
  L.MesaNet: 1,
  L.GatedDeltaNet: 1,
  L.GatedDeltaNet2: 1,
  L.KimiDeltaAttention: 1,
  L.PreconditionedKDA: 1,
  L.DeltaProduct: 2,
  L.RWKV7: 1,
  L.Comba: 1,
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
  "layer", cases.some_fast(LAYERS, ("GLA", "RWKV6", "KimiDeltaAttention", "RWKV7"), lambda x: x.__name__)
)  # fmt: skip
def test_layers_decode_by_the_kernel(layer):
  built = nnx.eval_shape(lambda: layer(16, rngs=nnx.Rngs(0)))
  graph, parameters = nnx.split(built)
  state = jax.eval_shape(lambda: built.init_state(1))
  decode = lambda p, x, state: nnx.merge(graph, p)(x, state)
  names = kernel_names(decode, parameters, jax.ShapeDtypeStruct((1, 1, 16), jnp.float32), state)
  assert len([n for n in names if n.endswith("_decode")]) == LAYERS[layer]
