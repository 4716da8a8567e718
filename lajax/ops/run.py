"""Runs every op: checks its arguments, chooses an implementation, computes in one traced function.

An op is a row: a family of `lajax.recurrence.families`, its kernels, and what they support. All
array work happens inside `_compute`, so that one wrapper serves explicit meshes, and one
compilation serves a new length.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Float

from lajax import _shapes, pallas
from lajax._meshes import on_automatic_axes
from lajax._numerics import product_precision
from lajax.recurrence import family as rows
from lajax.recurrence.chunks import chunked
from lajax.recurrence.decays import LOWEST_BOUND
from lajax.recurrence.family import Call, Family, Problem
from lajax.recurrence.tokens import associative, recurrent

Matrix = Float[jax.Array, "B HV K V"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Op:
  """A row of the table of ops.

  family: letters of the arguments, and the rule that computes them in plain jnp.
  kernels: (tokens, state, document, scale) -> (o, state); None for an op without kernels. Operands
    come as they are, gates and the state in float32. An op with `bound` has kernels that take
    `bounded` too.
  supports: (tokens, state, chunk_size) -> None, or a sentence that says what the kernels do not
    take.
  fastest_on_cpu: what "auto" takes on a CPU.
  """

  family: Family
  kernels: Callable | None = None
  supports: Callable | None = None
  fastest_on_cpu: str = "chunked"


class Options(NamedTuple):
  """Static options of a traced call: each combination compiles anew."""

  impl: str  # never "auto"
  chunk_size: int | None = None
  scale: float | None = None  # None where it is traced, or where nothing is scaled
  family: tuple[tuple[str, Any], ...] = ()  # the family's own, by name


def call(
  op: Op,
  arrays: Mapping[str, Any],
  *,
  scale=None,
  options: Mapping[str, Any] | None = None,
  initial_state=None,
  segment_ids=None,
  chunk_size: int | None = None,
  impl: str = "auto",
  bound: float | None = None,
):
  """Runs an op: checks its arguments, chooses an implementation, computes (output, final state).

  `options` are static options of the family, by name, which the caller has checked.
  """
  family = op.family
  sizes, parts = family.check(arrays, initial_state, segment_ids)
  _shapes.check_known(sizes, "T")
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  chunk_size = _shapes.check_positive("chunk_size", chunk_size)
  number, traced = rows.factor(family, scale, sizes)
  segment_ids = _shapes.check_ids(segment_ids)
  _shapes.check_not_nan(segment_ids, **{name: arrays[name] for name in family.gates})
  _shapes.check_below_infinity(segment_ids, **{name: arrays[name] for name in family.weights})
  bound = _shapes.check_bound(bound, segment_ids, arrays.get("g"))
  given = Call(dict(arrays), tuple(parts), segment_ids, traced, options or {})
  impl = _choose(op, impl, given, sizes, chunk_size)
  own = dict(given.options)
  if impl in ("chunked", "pallas") and bound is not None and bound >= LOWEST_BOUND:
    own["bounded"] = True
  static = Options(impl, chunk_size, number, tuple(own.items()))
  o, state = _compute(op, static, given.arrays, given.state, segment_ids, traced)
  return o, state[0] if len(state) == 1 else state


def _choose(op: Op, impl: str, given: Call, sizes: _shapes.Sizes, chunk_size: int | None) -> str:
  """Returns the implementation of a call; refuses kernels that are named and cannot do it."""
  refusal = functools.partial(_refusal, op, given, sizes, chunk_size)
  if impl == "pallas":
    refuse(refusal())
  if impl != "auto":
    return impl
  if sizes.T == 1:
    return "recurrent"
  if pallas.wanted(impl) and refusal() is None:
    return "pallas"
  return op.fastest_on_cpu if jax.default_backend() == "cpu" else "chunked"


def _refusal(op: Op, given: Call, sizes: _shapes.Sizes, chunk_size: int | None) -> str | None:
  """Says in a sentence what the kernels do not take of a call, or None; reads no values."""
  if op.supports is None:
    return "this operation has no kernel yet."
  if isinstance(given.scale, Tracer):
    return (
      "`scale` must be a number known when the function is traced; got a traced array. "
      "Multiply `q` by it."
    )

  def inputs(arrays, state, segment_ids):
    call = Call(arrays, state, segment_ids, 1.0, given.options, by_kernels=True)
    problem = rows.problem_of(op.family, call, rows.by_tokens)
    empty.append(rows.is_empty(problem))
    return problem.tokens, problem.state

  empty: list[bool] = []
  bare = lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
  arguments = jax.tree.map(bare, (given.arrays, given.state, given.segment_ids))  # on no mesh
  tokens, state = jax.eval_shape(inputs, *arguments)
  if empty[0]:
    return None  # nothing is launched
  return op.supports(tokens, state, chunk_size)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(op: Op, options: Options, arrays, state, segment_ids, traced_scale):
  """Computes (output, parts of the final state): all array work of a call."""

  def compute(arrays, state, segment_ids, traced_scale):
    scale = traced_scale if options.scale is None else options.scale
    own = dict(options.family), options.impl == "pallas"
    given = Call(arrays, state, segment_ids, scale, *own)
    return rows.solve(op.family, given, functools.partial(_run, op, options))

  layouts = lambda arrays, state, segment_ids, scale: rows.layouts(
    op.family, Call(arrays, state, segment_ids, scale)
  )
  return on_automatic_axes(compute, layouts)(arrays, state, segment_ids, traced_scale)


def _run(op: Op, options: Options, family: Family, problem: Problem, document, scale):
  """Runs a problem: of the op by its kernels, if they are chosen, all else in plain jnp."""
  if options.impl == "pallas" and family is op.family:
    return _run_kernels(op, options, problem, document, scale)
  tokens = problem.tokens
  precision = product_precision(*(getattr(tokens, name, None) for name in family.operands))
  if options.impl in ("recurrent", "associative"):
    run = {"recurrent": recurrent, "associative": associative}[options.impl]
    return run(problem.rule, *rows.widened(problem, scale), document)
  number = scale if isinstance(scale, float) else None
  # A number multiplies what tokens read, which costs no pass over the queries.
  wide, state = rows.widened(problem, None if number is not None else scale)
  chunk_size = options.chunk_size or family.chunk_length(tokens)
  return chunked(
    problem.rule, wide, state, document, scale=number, chunk_size=chunk_size, precision=precision
  )


def _run_kernels(op: Op, options: Options, problem: Problem, document, scale):
  """The op's kernels: operands in their own dtype, gates in float32."""
  tokens, operands = problem.tokens, op.family.operands
  gates = {n: x for n, x in tokens._asdict().items() if n not in operands and x is not None}
  tokens = tokens._replace(**{name: x.astype(jnp.float32) for name, x in gates.items()})
  assert op.kernels is not None  # `_choose` has asked
  declared = {"bounded": True} if dict(options.family).get("bounded", False) else {}
  return op.kernels(tokens, problem.state, document, scale, **declared)


def use_kernels(impl: str, supports: Callable[[], str | None], sizes: _shapes.Sizes) -> bool:
  """Says whether kernels compute: named, or by "auto" for several tokens if they take them."""
  return impl == "pallas" or (pallas.wanted(impl) and sizes["T"] > 1 and supports() is None)


def kernels_compute(impl: str, supports: Callable[[], str | None], x: jax.Array) -> bool:
  """Says whether a kernel computes an op; refuses a named one that cannot."""
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  if not x.size or not pallas.wanted(impl):
    return False
  reason = supports()
  if impl == "pallas":
    refuse(reason)
  return reason is None


def refuse(reason: str | None) -> None:
  """Raises with the sentence of what kernels do not take, if there is one."""
  if reason is not None:
    raise NotImplementedError(
      f"impl='pallas' cannot do this: {reason} Use impl='chunked' or impl='auto'."
    )
