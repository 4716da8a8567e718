"""Dispatch of a call: one compilation per length, NumPy arrays, ops that layers call; the
import.
"""

import os
import subprocess
import sys
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import lajax
from lajax import _cpu_hang, _shapes, ops
from lajax.ops.run import refuse

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
)


def compilations(call) -> int:
  before = len(COMPILED)
  jax.block_until_ready(call())
  return len(COMPILED) - before


@pytest.mark.usefixtures("quick_compiles")
def test_a_new_length_compiles_once():
  """Eagerly too: the checks of values are done by NumPy."""

  def arguments(T):
    q, k, v = np.full((3, 1, T, 1, 2), 0.5, np.float32)
    return q, k, v, np.full((1, T, 1), 0.5, np.float32), np.full((1, T, 1), -0.5, np.float32)

  delta_rule = lambda T: lajax.delta_rule(*arguments(T), segment_ids=np.zeros((1, T), np.int32))
  mlstm = lambda T: lajax.mlstm(*arguments(T))
  for call in (delta_rule, mlstm):
    call(3)
    assert compilations(lambda call=call: call(5)) == 1
    assert compilations(lambda call=call: call(5)) == 0


def test_nan_is_counted_on_devices_too():
  """Arrays that NumPy cannot read without a copy between devices are counted where they are."""
  x, ids = jnp.array([[np.nan, 1.0, np.nan]]), jnp.array([[0, 0, -1]])
  assert _shapes._count_on_device(x, None, jnp.isnan) == _shapes._count(x, None, jnp.isnan) == 2
  assert _shapes._count_on_device(x, ids, jnp.isnan) == _shapes._count(x, ids, jnp.isnan) == 1


def test_float64_arrays_outside_the_64_bit_mode():
  """All ops go on in float32."""
  one = np.ones((1, 2, 1, 1))
  o, state = lajax.mlstm(one, one, one, one[..., 0], -one[..., 0], impl="recurrent")
  assert {x.dtype for x in (o, *state)} == {np.dtype(np.float32)}


def test_modules_are_attributes():
  """`import lajax` is enough for every public module, and imports none of them by itself."""
  program = """
import sys, lajax
assert not {"lajax.layers", "lajax.cost", "lajax.models", "lajax.serve", "lajax.tasks", "flax"} & set(sys.modules)
for name in ("layers", "cost", "tasks", "models", "recurrence"):
  assert name in dir(lajax) and getattr(lajax, name).__name__ == f"lajax.{name}"
assert len(lajax.__doc__) > 500 and lajax.__version__
try:
  lajax.nothing
except AttributeError as error:
  print(error)
"""
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False
  )
  assert done.stdout.strip() == "module 'lajax' has no attribute 'nothing'", done.stderr


# --- ops that layers call ---


def test_short_conv_is_its_equation():
  """Behind a cache, with documents and padding, by shifted products and by the kernel."""
  rng = np.random.default_rng(0)
  B, T, D, W = 2, 9, 3, 3
  x, weight, bias = rng.normal(size=(B, T, D)), rng.normal(size=(D, W)), rng.normal(size=D)
  cache = rng.normal(size=(B, W - 1, D))
  ids = np.array([[0, 0, -1, 0, 1, 1, -1, 2, 2], [-1, -1, 0, 1, 2, 2, 2, 2, -1]])
  x = np.where((ids >= 0)[..., None], x, 0)
  want, rest = np.zeros_like(x), np.zeros_like(cache)
  for b in range(B):
    seen, documents = list(cache[b]), [0] * (W - 1)
    for t in range(T):
      if ids[b, t] < 0:
        continue
      seen.append(x[b, t])
      documents.append(ids[b, t])
      taps = zip(seen[-W:], documents[-W:], weight.T, strict=True)
      y = bias + sum(w * s for s, d, w in taps if d == ids[b, t])
      want[b, t] = y / (1 + np.exp(-y))
    last = documents[-1]
    rest[b] = [
      s if d == last else 0 * s for s, d in zip(seen[1 - W :], documents[1 - W :], strict=True)
    ]
  arrays = [np.asarray(a, np.float32) for a in (x, weight, bias, cache)]
  for impl in ("chunked", "pallas"):
    y, after = ops.short_conv(*arrays, ids.astype(np.int32), impl=impl)
    np.testing.assert_allclose(y, want, atol=2e-6)
    np.testing.assert_allclose(after, rest, atol=1e-6)


def test_norm_of_large_float16_numbers():
  """Their squares overflow float16: 300^2 is 9e4, beyond 65,504."""
  x = np.full((2, 4), 300, np.float16)
  for impl in ("chunked", "pallas"):
    y = ops.gated_rms_norm(x, np.ones(4, np.float16), impl=impl)
    np.testing.assert_array_equal(y, np.ones((2, 4), np.float16))


