"""Kernels of the additive family: S = Diag(exp g) S + k v^T, o = scale S^T q.

Time is cut into N chunks of C tokens. Forward is one launch: `attend` goes through the chunks, one program for each tile
of columns of a state, makes the outputs, and keeps the state that each chunk begins with where there will be a backward
pass. Backward are two: `attend` in reverse gives dv and keeps the cotangent of the state that each chunk ends with; `pairs`
gives dq, dk and dg. With one decay a channel, in float32's products, and beyond K = `WIDE`, a launch before `attend`, `scores`,
makes those of the pairs of tokens. Where columns are few and time is long, it is cut into segments, and one launch more,
`summaries`, gives what each of them leaves: from that `lajax.pallas.segments` has the states that they begin with. What is
kept between forward and backward are the inputs and the states at the chunks' starts. Letters are those of
`lajax.pallas.plan`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas import segments, tiles
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable
from lajax.pallas.nonfinite import guarded
from lajax.pallas.plan import (
  Axes,
  Plan,
  Tiles,
  chunk_of,
  documents,
  gathered,
  in_segments,
  key_cotangents,
  over,
  places,
  plan,
  refusal,
  runs_of,
  start,
)  # fmt: skip
from lajax.pallas.state_tiles import (
  decays,
  give_state,
  parts_of,
  read_state,
  scores_of,
  take_parts,
  take_state,
  total_decay,
)
from lajax.pallas.tiles import both, give, iota, take

f32 = jnp.float32
TILES = {  # without spills on every architecture that lajax.pallas.report compiles for
  ("summaries", False, False): Tiles(64, 64, 4, 2),
  ("summaries", True, False): Tiles(64, 64, 4, 2),
  ("summaries", False, True): Tiles(32, 32, 4, 1),
  ("summaries", True, True): Tiles(32, 32, 4, 1),
  ("scores", True, False): Tiles(32, 64, 8, 1),
  ("scores", False, False): Tiles(64, 64, 4, 2),
  ("scores", False, True): Tiles(32, 32, 4, 1),
  ("scores", True, True): Tiles(32, 32, 4, 1),
  ("attend", False, False): Tiles(32, 64, 8, 2),
  ("attend_back", False, False): Tiles(64, 32, 8, 2),
  ("attend", True, False): Tiles(32, 64, 8, 2),
  ("attend_back", True, False): Tiles(32, 64, 8, 2),
  ("attend", False, True): Tiles(32, 16, 8, 2),
  ("attend_back", False, True): Tiles(32, 16, 8, 2),
  ("attend", True, True): Tiles(32, 16, 8, 2),
  ("attend_back", True, True): Tiles(32, 16, 8, 2),
  ("pairs", False, False): Tiles(64, 32, 8, 2),
  ("pairs", True, False): Tiles(64, 32, 8, 1),
  ("pairs", False, True): Tiles(16, 32, 4, 1),
  ("pairs", True, True): Tiles(32, 32, 4, 1),
}
WIDE = 128  # rows of a state that a program of `attend` has at most: beyond, outputs are sums of several programs'
AXES = {
  "summaries": Axes(False, True, True),
  "scores": Axes(True, False, False),
  "attend": Axes(False, True, True),
  "pairs": Axes(True, True, False),
}


# --- summaries: what each segment of time leaves ---------------------------------------------------------------------


def _summaries_kernel(inputs, outputs, *, interpreted: bool, p: Plan, reverse: bool):
  """S = total S + (tail k)^T v from zeros; or dS = total dS + scale (head q)^T do, in reverse; through one segment."""
  x_ref, y_ref, g_ref, runs_ref, edges_ref = inputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  keys, values = p.keys(place.i), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m, reverse)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
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

  S = lax.fori_loop(0, p.span, chunk, jnp.zeros((p.k_tile, p.v_tile), f32))
  give(outputs[0], S, both(keys, values))


def _summaries(p: Plan, x, y, g, runs, edges, reverse: bool) -> Array:
  p, name = p.cut(TILES, "summaries"), "linear_summaries_back" if reverse else "linear_summaries"
  kinds, results = (
    ("q", "v", p.gate, "runs", "edges"),
    [("segment", (p.B, p.P, p.HV, p.K, p.V), f32)],
  )
  kernel = functools.partial(_summaries_kernel, reverse=reverse)
  (ends,) = start(kernel, p, AXES["summaries"], name, kinds, (x, y, g, runs, edges), results)
  return ends


# --- scores: of pairs of tokens, where `attend` has no registers for them -------------------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """q and k of each pair of tokens of a chunk, decayed between the two."""
  q_ref, k_ref, g_ref, runs_ref, edges_ref = inputs
  product = tiles.products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens, runs = p.tokens(place.n), runs_of(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, scores):
    at, mask = pl.ds(i * p.k_tile, p.k_tile), both(tokens, p.keys(i))
    q, k = take(q_ref.at[:, at], mask), take(k_ref.at[:, at], mask)
    if p.gate != "channel":
      return scores + product.inner(q, k)
    q, k, g = q.astype(f32), k.astype(f32), take(g_ref.at[:, at], mask).astype(f32)
    scores += jnp.where(row == column, jnp.sum(q * k, axis=1)[:, None], 0.0)
    for h, upto, after in tiles.halves(g):
      if h < p.C:
        scores += jnp.where(tiles.pairs_of_halves(p.C, h), product.inner(q * upto, k * after), 0.0)
    return scores

  scores = over(p.NK, tile, jnp.zeros((p.C, p.C), f32))
  if p.gate == "head":
    scores *= tiles.between_per_head(take(g_ref, tokens).astype(f32))
  give(outputs[0], tiles.pairs(runs, row >= column, scores), None)


def _scores(p: Plan, q, k, g, runs, edges) -> Array:
  p = p.cut(TILES, "scores")
  kinds, results = (
    ("q", "q", p.gate, "runs", "edges"),
    [("pairs", (p.B, p.HV, p.N, p.C, p.C), p.kept)],
  )
  (scores,) = start(
    _scores_kernel, p, AXES["scores"], "linear_scores", kinds, (q, k, g, runs, edges), results
  )
  return scores


# --- attend: through the chunks --------------------------------------------------------------------------------------


def _attend_kernel(inputs, outputs, *, interpreted: bool, p: Plan, reverse: bool):
  """o = scale (scores v + (head q) S) and S = total S + (tail k)^T v, from chunk to chunk, keeping S before each.

  In reverse dv = scale scores^T do + (tail k) dS and dS = total dS + scale (head q)^T do, keeping dS after each.
  """
  q_ref, k_ref, y_ref, g_ref, runs_ref, edges_ref, scores_ref, state_ref = inputs
  out_ref, last_ref, *kept_ref = outputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["attend"])[0](pl.program_id(0))
  parts, values = parts_of(p, place.i), p.values(place.j)
  upto = iota((p.C, p.C), 0) >= iota((p.C, p.C), 1)
  by_head, by_tail = tiles.head_per_channel, lambda g: tiles.tail_per_channel(g, full)
  reader_ref, by_reader, writer_ref, by_writer = q_ref, by_head, k_ref, by_tail
  if reverse:
    reader_ref, by_reader, writer_ref, by_writer = k_ref, by_tail, q_ref, by_head

  def chunk(m, S):
    n = chunk_of(p, place.n, m, reverse)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    if kept_ref:
      give_state(kept_ref[0], S, parts, values, n)
    runs = runs_of(p, runs_ref, edges_ref, n, at)
    y = take(y_ref.at[at, :], both(tokens, values))
    head, tail = decays(p, g_ref, at, tokens, tiles.head_per_head, tiles.tail_per_head)

    def load(ref, part, decay):
      columns, mask = part[0], both(tokens, part[1])
      x = take(ref.at[at, columns], mask)
      return x * decay(take(g_ref.at[at, columns], mask).astype(f32)) if p.gate == "channel" else x

    read = read_state(product, [load(reader_ref, part, by_reader) for part in parts], S)
    read = (
      tiles.to_end(runs, tail * read) if reverse else tiles.from_start(runs, p.scale * head * read)
    )
    if scores_ref is None:
      scores = scores_of(
        product, take_parts(q_ref, at, tokens, parts), take_parts(k_ref, at, tokens, parts)
      )
      if p.gate == "head":
        scores *= tiles.between_per_head(take(g_ref.at[at], tokens).astype(f32))
      scores = tiles.pairs(runs, upto, scores)
    else:
      scores = take(scores_ref.at[n], None)
    near = p.scale * (product.outer if reverse else product)(scores, y)
    give(
      out_ref.at[at, :],
      read + (near if p.NK == 1 else jnp.where(place.i == 0, near, 0.0)),
      both(tokens, values),
    )
    y = tiles.from_start(runs, p.scale * head * y) if reverse else tiles.to_end(runs, tail * y)

    def update(x, part):
      total = tiles.throughout(runs, total_decay(p, g_ref, at, tokens, part))
      return total * x + product.outer(load(writer_ref, part, by_writer), y)

    return [update(x, part) for x, part in zip(S, parts, strict=True)]

  give_state(
    last_ref, lax.fori_loop(0, p.span, chunk, take_state(state_ref, parts, values)), parts, values
  )


def scores_apart(p: Plan) -> bool:
  """Whether the scores are a launch of their own: a program of `attend` has no registers for them."""
  return p.gate == "channel" or p.dtype != jnp.bfloat16 or p.K > WIDE


def attend(
  p: Plan, q, k, y, g, runs, edges, state, like, reverse: bool, keep: bool
) -> tuple[Array, ...]:
  """What comes out, the state at the end (in reverse at the start), and if wanted the states at the chunks' starts (ends)."""
  scores = _scores(p, q, k, g, runs, edges) if scores_apart(p) else None
  states = state[:, None]
  if p.P > 1:
    ends = _summaries(p, q if reverse else k, y, g, runs, edges, reverse)
    states = segments.by_decays(p, segments.decays(p, g, edges), ends, state, reverse)
  p = p.cut_in_parts(TILES, "attend_back" if reverse else "attend", WIDE)
  kinds = "q", "q", "v", p.gate, "runs", "edges", "pairs", "segment"
  whole = ("v", like.shape, like.dtype) if p.NK == 1 else ("partial", (p.NK, *like.shape), f32)
  results = [whole, ("segment", states.shape, f32)]
  results += [("kept", (p.B, p.HV, p.N, p.K, p.V), p.kept)] if keep else []
  name = ("linear_cotangents" if reverse else "linear_outputs") + in_segments(p)
  inputs = q, k, y, g, runs, edges, scores, states
  kernel = functools.partial(_attend_kernel, reverse=reverse)
  out, after, *kept = start(kernel, p, AXES["attend"], name, kinds, inputs, results)
  return out if p.NK == 1 else out.sum(0).astype(like.dtype), after[:, 0 if reverse else -1], *kept


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
    v, do = (
      take(v_ref.at[:, at], both(tokens, values)),
      take(do_ref.at[:, at], both(tokens, values)),
    )
    S, dS = (
      take(kept_ref.at[:, at], both(keys, values)),
      take(dkept_ref.at[:, at], both(keys, values)),
    )
    dscores, dq, dk = (
      dscores + product.inner(do, v),
      dq + product.inner(do, S),
      dk + product.inner(v, dS),
    )
    return dscores, dq, dk, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  square, tall = jnp.zeros((p.C, p.C), f32), jnp.zeros((p.C, p.k_tile), f32)
  dscores, dq, dk_state, total = over(p.NV, tile, (square, tall, tall, jnp.zeros(p.k_tile, f32)))
  q, k = take(q_ref, both(tokens, keys)).astype(f32), take(k_ref, both(tokens, keys)).astype(f32)
  own = p.scale * jnp.sum(jnp.where(row == column, dscores, 0.0), axis=1)[:, None]
  dq = tiles.from_start(runs, dq * p.scale)
  dk_state = tiles.to_end(runs, dk_state)
  dscores, g = p.scale * tiles.pairs(runs, row > column, dscores), None

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
      dq, dk_state = (
        dq * tiles.head_per_head(g)[:, None],
        dk_state * tiles.tail_per_head(g)[:, None],
      )
    dq, dk = dq + product(dscores, k), product.outer(dscores, q)

  if g is not None:
    late, after = q * dq - k * dk, k * dk_state
    dg = tiles.gate_cotangent(g, runs, late, None, after, total, full)
    give(outputs[2], dg, both(tokens, keys) if p.gate == "channel" else tokens)
  give(outputs[0], dq + own * k, both(tokens, keys))
  give(outputs[1], dk + dk_state + own * q, both(tokens, keys))


