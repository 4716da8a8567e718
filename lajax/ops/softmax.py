"""Softmax attention."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from lajax import _shapes, pallas
from lajax._meshes import laid_out
from lajax._numerics import product_precision, promotion_is_strict
from lajax.ops.run import refuse, use_kernels
from lajax.recurrence import attention as softmax
from lajax.recurrence.documents import blank_padding, packing, without_padding

WHOLE = 512  # tokens up to which the matrix of scores is made whole


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
  """Softmax attention, exactly; the chunked implementation takes memory linear in T.

      o_i = sum_j p_ij v_j ,   p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')) ,
      s_ij = scale q_i . k_j + sum of log_forget_l over j < l <= i

  over the tokens j that i reads: j <= i if causal, i - j < window, the same document. A token that
  reads a key, a value or a gate that is not finite gives NaN, and no other token does.

  Args:
    q: [B T H K].
    k, v: [B T HK K], [B T HK V], where HK divides H; head h of q reads head h // (H / HK).
    causal: whether a token reads only itself and tokens before it.
    window: how many tokens, itself included, a token reads at most (on either side, if not
      causal); None for all.
    sink: [H], one logit per head that takes part in the denominator alone; None for none.
    log_forget: [B T H], log forget gates (natural), <= 0, not scaled. Needs `causal`. None for
      none.
    scale: factor of the scores; None for K^-1/2.
    segment_ids: [B T], the document of each token. Documents do not read each other. A token of
      id < 0 is padding: no token reads it, its output is 0, and windows do not count it.
    impl: "recurrent": one query after the other. "associative": softmax over blocks of keys,
      merged as a tree. "chunked": softmax over blocks of keys, one block after the other.
      "pallas": GPU kernels. "auto": on NVIDIA GPUs cuDNN's attention where it has the options,
      else the kernels; elsewhere `jax.nn.dot_product_attention` for short sequences where it has
      the options, else chunked.

  Returns:
    o [B T H V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds
      NaN.
    NotImplementedError: the named implementation does not exist for these arguments.

  Papers: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1; Dao et
  al., "FlashAttention", 2022, arXiv:2205.14135, algorithm 1; sink: Xiao et al., 2023,
  arXiv:2309.17453; log_forget: Lin et al., "Forgetting Transformer", 2025, arXiv:2503.02130,
  equation 3.
  """
  arrays = {"q": (q, "B T H K"), "k": (k, "B T HK K"), "v": (v, "B T HK V")}
  _shapes.check_given(**arrays)
  sizes = _shapes.check(
    **arrays,
    sink=(sink, "H"),
    log_forget=(log_forget, "B T H"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_multiple("HK", "H", sizes, ("`k` and `v`", "`q`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  causal, window = softmax.check_reach(causal, window, log_forget)
  ids = _shapes.check_ids(segment_ids)
  _shapes.check_not_nan(ids, log_forget=log_forget)
  softmax.check_lengths(sizes, "T")
  if isinstance(scale, Tracer):
    raise ValueError(
      "`scale` must be a number known when the function is traced; got a traced array. Multiply `q`"
      " by it."
    )
  options = Options(causal, window, float(_shapes.scale_of(scale, sizes)), impl)
  supports = functools.partial(pallas.supports_attention, q, k, v, sink, log_forget)
  kernels = use_kernels(impl, supports, sizes)
  if kernels:
    refuse(supports())
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
  bare = window is None and sink is None and ids is None
  if not kernels:
    compute = _plain
  elif impl == "auto" and bare and _cudnn_takes(q, k, v):
    compute = _by_cudnn
  else:
    compute = _by_kernels
  return _run(q, k, v, sink, log_forget, ids, compute, options)


class Options(NamedTuple):
  """Holds the static settings of a call: each new one costs a compilation."""

  causal: bool
  window: int | None
  scale: float
  impl: str


@functools.partial(jax.jit, static_argnums=(6, 7))
@laid_out(
  "B T H V",
  q="B T H K",
  k="B T HK K",
  v="B T HK V",
  sink="H",
  log_forget="B T H",
  segment_ids="B T",
)
def _run(q, k, v, sink, log_forget, segment_ids, compute, options: Options):
  """All array work of a call."""
  return compute(options, q, k, v, sink, log_forget, segment_ids)


def _plain(options: Options, q, k, v, sink, log_forget, segment_ids):
  """Attention in plain JAX."""
  place, is_token = _placement(q, segment_ids)
  if is_token is not None:
    q, k, v, log_forget = blank_padding((q, k, v, log_forget), is_token)
  one_type = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype
  # JAX's own attention has no gradient in bfloat16 where promotion is strict.
  taken = not (q.dtype == jnp.float64 or (q.dtype == jnp.bfloat16 and promotion_is_strict()))
  bare = sink is None and log_forget is None and one_type and taken
  if options.impl == "auto" and bare and q.shape[1] <= WHOLE:
    return without_padding(_whole(q, k, v, place, is_token is not None, options), is_token)
  return softmax.attend(
    q,
    k,
    v,
    q_positions=place.position,
    k_positions=place.position,
    q_segments=place.document,
    k_segments=place.document,
    sink=sink,
    log_forget=log_forget,
    causal=options.causal,
    window=options.window,
    scale=options.scale,
    impl="chunked" if options.impl == "auto" else options.impl,
  )


def _placement(q, segment_ids) -> tuple[softmax.Placement, Bool[Array, "B T"] | None]:
  """Places of the tokens, and the mask of those that are not padding (None: all are tokens)."""
  B, T = q.shape[:2]
  if segment_ids is None:
    position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return softmax.Placement(position, jnp.zeros((B, T), jnp.int32)), None
  document, is_token = packing(segment_ids)
  position = jnp.cumsum(is_token, axis=1, dtype=jnp.int32)
  return softmax.Placement(position, jnp.where(is_token, document, -1)), is_token


def _whole(q, k, v, place: softmax.Placement, packed: bool, options: Options):
  """Attention by `jax.nn.dot_product_attention`, with the whole matrix of scores."""
  reads = softmax.visible(place, place, options.causal, options.window)
  masked = packed or options.window is not None
  queries = q
  (q, q_finite), (k, k_finite), (v, v_finite) = map(softmax.finite_rows, (q, k, v))
  half, dtype = product_precision(q, k, v) == lax.Precision.DEFAULT, v.dtype
  if dtype == jnp.float16:  # CPUs have no product of float16 that sums in float32
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  precision = jax.default_matmul_precision("default" if half else "highest")
  with precision, jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes dtypes
    o = jax.nn.dot_product_attention(
      q,
      k,
      v,
      mask=reads[:, None] if masked else None,
      scale=options.scale,
      is_causal=options.causal and not masked,
    )
  B, T, H, _ = q.shape
  HK = k.shape[2]
  finite = softmax.reads_finite(
    reads, q_finite.reshape(B, T, HK, H // HK), k_finite & v_finite
  )  # [B HK G T]
  finite = jnp.moveaxis(finite, -1, 1).reshape(B, T, H, 1)
  return softmax.isolate_cotangent(jnp.where(finite, o, jnp.nan).astype(dtype), queries)


def _cudnn_takes(q, k, v) -> bool:
  """Tells if cuDNN's attention takes them: half precision, one width <= 128, a multiple of 8."""
  half = q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[-1] == v.shape[-1] <= 128 and q.shape[-1] % 8 == 0


def _by_cudnn(options: Options, q, k, v, *_):
  """Attention by cuDNN."""
  return jax.nn.dot_product_attention(
    q, k, v, scale=options.scale, is_causal=options.causal, implementation="cudnn"
  )


def _by_kernels(options: Options, q, k, v, sink, _, segment_ids):
  """Attention by this library's kernels, which have no forget gate."""
  document = is_token = None
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    q, k, v = blank_padding((q, k, v), is_token)
  causal, window, scale = options.causal, options.window, options.scale
  return pallas.run_attention(
    q, k, v, sink, document, is_token, causal=causal, window=window, scale=scale
  )
