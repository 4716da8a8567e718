"""Every op against files of an independent float64 implementation: outputs, states, gradients.

`tests/oracle/README.md` explains the files. A file's method is a way to call one of the ops:
`ADAPTERS` has one row per method. A packed file holds one initial state per document, so each of
its documents is run by itself.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

GATES = (
  "g",
  "gk",
  "gv",
  "w",
  "f",
  "beta",
  "erase",
  "write",
  "dt",
  "dt_bias",
  "A_log",
  "sink",
  "beta_atk",
  "g_atk",
  "log_alpha",
  "log_mu",
  "eta",
  "level_scales",
)


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A method as a call of an op.

  Args:
    case: the op with its kind of gate.
    arguments: (inputs, constants) -> arguments of the op; None: the inputs as they are.
    output: (inputs, output of the op) -> output of the method; None: the op's output.
  """

  case: str
  arguments: Callable | None = None
  output: Callable | None = None


def _rename(**names):
  return lambda x, attr: {names.get(name, name): a for name, a in x.items()}


def _constant_decay(x, attr):
  return x | {"g": jnp.broadcast_to(jnp.asarray(attr["g_gamma"]), x["v"].shape[:3])}


def _hgrn2(x, attr):
  g = jnp.log(attr["lower_bound"] + (1 - attr["lower_bound"]) * jax.nn.sigmoid(x["f"]))
  return {"q": x["q"], "k": 1 - jnp.exp(g), "v": x["v"], "g": g}


def _mamba2(x, attr):
  """One group of B and C for all heads."""
  dt = jax.nn.softplus(x["dt"] + x["dt_bias"][None, None])
  return {
    "q": x["Cm"][:, :, None],
    "k": x["Bm"][:, :, None],
    "v": x["x"] * dt[..., None],
    "g": -jnp.exp(x["A_log"])[None, None] * dt,
  }


def _mamba1(x, attr):
  dt = jax.nn.softplus(x["dt"])[..., None]
  log_a = -jnp.exp(x["A_log"])[None, None] * dt
  return {"x": dt * x["Bm"][:, :, None] * x["x"][..., None], "log_a": log_a}


def _comba(x, attr):
  beta = x["beta"][..., None]
  return {
    "q": x["q"],
    "k": x["k"],
    "v": beta * x["v"],
    "a": x["p"],
    "b": -beta * x["k"],
    "g": x["g"],
  }


def _in_steps(x, attr):
  """A file has the R corrections of a token as consecutive rows."""
  R = x["beta"].shape[1] // x["q"].shape[1]
  return x | {
    name: x[name].reshape(x[name].shape[0], -1, R, *x[name].shape[2:])
    for name in ("k", "v", "beta")
  }


_PRECONDITIONED = _rename(beta_atk="beta_precond", g_atk="g_precond")


def _preconditioned_gdn(x, attr):
  """The file's method brings q and k to unit length itself."""
  unit = {n: x[n] / jnp.sqrt((x[n] ** 2).sum(-1, keepdims=True)) for n in "qk"}
  return _PRECONDITIONED(x, attr) | unit


ADAPTERS = {
  "linear_attn": Adapter("linear_attention-none"),
  "linear_attn_normalized": Adapter("normalized_linear_attention-none"),
  "retention": Adapter("linear_attention-head", _constant_decay),
  "lightning_attn": Adapter("linear_attention-head", _constant_decay),
  "simple_gla": Adapter("linear_attention-head"),
  "mamba2_ssd": Adapter(
    "linear_attention-head", _mamba2, lambda x, o: o + x["D"][None, None, :, None] * x["x"]
  ),
  "gla": Adapter("linear_attention-channel"),
  "hgrn2": Adapter("linear_attention-channel", _hgrn2),
  "hgrn": Adapter("linear_recurrence-vector", _rename(g="log_a")),
  "mamba1": Adapter(
    "linear_recurrence-matrix",
    _mamba1,
    lambda x, h: (h * x["Cm"][:, :, None]).sum(-1) + x["D"][None, None] * x["x"],
  ),
  "delta_rule": Adapter("delta_rule-none"),
  "gated_delta_rule": Adapter("delta_rule-head"),
  "kda": Adapter("delta_rule-channel"),
  "kda_gva": Adapter("delta_rule-channel"),
  "gdn2": Adapter("delta_rule-erase_write"),
  "precond_gated_delta_rule": Adapter("preconditioned_delta_rule-head", _preconditioned_gdn),
  "precond_kda": Adapter("preconditioned_delta_rule-channel", _PRECONDITIONED),
  "momentum_delta_rule": Adapter(
    "momentum_delta_rule-head", _rename(log_alpha="g", log_mu="g_momentum")
  ),
  "mesa_net": Adapter("mesa-head", _rename(lamb="ridge")),
  "log_linear_attn": Adapter("log_linear_attention-head"),
  "delta_product_nogate": Adapter("delta_product-none", _in_steps),
  "gated_delta_product": Adapter("delta_product-head", _in_steps),
  "gated_oja_rule": Adapter("gated_oja-channel", _rename(gv="g")),
  "iplr": Adapter("dplr-none"),
  "dplr": Adapter("dplr-channel", _rename(gk="g")),
  "rwkv7": Adapter("dplr-channel", _rename(r="q", w="g")),
  "comba": Adapter("dplr-head", _comba),
  "rwkv6": Adapter("linear_attention-bonus", _rename(r="q", w="g", u="bonus")),
  "softmax_attn_gqa": Adapter("attention-none"),
  "softmax_attn_gqa_window_sink": Adapter("attention-window_sink"),
  "forgetting_attn": Adapter("attention-forget", _rename(g="log_forget")),
}
FOLDER = pathlib.Path(__file__).parent / "oracle" / "ops"


