"""Each layer against its equations, written out token by token in NumPy, in float64, from the same parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, relative_rms
from flax import nnx
from layer_cases import CASES, QUICK, Case, D, abstract, values

import lajax.layers as L

T = 7
ROWS = {case.name: case for case in CASES}

sigmoid = lambda x: 1 / (1 + np.exp(-x))
silu = lambda x: x * sigmoid(x)
softplus = lambda x: np.log1p(np.exp(x))
l2 = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
rms = lambda x, weight: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def parts(layer, x, heads):
  """x W_in cut into heads; those of q k v that the layer convolves go through its convolution first."""
  z, start, out = x @ np.asarray(layer.in_proj.kernel), 0, {}
  channels = 0 if layer.conv is None else layer.conv.channels
  z = np.concatenate([conv(layer.conv, z[:, :channels]), z[:, channels:]], axis=1) if channels else z
  for name, *shape in heads:
    width = int(np.prod(shape))
    out[name] = z[:, start : start + width].reshape(T, *shape)
    start += width
  assert start == z.shape[1]
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
      out[t, :, i], out[t, :, i + half] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
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
  q, k = rms(p["q"], np.asarray(layer.q_norm.weight)), rms(p["k"], np.asarray(layer.k_norm.weight))
  q, k, o = turned(q, 100.0), turned(k, 100.0), np.zeros_like(p["q"])
  for t in range(T):
    for h in range(4):
      e = np.exp([q[t, h] @ k[j, h // 2] / np.sqrt(8) for j in range(t + 1)])
      o[t, h] = e @ p["v"][: t + 1, h // 2] / (e.sum() + np.exp(layer.sink[h]))
  return o * sigmoid(p["gate"])


def windowed_attention(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 1, 8), ("v", 1, 8)])
  q, k, o = turned(p["q"], 100.0), turned(p["k"], 100.0), np.zeros_like(p["q"])
  for t in range(T):
    seen = range(max(0, t - 4), t + 1)  # window 5
    for h in range(2):
      e = np.exp([q[t, h] @ k[j, 0] / np.sqrt(8) for j in seen])
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
    dt = softplus(p["dt"] + np.asarray(layer.dt_bias))
    o = recur(p["C"], p["B"], dt[..., None] * p["u"], np.exp(-np.exp(np.asarray(layer.A_log)) * dt), scale=1)
    y = (o + np.asarray(layer.D)[:, None] * p["u"]) * silu(p["z"])
    return rms(y.reshape(T, G, -1), np.asarray(layer.norm.weight))

  return f


def deltanet(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 2, 8), ("beta", 2)])
  return rms(recur(l2(p["q"]), l2(p["k"]), p["v"], beta=sigmoid(p["beta"])), np.asarray(layer.norm.weight))


def gated_deltanet(layer, x):
  p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", 4, 12), ("beta", 4), ("a", 4), ("gate", 4, 12)])
  decay = np.exp(-np.exp(np.asarray(layer.A_log)) * softplus(p["a"] + np.asarray(layer.dt_bias)))
  o = recur(l2(p["q"]), l2(p["k"]), p["v"], decay, 2 * sigmoid(p["beta"]))
  return rms(o, np.asarray(layer.norm.weight)) * silu(p["gate"])


def kda(HV, R, bounded):
  def f(layer, x):
    p = parts(layer, x, [("q", 2, 8), ("k", 2, 8), ("v", HV, 8), ("beta", HV), ("f", R), ("gate", R)])
    A = np.exp(np.asarray(layer.A_log))[:, None]
    f = (p["f"] @ np.asarray(layer.decay_proj.kernel)).reshape(T, HV, 8) + np.asarray(layer.dt_bias)
    decay = np.exp(-5 * sigmoid(A * f)) if bounded else np.exp(-A * softplus(f))
    o = recur(l2(p["q"]), l2(p["k"]), p["v"], decay, sigmoid(p["beta"]))
    gate = p["gate"] @ np.asarray(layer.gate_proj.kernel) + np.asarray(layer.gate_proj.bias)
    return rms(o, np.asarray(layer.norm.weight)) * sigmoid(gate).reshape(o.shape)

  return f


EQUATIONS = {
  "SoftmaxAttention-all": softmax_attention,
  "SoftmaxAttention-window": windowed_attention,
  "LinearAttention": kernel_attention(lambda q, k: elu1(q) @ elu1(k), 8, 8),
  "LinearAttention-exp": kernel_attention(lambda q, k: np.exp(q / np.sqrt(8)) @ np.exp(k / np.sqrt(8)), 8, 8),
  "LinearAttention-taylor2": kernel_attention(lambda q, k: taylor(q @ k / np.sqrt(4)), 4, 8),
  "LinearAttention-sum": unnormalized,
  "RetNet": retnet,
  "GLA": gla,
  "Mamba2": mamba2(2, 8, 1),
  "Mamba2-groups": mamba2(4, 6, 2),
  "DeltaNet": deltanet,
  "GatedDeltaNet-grouped": gated_deltanet,
  "KimiDeltaAttention": kda(2, 8, bounded=False),
  "KimiDeltaAttention-bounded": kda(4, 3, bounded=True),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name):
  graph, params = abstract(ROWS[name], param_dtype=jnp.float64, impl="recurrent")
  params = values(params)
  x = np.random.default_rng(1).normal(size=(T, D))
  layer = nnx.merge(graph, params)
  want = EQUATIONS[name](layer, x).reshape(T, -1) @ np.asarray(layer.out_proj.kernel)
  got, _ = jax.jit(lambda params, x: nnx.merge(graph, params)(x[None]), compiler_options=QUICK)(params, x)
  assert relative_rms(got[0], want) <= 1e2 * BUDGET["float64"]["value"]  # NumPy's sums are in another order
  assert set(EQUATIONS) <= set(ROWS)


@pytest.mark.usefixtures("x64")
def test_exp_features_do_not_overflow():
  """Keys of about 1000: exp of them is infinite, but not their ratios."""
  make = functools.partial(L.LinearAttention, D, 1, 4, feature_map="exp", impl="recurrent", param_dtype=jnp.float64)
  graph, params = abstract(Case("exp", make))
  params = values(params)
  layer = nnx.merge(graph, params)
  w_in, w_out = np.array(layer.in_proj.kernel), np.array(layer.out_proj.kernel)
  w_in[:, 4:8] *= 1e3
  params["in_proj"]["kernel"] = params["in_proj"]["kernel"].replace(w_in)
  x = np.random.default_rng(1).normal(size=(1, T, D))
  q, k, v = np.split(x[0] @ w_in, 3, axis=1)
  want = np.zeros((T, 4))
  for t in range(T):
    scores = (q[t] + k[: t + 1]) / 2
    e = np.exp(scores - scores.max()).sum(axis=1)
    want[t] = e @ v[: t + 1] / e.sum()
  got, _ = jax.jit(lambda params, x: nnx.merge(graph, params)(x), compiler_options=QUICK)(params, x)
  assert relative_rms(got[0], want @ w_out) < 1e-8  # the eps of the denominator is 1e-10
