"""Mesa layer: linear attention read by the solution of a ridge regression."""

from jaxtyping import Array, Float, Int

from lajax import _shapes
from lajax.ops.linear import ADDITIVE_KERNELS
from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import mesa as rows

MesaState = tuple[Float[Array, "B HV K K"], Matrix]


def mesa(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | None,
  ridge: Float[Array, "H K"],
  *,
  cg_steps: int | None = None,
  scale: float | None = 1.0,
  initial_state: MesaState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], MesaState]:
  """Mesa layer: each token reads by the least squares map from the keys so far to their values.

      G_t = exp(g_t) G_{t-1} + beta_t k_t k_t^T ,   S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T ,
      o_t = scale S_t^T (G_t + Diag(ridge))^(-1) q_t

  Derivatives are implicit: those of the exact solution, whatever solves.

  Args:
    q, k: [B T H K]; k is expected at unit length; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    beta: [B T HV], weight of a token, at least 0.
    g: [B T HV], log decay (natural), <= 0; None for none.
    ridge: [H K], above 0.
    cg_steps: None to solve by Cholesky factors, in memory of 64 K^2 numbers per value head; or the
      greatest number of steps of conjugate gradients, each of which is one linear attention. They
      stop at a token whose residual, relative to its query with the ridge scaled to 1, is below
      1e-6 (1e-13 in float64).
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: (G [B HV K K], symmetric, S [B HV K V]), the state before the first token; None
      for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64.
    impl: implementation of the linear attention: "recurrent" (token by token), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels for S, chunks for the solution), or "auto" (kernels on an NVIDIA GPU where they
      take the arguments, else "chunked", or "recurrent" for one token).

  Returns:
    o [B T HV V] in v.dtype, and the state (G, S) behind the last token that is not padding, in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: J. von Oswald et al., "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
  2025, arXiv:2506.05233.
  """
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, ridge=ridge)
  options = {"cg_steps": _shapes.check_positive("cg_steps", cg_steps)}
  return call(MESA, arrays, scale, initial_state, segment_ids, chunk_size, impl, options=options)


MESA = Op(family=rows.MESA, **ADDITIVE_KERNELS)
