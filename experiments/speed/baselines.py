"""Baselines of `speed.py`: the plainest code of each op, and other libraries if installed.

Every baseline takes an op's inputs by name, in the layout of lajax, and returns (outputs, state).
Baselines of PyTorch take and return tensors. The plain code is a first attempt: einsums, float32
states, gradients by automatic differentiation, nothing recomputed.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOKEN_SCAN = "naive token scan"
ASSOCIATIVE_SCAN = "naive associative scan"
QUADRATIC = "quadratic softmax"


class Baseline(NamedTuple):
  call: Callable[..., tuple[Any, Any]]
  library: str = "jax"  # or "torch"


# --- token by token ---


def over_tokens(step: Callable, state, *tokens):
  """Scans step(state, token arrays) -> (state, output) over the tokens of arrays [B T ..]."""
  front = [jnp.moveaxis(x, 1, 0) for x in tokens]
  state, o = lax.scan(lambda state, x: step(state, *x), state, front)
  return jnp.moveaxis(o, 0, 1), state


def linear_attention(q, k, v, g=None):
  q, k, v, *gates = _wide(q * q.shape[-1] ** -0.5, k, v, g)

  def step(S, q, k, v, *g):
    S = _decayed(S, *g) + jnp.einsum("bhk,bhv->bhkv", k, v)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k, v), q, k, v, *gates)


def delta_rule(q, k, v, beta, g=None):
  q, k, v, beta, *gates = _wide(q * q.shape[-1] ** -0.5, k, v, beta, g)

  def step(S, q, k, v, beta, *g):
    S = _decayed(S, *g)
    error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S))
    S = S + jnp.einsum("bhk,bhv->bhkv", k, error)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k, v), q, k, v, beta, *gates)


def rwkv6(q, k, v, g, bonus):
  q, k, v, g, u = _wide(q * q.shape[-1] ** -0.5, k, v, g, bonus)

  def step(S, q, k, v, g):
    write = jnp.einsum("bhk,bhv->bhkv", k, v)
    return _decayed(S, g) + write, jnp.einsum("bhk,bhkv->bhv", q, S + u[None, ..., None] * write)

  return over_tokens(step, _zeros(k, v), q, k, v, g)


def preconditioned(q, k, v, beta, g, beta_precond, g_precond):
  q, k, v, *gates = _wide(q * q.shape[-1] ** -0.5, k, v, beta, g, beta_precond, g_precond)

  def step(state, q, k, v, beta, g, strength, decay):
    S, A = state
    A = jnp.exp(decay)[..., None] * A + strength[..., None] * k * k
    r = jnp.log(A + 1e-6) + 0.2
    S = _decayed(S, g)
    error = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S))
    S = S + jnp.einsum("bhk,bhv->bhkv", 1.5 ** (-r / (1 + abs(r))) * k, error)
    return (S, A), jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, (_zeros(k, v), jnp.zeros_like(k[:, 0])), q, k, v, *gates)


def momentum(q, k, p, v, beta, eta, g, g_momentum):
  q, *rest = _wide(q * q.shape[-1] ** -0.5, k, p, v, beta, eta, g, g_momentum)

  def step(state, q, k, p, v, beta, eta, g, g_momentum):
    S, M = state
    error = eta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", p, S))
    M = _decayed(M, g_momentum) - jnp.einsum("bhk,bhv->bhkv", k, error)
    S = _decayed(S, g) - beta[..., None, None] * M
    return (S, M), jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, (_zeros(k, v), _zeros(k, v)), q, *rest)


def mesa(q, k, v, beta, g, ridge):
  q, k, v, beta, g, ridge = _wide(q, k, v, beta, g, ridge)

  def step(state, q, k, v, beta, g):
    write = lambda a: jnp.einsum("bh,bhk,bhv->bhkv", beta, k, a)
    G, S = _decayed(state[0], g) + write(k), _decayed(state[1], g) + write(v)
    systems = G + ridge[None, :, :, None] * jnp.eye(k.shape[-1], dtype=k.dtype)[None, None]
    return (G, S), jnp.einsum("bhk,bhkv->bhv", jnp.linalg.solve(systems, q[..., None])[..., 0], S)

  return over_tokens(step, (_zeros(k, k), _zeros(k, v)), q, k, v, beta, g)


def log_linear(q, k, v, g, level_scales, beta=None):
  q, k, v, g, scales, *strength = _wide(q, k, v, g, level_scales, beta)
  level = jnp.arange(1, scales.shape[-1])

  def step(state, q, k, v, g, scales, *strength):
    S, position = state
    own, S = jnp.einsum("bhk,bhv->bhkv", k, v)[:, :, None], _decayed(S, g)
    for beta in strength:
      own = beta[..., None, None, None] * own
      read = beta[..., None, None] * jnp.einsum("bhk,bhlkv->bhlv", k, S)
      S = S - jnp.einsum("bhk,bhlv->bhlkv", k, read)
    o = jnp.einsum("bhk,bhl,bhlkv->bhv", q, scales, jnp.concatenate([own, S], axis=2))
    t = position[0].astype(jnp.int32)
    to = jnp.minimum(lax.population_count(t ^ (t + 1)), len(level))
    joins, joined = ((x)[None, None, :, None, None] for x in (level < to, level == to))
    sums = own + jnp.where(joins, S, 0).sum(2, keepdims=True)
    S = jnp.where(joins, 0, S) + jnp.where(joined, sums, 0)
    return (S, (position + 1) % 2 ** len(level)), o

  first = jnp.repeat(_zeros(k, v)[:, :, None], len(level), axis=2), jnp.zeros_like(g[:, 0, 0])
  # Without this the backward pass keeps several arrays of the size of all levels per token.
  return over_tokens(jax.checkpoint(step), first, q, k, v, g, scales, *strength)


def mamba3(q, k, v, g, dt, trapezoid):
  q, k, v, g, dt, mix = _wide(q, k, v, g, dt, trapezoid)

  def step(state, q, k, v, g, dt, mix):
    S, k_before, v_before = state
    before = jnp.einsum("bh,bhk,bhv->bhkv", (1 - mix) * dt, k_before, v_before)
    S = _decayed(S + before, g) + jnp.einsum("bh,bhk,bhv->bhkv", mix * dt, k, v)
    return (S, k, v), jnp.einsum("bhk,bhkv->bhv", q, S)

  first = _zeros(k, v), jnp.zeros_like(k[:, 0]), jnp.zeros_like(v[:, 0])
  return over_tokens(step, first, q, k, v, g, dt, mix)


def gdn2(q, k, v, g, erase, write):
  q, k, v, g, erase, write = _wide(q * q.shape[-1] ** -0.5, k, v, g, erase, write)

  def step(S, q, k, v, g, erase, write):
    S = _decayed(S, g)
    error = write * v - jnp.einsum("bhk,bhkv->bhv", erase * k, S)
    S = S + jnp.einsum("bhk,bhv->bhkv", k, error)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k, v), q, k, v, g, erase, write)


def delta_product(q, k, v, beta, g):
  q, k, v, beta, g = _wide(q * q.shape[-1] ** -0.5, k, v, beta, g)

  def step(S, q, k, v, beta, g):
    S = _decayed(S, g)
    for r in range(k.shape[1]):
      error = beta[:, r, :, None] * (v[:, r] - jnp.einsum("bhk,bhkv->bhv", k[:, r], S))
      S = S + jnp.einsum("bhk,bhv->bhkv", k[:, r], error)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k[:, :, 0], v[:, :, 0]), q, k, v, beta, g)


def gated_oja(q, k, v, beta, g):
  q, k, v, beta, g = _wide(q * q.shape[-1] ** -0.5, k, v, beta, g)

  def step(S, q, k, v, beta, g):
    S = S * jnp.exp(g)[..., None, :]
    error = k - jnp.einsum("bhkv,bhv->bhk", S, v)
    S = S + jnp.einsum("bhk,bhv->bhkv", error, beta[..., None] * v)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k, v), q, k, v, beta, g)


def dplr(q, k, v, a, b, g):
  q, k, v, a, b, g = _wide(q * q.shape[-1] ** -0.5, k, v, a, b, g)

  def step(S, q, k, v, a, b, g):
    read = jnp.einsum("bhk,bhkv->bhv", a, S)
    S = _decayed(S, g) + jnp.einsum("bhk,bhv->bhkv", b, read) + jnp.einsum("bhk,bhv->bhkv", k, v)
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)

  return over_tokens(step, _zeros(k, v), q, k, v, a, b, g)


def mlstm(q, k, v, i, f):
  q, k, v, i, f = _wide(q * q.shape[-1] ** -0.5, k, v, i, f)

  def step(state, q, k, v, i, f):
    C, n, m = state
    top = jnp.maximum(f + m, i)
    forget, write = jnp.exp(f + m - top)[..., None], jnp.exp(i - top)[..., None] * k
    C = forget[..., None] * C + jnp.einsum("bhk,bhv->bhkv", write, v)
    n = forget * n + write
    below = jnp.maximum(abs(jnp.einsum("bhk,bhk->bh", q, n)), jnp.exp(-top))
    return (C, n, top), jnp.einsum("bhk,bhkv->bhv", q, C) / below[..., None]

  return over_tokens(
    step, (_zeros(k, v), jnp.zeros_like(k[:, 0]), jnp.zeros_like(i[:, 0])), q, k, v, i, f
  )


def linear_recurrence(x, log_a):
  def step(h, x, log_a):
    h = jnp.exp(log_a) * h + x
    return h, h

  x, log_a = _wide(x, log_a)
  return over_tokens(step, jnp.zeros_like(x[:, 0]), x, log_a)


# --- all tokens at once ---


def linear_attention_associative(q, k, v, g=None):
  q, k, v, *gates = _wide(q * q.shape[-1] ** -0.5, k, v, g)
  writes = jnp.einsum("bthk,bthv->bthkv", k, v)
  if gates:
    decays = jnp.exp(_over_state(gates[0], writes))
    states = lax.associative_scan(
      lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (decays, writes), axis=1
    )[1]
  else:
    states = lax.associative_scan(jnp.add, writes, axis=1)
  return jnp.einsum("bthk,bthkv->bthv", q, states), states[:, -1]


def delta_rule_associative(q, k, v, beta, g=None):
  q, k, v, beta, *gates = _wide(q * q.shape[-1] ** -0.5, k, v, beta, g)
  erase = jnp.eye(k.shape[-1], dtype=k.dtype)[None, None, None] - jnp.einsum(
    "bthi,bthj,bth->bthij", k, k, beta
  )
  transitions = erase * jnp.exp(_over_columns(gates[0])) if gates else erase
  writes = jnp.einsum("bthk,bthv,bth->bthkv", k, v, beta)

  def join(x, y):
    return jnp.einsum("bthij,bthjk->bthik", y[0], x[0]), jnp.einsum(
      "bthij,bthjv->bthiv", y[0], x[1]
    ) + y[1]

  states = lax.associative_scan(join, (transitions, writes), axis=1)[1]
  return jnp.einsum("bthk,bthkv->bthv", q, states), states[:, -1]


def linear_recurrence_associative(x, log_a):
  x, log_a = _wide(x, log_a)
  join = lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1])
  h = lax.associative_scan(join, (jnp.exp(log_a), x), axis=1)[1]
  return h, h[:, -1]


def normalized(attend: Callable) -> Callable:
  """Divides the output by q . z, where z is the state of an additional value that is always 1."""

  def call(q, k, v):
    o, S = attend(q, k, jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1))
    return o[..., :-1] / (o[..., -1:] + 1e-10), (S[..., :-1], S[..., -1])

  return call


def quadratic_attention(q, k, v):
  q, k, v = _wide(q * q.shape[-1] ** -0.5, k, v)
  mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
  scores = jnp.where(mask, jnp.einsum("bthk,bshk->bhts", q, k), -jnp.inf)
  return jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), v), ()


def dot_product_attention(q, k, v):
  return jax.nn.dot_product_attention(q, k, v, is_causal=True), ()


_ADDITIVE = {
  TOKEN_SCAN: Baseline(linear_attention),
  ASSOCIATIVE_SCAN: Baseline(linear_attention_associative),
}
_CORRECTED = {TOKEN_SCAN: Baseline(delta_rule), ASSOCIATIVE_SCAN: Baseline(delta_rule_associative)}

PLAIN: dict[str, dict[str, Baseline]] = {
  "linear_attention": _ADDITIVE,
  "simple_gla": _ADDITIVE,
  "gla": _ADDITIVE,
  "normalized": {name: Baseline(normalized(plain.call)) for name, plain in _ADDITIVE.items()},
  "delta_rule": _CORRECTED,
  "gated_delta_rule": _CORRECTED,
  "kda": _CORRECTED,
  "linear_recurrence": {
    TOKEN_SCAN: Baseline(linear_recurrence),
    ASSOCIATIVE_SCAN: Baseline(linear_recurrence_associative),
  },
  "attention": {
    QUADRATIC: Baseline(quadratic_attention),
    "jax.nn.dot_product_attention": Baseline(dot_product_attention),
  },
  "rwkv6": {TOKEN_SCAN: Baseline(rwkv6)},
  "kda_bounded": {TOKEN_SCAN: Baseline(delta_rule)},
  "preconditioned": {TOKEN_SCAN: Baseline(preconditioned)},
  "momentum": {TOKEN_SCAN: Baseline(momentum)},
  "mesa": {TOKEN_SCAN: Baseline(mesa)},
  "log_linear": {TOKEN_SCAN: Baseline(log_linear)},
  "log_linear_gdn": {TOKEN_SCAN: Baseline(log_linear)},
  "mamba3": {TOKEN_SCAN: Baseline(mamba3)},
  "gdn2": {TOKEN_SCAN: Baseline(gdn2)},
  "delta_product": {TOKEN_SCAN: Baseline(delta_product)},
  "gated_oja": {TOKEN_SCAN: Baseline(gated_oja)},
  "rwkv7": {TOKEN_SCAN: Baseline(dplr)},
  "comba": {TOKEN_SCAN: Baseline(dplr)},
  "q_delta": {TOKEN_SCAN: Baseline(dplr)},
  "mlstm": {TOKEN_SCAN: Baseline(mlstm)},
}


def _wide(*arrays):
  """Casts to float32 at least, and leaves out arrays that are None."""
  return [
    x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    for x in arrays
    if x is not None
  ]


def _zeros(k, v):
  return jnp.zeros((k.shape[0], k.shape[2], k.shape[3], v.shape[3]), v.dtype)


def _decayed(S, g=None):
  return S if g is None else jnp.exp(_over_state(g, S)) * S


def _over_state(g, S):
  """Appends axes to [.. H] or [.. H K], so that it broadcasts over states [.. H K V]."""
  return g.reshape(*g.shape, *(1,) * (S.ndim - g.ndim))


def _over_columns(g):
  """Broadcasts [B T H] or [B T H K] over transitions [B T H K K]. Decays come first: by column."""
  return g[..., None, None] if g.ndim == 3 else g[..., None, :]


# --- other libraries ---


def installed(platform: str = "cpu") -> tuple[dict[str, dict[str, Baseline]], str]:
  """Returns baselines of other libraries by op and name, and a sentence about missing ones."""
  found: dict[str, dict[str, Baseline]] = {}
  missing = []
  fla = functools.partial(_fla, platform)
  for library, load in {
    "jla": _jla,
    "fla (torch)": fla,
    "transformers (torch)": _transformers,
  }.items():
    try:
      for op, call in load().items():
        found.setdefault(op, {})[library] = Baseline(call, "torch" if "torch" in library else "jax")
    except Exception as error:  # an installed package may still fail to import: fla without triton
      missing.append(f"{library} ({_first_line(error)})")
  return found, f"Not importable, so not timed: {', '.join(missing)}." if missing else ""


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0]


def _jla() -> dict[str, Callable]:
  op = importlib.import_module("jla.ops").linear_attention
  make = lambda kind: lambda q, k, v, **gates: op(kind, q, k, v, output_final_state=True, **gates)
  kinds = {"simple_gla": "simple_gla", "gla": "gla", "delta_rule": "deltanet"}
  kinds |= {"gated_delta_rule": "gated_deltanet", "kda": "kda"}
  ungated = lambda q, k, v: make("simple_gla")(q, k, v, g=jnp.zeros(k.shape[:3], k.dtype))
  return {op: make(kind) for op, kind in kinds.items()} | {"linear_attention": ungated}


def _fla(platform: str) -> dict[str, Callable]:
  """Returns the Triton kernels on a GPU, elsewhere the code in plain PyTorch."""
  if platform == "gpu":
    kernels = {
      "simple_gla": "simple_gla",
      "gla": "gla",
      "delta_rule": "delta_rule",
      "gated_delta_rule": "gated_delta_rule",
    }
    kernels |= {"kda": "kda", "linear_attention": "simple_gla"}
    load = lambda family: getattr(importlib.import_module(f"fla.ops.{family}"), f"chunk_{family}")
    return {op: _with_state(load(family)) for op, family in kernels.items()}
  of = lambda family, name: getattr(importlib.import_module(f"fla.ops.{family}.naive"), name)
  chunked_delta = of("delta_rule", "delta_rule_chunkwise")

  def delta(q, k, v, beta):
    o, state = chunked_delta(*(x.transpose(1, 2) for x in (q, k, v, beta)))
    return o.transpose(1, 2), state

  linear, gla = of("linear_attn", "naive_recurrent_linear_attn"), of("gla", "naive_recurrent_gla")
  return {
    "linear_attention": lambda q, k, v: linear(q, k, v, output_final_state=True),
    "simple_gla": _with_state(of("simple_gla", "naive_chunk_simple_gla")),
    "gla": lambda q, k, v, g: gla(q, k, v, g, output_final_state=True),
    "delta_rule": delta,
    "gated_delta_rule": _with_state(of("gated_delta_rule", "naive_chunk_gated_delta_rule")),
    "kda": _with_state(of("kda", "naive_chunk_kda")),
    "linear_recurrence": lambda x, log_a: of("hgrn", "naive_recurrent_hgrn")(
      x, log_a, output_final_state=True
    ),
  }


def _transformers() -> dict[str, Callable]:
  module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
  return {"gated_delta_rule": _with_state(module.torch_chunk_gated_delta_rule)}


def _with_state(f: Callable) -> Callable:
  return lambda q, k, v, **gates: f(q, k, v, output_final_state=True, **gates)


class TorchTimer:
  """A baseline of PyTorch. `forward` and `both` run it `times` times, and wait for the end."""

  def __init__(self, call: Callable, inputs: dict[str, jax.Array], platform: str):
    self.torch: Any = importlib.import_module("torch")
    self.call, self.cuda = call, platform == "gpu"
    self.inputs = {name: self._tensor(x) for name, x in inputs.items()}

  def _tensor(self, x: jax.Array):
    wide = np.array(x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    tensor = self.torch.from_numpy(wide).to(getattr(self.torch, str(x.dtype)))
    return (tensor.cuda() if self.cuda else tensor).requires_grad_()

  def forward(self, times: int = 1):
    with self.torch.no_grad():
      for _ in range(times):
        result = self.call(**self.inputs)
    self._wait()
    return result

  def both(self, times: int = 1) -> float:
    for _ in range(times):
      o, state = self.call(**self.inputs)
      loss = (o.float() ** 2).sum() + (state.float() ** 2).sum()
      self.torch.autograd.grad(loss, list(self.inputs.values()))
    self._wait()
    return loss.item()

  def _wait(self) -> None:
    if self.cuda:
      self.torch.cuda.synchronize()
