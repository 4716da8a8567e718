"""Kernels of the additive family: S = Diag(exp g) S + k v^T, o = scale S^T q.

Time is cut into N chunks of C tokens. Forward are two launches: `carry` goes through the chunks and keeps the state
that each begins with, one program for each tile of a state; `read` makes the outputs of every chunk, all at once.
Backward are three: `carry` in reverse keeps the cotangent of the state that each chunk ends with; `read` transposed
gives dv; `pairs` gives dq, dk and dg. What is kept between forward and backward are the inputs and the states at the
chunks' starts.

Letters: K and V are cut into NK and NV tiles of so many columns (`k_tile`, `v_tile`); i counts tiles of K, j of V, n
chunks.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas import tiles
from lajax.pallas.launch import launch, once
from lajax.pallas.tiles import Runs, both, give, inside, iota, take

f32 = jnp.float32
MAX_K = 256


class Tiles(NamedTuple):
  """How a kernel cuts its work: most columns of K and V in a tile, warps, and stages of the loads' pipeline."""

  k: int
  v: int
  warps: int
  stages: int


CHUNK = {  # tokens, by whether there is one decay a channel, and whether the operands are wider than bfloat16
  (False, False): 64, (True, False): 32,
  (False, True): 32, (True, True): 16,
}  # fmt: skip
TILES = {  # by kernel, and the same two: without spills on every architecture that lajax.pallas.report compiles for
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
AXES = {  # of the programs, beside batch and heads: chunks, tiles of K, tiles of V
  "carry": (False, True, True),
  "read": (True, False, True),
  "pairs": (True, True, False),
}
DECODE = Tiles(MAX_K, 32, 4, 1)


class Plan(NamedTuple):
  """The sizes of a call, and how one kernel cuts them."""

  B: int
  T: int
  H: int
  HV: int
  K: int
  V: int
  gate: str  # none, head or channel
  documents: bool
  scale: float
  dtype: jnp.dtype  # of the inputs of products
  C: int
  k_tile: int = 0
  v_tile: int = 0
  warps: int = 0
  stages: int = 0

  @property
  def N(self) -> int:
    return -(-self.T // self.C)

  @property
  def NK(self) -> int:
    return -(-self.K // self.k_tile)

  @property
  def NV(self) -> int:
    return -(-self.V // self.v_tile)

  @property
  def kept(self) -> jnp.dtype:
    """The dtype of the kept states: what products take anyway."""
    return self.dtype if self.dtype == jnp.bfloat16 else jnp.dtype(f32)

  def cut(self, kernel: str) -> "Plan":
    t = TILES[kernel, self.gate == "channel", self.dtype != jnp.bfloat16]
    return self._replace(k_tile=_side(self.K, t.k), v_tile=_side(self.V, t.v), warps=t.warps, stages=t.stages)

  def tokens(self, n) -> Array | None:
    return inside(n * self.C, self.C, self.T, self.T % self.C == 0)

  def keys(self, i) -> Array | None:
    return inside(i * self.k_tile, self.k_tile, self.K, self.K % self.k_tile == 0)

  def values(self, j) -> Array | None:
    return inside(j * self.v_tile, self.v_tile, self.V, self.V % self.v_tile == 0)


def _side(size: int, most: int) -> int:
  """A power of two of at least 16, the least that a product takes."""
  return max(16, min(most, 1 << (size - 1).bit_length()))


def _plan(q, v, g, documents: bool, scale: float, dtype) -> Plan:
  (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
  gate = "none" if g is None else "head" if g.ndim == 3 else "channel"
  C = CHUNK[gate == "channel", dtype != jnp.bfloat16]
  return Plan(B, T, H, HV, K, V, gate, documents, float(scale), dtype, C)


# --- blocks ----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
  """Which part of the arrays a program works on."""

  b: Array
  n: Array
  h: Array  # of the value heads
  i: Array
  j: Array


def _places(p: Plan, chunks: bool, keys: bool, values: bool):
  """Program number -> Place, over batch, chunks, heads and tiles where wanted; neighbours in number share inputs."""
  sizes = (p.N if chunks else 1, p.HV, p.NK if keys else 1, p.NV if values else 1)

  def place(program) -> Place:
    parts = []
    for size in reversed(sizes):
      parts.append(program % size if size > 1 else 0)
      program = program // size
    return Place(program, *reversed(parts))

  return place, p.B * math.prod(sizes)


def _specs(p: Plan, place, chunks: bool, keys: bool, values: bool):
  """BlockSpecs by kind of array. Without an axis among the programs' a block has all of it."""
  G = p.HV // p.H
  C, K, V = (p.C if chunks else p.N * p.C, p.k_tile * (1 if keys else p.NK), p.v_tile * (1 if values else p.NV))
  n = lambda x: x.n if chunks else 0
  i = lambda x: x.i if keys else 0
  j = lambda x: x.j if values else 0
  spec = lambda shape, index: pl.BlockSpec(shape, lambda program: index(place(program)))
  every = None if chunks else p.N
  return {
    "q": spec((None, C, None, K), lambda x: (x.b, n(x), x.h // G, i(x))),
    "dq": spec((None, C, None, K), lambda x: (x.b, n(x), x.h, i(x))),
    "v": spec((None, C, None, V), lambda x: (x.b, n(x), x.h, j(x))),
    "none": None,
    "head": spec((None, C, None), lambda x: (x.b, n(x), x.h)),
    "channel": spec((None, C, None, K), lambda x: (x.b, n(x), x.h, i(x))),
    "dhead": spec((None, None, C, None), lambda x: (i(x), x.b, n(x), x.h)),
    "runs": spec((None, C), lambda x: (x.b, n(x))),
    "edges": spec((None, p.N + 1), lambda x: (x.b, 0)),
    "state": spec((None, None, K, V), lambda x: (x.b, x.h, i(x), j(x))),
    "kept": spec((None, None, every, K, V), lambda x: (x.b, x.h, n(x), i(x), j(x))),
  }


def _runs(p: Plan, runs_ref, edges_ref, n, at) -> Runs | None:
  return Runs(runs_ref[at], edges_ref[n], edges_ref[n + 1]) if p.documents else None


def _over(count: int, body, carry):
  """The sum over so many tiles."""
  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


# --- carry: states from chunk to chunk -------------------------------------------------------------------------------


def _carry_kernel(inputs, outputs, *, interpreted: bool, p: Plan, reverse: bool):
  """S = total S + (tail k)^T v, keeping S before each chunk; or dS = total dS + scale (head q)^T do, in reverse."""
  x_ref, y_ref, g_ref, runs_ref, edges_ref, state_ref = inputs
  kept_ref, last_ref = outputs
  product, full = tiles.products(p.dtype, interpreted), tiles.full_products(interpreted)
  place = _places(p, *AXES["carry"])[0](pl.program_id(0))
  keys, values = p.keys(place.i), p.values(place.j)

  def chunk(m, S):
    n = p.N - 1 - m if reverse else m
    at, tokens = pl.ds(n * p.C, p.C), p.tokens(n)
    give(kept_ref.at[n], S, both(keys, values))
    runs = _runs(p, runs_ref, edges_ref, n, at)
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
  p = p.cut("carry")
  place, programs = _places(p, *AXES["carry"])
  specs = _specs(p, place, *AXES["carry"])
  kept = jax.ShapeDtypeStruct((p.B, p.HV, p.N, p.K, p.V), p.kept)
  kept, last = launch(
    functools.partial(_carry_kernel, p=p, reverse=reverse), (x, y, g, runs, edges, state),
    name="carry_cotangents" if reverse else "carry_states", programs=programs, warps=p.warps, stages=p.stages,
    in_specs=[specs[name] for name in ("q", "v", p.gate, "runs", "edges", "state")],
    out_specs=[specs["kept"], specs["state"]], out_shapes=[kept, jax.ShapeDtypeStruct(state.shape, f32)],
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
  scores, read = _over(p.NK, tile, zeros)
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
  place = _places(p, *AXES["read"])[0](pl.program_id(0))
  tokens, values = p.tokens(place.n), p.values(place.j)
  runs = _runs(p, runs_ref, edges_ref, place.n, slice(None))
  scores, read = _scores_and_read(p, product, runs, tokens, q_ref, k_ref, g_ref, kept_ref, values, transposed)
  y = take(y_ref, both(tokens, values))
  out = product.outer(scores, y) * p.scale + read if transposed else (product(scores, y) + read) * p.scale
  give(out_ref, out, both(tokens, values))


def _read(p: Plan, q, k, y, g, runs, edges, kept, like, transposed: bool) -> Array:
  p = p.cut("read")
  place, programs = _places(p, *AXES["read"])
  specs = _specs(p, place, *AXES["read"])
  (out,) = launch(
    functools.partial(_read_kernel, p=p, transposed=transposed), (q, k, y, g, runs, edges, kept),
    name="read_dv" if transposed else "read_outputs", programs=programs, warps=p.warps, stages=p.stages,
    in_specs=[specs[name] for name in ("q", "q", "v", p.gate, "runs", "edges", "kept")],
    out_specs=[specs["v"]], out_shapes=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
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
  place = _places(p, *AXES["pairs"])[0](pl.program_id(0))
  tokens, keys = p.tokens(place.n), p.keys(place.i)
  runs = _runs(p, runs_ref, edges_ref, place.n, slice(None))
  row, column = iota((p.C, p.C), 0), iota((p.C, p.C), 1)

  def tile(j, sums):
    dscores, dq, dk, total = sums
    at, values = pl.ds(j * p.v_tile, p.v_tile), p.values(j)
    v, do = take(v_ref.at[:, at], both(tokens, values)), take(do_ref.at[:, at], both(tokens, values))
    S, dS = take(kept_ref.at[:, at], both(keys, values)), take(dkept_ref.at[:, at], both(keys, values))
    dscores, dq, dk = dscores + product.inner(do, v), dq + product.inner(do, S), dk + product.inner(v, dS)
    return dscores, dq, dk, total + jnp.sum(S.astype(f32) * dS.astype(f32), axis=1)

  square, tall = jnp.zeros((p.C, p.C), f32), jnp.zeros((p.C, p.k_tile), f32)
  dscores, dq, dk_state, total = _over(p.NV, tile, (square, tall, tall, jnp.zeros(p.k_tile, f32)))
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
  p = p.cut("pairs")
  place, programs = _places(p, *AXES["pairs"])
  specs = _specs(p, place, *AXES["pairs"])
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
    name="pairs_dq_dk_dg", programs=programs, warps=p.warps, stages=p.stages,
    in_specs=[specs[name] for name in ("q", "q", "v", "v", p.gate, "runs", "edges", "kept", "kept")],
    out_specs=[specs[name] for name, _ in results], out_shapes=[shape for _, shape in results],
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
  C = _plan(q, v, g, True, scale, tiles.operand_dtype(q, k, v)).C
  padded = jnp.pad(runs, [(0, 0), (0, -runs.shape[1] % C)], mode="edge")
  edges = jnp.pad(padded[:, C - 1 :: C], [(0, 0), (1, 0)])  # of the token before each chunk, and of the last token
  return _attend(float(scale), (q, k, v, g, state), (padded, edges))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale: float, inputs, documents):
  return _forward(scale, inputs, documents)[0]


def _forward(scale: float, inputs, documents):
  q, k, v, g, state = inputs
  p = _plan(q, v, g, documents is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = documents or (None, None)
  kept, last = _carry(p, k, v, g, runs, edges, state, reverse=False)
  o = _read(p, q, k, v, g, runs, edges, kept, v, transposed=False)
  return (o, last), (inputs, documents, kept)


def _backward(scale: float, residuals, cotangents):
  (q, k, v, g, state), documents, kept = residuals
  do, dlast = cotangents
  p = _plan(q, v, g, documents is not None, scale, tiles.operand_dtype(q, k, v))
  runs, edges = documents or (None, None)
  dkept, dstate = _carry(p, q, do, g, runs, edges, dlast, reverse=True)
  dv = _read(p, q, k, do, g, runs, edges, dkept, v, transposed=True)
  dq, dk, dg = _pairs(p, q, k, v, do, g, runs, edges, kept, dkept)
  dg = None if g is None or dg is None else dg.astype(g.dtype)
  return (dq.astype(q.dtype), dk.astype(k.dtype), dv, dg, dstate.astype(state.dtype)), None


_attend.defvjp(once(_forward), once(_backward))


def supports(q, k, v, g=None, initial_state=None, *, bonus=None, chunk_size: int | None = None) -> str | None:
  """None where the kernels take this, else a sentence that says what they do not take. Reads shapes and dtypes only."""
  wide = [x.dtype for x in (q, k, v, g, initial_state) if x is not None and x.dtype == jnp.float64]
  (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
  if wide:
    return "the kernels compute in float32, and an input is float64."
  if K > MAX_K:
    return f"the kernels take keys of up to K = {MAX_K}, and K is {K}."
  if bonus is not None:
    return "the kernels do not have `bonus`."
  p = _plan(q, v, g, False, 1.0, tiles.operand_dtype(q, k, v))
  if chunk_size is not None and chunk_size != p.C:
    return f"the kernels' chunks have {p.C} tokens here, and chunk_size is {chunk_size}."
  programs = max(_places(p.cut(kernel), *axes)[1] for kernel, axes in AXES.items())
  if programs >= 2**31 - 1:
    return f"a GPU starts fewer than 2^31 programs, and [B T HV K V] = {[B, T, HV, K, V]} would need {programs}."
  return None


# --- decode: one token -----------------------------------------------------------------------------------------------


def _decode_kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """One read and one write of a tile of a state, K whole."""
  q_ref, k_ref, v_ref, g_ref, state_ref = inputs
  next_ref, o_ref = outputs
  place = _places(p, False, False, True)[0](pl.program_id(0))
  keys, values = p.keys(0), p.values(place.j)
  S = take(state_ref, both(keys, values))
  q, k, v = take(q_ref, keys).astype(f32), take(k_ref, keys).astype(f32), take(v_ref, values).astype(f32)
  if p.gate == "head":
    S = jnp.exp(take(g_ref, None).astype(f32)) * S
  elif p.gate == "channel":
    S = jnp.exp(take(g_ref, keys).astype(f32))[:, None] * S
  S = S + k[:, None] * v[None, :]
  give(next_ref, S, both(keys, values))
  give(o_ref, p.scale * jnp.sum(q[:, None] * S, axis=0), values)


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
  B, H, K = q.shape
  HV, V = v.shape[1:]
  gate = "none" if g is None else "head" if g.ndim == 2 else "channel"
  p = Plan(B, 1, H, HV, K, V, gate, False, float(scale), jnp.dtype(f32), 1)
  p = p._replace(k_tile=_side(K, DECODE.k), v_tile=_side(V, DECODE.v), warps=DECODE.warps, stages=DECODE.stages)
  place, programs = _places(p, False, False, True)
  spec = lambda shape, index: pl.BlockSpec(shape, lambda program: index(place(program)))
  key = spec((None, None, p.k_tile), lambda x: (x.b, x.h // (HV // H), 0))
  value = spec((None, None, p.v_tile), lambda x: (x.b, x.h, x.j))
  gates = {
    "none": None,
    "head": spec((None, None), lambda x: (x.b, x.h)),
    "channel": spec((None, None, p.k_tile), lambda x: (x.b, x.h, 0)),
  }
  states = spec((None, None, p.k_tile, p.v_tile), lambda x: (x.b, x.h, 0, x.j))
  state, o = launch(
    functools.partial(_decode_kernel, p=p), (q, k, v, g, state),
    name="decode", programs=programs, warps=p.warps, stages=p.stages,
    in_specs=[key, key, value, gates[gate], states], out_specs=[states, value],
    out_shapes=[jax.ShapeDtypeStruct(state.shape, f32), jax.ShapeDtypeStruct(v.shape, v.dtype)], aliases={4: 0},
  )  # fmt: skip
  return state, o
