"""Inputs of the ops: kinds of values ("rows"), and one sampler per op.

A sampler `sample(rng, gate, row, shape)` draws the float64 arguments of one sequence, with a batch
axis of 1. `gate` is a kind of decay of the op, `row` a kind of values.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes by the letters of `lajax._shapes`; the batch size is the number of rows."""

  T: int = 100
  H: int = 1
  HV: int = 2
  K: int = 12
  V: int = 20


def _one_in_ten(rng, shape, value):
  return np.where(rng.random(shape) < 0.1, value, -0.1 * rng.random(shape))


def _steep(rng, shape):
  """-1e8 for 32 tokens, then small: a suffix sum "total - prefix" loses the small ones."""
  tokens = np.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2))
  return np.where(tokens < 32, -1e8, -1 / 32.0) + np.zeros(shape)


ROWS = {  # log decays; everything else is drawn as usual
  "plain": lambda rng, shape: -0.3 * rng.exponential(size=shape),
  "mixed": lambda rng, shape: rng.choice([0, 0, -1e-4, -0.1, -1, -5, -20], size=shape),
  "forget": lambda rng, shape: np.full(shape, -20.0),
  "cliff": lambda rng, shape: _one_in_ten(rng, shape, -1e4),
  "inf": lambda rng, shape: _one_in_ten(rng, shape, -np.inf),
  "zero": lambda rng, shape: np.zeros(shape),
  "steep": _steep,
  # a caller's error, which must stay finite and equal to `recurrent`
  "positive": lambda rng, shape: np.full(shape, 0.01),
}
KEY_ROWS = {  # keys and write strengths of the delta rule
  "repeated": lambda k, beta: (np.broadcast_to(k[:, :1], k.shape), np.ones_like(beta)),
  "reflected": lambda k, beta: (np.broadcast_to(k[:, :1], k.shape), 2 * np.ones_like(beta)),
}


def _normal(rng, *shape):
  return rng.standard_normal(shape)


def _positive(rng, *shape):
  """Features, as of elu + 1."""
  return 0.1 + np.abs(rng.standard_normal(shape))


def _unit(rng, *shape):
  x = rng.standard_normal(shape)
  return x / np.sqrt((x * x).sum(-1, keepdims=True))


def _decays(rng, gate: str, row: str, s: Shape, channels: int | None = None) -> dict:
  """`g` per head or per channel: of the keys, or of as many `channels`."""
  if gate == "none":
    return {}
  shape = (1, s.T, s.HV) if gate == "head" else (1, s.T, s.HV, channels or s.K)
  return {"g": ROWS[row](rng, shape)}


def linear_attention(rng, gate, row, s):
  return {
    "q": _normal(rng, 1, s.T, s.H, s.K),
    "k": _normal(rng, 1, s.T, s.H, s.K),
    "v": _normal(rng, 1, s.T, s.HV, s.V),
    **_decays(rng, gate, row, s),
    "initial_state": _normal(rng, 1, s.HV, s.K, s.V),
  }


def bonus(rng, gate, row, s):
  return linear_attention(rng, "channel", row, s) | {"bonus": _normal(rng, s.H, s.K)}


def normalized(rng, gate, row, s):
  return linear_attention(rng, gate, row, s) | {
    "q": _positive(rng, 1, s.T, s.H, s.K),
    "k": _positive(rng, 1, s.T, s.H, s.K),
    "initial_state": (_normal(rng, 1, s.HV, s.K, s.V), _positive(rng, 1, s.HV, s.K)),
  }


def delta_rule(rng, gate, row, s):
  k, beta = _unit(rng, 1, s.T, s.H, s.K), rng.uniform(0, 2 if row == "zero" else 1, (1, s.T, s.HV))
  if row in KEY_ROWS:
    k, beta = KEY_ROWS[row](k, beta)
  decays = _decays(rng, gate, "plain" if row in KEY_ROWS else row, s)
  return linear_attention(rng, "none", row, s) | {"k": k, "beta": beta} | decays


def erase_write(rng, gate, row, s):
  inputs = delta_rule(rng, "channel", row, s)
  inputs.pop("beta")
  return inputs | {
    "erase": rng.uniform(size=(1, s.T, s.HV, s.K)),
    "write": rng.uniform(size=(1, s.T, s.HV, s.V)),
  }


def delta_product(rng, gate, row, s, R=2):
  return linear_attention(rng, gate, row, s) | {
    "k": _unit(rng, 1, s.T, R, s.H, s.K),
    "v": _normal(rng, 1, s.T, R, s.HV, s.V),
    "beta": rng.uniform(0, 2, (1, s.T, R, s.HV)),
  }


