"""Programs that the report compiles and models: a training step of each family, and one token of
decoding.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lajax.pallas import delta_rule_backward, delta_rule_forward, dplr_backward, dplr_forward
from lajax.pallas.attention import attention
from lajax.pallas.delta_rule import decode as decode_delta_rule
from lajax.pallas.delta_rule import delta_rule
from lajax.pallas.delta_rule import supports as supports_delta_rule
from lajax.pallas.dplr import decode as decode_dplr
from lajax.pallas.dplr import dplr
from lajax.pallas.dplr import plans as dplr_plans
from lajax.pallas.dplr import supports as supports_dplr
from lajax.pallas.linear_attention import decode as decode_linear_attention
from lajax.pallas.linear_attention import linear_attention, needs_scores_launch, scan_chunks
from lajax.pallas.linear_recurrence import linear_recurrence
from lajax.pallas.norm import gated_rms_norm
from lajax.pallas.plan import LEAST, plan
from lajax.pallas.short_conv import short_conv

GATES = ("none", "head", "channel", "bounded")  # bounded: per channel, no log decay below -5
WIDTHS, DTYPES = (64, 128, 256), ("bfloat16", "float32")
KERNELS = {  # kernels of each family, in the order of their launches
  "linear_attention": (
    "linear_scores", "linear_summaries", "linear_outputs", "linear_outputs_in_splits",
    "linear_summaries_back", "linear_cotangents", "linear_cotangents_in_splits",
    "linear_key_gradients", "linear_decode",
  ),
  "delta_rule": (
    "delta_solve", "delta_summaries", "delta_outputs", "delta_outputs_in_splits", "delta_states",
    "delta_states_in_splits", "delta_reads", "delta_recompute", "delta_summaries_back",
    "delta_cotangents", "delta_cotangents_in_splits", "delta_scores", "delta_key_gradients",
    "delta_decode",
  ),
  "dplr": (
    "dplr_solve", "dplr_summaries", "dplr_outputs", "dplr_outputs_in_splits", "dplr_states",
    "dplr_states_in_splits", "dplr_reads", "dplr_recompute", "dplr_summaries_back",
    "dplr_cotangents", "dplr_cotangents_in_splits", "dplr_scores", "dplr_key_gradients",
    "dplr_decode",
  ),
  "attention": ("attention_forward", "attention_queries", "attention_keys"),
  "linear_recurrence": (
    "recurrence_summaries", "recurrence_combine", "recurrence_replay", "recurrence_reverse",
  ),
  "short_conv": ("conv_forward", "conv_backward"),
  "gated_rms_norm": ("norm_forward", "norm_backward"),
}  # fmt: skip
GATED = ("linear_attention", "delta_rule", "dplr")
BOUNDED = {  # kernels that differ where there is a declared bound
  "linear_attention": ("linear_scores", "linear_key_gradients"),
  "delta_rule": ("delta_solve", "delta_recompute", "delta_key_gradients"),
}
# Modules of the families with a triangular system.
FORWARD = {"delta_rule": delta_rule_forward, "dplr": dplr_forward}
WITHOUT_PRODUCTS = (
  "linear_decode",
  "delta_decode",
  "dplr_decode",
  *(name for family in list(KERNELS)[4:] for name in KERNELS[family]),
)
f32 = jnp.float32


class Shape(NamedTuple):
  """Batch, tokens, heads, and K = V."""

  B: int = 4
  T: int = 4096
  H: int = 8
  D: int = 128


class Case(NamedTuple):
  """Case that is compiled: a family with one kind of gate, at one width and dtype."""

  family: str
  gate: str
  D: int
  dtype: str


class Program(NamedTuple):
  """Function, the shapes it is called with, and the arguments it may write into."""

  call: Callable
  args: tuple
  donated: tuple[int, ...] = ()


def kernels(case: Case) -> tuple[str, ...]:
  """Returns the kernels of its family that a case launches; if bounded, those that differ."""
  if case.gate == "bounded":
    return BOUNDED[case.family]
  q = jax.ShapeDtypeStruct((1, 1, 1, case.D), case.dtype)
  g = {"none": None, "head": jax.ShapeDtypeStruct((1, 1, 1), f32), "channel": q}[case.gate]
  p = plan(q, q, g, False, 1.0, q.dtype)
  left_out: tuple[str, ...] = ()
  if case.family == "linear_attention" and not needs_scores_launch(p):
    left_out = ("linear_scores",)
  forward = FORWARD.get(case.family)
  if forward is not None:
    own = case.family.removesuffix("_rule")
    left_out = (f"{own}_states", f"{own}_reads") if forward.outputs_fit(p) else (f"{own}_outputs",)
  cut = forward is None or case.D <= forward.WIDE
  names = (name for name in KERNELS[case.family] if name.removesuffix("_in_splits") not in left_out)
  return tuple(
    name for name in names if cut or not ("summaries" in name or name.endswith("_in_splits"))
  )


def cases() -> Iterator[Case]:
  """Yields all cases that the report compiles: those that the kernels take."""
  for family in KERNELS:
    gates = [gate for gate in GATES if family in (BOUNDED if gate == "bounded" else GATED)]
    axes = itertools.product(gates or ["none"], WIDTHS, DTYPES)
    for case in (Case(family, *one) for one in axes):
      q = jax.ShapeDtypeStruct((1, 1, 1, case.D), case.dtype)
      refused = {"delta_rule": supports_delta_rule(q, q, q), "dplr": supports_dplr(q, q, q, q, q)}
      if refused.get(family) is None:
        yield case


def programs(
  family: str, gate: str, shape: Shape, dtype: str, array: Callable = jax.ShapeDtypeStruct
) -> dict[str, Program]:
  """Returns the programs of a family by name.

  * `forward`, and `train`: forward and all gradients.
  * `decode`: one token, where there is such a kernel; `decode before`, where q reads the state
    before the token, and `decode by channel`, of the delta rule with a strength per channel.
  * `splits` or `whole`: the launches that go through time, with time splits where `train` has none,
    without where it has.

  `array(shape, dtype)` makes an argument.
  """
  B, T, H, D = shape
  q, token, state = array((B, T, H, D), dtype), array((B, H, D), dtype), array((B, H, D, D), f32)
  gates = {"none": None, "head": (H,), "channel": (H, D), "bounded": (H, D)}[gate]
  g, g_token = (
    (None, None) if gates is None else (array((B, T, *gates), f32), array((B, *gates), f32))
  )
  beta, beta_token = array((B, T, H), f32), array((B, H), f32)
  x, channels = array((B, T, H * D), dtype), array((H * D,), f32)
  call, args = {
    "linear_attention": (linear_attention, (q, q, q, g, state)),
    "delta_rule": (delta_rule, (q, q, q, beta, g, state)),
    "dplr": (dplr, (q, q, q, q, q, g, state)),
    "attention": (functools.partial(attention, scale=D**-0.5), (q, q, q, None, None, None)),
    "linear_recurrence": (
      linear_recurrence,
      (x, array(x.shape, f32), array((B, H * D), f32), None),
    ),
    "short_conv": (
      short_conv,
      (x, array((H * D, 4), f32), channels, array((B, 3, H * D), dtype), None),
    ),
    "gated_rms_norm": (
      gated_rms_norm,
      (array((B * T * H, D), dtype), array((D,), f32), array((B * T * H, D), dtype)),
    ),
  }[family]
  if gate == "bounded":
    call = functools.partial(call, bounded=True)
  cotangents = jax.tree.map(lambda x: array(x.shape, x.dtype), jax.eval_shape(call, *args))
  found = {
    "forward": Program(call, args),
    "train": Program(functools.partial(_train, call, len(args)), (*args, cotangents)),
  }
  if gate == "bounded":
    return found
  if family in THROUGH and (family not in FORWARD or D <= FORWARD[family].WIDE):
    cut = plan(q, q, g, False, 1.0, jnp.dtype(dtype)).P > 1
    found["whole" if cut else "splits"] = Program(
      functools.partial(THROUGH[family], 1 if cut else LEAST), args
    )
  if family == "linear_attention":
    args = state, token, token, token, g_token
    before = functools.partial(decode_linear_attention, reads_before=True)
    found["decode"] = Program(decode_linear_attention, args, (0,))
    found["decode before"] = Program(before, args, (0,))
  elif family == "delta_rule":
    args, erase = (state, token, token, token), array((B, H, D), f32)
    found["decode"] = Program(decode_delta_rule, (*args, beta_token, g_token), (0,))
    found["decode by channel"] = Program(decode_delta_rule, (*args, erase, g_token), (0,))
  elif family == "dplr":
    found["decode"] = Program(
      decode_dplr, (state, token, token, token, token, token, g_token), (0,)
    )
  return found


def _linear_through(P: int, q, k, v, g, state):
  p = plan(q, v, g, False, 1.0, q.dtype)._replace(P=P)
  passes = (
    scan_chunks(p, q, k, v, g, None, None, state, v, reverse, keep_states=True)
    for reverse in (False, True)
  )
  return tuple(passes)


def _delta_through(P: int, q, k, v, beta, g, state):
  p = plan(q, v, g, False, 1.0, q.dtype)._replace(P=P)
  system = delta_rule_forward.solve_chunks(p, q, k, beta, g, None, None)
  o, last, _, transitions = delta_rule_forward.scan_chunks(
    p, system, v, beta, g, None, None, state, v, keep_states=True
  )
  readers, square = (system.k_reader, system.q_reader, system.k_writer), system.squares
  back = delta_rule_backward.carry_back(
    p, *readers, o, v.astype(f32), beta, g, None, None, square, last, transitions
  )
  return o, last, back


def _dplr_through(P: int, q, k, v, a, b, g, state):
  p, p_back = (x._replace(P=P) for x in dplr_plans(q, v, g, q.dtype))
  system = dplr_forward.solve_chunks(p, q, a, b, k, g, None, None)
  o, last, _, transitions = dplr_forward.scan_chunks(
    p, system, v, g, None, None, state, v.dtype, keep_states=True
  )
  readers, square = (
    (system.a_reader, system.q_reader, system.b_writer),
    jnp.ones((p.B, p.HV, p_back.N, *2 * (p_back.C,))),
  )
  back = dplr_backward.carry_back(
    p_back, *readers, o, v.astype(f32), g, None, None, square, last, transitions
  )
  return o, last, back


THROUGH = {
  "linear_attention": _linear_through,
  "delta_rule": _delta_through,
  "dplr": _dplr_through,
}  # the launches that go through time, in P splits


def _train(call: Callable, count: int, *args):
  out, pull = jax.vjp(call, *args[:count])
  return out, pull(args[count])
