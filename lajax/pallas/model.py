"""Bytes and operations of the kernels of a program, and the time that a GPU's data sheet gives them: a model, no measurement.

Of a launch, each array is counted once, as if what neighbouring programs share stayed in the cache (`moved`), and as often
as a program asks for it (`asked`). Both are read off the traced program, not from formulas beside it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr

from lajax.cost import operations, programs_inside


class Rates(NamedTuple):
  """Of one GPU's public data sheet: bytes a second, and dense tensor-core operations a second with float32 sums."""

  bandwidth: float
  bfloat16: float
  tf32: float

  def seconds(self, moved: int, operations: int, dtype: str) -> float:
    """The longer of moving so many bytes and doing so many operations; of float32, each product is three of tf32."""
    peak = self.bfloat16 if dtype == "bfloat16" else self.tf32 / (3 if dtype == "float32" else 1)
    return max(moved / self.bandwidth, operations / peak)


RATES = {
  "A100 SXM 80GB": Rates(2039e9, 312e12, 156e12),
  "RTX 3090": Rates(936e9, 71e12, 35.6e12),
  "RTX 4090": Rates(1008e9, 165.2e12, 82.6e12),
  "H100 SXM": Rates(3352e9, 989e12, 495e12),
  "B200": Rates(8000e9, 2250e12, 1125e12),
}


class Launch(NamedTuple):
  """What one launch of a kernel moves between device memory and the cores, and computes."""

  kernel: str
  programs: int
  moved: int  # bytes, each array once
  asked: int  # bytes, each program's blocks
  operations: int


def launches(f: Callable, *args) -> list[Launch]:
  """The kernels that f(*args) launches on a GPU; args may be shapes."""
  return [_launch(eqn) for eqn in _calls(jax.make_jaxpr(f)(*args).jaxpr)]


def array_bytes(*trees) -> int:
  """Of all arrays in the trees: what an operation must at least move is that of its inputs and outputs."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def _calls(program: Jaxpr) -> Iterator:
  for eqn in program.eqns:
    if eqn.primitive.name == "pallas_call":
      if not eqn.params["interpret"]:
        yield eqn
      continue
    for inside in programs_inside(eqn):
      yield from _calls(inside)


def _launch(eqn) -> Launch:
  kernel, arrays = eqn.params["jaxpr"], [*eqn.invars, *eqn.outvars]
  programs = math.prod(eqn.params["grid_mapping"].grid)
  blocks = [min(ref.aval.size, array.aval.size) * array.aval.dtype.itemsize for ref, array in zip(kernel.invars, arrays, strict=True)]
  moved = sum(array.aval.size * array.aval.dtype.itemsize for array in arrays)
  return Launch(_name(eqn), programs, moved, programs * sum(blocks), programs * operations(kernel))


def _name(eqn) -> str:
  info = eqn.params.get("name_and_src_info")
  return eqn.params["name"] if info is None else info.name


def seconds(found: Sequence[Launch], gpu: str, dtype: str) -> float:
  """The modelled time of launches one after the other."""
  return sum(RATES[gpu].seconds(launch.moved, launch.operations, dtype) for launch in found)
