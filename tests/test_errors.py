"""Bad input: a ValueError that names the argument, what it must be in letters and sizes, what was got, and what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lajax
import lajax.recurrence

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6
R = 2
OPS = [
  "linear_attention",
  "normalized_linear_attention",
  "delta_rule",
  "linear_recurrence",
  "attention",
]
OPS += ["delta_product", "gated_oja", "dplr", "mlstm"]


def ones(*shape, dtype=np.float32):
  return jnp.ones(shape, dtype)


def good(op: str) -> dict:
  """Arguments that are right."""
  if op == "linear_recurrence":
    return {
      "x": ones(B, T, V),
      "log_a": -ones(B, T, V),
      "initial_state": ones(B, V),
      "segment_ids": jnp.zeros((B, T), int),
    }
  if op == "attention":
    qkv = {"q": ones(B, T, HV, K), "k": ones(B, T, H, K), "v": ones(B, T, H, V)}
    extra = {"sink": ones(HV), "log_forget": -ones(B, T, HV), "segment_ids": jnp.zeros((B, T), int)}
    return qkv | extra
  arguments = {
    "q": ones(B, T, H, K),
    "k": ones(B, T, H, K),
    "v": ones(B, T, HV, V),
    "g": -ones(B, T, HV),
    "initial_state": ones(B, HV, K, V),
    "segment_ids": jnp.zeros((B, T), int),
  }
  if op == "normalized_linear_attention":
    arguments["initial_state"] = (ones(B, HV, K, V), ones(B, HV, K))
  if op == "delta_product":
    return arguments | {
      "k": ones(B, T, R, H, K),
      "v": ones(B, T, R, HV, V),
      "beta": ones(B, T, R, HV),
    }
  if op == "dplr":
    return arguments | {"a": ones(B, T, H, K), "b": ones(B, T, H, K)}
  if op == "mlstm":
    del arguments["g"]
    memory = ones(B, HV, K, V), ones(B, HV, K), ones(B, HV)
    return arguments | {"i": ones(B, T, HV), "f": -ones(B, T, HV), "initial_state": memory}
  return arguments | ({"beta": ones(B, T, HV)} if op in ("delta_rule", "gated_oja") else {})


def call(op: str, **changes):
  return getattr(lajax, op)(**good(op) | changes)


def error(op: str, **changes) -> str:
  with pytest.raises(ValueError, match=r"\w") as caught:
    call(op, **changes)
  return str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_are_good(op):
  jax.eval_shape(lambda: call(op))


# --- shapes: (op, argument, a wrong array, what the message must hold) ---------------------------------------------------

WRONG_SIZE = [
  (
    "linear_attention",
    "k",
    ones(B, T - 1, H, K),
    ["[B T H K] = (2, 5, 2, 3)", "(2, 4, 2, 3)", "`q`", "T differs"],
  ),
  (
    "linear_attention",
    "k",
    ones(B, T, H, K + 1),
    ["[B T H K] = (2, 5, 2, 3)", "(2, 5, 2, 4)", "K differs"],
  ),
  (
    "linear_attention",
    "v",
    ones(B + 1, T, HV, V),
    ["[B T HV V] = (2, 5, 4, 6)", "(3, 5, 4, 6)", "B differs"],
  ),
  (
    "linear_attention",
    "g",
    ones(B, T, HV - 1),
    ["[B T HV] = (2, 5, 4)", "(2, 5, 3)", "`v`", "HV differs"],
  ),
  (
    "linear_attention",
    "g",
    ones(B, T, HV, K + 1),
    ["[B T HV K] = (2, 5, 4, 3)", "(2, 5, 4, 4)", "K differs"],
  ),
  (
    "linear_attention",
    "initial_state",
    ones(B, HV, V, K),
    ["[B HV K V] = (2, 4, 3, 6)", "(2, 4, 6, 3)", "K and V"],
  ),
  (
    "linear_attention",
    "segment_ids",
    jnp.zeros((B, T + 1), int),
    ["[B T] = (2, 5)", "(2, 6)", "T differs"],
  ),
  ("normalized_linear_attention", "k", ones(B, T, H, K + 1), ["[B T H K]", "(2, 5, 2, 4)"]),
  ("delta_rule", "beta", ones(B, T, H), ["[B T HV] = (2, 5, 4)", "(2, 5, 2)", "HV differs"]),
  ("delta_rule", "initial_state", ones(B, H, K, V), ["[B HV K V] = (2, 4, 3, 6)", "(2, 2, 3, 6)"]),
  ("linear_attention", "bonus", ones(HV, K), ["[H K] = (2, 3)", "(4, 3)", "H differs"]),
  ("delta_product", "k", ones(B, T, H, K), ["[B T R H K]", "rank 4"]),
  (
    "delta_product",
    "beta",
    ones(B, T, R + 1, HV),
    ["[B T R HV] = (2, 5, 2, 4)", "(2, 5, 3, 4)", "R differs"],
  ),
  ("gated_oja", "g", ones(B, T, HV, K), ["[B T HV V] = (2, 5, 4, 6)", "(2, 5, 4, 3)", "V differs"]),
  ("dplr", "a", ones(B, T, HV, K), ["[B T H K] = (2, 5, 2, 3)", "(2, 5, 4, 3)", "H differs"]),
  ("mlstm", "f", ones(B, T, H), ["[B T HV] = (2, 5, 4)", "(2, 5, 2)", "HV differs"]),
  ("attention", "k", ones(B, T, H, K + 1), ["[B T HK K] = (2, 5, 2, 3)", "(2, 5, 2, 4)"]),
  ("attention", "sink", ones(H), ["[H] = (4)", "(2,)"]),
  ("attention", "log_forget", ones(B, T, H), ["[B T H] = (2, 5, 4)", "(2, 5, 2)"]),
  ("linear_recurrence", "log_a", ones(B, T, V + 1), ["(2, 5, 6)", "(2, 5, 7)", "`x`"]),
  ("linear_recurrence", "initial_state", ones(B, V + 1), ["(2, 6)", "(2, 7)"]),
]


@pytest.mark.parametrize(
  ("op", "name", "wrong", "parts"), WRONG_SIZE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_size(op, name, wrong, parts):
  message = error(op, **{name: wrong})
  assert f"`{name}`" in message
  squeezed = message.replace(",)", ")")
  for part in parts:
    assert part.replace(",)", ")") in squeezed, message


WRONG_RANK = [
  ("linear_attention", "q", ones(B, T, K), "[B T H K]"),
  ("linear_attention", "v", ones(B, T, HV, V, 1), "[B T HV V]"),
  ("linear_attention", "g", ones(B, T), "[B T HV] or [B T HV K]"),
  ("linear_attention", "initial_state", ones(HV, K, V), "[B HV K V]"),
  ("delta_rule", "beta", ones(B, T, HV, 1), "[B T HV]"),
  ("attention", "k", ones(B, T, K), "[B T HK K]"),
  ("linear_recurrence", "log_a", ones(B, T), "[B T"),
]


@pytest.mark.parametrize(
  ("op", "name", "wrong", "wanted"), WRONG_RANK, ids=lambda x: x if isinstance(x, str) else ""
)
def test_wrong_rank(op, name, wrong, wanted):
  message = error(op, **{name: wrong})
  assert f"`{name}` must be {wanted}" in message
  assert f"rank {wrong.ndim}" in message
  assert str(tuple(wrong.shape)) in message


@pytest.mark.parametrize("x", [ones(B), ones(B, T)], ids=["B", "BT"])
def test_linear_recurrence_needs_tokens(x):
  """[B] has no tokens. [B T], one channel a row, is allowed."""
  arguments = {"x": x, "log_a": -x, "initial_state": None, "segment_ids": None}
  if x.ndim == 1:
    assert "`x`" in error("linear_recurrence", **arguments)
  else:
    assert call("linear_recurrence", **arguments)[0].shape == x.shape


@pytest.mark.parametrize("op", OPS)
def test_integers(op):
  """Also under jit, where dtypes are as plain as before."""
  name = "x" if op == "linear_recurrence" else "q"
  wrong = good(op)[name].astype(int)
  for message in (error(op, **{name: wrong}), _jitted_error(op, name, wrong)):
    assert f"`{name}` must have a floating dtype; got int32" in message
    assert "Cast it" in message
  message = error(op, segment_ids=jnp.zeros((B, T)))
  assert "`segment_ids` must have a integer dtype; got float32" in message.replace(
    "an integer", "a integer"
  )


def _jitted_error(op, name, wrong) -> str:
  with pytest.raises(ValueError, match=r"\w") as caught:
    jax.jit(lambda x: call(op, **{name: x}))(wrong)
  return str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_lists_are_not_arrays(op):
  name = "log_a" if op == "linear_recurrence" else "k"
  assert f"`{name}` must be an array; got list" in error(op, **{name: [1.0]})


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["linear_attention", "normalized_linear_attention", "delta_rule"])
def test_value_heads_are_a_multiple(op):
  changes = {"v": ones(B, T, 3, V), "g": None, "initial_state": None}
  message = error(op, **changes | ({"beta": ones(B, T, 3)} if op == "delta_rule" else {}))
  assert "3" in message
  assert "multiple" in message
  assert "HV" in message


def test_query_heads_are_a_multiple():
  message = error("attention", q=ones(B, T, 3, K), sink=None, log_forget=None)
  assert "multiple" in message
  assert "3" in message


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_unknown_impl(op):
  message = error(op, impl="fast")
  assert "`impl` must be one of" in message
  assert "'fast'" in message
  assert all(
    f"'{impl}'" in message for impl in ("auto", "recurrent", "associative", "chunked", "pallas")
  )


KERNELS = (
  "linear_attention",
  "normalized_linear_attention",
  "mlstm",
  "delta_rule",
  "delta_product",
  "dplr",
  "linear_recurrence",
)


@pytest.mark.parametrize("op", [op for op in OPS if op not in KERNELS])
def test_pallas_says_that_it_cannot(op):
  """A named impl never falls back; the message is a sentence with the way out."""
  with pytest.raises(NotImplementedError, match=r"pallas.*(chunked|auto).*\.$"):
    call(op, impl="pallas")


@pytest.mark.parametrize(
  ("options", "part"), [({"chunk_size": 7}, "chunk_size is 7"), ({}, "K is 300")]
)
def test_pallas_says_what_its_kernels_do_not_take(options, part):
  wide = (
    {} if options else {"q": ones(B, T, H, 300), "k": ones(B, T, H, 300), "initial_state": None}
  )
  with pytest.raises(NotImplementedError, match=rf"{part}.*impl='chunked' or impl='auto'\.$"):
    call("linear_attention", impl="pallas", **options, **wide)


@pytest.mark.parametrize("op", OPS)
def test_unknown_keyword_is_a_type_error(op):
  with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
    call(op, head_first=True)


@pytest.mark.parametrize("chunk_size", [0, -16, 2.5, True, "64"])
@pytest.mark.parametrize("op", ["linear_attention", "normalized_linear_attention", "delta_rule"])
def test_chunk_size(op, chunk_size):
  assert (
    f"`chunk_size` must be a whole number of at least 1, or None for the default; got {chunk_size!r}"
    in error(op, chunk_size=chunk_size, impl="chunked")
  )


@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_recurrence"])
@pytest.mark.parametrize(
  "scale",
  ["1", float("nan"), True, np.ones(K), jnp.ones((B, T, H, K))],
  ids=["text", "nan", "bool", "K", "BTHK"],
)
def test_scale(op, scale):
  """An array would broadcast against the queries."""
  assert (
    "`scale` must be a finite number, an array of one without axes, or None for K^-1/2"
    in error(op, scale=scale)
  )


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), True, None, "small"])
def test_eps(eps):
  one, expected = ones(1, 1, 1, 1), f"`eps` must be a number of at least 0; got {eps!r}."
  assert error("normalized_linear_attention", eps=eps) == expected
  for call_it in (
    lambda: lajax.bidirectional_linear_attention(one, one, one, eps=eps),
    lambda: lajax.recurrence.normalized_linear_attention_step(
      (one, one[0]), one[0], one[0], one[0], eps=eps
    ),
  ):
    with pytest.raises(ValueError, match=re.escape(expected)):
      call_it()


@pytest.mark.parametrize("window", [0, -1])
def test_window(window):
  assert "`window`" in error("attention", window=window)


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


# --- values ----------------------------------------------------------------------------------------------------------

NAN_GATES = [
  ("linear_attention", "g"),
  ("normalized_linear_attention", "g"),
  ("delta_rule", "g"),
  ("delta_rule", "beta"),
  ("linear_recurrence", "log_a"),
  ("attention", "log_forget"),
]


@pytest.mark.parametrize(("op", "name"), NAN_GATES)
def test_nan_in_a_gate(op, name):
  """Seen where values can be seen; under jit nothing is checked, and nothing breaks."""
  wrong = good(op)[name].at[0, 0].set(jnp.nan)
  count = int(jnp.isnan(wrong).sum())
  message = error(op, **{name: wrong, "segment_ids": None})
  assert f"`{name}` must hold no NaN" in message
  assert f"got {count} of {wrong.size}" in message
  jax.eval_shape(lambda x: call(op, **{name: x}), wrong)


def test_minus_infinity_is_a_gate_like_any_other():
  g = good("linear_attention")["g"].at[0, 1].set(-jnp.inf)
  jax.eval_shape(lambda: call("linear_attention", g=g))
  lajax.linear_attention(**good("linear_attention") | {"g": g}, impl="recurrent")


# --- steps -----------------------------------------------------------------------------------------------------------


def test_steps_check_too():
  q, v, state = ones(B, H, K), ones(B, HV, V), ones(B, HV, K, V)
  with pytest.raises(
    ValueError, match=re.escape("`k` must be [B H K] = (2, 2, 3) to match `q`; got (2, 2, 4)")
  ):
    lajax.recurrence.linear_attention_step(state, q, ones(B, H, K + 1), v)
  with pytest.raises(ValueError, match="`beta` must be"):
    lajax.recurrence.delta_rule_step(state, q, q, v, ones(B, H))
  with pytest.raises(ValueError, match="`state` must be"):
    lajax.recurrence.linear_attention_step(state[:1], q, q, v)
  with pytest.raises(ValueError, match="`log_a` must be"):
    lajax.recurrence.linear_recurrence_step(ones(B, V), ones(B, V), ones(B, V + 1))
