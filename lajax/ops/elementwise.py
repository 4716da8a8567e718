"""Elementwise states."""

from jaxtyping import Array, Float, Int

from lajax import pallas
from lajax.ops.run import Op, call
from lajax.recurrence import families


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
    x: [B T ..], any axes behind (for Mamba: channels and state), up to seven.
    log_a: the same shape; log decay (natural), <= 0.
    initial_state: [B ..], h before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "recurrent" on a CPU, where it is the fastest, and "chunked" elsewhere).

  Returns:
    h [B T ..] in x.dtype, and h behind the last token that is not padding, [B ..] in float32
    (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Papers: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2017,
  arXiv:1709.04057, equation 5; De et al., "Griffin" (RG-LRU), 2024, arXiv:2402.19427, equation 4;
  Gu and Dao, "Mamba", 2023, arXiv:2312.00752, equation 2a.
  """
  op = _OPS[families.linear_recurrence_of(getattr(x, "ndim", 2) - 2)]
  return call(
    op, dict(x=x, log_a=log_a), initial_state=initial_state, segment_ids=segment_ids, impl=impl
  )


# --- rows ---


def _kernels(tokens, state, document, scale: None):
  """The kernels have no axis of heads: [B T D] and [B D]."""
  x, log_a = tokens.x[:, :, 0], tokens.log_a[:, :, 0]
  h, last = pallas.run_linear_recurrence(x, log_a, state[:, 0, :, 0], document)
  return h[:, :, None], last[:, None, :, None]


def _supports(tokens, state, chunk_size: None) -> str | None:
  return pallas.supports_linear_recurrence(tokens.x, tokens.log_a, state)


_OPS = {  # by family: one for each number of axes behind B and T
  family: Op(family=family, kernels=_kernels, supports=_supports, fastest_on_cpu="recurrent")
  for family in families.LINEAR_RECURRENCES
}
