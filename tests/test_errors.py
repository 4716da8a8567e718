"""Wrong arguments: an error of lajax that names the argument, what it must be, what was got, and
what to do.

One table of functions drives ten kinds of wrong arguments for each of their arguments; the tests
behind it hold what a message must say.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_arguments as wrong
from cases import some_fast, well_formed

import lajax
import lajax.recurrence
from lajax import ops

OPS = (
  "linear_attention",
  "normalized_linear_attention",
  "delta_rule",
  "delta_product",
  "gated_oja",
  "dplr",
  "preconditioned_delta_rule",
  "momentum_delta_rule",
  "mesa",
  "log_linear_attention",
  "mlstm",
  "mamba3",
  "linear_recurrence",
  "attention",
)
SIZES = dict(B=2, T=5, H=2, HV=4, HK=2, K=3, V=6, R=2, D=4, W=3) | {"W-1": 2}


def array(letters: str) -> jax.Array:
  return jnp.full([SIZES[axis] for axis in letters.split()], 0.5)


def one_token(op: str) -> dict:
  """The same of the op's step."""
  arguments = well_formed(op)
  state = arguments.pop("initial_state")
  del arguments["segment_ids"]
  return {n: x if n in ("bonus", "ridge") else x[:, 0] for n, x in arguments.items()} | {
    "state": state
  }


IDS = jnp.zeros((SIZES["B"], SIZES["T"]), jnp.int32)


def call(op: str, **changes):
  return getattr(lajax, op)(**well_formed(op) | changes)


def error(op: str, **changes) -> str:
  with pytest.raises(ValueError, match=r"\w") as caught:
    call(op, **changes)
  return str(caught.value)


# --- the table ---

GATES = {
  "g",
  "beta_precond",
  "g_precond",
  "g_momentum",
  "eta",
  "level_scales",
  "log_a",
  "i",
  "f",
  "log_forget",
  "beta",
  "dt",
  "trapezoid",
}
OPTIONAL = {
  "g",
  "bonus",
  "initial_state",
  "segment_ids",
  "sink",
  "log_forget",
  "gate",
  "bias",
  "cache",
  "document_ids",
}
CONV = dict(x="B T D", weight="D W", bias="D", cache="B W-1 D")
TABLE = {  # name: function, arguments that are right, options
  **{
    op: (getattr(lajax, op), well_formed(op), ("impl",) if op == "linear_recurrence" else ("scale", "chunk_size", "impl"))
    for op in OPS
    if op != "attention"
  },
  **{
    f"{op}_step": (getattr(lajax.recurrence, f"{op}_step"), one_token(op), () if op == "linear_recurrence" else ("scale",))
    for op in OPS
    if op != "attention"
  },
  "attention": (lajax.attention, well_formed("attention"), ("scale", "causal", "window", "impl")),
  "bidirectional_linear_attention": (
    lajax.bidirectional_linear_attention, well_formed("bidirectional_linear_attention"), ("eps",)
  ),
  "efficient_attention": (lajax.efficient_attention, well_formed("efficient_attention"), ("normalization",)),
  "loss_mask": (lajax.loss_mask, {"segment_ids": IDS}, ()),
  "gated_rms_norm": (ops.gated_rms_norm, {n: array(x) for n, x in dict(x="B D", weight="D", gate="B D").items()}, ("eps", "impl")),
  "short_conv": (ops.short_conv, {n: array(x) for n, x in CONV.items()} | {"document_ids": IDS}, ("impl",)),
}  # fmt: skip
FAST = (
  "delta_rule",
  "delta_rule_step",
  "linear_recurrence",
  "attention",
  "short_conv",
  "loss_mask",
)
OWN_OPTIONS = {
  "normalized_linear_attention": ("eps",),
  "mesa": ("cg_steps",),
  "preconditioned_delta_rule": ("base", "eps", "center"),
}
FREE = {  # axes whose size no other argument fixes, or of an array of any rank
  ("attention", "v"): (3,), ("efficient_attention", "v"): (3,), ("bidirectional_linear_attention", "v"): (3,),
  ("loss_mask", "segment_ids"): (0, 1),
}  # fmt: skip


def wrong_values(name: str, argument: str, right) -> dict:
  if isinstance(right, tuple):
    return wrong.parts(right)
  if not isinstance(right, jax.Array):
    return wrong.OPTIONS[argument]
  return wrong.arrays(
    right,
    optional=argument in OPTIONAL and name != "loss_mask",
    gate=argument in GATES and not name.endswith("_step"),  # a step looks at no values
    free=FREE.get((name, argument), ()),
  )


@pytest.mark.parametrize("name", some_fast(TABLE, FAST))
def test_wrong_arguments_are_clear_errors(name):
  function, right, options = TABLE[name]
  options = (*options, *OWN_OPTIONS.get(name.removesuffix("_step"), ()))
  faults = []
  for argument in (*right, *options):
    values = wrong_values(name, argument, right.get(argument))
    faults += wrong.accepted(function, right, argument, values)
  assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", TABLE)
