"""The programs that the reports compile and model: of each family a training step, and one token of decoding."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lajax.pallas import delta_rule, linear_attention

GATES = ("none", "head", "channel")
WIDTHS, DTYPES = (64, 128, 256), ("bfloat16", "float32")
KERNELS = {  # of each family, in the order of their launches
  "linear_attention": ("carry_states", "read_outputs", "carry_cotangents", "read_dv", "pairs_dq_dk_dg", "decode"),
}
f32 = jnp.float32


class Shape(NamedTuple):
  """Batch, tokens, heads, and K = V."""

  B: int = 4
  T: int = 4096
  H: int = 8
  D: int = 128


class Case(NamedTuple):
  """What is compiled: a family with one kind of gate, at one width and dtype."""

  family: str
  gate: str
  D: int
  dtype: str


class Program(NamedTuple):
  """A function, the shapes it is called with, and which of them it may write into."""

  call: Callable
  args: tuple
  donated: tuple[int, ...] = ()


def programs(
  family: str, gate: str, shape: Shape, dtype: str, array: Callable = jax.ShapeDtypeStruct
) -> dict[str, Program]:
  """`forward`, `train` (forward and all gradients) and `decode` of a family; `array(shape, dtype)` makes an argument."""
  B, T, H, D = shape
  gates = {"none": None, "head": (H,), "channel": (H, D)}[gate]
  q, token = array((B, T, H, D), dtype), array((B, H, D), dtype)
  state = array((B, H, D, D), f32)
  g, g_token = (None, None) if gates is None else (array((B, T, *gates), f32), array((B, *gates), f32))
  beta, beta_token = ([array((B, T, H), dtype)], [array((B, H), dtype)]) if family == "delta_rule" else ([], [])
  module: Any = {"linear_attention": linear_attention, "delta_rule": delta_rule}[family]
  call = {"linear_attention": linear_attention.linear_attention, "delta_rule": delta_rule.delta_rule}[family]
  args = (q, q, q, *beta, g, state)
  return {
    "forward": Program(call, args),
    "train": Program(_train(call, len(args)), (*args, q, state)),
    "decode": Program(module.decode, (state, token, token, token, *beta_token, g_token), (0,)),
  }


def _train(call: Callable, count: int) -> Callable:
  def train(*args):
    out, pull = jax.vjp(call, *args[:count])
    return out, pull(args[count:])

  return train


def cases() -> Iterator[Case]:
  """All that the report compiles."""
  axes = itertools.product(KERNELS, GATES, WIDTHS, DTYPES)
  return (Case(*axis) for axis in axes)
