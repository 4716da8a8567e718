"""The loops, once for all families: over tokens, by associative scan, over chunks.

A family is a `Rule` of small pure functions on the arrays of one head; the drivers own batching, grouped heads, segments,
padding, the chunk split and what is kept for the backward pass.

Layouts: `tokens` is the family's NamedTuple of arrays [B T H ..] (queries and keys) or [B T HV ..] (all else), a field may be
None; the state is [B HV K V]; outputs are [B T HV V]. Inside, the HV = H G value heads are two axes, H and G.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from lajax._numerics import alike, segment_masks
from lajax.recurrence.heads import Heads, heads_of
from lajax.recurrence.transforms import differentiable, join_batches

TOKENS_BETWEEN_STATES = (
  64  # of the token scan: in its backward pass the states between are computed again
)
ROWS_AT_ONCE = (
  2048  # tokens times heads whose chunks are computed together: about what stays in a CPU's cache
)


class Affine(NamedTuple):
  """The map S -> A S + B of a state S [K V]: A is a scalar, a diagonal [K], or a matrix [K K]."""

  A: Array
  B: Array


class Chunk(NamedTuple):
  """What a chunk of C tokens does with the state S it begins with: S -> A S + B, and its outputs are R S + O."""

  A: Array
  B: Array
  R: Any  # an array, or whatever the rule's `respond` reads
  O: Array


class Rule(NamedTuple):
  """A family of recurrences. Every function works on one head, without batch axes.

  A token of zeros is the identity: it leaves the state as it is, so that padding with zeros needs no masks.

  The functions of a chunk get tokens with a leading axis C, and masks, which are None without segments. The backward pass
  goes through the chunks in reverse. `begin_pullback` runs for many chunks at once and gives Affine(A, D), such that the
  cotangent of the state before a chunk is A^T dstate + D, and whatever `pullback` wants kept. `pullback` then gets the state
  before the chunk and the cotangent of the state after it.

  What a token reads may be more than it puts out: `put_out` then makes the outputs of a chunk, which `step` and `read` give
  already. The chunks' outputs O and their cotangents have the width of what is read.
  """

  step: Callable  # (state, token) -> (state, output): the paper's equation
  lift: Callable  # token -> Affine
  read: Callable  # (state before, state after, token) -> output
  chunk: Callable  # (tokens, masks, precision) -> Chunk
  begin_pullback: Callable  # (tokens, masks, do, precision) -> (Affine, kept)
  pullback: (
    Callable  # (tokens, masks, kept, state, dstate, do, precision) -> cotangents of the tokens
  )
  respond: Callable = jnp.matmul  # (R, state, precision=) -> R S
  put_out: Callable | None = None  # what the chunk reads [C ..] -> (outputs [C V], kept)
  put_out_pullback: Callable | None = (
    None  # (kept, outputs, do) -> the cotangent of what the chunk reads
  )


def prepared(rule: Rule, prepare: Callable) -> Rule:
  """The rule of tokens that `prepare` makes those of `rule` from, elementwise: in the driver's blocks, not in all of T."""

  def pullback(x, masks, kept, state, dstate, do, precision):
    made, back = jax.vjp(prepare, x)
    return back(rule.pullback(made, masks, kept, state, dstate, do, precision))[0]

  return rule._replace(
    step=lambda state, x: rule.step(state, prepare(x)),
    lift=lambda x: rule.lift(prepare(x)),
    read=lambda before, after, x: rule.read(before, after, prepare(x)),
    chunk=lambda x, masks, precision: rule.chunk(prepare(x), masks, precision),
    begin_pullback=lambda x, masks, do, precision: rule.begin_pullback(
      prepare(x), masks, do, precision
    ),
    pullback=pullback,
  )


# --- maps of a state -------------------------------------------------------------------------------------------------


def apply(affine: Affine, state: Array) -> Array:
  return _times(affine.A, state) + affine.B


def combine(first: Affine, second: Affine) -> Affine:
  """The map that applies `first`, then `second`: (A2 A1, A2 B1 + B2)."""
  return Affine(_times(second.A, first.A), apply(second, first.B))


def _times(A: Array, X: Array) -> Array:
  """A X, where A is a scalar, a diagonal or a matrix, and X is a state or another A of the same kind."""
  if A.ndim == 2:
    return jnp.matmul(A, X, precision=lax.Precision.HIGHEST)
  return A.reshape(A.shape + (1,) * (X.ndim - A.ndim)) * X


def _apply_transposed(affine: Affine, state: Array) -> Array:
  return _times(affine.A.T, state) + affine.B


# --- segments --------------------------------------------------------------------------------------------------------


