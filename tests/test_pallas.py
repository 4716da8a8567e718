"""The kernels of matrix states, additive, of the delta rule and of low rank: interpreted on a CPU
against `recurrent` in float64.

The interpreter puts NaN behind the end of an array. A kernel that reads there without a mask fails
every comparison.
"""

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape
from jax.experimental import pallas as pl
from pallas_cases import (
  change_by_vmap_and_checkpoint,
  compiled,
  kernels,
  launches_of,
  misses,
  misses_of_float16,
  refuses_second_derivatives,
  residuals,
  rounded,
)

import lajax
from lajax import pallas
from lajax.pallas import plan
from lajax.pallas.launch import launch
from lajax.pallas.model import kernel_names
from lajax.recurrence import delta_rule_step, dplr_step, linear_attention_step

GATES = ("none", "head", "channel")
FAMILIES = ("linear_attention", "delta_rule", "dplr")
BASE = Shape()
WIDE = Shape(T=65, H=1, HV=2, K=192, V=72)
TWO = ("plain", "inf")  # kinds of decays, where a shape is large for an interpreter
STEPS = {
  "linear_attention": (pallas.decode_linear_attention, linear_attention_step),
  "delta_rule": (pallas.decode_delta_rule, delta_rule_step),
  "dplr": (pallas.decode_dplr, dplr_step),
}


def _packed():
  """Yields all families and gates. One is fast; of the others `test_time_splits` has one."""
  for family in FAMILIES:
    for gate in ("head", "channel"):
      fast = (family, gate) == ("delta_rule", "channel")
      yield pytest.param(family, gate, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("family", "gate"), [*_packed()])
def test_packed_documents_of_every_kind_of_values(family, gate):
  """Outputs, states, all gradients: documents, padding, gates of -inf, sizes no powers of two,
  grouped heads.
  """
  case_id = f"{family}-{gate}"
  assert not misses(case_id, BASE, "float32", True, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gate", "dtype", "packed"),
  [
    ("none", "float32", True),
    ("none", "bfloat16", False),
    ("head", "float32", False),
    ("head", "bfloat16", True),
    ("channel", "bfloat16", True),
  ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes(family, gate, dtype, packed):
  case_id = f"{family}-{gate}"
  assert not misses(case_id, BASE, dtype, packed, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gate", "shape", "dtype"),
  [
    ("channel", Shape(T=2, H=2, HV=2, K=48, V=7), "float32"),
    ("head", Shape(T=17, H=1, HV=4, K=100, V=33), "float32"),
    ("channel", Shape(T=17, H=1, HV=4, K=100, V=33), "float32"),
    ("head", WIDE, "bfloat16"),
    ("channel", WIDE, "bfloat16"),
  ],
  ids=lambda s: s if isinstance(s, str) else f"T{s.T}-H{s.H}-HV{s.HV}-K{s.K}-V{s.V}",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family, gate, shape, dtype):
  """Also with one or several tiles of keys, whole and in part, and with one program or several for
  the values.
  """
  case_id = f"{family}-{gate}"
  assert not misses(case_id, shape, dtype, False, TWO)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "packed"), [("float32", True), ("bfloat16", False)])
