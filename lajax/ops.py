"""The operations: check the arguments, choose the form, run it. Shapes are [B T H D]; `lajax._shapes` has the letters.

Forms, in every operation: `impl="recurrent"` is the printed equation, token by token; `"associative"` is
`jax.lax.associative_scan` over tokens, and keeps T states; `"chunked"` is matrix products inside chunks and a scan over the
chunks; `"pallas"` is for GPU kernels. `"auto"` takes what suits the device and the shapes. A named form never falls back.

Gradients: every form can be differentiated in all float arguments, `"recurrent"` and `"chunked"` also forwards; `"chunked"` has
first derivatives only. Log decays may be anything in [-inf, 0]; a positive one is computed as asked for. Each new T compiles
once; nothing is tuned at run time.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lajax import _shapes
from lajax._numerics import accumulation_dtype, alike, product_precision
from lajax.recurrence import attention as _softmax
from lajax.recurrence import delta_rule as _delta
from lajax.recurrence import dplr as _dplr
from lajax.recurrence import drive
from lajax.recurrence import linear_attention as _linear
from lajax.recurrence import linear_recurrence as _elementwise
from lajax.recurrence import mlstm as _mlstm

Matrix = Float[Array, "B HV K V"]
MLSTMState = tuple[Matrix, Float[Array, "B HV K"], Float[Array, "B HV"]]

CHUNK = 64  # tokens in a chunk
CHANNEL_CHUNK = 32  # with one decay a channel, where pairs of tokens cost more
DIRECT = 512  # tokens up to which attention's matrix of scores is made whole


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
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: no decay: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20; one a head: Sun et
  al., "Retentive Network", 2023, arXiv:2307.08621, equation 6, and Dao and Gu, "Transformers are SSMs" (Mamba-2), 2024,
  arXiv:2405.21060, equation 16; one a channel: Yang et al., "Gated Linear Attention Transformers", 2023, arXiv:2312.06635,
  equation 3; bonus: Peng et al., "Eagle and Finch" (RWKV-6), 2024, arXiv:2404.05892, equation 19.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV | B T HV K"), bonus=(bonus, "H K"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g)
  dtype, precision = accumulation_dtype(q, k, v, g, bonus, initial_state), product_precision(q, k, v)
  if bonus is not None and segment_ids is not None:  # before a product of two inputs: NaN in padding stays out of gradients
    q, k, v = drive.blank_padding((q, k, v), segment_ids >= 0)
  tokens = _linear.Tokens(q.astype(dtype) * _scale(scale, sizes), k.astype(dtype), v.astype(dtype), _cast(g, dtype))
  state = _state(initial_state, sizes, dtype)
  rule = _linear.rule if bonus is None else _linear.reading_before
  o, state = _run(rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  if bonus is not None:
    own = (tokens.q * tokens.k * bonus.astype(dtype)).sum(-1)
    o = o + jnp.repeat(own, sizes["HV"] // sizes["H"], axis=2)[..., None] * tokens.v
  return o.astype(v.dtype), state


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
    eps: added to the denominator.
    initial_state: (S [B HV K V], z [B HV K]), the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state (S [B HV K V], z [B HV K]) after the last real token, in float32 (float64 if an
    input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20.
  """
  initial, z = (None, None) if initial_state is None else initial_state
  _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV | B T HV K"),
    initial_state=(initial, "B HV K V"), initial_normalizer=(z, "B HV K"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  joined = None if initial is None or z is None else jnp.concatenate([initial, z[..., None]], axis=-1)
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # z is the state of a value that is always 1
  out, state = linear_attention(
    q, k, values.astype(accumulation_dtype(v)), g, scale=scale, initial_state=joined, segment_ids=segment_ids,
    chunk_size=chunk_size, impl=impl,
  )  # fmt: skip
  o = out[..., :-1] / (out[..., -1:] + eps)
  return o.astype(v.dtype), (state[..., :-1], state[..., -1])


def delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"] | None,
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  erase: Float[Array, "B T HV K"] | None = None,
  write: Float[Array, "B T HV V"] | None = None,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Delta rule: the decayed state is corrected at k towards v.

      S'_t = Diag(exp g_t) S_{t-1} ,   S_t = S'_t + k_t (beta_t (v_t - S'_t^T k_t))^T ,   o_t = scale S_t^T q_t

  With `erase` b and `write` w in the place of beta: S_t = S'_t + k_t (w_t v_t - S'_t^T (b_t k_t))^T, channel by channel.

  Args:
    q, k: [B T H K]; k is expected at unit length (`lajax.layers` does that); head h serves the value heads n h .. n h + n - 1.
    v: [B T HV V].
    beta: [B T HV], write strength, in (0, 1), or (0, 2) for negative eigenvalues; None with `erase` and `write`.
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    erase, write: [B T HV K] and [B T HV V], in (0, 1).
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (DeltaNet), 2024, arXiv:2406.06484, equation 4;
  Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464, equation 10; one decay a channel: Kimi Team, "Kimi Linear" (KDA),
  2025, arXiv:2510.26692, equation 1.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), beta=(beta, "B T HV"), g=(g, "B T HV | B T HV K"),
    erase=(erase, "B T HV K"), write=(write, "B T HV V"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  if (beta is None) == (erase is None) or (erase is None) != (write is None):
    raise ValueError("give either `beta`, or (with beta=None) both `erase` and `write`; got another mixture of the three.")
  _shapes.check_not_nan(g=g, beta=beta, erase=erase, write=write)
  dtype, precision = accumulation_dtype(q, k, v, beta, g, erase, write, initial_state), product_precision(q, k, v)
  groups = _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  if segment_ids is not None:  # before products of two inputs, so that NaN in padding stays out of gradients too
    k, v, beta, erase, write = drive.blank_padding((k, v, beta, erase, write), segment_ids >= 0)
  k = k.astype(dtype)
  reads = writes = beta[..., None] if beta is not None else None
  if erase is not None and write is not None:
    reads, writes = erase, write
  r, u = jnp.repeat(k, groups, axis=2) * _cast(reads, dtype), v.astype(dtype) * _cast(writes, dtype)
  tokens = _delta.Tokens(q.astype(dtype) * _scale(scale, sizes), k, r, u, _cast(g, dtype))
  state = _state(initial_state, sizes, dtype)
  o, state = _run(_delta.rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  return o.astype(v.dtype), state


def delta_product(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T R H K"],
  v: Float[Array, "B T R HV V"],
  beta: Float[Array, "B T R HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Delta product: the state decays once a token, is corrected R times, and is read once.

      S_t^0 = Diag(exp g_t) S_{t-1} ,   S_t^r = S_t^{r-1} + k_t^r (beta_t^r (v_t^r - S_t^{r-1}^T k_t^r))^T for r = 1 .. R ,
      S_t = S_t^R ,   o_t = scale S_t^T q_t

  So its transition is a product of R Householder-like factors. Computed as `delta_rule` on T R tokens.

  Args:
    q: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    k: [B T R H K], expected at unit length.
    v: [B T R HV V].
    beta: [B T R HV], write strengths, in (0, 2).
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: delta steps (of which a token has R) in a chunk of the chunked form; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products", 2025,
  arXiv:2502.10297, equation 4.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T R H K"), v=(v, "B T R HV V"), beta=(beta, "B T R HV"), g=(g, "B T HV | B T HV K"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g, beta=beta)
  R = sizes["R"]
  if R == 0:
    raise ValueError("`k` must be [B T R H K] with R of at least 1, the corrections of a token; got R = 0.")
  steps = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
  alone = lambda x, r: steps(jnp.pad(x[:, :, None], [(0, 0), (0, 0), (r, R - 1 - r)] + [(0, 0)] * (x.ndim - 2)))
  o, state = delta_rule(
    alone(q, R - 1), steps(k), steps(v), steps(beta), None if g is None else alone(g, 0), scale=scale, initial_state=initial_state,
    segment_ids=None if segment_ids is None else jnp.repeat(segment_ids, R, axis=1), chunk_size=chunk_size, impl=impl,
  )  # fmt: skip
  return o[:, R - 1 :: R], state


def gated_oja(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV V"] | None = None,
  *,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Oja's rule with decay on the value side: the delta rule of the transposed state, with keys and values exchanged.

      S'_t = S_{t-1} Diag(exp g_t) ,   S_t = S'_t + (k_t - S'_t v_t) (beta_t v_t)^T ,   o_t = scale S_t^T q_t

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V], expected at unit length.
    beta: [B T HV], write strength, in (0, 1).
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV V] for one a channel of the value.
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: E. Oja, "A Simplified Neuron Model as a Principal Component Analyzer", 1982, doi:10.1007/BF00275687; as a state of fast
  weights: Irie et al., "Images as Weight Matrices", 2022, arXiv:2210.06184, equation 6.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), beta=(beta, "B T HV"), g=(g, "B T HV | B T HV V"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g, beta=beta)
  groups = _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  dtype, precision = accumulation_dtype(q, k, v, beta, g, initial_state), product_precision(q, k, v)
  if segment_ids is not None:  # before products of two inputs, so that NaN in padding stays out of gradients too
    k, v, beta = drive.blank_padding((k, v, beta), segment_ids >= 0)
  v_wide, strength = v.astype(dtype), beta.astype(dtype)[..., None]
  new = jnp.repeat(k.astype(dtype), groups, axis=2) * strength
  tokens = _delta.Tokens(q.astype(dtype) * _scale(scale, sizes), v_wide, v_wide * strength, new, _cast(g, dtype))
  state = jnp.swapaxes(_state(initial_state, sizes, dtype), -1, -2)
  o, state = _run(_delta.by_rows, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  return o.reshape(v.shape).astype(v.dtype), jnp.swapaxes(state, -1, -2)


def dplr(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  a: Float[Array, "B T H K"],
  b: Float[Array, "B T H K"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Diagonal plus low-rank transition; `a` reads the state before its decay.

      S_t = Diag(exp g_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T ,   o_t = scale S_t^T q_t

  Args:
    q, k, a, b: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H. For a state that stays bounded,
      Diag(exp g) + b a^T must not lengthen; nothing checks that.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none (IPLR), [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for 64, or 32 with
      one decay a channel.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Peng et al., "RWKV-7 Goose", 2025, arXiv:2503.14456, equation 16 (a = -kappa, b = kappa iclr); Hu et al., "Comba",
  2025, arXiv:2506.02475, equation 7 (a = p, b = -beta k).
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), a=(a, "B T H K"), b=(b, "B T H K"),
    g=(g, "B T HV | B T HV K"), initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g)
  dtype, precision = accumulation_dtype(q, k, v, a, b, g, initial_state), product_precision(q, k, v, a, b)
  wide = lambda x: x.astype(dtype)
  tokens = _dplr.Tokens(wide(q) * _scale(scale, sizes), wide(k), wide(v), wide(a), wide(b), _cast(g, dtype))
  state = _state(initial_state, sizes, dtype)
  o, state = _run(_dplr.rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  return o.astype(v.dtype), state


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
    o [B T HV V] in v.dtype, and the state (C, n, m) after the last real token, in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, arXiv:2405.04517, equations 19 to 27 and 15.
  """
  C, n, m = (None, None, None) if initial_state is None else initial_state
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), i=(i, "B T HV"), f=(f, "B T HV"),
    initial_C=(C, "B HV K V"), initial_n=(n, "B HV K"), initial_m=(m, "B HV"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(i=i, f=f)
  dtype = accumulation_dtype(q, k, v, i, f, C, n, m)
  m = jnp.zeros((sizes["B"], sizes["HV"]), dtype) if m is None else m.astype(dtype)
  if segment_ids is not None:
    k, v, i, f = drive.blank_padding((k, v, i, f), segment_ids >= 0)
  top, g, write = _mlstm.stabilise(i.astype(dtype), f.astype(dtype), m, segment_ids)
  joined = None
  if C is not None and n is not None:
    joined = _mlstm.rescaled(jnp.concatenate([C, n[..., None]], axis=-1).astype(dtype), m, 1)
  values = jnp.concatenate([v.astype(dtype), jnp.ones((*v.shape[:-1], 1), dtype)], axis=-1) * write[..., None]
  out, state = linear_attention(
    q.astype(dtype), k.astype(dtype), values, g, scale=scale, initial_state=joined, segment_ids=segment_ids,
    chunk_size=chunk_size, impl=impl,
  )  # fmt: skip
  o = out[..., :-1] * _mlstm.normalizer(out[..., -1:], top[..., None])
  if segment_ids is not None:
    o = jnp.where((segment_ids >= 0)[..., None, None], o, 0)
  m = top[:, -1] if sizes["T"] else m
  state = _mlstm.rescaled(state, m, -1)
  return o.astype(v.dtype), (state[..., :-1], state[..., -1], m)


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
    impl: the form, see above; "auto" is the token scan on a CPU, where it is the fastest, and chunked elsewhere.

  Returns:
    h [B T ..] in x.dtype, and h after the last real token, [B ..] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2017, arXiv:1709.04057, equation
  5; De et al., "Griffin" (RG-LRU), 2024, arXiv:2402.19427, equation 4; Gu and Dao, "Mamba", 2023, arXiv:2312.00752, equation 2a.
  """
  channels = " ".join(f"D{n}" for n in range(np.ndim(x) - 2))
  sizes = _shapes.check(
    x=(x, f"B T {channels}"), log_a=(log_a, f"B T {channels}"), initial_state=(initial_state, f"B {channels}"),
    segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(log_a=log_a)
  dtype = accumulation_dtype(x, log_a, initial_state)
  flat = lambda a: a.astype(dtype).reshape(*x.shape[:2], 1, math.prod(x.shape[2:]))
  h0 = jnp.zeros((x.shape[0], *x.shape[2:]), dtype) if initial_state is None else initial_state.astype(dtype)
  tokens = _elementwise.Tokens(flat(x), flat(log_a))
  one_head = {**sizes, "H": 1, "HV": 1}
  h, state = _run(_elementwise.rule, tokens, h0.reshape(x.shape[0], 1, math.prod(x.shape[2:]), 1), segment_ids, one_head, impl, None, None)
  return h.reshape(x.shape).astype(x.dtype), state.reshape(h0.shape)


def attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T HK K"],
  v: Float[Array, "B T HK V"],
  *,
  causal: bool = True,
  window: int | None = None,
  sink: Float[Array, "H"] | None = None,
  log_forget: Float[Array, "B T H"] | None = None,
  scale: float | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  impl: str = "auto",
) -> Float[Array, "B T H V"]:
  """Softmax attention, exactly; the chunked form takes memory linear in T.

      o_i = sum_j p_ij v_j ,   p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')) ,
      s_ij = scale q_i . k_j + sum of log_forget_l over j < l <= i

  over the tokens j that i reads: j <= i if causal, i - j < window, the same document.

  Args:
    q: [B T H K].
    k, v: [B T HK K], [B T HK V], where HK divides H; head h of q reads head h // (H / HK).
    causal: whether a token reads only itself and tokens before it.
    window: how many tokens, itself included, a token reads at most (on either side, if not causal); None for all.
    sink: [H], a logit that takes part in the denominator alone; None for none.
    log_forget: [B T H], log forget gates (natural), <= 0, not scaled; None for none. Needs `causal`.
    scale: of the scores; None for K^-1/2.
    segment_ids: [B T], the document of each token: documents do not read each other. A token of id < 0 is padding: nobody
      reads it, its output is 0, and distances in a window do not count it.
    impl: the form, see above. "recurrent": one query after the other. "associative": softmax over blocks of keys, merged as
      a tree. "chunked": the same, one block after the other. "auto": `jax.nn.dot_product_attention` for short sequences
      where it has the options, else chunked.

  Returns:
    o [B T H V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1; Dao et al., "FlashAttention", 2022,
  arXiv:2205.14135, algorithm 1; sink: Xiao et al., 2023, arXiv:2309.17453; log_forget: Lin et al., "Forgetting Transformer",
  2025, arXiv:2503.02130, equation 3.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T HK K"), v=(v, "B T HK V"), sink=(sink, "H"), log_forget=(log_forget, "B T H"),
    segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_multiple("HK", "H", sizes, ("`k` and `v`", "`q`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("window", window)
  _shapes.check_not_nan(log_forget=log_forget)
  if impl == "pallas":
    raise NotImplementedError("impl='pallas' has no kernel for attention yet; use impl='chunked' or impl='auto'.")
  if log_forget is not None and not causal:
    raise ValueError("`log_forget` needs causal=True: a gate stands between a token and those before it; got causal=False.")
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
  if isinstance(scale, Tracer):
    raise ValueError("`scale` must be a number known when the function is traced; got a traced array. Multiply `q` by it.")
  scale = None if scale is None else float(scale)
  return _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl)


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "impl"))
def _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl):
  B, T = q.shape[:2]
  position, runs, real = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)), jnp.zeros((B, T), jnp.int32), None
  if segment_ids is not None:
    run, real = drive.segments(segment_ids)
    position, runs = jnp.cumsum(real, axis=1, dtype=jnp.int32), jnp.where(real, run, -1)
    q, k, v, log_forget = drive.blank_padding((q, k, v, log_forget), real)
  alike_widths = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype
  plain = sink is None and log_forget is None and alike_widths and q.dtype != jnp.float64
  if impl == "auto" and plain and T <= DIRECT:
    places = _softmax.Where(position, runs)
    mask = None
    if segment_ids is not None or window is not None:
      mask = _softmax.visible(places, places, causal, window)[:, None]
    with jax.default_matmul_precision("default" if product_precision(q, k, v) == lax.Precision.DEFAULT else "highest"):
      o = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=causal and mask is None)
    return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype))
  return _softmax.attend(
    q, k, v, q_positions=position, k_positions=position, q_segments=runs, k_segments=runs, causal=causal, window=window,
    sink=sink, log_forget=log_forget, scale=scale, impl="chunked" if impl == "auto" else impl,
  )  # fmt: skip


def _cast(x, dtype) -> Any:
  return None if x is None else x.astype(dtype)


def _scale(scale: float | None, sizes) -> float:
  return sizes["K"] ** -0.5 if scale is None else scale


def _state(initial, sizes, dtype):
  if initial is None:
    return jnp.zeros((sizes["B"], sizes["HV"], sizes["K"], sizes["V"]), dtype)
  return initial.astype(dtype)


def _run(rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision):
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("chunk_size", chunk_size)
  if impl == "pallas":
    raise NotImplementedError("impl='pallas' has no kernel for this operation yet; use impl='chunked' or impl='auto'.")
  if impl == "auto":
    elementwise = rule is _elementwise.rule and jax.default_backend() == "cpu"
    impl = "recurrent" if sizes["T"] == 1 or elementwise else "chunked"
  if sizes["T"] == 0 or 0 in state.shape:
    return jnp.zeros((sizes["B"], sizes["T"], *state.shape[1:2], *state.shape[3:]), state.dtype), state
  by_channel = getattr(tokens, "g", None) is not None and tokens.g.ndim == 4
  chunk_size = chunk_size or (CHANNEL_CHUNK if by_channel else CHUNK)
  return _compute(rule, tokens, state, segment_ids, impl, chunk_size, precision)


@functools.partial(jax.jit, static_argnames=("rule", "impl", "chunk_size", "precision"))
def _compute(rule, tokens, state, segment_ids, impl, chunk_size, precision):
  state = alike(state, tokens)
  runs = real = None
  if segment_ids is not None:
    runs, real = drive.segments(segment_ids)
    tokens = drive.blank_padding(tokens, real)
  if impl == "chunked":
    o, state = drive.chunked(rule, tokens, state, runs, chunk_size=chunk_size, precision=precision)
  else:
    form = {"recurrent": drive.recurrent, "associative": drive.associative}[impl]
    o, state = form(rule, tokens, state, runs)
  return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype)), state
