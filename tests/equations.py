"""The equations of the ops as their papers print them, in NumPy, token by token.

`recurrent` itself is compared with them. An equation takes one row of inputs without the batch
axis, the segment id of each token and the scale, and returns outputs and the final state.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def scan(update: Callable, read: Callable) -> Callable:
  """Equation from update(state, token) -> state and read(state, token, scale) -> output."""

  def equation(
    inputs: Mapping[str, Any], segment_ids: np.ndarray, scale: float | None
  ) -> tuple[np.ndarray, Any]:
    tokens = {name: x for name, x in inputs.items() if name != "initial_state"}
    state, document, outputs = inputs["initial_state"], None, []
    for t, segment in enumerate(segment_ids):
      token = {name: x[t] for name, x in tokens.items()}
      if segment >= 0:
        if document is not None and segment != document:
          state = jax.tree.map(np.zeros_like, state)
        document, state = segment, update(state, token)
      o = np.asarray(read(state, token, scale))
      outputs.append(o if segment >= 0 else np.zeros_like(o))
    return np.stack(outputs), state

  return equation


def heads(x, like):
  return np.repeat(x, like.shape[0] // x.shape[0], axis=0)


def decay(token, state):
  g = token.get("g", np.zeros(1))
  return np.exp(g).reshape(*g.shape, *(1,) * (state.ndim - g.ndim)) * state


def outer(a, b):
  return a[..., :, None] * b[..., None, :]


def read(state, token, scale):
  q = heads(token["q"], state)
  return (q.shape[-1] ** -0.5 if scale is None else scale) * np.einsum("hkv,hk->hv", state, q)


def add(state, token):
  return decay(token, state) + outer(heads(token["k"], token["v"]), token["v"])


def add_normalized(state, token):
  ones = token | {"v": np.ones_like(token["v"][..., :1])}
  return add(state[0], token), add(state[1][..., None], ones)[..., 0]


def read_normalized(state, token, scale):
  denominator = read(state[1][..., None], token, scale)
  return read(state[0], token, scale) / (denominator + 1e-10)


def correct(state, token):
  k = heads(token["k"], token["v"])
  state = decay(token, state)
  error = token["v"] - np.einsum("hkv,hk->hv", state, k)
  return state + outer(k, token["beta"][:, None] * error)


def correct_preconditioned(state, token):
  (S, A), k, v = state, token["k"], token["v"]
  A = np.exp(token["g_precond"])[:, None] * A + token["beta_precond"][:, None] * k * k
  r = np.log(A + 1e-6) + 0.2
  S, m = decay(token, S), 1.5 ** (-r / (1 + abs(r)))
  error = token["beta"][:, None] * (v - np.einsum("hkv,hk->hv", S, heads(k, v)))
  return S + outer(heads(m * k, v), error), A


def correct_with_momentum(state, token):
  (S, M), v = state, token["v"]
  k, p = heads(token["k"], v), heads(token["p"], v)
  error = v - np.einsum("hkv,hk->hv", S, p)
  M = decay({"g": token["g_momentum"]}, M) - outer(k, token["eta"][:, None] * error)
  return decay(token, S) - token["beta"][:, None, None] * M, M


def read_first(state, token, scale):
  return read(state[0], token, scale)


def correct_channels(state, token):
  k, state = heads(token["k"], token["v"]), decay(token, state)
  error = token["write"] * token["v"] - np.einsum("hkv,hk->hv", state, token["erase"] * k)
  return state + outer(k, error)


def correct_often(state, token):
  state = decay(token, state)
  for k, v, beta in zip(token["k"], token["v"], token["beta"], strict=True):
    state = correct(state, {"k": k, "v": v, "beta": beta})
  return state


def correct_values(state, token):
  g = token.get("g", np.zeros(1))
  state = state * (np.exp(g)[:, None, None] if g.ndim == 1 else np.exp(g)[:, None, :])
  v = token["v"]
  error = heads(token["k"], v) - np.einsum("hkv,hv->hk", state, v)
  return state + outer(error, token["beta"][:, None] * v)


def reading_before(inputs, segment_ids, scale):
  """Linear attention with a bonus: the state is read before the token's decay and write.

  The state of the scan is (state before the token, state after it).
  """
  u = inputs["bonus"]

  def read_with_bonus(state, token, scale):
    q, k = token["q"], token["k"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    own = heads((q * u * k).sum(-1, keepdims=True), token["v"]) * token["v"]
    return read(state[0], token, scale) + scale * own

  S = inputs["initial_state"]
  tokens = {name: x for name, x in inputs.items() if name != "bonus"} | {"initial_state": (S, S)}
  o, state = scan(lambda state, token: (state[1], add(state[1], token)), read_with_bonus)(
    tokens, segment_ids, scale
  )
  return o, state[1]


def add_low_rank(state, token):
  k, a, b = (heads(token[name], token["v"]) for name in "kab")
  return decay(token, state) + outer(b, np.einsum("hkv,hk->hv", state, a)) + outer(k, token["v"])


def add_trapezoid(state, token):
  """The R keys and values of a token stand on the first axis, if there are any."""
  S, k, v = state
  write = lambda k, v: outer(heads(k, v), v) if k.ndim == 2 else sum(map(write, k, v))
  lam, dt, decay = (x[:, None, None] for x in (token["trapezoid"], token["dt"], np.exp(token["g"])))
  S = decay * S + (1 - lam) * dt * decay * write(k, v) + lam * dt * write(token["k"], token["v"])
  return S, token["k"], token["v"]


def read_trapezoid(state, token, scale):
  ranks = token["q"] if token["q"].ndim == 3 else token["q"][None]
  o = np.stack([read(state[0], {"q": q}, scale) for q in ranks])
  return o.reshape(token["v"].shape)


def ridge_regression(inputs, segment_ids, scale):
  """Reads the state of linear attention with the solution of the tokens' ridge regression."""

  def update(state, token):
    k, beta = heads(token["k"], token["v"]), token["beta"][:, None]
    g = {"g": token["g"]}
    G, S = (decay(g, part) for part in state)
    return G + outer(k, beta * k), S + outer(k, beta * token["v"])

  def read_solution(state, token, scale):
    ridge, q = (heads(x, state[0]) for x in (inputs["ridge"], token["q"]))
    x = [np.linalg.solve(G + np.diag(r), y) for G, r, y in zip(state[0], ridge, q, strict=True)]
    return read(state[1], {"q": np.stack(x)}, scale)

  tokens = {name: x for name, x in inputs.items() if name != "ridge"}
  return scan(update, read_solution)(tokens, segment_ids, scale)


