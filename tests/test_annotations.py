"""Annotations hold at run time: those of every op, and of all functions that the ops call."""

import inspect
import pathlib
import subprocess
import sys

import beartype
import cases
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from cases import CASES, Shape

import lajax

SEVERAL_HALVES = Shape(T=33, H=2, HV=4, K=4, V=3)  # a chunk of several blocks


def takes_tokens(name: str) -> bool:
  f = getattr(lajax, name)
  return inspect.isfunction(f) and next(iter(inspect.signature(f).parameters)) in ("q", "x")


@pytest.mark.parametrize("case_id", CASES)
def test_annotations_hold(case_id):
  """Every gate and implementation of every op; an axis of another size is noticed."""
  case = CASES[case_id]
  op = jaxtyping.jaxtyped(typechecker=beartype.beartype)(getattr(lajax, case.op))
  arguments = cases.arguments(case_id)
  for impl in ("auto", *case.impls):
    jax.eval_shape(lambda impl=impl: op(**arguments, impl=impl))
  wrong = arguments | {"segment_ids": jnp.zeros((2, 6), jnp.int32)}
  with pytest.raises(jaxtyping.TypeCheckError):
    jax.eval_shape(lambda: op(**wrong))


@pytest.mark.parametrize("op", [name for name in lajax.__all__ if takes_tokens(name)])
def test_well_formed_arguments_are_accepted(op):
  jax.eval_shape(lambda: getattr(lajax, op)(**cases.well_formed(op)))


def trace_everything():
  """Traces every case with gradients: chunked with documents, the core cases in every way."""
  for case_id, case in CASES.items():
    arguments = cases.arguments(case_id, SEVERAL_HALVES, ("plain",))
    arrays = {name: x for name, x in arguments.items() if name not in dict(case.options)}
    ids = arrays.pop("segment_ids")
    cts = jax.tree.map(jnp.float32, cases.cotangents(case, arrays))
    core = case_id in cases.CORE
    for impl in case.impls if core else ("chunked",):
      jax.eval_shape(cases.compiled(case, impl), arrays, ids, cts)
    if core:
      jax.eval_shape(cases.compiled(case, "chunked"), arrays, None, cts)


@pytest.mark.slow
def test_annotations_of_the_whole_package_hold():
  """Inner functions are checked too, by jaxtyping's import hook, in a process of their own."""
  program = """
import jaxtyping
with jaxtyping.install_import_hook("lajax", "beartype.beartype"):
  import lajax, lajax.layers, lajax.recurrence
import test_annotations
test_annotations.trace_everything()
print("done")
"""
  run = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False,
    cwd=pathlib.Path(__file__).parent,
  )  # fmt: skip
  assert run.stdout.strip() == "done", run.stderr
