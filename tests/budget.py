"""The error budget: one table of relative RMS errors for all tests, and what misses it.

Outputs, states and every gradient are compared with those of `impl="recurrent"` in float64, on the
same (rounded) inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# value: outputs and states; gradient: of q, k, v, x and the initial state; gate: of GATES
BUDGET = {
  "float64": {"value": 1e-12, "gradient": 1e-11, "gate": 1e-10},
  "float32": {"value": 5e-6, "gradient": 1e-5, "gate": 5e-5},
  "bfloat16": {"value": 5e-3, "gradient": 8e-3, "gate": 2e-2},
}
GATES = (
  "g",
  "beta",
  "log_a",
  "log_forget",
  "sink",
  "erase",
  "write",
  "i",
  "f",
  "dt",
  "trapezoid",
  "beta_precond",
  "g_precond",
  "g_momentum",
  "eta",
  "level_scales",
)

# A softmax with all weight on one key does not change with its scores: dq, dk, dlog_forget and
# dsink are then 0, computed as a difference of terms of size 1. The error of a gradient smaller
# than this size is measured relative to this size.
CANCELLATION = 0.1

# With one key for all tokens, beta = 2 and no decay, every token reflects the state: the transition
# has an eigenvalue of -1. The chunked implementation computes k . k once per pair of tokens, so a
# relative error e in it enters every token with the same sign and adds up to 2 T e: 2.4e-5 for
# T = 100 and one float32 rounding (6e-8) in each of the product and the inverse. `recurrent`
# computes S^T k anew at each token, and its errors average out.
REFLECTION = 20.0  # times the budget, in float32, for rows of that kind

# The derivative by the initial m of mLSTM is <C, dC> + <n, dn> at the start less the same at the
# end: a difference of sums of K V products, each sum about 15 in size.
MAXIMUM_GRADIENT = 1.0


class Result(NamedTuple):
  """Output, final state and gradients of <cotangents, (output, state)>, as NumPy arrays."""

  o: Any
  state: Any
  gradients: dict[str, Any]

  def named(self) -> dict[str, np.ndarray]:
    """Every array by name: o, state, state.1, dq, dinitial_state, ..."""
    gradients = {f"d{name}": x for name, x in self.gradients.items()}
    return {
      name + (f".{i}" if i else ""): leaf
      for name, tree in ({"o": self.o, "state": self.state} | gradients).items()
      for i, leaf in enumerate(jax.tree.leaves(tree))
    }


def relative_rms(got, want, floor: float = 0.0) -> float:
  """RMS of got - want over RMS of want, or over `floor` if larger; zeros must be met exactly."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
  if not np.isfinite(got).all():
    return np.inf
  if not want.size:
    return 0.0
  error, size = np.sqrt(np.mean((got - want) ** 2)), max(np.sqrt(np.mean(want**2)), floor)
  if error == 0:
    return 0.0
  return float(error / size) if size else np.inf


def kind_of(name: str) -> str:
  """Column of `BUDGET` for an array of `Result.named`."""
  if name[0] != "d":
    return "value"
  return "gate" if name[1:] in GATES else "gradient"


def floor_of(case, name: str) -> float:
  if (case.op, name) == ("mlstm", "dinitial_state.2"):
    return MAXIMUM_GRADIENT
  return CANCELLATION if name in case.cancelling else 0.0


def misses(
  case, got: Result, want: Result, dtype: str, rows: Sequence[str] | None = None
) -> dict[str, list[str]]:
  """Arrays that miss the budget, per row of the batch, or in the whole batch without `rows`."""
  parts = {"batch": (slice(None), 1.0)}
  if rows is not None:
    reflected = lambda row: dtype == "float32" and row == "reflected"
    parts = {f"{n} {row}": (n, REFLECTION if reflected(row) else 1.0) for n, row in enumerate(rows)}
  found = {name: _misses_of_part(case, got, want, dtype, *part) for name, part in parts.items()}
  return {name: lines for name, lines in found.items() if lines}


def _misses_of_part(case, got, want, dtype, row: int | slice, factor: float) -> list[str]:
  lines, wanted = [], want.named()
  for name, x in got.named().items():
    part = ... if name[1:] in case.shared else row
    error = relative_rms(x[part], wanted[name][part], floor_of(case, name))
    budget = factor * BUDGET[dtype][kind_of(name)]
    if not error <= budget:
      lines.append(f"{name}: relative RMS {error:.2e}, budget {budget:.0e}")
  return lines
