"""Keeps NaN and inf inside their own document.

A product of matrices multiplies what it masks by 0, and 0 NaN is NaN: inside a kernel, one token
that is not finite reaches every token of its chunk. Selecting before each product would cost
registers that the kernels do not have. So packed documents are guarded around the kernels, where
padding is blanked anyway:

* A token that is not finite enters the kernels as zeros. Outputs are NaN from that token to the end
  of its document, and so is the final state if that is the last document.
* A cotangent that is not finite enters as zeros too, and so does one that is not 0 at such an
  output. Gradients are NaN from the start of that document to that token.

All other numbers are exact. The cost is one more pass over the inputs and one over the outputs'
cotangents. Calls without documents are not guarded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def bad_tokens(*arrays: Array | None, gate: Array | None = None) -> Bool[Array, "B T"]:
  """Returns the tokens with a NaN or an inf in one of the arrays [B T ..]; a gate may be -inf."""
  found = [~jnp.isfinite(x) for x in arrays if x is not None]
  found += [] if gate is None else [~(gate < jnp.inf)]
  per_token = [x.any(axis=tuple(range(2, x.ndim))) for x in found]
  return jnp.stack(per_token).any(0) if len(per_token) > 1 else per_token[0]


def reached(
  bad: Bool[Array, "B T"], document: Int[Array, "B T"], reverse: bool = False
) -> Bool[Array, "B T"]:
  """Returns the tokens at or after a bad token of their document; in reverse, at or before one.

  Documents are numbered upwards.
  """
  if reverse:
    first_ahead = jnp.where(bad, document, jnp.iinfo(document.dtype).max)
    return lax.cummin(first_ahead, axis=1, reverse=True) == document
  return lax.cummax(jnp.where(bad, document, -2), axis=1) == document


def replace(where: Bool[Array, "*B"], tree: Any, value: float) -> Any:
  """Returns the arrays [*B ..] with `value` in the rows where a condition holds."""
  expand = lambda x: where.reshape(where.shape + (1,) * (x.ndim - where.ndim))
  return jax.tree.map(lambda x: jnp.where(expand(x), jnp.asarray(value, x.dtype), x), tree)


def guarded(forward: Callable, backward: Callable, alone: Callable) -> tuple[Callable, ...]:
  """Returns the same three functions of a matrix state, which keep NaN and inf inside their
  document.

  Args:
    forward, alone: (static, inputs, packed) -> (o, state), residuals. `inputs` are arrays of
      tokens, with g last but one and the state last; `packed` is None or begins with the document
      of each token, [B >=T].
    backward: (static, residuals, cotangents of o and state) -> cotangents of inputs, None.
  """

  def guard(run: Callable) -> Callable:
    def guarded_run(static, inputs, packed):
      if packed is None:
        results, residuals = run(static, inputs, packed)
        return results, (residuals, None)
      *tokens, g, state = inputs
      document = packed[0][:, : tokens[0].shape[1]]
      bad, bad_state = bad_tokens(*tokens, gate=g), ~jnp.isfinite(state).all((1, 2, 3))
      marked = reached(bad, document) | (bad_state[:, None] & (document == 0))
      inputs = (*replace(bad, (*tokens, g), 0.0), replace(bad_state, state, 0.0))
      (o, last), residuals = run(static, inputs, packed)
      results = replace(marked, o, jnp.nan), replace(marked[:, -1], last, jnp.nan)
      return results, (residuals, (document, marked))

    return guarded_run

  def guarded_backward(static, residuals, cotangents):
    residuals, found = residuals
    if found is None:
      return backward(static, residuals, cotangents)
    document, marked = found
    do, dlast = cotangents
    bad = bad_tokens(do) | (marked & (do != 0).any((2, 3)))
    bad_last = ~jnp.isfinite(dlast).all((1, 2, 3)) | (marked[:, -1] & (dlast != 0).any((1, 2, 3)))
    cotangents = replace(bad, do, 0.0), replace(bad_last, dlast, 0.0)
    (*dtokens, dstate), nothing = backward(static, residuals, cotangents)
    last_token = jnp.arange(bad.shape[1], dtype=jnp.int32) == bad.shape[1] - 1
    marked = reached(bad | (bad_last[:, None] & last_token[None]), document, reverse=True)
    first = marked[:, 0] & (document[:, 0] == 0)
    return (*replace(marked, dtokens, jnp.nan), replace(first, dstate, jnp.nan)), nothing

  return guard(forward), guarded_backward, guard(alone)
