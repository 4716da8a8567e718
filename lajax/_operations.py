"""Counts the multiplications and additions of a traced program."""

import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

ARITHMETIC = ("add", "sub", "mul", "add_any")
SUMS = ("reduce_sum", "cumsum")


def operations(program: Jaxpr | ClosedJaxpr) -> int:
  """Counts multiplications and additions of floats: 2 M K N for a product of [M K] and [K N].

  The body of a loop counts as often as it runs, a branch as much as its dearest side. Where the
  sides are for platforms, the default one counts.
  """
  if isinstance(program, ClosedJaxpr):
    program = program.jaxpr
  if not isinstance(program, Jaxpr):
    raise ValueError(
      f"`program` must be a Jaxpr, as jax.make_jaxpr(f)(x) is; got {type(program).__name__}."
    )
  return sum(_operations_of(eqn, program) for eqn in program.eqns)


def _operations_of(eqn, program: Jaxpr) -> int:
  name = eqn.primitive.name
  if name == "scan":
    return eqn.params["length"] * sum(map(operations, programs_inside(eqn)))
  if name == "while":
    raise NotImplementedError(
      "the operations of a loop of unknown length cannot be counted, and `program` has one; "
      "give the layer an `impl` without such a loop."
    )
  if name == "cond":
    sides = list(map(operations, programs_inside(eqn)))
    return sides[-1] if _chooses_a_platform(eqn, program) else max(sides)
  if name == "custom_linear_solve":  # its other programs are for derivatives
    return operations(eqn.params["jaxprs"].solve)
  inside = sum(map(operations, programs_inside(eqn)))
  if not eqn.outvars or not jnp.issubdtype(
    getattr(eqn.outvars[0].aval, "dtype", jnp.int32), jnp.floating
  ):
    return inside
  if name == "dot_general":
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * eqn.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
  if name == "ragged_dot_general":  # each row is multiplied by the matrix of its group alone
    rows, width = eqn.invars[0].aval.shape
    return 2 * rows * width * eqn.invars[1].aval.shape[-1]
  if name == "cholesky":
    return eqn.outvars[0].aval.size * eqn.outvars[0].aval.shape[-1] // 3
  if name == "triangular_solve":
    return eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
  if name in ARITHMETIC:
    return eqn.outvars[0].aval.size
  return inside + (eqn.invars[0].aval.size if name in SUMS else 0)


def _chooses_a_platform(cond, program: Jaxpr) -> bool:
  """Says whether the side of a branch is chosen by `jax.lax.platform_dependent`."""
  index = cond.invars[0]
  return any(
    eqn.primitive.name == "platform_index" and index in eqn.outvars for eqn in program.eqns
  )


def programs_inside(eqn) -> Iterator[Jaxpr]:
  """Yields the programs that an equation runs: bodies of loops, branches, calls."""
  for value in eqn.params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if isinstance(item, ClosedJaxpr):
        yield item.jaxpr
      elif isinstance(item, Jaxpr):
        yield item