def test_right_arguments_are_right(name):
  """Also as NumPy arrays, of 64 bits outside the 64-bit mode too, and with NumPy's numbers."""
  function, right, options = TABLE[name]
  wide = jax.tree.map(
    lambda x: np.asarray(x, np.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x,
    right,
  )
  numbers = {"chunk_size": np.int64(32), "scale": np.float64(0.5)}
  numbers = {option: x for option, x in numbers.items() if option in options}
  got = jax.eval_shape(lambda: function(**wide, **numbers))
  assert {x.dtype for x in jax.tree.leaves(got)} <= {jnp.dtype(jnp.float32), jnp.dtype(bool)}


# --- what messages say: (op, argument, a wrong array, parts of the message) ---

B, T, H, HV, K, V, R = (SIZES[letter] for letter in ("B", "T", "H", "HV", "K", "V", "R"))


def ones(*shape):
  return jnp.ones(shape)


WRONG_SIZE = [
  ("linear_attention", "k", ones(B, T - 1, H, K), ["[B T H K] = (2, 5, 2, 3)", "(2, 4, 2, 3)", "`q`", "T differs"]),
  ("linear_attention", "g", ones(B, T, HV, K + 1), ["[B T HV K] = (2, 5, 4, 3)", "(2, 5, 4, 4)", "K differs"]),
  ("linear_attention", "initial_state", ones(B, HV, V, K), ["[B HV K V] = (2, 4, 3, 6)", "(2, 4, 6, 3)", "K and V"]),
  ("linear_attention", "bonus", ones(HV, K), ["[H K] = (2, 3)", "(4, 3)", "H differs"]),
  ("delta_rule", "beta", ones(B, T, H), ["[B T HV] = (2, 5, 4)", "(2, 5, 2)", "HV differs"]),
  ("delta_product", "k", ones(B, T, H, K), ["[B T R H K]", "rank 4"]),
  ("delta_product", "beta", ones(B, T, R + 1, HV), ["[B T R HV] = (2, 5, 2, 4)", "(2, 5, 3, 4)", "R differs"]),
  ("gated_oja", "g", ones(B, T, HV, K), ["[B T HV V] = (2, 5, 4, 6)", "(2, 5, 4, 3)", "V differs"]),
  ("mlstm", "f", ones(B, T, H), ["[B T HV] = (2, 5, 4)", "(2, 5, 2)", "HV differs"]),
  ("mamba3", "dt", ones(B, T, H), ["[B T HV] = (2, 5, 4)", "(2, 5, 2)", "HV differs"]),
  ("mamba3", "k", ones(B, T, R, H, K), ["[B T H K]", "rank 5"]),
  ("attention", "sink", ones(H), ["[H] = (4,)", "(2,)"]),
  ("linear_recurrence", "log_a", ones(B, T, V + 1), ["(2, 5, 6)", "(2, 5, 7)", "`x`"]),
  ("linear_attention", "g", ones(B, T), ["[B T HV] or [B T HV K]", "rank 2"]),
  ("linear_attention", "q", None, ["`q` must be an array [B T H K]; got None"]),
  ("linear_attention", "q", [1.0], ["`q` must be an array [B T H K]; got list", "jnp.asarray"]),
  ("linear_attention", "q", ones(B, T, H, K).astype(int), ["a floating dtype; got int32", "astype(jnp.float32)"]),
  ("linear_attention", "segment_ids", ones(B, T), ["an integer dtype; got float32", "astype(jnp.int32)"]),
]  # fmt: skip


@pytest.mark.parametrize(
  ("op", "name", "value", "parts"), WRONG_SIZE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_message(op, name, value, parts):
  message = error(op, **{name: value})
  assert f"`{name}`" in message
  for part in parts:
    assert part in message, message


def test_dtypes_are_checked_under_jit():
  with pytest.raises(ValueError, match="`q` must have a floating dtype; got int32"):
    jax.jit(lambda q: call("linear_attention", q=q))(ones(B, T, H, K).astype(int))


@pytest.mark.parametrize("x", [ones(B), ones(B, T)], ids=["B", "BT"])
def test_linear_recurrence_needs_tokens(x):
  """[B] has no tokens. [B T], one channel per row, is allowed."""
  arguments = {"x": x, "log_a": -x, "initial_state": None, "segment_ids": None}
  if x.ndim == 1:
    assert "`x`" in error("linear_recurrence", **arguments)
  else:
    assert call("linear_recurrence", **arguments)[0].shape == x.shape


@pytest.mark.parametrize(
  "op", [op for op in OPS if op not in ("attention", "linear_recurrence", "delta_product")]
)
def test_value_heads_are_a_multiple(op):
  given = {n: x for n, x in well_formed(op).items() if n not in ("initial_state", "bonus")}
  three = {n: x[:, :, :3] if x.shape[2:3] == (HV,) else x for n, x in given.items()}
  with pytest.raises(ValueError, match=r"3 heads of `v` \(HV\) must be a multiple of the 2 heads"):
    getattr(lajax, op)(**three)


def test_query_heads_are_a_multiple():
  message = error("attention", q=ones(B, T, 3, K), sink=None, log_forget=None)
  assert "the 3 heads of `q` (H) must be a multiple of the 2 heads of `k` and `v` (HK)" in message


@pytest.mark.parametrize("op", OPS)
def test_unknown_impl(op):
  message = error(op, impl="fast")
  impls = "'auto', 'recurrent', 'associative', 'chunked', 'pallas'"
  assert f"`impl` must be one of {impls}; got 'fast'" in message


@pytest.mark.parametrize("op", ["gated_oja", "attention"])
def test_pallas_says_that_it_cannot(op):
  """A named implementation never falls back; the message is a sentence with the way out."""
  with pytest.raises(NotImplementedError, match=r"pallas.*(chunked|auto).*\.$"):
    call(op, impl="pallas")


@pytest.mark.parametrize(
  ("options", "part"), [({"chunk_size": 7}, "chunk_size is 7"), ({}, "K is 300")]
)
def test_pallas_says_what_its_kernels_do_not_take(options, part):
  wide = {}
  if not options:
    wide = {"q": ones(B, T, H, 300), "k": ones(B, T, H, 300), "initial_state": None, "bonus": None}
  with pytest.raises(NotImplementedError, match=rf"{part}.*impl='chunked' or impl='auto'\.$"):
    call("linear_attention", impl="pallas", **options, **wide)


@pytest.mark.parametrize("op", OPS)
def test_unknown_keyword_is_a_type_error(op):
  with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
    call(op, head_first=True)


def test_chunk_size():
  message = error("linear_attention", chunk_size=2.5)
  assert message.startswith("`chunk_size` must be a whole number of at least 1, or None for the")
  assert message.endswith("got 2.5.")


@pytest.mark.parametrize("scale", list(wrong.OPTIONS["scale"].values()))
def test_scale(scale):
  """An array would broadcast against the queries."""
  wanted = "`scale` must be a finite number, an array of one without axes, or None for K^-1/2; got"
  assert wanted in error("linear_attention", scale=scale)


def test_traced_scale():
  """Plain JAX takes it; kernels are specialised to a number, and say so."""
  f = lambda scale, impl: call("delta_rule", scale=scale, impl=impl)[0]
  jax.eval_shape(lambda scale: f(scale, "chunked"), 1.0)
  with pytest.raises(NotImplementedError, match=r"`scale` must be a number known.*Multiply `q`"):
    jax.eval_shape(lambda scale: f(scale, "pallas"), 1.0)


@pytest.mark.parametrize(("eps", "got"), [(-1e-6, "-1e-06"), (None, "None"), (10**400, "1000")])
def test_eps(eps, got):
  message = error("normalized_linear_attention", eps=eps)
  assert message.startswith(f"`eps` must be a number of at least 0; got {got}")


def test_beta_or_erase_and_write():
  erase, write = ones(B, T, HV, K), ones(B, T, HV, V)
  for changes in (
    {"erase": erase},
    {"beta": None},
    {"beta": None, "erase": erase},
    {"beta": None, "write": write},
  ):
    message = error("delta_rule", **changes)
    assert all(f"`{name}`" in message for name in ("beta", "erase", "write"))


# --- values ---


@pytest.mark.parametrize(
  ("op", "name"), [("delta_rule", "beta"), ("mlstm", "f"), ("attention", "log_forget")]
)
def test_nan_in_a_gate(op, name):
  """Seen where values can be seen, but for padding; under jit nothing is checked, and nothing
  breaks.
  """
  x = jnp.asarray(well_formed(op)[name]).at[0, 0].set(jnp.nan)
  count = int(jnp.isnan(x).sum())
  assert f"`{name}` must hold no NaN; got {count} of {x.size}" in error(op, **{name: x})
  jax.eval_shape(lambda x: call(op, **{name: x}), x)
  padding = IDS.at[0, 0].set(-1)
  jax.eval_shape(lambda: call(op, **{name: x}, segment_ids=padding))


def test_infinite_gates():
  """-inf forgets everything; an input gate of +inf has no weight relative to itself."""
  g = well_formed("linear_attention")["g"].at[0, 1].set(-jnp.inf)
  jax.eval_shape(lambda: call("linear_attention", g=g))
  i = well_formed("mlstm")["i"].at[0, 0, 0].set(jnp.inf)
  with pytest.raises(ValueError, match=re.escape("`i` must hold no +inf")):
    call("mlstm", i=i)
