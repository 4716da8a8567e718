"""Runs calls on meshes of two devices and compares them with one device.

A case is a function of arrays and the arrays, with where each has its batch and its heads.
`differences` puts the arrays on a mesh, calls the function in several ways and returns what
differs. Two devices need a flag that XLA reads when it starts, so `report_of` runs a module's cases
in a process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import quick_jit
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TOLERANCE = 2e-5  # of float32 results of another order of sums, relative to the largest value


class MeshCase(NamedTuple):
  """f(arrays) -> results, and the axis of each array that "batch" and "heads" stand for (None:
  replicated).
  """

  f: Callable
  arrays: Mapping[str, Any]
  batch: Mapping[str, int | None]
  heads: Mapping[str, int | None] | None = None
  carried: str | None = (
    None  # the array whose layout the second result must keep, as a carry of a scan
  )


def two_devices(kind: AxisType) -> Mesh:
  return jax.make_mesh((2,), ("devices",), axis_types=(kind,))


def placed(case: MeshCase, mesh: Mesh, axes: Mapping[str, int | None]) -> dict[str, Any]:
  """The arrays on the mesh, each sharded along its axis."""
  found = {}
  for name, x in case.arrays.items():
    axis = axes.get(name)
    put = lambda a, axis=axis: jax.device_put(
      a,
      NamedSharding(
        mesh, PartitionSpec(*(["devices" if n == axis else None for n in range(a.ndim)]))
      ),
    )
    found[name] = jax.tree.map(put, x)
  return found


def _floats(arrays: Mapping[str, Any]) -> tuple[dict, dict]:
  is_float = lambda x: all(jnp.issubdtype(a.dtype, jnp.floating) for a in jax.tree.leaves(x))
  return (
    {n: x for n, x in arrays.items() if is_float(x)},
    {n: x for n, x in arrays.items() if not is_float(x)},
  )


def gradients(f: Callable) -> Callable:
  """(floats, others) -> results, and the gradients of a sum over all of them."""

  def total(floats, others):
    results = f(floats | others)
    return sum(
      (jnp.sin(x.astype(jnp.float32)) ** 2).sum() for x in jax.tree.leaves(results)
    ), results

  def run(floats, others):
    found, results = jax.grad(total, has_aux=True)(floats, others)
    return results, found

  return run


PLACES = ("explicit, batch", "explicit, heads", "auto, batch")


def results(case: MeshCase):
  """Results and gradients on one device."""
  return jax.device_get(quick_jit(gradients(case.f))(*_floats(case.arrays)))


def differences(case: MeshCase, places=PLACES, *, want=None, eager: bool = False) -> list[str]:
  """Says what differs from one device in results and gradients, for each place; also of eager calls.

  `want` are results on one device, of this case or of another implementation; None to compute them.
  """
  run = quick_jit(gradients(case.f))
  want = results(case) if want is None else want
  wrong = []
  for place in places:
    arrays = _placed_at(case, place)
    if arrays is None:
      continue
    try:
      got = run(*_floats(arrays))
      lines = _unequal(got, want)
      if place.startswith("explicit"):
        lines += _layouts(case, arrays, got)
    except Exception as error:
      lines = [_said(error)]
    wrong += [f"{place}: {line}" for line in lines]
  return wrong + (_eager(case, want) if eager else [])


def refusals(case: MeshCase) -> list[str]:
  """Says what JAX refuses to trace on an explicit mesh, and wrong layouts; compiles nothing."""
  wrong = []
  for place in PLACES[:2]:
    arrays = _placed_at(case, place)
    if arrays is None:
      continue
    try:
      traced = jax.jit(gradients(case.f)).trace(*_floats(arrays))
      got = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
      lines = _layouts(case, arrays, got)
    except Exception as error:
      lines = [_said(error)]
    wrong += [f"{place}: {line}" for line in lines]
  return wrong


def _placed_at(case: MeshCase, place: str) -> dict[str, Any] | None:
  kind, axes = place.split(", ")
  axes = case.batch if axes == "batch" else case.heads
  if axes is None:
    return None
  return placed(case, two_devices(AxisType.Explicit if kind == "explicit" else AxisType.Auto), axes)


def _said(error: Exception) -> str:
  return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"


def _eager(case: MeshCase, want) -> list[str]:
  """An eager call, and one under `jax.set_mesh`."""
  mesh = two_devices(AxisType.Explicit)
  arrays = placed(case, mesh, case.batch)
  try:
    wrong = [f"eager: {line}" for line in _unequal(case.f(arrays), want[0])]
    with jax.set_mesh(mesh):
      return wrong + [f"set_mesh: {line}" for line in _unequal(case.f(arrays), want[0])]
  except Exception as error:
    return [f"eager: {_said(error)}"]


def _unequal(got, want) -> list[str]:
  lines = []
  pairs = zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True)
  for (path, a), b in pairs:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-3)
    if not error <= TOLERANCE:
      lines.append(f"{jax.tree_util.keystr(path)} is off by {error:.1e}")
  return lines


def spec(x) -> tuple:
  """Mesh axes of every axis of an array or its type."""
  named = tuple(getattr(x, "aval", x).sharding.spec)
  return (*named, *(None,) * (x.ndim - len(named)))


def _layouts(case: MeshCase, arrays, got) -> list[str]:
  """Says which gradients are not laid out as their arrays, and states not as they came in."""
  lines = []
  for name, x in got[1].items():
    if case.batch.get(name) is None:  # in a scan over tokens JAX 0.12 sums its cotangent unsharded
      continue
    for a, b in zip(jax.tree.leaves(arrays[name]), jax.tree.leaves(x), strict=True):
      if spec(a) != spec(b):
        lines.append(f"d{name} is laid out {spec(b)}, {name} {spec(a)}")
  if case.carried:
    states = jax.tree.leaves(got[0][1])
    for a, b in zip(jax.tree.leaves(arrays[case.carried]), states, strict=True):
      if spec(a) != spec(b):
        lines.append(f"the final state is laid out {spec(b)}, {case.carried} {spec(a)}")
  return lines


def report_of(module: str, function: str = "report") -> dict[str, list[str]]:
  """Runs a function of a test module, by name, with two devices; {case: what differs}."""
  program = f"import json, lajax, {module}; print('REPORT' + json.dumps({module}.{function}()))"
  environment = dict(os.environ)
  flags = environment.get("XLA_FLAGS", "")
  environment |= {
    "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path]),
  }
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
  )
  assert "REPORT" in done.stdout, done.stderr[-3000:]
  return json.loads(done.stdout.split("REPORT")[1])
