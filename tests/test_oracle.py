"""Every op against files of an independent float64 implementation: outputs, states and all gradients.

`tests/oracle/ops/` holds the files; their keys are in_* (inputs), aux_* (document boundaries), attr_* (constants), out_*
(outputs and final states), ct_* (cotangents) and grad_* (gradients of <ct, out> with respect to in_*). A file's method is a
way to call one of the ops: `ADAPTERS` says which, and has one row a method. A packed file holds one initial state per document, so
each of its documents is run by itself.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

ROWS, T, V = 4, 100, 12  # every file is padded to these, so that the files of one op share a compiled function
GATES = ("g", "f", "beta", "dt", "dt_bias", "A_log", "sink")


@dataclasses.dataclass(frozen=True)
class Adapter:
  """A method as a call of an op: its arguments from the file's inputs, and its output from the op's."""

  case: str
  arguments: Callable = lambda x, attr: x
  output: Callable = lambda x, o: o


def _rename(**names):
  return lambda x, attr: {names.get(name, name): a for name, a in x.items()}


def _constant_decay(x, attr):
  return x | {"g": jnp.broadcast_to(jnp.asarray(attr["g_gamma"]), x["v"].shape[:3])}


def _hgrn2(x, attr):
  g = jnp.log(attr["lower_bound"] + (1 - attr["lower_bound"]) * jax.nn.sigmoid(x["f"]))
  return {"q": x["q"], "k": 1 - jnp.exp(g), "v": x["v"], "g": g}


def _mamba2(x, attr):
  """One group of B and C for all heads; the scale of this method is 1, not K^-1/2."""
  dt = jax.nn.softplus(x["dt"] + x["dt_bias"])
  q = x["Cm"] * x["Cm"].shape[-1] ** 0.5
  return {
    "q": q[:, :, None],
    "k": x["Bm"][:, :, None],
    "v": x["x"] * dt[..., None],
    "g": -jnp.exp(x["A_log"]) * dt,
  }


def _mamba1(x, attr):
  dt = jax.nn.softplus(x["dt"])[..., None]
  return {"x": dt * x["Bm"][:, :, None] * x["x"][..., None], "log_a": -jnp.exp(x["A_log"]) * dt}


ADAPTERS = {
  "linear_attn": Adapter("linear_attention-none"),
  "linear_attn_normalized": Adapter("normalized_linear_attention-none"),
  "retention": Adapter("linear_attention-head", _constant_decay),
  "lightning_attn": Adapter("linear_attention-head", _constant_decay),
  "simple_gla": Adapter("linear_attention-head"),
  "mamba2_ssd": Adapter("linear_attention-head", _mamba2, lambda x, o: o + x["D"][:, None] * x["x"]),
  "gla": Adapter("linear_attention-channel"),
  "hgrn2": Adapter("linear_attention-channel", _hgrn2),
  "hgrn": Adapter("linear_recurrence-vector", _rename(g="log_a")),
  "mamba1": Adapter(
    "linear_recurrence-matrix", _mamba1, lambda x, h: (h * x["Cm"][:, :, None]).sum(-1) + x["D"] * x["x"]
  ),
  "delta_rule": Adapter("delta_rule-none"),
  "gated_delta_rule": Adapter("delta_rule-head"),
  "kda": Adapter("delta_rule-channel"),
  "kda_gva": Adapter("delta_rule-channel"),
  "softmax_attn_gqa": Adapter("attention-none"),
  "softmax_attn_gqa_window_sink": Adapter("attention-window_sink"),
  "forgetting_attn": Adapter("attention-forget", _rename(g="log_forget")),
}
FOLDER = pathlib.Path(__file__).parent / "oracle" / "ops"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.npz")) if path.stem.split("__")[0] in ADAPTERS}
STATES = {"h0": "ht", "z0": "zt"}


def test_no_file_is_missing():
  assert {name.split("__")[0] for name in FILES} == set(ADAPTERS)
  assert len(FILES) == 67


@functools.cache
def load(name: str) -> dict[str, dict[str, np.ndarray]]:
  """The file's arrays by the part of the key before the first underscore."""
  parts = {part: {} for part in ("in", "aux", "attr", "out", "ct", "grad")}
  with np.load(FILES[name]) as file:
    for key in file:
      part, rest = key.split("_", 1)
      x = file[key]
      parts[part][rest] = x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x
  return parts


def spans(file, batch: int, length: int) -> list[tuple[int, slice]]:
  """Where each sequence stands: (entry of the batch, its tokens)."""
  if "cu_seqlens" not in file["aux"]:
    return [(b, slice(0, length)) for b in range(batch)]
  ends = file["aux"]["cu_seqlens"]
  return [(0, slice(a, b)) for a, b in itertools.pairwise(ends)]


def pad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  return np.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


@dataclasses.dataclass
class Layout:
  """Cuts arrays [B T ..] into sequences, padded to one shape (or left as they are), and puts gradients back."""

  where: list[tuple[int, slice]]
  padded: bool

  def rows(self, x: np.ndarray, last: int | None = None) -> np.ndarray:
    """`last`: what the last axis is padded to."""
    if not self.padded:
      return x
    shape = (T, *x.shape[2:-1], last or x.shape[-1])
    out = [pad(x[b, span], shape) for b, span in self.where]
    return np.stack(out + [np.zeros(shape)] * (ROWS - len(out)))

  def state_rows(self, x: np.ndarray, last: int | None = None) -> np.ndarray:
    return pad(x, (ROWS, *x.shape[1:-1], last or x.shape[-1])) if self.padded else x

  def back(self, rows: np.ndarray, like: np.ndarray) -> np.ndarray:
    if not self.padded:
      return rows
    out = np.zeros(like.shape)
    for row, (b, span) in zip(rows, self.where, strict=False):
      out[b, span] = row[: span.stop - span.start, ..., : like.shape[-1]]
    return out

  def ids(self) -> np.ndarray | None:
    lengths = [span.stop - span.start for _, span in self.where]
    ids = [np.where(np.arange(T) < n, 0, -1) for n in lengths + [0] * (ROWS - len(lengths))]
    return np.stack(ids) if self.padded else None


