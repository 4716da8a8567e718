"""Kernels of the short causal depthwise convolution: y_t = act(sum_{w < W} weight[:, W - 1 - w] x_{t - w} + bias).

One launch forward, one backward. Tokens are counted by rank: their place among the real tokens of a row, the padding
behind them; `order` says where each stands. The cache holds the ranks before 0. A program reads its rows once for each
tap, of which all but the first come from the GPU's cache. What is kept between forward and backward are the inputs;
derivatives of the weight and bias leave each program as a sum over its own rows.

Letters: R = W - 1 tokens of cache; C rows and `tile` channels in a tile, n counts tiles of rows, j of channels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas.launch import differentiable, launch, load
from lajax.pallas.tiles import both, give, inside, iota, take

f32 = jnp.float32
MAX_WIDTH = 8
MAX_CHANNELS, WARPS = 64, 8
ROWS = {  # most rows in a tile, by kernel, and whether W > 4 and the inputs are wider than two bytes
  ("forward", False, False): 16, ("forward", True, False): 16, ("forward", False, True): 16, ("forward", True, True): 16,
  ("backward", False, False): 16, ("backward", True, False): 4, ("backward", False, True): 8, ("backward", True, True): 8,
}  # fmt: skip
PROGRAMS, MAX_TILES = (
  2048,
  16,
)  # backward, a program takes up to so many tiles of rows where there are enough programs


class Plan(NamedTuple):
  """The sizes of a call, and how they are cut."""

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
    """Of one row of the batch and one tile of channels."""
    return -(-rows // (self.C * self.each))

  def channels(self, j) -> Array | None:
    return inside(j * self.tile, self.tile, self.D, self.D % self.tile == 0)


def _power(size: int) -> int:
  return 1 << max(size - 1, 0).bit_length()


def _plan(kernel: str, x, W: int, silu: bool) -> Plan:
  B, T, D = x.shape
  most = ROWS[kernel, W > 4, x.dtype.itemsize > 2]
  return Plan(B, T, D, W, silu, min(most, _power(T)), min(MAX_CHANNELS, max(16, _power(D))))


def _place(p: Plan, rows: int):
  """Program number -> row of the batch, part of its tokens, tile of channels."""
  parts = p.programs(rows)
  return lambda i: (i // p.ND // parts, i // p.ND % parts, i % p.ND)


def _specs(p: Plan, rows: int) -> dict[str, pl.BlockSpec]:
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


# --- tokens by rank --------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
  """The refs of one row of the batch: x, the cache, and where there are documents, the tokens' places and runs by rank."""

  p: Plan
  x: Any
  cache: Any
  order: Any
  runs: Any

  def exist(self, rank: Int[Array, "C"]) -> Array:
    return (rank >= 0) & (rank < self.p.T)

  def place(self, rank: Int[Array, "C"]) -> Int[Array, "C"]:
    """Where the token of a rank stands; T where there is none."""
    at = jnp.clip(rank, 0, self.p.T - 1)
    return jnp.where(
      self.exist(rank), at if self.order is None else load(self.order.at[at]), self.p.T
    )

  def run(self, rank: Int[Array, "C"]) -> Int[Array, "C"] | None:
    """The document: 0 of the cache, -1 of padding, -2 behind the end."""
    if self.runs is None:
      return None
    run = jnp.where(rank < 0, 0, load(self.runs.at[jnp.clip(rank, 0, self.p.T - 1)]))
    return jnp.where(rank < self.p.T, run, -2)

  def values(self, rank: Int[Array, "C"], channels) -> Float[Array, "C tile"]:
    """x, or the cache where rank < 0; zeros before it and behind the end."""
    x = take(rows(self.x, self.place(rank), self.p.tile), both(self.exist(rank), channels)).astype(
      f32
    )
    if self.cache is None:
      return x
    place, cached = self.place_in_cache(rank)
    return x + take(rows(self.cache, place, self.p.tile), both(cached, channels)).astype(f32)

  def place_in_cache(self, rank: Int[Array, "C"]) -> tuple[Int[Array, "C"], Array]:
    """The place of a rank before 0, and whether it has one; R where it has none."""
    cached = (rank < 0) & (rank >= -self.p.R)
    return jnp.where(cached, rank + self.p.R, self.p.R), cached


def rows(ref, place: Int[Array, "C"], tile: int):
  """The tile of these rows. Those that do not exist must be masked, and be behind the end: the interpreter drops them."""
  shape = (place.shape[0], tile)
  return ref.at[jnp.broadcast_to(place[:, None], shape), iota(shape, 1)]