def gated_oja(rng, gate, row, s):
  """Here `g` per channel is per channel of the values."""
  inputs = linear_attention(rng, "none", row, s)
  decays = _decays(rng, gate, row, s, channels=s.V)
  v, beta = _unit(rng, 1, s.T, s.HV, s.V), rng.uniform(size=(1, s.T, s.HV))
  return inputs | {"v": v, "beta": beta} | decays


def dplr(rng, gate, row, s):
  kappa = _unit(rng, 1, s.T, s.H, s.K)
  inputs = linear_attention(rng, gate, row, s)
  return inputs | {"a": -kappa, "b": kappa * rng.uniform(size=(1, s.T, s.H, s.K))}


def preconditioned_delta_rule(rng, gate, row, s):
  inputs = delta_rule(rng, gate, row, s)
  return inputs | {
    "beta_precond": rng.uniform(size=(1, s.T, s.H)),
    "g_precond": ROWS[row](rng, (1, s.T, s.H)),
    "initial_state": (inputs["initial_state"], 0.1 * _positive(rng, 1, s.H, s.K)),
  }


def momentum_delta_rule(rng, gate, row, s):
  inputs = delta_rule(rng, gate, row, s)
  return inputs | {
    "p": _unit(rng, 1, s.T, s.H, s.K),
    "eta": rng.uniform(size=(1, s.T, s.HV)),
    "g_momentum": ROWS["plain" if row == "zero" else row](rng, (1, s.T, s.HV)),
    "initial_state": (inputs["initial_state"], 0.3 * _normal(rng, 1, s.HV, s.K, s.V)),
  }


def mesa(rng, gate, row, s):
  inputs = delta_rule(rng, gate, row, s)
  root = _normal(rng, 1, s.HV, s.K, s.K)
  G = 0.2 * root @ np.swapaxes(root, -1, -2)
  return inputs | {
    "ridge": rng.uniform(0.3, 1.5, (s.H, s.K)),
    "initial_state": (G, inputs["initial_state"]),
  }


def log_linear_attention(rng, gate, row, s):
  """Levels for all tokens behind a state of `position` tokens, whose empty levels are empty."""
  inputs = (
    linear_attention(rng, "head", row, s) if gate == "head" else delta_rule(rng, "head", row, s)
  )
  position, N = 5, (s.T + 5).bit_length()
  full = np.array([position >> n & 1 for n in range(N)]).reshape(1, 1, N, 1, 1)
  return inputs | {
    "level_scales": rng.uniform(size=(1, s.T, s.HV, N + 1)),
    "initial_state": (full * _normal(rng, 1, s.HV, N, s.K, s.V), np.full(1, float(position))),
  }


def mlstm(rng, gate, row, s):
  """n . q has either sign and is never near 0, a pole of the output; exp(-m) is larger at times."""
  inputs = normalized(rng, "none", row, s)
  return inputs | {
    "q": inputs["q"] * rng.choice([-1, 1], (1, s.T, s.H, 1)),
    "i": 2 * _normal(rng, 1, s.T, s.HV) - 1,
    "f": ROWS[row](rng, (1, s.T, s.HV)),
    "initial_state": (*inputs["initial_state"], _normal(rng, 1, s.HV)),
  }


def mamba3(rng, gate, row, s):
  """One key per token with the gate "head", two with "ranks"."""
  ranks = () if gate == "head" else (2,)
  draw = lambda heads, width: _normal(rng, 1, s.T, *ranks, heads, width)
  x = {"q": draw(s.H, s.K), "k": draw(s.H, s.K), "v": draw(s.HV, s.V)}
  last = lambda x: _normal(rng, 1, *x.shape[2:])
  return x | {
    "g": ROWS[row](rng, (1, s.T, s.HV)),
    "dt": rng.uniform(0.1, 1, (1, s.T, s.HV)),
    "trapezoid": rng.uniform(size=(1, s.T, s.HV)),
    "initial_state": (_normal(rng, 1, s.HV, s.K, s.V), last(x["k"]), last(x["v"])),
  }


def linear_recurrence(rng, gate, row, s):
  trailing = (s.V,) if gate == "vector" else (s.V, 12)  # [B T D], or Mamba's [B T D N]
  return {
    "x": _normal(rng, 1, s.T, *trailing),
    "log_a": ROWS[row](rng, (1, s.T, *trailing)),
    "initial_state": _normal(rng, 1, *trailing),
  }


def attention(rng, gate, row, s):
  """Here the queries have HV heads and the keys H."""
  qkv = {
    "q": _normal(rng, 1, s.T, s.HV, s.K),
    "k": _normal(rng, 1, s.T, s.H, s.K),
    "v": _normal(rng, 1, s.T, s.H, s.V),
  }
  if gate == "forget":
    return qkv | {"log_forget": ROWS[row](rng, (1, s.T, s.HV))}
  return qkv | ({"sink": _normal(rng, s.HV)} if gate == "window_sink" else {})
