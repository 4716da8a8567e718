"""Helpers of the kernel tests: the kernels of an op, interpreted, against `recurrent` in float64,
by the cases' budget.
"""

import functools
from collections.abc import Callable, Sequence

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Case, Shape

import lajax
from lajax.pallas.model import kernel_names


def kernels(case: Case) -> Callable:
  return functools.partial(getattr(lajax, case.op), impl="pallas", **dict(case.options))


def gradients(f: Callable, arrays, segment_ids, cts):
  out, pull = jax.vjp(lambda arrays: f(**arrays, segment_ids=segment_ids), arrays)
  return out, pull(jax.tree.map(lambda ct, x: ct.astype(x.dtype), cts, out))[0]


@functools.cache
def compiled(case: Case) -> Callable:
  return cases.quick_jit(functools.partial(gradients, kernels(case)))


def rounded(case: Case, arrays, dtype: str):
  """Returns arrays and cotangents as kernels of that dtype get them."""
  cts = cases.cotangents(case, arrays)
  cast = lambda name, x: jax.tree.map(functools.partial(cases.rounded, name, dtype=dtype), x)
  given = {name: cast(name, x) for name, x in arrays.items()}
  return given, (cast("o", cts[0]), cast("initial_state", cts[1]))


def misses(case_id: str, shape: Shape, dtype: str, packed: bool, rows: Sequence[str], **replaced):
  """Returns what misses the budget, and gradients of gates that are not 0 at tokens that forget
  everything.

  `replaced` are arrays in the place of the case's.
  """
  case = CASES[case_id]
  arrays = cases.inputs(case_id, shape, rows) | replaced
  ids = cases.packed_ids(shape.T)[: len(rows)] if packed else None
  given, cts = rounded(case, arrays, dtype)
  out, found = jax.device_get(compiled(case)(given, ids, cts))
  want = cases.reference(case, arrays, ids, values=dtype)
  missed = cases.misses(case, cases.Result(*out, found), want, dtype, rows)
  return missed | not_zero(arrays, found)


def not_zero(arrays, gradients) -> dict[str, float]:
  """Returns the largest gradient of a log decay where exp(log decay) is 0, if it is not exactly 0.

  Relative RMS cannot see it. A caller's chain rule multiplies it by the log decay: -1e4, or -inf.
  """
  found = {}
  for name in {"g", "log_a"} & set(arrays):
    forgotten = np.exp(np.float32(arrays[name])) == 0
    largest = np.abs(np.float32(gradients[name]))[forgotten].max(initial=0.0)
    if largest != 0:  # NaN too
      found[f"d{name} at forgotten tokens"] = largest
  return found


def misses_of_float16(case_id: str, shape: Shape):
  """Returns what misses the budget of bfloat16, which has fewer digits; also with a state that
  float16 cannot hold.
  """
  case = CASES[case_id]
  wide = lambda name: name in ("g", "initial_state")
  half = lambda x: x.astype(np.float16).astype(np.float64)
  arrays = {name: x if wide(name) else half(x) for name, x in cases.inputs(case_id, shape).items()}
  given, cts = rounded(case, arrays, "float32")
  given = {name: x if wide(name) else x.astype(np.float16) for name, x in given.items()}
  out, found = jax.device_get(compiled(case)(given, None, cts))
  want = cases.reference(case, arrays)
  assert out[0].dtype == found["q"].dtype == np.float16
  found = cases.misses(case, cases.Result(*out, found), want, "bfloat16")
  large = {"initial_state": 1e6 * arrays["initial_state"], "g": np.zeros_like(arrays["g"])}
  (_, state), _ = compiled(case)(
    given | {name: x.astype(np.float32) for name, x in large.items()}, None, cts
  )
  want = cases.reference(case, arrays | large)
  error = cases.relative_rms(state, want.state)
  return found if error < cases.BUDGET["bfloat16"]["value"] else found | {"large state": error}


def change_by_vmap_and_checkpoint(case_id: str, shape: Shape) -> float:
  """Returns the relative change of all results under `vmap` over an axis in front of a
  `checkpoint`.
  """
  case = CASES[case_id]
  ids = cases.packed_ids(shape.T)
  given, cts = rounded(case, cases.inputs(case_id, shape), "float32")
  whole = compiled(case)(given, ids, cts)
  part = lambda x: x.reshape(2, -1, *x.shape[1:])
  again = jax.vmap(functools.partial(gradients, jax.checkpoint(kernels(case))))
  got = cases.quick_jit(again)(*jax.tree.map(part, (given, ids, cts)))
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True)
  return max(cases.relative_rms(x.reshape(want.shape), want) for x, want in pairs)


def launches_of(case_id: str, shape: Shape) -> tuple[list[str], list[str]]:
  """Returns the launches of the forward pass, and of forward and backward."""
  case = CASES[case_id]
  given, cts = rounded(case, cases.inputs(case_id, shape), "float32")
  both = functools.partial(gradients, kernels(case))
  return kernel_names(functools.partial(kernels(case), **given)), kernel_names(
    both, given, None, cts
  )


def residuals(f: Callable, *args) -> int:
  """Returns how many numbers are kept between forward and backward."""
  kept = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
  return sum(x.size for x in jax.tree.leaves(kept))


def refuses_second_derivatives(f: Callable) -> None:
  """Asserts that the second derivative of f(x), with x [1 4 1 5], raises a readable error."""
  x = jnp.ones((1, 4, 1, 5))
  first = jax.grad(lambda x: f(x).sum())
  with pytest.raises(NotImplementedError, match=r"first derivatives only.*impl='recurrent'"):
    jax.grad(lambda x: first(x).sum())(x)