def _where(keep: Array | None, x: Float[Array, "C tile"]) -> Float[Array, "C tile"]:
  return x if keep is None else jnp.where(keep[:, None], x, 0.0)


def _equal(a: Array | None, b: Array | None) -> Array | None:
  return None if a is None else a == b


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  x_ref, weight_ref, bias_ref, cache_ref, order_ref, runs_ref = inputs
  _, n, j = _place(p, p.T)(pl.program_id(0))
  tokens, channels = Tokens(p, x_ref, cache_ref, order_ref, runs_ref), p.channels(j)
  rank = n * p.C + jnp.arange(p.C)
  own = tokens.run(rank)
  y = jnp.zeros((p.C, p.tile), f32)
  for w in range(p.W):
    weight = take(weight_ref.at[:, jnp.int32(p.R - w)], channels).astype(f32)
    y += weight[None, :] * _where(
      _equal(tokens.run(rank - w), own), tokens.values(rank - w, channels)
    )
  if bias_ref is not None:
    y += take(bias_ref, channels).astype(f32)[None, :]
  if p.silu:
    y = y * lax.logistic(y)
  y = y if own is None else _where(own >= 0, y)
  give(rows(outputs[0], tokens.place(rank), p.tile), y, both(tokens.exist(rank), channels))


def _forward_launch(p: Plan, x, weight, bias, cache, order, runs, dtype) -> Array:
  specs = _specs(p, p.T)
  (y,) = launch(
    functools.partial(_forward_kernel, p=p),
    (x, weight, bias, cache, order, runs),
    name="conv_forward",
    programs=p.B * p.programs(p.T) * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[specs[name] for name in ("x", "weight", "bias", "cache", "tokens", "tokens")],
    out_specs=[specs["x"]],
    out_shapes=[jax.ShapeDtypeStruct(x.shape, dtype)],
  )
  return y


# --- backward --------------------------------------------------------------------------------------------------------


