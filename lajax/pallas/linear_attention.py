"""Kernels of the additive family: S = Diag(exp g) S + k v^T, o = scale S^T q.

Time is cut into N chunks of C tokens. Forward are two launches: `carry` goes through the chunks and keeps the state
that each begins with, one program for each tile of a state; `read` makes the outputs of every chunk, all at once.
Backward are three: `carry` in reverse keeps the cotangent of the state that each chunk ends with; `read` transposed
gives dv; `pairs` gives dq, dk and dg. What is kept between forward and backward are the inputs and the states at the
chunks' starts. Letters are those of `lajax.pallas.plan`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas import tiles
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable, launch
from lajax.pallas.plan import (
  Axes,
  Plan,
  Tiles,
  documents,
  over,
  places,
  plan,
  refusal,
  runs_of,
  specs,
)  # fmt: skip
from lajax.pallas.tiles import both, give, iota, take

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("carry", False, False): Tiles(64, 64, 4, 2),
  ("carry", True, False): Tiles(64, 64, 4, 2),
  ("carry", False, True): Tiles(32, 32, 4, 1),
  ("carry", True, True): Tiles(32, 32, 4, 1),
  ("read", False, False): Tiles(64, 64, 4, 2),
  ("read", True, False): Tiles(32, 64, 8, 1),
  ("read", False, True): Tiles(32, 64, 4, 1),
  ("read", True, True): Tiles(32, 32, 4, 1),
  ("pairs", False, False): Tiles(64, 32, 8, 2),
  ("pairs", True, False): Tiles(64, 32, 8, 1),
  ("pairs", False, True): Tiles(16, 32, 4, 1),
  ("pairs", True, True): Tiles(32, 32, 4, 1),
}
AXES = {
  "carry": Axes(False, True, True),
  "read": Axes(True, False, True),
  "pairs": Axes(True, True, False),
}


# --- carry: states from chunk to chunk -------------------------------------------------------------------------------


def _carry_kernel(inputs, outputs, *, interpreted: bool, p: Plan, reverse: bool):
  """S = total S + (tail k)^T v, keeping S before each chunk; or dS = total dS + scale (head q)^T do, in reverse."""
  x_ref, y_ref, g_ref, runs_ref, edges_ref, state_ref = inputs
  kept_ref, last_ref = outputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["carry"])[0](pl.program_id(0))
  keys, values = p.keys(place.i), p.values(place.j)

  def chunk(m, S):
    n = p.N - 1 - m if reverse else m
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    give(kept_ref.at[n], S, both(keys, values))
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    x, y = take(x_ref.at[at, :], both(tokens, keys)), take(y_ref.at[at, :], both(tokens, values))
    total = jnp.ones((), f32)
    if p.gate == "head":
      g = take(g_ref.at[at], tokens).astype(f32)
      decay = tiles.head_per_head(g) if reverse else tiles.tail_per_head(g)
      x, total = x.astype(f32) * decay[:, None], jnp.exp(jnp.sum(g))
    elif p.gate == "channel":
      g = take(g_ref.at[at, :], both(tokens, keys)).astype(f32)
      decay = tiles.head_per_channel(g) if reverse else tiles.tail_per_channel(g, full)
      x, total = x.astype(f32) * decay, jnp.exp(jnp.sum(g, axis=0))[:, None]
    x = tiles.from_start(runs, x) if reverse else tiles.to_end(runs, x)
    add = product.outer(x, y)
    return tiles.throughout(runs, total) * S + (add * p.scale if reverse else add)

  last = lax.fori_loop(0, p.N, chunk, take(state_ref, both(keys, values)))
  give(last_ref, last, both(keys, values))


def _carry(p: Plan, x, y, g, runs, edges, state, reverse: bool) -> tuple[Array, Array]:
  p = p.cut(TILES, "carry")
  blocks = specs(p, AXES["carry"])
  kept = jax.ShapeDtypeStruct((p.B, p.HV, p.N, p.K, p.V), p.kept)
  kept, last = launch(
    functools.partial(_carry_kernel, p=p, reverse=reverse), (x, y, g, runs, edges, state),
    name="carry_cotangents" if reverse else "carry_states",
    programs=places(p, AXES["carry"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "v", p.gate, "runs", "edges", "state")],
    out_specs=[blocks["kept"], blocks["state"]], out_shapes=[kept, jax.ShapeDtypeStruct(state.shape, f32)],
  )  # fmt: skip
  return kept, last


# --- read: what comes out of a chunk ---------------------------------------------------------------------------------


def _scores_and_read(p: Plan, product, runs, tokens, q_ref, k_ref, g_ref, kept_ref, values, transposed: bool):
  """The chunk's scores [C C], and what the queries (transposed: the keys) read from the state, over all tiles of K."""

  def tile(i, sums):
    scores, read = sums
    at, keys = pl.ds(i * p.k_tile, p.k_tile), p.keys(i)
    q, k = take(q_ref.at[:, at], both(tokens, keys)), take(k_ref.at[:, at], both(tokens, keys))
    S = take(kept_ref.at[at, :], both(keys, values))
    if p.gate != "channel":
      return scores + product.inner(q, k), read + product(k if transposed else q, S)
    g = take(g_ref.at[:, at], both(tokens, keys)).astype(f32)
    q, k = q.astype(f32), k.astype(f32)
    own = jnp.sum(q * k, axis=1)
    scores += jnp.where(iota(scores.shape, 0) == iota(scores.shape, 1), own[:, None], 0.0)
    for h, upto, after in tiles.halves(g):
      if h == p.C:
        read += product(k * after if transposed else q * upto, S)
      else:
        scores += jnp.where(tiles.pairs_of_halves(p.C, h), product.inner(q * upto, k * after), 0.0)
    return scores, read

  zeros = jnp.zeros((p.C, p.C), f32), jnp.zeros((p.C, p.v_tile), f32)
  scores, read = over(p.NK, tile, zeros)
  if p.gate == "head":
    g = take(g_ref, tokens).astype(f32)
    scores = scores * tiles.between_per_head(g)
    read = read * (tiles.tail_per_head(g) if transposed else tiles.head_per_head(g))[:, None]
  scores = tiles.pairs(runs, iota(scores.shape, 0) >= iota(scores.shape, 1), scores)
  return scores, tiles.to_end(runs, read) if transposed else tiles.from_start(runs, read)


