"""Softmax attention of one query per row over a cache, as decoding needs it.

The cache is read where it stands: in blocks, each cut out once, and only those with a key that a
query reads. Nothing of the cache's size is made.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from lajax._meshes import axes_of_letters, on_automatic_axes, spec_for
from lajax._numerics import accumulation_dtype, product_precision, vary_like
from lajax.recurrence.attention import (
  BLOCK,
  Partial,
  Placement,
  attend,
  before_any_key,
  finish,
  finite_rows,
  in_one_dtype,
  merge,
  over_queries,
  reads_finite,
  softmax_weights,
  visible,
)

MOST_JOINED = 4  # key heads; with 16 of 96 channels both products take equally long


class _Inputs(NamedTuple):
  """Arrays of a call."""

  q: Float[Array, "B 1 H K"]
  keys: tuple[Float[Array, "B S HK Kn"], ...]
  v: Float[Array, "B S HK V"] | None  # None: the first of `keys`
  sink: Float[Array, "H"] | None
  query_place: Placement  # [B 1]
  key_place: Placement  # [B S]


def attend_one(
  q: Float[Array, "B 1 H K"],
  keys: tuple[Float[Array, "B S HK Kn"], ...],
  v: Float[Array, "B S HK V"] | None,
  *,
  q_positions: Int[Array, "B 1"],
  k_positions: Int[Array, "B S"],
  q_segments: Int[Array, "B 1"],
  k_segments: Int[Array, "B S"],
  window: int | None = None,
  sink: Float[Array, "H"] | None = None,
  scale: float | None = None,
) -> Float[Array, "B 1 H V"]:
  """Returns `attend` of one query per row, causal, with the derivatives of `attend`.

      o = attend(q, k, v, ...) ,  k = the arrays of `keys`, joined along their channels

  Args:
    q: [B 1 H K].
    keys: arrays [B S HK Kn] whose channels together are the K channels of a key. Apart, so that
      joining them does not copy a cache.
    v: [B S HK V]; None for the first of `keys`, which is then read once.
    q_positions, k_positions, q_segments, k_segments: as in `attend`.
    window, sink, scale: as in `attend`.

  Returns:
    o [B 1 H V] in the dtype of the values.
  """
  places = Placement(q_positions, q_segments), Placement(k_positions, k_segments)
  return _attend_one(_Inputs(q, keys, v, sink, *places), window, scale)


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def _attend_one(inputs: _Inputs, window: int | None, scale: float | None):
  options = {"window": window, "scale": scale}

  @jax.custom_jvp
  def f(inputs: _Inputs):
    return _read_blocks(inputs, **options)

  @f.defjvp
  def f_jvp(primals, tangents):
    return jax.jvp(functools.partial(_attended, **options), primals, tangents)

  def specs(inputs: _Inputs):
    keys = [(k, "B S HK K") for k in inputs.keys]
    values = inputs.keys[0] if inputs.v is None else inputs.v
    arrays = [(inputs.q, "B T H K"), *keys, (values, "B S HK V"), (inputs.sink, "H")]
    return spec_for("B T H V", axes_of_letters(*arrays))

  return on_automatic_axes(f, specs)(inputs)


def _attended(inputs: _Inputs, window: int | None, scale: float | None):
  queries, keys = inputs.query_place, inputs.key_place
  return attend(
    inputs.q,
    jnp.concatenate(inputs.keys, axis=-1),
    inputs.keys[0] if inputs.v is None else inputs.v,
    q_positions=queries.position,
    k_positions=keys.position,
    q_segments=queries.document,
    k_segments=keys.document,
    window=window,
    sink=inputs.sink,
    scale=scale,
  )


def _read_blocks(inputs: _Inputs, window: int | None, scale: float | None):
  q, keys = inputs.q, inputs.keys
  caches = keys if inputs.v is None else (*keys, inputs.v)
  v = keys[0] if inputs.v is None else inputs.v
  dtype = accumulation_dtype(q, *caches, inputs.sink)
  precision = product_precision(q, *caches)
  (B, _, H, K), (_, S, HK, V) = q.shape, v.shape
  G = H // HK
  query_place, key_place = in_one_dtype(inputs.query_place, inputs.key_place)
  factor = jnp.asarray(K**-0.5 if scale is None else scale, dtype)
  scaled, q_finite = finite_rows((q.astype(dtype) * factor).reshape(B, 1, HK, G, K))
  widths = np.cumsum([k.shape[-1] for k in keys])
  queries = [
    _over_key_heads(part[:, 0])
    for part in jnp.split(scaled, [int(n) for n in widths[:-1]], axis=-1)
  ]
  size = min(S, BLOCK)

  def body(n, total: Partial) -> Partial:
    start = jnp.minimum(n * size, S - size)  # the last block overlaps the one before
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=1)
    is_new = start + np.arange(size, dtype=np.int32) >= n * size
    document = cut(key_place.document)
    document = jnp.where(is_new[None], document, jnp.full((), -1, document.dtype))
    mask = visible(query_place, Placement(cut(key_place.position), document), True, window)

    def products(arrays, k_finite) -> Partial:
      values = arrays[0] if inputs.v is None else arrays[-1]
      pairs = zip(queries, arrays[: len(keys)], strict=True)
      scores = functools.reduce(jnp.add, [_scores(q, k, precision) for q, k in pairs])
      m, p = softmax_weights(scores[:, :, :, None], mask[:, None, None])
      a = _weighted_sum(p[:, :, :, 0], values, precision)[:, :, :, None]
      return Partial(m, p.sum(-1), a, reads_finite(mask, q_finite, k_finite))

    def of_finite(arrays) -> Partial:
      known = jnp.ones(arrays[0].shape[:3], bool)
      return products(arrays, vary_like(known, arrays))

    def of_any(arrays) -> Partial:
      pairs = [finite_rows(x) for x in arrays]
      k_finite = functools.reduce(jnp.logical_and, [finite for _, finite in pairs])
      return products(tuple(x for x, _ in pairs), k_finite)

    def read(total: Partial) -> Partial:
      # Nearly all blocks are finite, and their extremes say so quickly. A conditional that returned
      # the block, and not what is read from it, would copy it on a CPU.
      arrays = tuple(cut(x).astype(dtype) for x in caches)
      extremes = [f(x, axis=1) for x in arrays for f in (jnp.max, jnp.min)]
      all_finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in extremes])
      return merge(total, lax.cond(all_finite, of_finite, of_any, arrays))

    return lax.cond(mask.any(), read, lambda total: total, total)

  begin = over_queries(before_any_key(inputs.sink, HK, G, V, dtype), B, 1)
  begin = jax.tree.map(lambda x: vary_like(x, inputs), begin)
  o = finish(lax.fori_loop(0, -(-S // size), body, begin))  # [B HK G 1 V]
  return o.reshape(B, 1, H, V).astype(v.dtype)


# --- products -------------------------------------------------------------------------------------
#
# Heads stand behind tokens in a cache. For a product per head, XLA on a CPU transposes a block, or
# a whole cache. There one product for all heads takes the place of HK of them: the queries of a
# head are zero at the channels of other heads.


def _over_key_heads(q: Float[Array, "B HK G K"]) -> Float[Array, "B HK G HK K"]:
  """Returns the queries of each key head at its own channels, and zeros at those of others."""
  own = np.eye(q.shape[1], dtype=bool)[None, :, None, :, None]
  return jnp.where(own, q[:, :, :, None], jnp.zeros((), q.dtype))


def _own_key_head(x: Float[Array, "B HK G HK K"]) -> Float[Array, "B HK G K"]:
  """Returns what stands at each key head's own channels."""
  own = np.eye(x.shape[1], dtype=bool)[None, :, None, :, None]
  return jnp.where(own, x, jnp.zeros((), x.dtype)).sum(3)