def run(name: str, impl: str, dtype: str, padded: bool) -> dict[str, np.ndarray]:
  """Everything that the file stores, computed by lajax, under "out ..." and "grad ..."."""
  file, adapter = load(name), ADAPTERS[name.split("__")[0]]
  case = CASES[adapter.case]
  values = {k: x for k, x in file["in"].items() if k not in STATES}
  states = [k for k in STATES if STATES[k] in file["out"]]
  with jax.enable_x64(True):
    arguments, pull_arguments = jax.vjp(lambda x: adapter.arguments(x, file["attr"]), values)
    o_shape = case.output(arguments)
    _, pull_output = jax.vjp(adapter.output, values, np.zeros(o_shape))
    arguments, (_, o_ct) = jax.device_get((arguments, pull_output(file["ct"]["o"])))

  timed = {k: x for k, x in arguments.items() if k not in case.shared}
  layout = Layout(spans(file, *next(iter(timed.values())).shape[:2]), padded)
  wide = V if len(o_shape) == 4 else None  # the last axis of values, outputs and states, where there is one beside K
  widths = dict.fromkeys(("v", "x", "log_a", "h0"), wide)
  rows = {k: layout.rows(x, widths.get(k)) for k, x in timed.items()}
  state_rows = lambda x, k: layout.state_rows(x, widths.get(k))
  one = lambda leaves: leaves[0] if len(leaves) == 1 else tuple(leaves)
  state_cts = one([state_rows(file["ct"][STATES[k]], k) for k in states])
  if states:
    rows["initial_state"] = one(
      [state_rows(file["in"].get(k, np.zeros_like(file["out"][STATES[k]])), k) for k in states]
    )
  shared = {k: x for k, x in arguments.items() if k in case.shared}
  cts = layout.rows(o_ct, wide), state_cts
  got = cases.evaluate(case, impl, dtype, rows | shared, layout.ids(), cts, optimize=not padded)

  wide64 = lambda x: np.asarray(x, np.float64)
  gradients = {k: layout.back(wide64(got.gradients[k]), x) for k, x in timed.items()}
  gradients |= {k: wide64(got.gradients[k]) for k in shared}
  with jax.enable_x64(True):
    o, pull_output = jax.vjp(adapter.output, values, layout.back(wide64(got.o), np.zeros(o_shape)))
    (through,), (direct, _) = jax.device_get((pull_arguments(gradients), pull_output(file["ct"]["o"])))
  found = {"out o": np.asarray(o)} | {f"grad {k}": through[k] + direct[k] for k in values}
  for n, k in enumerate(states):
    stored = file["out"][STATES[k]]
    trim = lambda leaves, n=n, stored=stored: wide64(jax.tree.leaves(leaves)[n])[tuple(map(slice, stored.shape))]
    found[f"out {STATES[k]}"] = trim(got.state)
    if k in file["in"]:
      found[f"grad {k}"] = trim(got.gradients["initial_state"])
  return found


def check(name: str, impl: str, dtype: str, padded: bool):
  file, case = load(name), CASES[ADAPTERS[name.split("__")[0]].case]
  found = run(name, impl, dtype, padded)
  wanted = {f"out {k}": x for k, x in file["out"].items()} | {f"grad {k}": x for k, x in file["grad"].items()}
  assert set(found) == set(wanted)
  misses = {}
  for key, want in wanted.items():
    part, k = key.split()
    kind = "value" if part == "out" else "gate" if k in GATES else "gradient"
    floor = cases.CANCELLATION if part == "grad" and case.op == "attention" and k != "v" else 0.0
    error = cases.relative_rms(found[key], want, floor)
    if not error <= cases.BUDGET[dtype][kind]:
      misses[key] = f"relative RMS {error:.2e}, budget {cases.BUDGET[dtype][kind]:.0e}"
  assert not misses


@pytest.mark.parametrize("name", FILES)
def test_recurrent_in_float64(name):
  check(name, "recurrent", "float64", padded=True)


def _long(name: str):
  """Fast: the files of several chunks, strong decays or packed documents."""
  fast = any(part in name for part in ("T64", "T70", "varlen", "gva"))
  return pytest.param(name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("name", [_long(name) for name in FILES])
def test_chunked_in_float32(name):
  check(name, "chunked", "float32", padded=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  "impl_dtype", ["chunked-float64", "associative-float64", "associative-float32", "recurrent-float32"]
)
@pytest.mark.parametrize("name", FILES)
def test_other_forms(name, impl_dtype):
  check(name, *impl_dtype.split("-"), padded=True)


@pytest.mark.slow
@pytest.mark.parametrize("impl_dtype", ["chunked-float32", "recurrent-float64"])
@pytest.mark.parametrize("name", [name for name in FILES if "varlen" not in name])
def test_as_stored(name, impl_dtype):
  """At the file's own shape, without padding."""
  check(name, *impl_dtype.split("-"), padded=False)
