"""Kernels of the additive family: S = Diag(exp g) S + k v^T, o = scale S^T q.

Time is cut into N chunks of C tokens; letters are those of `lajax.pallas.plan`. The launches:

forward
  `scores`: scores of q with k in each chunk. Only where `scan` has no registers for them: with
    decays per channel, with products of float32, and beyond K = `WIDE`.
  `summaries`: the summary of each time split, from which `lajax.pallas.time_splits` makes the state
    that each split begins with. Only where columns are few and time is long.
  `scan`: goes through the chunks, one program per tile of columns of a state. Makes the outputs.
    Stores the state before each chunk if there will be a backward pass.
backward
  `scores`, `summaries`, `scan` in reverse: dv, and the cotangent of the state after each chunk.
  `key_gradients`: dq, dk and dg.

Residuals are the inputs and the states before the chunks.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas import tiles, time_splits
from lajax.pallas.decode import decode as one_token
from lajax.pallas.launch import differentiable
from lajax.pallas.nonfinite import guarded
from lajax.pallas.plan import (
  Axes,
  MatrixPlan,
  Static,
  Tiles,
  chunk_documents,
  chunk_of,
  document_of,
  key_cotangents,
  launch_plan,
  loop_tiles,
  places,
  plan,
  refusal,
  split_suffix,
  sum_over_groups,
)  # fmt: skip
from lajax.pallas.state_tiles import (
  decays,
  load_parts,
  load_state,
  parts_of,
  read_state,
  scores_of,
  store_state,
  total_decay,
)
from lajax.pallas.tiles import iota, load, store, tile_mask

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
  ("scan", False, False): Tiles(32, 64, 8, 2),
  ("scan_back", False, False): Tiles(64, 32, 8, 2),
  ("scan", True, False): Tiles(32, 64, 8, 2),
  ("scan_back", True, False): Tiles(32, 64, 8, 2),
  ("scan", False, True): Tiles(32, 16, 8, 2),
  ("scan_back", False, True): Tiles(32, 16, 8, 2),
  ("scan", True, True): Tiles(32, 16, 8, 2),
  ("scan_back", True, True): Tiles(32, 16, 8, 2),
  ("key_gradients", False, False): Tiles(64, 32, 8, 2),
  ("key_gradients", True, False): Tiles(64, 32, 8, 1),
  ("key_gradients", False, True): Tiles(16, 32, 4, 1),
  ("key_gradients", True, True): Tiles(32, 32, 4, 1),
}
# Most rows of a state in a program of `scan`; beyond, outputs are sums over several programs.
WIDE = 128
AXES = {
  "summaries": Axes(False, True, True),
  "scores": Axes(True, False, False),
  "scan": Axes(False, True, True),
  "key_gradients": Axes(True, True, False),
}


# --- summaries of time splits ---------------------------------------------------------------------


def _summaries_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan, reverse: bool):
  """S = total S + (to_end k)^T v from zeros through one split; in reverse dS = total dS + scale
  (from_start q)^T do.
  """
  x_ref, y_ref, g_ref, document_ref, edges_ref = inputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["summaries"])[0](pl.program_id(0))
  keys, values = p.keys(place.i), p.values(place.j)

  def chunk(m, S):
    n = chunk_of(p, place.n, m, reverse)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    document = document_of(p, document_ref, edges_ref, n, at)
    x, y = (
      load(x_ref.at[at, :], tile_mask(tokens, keys)),
      load(y_ref.at[at, :], tile_mask(tokens, values)),
    )
    total = jnp.ones((), f32)
    if p.gate == "head":
      g = load(g_ref.at[at], tokens).astype(f32)
      decay = tiles.from_start_per_head(g) if reverse else tiles.to_end_per_head(g)
      x, total = x.astype(f32) * decay[:, None], jnp.exp(jnp.sum(g))
    elif p.gate == "channel":
      g = load(g_ref.at[at, :], tile_mask(tokens, keys)).astype(f32)
      decay = tiles.from_start_per_channel(g) if reverse else tiles.to_end_per_channel(g, full)
      x, total = x.astype(f32) * decay, jnp.exp(jnp.sum(g, axis=0))[:, None]
    x = tiles.mask_from_start(document, x) if reverse else tiles.mask_to_end(document, x)
    add = product.outer(x, y)
    return tiles.mask_total(document, total * S) + (add * p.scale if reverse else add)

  S = lax.fori_loop(0, p.span, chunk, jnp.zeros((p.k_tile, p.v_tile), f32))
  store(outputs[0], S, tile_mask(keys, values))


def _summaries(p: MatrixPlan, x, y, g, document, edges, reverse: bool) -> Array:
  p, name = p.cut(TILES, "summaries"), "linear_summaries_back" if reverse else "linear_summaries"
  kinds, results = (
    ("q", "v", p.gate, "document", "edges"),
    [("split state", (p.B, p.P, p.HV, p.K, p.V), f32)],
  )
  kernel = functools.partial(_summaries_kernel, reverse=reverse)
  (updates,) = launch_plan(
    kernel, p, AXES["summaries"], name, kinds, (x, y, g, document, edges), results
  )
  return updates


# --- scores of each chunk, where `scan` has no registers for them ---------------------------------


def _scores_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """Scores of q with k in a chunk, decayed between the two tokens, on and below the diagonal."""
  q_ref, k_ref, g_ref, document_ref, edges_ref = inputs
  product = tiles.products(p.dtype, interpreted)
  place = places(p, AXES["scores"])[0](pl.program_id(0))
  tokens = p.tokens(place.n)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(i, scores):
    at, mask = pl.ds(i * p.k_tile, p.k_tile), tile_mask(tokens, p.keys(i))
    q, k = load(q_ref.at[:, at], mask), load(k_ref.at[:, at], mask)
    if p.gate != "channel":
      return scores + product.inner(q, k)
    q, k, g = q.astype(f32), k.astype(f32), load(g_ref.at[:, at], mask).astype(f32)
    scores += jnp.where(row == column, jnp.sum(q * k, axis=1)[:, None], 0.0)
    for h, upto, after in tiles.halves(g, p.bounded):
      if h < p.C:
        scores += jnp.where(
          tiles.crosses_halves(p.C, h, p.bounded), product.inner(q * upto, k * after), 0.0
        )
    return scores

  scores = loop_tiles(p.NK, tile, jnp.zeros((p.C, p.C), f32))
  if p.gate == "head":
    scores *= tiles.between_per_head(load(g_ref, tokens).astype(f32))
  store(outputs[0], tiles.mask_scores(document, row >= column, scores), None)


def _scores(p: MatrixPlan, q, k, g, document, edges) -> Array:
  p = p.cut(TILES, "scores")
  kinds, results = (
    ("q", "q", p.gate, "document", "edges"),
    [("scores", (p.B, p.HV, p.N, p.C, p.C), p.state_dtype)],
  )
  (scores,) = launch_plan(
    _scores_kernel, p, AXES["scores"], "linear_scores", kinds, (q, k, g, document, edges), results
  )
  return scores


# --- scan: through the chunks ---------------------------------------------------------------------


def _scan_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan, reverse: bool):
  """o = scale (scores v + (from_start q) S), then S = total S + (to_end k)^T v, chunk by chunk.
  Stores S before each.

  In reverse dv = scale scores^T do + (to_end k) dS, then dS = total dS + scale (from_start q)^T do.
  Stores dS after each.
  """
  q_ref, k_ref, y_ref, g_ref, document_ref, edges_ref, scores_ref, state_ref = inputs
  out_ref, last_ref, *chunk_states_ref = outputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["scan"])[0](pl.program_id(0))
  parts, values = parts_of(p, place.i), p.values(place.j)
  causal = iota((p.C, p.C), 0) >= iota((p.C, p.C), 1)
  # A reader takes from the state, a writer adds to it. In reverse k reads dS, and q writes to it.
  decay_q, decay_k = tiles.from_start_per_channel, lambda g: tiles.to_end_per_channel(g, full)
  reader_ref, decay_reader, writer_ref, decay_writer = q_ref, decay_q, k_ref, decay_k
  if reverse:
    reader_ref, decay_reader, writer_ref, decay_writer = k_ref, decay_k, q_ref, decay_q

  def chunk(m, S):
    n = chunk_of(p, place.n, m, reverse)
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    if chunk_states_ref:
      store_state(chunk_states_ref[0], S, parts, values, n)
    document = document_of(p, document_ref, edges_ref, n, at)
    y = load(y_ref.at[at, :], tile_mask(tokens, values))
    from_start, to_end = decays(
      p, g_ref, at, tokens, tiles.from_start_per_head, tiles.to_end_per_head
    )

    def load_decayed(ref, part, decay):
      columns, mask = part[0], tile_mask(tokens, part[1])
      x = load(ref.at[at, columns], mask)
      return (
        x.astype(f32) * decay(load(g_ref.at[at, columns], mask).astype(f32))
        if p.gate == "channel"
        else x
      )

    read = read_state(product, [load_decayed(reader_ref, part, decay_reader) for part in parts], S)
    read = (
      tiles.mask_to_end(document, to_end * read)
      if reverse
      else tiles.mask_from_start(document, p.scale * from_start * read)
    )
    if scores_ref is None:
      scores = scores_of(
        product, load_parts(q_ref, at, tokens, parts), load_parts(k_ref, at, tokens, parts)
      )
      if p.gate == "head":
        scores *= tiles.between_per_head(load(g_ref.at[at], tokens).astype(f32))
      scores = tiles.mask_scores(document, causal, scores)
    else:
      scores = load(scores_ref.at[n], None)
    within = p.scale * (product.outer if reverse else product)(scores, y)
    store(
      out_ref.at[at, :],
      # Where several programs share K their outputs are summed: the first one adds what is within
      # the chunk.
      read + (within if p.NK == 1 else jnp.where(place.i == 0, within, 0.0)),
      tile_mask(tokens, values),
    )
    y = (
      tiles.mask_from_start(document, p.scale * from_start * y.astype(f32))
      if reverse
      else tiles.mask_to_end(document, to_end * y.astype(f32))
    )

    def update(x, part):
      total = total_decay(p, g_ref, at, tokens, part)
      return tiles.mask_total(document, total * x) + product.outer(
        load_decayed(writer_ref, part, decay_writer), y
      )

    return [update(x, part) for x, part in zip(S, parts, strict=True)]

  store_state(
    last_ref, lax.fori_loop(0, p.span, chunk, load_state(state_ref, parts, values)), parts, values
  )


def needs_scores_launch(p: MatrixPlan) -> bool:
  """Returns whether scores are a launch of their own: a program of `scan` has no registers for
  them.
  """
  return p.gate == "channel" or p.dtype != jnp.bfloat16 or p.K > WIDE


def scan_chunks(
  p: MatrixPlan, q, k, y, g, document, edges, state, like, reverse: bool, keep_states: bool
) -> tuple[Array, ...]:
  """Returns the outputs, the last state and, if they are kept, the states before the chunks.

  In reverse `y` is do and `state` the cotangent of the last state. Returns dv, the cotangent of the
  first state and, if they are kept, the cotangents of the states after the chunks.
  """
  scores = _scores(p, q, k, g, document, edges) if needs_scores_launch(p) else None
  states = state[:, None]
  if p.P > 1:
    updates = _summaries(p, q if reverse else k, y, g, document, edges, reverse)
    states = time_splits.by_decays(p, time_splits.decays(p, g, edges), updates, state, reverse)
  p = p.cut_in_parts(TILES, "scan_back" if reverse else "scan", WIDE)
  kinds = "q", "q", "v", p.gate, "document", "edges", "scores", "split state"
  whole = ("v", like.shape, like.dtype) if p.NK == 1 else ("partial", (p.NK, *like.shape), f32)
  results = [whole, ("split state", states.shape, f32)]
  results += [("chunk_states", (p.B, p.HV, p.N, p.K, p.V), p.state_dtype)] if keep_states else []
  name = ("linear_cotangents" if reverse else "linear_outputs") + split_suffix(p)
  inputs = q, k, y, g, document, edges, scores, states
  kernel = functools.partial(_scan_kernel, reverse=reverse)
  out, after, *chunk_states = launch_plan(kernel, p, AXES["scan"], name, kinds, inputs, results)
  return (
    out if p.NK == 1 else out.sum(0).astype(like.dtype),
    after[:, 0 if reverse else -1],
    *chunk_states,
  )


# --- key_gradients: dq, dk and dg -----------------------------------------------------------------


def _key_gradients_kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan):
  """dq, dk and dg of one tile of K, from the cotangents of the scores, of reads from the state, and
  of writes to it.

  The score of a token with itself has no decay and no part in dg: `own` adds its cotangent at the
    end.
  """
  (
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    g_ref,
    document_ref,
    edges_ref,
    chunk_states_ref,
    dchunk_states_ref,
  ) = inputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = places(p, AXES["key_gradients"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  document = document_of(p, document_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(j, sums):
    dscores, dq, dk, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    v, do = (
      load(v_ref.at[:, at], tile_mask(tokens, values)),
      load(do_ref.at[:, at], tile_mask(tokens, values)),
    )
    S, dS = (
      load(chunk_states_ref.at[:, at], tile_mask(keys, values)),
      load(dchunk_states_ref.at[:, at], tile_mask(keys, values)),
    )
    dscores, dq, dk = (
      dscores + product.inner(do, v),
      dq + product.inner(do, S),
      dk + product.inner(v, dS),
    )
    return dscores, dq, dk, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  square, keys_zeros = jnp.zeros((p.C, p.C), f32), jnp.zeros((p.C, p.k_tile), f32)
  dscores, dq, dk_state, total = loop_tiles(
    p.NV, tile, (square, keys_zeros, keys_zeros, jnp.zeros(p.k_tile, f32))
  )
  q, k = (
    load(q_ref, tile_mask(tokens, keys)).astype(f32),
    load(k_ref, tile_mask(tokens, keys)).astype(f32),
  )
  own = p.scale * jnp.sum(jnp.where(row == column, dscores, 0.0), axis=1)[:, None]
  dq = tiles.mask_from_start(document, dq * p.scale)
  dk_state = tiles.mask_to_end(document, dk_state)
  dscores, g = p.scale * tiles.mask_scores(document, row > column, dscores), None

  if p.gate == "channel":
    g = load(g_ref, tile_mask(tokens, keys)).astype(f32)
    dq_scores, dk = jnp.zeros_like(dq), jnp.zeros_like(dq)
    for h, upto, after in tiles.halves(g, p.bounded):
      if h == p.C:
        dq, dk_state = dq_scores + dq * upto, dk_state * after
      else:
        corner = jnp.where(tiles.crosses_halves(p.C, h, p.bounded), dscores, 0.0)
        dq_scores += product(corner, k * after) * upto
        dk += product.outer(corner, q * upto) * after
  else:
    if p.gate == "head":
      g = load(g_ref, tokens).astype(f32)
      dscores = dscores * tiles.between_per_head(g)
      dq, dk_state = (
        dq * tiles.from_start_per_head(g)[:, None],
        dk_state * tiles.to_end_per_head(g)[:, None],
      )
    dq, dk = dq + product(dscores, k), product.outer(dscores, q)

  if g is not None:
    late, after = q * dq - k * dk, k * dk_state
    dg = tiles.gate_cotangent(g, document, late, None, after, total, full)
    store(outputs[2], dg, tile_mask(tokens, keys) if p.gate == "channel" else tokens)
  store(outputs[0], dq + own * k, tile_mask(tokens, keys))
  store(outputs[1], dk + dk_state + own * q, tile_mask(tokens, keys))


def _key_gradients(
  p: MatrixPlan, q, k, v, do, g, document, edges, chunk_states, dchunk_states
) -> tuple[Array, Array, Array | None]:
  p = p.cut(TILES, "key_gradients")
  kinds, inputs = (
    ("q", "q", "v", "v", p.gate, "document", "edges", "chunk_states", "chunk_states"),
    (q, k, v, do, g, document, edges, chunk_states, dchunk_states),
  )
  found = launch_plan(
    _key_gradients_kernel,
    p,
    AXES["key_gradients"],
    "linear_key_gradients",
    kinds,
    inputs,
    key_cotangents(p, q, k),
  )
  (dq, dk), dg = sum_over_groups(p, found, 2)
  return dq, dk, dg


# --- the operation --------------------------------------------------------------------------------


def linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  document: Int[Array, "B T"] | None = None,
  scale: float = 1.0,
  bounded: bool = False,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """S = Diag(exp g) S + k v^T, o = scale S^T q; also with packed documents.

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H. Operands of
      products have the dtype that q, k and v share, bfloat16 or float16, else float32.
    v: [B T HV V].
    g: log decay, <= 0: None, [B T HV] or [B T HV K].
    state: [B HV K V], the state before the first token, float32.
    document: [B T], number of a token's document in its row, counted from 0; the state becomes zero
      where it changes. Padding has the number of the document before it, and q, k, v, g are zeros
      there.
    scale: of the output.
    bounded: whether no entry of a g per channel is below -5; the kernels then take fewer products.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last token, [B HV K V] in float32.
  """
  static, packed = Static(float(scale), bounded), None
  if document is not None:
    packed = chunk_documents(document, _plan(q, k, v, g, True, static))
  return _compute(static, (q, k, v, g, state), packed)


def _plan(q, k, v, g, documents: bool, static: Static) -> MatrixPlan:
  dtype = tiles.operand_dtype(q, k, v)
  return plan(q, v, g, documents, static.scale, dtype, static.bounded)


def _pass(static: Static, inputs, packed, keep_states: bool):
  q, k, v, g, state = inputs
  p = _plan(q, k, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  o, last, *chunk_states = scan_chunks(
    p, q, k, v, g, document, edges, state, v, reverse=False, keep_states=keep_states
  )
  return (o, last), (inputs, packed, chunk_states)


def _forward(static: Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=True)


def _alone(static: Static, inputs, packed):
  return _pass(static, inputs, packed, keep_states=False)


def _backward(static: Static, residuals, cotangents):
  (q, k, v, g, state), packed, (chunk_states,) = residuals
  do, dlast = cotangents
  p = _plan(q, k, v, g, packed is not None, static)
  document, edges = packed or (None, None)
  dv, dstate, dchunk_states = scan_chunks(
    p, q, k, do, g, document, edges, dlast, v, reverse=True, keep_states=True
  )
  dq, dk, dg = _key_gradients(p, q, k, v, do, g, document, edges, chunk_states, dchunk_states)
  dg = None if g is None or dg is None else dg.astype(g.dtype)
  return (dq.astype(q.dtype), dk.astype(k.dtype), dv, dg, dstate.astype(state.dtype)), None


_compute = differentiable(*guarded(_forward, _backward, _alone))


def supports(
  q, k, v, g=None, initial_state=None, *, bonus=None, chunk_size: int | None = None
) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  p = _plan(q, k, v, g, False, Static(1.0))
  inputs = dict(q=q, k=k, v=v, g=g, initial_state=initial_state, bonus=bonus)
  return refusal(p, inputs, chunk_size, TILES, AXES)


def decode(
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  scale: float = 1.0,
  reads_before: bool = False,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """Computes one token of `linear_attention`: the next state in float32, and o in v.dtype. Has no
  derivative.

  With `reads_before`, q reads the state before the token. The state is read once and written once,
  in place if the caller donates it.
  """
  return one_token("linear_decode", state, q, k, v, None, g, scale, reads_before=reads_before)
