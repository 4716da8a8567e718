"""Time splits: the state that each split begins with, from the summaries of all splits.

The summary of a split is its transition and its update: it turns the state S before it into
transition S + update. The transition is a decay where the rows of a state do not mix, as in the
additive family, else a matrix [K K].
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lajax.pallas.plan import Axes, MatrixPlan, Result, Table, launch_plan, split_suffix

f32 = jnp.float32


def decays(p: MatrixPlan, g: Array | None, edges: Array | None) -> Array | None:
  """Returns the decay of each split, [B P HV K 1] or [B P HV 1 1]; None without decay and
  documents.
  """
  found = None
  if g is not None:
    g = jnp.pad(g.astype(f32), [(0, 0), (0, p.N * p.C - p.T)] + [(0, 0)] * (g.ndim - 2))
    found = jnp.exp(g.reshape(p.B, p.P, -1, p.HV, g.shape[3] if g.ndim == 4 else 1, 1).sum(2))
  if edges is not None:
    at = edges[:, :: p.span]
    whole = (at[:, 1:] == at[:, :-1]).reshape(p.B, p.P, 1, 1, 1)
    found = jnp.where(whole, 1.0 if found is None else found, 0.0)
  return found


def by_decays(
  p: MatrixPlan,
  transition: Array | None,
  updates: Float[Array, "B P HV K V"],
  first: Float[Array, "B HV K V"],
  reverse: bool,
) -> Float[Array, "B P HV K V"]:
  """Returns the state that each split begins with; in reverse, the cotangent of the state that each
  ends with.
  """
  transition = jnp.ones((p.B, p.P, 1, 1, 1), f32) if transition is None else transition
  # All splits but the one that nothing comes after.
  others = slice(1, None) if reverse else slice(None, -1)
  join = lambda x, y: jnp.concatenate([y, x] if reverse else [x, y], axis=1)
  transition = join(jnp.zeros_like(transition[:, :1]), transition[:, others])

  def combine(a, b):
    # A split that begins a document selects: 0 times an inf of the document before would be NaN.
    before = jnp.where(b[0] == 0, 0.0, b[0] * a[1]) if p.documents else b[0] * a[1]
    return a[0] * b[0], before + b[1]

  return lax.associative_scan(
    combine, (transition, join(first[:, None], updates[:, others])), reverse=reverse, axis=1
  )[1]


def by_matrices(
  transition: Float[Array, "B P HV K K"],
  updates: Float[Array, "B P HV K V"],
  first: Float[Array, "B HV K V"],
  reverse: bool,
) -> Float[Array, "B P HV K V"]:
  """Returns the same as `by_decays`, one split after the other; in reverse by the transposed
  transitions.

  An associative scan of products of transitions aborts XLA's compiler for GPUs.
  """

  def step(S, split):
    matrix, update = split
    return jnp.matmul(
      matrix.mT if reverse else matrix, S, precision=lax.Precision.HIGHEST
    ) + update, S

  in_turn = transition.swapaxes(0, 1), updates.swapaxes(0, 1)
  return lax.scan(step, first, in_turn, reverse=reverse)[1].swapaxes(0, 1)


# --- rules that mix the rows of a state -----------------------------------------------------------


def summaries(
  kernel: Callable,
  p: MatrixPlan,
  axes: Axes,
  name: str,
  kinds: Sequence[str],
  inputs: Sequence[Array | None],
) -> tuple[Float[Array, "B P HV K V"], Float[Array, "B P HV K K"]]:
  """Returns the state after each split started from zeros, and the matrix of each split.

  One launch computes both: columns `matrix:` of a wider state start from the identity and get no
  values.
  """
  values_end, matrix = p.V, p.NV * p.v_tile
  p = p._replace(V=matrix + p.K)
  results = [("split state", (p.B, p.P, p.HV, p.K, p.V), f32)]
  kernel = functools.partial(kernel, values_end=values_end, matrix=matrix)
  (updates,) = launch_plan(kernel, p, axes, name, kinds, inputs, results)
  return updates[..., :values_end], updates[..., matrix:]


def carried_back(
  kernel: Callable,
  p: MatrixPlan,
  table: Table,
  axes: Axes,
  family: str,
  wide: bool,
  kinds: Sequence[str],
  inputs: Sequence[Array | None],
  dlast: Float[Array, "B HV K V"],
  transitions: Float[Array, "B P HV K K"] | None,
  results: Sequence[Result],
) -> tuple[Array, ...]:
  """Returns dS after each chunk, `results`, and dS before the first token.

  Args:
    kernel: goes through the chunks of a split in reverse. Its last input is dS at the end, its last
      result dS at the start. With summary=True it starts from zeros and gives dS at the start
      alone.
    transitions: of the splits, as `summaries` returns them; None where there is one split.
  """

  def go(name: str, tiles: str, states: Array | None, results: Sequence[Result]) -> Sequence[Array]:
    body = functools.partial(kernel, summary=states is None)
    return launch_plan(
      body, p.cut(table, tiles), axes, name, [*kinds, "split state"], [*inputs, states], results
    )

  chunk_states = "chunk_states", (p.B, p.HV, p.N, p.K, p.V), p.state_dtype
  split_state = "split state", (p.B, p.P, p.HV, p.K, p.V), f32
  states = dlast[:, None]
  if transitions is not None:
    (updates,) = go(f"{family}_summaries_back", "summaries_back", None, [split_state])
    states = by_matrices(transitions, updates, dlast, reverse=True)
  name = f"{family}_cotangents" + split_suffix(p)
  dchunk_states, *found, before = go(
    name, "carry_back_wide" if wide else "carry_back", states, [chunk_states, *results, split_state]
  )
  return dchunk_states, *found, before[:, 0]
