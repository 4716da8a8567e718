"""Preconditioned delta rule."""

from jaxtyping import Array, Float, Int

from lajax.ops.delta import CORRECTED_KERNELS
from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import preconditioned


def preconditioned_delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  beta_precond: Float[Array, "B T H"],
  g_precond: Float[Array, "B T H"],
  *,
  base: float = 1.5,
  eps: float = 1e-6,
  center: float = -0.2,
  scale: float | None = None,
  initial_state: tuple[Matrix, Float[Array, "B H K"]] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], tuple[Matrix, Float[Array, "B H K"]]]:
  """Delta rule whose writes are preconditioned by a running mean of squared keys, per channel.

      A_t = exp(g'_t) A_{t-1} + beta'_t k_t^2 ,   r_t = log(A_t + eps) - center ,
      m_t = base^(-r_t / (1 + |r_t|)) ,   S'_t = Diag(exp g_t) S_{t-1} ,
      S_t = S'_t + (m_t k_t) (beta_t (v_t - S'_t^T k_t))^T ,   o_t = scale S_t^T q_t

  with beta' and g' the arguments `beta_precond` and `g_precond`.

  Args:
    q, k: [B T H K]; k is expected at unit length; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    beta: [B T HV], write strength, in (0, 1).
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    beta_precond, g_precond: [B T H], strength in (0, 1) and log decay (natural) <= 0 of A.
    base: m is between 1 / base and base; a number above 0.
    eps: added to A, a number of at least 0.
    center: the log of A at which m is 1.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: (S [B HV K V], A [B H K], not negative), the state before the first token; None
      for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels for S; A is in chunks), or "auto" (kernels on an NVIDIA GPU where they take the
      arguments, else "chunked", or "recurrent" for one token).

  Returns:
    o [B T HV V] in v.dtype, and the state (S [B HV K V], A [B H K]) behind the last token that is
    not padding, in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: N. Tumma, N. Loo, D. Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for
  Linear Recurrences", 2026, arXiv:2604.21100, its diagonal approximation.
  """
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, beta_precond=beta_precond, g_precond=g_precond)
  options = preconditioned.options_of(base, eps, center)
  return call(
    PRECONDITIONED, arrays, scale, initial_state, segment_ids, chunk_size, impl, options=options
  )


PRECONDITIONED = Op(family=preconditioned.PRECONDITIONED_DELTA_RULE, **CORRECTED_KERNELS)
