"""States that are corrected: delta rule and products, Oja's rule, diagonal plus low rank."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax.ops.run import Matrix, Op, call
from lajax.recurrence import families


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
  bound: float | None = None,
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  """Delta rule: the decayed state is corrected at k towards v.

      S'_t = Diag(exp g_t) S_{t-1} ,   o_t = scale S_t^T q_t ,
      S_t = S'_t + k_t (beta_t (v_t - S'_t^T k_t))^T

  With `erase` b and `write` w in the place of beta, channel by channel:
  S_t = S'_t + k_t (w_t v_t - S'_t^T (b_t k_t))^T.

  With beta = 2 and no decay the state is only rotated, so rounding errors stay and add up: in
  float32 they reach 9e-6 of the output after 20,000 tokens in chunks of 64, and 4e-6 in chunks of
  16 or token by token.

  Args:
    q, k: [B T H K]; k is expected at unit length (`lajax.layers` does that); head h serves the
      value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    beta: [B T HV], write strength, in (0, 1), or (0, 2) for negative eigenvalues; None with `erase`
      and `write`.
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    erase, write: [B T HV K] and [B T HV V], in (0, 1).
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token). Kernels take K up to 256 where q, k and v are
      bfloat16, else 128.
    bound: a negative number that no entry of `g` is below, or None if there is no such number. From
      -5 on, "chunked" and "pallas" then take fewer products for decays per channel; "pallas" does
      so with `beta` only. No result depends on it but for rounding. Under jit, a decay far below it
      gives numbers that are not finite.

  Returns:
    o [B T HV V] in v.dtype, and the state behind the last token that is not padding, [B HV K V] in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN, or a decay
      below `bound` (not seen under jit).
    NotImplementedError: the named implementation cannot do this.

  Papers: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (DeltaNet), 2024,
  arXiv:2406.06484, equation 4; Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464,
  equation 10; decay per channel: Kimi Team, "Kimi Linear" (KDA), 2025, arXiv:2510.26692, equation
  1.
  """
  _shapes.check_strengths(beta, erase, write)
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, erase=erase, write=write)
  return call(DELTA_RULE, arrays, scale, initial_state, segment_ids, chunk_size, impl, bound=bound)


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
  """Delta product: the state decays once per token, is corrected R times, and is read once.

      S_t^0 = Diag(exp g_t) S_{t-1} ,   S_t = S_t^R ,   o_t = scale S_t^T q_t ,
      S_t^r = S_t^{r-1} + k_t^r (beta_t^r (v_t^r - S_t^{r-1}^T k_t^r))^T for r = 1 .. R

  So its transition is a product of R Householder-like factors. Computed as `delta_rule` on T R
  tokens.

  Args:
    q: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    k: [B T R H K], expected at unit length.
    v: [B T R HV V].
    beta: [B T R HV], write strengths, in (0, 2).
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: delta steps in a chunk ("chunked"), of which a token has R; None for 64, or 32 with
      decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token).

  Returns:
    o [B T HV V] in v.dtype, and the state behind the last token that is not padding, [B HV K V] in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Paper: Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
  Products", 2025, arXiv:2502.10297, equation 4.
  """
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g)
  return call(DELTA_PRODUCT, arrays, scale, initial_state, segment_ids, chunk_size, impl)


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
  """Oja's rule with decay on the value side: a delta rule of the transposed state.

      S'_t = S_{t-1} Diag(exp g_t) ,   S_t = S'_t + (k_t - S'_t v_t) (beta_t v_t)^T ,
      o_t = scale S_t^T q_t

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V], expected at unit length.
    beta: [B T HV], write strength, in (0, 1).
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV V] per channel of the
      value.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), or "auto"
      ("chunked"; "recurrent" for one token). "pallas" (GPU kernels) does not exist for this op.

  Returns:
    o [B T HV V] in v.dtype, and the state behind the last token that is not padding, [B HV K V] in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Papers: E. Oja, "A Simplified Neuron Model as a Principal Component Analyzer", 1982,
  doi:10.1007/BF00275687; as a state of fast weights: Irie et al., "Images as Weight Matrices",
  2022, arXiv:2210.06184, equation 6.
  """
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g)
  return call(GATED_OJA, arrays, scale, initial_state, segment_ids, chunk_size, impl)


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
    q, k, a, b: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H. A state
      stays bounded if Diag(exp g) + b a^T lengthens no vector; nothing checks that.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] per head, [B T HV K] per channel of the
      key.
    scale: factor of the output, a number; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding, which reads,
      writes and decays nothing and gives 0. The state is zero where the id changes; `initial_state`
      belongs to the first document. `lajax.segment_ids` makes ids of lengths or masks.
    chunk_size: tokens in a chunk ("chunked"), raised to a power of two of at least 16; None for 64,
      or 32 with decays per channel.
    impl: implementation: "recurrent" (token by token, the equation as printed), "associative"
      (`jax.lax.associative_scan` over tokens), "chunked" (matrix products inside chunks), "pallas"
      (GPU kernels), or "auto" (kernels on an NVIDIA GPU where they take the arguments, else
      "chunked", or "recurrent" for one token). Kernels take K up to 256 where q, k, v, a and b are
      bfloat16, else 128.

  Returns:
    o [B T HV V] in v.dtype, and the state behind the last token that is not padding, [B HV K V] in
    float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value; a gate holds NaN (not seen
      under jit).
    NotImplementedError: the named implementation cannot do this.

  Papers: Peng et al., "RWKV-7 Goose", 2025, arXiv:2503.14456, its state evolution (a = -kappa,
  b = kappa iclr); Hu et al., "Comba", 2025, arXiv:2506.02475 (a = p, b = -beta k).
  """
  arrays = dict(q=q, k=k, v=v, a=a, b=b, g=g)
  return call(DPLR, arrays, scale, initial_state, segment_ids, chunk_size, impl)


