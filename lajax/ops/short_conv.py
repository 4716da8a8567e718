"""Short causal depthwise convolution, with its cache."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax import _shapes, pallas
from lajax._meshes import axes_of_letters, on_automatic_axes, spec_for, spec_of
from lajax._numerics import accumulation_dtype
from lajax.ops.run import kernels_compute
from lajax.recurrence.documents import blank_padding


def short_conv(
  x: Float[Array, "B T D"],
  weight: Float[Array, "D W"],
  bias: Float[Array, "D"] | None = None,
  cache: Float[Array, "B W-1 D"] | None = None,
  document_ids: Int[Array, "B T"] | None = None,
  *,
  activation: str | None = "silu",
  impl: str = "auto",
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
  """Causal depthwise convolution over the last W tokens, behind a cache of W - 1 tokens.

      y_t = act(sum_{w < W} weight[:, W - 1 - w] * x_{t - w} + bias)

  Documents do not mix: a tap that would reach into another document reads zero. Padding is passed
  over: the taps run over tokens that are not padding.

  Args:
    x: [B T D], in the dtype of the computation; zeros at padding, which the caller sees to.
    weight: [D W].
    bias: [D]; None for none.
    cache: [B W-1 D], the tokens before the first one, zeros where there were none; None for zeros.
    document_ids: [B T], the document of each token, counted within the call: 0 for the document
      that the cache belongs to, 1, 2, .. for those that begin in this call, -1 for padding. None
      for one document without padding.
    activation: "silu", or None for none.
    impl: "pallas" for one GPU kernel, "auto" for the kernel on an NVIDIA GPU where it takes the
      arrays; "recurrent", "associative" and "chunked" are all shifted products in plain JAX here.

  Returns:
    y [B T D] in x.dtype, zeros at padding; and the cache behind the last token that is not padding,
    in cache.dtype (x.dtype without a cache), zeros where that token's document has fewer tokens.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
    NotImplementedError: impl="pallas", and the kernel does not take the arrays.

  Paper: D. Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models",
  2022, arXiv:2212.14052, section 3.1 (the shift matrix, here with learned weights).
  """
  _shapes.check_given(x=(x, "B T D"), weight=(weight, "D W"))
  sizes = _shapes.check(x=(x, "B T D"), weight=(weight, "D W"), bias=(bias, "D"))
  if sizes.W == 0:
    raise ValueError("`weight` must be [D W] with W of at least 1; got W = 0.")
  reach = jax.ShapeDtypeStruct((sizes.D, sizes.W - 1), weight.dtype)
  _shapes.check(
    x=(x, "B T D"),
    weight=(reach, "D W-1"),
    cache=(cache, "B W-1 D"),
    document_ids=(document_ids, "B T", "int"),
  )
  if activation is not None and not (isinstance(activation, str) and activation == "silu"):
    raise ValueError(
      f"`activation` must be 'silu' or None; got {activation!r}. Apply another one to the outputs."
    )
  past = cache
  if past is None:
    past = jax.ShapeDtypeStruct((sizes.B, sizes.W - 1, sizes.D), x.dtype)
  supports = functools.partial(pallas.supports_short_conv, x, weight, past)
  by_kernel = kernels_compute(impl, supports, x)
  return _convolve(x, weight, bias, cache, document_ids, activation == "silu", by_kernel)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _convolve(x, weight, bias, cache, ids, silu: bool, by_kernel: bool):
  def compute(x, weight, bias, cache, ids):
    past = cache
    if past is None:
      past = jnp.zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]), x.dtype)
    if by_kernel:
      y, rest = pallas.run_short_conv(x, weight, bias, past.astype(x.dtype), ids, silu=silu)
    else:
      taps = functools.partial(_taps, weight=weight, bias=bias, silu=silu)
      shifted = _shifted if ids is None else functools.partial(_shifted_documents, ids=ids)
      y, rest = shifted(x, past.astype(x.dtype), taps)
    y = y if ids is None else blank_padding(y, ids >= 0)
    return y, rest.astype(past.dtype)

  def layouts(x, weight, bias, cache, ids):
    if cache is not None:
      return spec_of(x), spec_of(cache)
    return spec_of(x), spec_for("B W-1 D", axes_of_letters((x, "B T D")))

  return on_automatic_axes(compute, layouts)(x, weight, bias, cache, ids)


def _shifted(x, past, taps):
  """One document without padding."""
  seen = jnp.concatenate([past, x], axis=1)
  return taps(seen, lambda read, w: read), seen[:, x.shape[1] :]


def _shifted_documents(x, past, taps, ids):
  """Moves tokens together, so that each stands right behind those it reads; then back again."""
  (B, T), reach = ids.shape, past.shape[1]
  is_token = ids >= 0
  rank = (
    jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
  )  # of each token among those that are none padding
  rows = jnp.arange(B)[:, None]
  together = lambda a, fill: (
    jnp.full_like(a, fill).at[rows, jnp.where(is_token, rank, T)].set(a, mode="drop")
  )
  seen = jnp.concatenate([past, together(x, 0)], axis=1)
  document = jnp.pad(together(ids, -1), ((0, 0), (reach, 0)))  # the cache belongs to document 0
  same = lambda w: document[:, w : w + T] == document[:, reach:]
  y = taps(seen, lambda read, w: jnp.where(same(w)[..., None], read, jnp.zeros((), read.dtype)))
  y = jnp.take_along_axis(y, jnp.maximum(rank, 0)[..., None], axis=1)
  last = (
    rank[:, -1:] + 1 + jnp.arange(reach, dtype=jnp.int32)[None]
  )  # the cache's length behind the last token, in `seen`
  last_document = jnp.take_along_axis(document, rank[:, -1:] + reach, axis=1)
  rest = jnp.take_along_axis(seen, last[..., None], axis=1)
  belongs = jnp.take_along_axis(document, last, axis=1) == last_document
  return y, jnp.where(belongs[..., None], rest, jnp.zeros((), rest.dtype))


def _taps(seen, mask, weight, bias, silu: bool):
  """Sums W shifted products: on a CPU ten times faster than XLA's grouped convolution."""
  W = weight.shape[1]
  shape = (seen.shape[0], seen.shape[1] - W + 1, seen.shape[2])
  wide = seen.astype(accumulation_dtype(seen, weight))
  spread = lambda one_per_channel: jnp.broadcast_to(one_per_channel.astype(wide.dtype), shape)
  taps = (mask(wide[:, w : w + shape[1]], w) * spread(weight[:, w]) for w in range(W))
  y = functools.reduce(jnp.add, taps)
  y = y if bias is None else y + spread(bias)
  return (jax.nn.silu(y) if silu else y).astype(seen.dtype)