def segments(segment_ids: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
  """Packed documents as the drivers see them: `runs` counts the changes of document up to each token, `real` is not padding.

  A change of id between real tokens begins a new run; padding (id < 0) neither begins nor ends one.
  """
  real = segment_ids >= 0
  position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
  last_real = lax.cummax(jnp.where(real, position, -1), axis=1)
  before = jnp.concatenate([jnp.full_like(last_real[:, :1], -1), last_real[:, :-1]], axis=1)
  id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  change = real & (before >= 0) & (segment_ids != id_before)
  return jnp.cumsum(change, axis=1, dtype=jnp.int32), real


def blank_padding(tokens, real: Bool[Array, "B T"]):
  """Zeros for whatever stands in the padding, NaN included, so that it is the identity."""
  blank = lambda x: jnp.where(
    real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)
  )
  return jax.tree.map(blank, tokens)


def run_before(runs: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """The run of the token before each; the initial state belongs to the first run."""
  return jnp.concatenate([jnp.zeros_like(runs[:, :1]), runs[:, :-1]], axis=1)


# --- over tokens -----------------------------------------------------------------------------------------------------


def recurrent(rule: Rule, tokens, state: Array, runs: Array | None = None):
  """The equation, token by token. Of each 64 states the backward pass keeps one, or all where they are no larger than tokens."""
  heads = heads_of(tokens, state)
  xs, changes = _token_major(heads, tokens, runs)
  step = heads.over(lambda change, x, s: rule.step(_reset(s, change), x), heads.axes(tokens))
  body = lambda s, x: step(x[1], x[0], s)
  scan = lambda s, xs: lax.scan(body, s, xs)

  state = heads.rows(state)
  T = len(jax.tree.leaves(xs)[0])
  large = state.size * T > sum(x.size for x in jax.tree.leaves(xs))
  whole = T - T % TOKENS_BETWEEN_STATES if large and T > TOKENS_BETWEEN_STATES else 0
  outputs = []
  if whole:
    blocks = jax.tree.map(
      lambda x: x[:whole].reshape(-1, TOKENS_BETWEEN_STATES, *x.shape[1:]), (xs, changes)
    )
    state, o = lax.scan(jax.checkpoint(scan), state, blocks)
    outputs.append(o.reshape(whole, *o.shape[2:]))
  if whole < T:
    state, o = scan(state, jax.tree.map(lambda x: x[whole:], (xs, changes)))
    outputs.append(o)
  o = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
  return _batch_major(heads, o), heads.unrows(state)


def _token_major(heads: Heads, tokens, runs):
  """Tokens as [T R (G) ..], and [T R]: where a document begins; None without documents."""

  def flat(x):
    x = jnp.moveaxis(heads.split(x), 1, 0)
    return x.reshape(x.shape[0], heads.B * heads.H, *x.shape[3:])

  xs = jax.tree.map(flat, tokens)
  return xs, None if runs is None else jnp.repeat((runs != run_before(runs)).T, heads.H, axis=1)


def _batch_major(heads: Heads, o: Array) -> Array:
  """[T R (G) V] -> [B T HV V]."""
  return jnp.moveaxis(o.reshape(len(o), heads.B, heads.H * heads.G, o.shape[-1]), 0, 1)


def _reset(state: Array, change: Array | None) -> Array:
  return state if change is None else jnp.where(change, jnp.zeros((), state.dtype), state)


# --- by associative scan ---------------------------------------------------------------------------------------------


def associative(rule: Rule, tokens, state: Array, runs: Array | None = None):
  """All states at once, by `jax.lax.associative_scan` over the tokens' maps. Memory: T states."""
  heads = heads_of(tokens, state)
  axes = heads.axes(tokens)
  xs, changes = _token_major(heads, tokens, runs)

  def lift(change, x):
    affine = rule.lift(x)
    return Affine(_reset(affine.A, change), affine.B)

  maps = jax.vmap(heads.over(lift, axes))(changes, xs)
  state = heads.rows(state)
  first = heads.nest(apply)(jax.tree.map(lambda x: x[0], maps), state)
  maps = Affine(maps.A, jnp.concatenate([first[None], maps.B[1:]]))
  _, states = lax.associative_scan(heads.nest(combine, 1), maps)
  read = heads.over(
    lambda change, x, before, after: rule.read(_reset(before, change), after, x), axes
  )
  o = jax.vmap(read)(changes, xs, jnp.concatenate([state[None], states[:-1]]), states)
  return _batch_major(heads, o), heads.unrows(states[-1])


# --- over chunks -----------------------------------------------------------------------------------------------------


def chunked(
  rule: Rule,
  tokens,
  state: Array,
  runs: Array | None = None,
  *,
  scale: float | None = None,
  chunk_size: int = 64,
  precision=None,
):
  """Products inside chunks, a scan over the chunks' maps. The backward pass keeps the inputs and each chunk's first state.

  `scale` multiplies what tokens read: where reads are linear in the queries it is theirs, and costs no pass over memory.
  """
  B, T = jax.tree.leaves(tokens)[0].shape[:2]
  plan = _plan(T, B * state.shape[1], chunk_size)
  missing = plan.C * plan.M * plan.blocks - T
  if missing:
    tokens = jax.tree.map(
      lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), tokens
    )
    runs = None if runs is None else jnp.pad(runs, [(0, 0), (0, missing)], mode="edge")
  o, state = _swept(rule, plan, scale, precision)((tokens, state), runs)
  return o[:, :T], state


