"""Additive states: linear attention, normalised, and with the exponential gates of the matrix LSTM."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax._numerics import NEGLIGIBLE, accumulation_dtype, product_precision
from lajax.ops.run import Matrix, by_kernels, cast, first_state, run, use_kernels
from lajax.recurrence import linear_attention as _linear
from lajax.recurrence import mlstm as _mlstm
from lajax.recurrence.documents import blank_padding

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
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Additive state with optional decay.

      S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ,   o_t = scale S_t^T q_t

  With `bonus` u a token reads the state before its own decay and write, and its own write by u instead:
  o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T q_t.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of the output; None for K^-1/2.
    bonus: [H K], the weight of a token's own write; None to read the state after it.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last is_token token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: no decay: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20; one a head: Sun et
  al., "Retentive Network", 2023, arXiv:2307.08621, equation 6, and Dao and Gu, "Transformers are SSMs" (Mamba-2), 2024,
  arXiv:2405.21060, equation 16; one a channel: Yang et al., "Gated Linear Attention Transformers", 2023, arXiv:2312.06635,
  equation 3; bonus: Peng et al., "Eagle and Finch" (RWKV-6), 2024, arXiv:2404.05892, Finch.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    g=(g, "B T HV | B T HV K"),
    bonus=(bonus, "H K"),
    initial_state=(initial_state, "B HV K V"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, g=g)
  supports = functools.partial(
    pallas.supports_linear_attention, q, k, v, g, initial_state, bonus=bonus, chunk_size=chunk_size
  )
  dtype, precision = (
    accumulation_dtype(q, k, v, g, bonus, initial_state),
    product_precision(q, k, v),
  )
  kernels_wanted = use_kernels(impl, supports, sizes)
  if bonus is not None and segment_ids is not None:
    # Before a product of two inputs, so that NaN in padding stays out of gradients.
    q, k, v = blank_padding((q, k, v), segment_ids >= 0)
  if kernels_wanted:
    kernels = pallas.run_linear_attention if bonus is None else _kernels_reading_before
    inputs = (q, k, v, cast(g, jnp.float32))
    o, state = by_kernels(
      kernels, supports, inputs, initial_state, segment_ids, sizes, scale, chunk_size
    )
  else:
    tokens = _linear.AdditiveTokens(*(cast(x, dtype) for x in (q, k, v, g)))
    state = first_state(initial_state, sizes, dtype)
    rule = _linear.rule if bonus is None else _linear.reading_before
    o, state = run(
      rule,
      tokens,
      state,
      segment_ids,
      sizes,
      impl,
      chunk_size,
      precision,
      _shapes.scale_of(scale, sizes),
    )
  if bonus is not None:
    own = (
      q.astype(dtype) * _shapes.scale_of(scale, sizes) * k.astype(dtype) * bonus.astype(dtype)
    ).sum(-1)
    o = o + jnp.repeat(own, sizes["HV"] // sizes["H"], axis=2)[..., None] * v.astype(dtype)
  return o.astype(v.dtype), state


def _kernels_reading_before(q, k, v, g, state, document, scale: float):
  """o = scale S_{t-1}^T q: writes and decays stand one token later, behind all that reads before them."""
  later = lambda x: jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))
  q = jnp.pad(q, [(0, 0), (0, 1), (0, 0), (0, 0)])
  written = (
    None if document is None else later(document)
  )  # the run of what has been written when a token reads; the initial state's is 0
  o, state = pallas.run_linear_attention(
    q, later(k), later(v), None if g is None else later(g), state, written, scale
  )
  o = o[:, :-1]
  if written is not None:
    o = jnp.where((document == written[:, :-1])[..., None, None], o, jnp.zeros((), o.dtype))
  return o, state


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
    q, k: [B T H K], features that should not be negative.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of q; None for K^-1/2. It cancels but for eps.
    eps: added to the denominator, a number of at least 0. A token that reads nothing, with an eps of 0, gives 0.
    initial_state: (S [B HV K V], z [B HV K]), the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state (S [B HV K V], z [B HV K]) after the last is_token token, in float32 (float64 if an
    input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20.
  """
  initial, z = _shapes.check_parts("initial_state", initial_state, ("S", "z"))
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    g=(g, "B T HV | B T HV K"),
    initial_state=(initial, "B HV K V"),
    initial_normalizer=(z, "B HV K"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, g=g)
  _shapes.check_not_negative("eps", eps)
  joined = (
    None if initial is None or z is None else jnp.concatenate([initial, z[..., None]], axis=-1)
  )
  dtype, precision = accumulation_dtype(q, k, v, g, initial, z), product_precision(q, k, v)
  widened = lambda v: _linear.with_ones(
    v.astype(accumulation_dtype(v))
  )  # z is the state of a value that is always 1
  values = jax.eval_shape(widened, v)
  supports = functools.partial(
    pallas.supports_linear_attention, q, k, values, g, joined, chunk_size=chunk_size
  )
  if use_kernels(impl, supports, sizes):
    o, state = linear_attention(
      q,
      k,
      widened(v),
      g,
      scale=scale,
      initial_state=joined,
      segment_ids=segment_ids,
      chunk_size=chunk_size,
      impl="pallas",
    )
    o = _linear.divided(o, eps)
  else:
    tokens = _linear.AdditiveTokens(*(cast(x, dtype) for x in (q, k, v, g)))
    state = first_state(joined, sizes | {"V": sizes["V"] + 1}, dtype)
    rule = _linear.normalized(float(eps))
    o, state = run(
      rule,
      tokens,
      state,
      segment_ids,
      sizes,
      impl,
      chunk_size,
      precision,
      _shapes.scale_of(scale, sizes),
    )
  return o[..., : sizes["V"]].astype(v.dtype), (state[..., :-1], state[..., -1])


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
    scale: of q; None for K^-1/2.
    initial_state: (C [B HV K V], n [B HV K], m [B HV]), the state before the first token; None for zeros, as an m of 0.
    segment_ids: [B T], the document of each token. A change of id sets C, n and m to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state (C, n, m) after the last is_token token, in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, arXiv:2405.04517, equations 19 to 27 and 15.
  """
  C, n, m = _shapes.check_parts("initial_state", initial_state, ("C", "n", "m"))
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    i=(i, "B T HV"),
    f=(f, "B T HV"),
    initial_C=(C, "B HV K V"),
    initial_n=(n, "B HV K"),
    initial_m=(m, "B HV"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, i=_not_infinite(i), f=f)
  dtype = accumulation_dtype(q, k, v, i, f, C, n, m)
  m = (
    jnp.zeros((sizes["B"], sizes["HV"]), dtype)
    if m is None
    else jnp.maximum(m.astype(dtype), NEGLIGIBLE)
  )
  if segment_ids is not None:
    k, v, i, f = blank_padding((k, v, i, f), segment_ids >= 0)
  top, g, write = _mlstm.stabilise(i.astype(dtype), f.astype(dtype), m, segment_ids)
  joined = None
  if C is not None and n is not None:
    joined = _mlstm.rescaled(jnp.concatenate([C, n[..., None]], axis=-1).astype(dtype), m, 1)
  values = _linear.with_ones(v.astype(dtype)) * write[..., None]
  out, state = linear_attention(
    q.astype(dtype),
    k.astype(dtype),
    values,
    g,
    scale=scale,
    initial_state=joined,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
    impl=impl,
  )
  o = out[..., :-1] * _mlstm.normalizer(out[..., -1:], top[..., None])
  if segment_ids is not None:
    o = jnp.where((segment_ids >= 0)[..., None, None], o, 0)
  m = top[:, -1] if sizes["T"] else m
  state = _mlstm.rescaled(state, m, -1)
  return o.astype(v.dtype), (state[..., :-1], state[..., -1], m)


def _not_infinite(i):
  """+inf, which has no weight relative to itself, as NaN: both are refused."""
  return i if isinstance(i, Tracer) else jnp.where(jnp.isposinf(i), jnp.nan, i)