def log_linear(inputs, segment_ids, scale):
  """Every level is a state; behind token t it joins the levels that a binary counter joins."""

  def update(state, token):
    (levels, position), zero = state[:2], np.zeros_like(state[0][:, 0])
    step = correct if "beta" in token else add
    silent = token | {"v": np.zeros_like(token["v"])}
    moved = [step(zero, token)] + [step(S, silent) for S in levels.swapaxes(0, 1)]
    read, t = np.stack(moved, axis=1), int(np.round(position))
    to = next(n for n in range(60) if not t >> n & 1) + 1
    to = min(to, len(moved) - 1)
    joined = sum(moved[: to + 1], np.zeros_like(zero))
    after = [zero] * (to - 1) + [joined] + moved[to + 1 :]
    return np.stack(after, axis=1), np.float64((position + 1) % 2 ** len(after)), read

  def read_levels(state, token, scale):
    weighted = (token["level_scales"][..., None, None] * state[2]).sum(1)
    return read(weighted, token, scale)

  S, position = inputs["initial_state"]
  first = S, position, np.concatenate([S[:, :1], S], axis=1)
  tokens = inputs | {"initial_state": first}
  o, state = scan(update, read_levels)(tokens, segment_ids, scale)
  return o, state[:2]


def add_stabilised(state, token):
  C, n, m = state
  i, f, k = token["i"], token["f"], heads(token["k"], token["v"])
  top = np.maximum(f + m, i)
  forget, write = np.exp(f + m - top), np.exp(i - top)
  C = forget[:, None, None] * C + write[:, None, None] * outer(k, token["v"])
  return C, forget[:, None] * n + write[:, None] * k, top


def read_stabilised(state, token, scale):
  C, n, m = state
  denominator = read(n[..., None], token, scale)
  return read(C, token, scale) / np.maximum(np.abs(denominator), np.exp(-m)[:, None])


def softmax(inputs, segment_ids, scale, window=None):
  """Softmax over the tokens of a document up to the query; the denominator includes the sink."""
  sink = inputs.get("sink")
  q, v = inputs["q"], inputs["v"]
  k, v = (
    np.repeat(inputs["k"], q.shape[1] // v.shape[1], 1),
    np.repeat(v, q.shape[1] // v.shape[1], 1),
  )
  is_token = segment_ids >= 0
  ids, place = segment_ids[is_token], np.cumsum(is_token)  # a window counts tokens, not padding
  document = np.full(len(segment_ids), -1)
  document[is_token] = np.cumsum(np.concatenate([[0], ids[1:] != ids[:-1]])) if len(ids) else 0
  outputs = np.zeros((len(q), q.shape[1], v.shape[-1]))
  for i in np.flatnonzero(is_token):
    near = place[: i + 1] > place[i] - (window or len(q))
    j = np.flatnonzero((document[: i + 1] == document[i]) & near)
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * np.einsum("hk,jhk->jh", q[i], k[j])
    if "log_forget" in inputs:  # the gates between key and query, summed backwards from the query
      later = np.where(is_token, 1.0, 0.0)[: i + 1, None] * np.nan_to_num(
        inputs["log_forget"][: i + 1], neginf=-1e30
      )
      suffix = np.cumsum(later[::-1], 0)[::-1]
      scores = scores + np.concatenate([suffix[1:], np.zeros_like(suffix[:1])])[j]
    top = scores.max(0) if sink is None else np.maximum(scores.max(0), sink)
    weights = np.exp(scores - top)
    total = weights.sum(0) + (0 if sink is None else np.exp(sink - top))
    outputs[i] = np.einsum("jh,jhv->hv", weights / total, v[j])
  return outputs, ()
