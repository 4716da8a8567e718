"""The ops that `speed.py` times, and their inputs: decays near 1, unit keys where needed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import lajax
import lajax.recurrence as R

STEPS = 2  # delta steps per token of delta_product
BOUND = -5.0  # of the log decays of kda_bounded


@dataclasses.dataclass(frozen=True)
class Op:
  """An op, a sampler of its inputs, and its step of decoding."""

  call: Callable[..., tuple]  # (**inputs, impl=) -> (outputs, state)
  draw: Callable[..., dict[str, np.ndarray]]  # (generator, config, T) -> inputs
  step: Callable[..., tuple] | None  # (state, **inputs without T) -> (state, output)
  transition_size: Callable[
    [Any], int
  ]  # config -> numbers per token that an associative scan keeps
  meaning: str = ""  # explains a name
  untimed: tuple[str, ...] = ()  # inputs without an axis T


def _qkv(rng, c, T):
  draw = lambda width: rng.standard_normal((c.batch, T, c.heads, width))
  return {"q": draw(c.width), "k": draw(c.width), "v": draw(c.value_width or c.width)}


def _log_decay(rng, *shape):
  return -np.log1p(np.exp(-rng.standard_normal(shape))) / 16  # log sigmoid / 16, as in GLA


def _sigmoid(rng, *shape):
  return 1 / (1 + np.exp(-rng.standard_normal(shape)))


def _unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _positive(rng, c, T):
  x = _qkv(rng, c, T)
  return x | {name: np.abs(x[name]) + 0.1 for name in "qk"}


def _delta(rng, c, T):
  x = _qkv(rng, c, T)
  return x | {"k": _unit(x["k"]), "beta": _sigmoid(rng, c.batch, T, c.heads)}


def _gated(draw: Callable, gate: str):
  extra = lambda c: (c.width,) if gate == "channel" else ()
  return lambda rng, c, T: draw(rng, c, T) | {"g": _log_decay(rng, c.batch, T, c.heads, *extra(c))}


def _elementwise(rng, c, T):
  shape = (c.batch, T, c.heads * c.width)
  return {"x": rng.standard_normal(shape), "log_a": _log_decay(rng, *shape)}


def _rwkv6(rng, c, T):
  return _gated(_qkv, "channel")(rng, c, T) | {"bonus": rng.standard_normal((c.heads, c.width))}


def _gdn2(rng, c, T):
  x = _gated(_qkv, "channel")(rng, c, T)
  return x | {
    "k": _unit(x["k"]),
    "erase": _sigmoid(rng, *x["k"].shape),
    "write": _sigmoid(rng, *x["v"].shape),
  }


def _bounded(rng, c, T):
  x = _delta(rng, c, T)
  return x | {"g": BOUND * _sigmoid(rng, *x["k"].shape)}


def _delta_product(rng, c, T):
  x = _qkv(rng, c, T)
  k, v = (rng.standard_normal((c.batch, T, STEPS, *x[name].shape[2:])) for name in "kv")
  return x | {"k": _unit(k), "v": v, "beta": 2 * _sigmoid(rng, c.batch, T, STEPS, c.heads)}


def _oja(rng, c, T):
  x = _qkv(rng, c, T)
  gates = {"beta": _sigmoid(rng, c.batch, T, c.heads), "g": _log_decay(rng, *x["v"].shape)}
  return x | {"v": _unit(x["v"])} | gates


def _rwkv7(rng, c, T):
  x = _gated(_qkv, "channel")(rng, c, T)
  kappa = _unit(rng.standard_normal(x["k"].shape))
  return x | {"k": _unit(x["k"]), "a": -kappa, "b": kappa * _sigmoid(rng, *kappa.shape)}


def _comba(rng, c, T):
  x = _gated(_delta, "head")(rng, c, T)
  beta, k = x.pop("beta")[..., None], x["k"]
  return x | {"v": beta * x["v"], "a": k / (1 + np.exp(-1)), "b": -beta * k}


def _q_delta(rng, c, T):
  x = _gated(_delta, "head")(rng, c, T)
  beta, q, k = x.pop("beta")[..., None], _unit(x["q"]), x["k"]
  read = k + _sigmoid(rng, *beta.shape) * q
  return x | {"q": q, "v": beta * x["v"], "a": np.exp(x["g"])[..., None] * read, "b": -beta * k}


def _mlstm(rng, c, T):
  gates = {
    "i": rng.standard_normal((c.batch, T, c.heads)),
    "f": _log_decay(rng, c.batch, T, c.heads),
  }
  return _qkv(rng, c, T) | gates


def _preconditioned(rng, c, T):
  x, shape = _gated(_delta, "head")(rng, c, T), (c.batch, T, c.heads)
  return x | {"beta_precond": _sigmoid(rng, *shape), "g_precond": _log_decay(rng, *shape)}


def _momentum(rng, c, T):
  x, shape = _gated(_delta, "head")(rng, c, T), (c.batch, T, c.heads)
  gates = {"eta": _sigmoid(rng, *shape), "g_momentum": _log_decay(rng, *shape)}
  return x | {"p": x["k"]} | gates


def _mesa(rng, c, T):
  return _gated(_delta, "head")(rng, c, T) | {"ridge": 0.25 + _sigmoid(rng, c.heads, c.width)}


def _by_levels(draw: Callable):
  levels = lambda T: 1 + max(1, (T - 1).bit_length())
  scales = lambda rng, c, T: _sigmoid(rng, c.batch, T, c.heads, levels(T))
  return lambda rng, c, T: draw(rng, c, T) | {"level_scales": scales(rng, c, T)}


def _mamba3(rng, c, T):
  x, shape = _qkv(rng, c, T), (c.batch, T, c.heads)
  gates = {"g": _log_decay(rng, *shape), "dt": _sigmoid(rng, *shape)}
  return x | gates | {"trapezoid": _sigmoid(rng, *shape)}


_additive_size = lambda c: c.batch * c.heads * c.width * (c.value_width or c.width)
_matrix_size = lambda c: _additive_size(c) + c.batch * c.heads * c.width * c.width
_value_size = lambda c: _additive_size(c) + c.batch * c.heads * (c.value_width or c.width) ** 2
_linear = functools.partial(
  Op, lajax.linear_attention, step=R.linear_attention_step, transition_size=_additive_size
)
_corrected = functools.partial(
  Op, lajax.delta_rule, step=R.delta_rule_step, transition_size=_matrix_size
)
_low_rank = functools.partial(Op, lajax.dplr, step=R.dplr_step, transition_size=_matrix_size)
_log_linear = functools.partial(
  Op,
  lajax.log_linear_attention,
  step=R.log_linear_attention_step,
  transition_size=lambda c: 16 * _matrix_size(c),
)

CORE: dict[str, Op] = {  # timed by default
  "linear_attention": _linear(draw=_qkv, meaning="no decay"),
  "simple_gla": _linear(draw=_gated(_qkv, "head"), meaning="linear attention, one decay per head"),
  "gla": _linear(draw=_gated(_qkv, "channel"), meaning="one decay per channel"),
  "normalized": Op(
    lajax.normalized_linear_attention,
    _positive,
    R.normalized_linear_attention_step,
    _additive_size,
    meaning="linear attention over q . z",
  ),
  "delta_rule": _corrected(draw=_delta),
  "gated_delta_rule": _corrected(draw=_gated(_delta, "head")),
  "kda": _corrected(draw=_gated(_delta, "channel"), meaning="delta rule, one decay per channel"),
  "linear_recurrence": Op(
    lajax.linear_recurrence,
    _elementwise,
    R.linear_recurrence_step,
    lambda c: 2 * c.batch * c.heads * c.width,
  ),
  "attention": Op(
    lambda q, k, v, impl: (lajax.attention(q, k, v, impl=impl), ()), _qkv, None, lambda c: 0
  ),
}

OPS: dict[str, Op] = CORE | {
  "kda_bounded": Op(
    functools.partial(lajax.delta_rule, bound=BOUND),
    _bounded,
    R.delta_rule_step,
    _matrix_size,
    meaning=f"kda with log decays of at least {BOUND:g}, and this bound declared",
  ),
  "rwkv6": _linear(
    draw=_rwkv6, meaning="gla with a bonus for the token itself", untimed=("bonus",)
  ),
  "mamba3": Op(
    lajax.mamba3, _mamba3, R.mamba3_step, _additive_size, meaning="trapezoidal linear attention"
  ),
  "gdn2": Op(
    functools.partial(lajax.delta_rule, beta=None),
    _gdn2,
    functools.partial(R.delta_rule_step, beta=None),
    _matrix_size,
    meaning="Gated DeltaNet 2, kda with erase and write gates",
  ),
  "preconditioned": Op(
    lajax.preconditioned_delta_rule,
    _preconditioned,
    R.preconditioned_delta_rule_step,
    _matrix_size,
    meaning="preconditioned Gated DeltaNet",
  ),
  "momentum": Op(
    lajax.momentum_delta_rule,
    _momentum,
    R.momentum_delta_rule_step,
    lambda c: 4 * _matrix_size(c),
    meaning="delta rule with momentum, two states",
  ),
  "mesa": Op(
    lajax.mesa, _mesa, R.mesa_step, _matrix_size, meaning="solved exactly", untimed=("ridge",)
  ),
  "log_linear": _log_linear(
    draw=_by_levels(_gated(_qkv, "head")), meaning="log-linear attention, one decay per head"
  ),
  "log_linear_gdn": _log_linear(
    draw=_by_levels(_gated(_delta, "head")), meaning="log-linear attention on gated_delta_rule"
  ),
  "delta_product": Op(
    lajax.delta_product,
    _gated(_delta_product, "head"),
    R.delta_product_step,
    lambda c: STEPS * _matrix_size(c),
    meaning=f"{STEPS} delta steps per token, one decay per head",
  ),
  "gated_oja": Op(
    lajax.gated_oja, _oja, R.gated_oja_step, _value_size, meaning="one decay per value channel"
  ),
  "rwkv7": _low_rank(draw=_rwkv7, meaning="dplr, one decay per channel"),
  "comba": _low_rank(draw=_comba, meaning="dplr, one decay per head"),
  "q_delta": _low_rank(draw=_q_delta, meaning="Q-Delta, dplr with one decay per head"),
  "mlstm": Op(lajax.mlstm, _mlstm, R.mlstm_step, _additive_size),
}