def _scores(
  q: Float[Array, "B HK G HK K"], k: Float[Array, "B C HK K"], precision
) -> Float[Array, "B HK G C"]:
  B, HK, G, _, K = q.shape

  def joined(q, k):
    q, k = q.reshape(B, HK * G, HK * K), k.reshape(B, -1, HK * K)
    return jnp.einsum("bnd,bsd->bns", q, k, precision=precision).reshape(B, HK, G, -1)

  def by_head(q, k):
    return jnp.einsum("bhgk,bshk->bhgs", _own_key_head(q), k, precision=precision)

  return lax.platform_dependent(q, k, cpu=_fastest_on_cpu(HK, joined, by_head), default=by_head)


def _weighted_sum(
  p: Float[Array, "B HK G C"], v: Float[Array, "B C HK V"], precision
) -> Float[Array, "B HK G V"]:
  B, HK, G, C = p.shape

  def joined(p, v):
    p, v = p.reshape(B, HK * G, C), v.reshape(B, C, -1)
    o = jnp.einsum("bns,bsd->bnd", p, v, precision=precision)
    return _own_key_head(o.reshape(B, HK, G, HK, -1))

  def by_head(p, v):
    return jnp.einsum("bhgs,bshv->bhgv", p, v, precision=precision)

  return lax.platform_dependent(p, v, cpu=_fastest_on_cpu(HK, joined, by_head), default=by_head)


def _fastest_on_cpu(heads: int, joined: Callable, by_head: Callable) -> Callable:
  """Returns the product over all heads, with its zeros, where there are few; otherwise per head."""
  return joined if heads <= MOST_JOINED else by_head
