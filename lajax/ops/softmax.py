"""Softmax attention."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax._numerics import product_precision
from lajax.ops.run import refuse, use_kernels, without_padding
from lajax.recurrence import attention as _softmax
from lajax.recurrence.documents import blank_padding, packing

DIRECT = 512  # tokens up to which the matrix of scores is made whole


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
      a tree. "chunked": the same, one block after the other. "pallas": the same by kernels for GPUs. "auto": on
      NVIDIA GPUs cuDNN's where it has the options, else the kernels; elsewhere `jax.nn.dot_product_attention` for short
      sequences where it has the options, else chunked.

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
    q=(q, "B T H K"),
    k=(k, "B T HK K"),
    v=(v, "B T HK V"),
    sink=(sink, "H"),
    log_forget=(log_forget, "B T H"),
    segment_ids=(segment_ids, "B T", "int"),
  )
  _shapes.check_multiple("HK", "H", sizes, ("`k` and `v`", "`q`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("window", window)
  _shapes.check_not_nan(segment_ids, log_forget=log_forget)
  if log_forget is not None and not causal:
    raise ValueError(
      "`log_forget` needs causal=True: a gate stands between a token and those before it; got causal=False."
    )
  factor = _shapes.scale_of(scale, sizes)
  supports = functools.partial(pallas.supports_attention, q, k, v, sink, log_forget)
  kernels = use_kernels(impl, supports, sizes)
  if kernels:
    refuse(supports())
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
  if isinstance(scale, Tracer):
    raise ValueError(
      "`scale` must be a number known when the function is traced; got a traced array. Multiply `q` by it."
    )
  scale = float(factor)
  if (
    kernels
    and impl == "auto"
    and window is None
    and sink is None
    and segment_ids is None
    and _cudnn_takes(q, k, v)
  ):
    return jax.nn.dot_product_attention(
      q, k, v, scale=scale, is_causal=causal, implementation="cudnn"
    )
  if kernels:
    return _by_kernels(q, k, v, sink, segment_ids, causal, window, scale)
  return _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl)


def _cudnn_takes(q, k, v) -> bool:
  """Whether XLA's own fused attention on NVIDIA GPUs does: half precision, one width of at most 128, a multiple of 8."""
  half = q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[-1] == v.shape[-1] <= 128 and q.shape[-1] % 8 == 0


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "impl"))
def _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl):
  B, T = q.shape[:2]
  position, document, is_token = (
    jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)),
    jnp.zeros((B, T), jnp.int32),
    None,
  )
  if segment_ids is not None:
    run, is_token = packing(segment_ids)
    position, document = jnp.cumsum(is_token, axis=1, dtype=jnp.int32), jnp.where(is_token, run, -1)
    q, k, v, log_forget = blank_padding((q, k, v, log_forget), is_token)
  alike_widths = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype
  plain = sink is None and log_forget is None and alike_widths and q.dtype != jnp.float64
  if impl == "auto" and plain and T <= DIRECT:
    places = _softmax.Where(position, document)
    mask = None
    if segment_ids is not None or window is not None:
      mask = _softmax.visible(places, places, causal, window)[:, None]
    with jax.default_matmul_precision(
      "default" if product_precision(q, k, v) == lax.Precision.DEFAULT else "highest"
    ):
      o = jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=causal and mask is None
      )
    return without_padding(o, is_token)
  return _softmax.attend(
    q,
    k,
    v,
    q_positions=position,
    k_positions=position,
    q_segments=document,
    k_segments=document,
    causal=causal,
    window=window,
    sink=sink,
    log_forget=log_forget,
    scale=scale,
    impl="chunked" if impl == "auto" else impl,
  )


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale"))
def _by_kernels(q, k, v, sink, segment_ids, causal, window, scale):
  document = is_token = None
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    q, k, v = blank_padding((q, k, v), is_token)
  return pallas.run_attention(
    q, k, v, sink, document, is_token, causal=causal, window=window, scale=scale
  )