@functools.lru_cache(maxsize=1024)
def _swept(rule: Rule, plan: "_Plan", scale: float | None, precision) -> Callable:
  """(tokens, state), runs -> o, state, differentiable. One function for each plan: JAX traces its forward pass once."""
  sweep = _Sweep(rule, plan, scale, precision)
  # A vmap of the caller's joins the batch, or the rows of what is kept of chunks [blocks M R ..].
  kept = _Kept(2, 2, 0)
  keeping = jax.jit(join_batches(sweep.forward_keeping, (0, 0), (0, kept)))
  return differentiable(keeping, sweep.forward, join_batches(sweep.pullback, (0, 0, kept, 0), 0))


class _Kept(NamedTuple):
  """What the backward pass reads besides the inputs."""

  starts: Any  # the state at the start of every chunk
  put_out: Any = None  # what `Rule.put_out` keeps, of every chunk
  outputs: Any = None  # [B T HV V], if there is a `put_out`


class _Plan(NamedTuple):
  """How tokens are cut: chunks of C tokens, M chunks at once in each of so many blocks."""

  C: int
  M: int
  blocks: int


def _plan(T: int, rows: int, chunk_size: int) -> _Plan:
  """`rows` is batch times heads. A chunk's length is a power of two, at least 16, and no longer than T needs."""
  C = max(16, min(_power_of_two(chunk_size), _power_of_two(T)))
  N = -(-T // C)
  blocks = -(-N // max(1, ROWS_AT_ONCE // (rows * C)))
  return _Plan(C, -(-N // blocks), blocks)


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


class _Sweep(NamedTuple):
  """One pass over the chunks, in either direction. A block of chunks is laid out [M R (G) C ..], with Z = M R as one axis."""

  rule: Rule
  plan: _Plan
  scale: float | None
  precision: Any

  def forward(self, inputs, runs):
    return self.forward_keeping(inputs, runs)[0]

  def forward_keeping(self, inputs, runs):
    """Outputs and final state, and what is kept."""
    tokens, state = inputs
    heads = heads_of(tokens, state)
    summary = heads.over(
      lambda r, x: self.rule.chunk(x, self._masks(r), self.precision), heads.axes(tokens)
    )

    def block(state, n, _):
      chunk = summary(self._runs(heads, runs, n), self._take(heads, tokens, n))
      body = lambda s, affine: (heads.nest(apply)(affine, s), s)
      state, starts = lax.scan(body, state, self._apart(Affine(chunk.A, chunk.B)))
      read = lambda R, S, O: self.rule.respond(R, S, precision=self.precision) + O
      o, kept = self._scaled(heads.nest(read)(chunk.R, self._together(starts), chunk.O)), None
      if self.rule.put_out is not None:
        o, kept = heads.nest(self.rule.put_out)(o)
      return state, self._give(heads, o, heads.G > 1), _Kept(starts, self._apart(kept))

    like = jax.eval_shape(
      self.rule.read, state[0, 0], state[0, 0], jax.tree.map(lambda x: x[0, 0, 0], tokens)
    )
    like = jax.ShapeDtypeStruct(
      (*jax.tree.leaves(tokens)[0].shape[:2], state.shape[1], *like.shape), like.dtype
    )
    state, o, kept = self._over_blocks(block, heads.rows(state), like)
    return (o, heads.unrows(state)), kept if self.rule.put_out is None else kept._replace(outputs=o)

  def pullback(self, inputs, runs, kept, cotangents):
    (tokens, _), (do, dstate) = inputs, cotangents
    heads = heads_of(tokens, dstate)
    axes = heads.axes(tokens)
    begin = lambda r, xd: self.rule.begin_pullback(xd[0], self._masks(r), xd[1], self.precision)
    finish = lambda r, x, *rest: self.rule.pullback(x, self._masks(r), *rest, self.precision)

    def block(dstate, n, forward):
      r, x, d = self._runs(heads, runs, n), self._take(heads, tokens, n), self._take(heads, do, n)
      d = self._scaled(d)
      if self.rule.put_out_pullback is not None:
        o, put_out = self._take(heads, kept.outputs, n), self._together(forward.put_out)
        d = heads.nest(self.rule.put_out_pullback)(put_out, o, d)
      back, begun = heads.over(begin, (axes, 0))(r, (x, d))
      body = lambda s, affine: (heads.nest(_apply_transposed)(affine, s), s)
      dstate, dstates = lax.scan(body, dstate, self._apart(back), reverse=True)
      dx = heads.over(finish, axes)(
        r, x, begun, self._together(forward.starts), self._together(dstates), d
      )
      give = lambda dx, x: self._give(
        heads, dx if heads.grouped(x) or heads.G == 1 else dx.sum(1), heads.grouped(x)
      )
      return dstate, jax.tree.map(give, dx, tokens), None

    each = kept._replace(outputs=None)
    dstate, dx, _ = self._over_blocks(block, heads.rows(dstate), tokens, each, reverse=True)
    return dx, heads.unrows(dstate)

  def _over_blocks(self, block, carry, like, kept=None, reverse=False):
    """Scans (carry, n, kept of n) -> (carry, part of the results, what is stacked); results [B T ..] are as `like`.

    Parts are written where they belong. What is there before is never read, but differs between results: XLA would make one
    array of equal ones, and copy it.
    """
    if self.plan.blocks == 1:
      carry, results, stacked = block(carry, 0, jax.tree.map(lambda x: x[0], kept))
      return carry, results, jax.tree.map(lambda y: y[None], stacked)
    leaves, tree = jax.tree.flatten(like)
    results = tree.unflatten(
      [alike(jnp.full(x.shape, i, x.dtype), carry) for i, x in enumerate(leaves, reverse)]
    )
    length = self.plan.C * self.plan.M

    def body(carried, x):
      (carry, results), (n, kept) = carried, x
      carry, parts, stacked = block(carry, n, kept)
      put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, n * length, axis=1)
      return (carry, jax.tree.map(put, results, parts)), stacked

    (carry, results), stacked = lax.scan(
      body, (carry, results), (jnp.arange(self.plan.blocks), kept), reverse=reverse
    )
    return carry, results, stacked

  def _scaled(self, x):
    return x if self.scale is None else x * self.scale

  def _slice(self, x, n):
    length = self.plan.C * self.plan.M
    return x if self.plan.blocks == 1 else lax.dynamic_slice_in_dim(x, n * length, length, axis=1)

  def _apart(self, tree):
    """[Z ..] -> [M R ..]."""
    return jax.tree.map(lambda x: x.reshape(self.plan.M, len(x) // self.plan.M, *x.shape[1:]), tree)

  def _together(self, tree):
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), tree)

  def _take(self, heads, tokens, n):
    """Of [B T H or HV ..], block n as [Z (G) C ..], copied into that order."""

    def take(x):
      x, many = heads.split(self._slice(x, n)), heads.grouped(x)
      x = x.reshape(heads.B, self.plan.M, self.plan.C, *x.shape[2:])
      front = (1, 0, 3, 4, 2) if many else (1, 0, 3, 2)
      x = jnp.transpose(x, (*front, *range(len(front), x.ndim)))
      return lax.optimization_barrier(lax.collapse(x, 0, 3))

    return jax.tree.map(take, tokens)

  def _give(self, heads, x, grouped):
    """[Z (G) C ..] -> [B L H or HV ..]: a block's part of a result."""
    x = x.reshape(self.plan.M, heads.B, heads.H, *x.shape[1:])
    back = (1, 0, 4, 2, 3) if grouped else (1, 0, 3, 2)
    x = jnp.transpose(x, (*back, *range(len(back), x.ndim)))
    x = lax.collapse(x, 3, len(back))
    return x.reshape(heads.B, self.plan.M * self.plan.C, *x.shape[3:])

  def _runs(self, heads, runs, n):
    """The run of each token and of the token before each: [Z C]."""
    if runs is None:
      return None
    cut = lambda x: jnp.moveaxis(self._slice(x, n).reshape(heads.B, self.plan.M, self.plan.C), 1, 0)
    return jax.tree.map(
      lambda x: jnp.repeat(cut(x), heads.H, axis=1).reshape(-1, self.plan.C),
      (runs, run_before(runs)),
    )

  def _masks(self, runs):
    return None if runs is None else segment_masks(runs[0], runs[1][0])
