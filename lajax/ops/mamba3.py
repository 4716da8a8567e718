"""Mamba-3: linear attention whose writes follow the trapezoidal rule."""

from jaxtyping import Array, Float, Int

from lajax.ops.linear import ADDITIVE_KERNELS
from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import mamba3 as rows


def mamba3(
  q: Float[Array, "B T H K"] | Float[Array, "B T R H K"],
  k: Float[Array, "B T H K"] | Float[Array, "B T R H K"],
  v: Float[Array, "B T HV V"] | Float[Array, "B T R HV V"],
  g: Float[Array, "B T HV"],
  dt: Float[Array, "B T HV"],
  trapezoid: Float[Array, "B T HV"],
  *,
  scale: float | None = 1.0,
  initial_state: tuple[Matrix, Array, Array] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Array, tuple[Matrix, Array, Array]]:
  """Mamba-3: a write is spread over its own token and the next one, by the trapezoidal rule.

      S_t = exp(g_t) S_{t-1} + lambda_t dt_t k_t v_t^T +
        (1 - lambda_t) dt_t exp(g_t) k_{t-1} v_{t-1}^T ,   o_t = scale S_t^T q_t

  With R keys, values and queries per token (MIMO), k v^T is the sum over the R pairs, and each of
  the R queries reads the sum. Computed as one `linear_attention` of R T tokens.

  Args:
    q, k: [B T H K], or [B T R H K] for MIMO, normed, with their biases, and turned; head h serves
      the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V], or [B T R HV V] for MIMO.
    g: [B T HV], log decay (natural), <= 0: dt times the state's rate.
    dt: [B T HV], step size, above 0.
    trapezoid: [B T HV], lambda in (0, 1): 1 for Euler's rule, 1/2 for the classical trapezoid.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: (S [B HV K V], the last token's k and v), the state before the first token; None
      for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: writes in a chunk ("chunked"), of which a token has R, raised to a power of two of
      at least 16; None for 64.
    impl: implementation: "recurrent" (the linear attention token by token), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token).

  Returns:
    o of the shape and dtype of v, and the state (S [B HV K V], k [B H K] or [B R H K], v [B HV V]
    or [B R HV V]) behind the last token that is not padding, in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: Lahoti et al., "Mamba-3: Improved Sequence Modeling using State Space Principles", 2026,
  arXiv:2603.15569, its exponential-trapezoidal recurrence, and its MIMO form.
  """
  op = MAMBA3_MIMO if getattr(q, "ndim", 4) == 5 else MAMBA3
  arrays = dict(q=q, k=k, v=v, g=g, dt=dt, trapezoid=trapezoid)
  return call(op, arrays, scale, initial_state, segment_ids, chunk_size, impl)


MAMBA3 = Op(family=rows.MAMBA3, **ADDITIVE_KERNELS)
MAMBA3_MIMO = Op(family=rows.MAMBA3_MIMO, **ADDITIVE_KERNELS)
