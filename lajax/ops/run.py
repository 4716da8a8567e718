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
from lajax._meshes import explicit_mesh, on_automatic_axes
from lajax._numerics import product_precision
from lajax.recurrence import family as rows
from lajax.recurrence.chunks import chunked
from lajax.recurrence.decays import LOWEST_BOUND
from lajax.recurrence.family import Call, Family, Problem
from lajax.recurrence.rule import bind
from lajax.recurrence.steps import KERNELS_OF_STEPS
from lajax.recurrence.tokens import associative, recurrent

Matrix = Float[jax.Array, "B HV K V"]
# Launches of one token at most: a token of `delta_product` has one for each of its R corrections.
MOST_LAUNCHES = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Op:
  """A row of the table of ops.

  family: letters of the arguments, and the rule that computes them in plain jnp.
  kernels: (tokens, state, document, scale) -> (o, state); None for an op without kernels. Operands
    come as they are, gates and the state in float32. An op with `bound` has kernels that take
    `bounded` too.
  supports: (tokens, state, chunk_size) -> None, or a sentence that says what the kernels do not
    take.
  decode: (token, state, scale) -> (state, o), the kernel of one token; arrays without axis T. The
    step of the family runs it too. None for an op without one.
  fastest_on_cpu: what "auto" takes on a CPU.
  """

  family: Family
  kernels: Callable | None = None
  supports: Callable | None = None
  decode: Callable | None = None
  fastest_on_cpu: str = "chunked"

  def __post_init__(self):
    if self.decode is not None:
      KERNELS_OF_STEPS[self.family] = bind(_run_of_step, self)


class Options(NamedTuple):
  """Static options of a traced call: each combination compiles anew."""

  impl: str  # never "auto"; "decode" for the kernel of one token
  chunk_size: int | None = None
  scale: float | None = None  # None where it is traced, or where nothing is scaled
  family: tuple[tuple[str, Any], ...] = ()  # the family's own, by name


def call(
  op: Op,
  arrays: Mapping[str, Any],
  scale=None,
  initial_state=None,
  segment_ids=None,
  chunk_size: int | None = None,
  impl: str = "auto",
  *,
  options: Mapping[str, Any] | None = None,
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
  if sizes.T == 1:
    # A partitioner would gather the states of an explicit mesh for a kernel.
    unasked = impl == "auto" and explicit_mesh(given.arrays, given.state) is not None
    if pallas.wanted(impl) and not unasked and _decodes(op, given):
      return "decode"
    if impl == "auto":
      return "recurrent"
  supports = op.supports and functools.partial(op.supports, chunk_size=chunk_size)
  refusal = functools.partial(_refusal, supports, op.family, given)
  if impl == "pallas":
    refuse(refusal())
  if impl != "auto":
    return impl
  if pallas.wanted(impl) and refusal() is None:
    return "pallas"
  return op.fastest_on_cpu if jax.default_backend() == "cpu" else "chunked"


def _decodes(op: Op, given: Call) -> bool:
  """Says whether the op has a kernel of one token that takes this call of one."""

  def supports(tokens, state) -> str | None:
    token = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), tokens
    )
    launches = tokens.q.shape[1]
    if launches > MOST_LAUNCHES:
      return f"one token would be {launches} launches."
    return pallas.supports_decode(state, token._asdict())

  return op.decode is not None and _refusal(supports, op.family, given) is None


def _run_of_step(op: Op, given: Call) -> Callable | None:
  """Returns what runs the problem of a step by the op's kernel; None where the equation does."""
  if not pallas.wanted("auto") or not _decodes(op, given):
    return None
  return bind(_run, op, Options("decode"))


def _refusal(supports: Callable | None, family: Family, given: Call) -> str | None:
  """Says in a sentence what kernels do not take of a call, or None; reads no values.

  Args:
    supports: (tokens, state) -> that sentence, or None, from shapes and dtypes; None if there are
      no kernels.
    family, given: of the call.
  """
  if supports is None:
    return "this operation has no kernel yet."
  if isinstance(given.scale, Tracer):
    return (
      "`scale` must be a number known when the function is traced; got a traced array. "
      "Multiply `q` by it."
    )

  def inputs(arrays, state, segment_ids):
    call = Call(arrays, state, segment_ids, 1.0, given.options, by_kernels=True)
    problem = rows.problem_of(family, call, rows.by_tokens)
    empty.append(rows.is_empty(problem))
    return problem.tokens, problem.state

  empty: list[bool] = []
  bare = lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
  arguments = jax.tree.map(bare, (given.arrays, given.state, given.segment_ids))  # on no mesh
  tokens, state = jax.eval_shape(inputs, *arguments)
  if empty[0]:
    return None  # nothing is launched
  return supports(tokens, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compute(op: Op, options: Options, arrays, state, segment_ids, traced_scale):
  """Computes (output, parts of the final state): all array work of a call."""

  def compute(arrays, state, segment_ids, traced_scale):
    scale = traced_scale if options.scale is None else options.scale
    own = dict(options.family), options.impl in ("pallas", "decode")
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
  if options.impl == "decode":  # of one token, so of one document
    return _run_decode(op, problem, scale) if family is op.family else _by_equation(problem, scale)
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
  assert op.kernels is not None  # `_choose` has asked
  declared = {"bounded": True} if dict(options.family).get("bounded", False) else {}
  tokens = _with_wide_gates(op, problem.tokens)
  return op.kernels(tokens, problem.state, document, scale, **declared)


def _with_wide_gates(op: Op, tokens):
  """Returns the tokens as kernels take them: all but the operands of products in float32."""
  gates = {n: x for n, x in tokens._asdict().items() if n not in op.family.operands}
  return tokens._replace(**jax.tree.map(lambda x: x.astype(jnp.float32), gates))


def _run_decode(op: Op, problem: Problem, scale):
  """The op's kernel of one token, with all derivatives of the equation."""

  @jax.custom_jvp
  def f(tokens, state):
    assert op.decode is not None  # `_decodes` has asked
    wide, outputs = _with_wide_gates(op, tokens), []
    for n in range(tokens.q.shape[1]):
      token = jax.tree.map(lambda x, n=n: x[:, n], wide)
      state, o = op.decode(token, state, scale)
      outputs.append(o)
    return jnp.stack(outputs, axis=1), state

  @f.defjvp
  def f_jvp(primals, tangents):
    def equation(tokens, state):
      o, state = _by_equation(problem._replace(tokens=tokens, state=state), scale)
      return o.astype(tokens.v.dtype), state

    return jax.jvp(equation, primals, tangents)

  return f(problem.tokens, problem.state)


def _by_equation(problem: Problem, scale):
  return recurrent(problem.rule, *rows.widened(problem, scale))


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
