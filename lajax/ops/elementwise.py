"""Elementwise states."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax._numerics import accumulation_dtype
from lajax.ops.run import refuse, run, use_kernels, without_padding
from lajax.recurrence import linear_recurrence as _elementwise
from lajax.recurrence.documents import blank_padding, packing


def linear_recurrence(
  x: Float[Array, "B T *D"],
  log_a: Float[Array, "B T *D"],
  *,
  initial_state: Float[Array, "B *D"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T *D"], Float[Array, "B *D"]]:
  """Elementwise linear recurrence.

      h_t = exp(log_a_t) h_{t-1} + x_t

  Args:
    x: [B T ..], any axes behind (for Mamba: channels and state).
    log_a: the same shape; log decay (natural), <= 0.
    initial_state: [B ..], h before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it writes and decays nothing, and its output is 0.
    impl: the form, see above; "auto" is the token scan on a CPU, where it is the fastest, kernels on NVIDIA GPUs, and
      chunked elsewhere.

  Returns:
    h [B T ..] in x.dtype, and h after the last is_token token, [B ..] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2017, arXiv:1709.04057, equation
  5; De et al., "Griffin" (RG-LRU), 2024, arXiv:2402.19427, equation 4; Gu and Dao, "Mamba", 2023, arXiv:2312.00752, equation 2a.
  """
  channels = " ".join(f"D{n}" for n in range(np.ndim(x) - 2))
  sizes = _shapes.check(
    x=(x, f"B T {channels}"),
    log_a=(log_a, f"B T {channels}"),
    initial_state=(initial_state, f"B {channels}"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, log_a=log_a)
  supports = functools.partial(pallas.supports_linear_recurrence, x, log_a, initial_state)
  if use_kernels(impl, supports, sizes):
    refuse(supports())
    return _by_kernels(x, log_a, initial_state, segment_ids)
  dtype = accumulation_dtype(x, log_a, initial_state)
  flat = lambda a: a.astype(dtype).reshape(*x.shape[:2], 1, math.prod(x.shape[2:]))
  h0 = (
    jnp.zeros((x.shape[0], *x.shape[2:]), dtype)
    if initial_state is None
    else initial_state.astype(dtype)
  )
  tokens = _elementwise.ElementwiseTokens(flat(x), flat(log_a))
  one_head = {**sizes, "H": 1, "HV": 1}
  h, state = run(
    _elementwise.rule,
    tokens,
    h0.reshape(x.shape[0], 1, math.prod(x.shape[2:]), 1),
    segment_ids,
    one_head,
    impl,
    None,
    None,
  )
  return h.reshape(x.shape).astype(x.dtype), state.reshape(h0.shape)


def _by_kernels(x, log_a, initial_state, segment_ids):
  shape = (x.shape[0], *x.shape[2:])
  state = (
    jnp.zeros(shape, jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
  )
  return (x, state) if x.size == 0 else _compute_by_kernels(x, log_a, state, segment_ids)


@jax.jit
def _compute_by_kernels(x, log_a, state, segment_ids):
  flat = lambda a: a.reshape(*a.shape[:2], -1)
  shape, document, is_token = x.shape, None, None
  x, log_a = flat(x), flat(log_a)
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    x, log_a = blank_padding((x, log_a), is_token)
  h, last = pallas.run_linear_recurrence(x, log_a, state.reshape(shape[0], -1), document)
  return without_padding(h, is_token).reshape(shape), last.reshape(state.shape)
