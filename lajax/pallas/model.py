"""Bytes and operations of the kernels of a program, and the time that a GPU's data sheet gives for
them.

This is a model, not a measurement. A launch counts each array once, as if what its programs share
stayed in the cache. Bytes and operations are read off the traced program, not from formulas beside
it.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr

from lajax._operations import operations, programs_inside
from lajax.pallas.compiled import GPU


class Launch(NamedTuple):
  """Work of one launch of a kernel."""

  kernel: str
  programs: int
  moved: int  # bytes between device memory and the cores, each array once
  operations: int


def launches(f: Callable, *args) -> list[Launch]:
  """Returns the launches of f(*args) on a GPU, in order; args may be shapes."""
  return [_launch(eqn) for eqn in _calls(jax.make_jaxpr(f)(*args).jaxpr)]


def kernel_names(f: Callable, *args) -> list[str]:
  """Returns the names of the kernels that f(*args) launches on a GPU, in order; args may be shapes.

  Unlike `launches` it also takes kernels whose loops have no known length, such as attention's.
  """
  return [_name(eqn) for eqn in _calls(jax.make_jaxpr(f)(*args).jaxpr)]


def array_bytes(*trees) -> int:
  """Returns the bytes of all arrays in the trees.

  Those of inputs and outputs are the least that an operation moves.
  """
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
  programs = math.prod(eqn.params["grid_mapping"].grid)
  moved = array_bytes([x.aval for x in (*eqn.invars, *eqn.outvars)])
  return Launch(_name(eqn), programs, moved, programs * operations(eqn.params["jaxpr"]))


def _name(eqn) -> str:
  info = eqn.params.get("name_and_src_info")
  return eqn.params["name"] if info is None else info.name


def seconds(launch: Launch, gpu: GPU, dtype: str) -> float:
  """Returns the longer of moving the bytes and doing the operations.

  A float32 product is three of tf32.
  """
  rate = gpu.bfloat16 if dtype == "bfloat16" else gpu.tf32 / (3 if dtype == "float32" else 1)
  return max(launch.moved / gpu.bandwidth, launch.operations / rate)
