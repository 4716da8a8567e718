"""Additive states: linear attention, normalised, and with the gates of the matrix LSTM."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import families

MLSTMState = tuple[Matrix, Float[Array, "B HV K"], Float[Array, "B HV"]]


def linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  bonus: Float[Array, "H K"] | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
  bound: float | None = None,
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Additive state with optional decay.

      S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ,   o_t = scale S_t^T q_t

  With `bonus` u a token reads the state before its own decay and write, and its own write by u
  instead: o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    scale: factor of the output, a number; None for K^-1/2.
    bonus: [H K], the weight of a token's own write; None to read the state behind the token.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token).
    bound: a negative number that no entry of `g` is below, or None if there is no such number. From
      -5 on, "chunked" and "pallas" then take fewer products for decays per channel. No result
      depends on it but for rounding. Under jit, a decay far below it gives numbers that are not
      finite.

  Returns:
    o [B T HV V] in v.dtype, and the state behind the last token that is not padding, [B HV K V] in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN, or a decay
      below `bound` (not seen under jit).
    NotImplementedError: the named implementation cannot do this.

  Papers: no decay: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236,
  equations 18-20; per head: Sun et al., "Retentive Network", 2023, arXiv:2307.08621, equation 6,
  and Dao and Gu, "Transformers are SSMs" (Mamba-2), 2024, arXiv:2405.21060, equation 16; per
  channel: Yang et al., "Gated Linear Attention Transformers", 2023, arXiv:2312.06635, equation 3;
  bonus: Peng et al., "Eagle and Finch" (RWKV-6), 2024, arXiv:2404.05892, Finch.
  """
  arrays = dict(q=q, k=k, v=v, g=g)
  op = LINEAR_ATTENTION
  if bonus is not None:
    arrays["bonus"], op = bonus, LINEAR_ATTENTION_WITH_BONUS
  return call(op, arrays, scale, initial_state, segment_ids, chunk_size, impl, bound=bound)


def normalized_linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  eps: float = 1e-10,
  initial_state: tuple[Matrix, Float[Array, "B HV K"]] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], tuple[Matrix, Float[Array, "B HV K"]]]:
  """Linear attention divided by its normalizer.

      S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ,   z_t = Diag(exp g_t) z_{t-1} + k_t ,
      o_t = scale S_t^T q_t / (scale q_t . z_t + eps)

  Args:
    q, k: [B T H K], features that should not be negative; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    scale: factor of q, a number; None for K^-1/2. It cancels but for eps.
    eps: added to the denominator, a number of at least 0. A token that reads nothing, with an eps
      of 0, has the output 0.
    initial_state: (S [B HV K V], z [B HV K]), the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token).

  Returns:
    o [B T HV V] in v.dtype, and the state (S [B HV K V], z [B HV K]) behind the last token that is
    not padding, in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20.
  """
  eps = _shapes.check_not_negative("eps", eps)
  arrays = dict(q=q, k=k, v=v, g=g)
  options = {"eps": eps}
  return call(
    NORMALIZED_LINEAR_ATTENTION,
    arrays,
    scale,
    initial_state,
    segment_ids,
    chunk_size,
    impl,
    options=options,
  )


def mlstm(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  i: Float[Array, "B T HV"],
  f: Float[Array, "B T HV"],
  *,
  scale: float | None = None,
  initial_state: MLSTMState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], MLSTMState]:
  """Matrix LSTM with exponential gates, kept finite by a running maximum m.

      m_t = max(f_t + m_{t-1}, i_t) ,   f' = exp(f_t + m_{t-1} - m_t) ,   i' = exp(i_t - m_t) ,
      C_t = f' C_{t-1} + i' k_t v_t^T ,   n_t = f' n_{t-1} + i' k_t ,
      o_t = scale C_t^T q_t / max(|scale n_t . q_t|, exp(-m_t))

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    i: [B T HV], the log input gate (natural), of any sign.
    f: [B T HV], the log forget gate (natural), <= 0: a log sigmoid.
    scale: factor of q, a number; None for K^-1/2.
    initial_state: (C [B HV K V], n [B HV K], m [B HV]), the state before the first token; None for
      zeros, also of m.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token).

  Returns:
    o [B T HV V] in v.dtype, and the state (C, n, m) behind the last token that is not padding, in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, arXiv:2405.04517, equations 19
  to 27 and 15.
  """
  arrays = dict(q=q, k=k, v=v, i=i, f=f)
  return call(MLSTM, arrays, scale, initial_state, segment_ids, chunk_size, impl)


# --- rows ---


def _kernels(x, state, document, scale: float, bounded: bool = False):
  return pallas.run_linear_attention(x.q, x.k, x.v, x.g, state, document, scale, bounded)


def _kernels_reading_before(x, state, document, scale: float, bounded: bool = False):
  """o = scale S_{t-1}^T q: each write and decay moves one token later, behind the read."""
  later = lambda a: jnp.pad(a, [(0, 0), (1, 0)] + [(0, 0)] * (a.ndim - 2))
  written = (
    None if document is None else later(document)
  )  # document of the last write before a read
  o, state = pallas.run_linear_attention(
    jnp.pad(x.q, [(0, 0), (0, 1), (0, 0), (0, 0)]),
    later(x.k),
    later(x.v),
    None if x.g is None else later(x.g),
    state,
    written,
    scale,
    bounded,
  )
  o = o[:, :-1]
  if written is not None:
    o = jnp.where((document == written[:, :-1])[..., None, None], o, jnp.zeros((), o.dtype))
  return o, state


def _supports(x, state, chunk_size: int | None) -> str | None:
  return pallas.supports_linear_attention(x.q, x.k, x.v, x.g, state, chunk_size=chunk_size)


def _decode(x, state, scale: float, reads_before: bool = False):
  return pallas.decode_linear_attention(state, x.q, x.k, x.v, x.g, scale, reads_before)


ADDITIVE_KERNELS = {"kernels": _kernels, "supports": _supports, "decode": _decode}
LINEAR_ATTENTION = Op(family=families.LINEAR_ATTENTION, **ADDITIVE_KERNELS)
LINEAR_ATTENTION_WITH_BONUS = Op(
  family=families.LINEAR_ATTENTION_WITH_BONUS,
  kernels=_kernels_reading_before,
  supports=_supports,
  decode=functools.partial(_decode, reads_before=True),
)
NORMALIZED_LINEAR_ATTENTION = Op(family=families.NORMALIZED_LINEAR_ATTENTION, **ADDITIVE_KERNELS)
MLSTM = Op(family=families.MLSTM, **ADDITIVE_KERNELS)