def _read_kernel(inputs, outputs, *, interpreted: bool, p: Plan, transposed: bool):
  """o = scale (scores v + (head q) S), or dv = scale scores^T do + (tail k) dS."""
  q_ref, k_ref, y_ref, g_ref, runs_ref, edges_ref, kept_ref = inputs
  (out_ref,) = outputs
  product = tiles.products(p.dtype, interpreted)
  place = places(p, AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  runs = runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  scores, out = _scores_and_read(p, product, runs, tokens, q_ref, k_ref, g_ref, kept_ref, values, transposed)
  y = take(y_ref, both(tokens, values))
  if y.dtype != p.dtype:  # values of the delta rule, whose sums cancel
    product = tiles.fine_products(p.dtype, interpreted)
  out = product.outer(scores, y) * p.scale + out if transposed else (product(scores, y) + out) * p.scale
  give(out_ref, out, both(tokens, values))


def read(p: Plan, q, k, y, g, runs, edges, kept, like, transposed: bool) -> Array:
  p = p.cut(TILES, "read")
  blocks = specs(p, AXES["read"])
  (out,) = launch(
    functools.partial(_read_kernel, p=p, transposed=transposed), (q, k, y, g, runs, edges, kept),
    name="read_dv" if transposed else "read_outputs", programs=places(p, AXES["read"])[1],
    warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "q", "v", p.gate, "runs", "edges", "kept")],
    out_specs=[blocks["v"]], out_shapes=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
  )  # fmt: skip
  return out


