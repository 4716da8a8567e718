"""States that are corrected: the delta rule and its products, Oja's rule, diagonal plus low rank."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax._numerics import accumulation_dtype, product_precision
from lajax.ops.run import Matrix, by_kernels, cast, first_state, run, use_kernels
from lajax.recurrence import delta_rule as _delta
from lajax.recurrence import dplr as _dplr


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
    impl: the form, see above; `"pallas"` is for K up to 256 where q, k and v are bfloat16, else 128.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last is_token token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (DeltaNet), 2024, arXiv:2406.06484, equation 4;
  Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464, equation 10; one decay a channel: Kimi Team, "Kimi Linear" (KDA),
  2025, arXiv:2510.26692, equation 1.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    beta=(beta, "B T HV"),
    g=(g, "B T HV | B T HV K"),
    erase=(erase, "B T HV K"),
    write=(write, "B T HV V"),
    initial_state=(initial_state, "B HV K V"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_strengths(beta, erase, write)
  _shapes.check_not_nan(segment_ids, g=g, beta=beta, erase=erase, write=write)
  kernels, takes, strengths = pallas.run_delta_rule, pallas.supports_delta_rule, (beta,)
  if erase is not None:
    kernels, takes, strengths = (
      pallas.run_delta_rule_by_channel,
      pallas.supports_delta_rule_by_channel,
      (erase, write),
    )
  supports = functools.partial(takes, q, k, v, *strengths, g, initial_state, chunk_size=chunk_size)
  if use_kernels(impl, supports, sizes):
    tokens = (q, k, v, *(cast(x, jnp.float32) for x in (*strengths, g)))
    return by_kernels(
      kernels, supports, tokens, initial_state, segment_ids, sizes, scale, chunk_size
    )
  dtype, precision = (
    accumulation_dtype(q, k, v, beta, g, erase, write, initial_state),
    product_precision(q, k, v),
  )
  tokens = _delta.DeltaTokens(
    *(cast(x, dtype) for x in (q, k, v, beta if erase is None else erase, write, g))
  )
  state = first_state(initial_state, sizes, dtype)
  o, state = run(
    _delta.rule,
    tokens,
    state,
    segment_ids,
    sizes,
    impl,
    chunk_size,
    precision,
    _shapes.scale_of(scale, sizes),
  )
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
    o [B T HV V] in v.dtype, and the state after the last is_token token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products", 2025,
  arXiv:2502.10297, equation 4.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T R H K"),
    v=(v, "B T R HV V"),
    beta=(beta, "B T R HV"),
    g=(g, "B T HV | B T HV K"),
    initial_state=(initial_state, "B HV K V"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, g=g, beta=beta)
  R = sizes["R"]
  if R == 0:
    raise ValueError(
      "`k` must be [B T R H K] with R of at least 1, the corrections of a token; got R = 0."
    )
  steps = lambda x: lax.collapse(x, 1, 3)
  alone = lambda x, r: steps(
    jnp.pad(x[:, :, None], [(0, 0), (0, 0), (r, R - 1 - r)] + [(0, 0)] * (x.ndim - 2))
  )
  o, state = delta_rule(
    alone(q, R - 1),
    steps(k),
    steps(v),
    steps(beta),
    None if g is None else alone(g, 0),
    scale=scale,
    initial_state=initial_state,
    segment_ids=None if segment_ids is None else jnp.repeat(segment_ids, R, axis=1),
    chunk_size=chunk_size,
    impl=impl,
  )
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
    o [B T HV V] in v.dtype, and the state after the last is_token token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: E. Oja, "A Simplified Neuron Model as a Principal Component Analyzer", 1982, doi:10.1007/BF00275687; as a state of fast
  weights: Irie et al., "Images as Weight Matrices", 2022, arXiv:2210.06184, equation 6.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    beta=(beta, "B T HV"),
    g=(g, "B T HV | B T HV V"),
    initial_state=(initial_state, "B HV K V"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, g=g, beta=beta)
  dtype, precision = accumulation_dtype(q, k, v, beta, g, initial_state), product_precision(q, k, v)
  tokens = _delta.DeltaTokens(
    *(cast(x, dtype) for x in (q, v, k, beta, None, g))
  )  # keys and values exchanged
  state = jnp.swapaxes(first_state(initial_state, sizes, dtype), -1, -2)
  o, state = run(
    _delta.by_rows,
    tokens,
    state,
    segment_ids,
    sizes,
    impl,
    chunk_size,
    precision,
    _shapes.scale_of(scale, sizes),
  )
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
    impl: the form, see above; `"pallas"` is for K up to 256 where all of q, k, v, a and b are bfloat16, else 128.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last is_token token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Peng et al., "RWKV-7 Goose", 2025, arXiv:2503.14456, its state evolution (a = -kappa, b = kappa iclr); Hu et al., "Comba",
  2025, arXiv:2506.02475 (a = p, b = -beta k).
  """
  sizes = _shapes.check(
    q=(q, "B T H K"),
    k=(k, "B T H K"),
    v=(v, "B T HV V"),
    a=(a, "B T H K"),
    b=(b, "B T H K"),
    g=(g, "B T HV | B T HV K"),
    initial_state=(initial_state, "B HV K V"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_not_nan(segment_ids, g=g)
  supports = functools.partial(
    pallas.supports_dplr, q, k, v, a, b, g, initial_state, chunk_size=chunk_size
  )
  if use_kernels(impl, supports, sizes):
    tokens = (q, k, v, a, b, cast(g, jnp.float32))
    return by_kernels(
      pallas.run_dplr, supports, tokens, initial_state, segment_ids, sizes, scale, chunk_size
    )
  dtype, precision = (
    accumulation_dtype(q, k, v, a, b, g, initial_state),
    product_precision(q, k, v, a, b),
  )
  tokens = _dplr.DplrTokens(*(cast(x, dtype) for x in (q, k, v, a, b, g)))
  state = first_state(initial_state, sizes, dtype)
  o, state = run(
    _dplr.rule,
    tokens,
    state,
    segment_ids,
    sizes,
    impl,
    chunk_size,
    precision,
    _shapes.scale_of(scale, sizes),
  )
  return o.astype(v.dtype), state
