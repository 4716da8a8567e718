"""Segments of time: what each of them makes of a state gives the states that all of them begin with.

Of a state S before it, a segment leaves left S + end: `left` is a decay where rows of a state do not mix, else a matrix [K K].
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lajax.pallas.plan import Axes, Plan, Result, Table, in_segments, start

f32 = jnp.float32


def decays(p: Plan, g: Array | None, edges: Array | None) -> Array | None:
  """What is left of a state after each segment, [B P HV K 1] or [B P HV 1 1]; None for all of it."""
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
  p: Plan,
  left: Array | None,
  ends: Float[Array, "B P HV K V"],
  first: Float[Array, "B HV K V"],
  reverse: bool,
) -> Float[Array, "B P HV K V"]:
  """The state that each segment begins with; in reverse, the cotangent of the one that it ends with."""
  left = jnp.ones((p.B, p.P, 1, 1, 1), f32) if left is None else left
  others = (
    slice(1, None) if reverse else slice(None, -1)
  )  # all but the one that nothing comes after
  join = lambda x, y: jnp.concatenate([y, x] if reverse else [x, y], axis=1)
  left = join(jnp.zeros_like(left[:, :1]), left[:, others])
  combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
  return lax.associative_scan(
    combine, (left, join(first[:, None], ends[:, others])), reverse=reverse, axis=1
  )[1]


def by_matrices(
  left: Float[Array, "B P HV K K"],
  ends: Float[Array, "B P HV K V"],
  first: Float[Array, "B HV K V"],
  reverse: bool,
) -> Float[Array, "B P HV K V"]:
  """As `by_decays`, one segment after the other; in reverse the matrices stand transposed."""

  def step(S, segment):
    matrix, end = segment
    return jnp.matmul(matrix.mT if reverse else matrix, S, precision=lax.Precision.HIGHEST) + end, S

  in_turn = left.swapaxes(0, 1), ends.swapaxes(0, 1)
  return lax.scan(step, first, in_turn, reverse=reverse)[1].swapaxes(0, 1)


# --- of what mixes rows ----------------------------------------------------------------------------------------------


def summaries(
  kernel: Callable,
  p: Plan,
  along: Axes,
  name: str,
  kinds: Sequence[str],
  inputs: Sequence[Array | None],
) -> tuple[Float[Array, "B P HV K V"], Float[Array, "B P HV K K"]]:
  """What each segment leaves of zeros, and its matrix: as further columns, from `matrix` on, behind those of values."""
  values_end, matrix = p.V, p.NV * p.v_tile
  p = p._replace(V=matrix + p.K)
  results = [("segment", (p.B, p.P, p.HV, p.K, p.V), f32)]
  kernel = functools.partial(kernel, values_end=values_end, matrix=matrix)
  (ends,) = start(kernel, p, along, name, kinds, inputs, results)
  return ends[..., :values_end], ends[..., matrix:]


def carried_back(
  kernel: Callable,
  p: Plan,
  table: Table,
  along: Axes,
  family: str,
  wide: bool,
  kinds: Sequence[str],
  inputs: Sequence[Array | None],
  dlast: Float[Array, "B HV K V"],
  matrices: Float[Array, "B P HV K K"] | None,
  results: Sequence[Result],
) -> tuple[Array, ...]:
  """Back through the chunks: dS after each, `results`, and dS before the first token.

  `matrices` are the segments', None where there is one. The kernel's last input is dS at the end, its last result dS at the
  start; without the first it gives the second alone.
  """

  def go(name: str, tiles: str, states: Array | None, results: Sequence[Result]) -> Sequence[Array]:
    body = functools.partial(kernel, summary=states is None)
    return start(
      body, p.cut(table, tiles), along, name, [*kinds, "segment"], [*inputs, states], results
    )

  kept, segment = (
    ("kept", (p.B, p.HV, p.N, p.K, p.V), p.kept),
    ("segment", (p.B, p.P, p.HV, p.K, p.V), f32),
  )
  states = dlast[:, None]
  if matrices is not None:
    (ends,) = go(f"{family}_summaries_back", "summaries_back", None, [segment])
    states = by_matrices(matrices, ends, dlast, reverse=True)
  name = f"{family}_cotangents" + in_segments(p)
  dkept, *found, before = go(
    name, "carry_back_wide" if wide else "carry_back", states, [kept, *results, segment]
  )
  return dkept, *found, before[:, 0]
