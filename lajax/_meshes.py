"""Explicit meshes: how an op computes on arrays whose types name mesh axes.

`jax.make_mesh` gives explicit axes: a sharding is then part of an array's type, and every operation
must say how its result is laid out. Loops, scans and reshapes inside an op cannot. So an op hands
its whole computation to XLA's partitioner (`jax.sharding.auto_axes`) and names the layout of its
results alone. Nothing happens on one device, on automatic meshes, and under `jax.shard_map`, whose
axes are manual.
"""

import functools
from collections.abc import Callable, Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

MeshAxes = str | tuple[str, ...] | None  # an entry of a PartitionSpec


def explicit_mesh(*trees) -> AbstractMesh | None:
  """Returns the mesh of the first array that is typed on explicit axes; None if no array is."""
  for x in jax.tree.leaves(trees):
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
      return mesh
  return None


def on_automatic_axes(f: Callable, specs: Callable) -> Callable:
  """Returns f, run on automatic axes where an argument is typed on explicit ones.

  Args:
    f: (*arguments) -> results, pytrees of arrays. It must be traced (called under `jax.jit`): an
      eager call has no mesh to run on.
    specs: (*arguments) -> the `PartitionSpec`s of the results, as a pytree of the results'
      structure. It is called on explicit meshes only.
  """

  @functools.wraps(f)
  def call(*arguments):
    mesh = explicit_mesh(arguments)
    if mesh is None:
      return f(*arguments)
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
      return jax.sharding.auto_axes(f, axes=axes, out_sharding=specs(*arguments))(*arguments)

  return call


def laid_out(output: str, **letters: str) -> Callable[[Callable], Callable]:
  """Decorates f(*arrays, *static), which must be traced: its output is laid out by letters on
  explicit meshes.

  Args:
    output: letters of the one array that f returns.
    **letters: letters of each array, in the order of f's arguments; a letter is sharded as in the
    first
      array that has it sharded.
  """

  def decorate(f):
    @functools.wraps(f)
    def call(*arguments):
      arrays, static = arguments[: len(letters)], arguments[len(letters) :]
      layout = lambda *arrays: spec_for(
        output, axes_of_letters(*zip(arrays, letters.values(), strict=True))
      )
      return on_automatic_axes(lambda *arrays: f(*arrays, *static), layout)(*arrays)

    return call

  return decorate


def spec_of(x) -> PartitionSpec:
  """Returns the mesh axes of every axis of an array, as its type names them."""
  named = tuple(jax.typeof(x).sharding.spec)
  return PartitionSpec(*named, *(None,) * (x.ndim - len(named)))


def axes_of_letters(*arrays: tuple) -> dict[str, MeshAxes]:
  """Returns the mesh axes of each letter of `(array, letters)`; the first array decides."""
  found: dict[str, MeshAxes] = {}
  for x, letters in arrays:
    if x is not None:
      for letter, axes in zip(letters.split(), spec_of(x), strict=True):
        if axes is not None:
          found.setdefault(letter, axes)
  return found


def spec_for(letters: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
  """Returns the spec of an array with these letters; no mesh axis is used twice."""
  used: set[str] = set()
  entries = []
  for letter in letters.split():
    names = axes.get(letter)
    names = (names,) if isinstance(names, str) else names or ()
    free = tuple(name for name in names if name not in used)
    used.update(free)
    entries.append(next(iter(free)) if len(free) == 1 else free or None)
  return PartitionSpec(*entries)
