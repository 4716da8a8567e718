"""Kernels of the elementwise recurrence h_t = exp(log_a_t) h_{t-1} + x_t.

A program goes through the tokens of a tile of channels, while the next few rows are being loaded.
Where there are too few tiles for a GPU, time is also cut into S splits, in three launches:

  `summaries`: what each split makes of a state of zeros, and the product of its decays.
  `combine`: the state that each split begins with.
  `replay`: the splits themselves.

Backward is the same in reverse: u = exp(log_a_t) (dh_t + u) carries the cotangent of the state
before each token. Residuals are log_a, the first state and h.

Letters: L tokens in a split; s counts splits, j tiles of channels.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from lajax.pallas.launch import differentiable, float64_refusal, launch
from lajax.pallas.tiles import inside, load, store

f32 = jnp.float32
MAX_CHANNELS, WARPS = 128, 1
AHEAD = 4  # rows that are loaded ahead: the loop would else wait for each load
ENOUGH = 512  # programs that keep a GPU busy; with fewer, time is split
LEAST = 64  # fewest tokens in a split


class RecurrencePlan(NamedTuple):
  """Sizes of a call, and how they are cut."""

  B: int
  T: int
  D: int
  tile: int
  S: int  # splits
  L: int  # tokens in a split

  @property
  def ND(self) -> int:
    return -(-self.D // self.tile)

  @property
  def ragged(self) -> bool:
    """Returns whether the last split has fewer tokens than the others."""
    return self.S * self.L != self.T

  def channels(self, j) -> Array | None:
    return inside(j * self.tile, self.tile, self.D, self.D % self.tile == 0)


def _plan(x) -> RecurrencePlan:
  B, T, D = x.shape
  tile = min(MAX_CHANNELS, max(32, 1 << (D - 1).bit_length()))
  tiles = B * -(-D // tile)
  S = 1 if tiles >= ENOUGH else max(1, min(2 * ENOUGH // tiles, T // LEAST))
  L = -(-T // S)
  return RecurrencePlan(B, T, D, tile, -(-T // L), L)


def _specs(p: RecurrencePlan, splits: bool) -> dict[str, pl.BlockSpec]:
  place = _place(p, splits)

  def spec(shape, index):
    return pl.BlockSpec(shape, lambda i: index(*place(i)))

  return {
    "x": spec((None, p.T, p.tile), lambda b, s, j: (b, 0, j)),
    "begins": spec((None, p.T), lambda b, s, j: (b, 0)),
    "state": spec((None, p.tile), lambda b, s, j: (b, j)),
    "states": spec((None, None if splits else p.S, p.tile), lambda b, s, j: (b, s, j)),
  }


def _place(p: RecurrencePlan, splits: bool):
  """Returns the map from a program's number to its row of the batch, split and tile of channels."""
  S = p.S if splits else 1
  return lambda i: (i // p.ND // S, i // p.ND % S, i % p.ND)


# --- over the tokens of a split -------------------------------------------------------------------


def _over_tokens(
  p: RecurrencePlan, y_ref, log_a_ref, begins_ref, s, channels, reverse: bool, body, carry
):
  """Runs body(t, decayed, y, carry) -> carry over the tokens of split s.

  `decayed(x)` is x after the token's decay, 0 where a document begins. Behind the last token y is 0
  and the decay 1.
  """

  def row(n):
    t = jnp.clip(s * p.L + (p.L - 1 - n if reverse else n), 0, p.T - 1)
    begins = () if begins_ref is None else (load(begins_ref.at[t]),)
    return load(y_ref.at[t, :], channels), load(log_a_ref.at[t, :], channels), *begins

  def token(n, state):
    carry, (y, log_a, *begins), *waiting = state
    t = s * p.L + (p.L - 1 - n if reverse else n)
    waiting.append(row(n + AHEAD))
    y, a = y.astype(f32), jnp.exp(log_a.astype(f32))
    new = begins[0] != 0 if begins else None
    if p.ragged:
      y, a = jnp.where(t < p.T, y, 0.0), jnp.where(t < p.T, a, 1.0)
      new = None if new is None else new & (t < p.T)

    def decayed(x):
      # A selection: a product with 0 would let NaN and inf of one document into the next.
      return a * x if new is None else jnp.where(new, 0.0, a * x)

    return body(t, decayed, y, carry), *waiting

  return lax.fori_loop(0, p.L, token, (carry, *map(row, range(AHEAD))))[0]


def _exists(p: RecurrencePlan, t, channels):
  """Returns the mask of the channels of token t that exist."""
  if not p.ragged:
    return channels
  return jnp.broadcast_to(t < p.T, (p.tile,)) if channels is None else channels & (t < p.T)


def _summaries_kernel(inputs, outputs, *, interpreted: bool, p: RecurrencePlan, reverse: bool):
  """Map h -> A h + H of a split; in reverse, the map of u."""
  y_ref, log_a_ref, begins_ref = inputs
  _, s, j = _place(p, True)(pl.program_id(0))
  channels = p.channels(j)

  def step(t, decayed, y, carry):
    A, H = carry
    return decayed(A), decayed(y + H) if reverse else decayed(H) + y

  identity = jnp.ones(p.tile, f32), jnp.zeros(p.tile, f32)
  A, H = _over_tokens(p, y_ref, log_a_ref, begins_ref, s, channels, reverse, step, identity)
  store(outputs[0], A, channels)
  store(outputs[1], H, channels)


def _combine_kernel(
  inputs, outputs, *, interpreted: bool, p: RecurrencePlan, reverse: bool, documents: bool
):
  """State that each split begins with; in reverse, cotangent of the state that each ends with."""
  A_ref, H_ref, state_ref = inputs
  _, _, j = _place(p, False)(pl.program_id(0))
  channels = p.channels(j)

  def split(m, state):
    s = p.S - 1 - m if reverse else m
    store(outputs[0].at[s, :], state, channels)
    A, H = load(A_ref.at[s, :], channels), load(H_ref.at[s, :], channels)
    return (jnp.where(A == 0, 0.0, A * state) if documents else A * state) + H

  lax.fori_loop(0, p.S, split, load(state_ref, channels).astype(f32))


def _replay_kernel(inputs, outputs, *, interpreted: bool, p: RecurrencePlan):
  """h, and the state that the split ends with."""
  x_ref, log_a_ref, begins_ref, start_ref = inputs
  h_ref, end_ref = outputs
  _, s, j = _place(p, True)(pl.program_id(0))
  channels = p.channels(j)

  def step(t, decayed, x, h):
    h = decayed(h) + x
    store(h_ref.at[jnp.minimum(t, p.T - 1), :], h, _exists(p, t, channels))
    return h

  start = load(start_ref, channels).astype(f32)
  store(
    end_ref,
    _over_tokens(p, x_ref, log_a_ref, begins_ref, s, channels, False, step, start),
    channels,
  )


def _reverse_kernel(inputs, outputs, *, interpreted: bool, p: RecurrencePlan):
  """dx and dlog_a, and the cotangent of the state that the split begins with."""
  dh_ref, log_a_ref, begins_ref, end_ref, h_ref, state_ref = inputs
  dx_ref, dlog_a_ref, start_ref = outputs
  _, s, j = _place(p, True)(pl.program_id(0))
  channels = p.channels(j)
  first = load(state_ref, channels).astype(f32)

  def step(t, decayed, dh, u):
    dh = dh + u
    u = decayed(dh)
    before = load(h_ref.at[jnp.clip(t - 1, 0, p.T - 1), :], channels).astype(f32)
    at, exists = jnp.minimum(t, p.T - 1), _exists(p, t, channels)
    store(dx_ref.at[at, :], dh, exists)
    dlog_a = u * jnp.where(t == 0, first, before)
    if begins_ref is not None:  # h before belongs to another document, and may be NaN
      dlog_a = jnp.where(load(begins_ref.at[at]) != 0, 0.0, dlog_a)
    store(dlog_a_ref.at[at, :], dlog_a, exists)
    return u

  end = load(end_ref, channels).astype(f32)
  store(
    start_ref,
    _over_tokens(p, dh_ref, log_a_ref, begins_ref, s, channels, True, step, end),
    channels,
  )


# --- launches -------------------------------------------------------------------------------------


def _starts(p: RecurrencePlan, y, log_a, begins, state, reverse: bool) -> Float[Array, "B S D"]:
  """Returns the state that each split begins with; in reverse, the cotangent of the state that each
  ends with.
  """
  if p.S == 1:
    return state[:, None]
  specs, whole = _specs(p, True), _specs(p, False)
  states = jax.ShapeDtypeStruct((p.B, p.S, p.D), f32)
  A, H = launch(
    functools.partial(_summaries_kernel, p=p, reverse=reverse),
    (y, log_a, begins),
    name="recurrence_summaries",
    programs=p.B * p.S * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[specs[name] for name in ("x", "x", "begins")],
    out_specs=[specs["states"]] * 2,
    out_shapes=[states] * 2,
  )
  (starts,) = launch(
    functools.partial(_combine_kernel, p=p, reverse=reverse, documents=begins is not None),
    (A, H, state),
    name="recurrence_combine",
    programs=p.B * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[whole[name] for name in ("states", "states", "state")],
    out_specs=[whole["states"]],
    out_shapes=[states],
  )
  return starts


def _replay(p: RecurrencePlan, x, log_a, begins, starts) -> tuple[Array, Array]:
  specs = _specs(p, True)
  h, ends = launch(
    functools.partial(_replay_kernel, p=p),
    (x, log_a, begins, starts),
    name="recurrence_replay",
    programs=p.B * p.S * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[specs[name] for name in ("x", "x", "begins", "states")],
    out_specs=[specs["x"], specs["states"]],
    out_shapes=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(starts.shape, f32)],
  )
  return h, ends[:, -1]