# --- pairs: dq, dk and dg --------------------------------------------------------------------------------------------


def _pairs_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """dq, dk and dg of one tile of K, from the cotangents of the scores and of what the state read and wrote.

  Pairs of a token with itself, between which no decay stands, are apart. The gate of token l is in every interval
  that begins before l and ends at or after it, so dg sums cotangent times value of what decays: of the pairs and of
  what reads the state, by the later token (`ahead`), of the pairs also by the earlier one (`behind`), of what is
  written to the state (`after`), and of the state itself.
  """
  q_ref, k_ref, v_ref, do_ref, g_ref, runs_ref, edges_ref, kept_ref, dkept_ref = inputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["pairs"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  runs = runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(j, sums):
    dscores, dq, dk, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    v, do = take(v_ref.at[:, at], both(tokens, values)), take(do_ref.at[:, at], both(tokens, values))
    S, dS = take(kept_ref.at[:, at], both(keys, values)), take(dkept_ref.at[:, at], both(keys, values))
    dscores, dq, dk = dscores + product.inner(do, v), dq + product.inner(do, S), dk + product.inner(v, dS)
    return dscores, dq, dk, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  square, tall = jnp.zeros((p.C, p.C), f32), jnp.zeros((p.C, p.k_tile), f32)
  dscores, dq, dk_state, total = over(p.NV, tile, (square, tall, tall, jnp.zeros(p.k_tile, f32)))
  q, k = take(q_ref, both(tokens, keys)).astype(f32), take(k_ref, both(tokens, keys)).astype(f32)
  own = p.scale * jnp.sum(jnp.where(row == column, dscores, 0.0), axis=1)[:, None]
  dq = tiles.from_start(runs, dq * p.scale)
  dk_state = tiles.to_end(runs, dk_state)
  dscores = p.scale * tiles.pairs(runs, row > column, dscores)

  if p.gate == "channel":
    g = take(g_ref, both(tokens, keys)).astype(f32)
    dq_pairs, dk = jnp.zeros_like(dq), jnp.zeros_like(dq)
    for h, upto, after in tiles.halves(g):
      if h == p.C:
        dq, dk_state = dq_pairs + dq * upto, dk_state * after
      else:
        corner = jnp.where(tiles.pairs_of_halves(p.C, h), dscores, 0.0)
        dq_pairs += product(corner, k * after) * upto
        dk += product.outer(corner, q * upto) * after
  else:
    if p.gate == "head":
      g = take(g_ref, tokens).astype(f32)
      dscores = dscores * tiles.between_per_head(g)
      dq, dk_state = dq * tiles.head_per_head(g)[:, None], dk_state * tiles.tail_per_head(g)[:, None]
    dq, dk = dq + product(dscores, k), product.outer(dscores, q)

  if p.gate != "none":
    difference, after = q * dq - k * dk, k * dk_state
    if p.gate == "channel":
      total = total * tiles.throughout(runs, jnp.exp(jnp.sum(g, axis=0)))
      dg = tiles.sums(row <= column, difference, full) + tiles.sums(row > column, after, full) + total[None, :]
      give(outputs[2], dg, both(tokens, keys))
    else:
      total = jnp.sum(total) * tiles.throughout(runs, jnp.exp(jnp.sum(g)))
      terms = jnp.where(row >= column, jnp.sum(difference, axis=1)[:, None], jnp.sum(after, axis=1)[:, None])
      give(outputs[2], jnp.sum(terms, axis=0) + total, tokens)
  give(outputs[0], dq + own * k, both(tokens, keys))
  give(outputs[1], dk + dk_state + own * q, both(tokens, keys))


def _pairs(p: Plan, q, k, v, do, g, runs, edges, kept, dkept) -> tuple[Array, Array, Array | None]:
  p = p.cut(TILES, "pairs")
  blocks = specs(p, AXES["pairs"])
  grouped = p.HV > p.H
  tall = lambda dtype: jax.ShapeDtypeStruct((p.B, p.T, p.HV, p.K), f32 if grouped else dtype)
  dg = {
    "none": [],
    "head": [("dhead", jax.ShapeDtypeStruct((p.NK, p.B, p.T, p.HV), f32))],
    "channel": [("channel", jax.ShapeDtypeStruct((p.B, p.T, p.HV, p.K), f32))],
  }[p.gate]
  results = [("dq", tall(q.dtype)), ("dq", tall(k.dtype)), *dg]
  dq, dk, *dg = launch(
    functools.partial(_pairs_kernel, p=p), (q, k, v, do, g, runs, edges, kept, dkept),
    name="pairs_dq_dk_dg", programs=places(p, AXES["pairs"])[1], warps=p.warps, stages=p.stages,
    in_specs=[blocks[name] for name in ("q", "q", "v", "v", p.gate, "runs", "edges", "kept", "kept")],
    out_specs=[blocks[name] for name, _ in results], out_shapes=[shape for _, shape in results],
  )  # fmt: skip
  if grouped:
    dq, dk = (x.reshape(p.B, p.T, p.H, -1, p.K).sum(3) for x in (dq, dk))
  dg = dg[0] if p.gate == "channel" else dg[0].sum(0) if dg else None
  return dq, dk, dg


# --- the operation ---------------------------------------------------------------------------------------------------


def linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S + k v^T, o = scale S^T q; also of documents.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H. Products are of the dtype that
      q, k and v share, bfloat16 or float16, else of float32.
    v: [B T HV V].
    g: log decay, <= 0: None, [B T HV] or [B T HV K].
    state: [B HV K V], the state before the first token, float32.
    runs: [B T], which document of its row a token is in, counted from 0: the state is zero where the number changes.
      Padding is in the document before it, and q, k, v, g are zeros there.
    scale: of the output.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  if runs is None:
    return _attend(float(scale), (q, k, v, g, state), None)
  C = plan(q, v, g, True, scale, tiles.operand_dtype(q, k, v)).C
  return _attend(float(scale), (q, k, v, g, state), documents(runs, C))


def _forward(scale: float, inputs, packed):
  q, k, v, g, state = inputs
  p = plan(q, v, g, packed is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = packed or (None, None)
  kept, last = _carry(p, k, v, g, runs, edges, state, reverse=False)
  o = read(p, q, k, v, g, runs, edges, kept, v, transposed=False)
  return (o, last), (inputs, packed, kept)


def _backward(scale: float, residuals, cotangents):
  (q, k, v, g, state), packed, kept = residuals
  do, dlast = cotangents
  p = plan(q, v, g, packed is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = packed or (None, None)
  dkept, dstate = _carry(p, q, do, g, runs, edges, dlast, reverse=True)
  dv = read(p, q, k, do, g, runs, edges, dkept, v, transposed=True)
  dq, dk, dg = _pairs(p, q, k, v, do, g, runs, edges, kept, dkept)
  dg = None if g is None or dg is None else dg.astype(g.dtype)
  return (dq.astype(q.dtype), dk.astype(k.dtype), dv, dg, dstate.astype(state.dtype)), None


_attend = differentiable(_forward, _backward)


def supports(q, k, v, g=None, initial_state=None, *, bonus=None, chunk_size: int | None = None) -> str | None:
  """None where the kernels take this, else a sentence that says what they do not take. Reads shapes and dtypes only."""
  p = plan(q, v, g, False, 1.0, tiles.operand_dtype(q, k, v))
  return refusal(p, (q, k, v, g, initial_state, bonus), chunk_size, TILES, AXES)


def decode(
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  scale: float = 1.0,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """One token of `linear_attention`: the next state, float32, and o in v.dtype. Has no derivative.

  The state is read once and written once, and in place where the caller donates it.
  """
  return one_token("decode", state, q, k, v, None, g, scale)