def test_norm_in_bfloat16_is_rounded_once():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.bfloat16)
  gate = x[::-1]
  wide = lambda a: np.asarray(a, np.float64)
  want = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5)
  want = want * wide(gate) / (1 + np.exp(-wide(gate)))
  y = ops.gated_rms_norm(x, jnp.ones(32, jnp.bfloat16), gate, impl="chunked")
  assert (abs(wide(y) - want) <= 2**-8 * abs(want) + 1e-6).all()  # half a unit in the last place


def test_named_kernels_never_fall_back():
  x = jnp.ones((1, 2, 3))
  with pytest.raises(NotImplementedError, match="up to W = 8 tokens, and W is 9"):
    ops.short_conv(x, jnp.ones((3, 9)), impl="pallas")
  with pytest.raises(NotImplementedError, match="up to D = 8192 channels"):
    ops.gated_rms_norm(jnp.ones((1, 8193)), jnp.ones(8193), impl="pallas")
  with pytest.raises(NotImplementedError, match=r"cannot do this: It is late\. Use impl="):
    refuse("It is late.")


@pytest.mark.parametrize(
  "packed",
  [pytest.param(False, id="whole", marks=pytest.mark.slow), pytest.param(True, id="packed")],
)
def test_a_symbolic_batch_is_exported(packed):
  """And a symbolic length is refused in a sentence."""

  def abstract(*letters):
    q = jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(letters)), jnp.float32)
    g = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if packed else None
    return q, g, ids

  calls = {
    "linear_attention": lambda q, g, ids: lajax.linear_attention(q, q, q, g, segment_ids=ids),
    "normalized": lambda q, g, ids: lajax.normalized_linear_attention(q, q, q, g, segment_ids=ids),
    "delta_rule": lambda q, g, ids: lajax.delta_rule(q, q, q, g, g, segment_ids=ids),
    "mlstm": lambda q, g, ids: lajax.mlstm(q, q, q, g, g, segment_ids=ids),
    "linear_recurrence": lambda q, g, ids: lajax.linear_recurrence(q, q, segment_ids=ids),
    "bidirectional": lambda q, g, ids: lajax.bidirectional_linear_attention(
      q, q, q, segment_ids=ids
    ),
    "short_conv": lambda q, g, ids: ops.short_conv(q[:, :, 0], jnp.ones((4, 3)), document_ids=ids),
    "gated_rms_norm": lambda q, g, ids: ops.gated_rms_norm(q, jnp.ones(4), q),
  }
  for call in calls.values():
    jax.export.export(jax.jit(call))(*abstract("b", "20", "2", "4"))
  for name in ("linear_attention", "delta_rule", "mlstm", "linear_recurrence"):
    with pytest.raises(
      NotImplementedError, match="the size of axis T must be known; got the symbol"
    ):
      jax.export.export(jax.jit(calls[name]))(*abstract("2", "t", "2", "4"))


# --- the guard on import ---


@pytest.fixture
def affected(monkeypatch):
  """A jaxlib that can hang, on a process of two cores."""
  monkeypatch.setattr(_cpu_hang.jaxlib, "__version__", "0.10.1")
  monkeypatch.setattr(_cpu_hang, "_cores", lambda: 2)
  return monkeypatch


def test_flags_in_a_file_are_left_alone(affected, tmp_path):
  """XLA takes the name of a file of flags, to which nothing may be appended."""
  affected.setattr(_cpu_hang.xla_bridge, "backends_are_initialized", lambda: False)
  path = tmp_path / "flags"
  for text in ("--xla_cpu_enable_fast_math=false", f"--{_cpu_hang.FLAG}=false"):
    path.write_text(text)
    affected.setenv("XLA_FLAGS", str(path))
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      _cpu_hang.guard()
    assert os.environ["XLA_FLAGS"] == str(path)
    assert len(caught) == (0 if _cpu_hang.FLAG in text else 1)
    assert all(f"XLA_FLAGS names a file, {path}" in str(x.message) for x in caught)


def test_a_late_import_warns_on_few_cores(affected):
  affected.delenv("XLA_FLAGS", raising=False)
  jax.devices()
  with pytest.warns(RuntimeWarning, match="Import lajax before the first JAX computation"):
    _cpu_hang.guard()
  assert "XLA_FLAGS" not in os.environ
  affected.setattr(_cpu_hang, "_cores", lambda: 64)
  _cpu_hang.guard()


def test_cores_are_those_of_the_process(monkeypatch):
  """In a container the machine may have 64 cores, of which the process may use two."""
  monkeypatch.setattr(os, "cpu_count", lambda: 64)
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
  assert _cpu_hang._cores() == 2