def _replay_reverse(
  p: RecurrencePlan, dh, log_a, begins, ends, h, state
) -> tuple[Array, Array, Array]:
  specs = _specs(p, True)
  like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
  dx, dlog_a, starts = launch(
    functools.partial(_reverse_kernel, p=p),
    (dh, log_a, begins, ends, h, state),
    name="recurrence_reverse",
    programs=p.B * p.S * p.ND,
    warps=WARPS,
    stages=1,
    in_specs=[specs[name] for name in ("x", "x", "begins", "states", "x", "state")],
    out_specs=[specs["x"], specs["x"], specs["states"]],
    out_shapes=[like(h), like(log_a), jax.ShapeDtypeStruct(ends.shape, f32)],
  )
  return dx, dlog_a, starts[:, 0]


# --- the operation --------------------------------------------------------------------------------


def linear_recurrence(
  x: Float[Array, "B T D"],
  log_a: Float[Array, "B T D"],
  state: Float[Array, "B D"],
  document: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
  """h_t = exp(log_a_t) h_{t-1} + x_t; also with packed documents.

  Args:
    x: [B T D].
    log_a: [B T D], log decay, <= 0.
    state: [B D], h before the first token, float32.
    document: [B T], number of a token's document in its row, counted from 0; h becomes zero where
      it changes. Padding has the number of the document before it, and x and log_a are zeros there.

  Returns:
    h [B T D] in x.dtype, computed in float32, and h after the last token, [B D] in float32.
  """
  begins = None
  if document is not None:
    begins = (document != jnp.pad(document[:, :-1], ((0, 0), (1, 0)))).astype(jnp.int32)
  return _recur(None, x, log_a, state, begins)


def _forward(static, x, log_a, state, begins):
  p = _plan(x)
  h, last = _replay(p, x, log_a, begins, _starts(p, x, log_a, begins, state, reverse=False))
  return (h, last), (log_a, state, begins, h)


def _backward(static, residuals, cotangents):
  log_a, state, begins, h = residuals
  dh, dlast = cotangents
  p = _plan(h)
  ends = _starts(p, dh, log_a, begins, dlast, reverse=True)
  dx, dlog_a, dstate = _replay_reverse(p, dh, log_a, begins, ends, h, state)
  return dx, dlog_a, dstate.astype(state.dtype), None


_recur = differentiable(_forward, _backward)


def supports(x, log_a, initial_state=None) -> str | None:
  """Returns a sentence that says what the kernels do not take, or None.

  Reads shapes and dtypes only.
  """
  if reason := float64_refusal(dict(x=x, log_a=log_a, initial_state=initial_state)):
    return reason
  programs = -(-x.size // max(x.shape[1], 1)) // 32 + x.shape[0]
  if programs >= 2**31 - 1:
    return f"a GPU starts fewer than 2^31 programs, and x {[*x.shape]} would need more."
  return None