def _pairs(p: Plan, q, k, v, do, g, runs, edges, kept, dkept) -> tuple[Array, Array, Array | None]:
  p = p.cut(TILES, "pairs")
  kinds, inputs = (
    ("q", "q", "v", "v", p.gate, "runs", "edges", "kept", "kept"),
    (q, k, v, do, g, runs, edges, kept, dkept),
  )
  found = start(
    _pairs_kernel, p, AXES["pairs"], "linear_pairs", kinds, inputs, key_cotangents(p, q, k)
  )
  (dq, dk), dg = gathered(p, found, 2)
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
  p = plan(q, v, g, True, scale, tiles.operand_dtype(q, k, v))
  return _attend(float(scale), (q, k, v, g, state), documents(runs, p))


def _pass(scale: float, inputs, packed, keep: bool):
  q, k, v, g, state = inputs
  p = plan(q, v, g, packed is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = packed or (None, None)
  o, last, *kept = attend(p, q, k, v, g, runs, edges, state, v, reverse=False, keep=keep)
  return (o, last), (inputs, packed, kept)


def _forward(scale: float, inputs, packed):
  return _pass(scale, inputs, packed, keep=True)


def _alone(scale: float, inputs, packed):
  return _pass(scale, inputs, packed, keep=False)


def _backward(scale: float, residuals, cotangents):
  (q, k, v, g, state), packed, (kept,) = residuals
  do, dlast = cotangents
  p = plan(q, v, g, packed is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = packed or (None, None)
  dv, dstate, dkept = attend(p, q, k, do, g, runs, edges, dlast, v, reverse=True, keep=True)
  dq, dk, dg = _pairs(p, q, k, v, do, g, runs, edges, kept, dkept)
  dg = None if g is None or dg is None else dg.astype(g.dtype)
  return (dq.astype(q.dtype), dk.astype(k.dtype), dv, dg, dstate.astype(state.dtype)), None


_attend = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, g=None, initial_state=None, *, bonus=None, chunk_size: int | None = None
) -> str | None:
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
  return one_token("linear_decode", state, q, k, v, None, g, scale)
