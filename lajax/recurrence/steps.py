"""One token of each family, for decoding: step(state, token) -> (state, output). No axis T."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax import _shapes
from lajax._numerics import accumulation_dtype
from lajax.recurrence import delta_rule, dplr, linear_attention, linear_recurrence, mlstm

Matrix = Float[Array, "B HV K V"]


def linear_attention_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
  bonus: Float[Array, "H K"] | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.linear_attention`: S = Diag(exp g) S + k v^T, o = scale S^T q, or with a bonus u
  o = scale (S + Diag(u) k v^T)^T q of the state before."""
  sizes = _shapes.check(
    q=(q, "B H K"),
    k=(k, "B H K"),
    v=(v, "B HV V"),
    g=(g, "B HV | B HV K"),
    bonus=(bonus, "H K"),
    state=(state, "B HV K V"),
  )
  dtype = accumulation_dtype(q, k, v, g, bonus, state)
  wide = _heads(sizes, dtype)
  tokens = linear_attention.AdditiveTokens(
    wide(q) * _shapes.scale_of(scale, sizes), wide(k), wide(v), wide(g)
  )
  if bonus is None:
    return _step(linear_attention.rule, state.astype(dtype), tokens, v.dtype)
  state, o = _step(linear_attention.reading_before, state.astype(dtype), tokens, dtype)
  own = (tokens.q * tokens.k * wide(bonus[None])).sum(-1, keepdims=True)
  return state, (o + own * tokens.v).astype(v.dtype)


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
  S, z = _shapes.check_parts("state", state, ("S", "z"))
  _shapes.check(v=(v, "B HV V"), S=(S, "B HV K V"), z=(z, "B HV K"))
  _shapes.check_not_negative("eps", eps)
  values = linear_attention.with_ones(v).astype(accumulation_dtype(v, S))
  joined, read = linear_attention_step(
    jnp.concatenate([S, z[..., None]], axis=-1), q, k, values, g, scale=scale
  )
  return (joined[..., :-1], joined[..., -1]), linear_attention.divided(read, eps).astype(v.dtype)


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
    q=(q, "B H K"),
    k=(k, "B H K"),
    v=(v, "B HV V"),
    beta=(beta, "B HV"),
    g=(g, "B HV | B HV K"),
    erase=(erase, "B HV K"),
    write=(write, "B HV V"),
    state=(state, "B HV K V"),
  )
  _shapes.check_strengths(beta, erase, write)
  dtype = accumulation_dtype(q, k, v, beta, g, erase, write, state)
  wide = _heads(sizes, dtype)
  erase = beta if erase is None else erase
  tokens = delta_rule.DeltaTokens(
    wide(q) * _shapes.scale_of(scale, sizes), *map(wide, (k, v, erase, write, g))
  )
  return _step(delta_rule.rule, state.astype(dtype), tokens, v.dtype)


