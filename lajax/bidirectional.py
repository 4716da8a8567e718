"""Linear attention that is not causal: every token reads all tokens of its document. The conventions are those of `lajax.ops`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lajax import _shapes
from lajax._numerics import accumulation_dtype, product_precision
from lajax.ops import linear_attention
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

      o_i = sum_j v_j (k_j . q_i) / (sum_j k_j . q_i + eps) ,   j over all tokens of the document of i

  Time and memory are linear in T, whatever the documents: each token reads the sum up to itself and the sum behind itself.

  Args:
    q, k: [B T H K], features that should not be negative; head h serves the value heads n h .. h n + n - 1 where HV = n H.
    v: [B T HV V].
    eps: added to the denominator, at least 0. A token that reads nothing, with an eps of 0, gives 0.
    segment_ids: [B T], the document of each token: documents do not read each other. A token of id < 0 is padding: nobody
      reads it, and its output is 0.

  Returns:
    o [B T HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equation 5.
  """
  sizes = _check(q, k, v, segment_ids)
  _shapes.check_not_negative("eps", eps)
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:2], sizes["HV"], sizes["V"]), v.dtype)
  return _normalized(q, k, v, segment_ids, eps)


def efficient_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  *,
  normalization: str = "softmax",
  segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T HV V"]:
  """Efficient attention: queries read a summary of the whole document, K by V, each row of which is an average of values.

      G = rho_k(K)^T V ,   O = rho_q(Q) G

  "scaling": rho(X) = X / sqrt n in a document of n tokens, so that O = Q K^T V / n. "softmax": rho_q is a softmax over the
  K channels of a query, rho_k one over the n tokens of the document, for each channel.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    normalization: "softmax" or "scaling".
    segment_ids: [B T], the document of each token: documents do not read each other. A token of id < 0 is padding: nobody
      reads it, it is not counted in n, and its output is 0.

  Returns:
    o [B T HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.

  Paper: Z. Shen et al., "Efficient Attention: Attention with Linear Complexities", 2018, arXiv:1812.01243, equations 3 to 6.
  """
  sizes = _check(q, k, v, segment_ids)
  _shapes.check_option("normalization", normalization, NORMALIZATIONS)
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:2], sizes["HV"], sizes["V"]), v.dtype)
  return _efficient(q, k, v, segment_ids, normalization)


def document_maximum(
  x: Float[Array, "B T *D"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T *D"]:
  """The largest value of each channel over the document of each token; 0 for padding, which takes no part."""
  if segment_ids is None:
    return jnp.broadcast_to(x.max(axis=1, keepdims=True), x.shape)
  documents = PackedDocuments(*packing(segment_ids))
  return documents.blank(documents.maximum(x))


class PackedDocuments(NamedTuple):
  """Packed documents: a change of id begins a new document."""

  document: Int[Array, "B T"]
  is_token: Bool[Array, "B T"]  # not padding

  def blank(self, arrays):
    return blank_padding(arrays, self.is_token)

  def reduce(self, reduction: Callable, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    """A sum or maximum over each document, at every token of it."""
    over_run = lambda x, document: reduction(
      x, document, num_segments=len(x), indices_are_sorted=True
    )[document]
    return jax.vmap(over_run)(x, self.document)

  def maximum(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
    """Over the tokens; -inf where a document has none."""
    return self.reduce(jax.ops.segment_max, jnp.where(_alike(self.is_token, x), x, -jnp.inf))


def _alike(mask: Bool[Array, "B T"], x: Array) -> Array:
  return mask.reshape(mask.shape + (1,) * (x.ndim - 2))


def _check(q, k, v, segment_ids) -> dict[str, int]:
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), segment_ids=(segment_ids, "B T", "int")
  )
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  return sizes


@jax.jit
def _normalized(q, k, v, segment_ids, eps):
  def read(q, k, v, documents, precision):
    return divided(_read_all(q, k, with_ones(v), documents, precision), eps)

  return _over_real_tokens(read, q, k, v, segment_ids)


@functools.partial(jax.jit, static_argnames="normalization")
def _efficient(q, k, v, segment_ids, normalization):
  read = {"softmax": _read_softmax, "scaling": _read_scaled}[normalization]
  return _over_real_tokens(read, q, k, v, segment_ids)


def _over_real_tokens(read: Callable, q, k, v, segment_ids) -> Float[Array, "B T HV V"]:
  """Calls `read` on wide arrays with zeros in the padding; blanks its output there."""
  dtype, precision = accumulation_dtype(q, k, v), product_precision(q, k, v)
  documents = None if segment_ids is None else PackedDocuments(*packing(segment_ids))
  given = (q, k, v) if documents is None else documents.blank((q, k, v))
  o = read(*(x.astype(dtype) for x in given), documents, precision)
  return (o if documents is None else documents.blank(o)).astype(v.dtype)


def _read_softmax(q, k, v, documents: PackedDocuments | None, precision):
  q = jax.nn.softmax(q, axis=-1)
  if documents is None:
    return _read_all(q, jax.nn.softmax(k, axis=1), v, documents, precision)
  is_token = _alike(documents.is_token, k)
  top = documents.maximum(jax.lax.stop_gradient(k))
  e = jnp.exp(jnp.where(is_token, k - top, -jnp.inf))
  total = documents.reduce(jax.ops.segment_sum, e)
  return _read_all(q, e / jnp.where(is_token, total, 1), v, documents, precision)


def _read_scaled(q, k, v, documents: PackedDocuments | None, precision):
  o = _read_all(q, k, v, documents, precision)
  if documents is None:
    return o / q.shape[1]
  n = documents.reduce(jax.ops.segment_sum, documents.is_token.astype(o.dtype))
  return o / jnp.maximum(n, 1)[..., None, None]


def _read_all(q, k, v, documents: PackedDocuments | None, precision) -> Float[Array, "B T HV V"]:
  """sum_j v_j (k_j . q_i) over all j of the document of i; padding must be blank."""
  if documents is None:
    B, T, H, _ = q.shape
    grouped = v.reshape(B, T, H, -1, v.shape[-1])
    G = jnp.einsum("bthk,bthgv->bhgkv", k, grouped, precision=precision)
    return jnp.einsum("bthk,bhgkv->bthgv", q, G, precision=precision).reshape(v.shape)
  # Two sums without a token in common, up to a token and behind it: nothing is subtracted, so nothing cancels.
  document = documents.document
  upto, _ = linear_attention(q, k, v, scale=1.0, segment_ids=document)
  same_run = jnp.pad(document[:, 1:] == document[:, :-1], ((0, 0), (0, 1)))
  next_k = jnp.where(same_run[..., None, None], jnp.roll(k, -1, axis=1), 0)
  flipped = (jnp.flip(x, axis=1) for x in (q, next_k, jnp.roll(v, -1, axis=1)))
  behind, _ = linear_attention(*flipped, scale=1.0, segment_ids=jnp.flip(document, axis=1))
  return upto + jnp.flip(behind, axis=1)