# --- rows ---


def _kernels(x, state, document, scale: float, bounded: bool = False):
  """By one strength per token, or by strengths per channel, where a bound changes nothing."""
  if x.write is None:
    return pallas.run_delta_rule(x.q, x.k, x.v, x.erase, x.g, state, document, scale, bounded)
  strengths = x.erase, x.write
  return pallas.run_delta_rule_by_channel(x.q, x.k, x.v, *strengths, x.g, state, document, scale)


def _supports(x, state, chunk_size: int | None) -> str | None:
  arrays = x.q, x.k, x.v, x.erase
  if x.write is None:
    return pallas.supports_delta_rule(*arrays, x.g, state, chunk_size=chunk_size)
  return pallas.supports_delta_rule_by_channel(*arrays, x.write, x.g, state, chunk_size=chunk_size)


def _decode(x, state, scale: float):
  v = x.v if x.write is None else x.write * x.v.astype(jnp.float32)
  state, o = pallas.decode_delta_rule(state, x.q, x.k, v, x.erase, x.g, scale)
  return state, o.astype(x.v.dtype)


def _dplr_kernels(x, state, document, scale: float):
  return pallas.run_dplr(x.q, x.k, x.v, x.a, x.b, x.g, state, document, scale)


def _dplr_supports(x, state, chunk_size: int | None) -> str | None:
  return pallas.supports_dplr(x.q, x.k, x.v, x.a, x.b, x.g, state, chunk_size=chunk_size)


def _dplr_decode(x, state, scale: float):
  return pallas.decode_dplr(state, x.q, x.k, x.v, x.a, x.b, x.g, scale)


CORRECTED_KERNELS = {"kernels": _kernels, "supports": _supports, "decode": _decode}
DELTA_RULE = Op(family=families.DELTA_RULE, **CORRECTED_KERNELS)
DELTA_PRODUCT = Op(family=families.DELTA_PRODUCT, **CORRECTED_KERNELS)
GATED_OJA = Op(family=families.GATED_OJA)
DPLR = Op(family=families.DPLR, kernels=_dplr_kernels, supports=_dplr_supports, decode=_dplr_decode)