def _backward_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dx and dcache of ranks from -R on, and the sums over them of dweight and dbias.

  The token of a rank is read by the ranks rank + w, whose outputs before the activation are computed again.
  """
  x_ref, weight_ref, bias_ref, cache_ref, order_ref, runs_ref, ends_ref, dy_ref, drest_ref = inputs
  dx_ref, dcache_ref, sums_ref = outputs if p.R else (outputs[0], None, outputs[1])
  _, part, j = _place(p, p.T + p.R)(pl.program_id(0))
  tokens, channels = Tokens(p, x_ref, cache_ref, order_ref, runs_ref), p.channels(j)
  weights = [
    take(weight_ref.at[:, jnp.int32(p.R - w)], channels).astype(f32)[None, :] for w in range(p.W)
  ]
  bias = 0.0 if bias_ref is None else take(bias_ref, channels).astype(f32)[None, :]
  count, last = (p.T, None) if ends_ref is None else (ends_ref[0], ends_ref[1])

  def block(m, sums):
    rank = (part * p.each + m) * p.C - p.R + jnp.arange(p.C)
    runs = {d: tokens.run(rank + d) for d in range(-p.R, p.W)}
    near = {d: tokens.values(rank + d, channels) for d in range(-p.R, p.W if p.silu else 1)}
    dx = dpre = jnp.zeros((p.C, p.tile), f32)
    for w in reversed(range(p.W)):
      dpre = take(
        rows(dy_ref, tokens.place(rank + w), p.tile), both(tokens.exist(rank + w), channels)
      ).astype(f32)
      if p.silu:
        reads = [weights[v] * _where(_equal(runs[w - v], runs[w]), near[w - v]) for v in range(p.W)]
        pre = functools.reduce(jnp.add, reads) + bias
        gate = lax.logistic(pre)
        dpre = dpre * gate * (1.0 + pre * (1.0 - gate))
      real = None if (run := runs[w]) is None else run >= 0
      dpre = _where(real, dpre)
      dx += weights[w] * _where(_equal(runs[w], runs[0]), dpre)
    if dcache_ref is not None:
      kept, keep = tokens.place_in_cache(rank - count)  # the outgoing one
      keep = keep if last is None else keep & (runs[0] == last)
      dx += take(rows(drest_ref, kept, p.tile), both(keep, channels)).astype(f32)
      place, cached = tokens.place_in_cache(rank)
      give(rows(dcache_ref, place, p.tile), dx, both(cached, channels))
    give(rows(dx_ref, tokens.place(rank), p.tile), dx, both(tokens.exist(rank), channels))
    taps = [dpre * _where(_equal(runs[-w], runs[0]), near[-w]) for w in range(p.W)]
    return tuple(total + x for total, x in zip(sums, (*taps, dpre), strict=True))

  zeros = (jnp.zeros((p.C, p.tile), f32),) * (p.W + 1)
  sums = block(0, zeros) if p.each == 1 else lax.fori_loop(0, p.each, block, zeros)
  for w, total in enumerate(sums):
    give(sums_ref.at[jnp.int32(p.R - w if w < p.W else p.W), :], jnp.sum(total, axis=0), channels)


def _backward_launch(p: Plan, x, weight, bias, cache, documents: "Ranks | None", dy, drest):
  rows = p.T + p.R
  order, runs, ends = documents or (None, None, None)
  p = p._replace(each=max(1, min(MAX_TILES, p.B * p.programs(rows) * p.ND // PROGRAMS)))
  specs, parts = _specs(p, rows), p.programs(rows)
  cached = [] if cache is None else [("cache", jax.ShapeDtypeStruct(cache.shape, cache.dtype))]
  sums = jax.ShapeDtypeStruct((p.B, parts, p.W + 1, p.D), f32)
  results = [("x", jax.ShapeDtypeStruct(x.shape, x.dtype)), *cached, ("sums", sums)]
  dx, *dcache, sums = launch(
    functools.partial(_backward_kernel, p=p),
    (x, weight, bias, cache, order, runs, ends, dy, drest),
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


# --- the operation ---------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
  """Tokens by rank: where each stands, its document (0 that of the cache, -1 padding), and how each row ends."""

  order: Int[Array, "B T"]
  runs: Int[Array, "B T"]
  ends: Int[Array, "B 2"]  # real tokens, and the document of the last one; 0 where there is none


def ranks(ids: Int[Array, "B T"]) -> Ranks:
  """Of documents numbered from 0 on, -1 in padding."""
  B, T = ids.shape
  real, rows = ids >= 0, jnp.arange(B)[:, None]
  count = real.sum(1, dtype=jnp.int32, keepdims=True)
  among = lambda x: jnp.cumsum(x, axis=1, dtype=jnp.int32) - 1
  rank = jnp.where(real, among(real), count + among(~real))
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
  """y_t = act(sum_{w < W} weight[:, W - 1 - w] x_{t - w} + bias), behind a cache; also of documents.

  Args:
    x: [B T D], zeros in padding.
    weight, bias: [D W], and [D] or None. The sum is in float32.
    cache: [B W-1 D], the tokens before the first one.
    ids: [B T], the document of each token, 0 that of the cache, then counted up; -1 for padding, which taps pass over.
    silu: whether act is SiLU; else there is none.
    dtype: of y; None for x.dtype.

  Returns:
    y [B T D], zeros in padding, and the cache behind the last real token [B W-1 D] in cache.dtype: zeros where its
    document has fewer tokens.
  """
  static = (bool(silu), jnp.dtype(x.dtype if dtype is None else dtype))
  return _convolve(static, (x, weight, bias, cache), None if ids is None else ranks(ids))


def _forward(static, inputs, documents: Ranks | None):
  (silu, dtype), (x, weight, bias, cache) = static, inputs
  p = _plan("forward", x, weight.shape[1], silu)
  order, runs, _ = documents or (None, None, None)
  y = _forward_launch(p, x, weight, bias, cache if p.R else None, order, runs, dtype)
  return (y, _rest(p, x, cache, documents)), (inputs, documents)


def _rest(p: Plan, x, cache, documents: Ranks | None) -> Float[Array, "B W-1 D"]:
  """The last R tokens behind the cache."""
  if documents is None:
    return jnp.concatenate(
      [cache[:, min(p.T, p.R) :], x[:, max(p.T - p.R, 0) :].astype(cache.dtype)], axis=1
    )
  order, runs, ends = documents
  rank = ends[:, :1] + jnp.arange(-p.R, 0)
  at = jnp.clip(rank, 0, p.T - 1)
  new = jnp.take_along_axis(x, jnp.take_along_axis(order, at, axis=1)[..., None], axis=1).astype(
    cache.dtype
  )
  old = (
    jnp.take_along_axis(cache, jnp.clip(rank + p.R, 0, p.R - 1)[..., None], axis=1)
    if p.R
    else cache
  )
  run = jnp.where(rank < 0, 0, jnp.take_along_axis(runs, at, axis=1))
  rest = jnp.where((rank < 0)[..., None], old, new)
  return jnp.where((run == ends[:, 1:])[..., None], rest, jnp.zeros((), rest.dtype))


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
  """None where the kernels take this, else a sentence that says what they do not take. Reads shapes and dtypes only."""
  if jnp.float64 in (x.dtype, weight.dtype, cache.dtype):
    return "the kernels compute in float32, and an input is float64."
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
