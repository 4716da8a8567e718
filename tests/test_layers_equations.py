"""Each layer against its equations, written out token by token in NumPy, in float64, from the same
parameters.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx
from layer_cases import CASES, Case, D, abstract, values

import lajax.layers as L

T = 7
EPS = 1e-10  # in the denominator of normalized_linear_attention: it shows where weights are small
ROWS = {case.name: case for case in CASES}

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)
softplus = lambda x: np.log1p(np.exp(x))
l2 = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
rms = lambda x, weight: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def parts(layer, x, heads):
  """x W cut into heads for each projection; those that the layer convolves go through their
  convolution first.
  """
  out = {}
  for name, *shape in heads:
    z = x @ np.asarray(layer.in_proj[name].kernel)
    if layer.in_proj[name].bias is not None:
      z = z + np.asarray(layer.in_proj[name].bias)
    z = z * dict(layer.multipliers).get(name, 1.0)
    out[name] = (conv(layer.conv[name], z) if name in (layer.conv or ()) else z).reshape(T, *shape)
  assert set(out) == {name for name, _ in layer.projections}
  return out


def conv(layer, x):
  w, y = np.asarray(layer.weight), np.zeros_like(x)
  for t in range(len(x)):
    for lag in range(min(layer.width, t + 1)):
      y[t] += w[:, layer.width - 1 - lag] * x[t - lag]
  y = y if layer.bias is None else y + np.asarray(layer.bias)
  return silu(y) if layer.activation == "silu" else y


def turned(x, theta):
  half = x.shape[-1] // 2
  out = np.empty_like(x)
  for t in range(T):
    for i in range(half):
      angle = t * theta ** (-i / half)
      a, b = x[t, :, i], x[t, :, i + half]
      out[t, :, i], out[t, :, i + half] = (
        a * np.cos(angle) - b * np.sin(angle),
        b * np.cos(angle) + a * np.sin(angle),
      )
  return out


def recur(q, k, v, decay=None, beta=None, scale=None):
  """S = Diag(decay) S ; S += k v^T, or k (beta (v - S^T k))^T ; o = scale S^T q, for each head."""
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  HV, G = v.shape[1], v.shape[1] // q.shape[1]
  o = np.zeros_like(v)
  for h in range(HV):
    S = np.zeros((q.shape[-1], v.shape[-1]))
    for t in range(T):
      qt, kt, vt = q[t, h // G], k[t, h // G], v[t, h]
      if decay is not None:
        S = (decay[t, h] * np.ones(len(S)))[:, None] * S
      S = S + np.outer(kt, vt if beta is None else beta[t, h] * (vt - S.T @ kt))
      o[t, h] = scale * S.T @ qt
  return o


def softmax_attention(layer, x):
  p = parts(layer, x, [("q", 4, 8), ("k", 2, 8), ("v", 2, 8), ("gate", 4, 8)])
  q = rms(p["q"], 1 + np.asarray(layer.q_norm.weight))
  k = rms(p["k"], 1 + np.asarray(layer.k_norm.weight))
  q, k, o = turned(q, 100.0), turned(k, 100.0), np.zeros_like(p["q"])
  for t in range(T):
    for h in range(4):
      e = np.exp([q[t, h] @ k[j, h // 2] / np.sqrt(8) for j in range(t + 1)])
      o[t, h] = e @ p["v"][: t + 1, h // 2] / (e.sum() + np.exp(layer.sink[h]))
  return o * sigmoid(p["gate"])


def windowed_attention(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 1, 8), ("v", 1, 8)])
  whole = lambda x, norm: rms(x.reshape(T, -1), np.asarray(norm.weight)).reshape(x.shape)
  first = lambda x: np.concatenate([turned(x[..., :4], 100.0), x[..., 4:]], axis=-1)
  q, k = first(whole(p["q"], layer.q_norm)), first(whole(p["k"], layer.k_norm))
  o = np.zeros_like(q)
  for t in range(T):
    seen = range(max(0, t - 4), t + 1)  # window 5
    for h in range(2):
      e = np.exp([0.3 * q[t, h] @ k[j, 0] for j in seen])
      o[t, h] = e @ p["v"][list(seen), 0] / e.sum()
  return o


def kernel_attention(kernel, K, V):
  def f(layer, x):
    p = parts(layer, x, [("q", 2, K), ("k", 2, K), ("v", 2, V)])
    o = np.zeros_like(p["v"])
    for t in range(T):
      for h in range(2):
        w = np.array([kernel(p["q"][t, h], p["k"][j, h]) for j in range(t + 1)])
        o[t, h] = w @ p["v"][: t + 1, h] / w.sum()
    return o

  return f


elu1 = lambda x: np.where(x > 0, x + 1, np.exp(x))
taylor = lambda s: 1 + s + s * s / 2


def unnormalized(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8)])
  return recur(p["q"], p["k"], p["v"], scale=1)


def performer(layer, x):
  p, w = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8)]), np.asarray(layer.projection)
  phi = lambda x: np.exp(x @ w / 8**0.25 - (x * x).sum(-1, keepdims=True) / (2 * 8**0.5))
  return recur_normalized(phi(p["q"]), phi(p["k"]), p["v"])


def cosformer(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8)])
  o = np.zeros_like(p["v"])
  for t in range(T):
    for h in range(2):
      relu = lambda x: np.maximum(x, 0)
      w = [
        relu(p["q"][t, h]) @ relu(p["k"][j, h]) * np.cos(np.pi * (t - j) / (2 * layer.max_length))
        for j in range(t + 1)
      ]
      o[t, h] = w @ p["v"][: t + 1, h] / (np.sum(w) + EPS)
  return o


def rebased(layer, x):
  p = parts(layer, x, [("q", 2, 4), ("k", 2, 4), ("v", 2, 8)])
  standard = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  affine = lambda norm, x: standard(x) * np.asarray(norm.scale) + np.asarray(norm.bias)
  q, k, o = affine(layer.q_norm, p["q"]), affine(layer.k_norm, p["k"]), np.zeros_like(p["v"])
  for t in range(T):
    for h in range(2):
      w = (k[: t + 1, h] @ q[t, h]) ** 2 / 4
      o[t, h] = w @ p["v"][: t + 1, h] / (w.sum() + EPS)
  return o


def hedgehog(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8)])

  def phi(x, weight):
    y = np.einsum("thk,hkf->thf", x, np.asarray(weight))
    e = np.exp(np.concatenate([y, -y], axis=-1))
    return e / e.sum(-1, keepdims=True)

  return recur_normalized(phi(p["q"], layer.q_map), phi(p["k"], layer.k_map), p["v"], EPS)


def recur_normalized(q, k, v, eps=0.0):
  both = recur(q, k, np.concatenate([v, np.ones_like(v[..., :1])], axis=-1), scale=1)
  return both[..., :-1] / (both[..., -1:] + eps)


def lightning(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 16), ("gate", 32)])
  slopes = np.asarray(layer.slopes)  # the test gives them values of its own, as to all arrays
  o = recur(silu(p["q"]), silu(p["k"]), silu(p["v"]), np.broadcast_to(np.exp(-slopes), (T, 2)))
  return rms(o.reshape(T, -1), np.asarray(layer.norm.weight)) * sigmoid(p["gate"])


def hgrn(layer, x):
  p = parts(layer, x, [("i", 24), ("f", 24), ("gate", 24)])
  keep, h = 0.3 + 0.7 * sigmoid(p["f"]), np.zeros((T, 24))
  for t in range(T):
    h[t] = keep[t] * h[t - 1] + (1 - keep[t]) * silu(p["i"][t])  # h[-1] is still zero at t = 0
  return rms(h, np.asarray(layer.norm.weight)) * silu(p["gate"])


def hgrn2(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("f", 2, 8), ("i", 2, 8)])
  keep = 0.3 + 0.7 * sigmoid(p["f"])
  o = recur(silu(p["q"]), 1 - keep, p["i"], keep)
  return rms(o.reshape(T, -1), np.asarray(layer.norm.weight))


def retnet(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 16), ("gate", 2, 16)])
  decay = np.broadcast_to([1 - 2.0**-5, 1 - 2.0**-6], (T, 2))
  o = recur(turned(p["q"], 1e4), turned(p["k"], 1e4), p["v"], decay)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def gla(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("f", 16), ("gate", 2, 8)])
  f = p["f"] @ np.asarray(layer.decay_proj.kernel) + np.asarray(layer.decay_proj.bias)
  o = recur(p["q"], p["k"], p["v"], (sigmoid(f) ** (1 / 16)).reshape(T, 2, 8))
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def mamba2(H, N, G):
  def f(layer, x):
    p = parts(layer, x, [("u", H, 8), ("B", G, N), ("C", G, N), ("z", H, 8), ("dt", H)])
    dt = np.clip(softplus(p["dt"] + np.asarray(layer.dt_bias)), *(layer.dt_limits or (0, np.inf)))
    o = recur(
      p["C"], p["B"], dt[..., None] * p["u"], np.exp(-np.exp(np.asarray(layer.A_log)) * dt), scale=1
    )
    y = (o + np.asarray(layer.D)[:, None] * p["u"]) * silu(p["z"])
    if layer.norm_groups is not None:
      return rms(y.reshape(T, layer.norm_groups, -1), 1).reshape(T, -1) * np.asarray(
        layer.norm.weight
      )
    return rms(y.reshape(T, G, -1), np.asarray(layer.norm.weight))

  return f


def mamba3(H, G, R, angles):
  """The printed recurrence, with both ends of a step in one update."""

  def f(layer, x):
    ranks = () if layer.rank is None else (R,)
    gates = [(name, H) for name in ("dt", "rate", "trapezoid")]
    keys = [("B", *ranks, G, 4), ("C", *ranks, G, 4)]
    p = parts(layer, x, [("z", H, 8), ("u", H, 8), *keys, *gates, ("angle", angles)])
    dt, a = softplus(p["dt"] + np.asarray(layer.dt_bias)), p["rate"]
    a = np.where(a >= 0, 1 + a, 1 / (1 - np.minimum(a, 0)))
    alpha, lam = np.exp(-dt * np.maximum(a, 1e-4)), sigmoid(p["trapezoid"])
    theta = np.cumsum(np.pi * dt[..., None] * np.tanh(p["angle"])[:, None], axis=0)

    def turn(x, norm, bias):
      x = rms(x.reshape(T, R, G, 4), np.asarray(norm.weight)).repeat(H // G, axis=2)
      x = x + np.asarray(bias).reshape(R, H, 4)
      for n in range(angles):
        a, b = x[..., 2 * n].copy(), x[..., 2 * n + 1].copy()
        cos, sin = np.cos(theta[:, None, :, n]), np.sin(theta[:, None, :, n])
        x[..., 2 * n], x[..., 2 * n + 1] = a * cos - b * sin, a * sin + b * cos
      return x

    q, k = turn(p["C"], layer.C_norm, layer.C_bias), turn(p["B"], layer.B_norm, layer.B_bias)
    weight = lambda w: np.asarray(w) if ranks else np.ones((R, H, 8))
    v = p["u"][:, None] * weight(getattr(layer, "rank_u", None))
    z = p["z"][:, None] * weight(getattr(layer, "rank_z", None))
    o = np.zeros_like(v)
    for h in range(H):
      S, before = np.zeros((4, 8)), np.zeros((4, 8))
      for t in range(T):
        write = k[t, :, h].T @ v[t, :, h]
        S = alpha[t, h] * (S + (1 - lam[t, h]) * dt[t, h] * before) + lam[t, h] * dt[t, h] * write
        o[t, :, h], before = q[t, :, h] @ S + layer.D[h] * v[t, :, h], write
    if layer.norm is not None:
      o = rms(o, np.asarray(layer.norm_weight))
    return (o * silu(z) * weight(getattr(layer, "rank_out", None))).sum(1)

  return f


def deltanet(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("beta", 2)])
  return rms(
    recur(l2(p["q"]), l2(p["k"]), p["v"], beta=sigmoid(p["beta"])), np.asarray(layer.norm.weight)
  )


def gated_delta_parts(layer, x, HV=2, V=8, **others):
  """The projections of a `GatedDeltaMixer`, q and k at unit length, and the decay."""
  own = [("q", 2, 8), ("k", 2, 8), ("v", HV, V), ("beta", HV), ("a", HV), ("gate", HV, V)]
  p = parts(layer, x, own + [(name, *shape) for name, shape in others.items()])
  decay = np.exp(-np.exp(np.asarray(layer.A_log)) * softplus(p["a"] + np.asarray(layer.dt_bias)))
  return p | {"q": l2(p["q"]), "k": l2(p["k"])}, decay


def gated_deltanet(HV, V, act, top):
  def f(layer, x):
    p, decay = gated_delta_parts(layer, x, HV, V)
    o = recur(p["q"], p["k"], p["v"], decay, top * sigmoid(p["beta"]))
    return rms(o, np.asarray(layer.norm.weight)) * act(p["gate"])

  return f


def qdelta(layer, x):
  p, decay = gated_delta_parts(layer, x, 4, feedback=(4,))
  beta, feedback, o = sigmoid(p["beta"]), sigmoid(p["feedback"] - 0.9), np.zeros((T, 4, 8))
  for h in range(4):
    S = np.zeros((8, 8))
    for t in range(T):
      q, k, S = p["q"][t, h // 2], p["k"][t, h // 2], decay[t, h] * S
      S = S + np.outer(k, beta[t, h] * (p["v"][t, h] - S.T @ (k + feedback[t, h] * q)))
      o[t, h] = S.T @ q / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def kda(HV, R, bounded):
  def f(layer, x):
    f, gate = (("f", R), ("gate", R)) if R else (("f", HV, 8), ("gate", HV, 8))
    p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", HV, 8), ("beta", HV), f, gate])
    A = np.exp(np.asarray(layer.A_log))[:, None]
    f = p["f"] @ np.asarray(layer.decay_proj.kernel) if R else p["f"]
    f = f.reshape(T, HV, 8) + np.asarray(layer.dt_bias)
    decay = np.exp(-5 * sigmoid(A * f)) if bounded else np.exp(-A * softplus(f))
    o = recur(l2(p["q"]), l2(p["k"]), p["v"], decay, sigmoid(p["beta"]))
    if R:
      gate = p["gate"] @ np.asarray(layer.gate_proj.kernel) + np.asarray(layer.gate_proj.bias)
    else:
      gate = p["gate"] + np.asarray(layer.gate_bias)
    return rms(o, np.asarray(layer.norm.weight)) * sigmoid(gate).reshape(o.shape)

  return f


def mesanet(layer, x):
  p, decay = gated_delta_parts(layer, x, V=4)
  ridge, beta, o = 0.25 + softplus(np.asarray(layer.ridge_bias)), sigmoid(p["beta"]), []
  for h in range(2):
    G, S = np.zeros((8, 8)), np.zeros((8, 4))
    for t in range(T):
      k, v = p["k"][t, h], p["v"][t, h]
      G = decay[t, h] * G + beta[t, h] * np.outer(k, k)
      S = decay[t, h] * S + beta[t, h] * np.outer(k, v)
      o.append(S.T @ np.linalg.solve(G + np.diag(ridge[h]), p["q"][t, h]))
  o = np.stack(o).reshape(2, T, 4).swapaxes(0, 1)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def by_levels(q, k, v, decay, scales, beta=None):
  """Each write is carried to each later token by itself, and weighed by its level there."""
  HV, G, L = v.shape[1], v.shape[1] // q.shape[1], scales.shape[-1]
  o = np.zeros_like(v)
  for h, j in np.ndindex(HV, T):
    kj = k[j, h // G]
    S = np.outer(kj, v[j, h] * (1 if beta is None else beta[j, h]))
    for i in range(j, T):
      if i > j:
        ki, S = k[i, h // G], decay[i, h] * S
        S = S if beta is None else S - beta[i, h] * np.outer(ki, S.T @ ki)
      o[i, h] += scales[i, h, min((i ^ j).bit_length(), L - 1)] * S.T @ q[i, h // G]
  return o


def log_linear_mamba2(layer, x):
  p = parts(
    layer, x, [("u", 2, 8), ("B", 1, 4), ("C", 1, 4), ("z", 2, 8), ("dt", 2), ("levels", 2, 9)]
  )
  dt = softplus(p["dt"] + np.asarray(layer.dt_bias))
  scales = softplus(p["levels"] + np.asarray(layer.level_bias))
  decay = np.exp(-np.exp(np.asarray(layer.A_log)) * dt)
  o = by_levels(p["C"], p["B"], dt[..., None] * p["u"], decay, scales)
  y = (o + np.asarray(layer.D)[:, None] * p["u"]) * silu(p["z"])
  return rms(y.reshape(T, 1, -1), np.asarray(layer.norm.weight))


def log_linear_gdn(layer, x):
  own = [("q", 2, 4), ("k", 2, 4), ("v", 4, 4), ("beta", 4), ("a", 4), ("gate", 4, 4)]
  p = parts(layer, x, [*own, ("levels", 4, 3)])  # the last level holds all tokens from bit 1 on
  decay = np.exp(-np.exp(np.asarray(layer.A_log)) * softplus(p["a"] + np.asarray(layer.dt_bias)))
  scales = softplus(p["levels"] + np.asarray(layer.level_bias))
  q, k, beta = l2(p["q"]) / 2, l2(p["k"]), sigmoid(p["beta"])
  o = by_levels(q, k, p["v"], decay, scales, beta)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def momentum_deltanet(layer, x):
  own = [("q", 2, 8), ("k", 2, 8), ("v", 4, 8), ("beta", 4), ("a", 4), ("gate", 4, 8)]
  p = parts(layer, x, [*own, ("momentum", 4), ("eta", 4)])
  rate = lambda a, A_log, bias: np.exp(np.asarray(A_log)) * softplus(a + np.asarray(bias))
  mu = np.exp(np.maximum(-rate(p["momentum"], layer.A_log_momentum, layer.momentum_bias), -2))
  eta = np.tanh(p["eta"] / np.sqrt(D)) + 1
  theta = np.arctan(eta * np.exp(np.asarray(layer.log_ratio)))
  alpha = np.exp(-rate(p["a"], layer.A_log, layer.dt_bias)) * np.cos(theta) ** 2
  beta, o = sigmoid(p["beta"]) * np.sin(theta) ** 2, np.zeros((T, 4, 8))
  q, k = l2(p["q"] - np.exp(np.asarray(layer.log_feedback))[:, None] * p["k"]), l2(p["k"])
  for h in range(4):
    S, M = np.zeros((2, 8, 8))
    for t in range(T):
      error = p["v"][t, h] - alpha[t, h] * S.T @ k[t, h // 2]
      M = mu[t, h] * M - eta[t, h] * np.outer(k[t, h // 2], error)
      S = alpha[t, h] * S - beta[t, h] * M
      o[t, h] = S.T @ q[t, h // 2] / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * sigmoid(p["gate"])


def preconditioned(layer, p, decay, HV):
  """The normed outputs, from the projections and decays of [.. 1] or [.. K]."""
  strength, beta = sigmoid(p["beta_precond"]), sigmoid(p["beta"])
  rate = np.exp(np.asarray(layer.A_log_precond))
  keep = np.exp(-rate * softplus(p["a_precond"] + np.asarray(layer.dt_bias_precond)))
  o = np.zeros((T, HV, 8))
  for h in range(HV):
    n = h * 2 // HV
    S, A = np.zeros((8, 8)), np.zeros(8)
    for t in range(T):
      q, k = p["q"][t, n], p["k"][t, n]
      A = keep[t, n] * A + strength[t, n] * k * k
      r = np.log(A + 1e-6) + 0.2
      S = decay[t, h][:, None] * S
      S = S + np.outer(1.5 ** (-r / (1 + abs(r))) * k, beta[t, h] * (p["v"][t, h] - S.T @ k))
      o[t, h] = S.T @ q / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight))


def preconditioned_gdn(layer, x):
  p, decay = gated_delta_parts(layer, x, 4, beta_precond=(2,), a_precond=(2,))
  return preconditioned(layer, p, decay[..., None], 4) * silu(p["gate"])


def preconditioned_kda(layer, x):
  own = [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("beta", 2), ("f", 3), ("gate", 3)]
  p = parts(layer, x, [*own, ("beta_precond", 2), ("a_precond", 2)])
  f = (p["f"] @ np.asarray(layer.decay_proj.kernel)).reshape(T, 2, 8) + np.asarray(layer.dt_bias)
  decay = np.exp(-np.exp(np.asarray(layer.A_log))[:, None] * softplus(f))
  p = p | {"q": l2(p["q"]), "k": l2(p["k"])}
  gate = p["gate"] @ np.asarray(layer.gate_proj.kernel) + np.asarray(layer.gate_proj.bias)
  return preconditioned(layer, p, decay, 2) * sigmoid(gate).reshape(T, 2, 8)


def mamba(layer, x):
  p = parts(layer, x, [("u", 12), ("z", 12)])
  norm = lambda x, layer: (
    x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.weight)
  )
  r, b, c = np.split(p["u"] @ np.asarray(layer.x_proj.kernel), [3, 7], axis=1)
  r, b, c = norm(r, layer.dt_norm), norm(b, layer.B_norm), norm(c, layer.C_norm)
  dt = softplus(r @ np.asarray(layer.dt_proj.kernel) + np.asarray(layer.dt_bias))
  h, o = np.zeros((12, 4)), np.zeros_like(p["u"])
  for t in range(T):
    h = np.exp(-np.exp(np.asarray(layer.A_log)) * dt[t][:, None]) * h + np.outer(
      dt[t] * p["u"][t], b[t]
    )
    o[t] = h @ c[t] + np.asarray(layer.D) * p["u"][t]
  return o * silu(p["z"])


def griffin(layer, x):
  p, lru = parts(layer, x, [("u", 12), ("gate", 12)]), layer.rglru
  h, o = np.zeros(12), np.zeros_like(p["u"])
  for t in range(T):
    blocks = [
      p["u"][t, 4 * n : 4 * n + 4] @ np.asarray(lru.gates)[n] + np.asarray(lru.gates_bias)[n]
      for n in range(3)
    ]
    r, i = (
      sigmoid(np.concatenate([b[half] for b in blocks])) for half in (slice(0, 4), slice(4, 8))
    )
    a = np.exp(-8 * r * softplus(np.asarray(lru.Lambda))) if t else np.zeros(12)
    h = o[t] = a * h + np.sqrt(1 - a**2) * (i * p["u"][t])
  gate = p["gate"]
  return o * gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


def forgetting_attention(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 1, 8), ("v", 1, 8), ("f", 2), ("gate", 2, 8)])
  q, k = rms(p["q"], np.asarray(layer.q_norm.weight)), rms(p["k"], np.asarray(layer.k_norm.weight))
  forget, o = sigmoid(p["f"] + np.asarray(layer.f_bias)), np.zeros_like(p["q"])
  for t in range(T):
    for h in range(2):
      kept = [np.prod(forget[j + 1 : t + 1, h]) for j in range(t + 1)]
      e = np.array([kept[j] * np.exp(q[t, h] @ k[j, 0] / np.sqrt(8)) for j in range(t + 1)])
      o[t, h] = e @ p["v"][: t + 1, 0] / e.sum()
  return o * sigmoid(p["gate"])


def mla(layer, x):
  p = parts(layer, x, [("q", 2, 10), ("c", 5), ("r", 1, 4), ("gate", 2, 1)])
  halves = lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)  # pairs of neighbours
  c = p["c"] / np.sqrt((p["c"] ** 2).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.norm.weight)
  up = (c @ np.asarray(layer.up_proj.kernel)).reshape(T, 2, 13)
  q = np.concatenate([p["q"][..., :6], turned(halves(p["q"][..., 6:]), 100.0)], axis=-1)
  k = np.concatenate([up[..., :6], turned(halves(p["r"]), 100.0).repeat(2, axis=1)], axis=-1)
  o = np.zeros((T, 2, 7))
  for t in range(T):
    for h in range(2):
      e = np.exp([q[t, h] @ k[j, h] / np.sqrt(10) for j in range(t + 1)])
      o[t, h] = e @ up[: t + 1, h, 6:] / e.sum()
  return o * sigmoid(p["gate"])


def double_gated_conv(layer, x):
  b, c, u = (
    x @ np.asarray(layer.in_proj[n].kernel) + np.asarray(layer.in_proj[n].bias) for n in "bcu"
  )
  return c * conv(layer.conv["u"], b * u)


def shifted(layer, x, change, name, m=None):
  index = (
    {"w": 0, "k": 1, "v": 2, "r": 3, "gate": 4}
    if m is not None
    else {"r": 0, "w": 1, "k": 2, "v": 3, "iclr": 4, "gate": 5}
  )
  return x + change * (np.asarray(layer.mu)[index[name]] + (0 if m is None else m[:, index[name]]))


def projected(layer, name, x):
  return (x @ np.asarray(layer.in_proj[name].kernel)).reshape(T, 2, 8)


def head_norm(layer, o):
  o = o - o.mean(-1, keepdims=True)
  return o / np.sqrt((o * o).mean(-1, keepdims=True) + 64e-5) * np.asarray(
    layer.norm.weight
  ) + np.asarray(layer.norm.bias)


def low_rank(module, x, activation=lambda x: x):
  y = activation(x @ np.asarray(module.down.kernel)) @ np.asarray(module.up.kernel)
  return y + np.asarray(module.bias)


def rwkv6(layer, x):
  change = np.concatenate([np.zeros((1, D)), x[:-1]]) - x
  m = np.tanh((x + change * np.asarray(layer.mu_x)) @ np.asarray(layer.shift_down.kernel)).reshape(
    T, 5, -1
  )
  m = np.einsum("tir,ird->tid", m, np.asarray(layer.shift_up))
  read = lambda name: projected(layer, name, shifted(layer, x, change, name, m))
  k, v, r, gate = (read(name) for name in ("k", "v", "r", "gate"))
  w = np.exp(-np.exp(low_rank(layer.decay, shifted(layer, x, change, "w", m), np.tanh))).reshape(
    T, 2, 8
  )
  u, o = np.asarray(layer.bonus), np.zeros_like(v)
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      o[t, h] = (S + np.outer(u[h] * k[t, h], v[t, h])).T @ r[t, h]
      S = w[t, h][:, None] * S + np.outer(k[t, h], v[t, h])
  return head_norm(layer, o) * silu(gate)


def rwkv7(layer, x):
  change = np.concatenate([np.zeros((1, D)), x[:-1]]) - x
  r, k, v = (projected(layer, name, shifted(layer, x, change, name)) for name in "rkv")
  w = np.exp(
    -0.606531 * sigmoid(low_rank(layer.decay, shifted(layer, x, change, "w"), np.tanh))
  ).reshape(T, 2, 8)
  a = sigmoid(low_rank(layer.iclr, shifted(layer, x, change, "iclr"))).reshape(T, 2, 8)
  kappa = l2(k * np.asarray(layer.removal))
  k = k * (1 + (a - 1) * np.asarray(layer.replacement))
  o = np.zeros_like(v)
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      old = S.T @ -kappa[t, h]
      S = w[t, h][:, None] * S + np.outer(kappa[t, h] * a[t, h], old) + np.outer(k[t, h], v[t, h])
      o[t, h] = S.T @ r[t, h]
  own = (r * k * np.asarray(layer.own)).sum(-1, keepdims=True) * v
  gate = sigmoid(
    shifted(layer, x, change, "gate") @ np.asarray(layer.gate_down.kernel)
  ) @ np.asarray(layer.gate_up.kernel)
  return (head_norm(layer, o) + own) * gate.reshape(T, 2, 8)


def delta_product(layer, x):
  p = parts(
    layer,
    x,
    [("q", 2, 8), ("k", 2, 2, 8), ("v", 2, 2, 8), ("beta", 2, 2), ("a", 2), ("gate", 2, 8)],
  )
  decay = np.exp(-np.exp(np.asarray(layer.A_log)) * softplus(p["a"] + np.asarray(layer.dt_bias)))
  q, k, beta, o = l2(p["q"]), l2(p["k"]), 2 * sigmoid(p["beta"]), np.zeros((T, 2, 8))
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      S = decay[t, h] * S
      for r in range(2):
        S = S + np.outer(k[t, h, r], beta[t, h, r] * (p["v"][t, h, r] - S.T @ k[t, h, r]))
      o[t, h] = S.T @ q[t, h] / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def gated_deltanet2(layer, x):
  p = parts(
    layer,
    x,
    [
      ("q", 2, 8),
      ("k", 2, 8),
      ("v", 2, 8),
      ("erase", 2, 8),
      ("write", 2, 8),
      ("f", 3),
      ("gate", 2, 8),
    ],
  )
  f = (p["f"] @ np.asarray(layer.decay_proj.kernel)).reshape(T, 2, 8) + np.asarray(layer.dt_bias)
  decay = np.exp(-np.exp(np.asarray(layer.A_log))[:, None] * softplus(f))
  q, k, b, w, o = (
    l2(p["q"]),
    l2(p["k"]),
    sigmoid(p["erase"]),
    sigmoid(p["write"]),
    np.zeros((T, 2, 8)),
  )
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      S = decay[t, h][:, None] * S
      S = S + np.outer(k[t, h], w[t, h] * p["v"][t, h] - S.T @ (b[t, h] * k[t, h]))
      o[t, h] = S.T @ q[t, h] / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def gated_oja(layer, x):
  p = parts(
    layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("beta", 2), ("f", 3), ("gate", 2, 8)]
  )
  f = (p["f"] @ np.asarray(layer.decay_proj.kernel)).reshape(T, 2, 8) + np.asarray(layer.dt_bias)
  decay = np.exp(-np.exp(np.asarray(layer.A_log))[:, None] * softplus(f))
  v, beta, o = l2(p["v"]), sigmoid(p["beta"]), np.zeros((T, 2, 8))
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      S = S * decay[t, h][None, :]
      S = S + np.outer(p["k"][t, h] - S @ v[t, h], beta[t, h] * v[t, h])
      o[t, h] = S.T @ p["q"][t, h] / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def comba(layer, x):
  p, decay = gated_delta_parts(layer, x)
  k, beta, o = p["k"], sigmoid(p["beta"]), np.zeros((T, 2, 8))
  feedback = sigmoid(np.asarray(layer.d))[:, None] * k
  q = p["q"] - np.asarray(layer.D)[:, None] * feedback
  for h in range(2):
    S = np.zeros((8, 8))
    for t in range(T):
      u = beta[t, h] * (p["v"][t, h] - S.T @ feedback[t, h])
      S = decay[t, h] * S + np.outer(k[t, h], u)
      o[t, h] = S.T @ q[t, h] / np.sqrt(8)
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def mlstm(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("i", 2), ("f", 2), ("gate", 2, 8)])
  i, f = (
    np.exp(p["i"] + np.asarray(layer.input_bias)),
    sigmoid(p["f"] + np.asarray(layer.forget_bias)),
  )
  o = np.zeros((T, 2, 8))
  for h in range(2):
    C, n = np.zeros((8, 8)), np.zeros(8)
    for t in range(T):
      C = f[t, h] * C + i[t, h] * np.outer(p["k"][t, h], p["v"][t, h])
      n = f[t, h] * n + i[t, h] * p["k"][t, h]
      q = p["q"][t, h] / np.sqrt(8)
      o[t, h] = C.T @ q / max(abs(n @ q), 1)
  return rms(o, np.asarray(layer.norm.weight)) * sigmoid(p["gate"])


EQUATIONS = {
  "SoftmaxAttention-all": softmax_attention,
  "SoftmaxAttention-window": windowed_attention,
  "LinearAttention": kernel_attention(lambda q, k: elu1(q) @ elu1(k), 8, 8),
  "LinearAttention-exp": kernel_attention(
    lambda q, k: np.exp(q / np.sqrt(8)) @ np.exp(k / np.sqrt(8)), 8, 8
  ),
  "LinearAttention-taylor2": kernel_attention(lambda q, k: taylor(q @ k / np.sqrt(4)), 4, 8),
  "LinearAttention-sum": unnormalized,
  "Performer": performer,
  "CosFormer": cosformer,
  "Based": kernel_attention(lambda q, k: taylor(q @ k / np.sqrt(4)), 4, 8),
  "ReBased": rebased,
  "Hedgehog": hedgehog,
  "Lightning": lightning,
  "HGRN": hgrn,
  "HGRN2": hgrn2,
  "RetNet": retnet,
  "GLA": gla,
  "Mamba2": mamba2(2, 8, 1),
  "Mamba2-groups": mamba2(4, 6, 2),
  "Mamba3": mamba3(4, 2, 1, 1),
  "Mamba3-ranks": mamba3(2, 1, 2, 2),
  "DeltaNet": deltanet,
  "GatedDeltaNet": gated_deltanet(2, 8, silu, 1),
  "GatedDeltaNet-grouped": gated_deltanet(4, 12, sigmoid, 2),
  "QDelta": qdelta,
  "KimiDeltaAttention": kda(2, 8, bounded=False),
  "KimiDeltaAttention-bounded": kda(4, None, bounded=True),
  "MesaNet": mesanet,
  "LogLinearMamba2": log_linear_mamba2,
  "LogLinearGatedDeltaNet": log_linear_gdn,
  "MomentumDeltaNet": momentum_deltanet,
  "PreconditionedGatedDeltaNet": preconditioned_gdn,
  "PreconditionedKDA": preconditioned_kda,
  "DeltaProduct": delta_product,
  "GatedDeltaNet2": gated_deltanet2,
  "GatedOja": gated_oja,
  "Comba": comba,
  "MLSTM": mlstm,
  "RWKV6": rwkv6,
  "RWKV7": rwkv7,
  "Mamba": mamba,
  "GriffinBlock": griffin,
  "ForgettingAttention": forgetting_attention,
  "MLA": mla,
  "DoubleGatedConv": double_gated_conv,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name):
  graph, params = abstract(ROWS[name], param_dtype=jnp.float64, impl="recurrent")
  params = values(params)
  x = np.random.default_rng(1).normal(size=(T, D))
  layer = nnx.merge(graph, params)
  want = EQUATIONS[name](layer, x).reshape(T, -1) @ np.asarray(layer.out_proj.kernel)
  if layer.out_proj.bias is not None:
    want = want + np.asarray(layer.out_proj.bias)
  got, _ = quick_jit(lambda params, x: nnx.merge(graph, params)(x[None]))(params, x)
  assert (
    relative_rms(got[0], want) <= 1e2 * BUDGET["float64"]["value"]
  )  # NumPy's sums are in another order
  assert set(EQUATIONS) <= set(ROWS)


@pytest.mark.usefixtures("x64")
def test_exp_features_do_not_overflow():
  """Keys of about 1000: exp of them is infinite, but not their ratios."""
  make = functools.partial(
    L.LinearAttention, D, 1, 4, feature_map="exp", impl="recurrent", param_dtype=jnp.float64
  )
  graph, params = abstract(Case("exp", make))
  params = values(params)
  k_proj = params["in_proj"]["k"]
  k_proj["kernel"] = k_proj["kernel"].replace(1e3 * np.asarray(k_proj["kernel"]))
  layer = nnx.merge(graph, params)
  x = np.random.default_rng(1).normal(size=(1, T, D))
  q, k, v = (x[0] @ np.asarray(layer.in_proj[name].kernel) for name in "qkv")
  want = np.zeros((T, 4))
  for t in range(T):
    scores = (q[t] + k[: t + 1]) / 2
    e = np.exp(scores - scores.max()).sum(axis=1)
    want[t] = e @ v[: t + 1] / e.sum()
  got, _ = quick_jit(lambda params, x: nnx.merge(graph, params)(x))(params, x)
  assert relative_rms(got[0], want @ np.asarray(layer.out_proj.kernel)) < BUDGET["float64"]["value"]