def delta_product_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B R H K"],
  v: Float[Array, "B R HV V"],
  beta: Float[Array, "B R HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.delta_product`: S = Diag(exp g) S, then R delta steps, then o = scale S^T q."""
  sizes = _shapes.check(
    q=(q, "B H K"),
    k=(k, "B R H K"),
    v=(v, "B R HV V"),
    beta=(beta, "B R HV"),
    g=(g, "B HV | B HV K"),
    state=(state, "B HV K V"),
  )
  dtype = accumulation_dtype(q, k, v, beta, g, state)
  wide = _heads(sizes, dtype)
  state, k = state.astype(dtype), jnp.stack([wide(k[:, r]) for r in range(sizes["R"])], axis=1)
  state = jax.vmap(jax.vmap(linear_attention.decay_state))(wide(g), state)

  def correct(state, x):
    k, v, beta = x
    error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest"))
    return state + k[..., :, None] * error[..., None, :], None

  first = lambda x: jnp.moveaxis(x.astype(dtype), 1, 0)
  state, _ = jax.lax.scan(correct, state, (first(k), first(v), first(beta)))
  o = (state * (wide(q) * _shapes.scale_of(scale, sizes))[..., None]).sum(-2)
  return state, o.astype(v.dtype)


def gated_oja_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV V"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.gated_oja`: S = S Diag(exp g) ; S = S + (k - S v) (beta v)^T, o = scale S^T q."""
  sizes = _shapes.check(
    q=(q, "B H K"),
    k=(k, "B H K"),
    v=(v, "B HV V"),
    beta=(beta, "B HV"),
    g=(g, "B HV | B HV V"),
    state=(state, "B HV K V"),
  )
  dtype = accumulation_dtype(q, k, v, beta, g, state)
  wide = _heads(sizes, dtype)
  tokens = delta_rule.DeltaTokens(
    wide(q) * _shapes.scale_of(scale, sizes), *map(wide, (v, k, beta, None, g))
  )
  turned, o = _step(delta_rule.by_rows, jnp.swapaxes(state.astype(dtype), -1, -2), tokens, v.dtype)
  return jnp.swapaxes(turned, -1, -2), o


def dplr_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  a: Float[Array, "B H K"],
  b: Float[Array, "B H K"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.dplr`: S = Diag(exp g) S + b (S^T a)^T + k v^T, o = scale S^T q."""
  sizes = _shapes.check(
    q=(q, "B H K"),
    k=(k, "B H K"),
    v=(v, "B HV V"),
    a=(a, "B H K"),
    b=(b, "B H K"),
    g=(g, "B HV | B HV K"),
    state=(state, "B HV K V"),
  )
  dtype = accumulation_dtype(q, k, v, a, b, g, state)
  wide = _heads(sizes, dtype)
  tokens = dplr.DplrTokens(
    wide(q) * _shapes.scale_of(scale, sizes), wide(k), wide(v), wide(a), wide(b), wide(g)
  )
  return _step(dplr.rule, state.astype(dtype), tokens, v.dtype)


def mlstm_step(
  state: tuple[Matrix, Float[Array, "B HV K"], Float[Array, "B HV"]],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  i: Float[Array, "B HV"],
  f: Float[Array, "B HV"],
  *,
  scale: float | None = None,
) -> tuple[tuple[Matrix, Float[Array, "B HV K"], Float[Array, "B HV"]], Float[Array, "B HV V"]]:
  """One token of `lajax.mlstm`: C = f' C + i' k v^T, n = f' n + i' k, o = scale C^T q / max(|scale n.q|, exp(-m))."""
  C, n, m = _shapes.check_parts("state", state, ("C", "n", "m"))
  _shapes.check(
    v=(v, "B HV V"), i=(i, "B HV"), f=(f, "B HV"), C=(C, "B HV K V"), n=(n, "B HV K"), m=(m, "B HV")
  )
  dtype = accumulation_dtype(q, k, v, i, f, C, n, m)
  top, g, write = (
    x[:, 0]
    for x in mlstm.stabilise(
      i.astype(dtype)[:, None], f.astype(dtype)[:, None], m.astype(dtype), None
    )
  )
  values = linear_attention.with_ones(v.astype(dtype)) * write[..., None]
  joined = mlstm.rescaled(
    jnp.concatenate([C, n[..., None]], axis=-1).astype(dtype), m.astype(dtype), 1
  )
  joined, out = linear_attention_step(joined, q, k, values, g, scale=scale)
  o = out[..., :-1] * mlstm.normalizer(out[..., -1:], top[..., None])
  joined = mlstm.rescaled(joined, top, -1)
  return (joined[..., :-1], joined[..., -1], top), o.astype(v.dtype)


def linear_recurrence_step(
  state: Float[Array, "B *D"], x: Float[Array, "B *D"], log_a: Float[Array, "B *D"]
) -> tuple[Float[Array, "B *D"], Float[Array, "B *D"]]:
  """One token of `lajax.linear_recurrence`: h = exp(log_a) h + x."""
  axes = " ".join(["B", *(f"D{n}" for n in range(x.ndim - 1))])
  _shapes.check(x=(x, axes), log_a=(log_a, axes), state=(state, axes))
  dtype = accumulation_dtype(x, log_a, state)
  flat = lambda a: a.astype(dtype).reshape(1, 1, -1)
  tokens = linear_recurrence.ElementwiseTokens(flat(x), flat(log_a))
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


def _step(rule, state, tokens, dtype):
  state, o = jax.vmap(jax.vmap(rule.step))(state, tokens)
  return state, o.astype(dtype)
