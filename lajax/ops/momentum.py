"""Momentum delta rule."""

from jaxtyping import Array, Float, Int

from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import momentum


def momentum_delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  p: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  eta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"],
  g_momentum: Float[Array, "B T HV"],
  *,
  scale: float | None = None,
  initial_state: tuple[Matrix, Matrix] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], tuple[Matrix, Matrix]]:
  """Delta rule with momentum: the state moves by a decayed sum of its corrections.

      M_t = exp(m_t) M_{t-1} - eta_t k_t (v_t - S_{t-1}^T p_t)^T ,
      S_t = exp(g_t) S_{t-1} - beta_t M_t ,   o_t = scale S_t^T q_t

  with m the argument `g_momentum`.

  Args:
    q, k, p: [B T H K]; k and p are expected at unit length at most; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    beta: [B T HV], step size along the momentum, at least 0.
    eta: [B T HV], strength of a correction, at least 0.
    g, g_momentum: [B T HV], log decays (natural) of S and of M, <= 0.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: (S [B HV K V], M [B HV K V]), the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), or "auto"
      ("chunked"; "recurrent" for one token). "pallas" (GPU kernels) does not exist for this op.

  Returns:
    o [B T HV V] in v.dtype, and the state (S, M) behind the last token that is not padding, in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: Y. Huang et al., "MDN: Parallelizing Stepwise Momentum for Delta Linear Attention", 2026,
  arXiv:2605.05838, its momentum delta rule.
  """
  arrays = dict(q=q, k=k, p=p, v=v, beta=beta, eta=eta, g=g, g_momentum=g_momentum)
  return call(MOMENTUM_DELTA_RULE, arrays, scale, initial_state, segment_ids, chunk_size, impl)


MOMENTUM_DELTA_RULE = Op(family=momentum.MOMENTUM_DELTA_RULE)
