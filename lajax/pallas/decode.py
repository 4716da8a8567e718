"""Kernel of one token of a matrix state: S = Diag(exp g) S, then S += k w^T, and o = scale S^T q.

The value w that is written is v; in the delta rule, beta (v - S^T k), or v - S^T (beta k) with one
strength per channel. Diagonal plus low rank also adds b (S^T a)^T, where a reads the state before
its decay.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from lajax.pallas.launch import float64_refusal, launch
from lajax.pallas.plan import MAX_K, Axes, MatrixPlan, Tiles, places, refusal_of_programs
from lajax.pallas.tiles import load, store, tile_mask

f32 = jnp.float32
TILES = Tiles(MAX_K, 32, 4, 1)
AXES = Axes(False, False, True)


def _kernel(inputs, outputs, *, interpreted: bool, p: MatrixPlan, by_channel: bool, before: bool):
  """Reads and writes one tile of a state once, with all of K."""
  q_ref, k_ref, v_ref, beta_ref, g_ref, a_ref, b_ref, state_ref = inputs
  next_ref, o_ref = outputs
  place = places(p, AXES)[0](pl.program_id(0))
  keys, values = p.keys(0), p.values(place.j)
  read = lambda S, x: jnp.sum(x[:, None] * S, axis=0)
  S = load(state_ref, tile_mask(keys, values))
  q, k, v = (
    load(q_ref, keys).astype(f32),
    load(k_ref, keys).astype(f32),
    load(v_ref, values).astype(f32),
  )
  if before:
    store(o_ref, p.scale * read(S, q), values)
  old = None if a_ref is None else read(S, load(a_ref, keys).astype(f32))
  if p.gate == "head":
    S = jnp.exp(load(g_ref, None).astype(f32)) * S
  elif p.gate == "channel":
    S = jnp.exp(load(g_ref, keys).astype(f32))[:, None] * S
  if beta_ref is not None:
    if by_channel:
      v = v - read(S, load(beta_ref, keys).astype(f32) * k)
    else:
      v = load(beta_ref, None).astype(f32) * (v - read(S, k))
  S = S + k[:, None] * v[None, :]
  if old is not None:
    S = S + load(b_ref, keys).astype(f32)[:, None] * old[None, :]
  store(next_ref, S, tile_mask(keys, values))
  if not before:
    store(o_ref, p.scale * read(S, q), values)


def decode(
  name: str,
  state: Float[Array, "B HV K V"],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
  scale: float,
  a: Float[Array, "B H K"] | None = None,
  b: Float[Array, "B H K"] | None = None,
  reads_before: bool = False,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
  """Returns the next state in float32 and o in v.dtype. Has no derivative.

  With `beta` the rule is the delta rule; with `a` and `b`, diagonal plus low rank. With
  `reads_before`, q reads the state before the token. The state is read once and written once, in
  place if the caller donates it.
  """
  p = _plan(state, q, g, scale)
  specs = _specs(p)
  by_channel = beta is not None and beta.ndim == 3
  strength = "channel" if by_channel else "head"
  state, o = launch(
    functools.partial(_kernel, p=p, by_channel=by_channel, before=reads_before),
    (q, k, v, beta, g, a, b, state),
    name=name,
    programs=places(p, AXES)[1],
    warps=p.warps,
    stages=p.stages,
    in_specs=[specs[name] for name in ("q", "q", "v", strength, p.gate, "q", "q", "state")],
    out_specs=[specs["state"], specs["v"]],
    out_shapes=[jax.ShapeDtypeStruct(state.shape, f32), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    aliases={7: 0},
  )
  return state, o


def supports(state: Float[Array, "B HV K V"], token: Mapping[str, Array | None]) -> str | None:
  """Returns a sentence that says what the kernel does not take, or None.

  Reads shapes and dtypes only. `token` are the other arrays by name, `q` [B H K] among them.
  """
  if reason := float64_refusal({"state": state, **token}):
    return reason
  if any(map(jax.export.is_symbolic_dim, state.shape)):
    return f"the kernels must know the sizes of the state, and they are {state.shape}."
  p = _plan(state, token["q"], None, 1.0)
  if p.K > MAX_K:
    return f"the kernels take keys of up to K = {MAX_K}, and K is {p.K}."
  return refusal_of_programs(p, places(p, AXES)[1])


def _plan(state, q, g, scale: float) -> MatrixPlan:
  (B, HV, K, V), H = state.shape, q.shape[1]
  gate = "none" if g is None else "head" if g.ndim == 2 else "channel"
  return MatrixPlan(B, 1, H, HV, K, V, gate, False, float(scale), jnp.dtype(f32), 1).cut_by(TILES)


def _specs(p: MatrixPlan) -> dict[str, Any]:
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