def method_of(name: str) -> str:
  return name.split("__")[0]


FILES = {
  path.stem: path for path in sorted(FOLDER.glob("*.npz")) if method_of(path.stem) in ADAPTERS
}
STATES = {  # of a file, in the order of a state's parts
  "h0": "ht",
  "z0": "zt",
  "h0_S": "ht_S",
  "h0_A": "ht_A",
  "h0_M": "ht_M",
  "h0_kk": "ht_kk",
  "h0_kv": "ht_kv",
}


def test_no_file_is_missing():
  """Two files per method at least, but for two methods whose packed form is another method's."""
  counts = collections.Counter(map(method_of, FILES))
  assert set(counts) == set(ADAPTERS)
  assert {name for name, n in counts.items() if n < 2} == {"kda_gva", "delta_product_nogate"}


@functools.cache
def load(name: str) -> dict[str, dict[str, np.ndarray]]:
  """Arrays of a file by the part of the key before the first underscore."""
  parts = {part: {} for part in ("in", "aux", "attr", "out", "ct", "grad")}
  with np.load(FILES[name]) as file:
    for key in file:
      part, rest = key.split("_", 1)
      x = file[key]
      parts[part][rest] = x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x
  return parts


class Piece(NamedTuple):
  """One sequence and, if the op has heads, one head of its keys with the value heads it serves."""

  sequence: int
  entry: int  # of the batch
  tokens: slice
  head: int


def pieces(file, timed: dict[str, np.ndarray]) -> list[Piece]:
  batch, length = next(iter(timed.values())).shape[:2]
  ends = file["aux"].get("cu_seqlens")
  where = [(b, slice(0, length)) for b in range(batch)]
  if ends is not None:
    where = [(0, slice(a, b)) for a, b in itertools.pairwise(ends)]
  heads = timed["k"].shape[2] if "k" in timed else 1
  return [Piece(n, b, tokens, h) for n, (b, tokens) in enumerate(where) for h in range(heads)]


def heads_of(x: np.ndarray, axis: int, piece: Piece, heads: int | None) -> tuple[slice, ...]:
  """Index of a piece's own heads at an axis; empty for an op without heads."""
  if heads is None:
    return ()
  own = x.shape[axis] // heads
  return (*(slice(None),) * axis, slice(piece.head * own, (piece.head + 1) * own))


