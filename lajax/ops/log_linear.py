"""Log-linear attention, on an additive state and on the delta rule's."""

from jaxtyping import Array, Float, Int

from lajax.ops.run import Op, call
from lajax.recurrence import levels

LevelState = tuple[Float[Array, "B HV L-1 K V"], Float[Array, "B"]]


def log_linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"],
  level_scales: Float[Array, "B T HV L"],
  beta: Float[Array, "B T HV"] | None = None,
  *,
  scale: float | None = 1.0,
  initial_state: LevelState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], LevelState]:
  """Attention to log T states: one for each level of a hierarchy of buckets of past tokens.

      o_t = scale (sum_l lambda_t^l S_t^l)^T q_t

  S_t^l is the sum of the writes of bucket l, decayed to token t: by exp(g), or with `beta` by the
  gated delta rule, exp(g_t) (I - beta_t k_t k_t^T). Bucket 0 is the token itself. Token t of its
  document, counted from 0, has a bucket l >= 1 where bit l - 1 of t is set: the 2^(l-1) tokens
  before t - (t mod 2^(l-1)).

  A call takes T log T operations. The state has L - 1 levels, whatever the number of tokens.

  Args:
    q, k: [B T H K]; with `beta` k is expected at unit length; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    g: [B T HV], log decay (natural), <= 0.
    level_scales: [B T HV L], lambda, with L >= 1 + ceil(log2 T) for a document of T tokens. In
      longer documents the last level holds all that is older.
    beta: [B T HV], write strength of the delta rule, in (0, 1); None for an additive state.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: (S [B HV L-1 K V], position [B]), the levels from 1 on before the first token,
      and the number of tokens in them; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64.
    impl: implementation: "recurrent" (token by token, with levels that join), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), or "auto"
      ("chunked"; "recurrent" for one token). "pallas" (GPU kernels) does not exist for this op.

  Returns:
    o [B T HV V] in v.dtype, and the state (S, position) behind the last token that is not padding,
    in float32 (float64 if an input is). `position` is a whole number, modulo 2^(L-1).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: H. Guo et al., "Log-Linear Attention", 2025, arXiv:2506.04761, section 3.
  """
  levels.check_levels("initial_state", initial_state, level_scales)
  arrays = dict(q=q, k=k, v=v, g=g, level_scales=level_scales, beta=beta)
  return call(LOG_LINEAR, arrays, scale, initial_state, segment_ids, chunk_size, impl)


LOG_LINEAR = Op(family=levels.LOG_LINEAR)
