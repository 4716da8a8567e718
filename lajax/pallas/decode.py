"""The kernel of one token of a matrix state: S = Diag(exp g) S, then S += k w^T, and o = scale S^T q.

What is written, w, is v; or of the delta rule, beta (v - S^T k). Of diagonal plus low rank, b (S^T a)^T of the S before
is added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas.launch import launch
from lajax.pallas.plan import MAX_K, Axes, Plan, Tiles, places
from lajax.pallas.tiles import both, give, take

f32 = jnp.float32
TILES = Tiles(MAX_K, 32, 4, 1)
AXES = Axes(False, False, True)


def _kernel(inputs, outputs, *, interpreted: bool, p: Plan):
  """One read and one write of a tile of a state, K whole."""
  q_ref, k_ref, v_ref, beta_ref, g_ref, a_ref, b_ref, state_ref = inputs
  next_ref, o_ref = outputs
  place = places(p, AXES)[0](pl.program_id(0))
  keys, values = p.keys(0), p.values(place.j)
  S = take(state_ref, both(keys, values))
  q, k, v = (
    take(q_ref, keys).astype(f32),
    take(k_ref, keys).astype(f32),
    take(v_ref, values).astype(f32),
  )
  old = None if a_ref is None else jnp.sum(take(a_ref, keys).astype(f32)[:, None] * S, axis=0)
  if p.gate == "head":
    S = jnp.exp(take(g_ref, None).astype(f32)) * S
  elif p.gate == "channel":
    S = jnp.exp(take(g_ref, keys).astype(f32))[:, None] * S
  if beta_ref is not None:
    v = take(beta_ref, None).astype(f32) * (v - jnp.sum(k[:, None] * S, axis=0))
  S = S + k[:, None] * v[None, :]
  if old is not None:
    S = S + take(b_ref, keys).astype(f32)[:, None] * old[None, :]
  give(next_ref, S, both(keys, values))
  give(o_ref, p.scale * jnp.sum(q[:, None] * S, axis=0), values)


def decode(
  name: str,
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"] | None,
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
  scale: float,
  a: Float[Array, "B H K"] | None = None,
  b: Float[Array, "B H K"] | None = None,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """The next state, float32, and o in v.dtype; of the delta rule where there is a beta, low rank too with a and b. Has no derivative.

  The state is read once and written once, and in place where the caller donates it.
  """
  p = _plan(q, v, g, scale)
  specs = _specs(p)
  state, o = launch(
    functools.partial(_kernel, p=p),
    (q, k, v, beta, g, a, b, state),
    name=name,
    programs=places(p, AXES)[1],
    warps=p.warps,
    stages=p.stages,
    in_specs=[specs[name] for name in ("q", "q", "v", "head", p.gate, "q", "q", "state")],
    out_specs=[specs["state"], specs["v"]],
    out_shapes=[jax.ShapeDtypeStruct(state.shape, f32), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    aliases={7: 0},
  )
  return state, o


def _plan(q, v, g, scale: float) -> Plan:
  (B, H, K), (HV, V) = q.shape, v.shape[1:]
  gate = "none" if g is None else "head" if g.ndim == 2 else "channel"
  return Plan(B, 1, H, HV, K, V, gate, False, float(scale), jnp.dtype(f32), 1).cut_by(TILES)


def _specs(p: Plan) -> dict[str, Any]:
  place, G = places(p, AXES)[0], p.HV // p.H
  spec = lambda shape, index: pl.BlockSpec(shape, lambda program: index(place(program)))
  return {
    "q": spec((None, None, p.k_tile), lambda x: (x.b, x.h // G, 0)),
    "v": spec((None, None, p.v_tile), lambda x: (x.b, x.h, x.j)),
    "none": None,
    "head": spec((None, None), lambda x: (x.b, x.h)),
    "channel": spec((None, None, p.k_tile), lambda x: (x.b, x.h, 0)),
    "state": spec((None, None, p.k_tile, p.v_tile), lambda x: (x.b, x.h, 0, x.j)),
  }
