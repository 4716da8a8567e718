"""One token of each family, for decoding: step(state, token) -> (state, output). No axis T."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax import _shapes
from lajax._numerics import accumulation_dtype
from lajax.recurrence import delta_rule, linear_attention, linear_recurrence

Matrix = Float[Array, "B HV K V"]


def linear_attention_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.linear_attention`: S = Diag(exp g) S + k v^T, o = scale S^T q."""
  sizes = _shapes.check(
    q=(q, "B H K"), k=(k, "B H K"), v=(v, "B HV V"), g=(g, "B HV | B HV K"), state=(state, "B HV K V")
  )
  dtype = accumulation_dtype(q, k, v, g, state)
  wide = _heads(sizes, dtype)
  tokens = linear_attention.Tokens(wide(q) * _scale(scale, sizes), wide(k), wide(v), wide(g))
  return _step(linear_attention.rule, state.astype(dtype), tokens, v.dtype)


def normalized_linear_attention_step(
  state: tuple[Matrix, Float[Array, "B HV K"]],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
  eps: float = 1e-10,
) -> tuple[tuple[Matrix, Float[Array, "B HV K"]], Float[Array, "B HV V"]]:
  """One token of `lajax.normalized_linear_attention`: as `linear_attention_step`, divided by scale q.z + eps."""
  S, z = state
  _shapes.check(v=(v, "B HV V"), S=(S, "B HV K V"), z=(z, "B HV K"))
  wide = accumulation_dtype(v, S)
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1).astype(wide)
  joined, out = linear_attention_step(jnp.concatenate([S, z[..., None]], axis=-1), q, k, values, g, scale=scale)
  return (joined[..., :-1], joined[..., -1]), (out[..., :-1] / (out[..., -1:] + eps)).astype(v.dtype)


def delta_rule_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"] | None,
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  erase: Float[Array, "B HV K"] | None = None,
  write: Float[Array, "B HV V"] | None = None,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.delta_rule`: S = Diag(exp g) S ; S = S + k (beta (v - S^T k))^T, o = scale S^T q."""
  sizes = _shapes.check(
    q=(q, "B H K"), k=(k, "B H K"), v=(v, "B HV V"), beta=(beta, "B HV"), g=(g, "B HV | B HV K"),
    erase=(erase, "B HV K"), write=(write, "B HV V"), state=(state, "B HV K V"),
  )  # fmt: skip
  dtype = accumulation_dtype(q, k, v, beta, g, erase, write, state)
  wide = _heads(sizes, dtype)
  b = wide(erase) if beta is None else wide(beta)[..., None]
  w = wide(write) if beta is None else wide(beta)[..., None]
  tokens = delta_rule.Tokens(wide(q) * _scale(scale, sizes), wide(k), wide(k) * b, wide(v) * w, wide(g))
  return _step(delta_rule.rule, state.astype(dtype), tokens, v.dtype)


def linear_recurrence_step(
  state: Float[Array, "B *D"], x: Float[Array, "B *D"], log_a: Float[Array, "B *D"]
) -> tuple[Float[Array, "B *D"], Float[Array, "B *D"]]:
  """One token of `lajax.linear_recurrence`: h = exp(log_a) h + x."""
  axes = " ".join(["B", *(f"D{n}" for n in range(x.ndim - 1))])
  _shapes.check(x=(x, axes), log_a=(log_a, axes), state=(state, axes))
  dtype = accumulation_dtype(x, log_a, state)
  flat = lambda a: a.astype(dtype).reshape(1, 1, -1)
  tokens = linear_recurrence.Tokens(flat(x), flat(log_a))
  h, _ = _step(linear_recurrence.rule, flat(state)[..., None], tokens, x.dtype)
  h = h.reshape(state.shape)
  return h, h.astype(x.dtype)


def _heads(sizes, dtype) -> Callable[[Any], Any]:
  """Casts to the accumulation dtype and repeats the heads of queries and keys for the values they serve; None stays None."""
  groups = _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))

  def wide(x):
    if x is None:
      return None
    return jnp.repeat(x.astype(dtype), groups if x.shape[1] == sizes["H"] else 1, axis=1)

  return wide


def _scale(scale, sizes) -> float:
  return sizes["K"] ** -0.5 if scale is None else scale


def _step(rule, state, tokens, dtype):
  state, o = jax.vmap(jax.vmap(rule.step))(state, tokens)
  return state, o.astype(dtype)
