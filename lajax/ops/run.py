"""What every operation does once its arguments are checked: choose the form, and run it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lajax import _shapes, pallas
from lajax._numerics import vary_like
from lajax.recurrence import linear_recurrence
from lajax.recurrence.chunks import chunked
from lajax.recurrence.documents import blank_padding, packing
from lajax.recurrence.tokens import associative, recurrent

Matrix = Float[jax.Array, "B HV K V"]

CHUNK = 64  # tokens in a chunk
CHANNEL_CHUNK = 32  # with one decay a channel, where pairs of tokens cost more


def cast(x, dtype) -> Any:
  return None if x is None else x.astype(dtype)


def first_state(initial, sizes, dtype):
  if initial is None:
    return jnp.zeros((sizes["B"], sizes["HV"], sizes["K"], sizes["V"]), dtype)
  return initial.astype(dtype)


def run(rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision, scale=None):
  """The form `impl` of a rule; `scale` is a factor of the queries that tokens hold, None for none."""
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("chunk_size", chunk_size)
  if impl == "pallas":
    raise NotImplementedError(
      "impl='pallas' has no kernel for this operation yet; use impl='chunked' or impl='auto'."
    )
  if impl == "auto":
    elementwise = rule is linear_recurrence.rule and jax.default_backend() == "cpu"
    impl = "recurrent" if sizes["T"] == 1 or elementwise else "chunked"
  if sizes["T"] == 0 or 0 in state.shape:
    return jnp.zeros(
      (sizes["B"], sizes["T"], *state.shape[1:2], *state.shape[3:]), state.dtype
    ), state
  by_channel = getattr(tokens, "g", None) is not None and tokens.g.ndim == 4
  chunk_size = chunk_size or (CHANNEL_CHUNK if by_channel else CHUNK)
  if scale is not None and not (
    impl == "chunked" and isinstance(scale, float)
  ):  # an array has derivatives
    tokens, scale = tokens._replace(q=tokens.q * jnp.asarray(scale, tokens.q.dtype)), None
  return _compute(rule, tokens, state, segment_ids, impl, chunk_size, precision, scale)


@functools.partial(jax.jit, static_argnames=("rule", "impl", "chunk_size", "precision", "scale"))
def _compute(rule, tokens, state, segment_ids, impl, chunk_size, precision, scale):
  state = vary_like(state, tokens)
  document = is_token = None
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    tokens = blank_padding(tokens, is_token)
  if impl == "chunked":
    o, state = chunked(
      rule, tokens, state, document, scale=scale, chunk_size=chunk_size, precision=precision
    )
  else:
    form = {"recurrent": recurrent, "associative": associative}[impl]
    o, state = form(rule, tokens, state, document)
  return without_padding(o, is_token), state


def without_padding(o: jax.Array, is_token: jax.Array | None) -> jax.Array:
  """Outputs [B T ..], zeros where a token is not is_token."""
  return (
    o
    if is_token is None
    else jnp.where(
      is_token.reshape(*is_token.shape, *(1,) * (o.ndim - 2)), o, jnp.zeros((), o.dtype)
    )
  )


def use_kernels(impl: str, supports: Callable[[], str | None], sizes) -> bool:
  """Whether kernels compute: where they are named; for "auto" on a GPU, of more than one token, if they take the arguments."""
  return impl == "pallas" or (sizes["T"] > 1 and pallas.wanted(impl) and supports() is None)


def by_kernels(
  kernels: Callable,
  supports: Callable[[], str | None],
  tokens,
  initial_state,
  segment_ids,
  sizes,
  scale,
  chunk_size,
):
  """`impl="pallas"` of a matrix state: kernels(*tokens, state, document, scale), tokens being q, k, v and others, gates in float32.

  `supports` says in a sentence what the kernels do not take; it is asked once the arguments are known to be right.
  """
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  _shapes.check_positive("chunk_size", chunk_size)
  refuse(supports())
  v = tokens[2]
  state = first_state(initial_state, sizes, jnp.float32)
  if 0 in v.shape or 0 in state.shape:
    return jnp.zeros(v.shape, v.dtype), state
  return _compute_by_kernels(
    kernels, tokens, state, segment_ids, float(_shapes.scale_of(scale, sizes))
  )


@functools.partial(jax.jit, static_argnames=("kernels", "scale"))
def _compute_by_kernels(kernels, tokens, state, segment_ids, scale):
  document = is_token = None
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    tokens = blank_padding(tokens, is_token)
  o, state = kernels(*tokens, state, document, scale)
  return without_padding(o, is_token), state


def refuse(reason: str | None) -> None:
  """Raises with the sentence of what kernels do not take, if there is one."""
  if reason is not None:
    raise NotImplementedError(
      f"impl='pallas' cannot do this: {reason} Use impl='chunked' or impl='auto'."
    )