def test_bonus(dtype, packed):
  """The same kernels compute it, with writes one token later."""
  case_id = "linear_attention-bonus"
  assert not misses(case_id, BASE, dtype, packed, cases.batch(CASES[case_id]))
  assert [len(x) for x in launches_of(case_id, BASE)] == [2, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case_id", "dtype"),
  [
    ("mamba3-ranks", "float32"),
    ("mamba3-head", "bfloat16"),
    ("preconditioned_delta_rule-channel", "float32"),
    ("mesa-head", "float32"),
  ],
)
def test_families_that_compute_around_kernels(case_id, dtype):
  """A part of them is a family with kernels; what stands around it is plain jnp."""
  assert not misses(case_id, BASE, dtype, True, cases.batch(CASES[case_id]))


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_keys_of_several_tiles_in_float32(gate):
  case_id = f"linear_attention-{gate}"
  assert not misses(case_id, WIDE, "float32", False, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("family", ["delta_rule", "dplr"])
def test_the_widest_keys(family, gate):
  case_id = f"{family}-{gate}"
  assert not misses(case_id, Shape(T=130, H=1, HV=1, K=256, V=16), "bfloat16", False, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float16(family):
  assert not misses_of_float16(f"{family}-head", BASE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_vmap_and_checkpoint(family):
  assert change_by_vmap_and_checkpoint(f"{family}-head", BASE) < 1e-6


def _decodes():
  """Yields all families and gates; each family and each gate is fast once."""
  for family, gate in itertools.product(FAMILIES, GATES):
    fast = FAMILIES.index(family) == GATES.index(gate)
    yield pytest.param(family, gate, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("family", "gate"), [*_decodes()])
def test_decode(family, gate):
  """One token of many states, K and V no powers of two, grouped heads."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  B, H, HV, K, V = 3, 2, 4, 12, 40
  args = [draw(B, HV, K, V), draw(B, H, K), draw(B, H, K), draw(B, HV, V)]
  args += {"delta_rule": [abs(draw(B, HV))], "dplr": [draw(B, H, K), draw(B, H, K)]}.get(family, [])
  g = {"none": None, "head": -abs(draw(B, HV)), "channel": -abs(draw(B, HV, K))}[gate]
  if g is not None:
    g[0] = -np.inf
  kernel, step = STEPS[family]
  got = cases.quick_jit(lambda *args: kernel(*args, 0.5))(*args, g)
  for x, y in zip(got, step(*args, g, scale=0.5), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_nan_stands_behind_an_array():
  """The other tests rely on this: the part of a block behind the end of an array is NaN."""

  def copy(inputs, outputs, *, interpreted):
    outputs[0][...] = inputs[0][...]

  spec, shape = (
    pl.BlockSpec((16,), lambda program: (program,)),
    jax.ShapeDtypeStruct((16,), jnp.float32),
  )
  (x,) = launch(
    copy,
    [jnp.ones(12)],
    name="copy",
    programs=1,
    in_specs=[spec],
    out_specs=[spec],
    out_shapes=[shape],
    warps=1,
    stages=1,
  )
  assert np.isnan(x[12:]).all()
  assert (x[:12] == 1).all()


# --- what is launched, and what is refused --------------------------------------------------------


@pytest.mark.parametrize(
  ("gate", "chunk"), [("head", 32), pytest.param("channel", 16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  ("family", "forward", "both"), [("linear_attention", 2, 5), ("delta_rule", 2, 6), ("dplr", 2, 6)]
)
def test_number_of_launches_and_residuals(family, forward, both, gate, chunk):
  """Residuals are the inputs and the states before the chunks."""
  case_id = f"{family}-{gate}"
  assert [len(x) for x in launches_of(case_id, BASE)] == [forward, both]
  given, _ = rounded(CASES[case_id], cases.inputs(case_id, BASE), "float32")
  states = -(-BASE.T // chunk) * given["initial_state"].size
  allowed = sum(x.size for x in given.values()) + states
  assert residuals(lambda x: kernels(CASES[case_id])(**x), given) <= allowed


@pytest.fixture
def splits(monkeypatch):
  """Time is split into few chunks each, as on a GPU that few heads do not fill."""
  for name, value in (("FILL", 1000), ("SHORTEST", 1), ("LEAST", 2)):
    monkeypatch.setattr(plan, name, value)
  compiled.cache_clear()
  yield
  compiled.cache_clear()


def test_number_of_splits():
  """Powers of two from four on, of eight chunks at least, where there are fewer than 128 programs."""
  assert [plan.count_splits(programs, 64) for programs in (128, 64, 32, 16, 1)] == [1, 1, 4, 8, 8]
  assert [plan.count_splits(1, chunks) for chunks in (31, 32, 63, 64, 10**6)] == [1, 4, 4, 8, 128]


@pytest.mark.parametrize(
  ("family", "gate", "shape", "dtype"),
  [
    ("linear_attention", "head", Shape(T=131), "float32"),
    pytest.param("linear_attention", "channel", Shape(T=131), "bfloat16", marks=pytest.mark.slow),
    pytest.param("linear_attention", "none", Shape(T=131), "bfloat16", marks=pytest.mark.slow),
    pytest.param(
      "linear_attention", "channel", Shape(T=75, K=136), "float32", marks=pytest.mark.slow
    ),
    pytest.param("delta_rule", "head", Shape(T=131), "bfloat16", marks=pytest.mark.slow),
    pytest.param("delta_rule", "channel", Shape(T=75, K=72), "float32", marks=pytest.mark.slow),
    pytest.param("dplr", "head", Shape(T=131), "bfloat16", marks=pytest.mark.slow),
    pytest.param("dplr", "channel", Shape(T=75, K=72), "float32", marks=pytest.mark.slow),
  ],
)
def test_time_splits(splits, family, gate, shape, dtype):
  """Also where the last splits have no tokens, and with documents that begin and end in any of
  them.
  """
  case_id = f"{family}-{gate}"
  packed = cases.batch(CASES[case_id])
  assert plan.count_splits(1, -(-shape.T // 64)) > 1
  forward = lambda x: kernels(CASES[case_id])(**x)
  names = kernel_names(forward, cases.inputs(case_id, shape))
  assert any(name.endswith("_in_splits") for name in names)
  assert not misses(case_id, shape, dtype, True, packed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_without_derivatives_is_the_same(family):
  """Without derivatives no states before the chunks are stored."""
  case = CASES[f"{family}-head"]
  given, _ = rounded(case, cases.inputs(f"{family}-head", BASE), "bfloat16")
  alone = cases.quick_jit(lambda x: kernels(case)(**x))(given)
  stored = cases.quick_jit(lambda x: jax.vjp(lambda x: kernels(case)(**x), x)[0])(given)
  for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(stored), strict=True):
    np.testing.assert_array_equal(x, y)


def test_supports():
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  q, v = array(2, 64, 2, 256), array(2, 64, 4, 100)
  assert pallas.supports_linear_attention(q, q, v) is None
  assert pallas.supports_linear_attention(q, q, v, array(2, 64, 4, 256)) is None
  wide, long = array(2, 64, 2, 257), array(2**22, 2**16, 2, 256)
  assert "K is 257" in pallas.supports_linear_attention(wide, wide, v)
  assert "float64" in pallas.supports_linear_attention(
    q, q, array(2, 64, 4, 100, dtype=jnp.float64)
  )
  assert "chunk_size is 7" in pallas.supports_linear_attention(q, q, v, chunk_size=7)
  assert pallas.supports_linear_attention(q, q, v, bonus=array(2, 256)) is None
  assert "float64" in pallas.supports_linear_attention(
    q, q, v, bonus=array(2, 256, dtype=jnp.float64)
  )
  assert "2^31 programs" in pallas.supports_linear_attention(
    long, long, array(2**22, 2**16, 4, 100)
  )


@pytest.mark.parametrize(
  "call",
  [
    pytest.param(
      lambda x: lajax.linear_attention(x, x, x, impl="pallas")[0], id="linear_attention"
    ),
    pytest.param(
      lambda x: lajax.delta_rule(x, x, x, x[..., 0], impl="pallas")[0],
      id="delta_rule",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      lambda x: lajax.dplr(x, x, x, x, x, impl="pallas")[0], id="dplr", marks=pytest.mark.slow
    ),
  ],
)
def test_second_derivatives_are_refused_with_a_sentence(call):
  refuses_second_derivatives(call)
