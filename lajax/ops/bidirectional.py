"""Linear attention that is not causal: every token reads all tokens of its document."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lajax import _shapes
from lajax._meshes import laid_out, on_automatic_axes, spec_of
from lajax._numerics import accumulation_dtype, product_precision
from lajax.ops.linear import linear_attention
from lajax.recurrence.documents import blank_padding, packing
from lajax.recurrence.linear_attention import divided, with_ones

NORMALIZATIONS = ("softmax", "scaling")


def bidirectional_linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  *,
  eps: float = 1e-10,
  segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T HV V"]:
  """Normalised linear attention over the whole document, with the features already applied.

      o_i = sum_j v_j (k_j . q_i) / (sum_j k_j . q_i + eps) ,   j over all tokens of the document of
      i

  Time and memory are linear in T, whatever the documents: each token reads the sum up to itself and
  the sum behind itself.

  Args:
    q, k: [B T H K], features that should not be negative; head h serves the value heads
      n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    eps: added to the denominator, a number of at least 0. A token that reads nothing, with an eps
      of 0, has the output 0.
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding. Documents do not
      read each other, padding is read by no token, and its output is 0. See `lajax.segment_ids`.

  Returns:
    o [B T HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equation 5.
  """
  eps = _shapes.check_not_negative("eps", eps)
  _check(q, k, v, segment_ids)
  return _over_tokens(q, k, v, _shapes.check_ids(segment_ids), "normalized", eps)


def efficient_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  *,
  normalization: str = "softmax",
  segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T HV V"]:
  """Efficient attention: queries read a summary of the whole document, whose K rows are averages of
  values.

      G = rho_k(K)^T V ,   O = rho_q(Q) G

  "scaling": rho(X) = X / sqrt n in a document of n tokens, so that O = Q K^T V / n. "softmax":
  rho_q is a softmax over the K channels of a query, rho_k one over the n tokens of the document,
  for each channel.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    normalization: "softmax" or "scaling".
    segment_ids: [B T] integers, the document of each token; an id < 0 is padding. Documents do not
      read each other, padding is read by no token and not counted in n, and its output is 0. See
      `lajax.segment_ids`.

  Returns:
    o [B T HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.

  Paper: Z. Shen et al., "Efficient Attention: Attention with Linear Complexities", 2018,
  arXiv:1812.01243, equations 3 to 6.
  """
  _shapes.check_option("normalization", normalization, NORMALIZATIONS)
  _check(q, k, v, segment_ids)
  return _over_tokens(q, k, v, _shapes.check_ids(segment_ids), normalization)


def document_maximum(
  x: Float[Array, "B T *D"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T *D"]:
  """Returns the largest value of each channel over the document of each token; 0 for padding."""
  ids = _shapes.check_ids(segment_ids)
  return _document_maximum(x, ids)


@jax.jit
def _document_maximum(x, segment_ids):
  def compute(x, segment_ids):
    if segment_ids is None:
      return jnp.broadcast_to(x.max(axis=1, keepdims=True), x.shape)
    documents = PackedDocuments(*packing(segment_ids))
    return documents.blank(documents.maximum(x))

  return on_automatic_axes(compute, lambda x, segment_ids: spec_of(x))(x, segment_ids)


class PackedDocuments(NamedTuple):
  """Documents of the tokens of each row: a change of id begins a new one."""

  document: Int[Array, "B T"]
  is_token: Bool[Array, "B T"]  # False for padding

  def blank(self, arrays):
    """Replaces padding by zeros."""
    return blank_padding(arrays, self.is_token)

  def reduce(self, reduction: Callable, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    """Returns a sum or maximum over each document, at every token of it."""
    over_documents = lambda x, document: reduction(
      x, document, num_segments=len(x), indices_are_sorted=True
    )[document]
    return jax.vmap(over_documents)(x, self.document)

  def sum(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    return self.reduce(jax.ops.segment_sum, x)

  def maximum(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    """Returns the maximum over tokens; -inf for a document that has none."""
    return self.reduce(jax.ops.segment_max, jnp.where(_mask_of(self.is_token, x), x, -jnp.inf))


def _mask_of(mask: Bool[Array, "B T"], x: Array) -> Array:
  return mask.reshape(mask.shape + (1,) * (x.ndim - 2))


def _check(q, k, v, segment_ids) -> None:
  arrays = dict(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"))
  _shapes.check_given(**arrays)
  sizes = _shapes.check(**arrays, segment_ids=(segment_ids, "B T", "int"))
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))


@functools.partial(jax.jit, static_argnums=(4, 5))
@laid_out("B T HV V", q="B T H K", k="B T H K", v="B T HV V", segment_ids="B T")
def _over_tokens(q, k, v, segment_ids, kind: str, eps: float = 0.0) -> Float[Array, "B T HV V"]:
  """Reads by one of the equations on wide arrays with zeros at padding; blanks the output there."""
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros_like(v)
  read = {
    "normalized": functools.partial(_read_normalized, eps=eps),
    "softmax": _read_softmax,
    "scaling": _read_scaled,
  }[kind]
  dtype, precision = accumulation_dtype(q, k, v), product_precision(q, k, v)
  documents = None if segment_ids is None else PackedDocuments(*packing(segment_ids))
  given = (q, k, v) if documents is None else documents.blank((q, k, v))
  o = read(*(x.astype(dtype) for x in given), documents, precision)
  return (o if documents is None else documents.blank(o)).astype(v.dtype)


# --- what tokens read ---


def _read_normalized(q, k, v, documents: PackedDocuments | None, precision, eps: float):
  """Reads values less an average of their document, and adds the average behind the division.

  Where the weights of a token hardly depend on its query (K = 1), the gradients of numerator and
  denominator cancel to eps / denominator. Values about an average leave nothing to cancel. The
  output does not depend on the average, so it needs no derivative.
  """
  center = lax.stop_gradient(_average(jnp.abs(k), v, documents))
  read = _read_all(q, k, with_ones(v - center), documents, precision)
  return divided(read, eps) + center * _share(read[..., -1:], eps)


def _average(weight, v, documents: PackedDocuments | None) -> Float[Array, "B T HV V"]:
  """Returns the average value of each token's document, weighted by its key's channels."""
  weight = jnp.repeat(weight.sum(-1), v.shape[2] // weight.shape[2], axis=2)[..., None]
  total = lambda x: x.sum(1, keepdims=True) if documents is None else documents.sum(x)
  size = total(weight)
  return jnp.broadcast_to(total(weight * v) / jnp.where(size == 0, 1, size), v.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _share(denominator, eps: float):
  """Returns denominator / (denominator + eps), whose derivative is no difference; 0 for 0 / 0."""
  whole = denominator + eps
  return denominator / jnp.where(whole == 0, 1, whole)


@_share.defjvp
def _share_jvp(eps, primals, tangents):
  (denominator,), (tangent,) = primals, tangents
  whole = denominator + eps
  return _share(denominator, eps), tangent * eps / jnp.where(whole == 0, 1, whole) ** 2


def _read_softmax(q, k, v, documents: PackedDocuments | None, precision):
  q = jax.nn.softmax(q, axis=-1)
  if documents is None:
    return _read_all(q, jax.nn.softmax(k, axis=1), v, documents, precision)
  is_token = _mask_of(documents.is_token, k)
  top = documents.maximum(lax.stop_gradient(k))
  e = jnp.exp(jnp.where(is_token, k - top, -jnp.inf))
  total = documents.sum(e)
  return _read_all(q, e / jnp.where(is_token, total, 1), v, documents, precision)


def _read_scaled(q, k, v, documents: PackedDocuments | None, precision):
  o = _read_all(q, k, v, documents, precision)
  if documents is None:
    return o / q.shape[1]
  n = documents.sum(documents.is_token.astype(o.dtype))
  return o / jnp.maximum(n, 1)[..., None, None]


def _read_all(q, k, v, documents: PackedDocuments | None, precision) -> Float[Array, "B T HV V"]:
  """Returns sum_j v_j (k_j . q_i) over all j of the document of i; padding must be zeros."""
  if documents is None:
    B, T, H, _ = q.shape
    grouped = v.reshape(B, T, H, -1, v.shape[-1])
    G = jnp.einsum("bthk,bthgv->bhgkv", k, grouped, precision=precision)
    return jnp.einsum("bthk,bhgkv->bthgv", q, G, precision=precision).reshape(v.shape)
  if k.shape[-1] == 1:
    # All tokens of a document read the same sum. As two sums it would be a difference, where the
    # values are about their average; one per token is no larger than the values.
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    return q * documents.sum(k * v)
  # Two sums without a token in common, up to a token and behind it: nothing is subtracted or
  # cancels.
  document = documents.document
  upto, _ = linear_attention(q, k, v, scale=1.0, segment_ids=document)
  same = jnp.pad(document[:, 1:] == document[:, :-1], ((0, 0), (0, 1)))
  # Both are selected: a key of zeros would not keep out NaN of a value, since 0 times NaN is NaN.
  following = lambda x: jnp.where(
    same[..., None, None], jnp.roll(x, -1, axis=1), jnp.zeros((), x.dtype)
  )
  flipped = (jnp.flip(x, axis=1) for x in (q, following(k), following(v)))
  behind, _ = linear_attention(*flipped, scale=1.0, segment_ids=jnp.flip(document, axis=1))
  return upto + jnp.flip(behind, axis=1)
