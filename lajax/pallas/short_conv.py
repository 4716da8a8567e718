"""Kernels of the short causal depthwise convolution: y_t = act(sum_{w < W} weight[:, W - 1 - w]
x_{t - w} + bias).

One launch forward, one backward. Tokens are counted by rank: the number of a token among those of
its row that are not padding, then the padding. `order` holds the place of each rank. The cache
holds the ranks before 0. A program loads its rows once per tap; all but the first load come from
the GPU's cache. Residuals are the inputs. Derivatives of the weight and bias leave each program as
a sum over its own rows.

Letters: R = W - 1 tokens of cache; C rows and `tile` channels in a tile; n counts tiles of rows, j
tiles of channels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas.launch import differentiable, float64_refusal, launch
from lajax.pallas.tiles import inside, iota, load, store, tile_mask

f32 = jnp.float32
MAX_WIDTH = 8
MAX_CHANNELS, WARPS = 64, 8
# Most rows in a tile, by kernel, whether W > 4, and whether inputs are wider than two bytes.
ROWS = {
  ("forward", False, False): 16, ("forward", True, False): 16,
  ("forward", False, True): 16, ("forward", True, True): 16,
  ("backward", False, False): 16, ("backward", True, False): 4,
  ("backward", False, True): 8, ("backward", True, True): 8,
}  # fmt: skip
# Backward, a program takes several tiles of rows, up to MAX_TILES, if more than PROGRAMS programs
# are left: fewer sums of the weight's derivative are then written.
PROGRAMS, MAX_TILES = 2048, 16


class ConvPlan(NamedTuple):
  """Sizes of a call, and how they are cut."""

  B: int
  T: int
  D: int
  W: int
  silu: bool
  C: int
  tile: int
  each: int = 1  # tiles of rows in a program

  @property
  def R(self) -> int:
    return self.W - 1

  @property
  def ND(self) -> int:
    return -(-self.D // self.tile)

  def programs(self, rows: int) -> int:
    """Returns the number of programs of one row of the batch and one tile of channels."""
    return -(-rows // (self.C * self.each))

  def channels(self, j) -> Array | None:
    return inside(j * self.tile, self.tile, self.D, self.D % self.tile == 0)


def _power(size: int) -> int:
  return 1 << max(size - 1, 0).bit_length()


def _plan(kernel: str, x, W: int, silu: bool) -> ConvPlan:
  B, T, D = x.shape
  most = ROWS[kernel, W > 4, x.dtype.itemsize > 2]
  return ConvPlan(B, T, D, W, silu, min(most, _power(T)), min(MAX_CHANNELS, max(16, _power(D))))


def _place(p: ConvPlan, rows: int):
  """Returns the map from a program's number to its row of the batch, part of the tokens and tile of
  channels.
  """
  parts = p.programs(rows)
  return lambda i: (i // p.ND // parts, i // p.ND % parts, i % p.ND)


def _specs(p: ConvPlan, rows: int) -> dict[str, pl.BlockSpec]:
  place = _place(p, rows)

  def spec(shape, index):
    return pl.BlockSpec(shape, lambda i: index(*place(i)))

  return {
    "x": spec((None, p.T, p.tile), lambda b, n, j: (b, 0, j)),
    "weight": spec((p.tile, p.W), lambda b, n, j: (j, 0)),
    "bias": spec((p.tile,), lambda b, n, j: (j,)),
    "cache": spec((None, p.R, p.tile), lambda b, n, j: (b, 0, j)),
    "tokens": spec((None, p.T), lambda b, n, j: (b, 0)),
    "ends": spec((None, 2), lambda b, n, j: (b, 0)),
    "sums": spec((None, None, p.W + 1, p.tile), lambda b, n, j: (b, n, 0, j)),
  }


# --- tokens by rank -------------------------------------------------------------------------------


class RankedTokens(NamedTuple):
  """Tokens of one row of the batch by rank: refs of x, the cache and, with documents, of places and
  documents by rank.
  """

  p: ConvPlan
  x: Any
  cache: Any
  order: Any
  documents: Any

  def exist(self, rank: Int[Array, "C"]) -> Array:
    return (rank >= 0) & (rank < self.p.T)

  def place(self, rank: Int[Array, "C"]) -> Int[Array, "C"]:
    """Returns the place of the token of a rank; T where there is none."""
    at = jnp.clip(rank, 0, self.p.T - 1)
    return jnp.where(
      self.exist(rank), at if self.order is None else load(self.order.at[at]), self.p.T
    )

  def document(self, rank: Int[Array, "C"]) -> Int[Array, "C"] | None:
    """Returns the document of a rank: 0 for the cache, -1 for padding, -2 behind the end."""
    if self.documents is None:
      return None
    document = jnp.where(rank < 0, 0, load(self.documents.at[jnp.clip(rank, 0, self.p.T - 1)]))
    return jnp.where(rank < self.p.T, document, -2)

  def values(self, rank: Int[Array, "C"], channels) -> Float[Array, "C tile"]:
    """Returns x, or the cache where rank < 0; zeros before the cache and behind the end."""
    x = load(
      rows(self.x, self.place(rank), self.p.tile), tile_mask(self.exist(rank), channels)
    ).astype(f32)
    if self.cache is None:
      return x
    place, cached = self.place_in_cache(rank)
    return x + load(rows(self.cache, place, self.p.tile), tile_mask(cached, channels)).astype(f32)

  def place_in_cache(self, rank: Int[Array, "C"]) -> tuple[Int[Array, "C"], Array]:
    """Returns the place of a rank in the cache, and whether it has one; R where it has none."""
    cached = (rank < 0) & (rank >= -self.p.R)
    return jnp.where(cached, rank + self.p.R, self.p.R), cached


def rows(ref, place: Int[Array, "C"], tile: int):
  """Returns the ref of these rows.

  Rows that do not exist must be masked, and behind the end: the interpreter drops those.
  """
  shape = (place.shape[0], tile)
  return ref.at[jnp.broadcast_to(place[:, None], shape), iota(shape, 1)]


def _where(keep: Array | None, x: Float[Array, "C tile"]) -> Float[Array, "C tile"]:
  return x if keep is None else jnp.where(keep[:, None], x, 0.0)


def _equal(a: Array | None, b: Array | None) -> Array | None:
  return None if a is None else a == b


# --- forward --------------------------------------------------------------------------------------


def _forward_kernel(inputs, outputs, *, interpreted: bool, p: ConvPlan):
  x_ref, weight_ref, bias_ref, cache_ref, order_ref, documents_ref = inputs
  _, n, j = _place(p, p.T)(pl.program_id(0))
  tokens, channels = RankedTokens(p, x_ref, cache_ref, order_ref, documents_ref), p.channels(j)
  rank = n * p.C + jnp.arange(p.C, dtype=jnp.int32)
  own = tokens.document(rank)
  y = jnp.zeros((p.C, p.tile), f32)
  for w in range(p.W):
    weight = load(weight_ref.at[:, jnp.int32(p.R - w)], channels).astype(f32)
    y += weight[None, :] * _where(
      _equal(tokens.document(rank - w), own), tokens.values(rank - w, channels)
    )
  if bias_ref is not None:
    y += load(bias_ref, channels).astype(f32)[None, :]
  if p.silu:
    y = y * lax.logistic(y)
  y = y if own is None else _where(own >= 0, y)
  store(rows(outputs[0], tokens.place(rank), p.tile), y, tile_mask(tokens.exist(rank), channels))


def _forward_launch(p: ConvPlan, x, weight, bias, cache, order, document, dtype) -> Array:
  specs = _specs(p, p.T)
  (y,) = launch(
    functools.partial(_forward_kernel, p=p),
    (x, weight, bias, cache, order, document),
    name="conv_forward",
    programs=p.B * p.programs(p.T) * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[specs[name] for name in ("x", "weight", "bias", "cache", "tokens", "tokens")],
    out_specs=[specs["x"]],
    out_shapes=[jax.ShapeDtypeStruct(x.shape, dtype)],
  )
  return y


# --- backward -------------------------------------------------------------------------------------


def _backward_kernel(inputs, outputs, *, interpreted: bool, p: ConvPlan):
  """dx and dcache of ranks from -R on, and the sums of dweight and dbias over them.

  The ranks rank + w read the token of a rank. Their outputs before the activation are computed
  again.
  """
  x_ref, weight_ref, bias_ref, cache_ref, order_ref, documents_ref, ends_ref, dy_ref, drest_ref = (
    inputs
  )
  dx_ref, dcache_ref, sums_ref = outputs if p.R else (outputs[0], None, outputs[1])
  _, part, j = _place(p, p.T + p.R)(pl.program_id(0))
  tokens, channels = RankedTokens(p, x_ref, cache_ref, order_ref, documents_ref), p.channels(j)
  weights = [
    load(weight_ref.at[:, jnp.int32(p.R - w)], channels).astype(f32)[None, :] for w in range(p.W)
  ]
  bias = 0.0 if bias_ref is None else load(bias_ref, channels).astype(f32)[None, :]
  count, last = (p.T, None) if ends_ref is None else (ends_ref[0], ends_ref[1])

  def block(m, sums):
    rank = (part * p.each + m) * p.C - p.R + jnp.arange(p.C, dtype=jnp.int32)
    documents = {d: tokens.document(rank + d) for d in range(-p.R, p.W)}
    near = {d: tokens.values(rank + d, channels) for d in range(-p.R, p.W if p.silu else 1)}
    dx = dpre = jnp.zeros((p.C, p.tile), f32)
    for w in reversed(range(p.W)):
      dpre = load(
        rows(dy_ref, tokens.place(rank + w), p.tile), tile_mask(tokens.exist(rank + w), channels)
      ).astype(f32)
      if p.silu:
        reads = [
          weights[v] * _where(_equal(documents[w - v], documents[w]), near[w - v])
          for v in range(p.W)
        ]
        pre = functools.reduce(jnp.add, reads) + bias
        gate = lax.logistic(pre)
        dpre = dpre * gate * (1.0 + pre * (1.0 - gate))
      is_token = None if (document := documents[w]) is None else document >= 0
      dpre = _where(is_token, dpre)
      dx += weights[w] * _where(_equal(documents[w], documents[0]), dpre)
    if dcache_ref is not None:
      # The last tokens are also in the outgoing cache, if they are of the last document.
      outgoing, keep = tokens.place_in_cache(rank - count)
      keep = keep if last is None else keep & (documents[0] == last)
      dx += load(rows(drest_ref, outgoing, p.tile), tile_mask(keep, channels)).astype(f32)
      place, cached = tokens.place_in_cache(rank)
      store(rows(dcache_ref, place, p.tile), dx, tile_mask(cached, channels))
    store(rows(dx_ref, tokens.place(rank), p.tile), dx, tile_mask(tokens.exist(rank), channels))
    taps = [dpre * _where(_equal(documents[-w], documents[0]), near[-w]) for w in range(p.W)]
    return tuple(total + x for total, x in zip(sums, (*taps, dpre), strict=True))

  zeros = (jnp.zeros((p.C, p.tile), f32),) * (p.W + 1)
  sums = block(0, zeros) if p.each == 1 else lax.fori_loop(0, p.each, block, zeros)
  for w, total in enumerate(sums):
    store(sums_ref.at[jnp.int32(p.R - w if w < p.W else p.W), :], jnp.sum(total, axis=0), channels)


def _backward_launch(p: ConvPlan, x, weight, bias, cache, documents: "Ranks | None", dy, drest):
  rows = p.T + p.R
  order, document, ends = documents or (None, None, None)
  p = p._replace(each=max(1, min(MAX_TILES, p.B * p.programs(rows) * p.ND // PROGRAMS)))
  specs, parts = _specs(p, rows), p.programs(rows)
  cached = [] if cache is None else [("cache", jax.ShapeDtypeStruct(cache.shape, cache.dtype))]
  sums = jax.ShapeDtypeStruct((p.B, parts, p.W + 1, p.D), f32)
  results = [("x", jax.ShapeDtypeStruct(x.shape, x.dtype)), *cached, ("sums", sums)]
  dx, *dcache, sums = launch(
    functools.partial(_backward_kernel, p=p),
    (x, weight, bias, cache, order, document, ends, dy, drest),
    name="conv_backward",
    programs=p.B * parts * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[
      specs[name]
      for name in ("x", "weight", "bias", "cache", "tokens", "tokens", "ends", "x", "cache")
    ],
    out_specs=[specs[name] for name, _ in results],
    out_shapes=[shape for _, shape in results],
  )
  sums = sums.sum((0, 1))
  return dx, dcache[0] if cached else None, sums[: p.W].T, sums[p.W]


# --- the operation --------------------------------------------------------------------------------


class Ranks(NamedTuple):
  """Tokens by rank."""

  order: Int[Array, "B T"]  # place of each rank
  document: Int[Array, "B T"]  # its document: 0 for that of the cache, -1 for padding
  ends: Int[Array, "B 2"]  # number of tokens without padding, and the last one's document (or 0)


def ranks(ids: Int[Array, "B T"]) -> Ranks:
  """Returns the ranks of packed documents, numbered from 0 on, -1 in padding."""
  B, T = ids.shape
  is_token, rows = ids >= 0, jnp.arange(B, dtype=jnp.int32)[:, None]
  count = is_token.sum(1, dtype=jnp.int32, keepdims=True)
  among = lambda x: jnp.cumsum(x, axis=1, dtype=jnp.int32) - 1
  rank = jnp.where(is_token, among(is_token), count + among(~is_token))
  places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  order = jnp.zeros((B, T), jnp.int32).at[rows, rank].set(places, unique_indices=True)
  last = jnp.maximum(ids.max(1, keepdims=True), 0)
  return Ranks(
    order, jnp.take_along_axis(ids, order, axis=1), jnp.concatenate([count, last], axis=1)
  )


def short_conv(
  x: Float[Array, "B T D"],
  weight: Float[Array, "D W"],
  bias: Float[Array, "D"] | None,
  cache: Float[Array, "B W-1 D"],
  ids: Int[Array, "B T"] | None = None,
  *,
  silu: bool = True,
  dtype=None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
  """y_t = act(sum_{w < W} weight[:, W - 1 - w] x_{t - w} + bias), after a cache; also with packed
  documents.

  Args:
    x: [B T D], zeros in padding.
    weight, bias: [D W], and [D] or None. The sum is in float32.
    cache: [B W-1 D], the tokens before the first one.
    ids: [B T], number of a token's document: 0 for that of the cache, then counted up; -1 for
      padding, which taps skip.
    silu: whether act is SiLU; else it is the identity.
    dtype: of y; None for x.dtype.

  Returns:
    y [B T D], zeros in padding, and the cache after the last token [B W-1 D] in cache.dtype. The
    cache has zeros where the last document has fewer tokens.
  """
  static = (bool(silu), jnp.dtype(x.dtype if dtype is None else dtype))
  return _convolve(static, (x, weight, bias, cache), None if ids is None else ranks(ids))


def _forward(static, inputs, documents: Ranks | None):
  (silu, dtype), (x, weight, bias, cache) = static, inputs
  p = _plan("forward", x, weight.shape[1], silu)
  order, document, _ = documents or (None, None, None)
  y = _forward_launch(p, x, weight, bias, cache if p.R else None, order, document, dtype)
  return (y, _rest(p, x, cache, documents)), (inputs, documents)


def _rest(p: ConvPlan, x, cache, documents: Ranks | None) -> Float[Array, "B W-1 D"]:
  """Returns the last R tokens, those of the cache included."""
  if documents is None:
    return jnp.concatenate(
      [cache[:, min(p.T, p.R) :], x[:, max(p.T - p.R, 0) :].astype(cache.dtype)], axis=1
    )
  order, document, ends = documents
  rank = ends[:, :1] + jnp.arange(-p.R, 0, dtype=jnp.int32)[None]
  at = jnp.clip(rank, 0, p.T - 1)
  new = jnp.take_along_axis(x, jnp.take_along_axis(order, at, axis=1)[..., None], axis=1).astype(
    cache.dtype
  )
  old = (
    jnp.take_along_axis(cache, jnp.clip(rank + p.R, 0, p.R - 1)[..., None], axis=1)
    if p.R
    else cache
  )
  document = jnp.where(rank < 0, 0, jnp.take_along_axis(document, at, axis=1))
  rest = jnp.where((rank < 0)[..., None], old, new)
  return jnp.where((document == ends[:, 1:])[..., None], rest, jnp.zeros((), rest.dtype))


def _backward(static, residuals, cotangents):
  (x, weight, bias, cache), documents = residuals
  dy, drest = cotangents
  p = _plan("backward", x, weight.shape[1], static[0])
  some = lambda a: a if p.R else None
  dx, dcache, dweight, dbias = _backward_launch(
    p, x, weight, bias, some(cache), documents, dy, some(drest)
  )
  dcache = jnp.zeros_like(cache) if dcache is None else dcache
  return (
    dx,
    dweight.astype(weight.dtype),
    None if bias is None else dbias.astype(bias.dtype),
    dcache,
  ), None


_convolve = differentiable(_forward, _backward)


def supports(x, weight, cache) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  if reason := float64_refusal(dict(x=x, weight=weight, cache=cache)):
    return reason
  W = weight.shape[1]
  if W > MAX_WIDTH:
    return f"the kernels take a convolution over up to W = {MAX_WIDTH} tokens, and W is {W}."
  p = _plan("backward", x, W, True)
  programs = p.B * p.programs(p.T + p.R) * p.ND
  if programs >= 2**31 - 1:
    return (
      f"a GPU starts fewer than 2^31 programs, and [B T D] = {[*x.shape]} would need {programs}."
    )
  return None