class Stacked:
  """A file's arrays as rows of the base shape of `cases`, to share its compiled functions.

  A row is a `Piece`, with padding (zeros, id -1) after its tokens. `put_*` is the way back.
  """

  def __init__(self, case, rows: list[Piece], heads: int | None):
    self.rows, self.heads = rows, heads
    self.base = cases.inputs(case.id)
    self.ids = np.full((cases.BATCH, cases.Shape().T), -1)
    for row, piece in zip(self.ids, rows, strict=False):
      row[: piece.tokens.stop - piece.tokens.start] = 0

  def stack(self, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros((cases.BATCH, *shape))
    for row, part in zip(out, parts, strict=False):
      row[tuple(map(slice, part.shape))] = part
    return out

  def timed(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    cut = [x[p.entry, p.tokens] for p in self.rows]
    return self.stack(
      [c[heads_of(c, 1, p, self.heads)] for c, p in zip(cut, self.rows, strict=True)], shape
    )

  def state(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    cut = [x[p.sequence] for p in self.rows]
    return self.stack(
      [c[heads_of(c, 0, p, self.heads)] for c, p in zip(cut, self.rows, strict=True)], shape
    )

  @staticmethod
  def shared(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(x, [(0, size - own) for size, own in zip(shape, x.shape, strict=True)])

  def put_timed(self, out: np.ndarray, rows: np.ndarray):
    for p, row in zip(self.rows, rows, strict=False):
      view = out[p.entry, p.tokens]
      view = view[heads_of(view, 1, p, self.heads)]
      view[...] = row[tuple(map(slice, view.shape))]

  def put_state(self, out: np.ndarray, rows: np.ndarray):
    for p, row in zip(self.rows, rows, strict=False):
      view = out[p.sequence]
      view = view[heads_of(view, 0, p, self.heads)]
      view[...] = row[tuple(map(slice, view.shape))]


class AsStored:
  """A file's arrays at their own shape, without padding."""

  ids = None
  timed = state = shared = staticmethod(lambda x, shape: x)

  @staticmethod
  def put_timed(out, rows):
    out[...] = rows

  put_state = put_timed


@functools.cache
def jitted(f: Callable) -> tuple[Callable, Callable]:
  """f of (x, fixed), and its vjp by x alone, of (x, fixed, ct): shared by all files of a method."""
  jit = cases.quick_jit
  call = lambda x, fixed: f(*x, *fixed)
  return jit(call), jit(lambda x, fixed, ct: jax.vjp(lambda x: call(x, fixed), x)[1](ct)[0])


def vjp(f: Callable | None, *x, fixed=()):
  """jax.vjp in float64, jitted, as eagerly every primitive is compiled by itself.

  Without f, the last argument is returned.
  """
  if f is None:
    return x[-1], lambda ct: (*jax.tree.map(np.zeros_like, x[:-1]), ct)
  forward, backward = jitted(f)

  def pull(ct):
    with jax.enable_x64(True):
      return jax.device_get(backward(x, fixed, ct))

  with jax.enable_x64(True):
    return jax.device_get(forward(x, fixed)), pull


def run(name: str, impl: str, dtype: str, stacked: bool) -> dict[str, np.ndarray]:
  """Everything that the file stores, computed by lajax, by name: "out ...", "grad ..."."""
  file, adapter = load(name), ADAPTERS[method_of(name)]
  case = CASES[adapter.case]
  values = {k: x for k, x in file["in"].items() if k not in STATES}
  states = [k for k in STATES if STATES[k] in file["out"]]
  # Its keys have another axis before the heads; a ridge of 0 for further channels is none.
  stacked = stacked and case.op not in ("delta_product", "mesa")

  constants = {k: x for k, x in file["attr"].items() if x.dtype.kind == "f"}
  arguments, pull_arguments = vjp(adapter.arguments, values, fixed=(constants,))
  if "q" in arguments:  # the op multiplies by width^-1/2; the method has a scale of its own
    width = cases.Shape().K if stacked else arguments["q"].shape[-1]
    factor = file["attr"].get("scale", 1.0) * width**0.5
    arguments = arguments | {"q": arguments["q"] * factor}
  o = np.zeros(case.output(arguments))
  o_ct = vjp(adapter.output, values, o)[1](file["ct"]["o"])[1]

  timed = {k: x for k, x in arguments.items() if k not in case.shared}
  shared = {k: x for k, x in arguments.items() if k in case.shared}
  heads = timed["k"].shape[2] if "k" in timed else None
  all_pieces = pieces(file, timed)
  groups = [all_pieces]
  if shared and stacked:  # a shared argument belongs to its heads: one call for each
    groups = [[p for p in all_pieces if p.head == h] for h in range(heads)]
  gradients = {k: np.zeros(x.shape) for k, x in arguments.items()}
  out_states = [np.zeros(file["out"][STATES[k]].shape) for k in states]
  state_gradients = [np.zeros(x.shape) for x in out_states]
  one = lambda leaves: leaves[0] if len(leaves) == 1 else tuple(leaves)

  for group in groups:
    layout = Stacked(case, group, heads) if stacked else AsStored()
    base = cases.inputs(case.id)
    shape = lambda x: x.shape[1:]
    rows = {k: layout.timed(x, shape(base[k])) for k, x in timed.items()}
    own = {k: heads_of(x, 0, group[0], heads) if stacked else ... for k, x in shared.items()}
    rows |= {k: layout.shared(x[own[k]], base[k].shape) for k, x in shared.items()}
    state_cts = ()
    if case.stateful and not states:  # the file says nothing about states
      state_cts = rows["initial_state"] = jax.tree.map(np.zeros_like, base["initial_state"])
    if states:
      like = [shape(x) for x in jax.tree.leaves(base["initial_state"])]
      first = [
        file["in"].get(k, np.zeros_like(out)) for k, out in zip(states, out_states, strict=True)
      ]
      rows["initial_state"] = one([layout.state(x, s) for x, s in zip(first, like, strict=True)])
      state_cts = one(
        [layout.state(file["ct"][STATES[k]], s) for k, s in zip(states, like, strict=True)]
      )
    cts = layout.timed(o_ct, case.output(base)[1:]), state_cts
    got = cases.evaluate(case, impl, dtype, rows, layout.ids, cts)
    layout.put_timed(o, got.o)
    for k in timed:
      layout.put_timed(gradients[k], got.gradients[k])
    for k in shared:
      view = gradients[k][own[k]]
      view[...] = got.gradients[k][tuple(map(slice, view.shape))]
    for n in range(len(states)):
      layout.put_state(out_states[n], jax.tree.leaves(got.state)[n])
      layout.put_state(state_gradients[n], jax.tree.leaves(got.gradients["initial_state"])[n])

  if "q" in gradients:
    gradients["q"] *= factor
  y, pull_output = vjp(adapter.output, values, o)
  (through,), (direct, _) = pull_arguments(gradients), pull_output(file["ct"]["o"])
  found = {"out o": y} | {f"grad {k}": through[k] + direct[k] for k in values}
  found |= {f"out {STATES[k]}": x for k, x in zip(states, out_states, strict=True)}
  if "g" in gradients and "A_log" in values:
    found["size A_log"] = np.sqrt(
      np.mean(np.sum((arguments["g"] * gradients["g"]) ** 2, axis=(0, 1)))
    )
  return found | {
    f"grad {k}": x for k, x in zip(states, state_gradients, strict=True) if k in file["in"]
  }


def check(name: str, impl: str, dtype: str, stacked: bool):
  file, case = load(name), CASES[ADAPTERS[method_of(name)].case]
  found = run(name, impl, dtype, stacked)
  wanted = {f"out {k}": x for k, x in file["out"].items()} | {
    f"grad {k}": x for k, x in file["grad"].items()
  }
  # A_log serves all tokens: its gradient is a sum of terms g dg that may cancel (mamba2_ssd__T17:
  # of 18 and 36 to 0.11 and 1.3). Its error is measured relative to the root of their sum of
  # squares, which is what the budget of dg allows if the errors of the terms are independent.
  floors = {f"grad {key.split()[1]}": found.pop(key) for key in [*found] if key.startswith("size")}
  assert set(found) == set(wanted)
  misses = {}
  for key, want in wanted.items():
    part, k = key.split()
    kind = "value" if part == "out" else "gate" if k in GATES else "gradient"
    floor = (
      cases.CANCELLATION
      if part == "grad" and case.op == "attention" and k != "v"
      else floors.get(key, 0.0)
    )
    error = cases.relative_rms(found[key], want, floor)
    if not error <= cases.BUDGET[dtype][kind]:
      misses[key] = f"relative RMS {error:.2e}, budget {cases.BUDGET[dtype][kind]:.0e}"
  assert not misses


@pytest.mark.parametrize("name", FILES)
def test_recurrent_in_float64(name):
  check(name, "recurrent", "float64", stacked=True)


def _families_first(name: str):
  fast = ADAPTERS[method_of(name)].case in cases.FAMILIES
  return pytest.param(name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("name", [*map(_families_first, FILES)])
def test_chunked_in_float32(name):
  check(name, "chunked", "float32", stacked=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hgrn", "gla", "kda", "comba", "gated_delta_product"])
def test_kernels_in_float32(method):
  """Interpreted, strong decays; one method per kernel."""
  check(f"{method}__T70_extreme", "pallas", "float32", stacked=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hgrn", "gla", "kda"])
def test_as_stored(method):
  """At the file's own shape, without padding."""
  check(f"{method}__T70_extreme", "chunked", "float32", stacked=False)
