"""Softmax attention beyond its equation: NaN, half precision, wrong arguments, tracing.

The equation itself, every implementation against it, and the laws are rows of `cases.CASES`.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms, some_fast
from jax import export

import lajax
from lajax.recurrence import attend
from lajax.recurrence import attention as softmax

IMPLS = ("auto", "recurrent", "associative", "chunked")
T, BAD, WINDOW = (
  24,
  8,
  3,
)  # two documents of T / 2 tokens, the number that is not finite, in the first
DOCUMENTS = np.arange(T) * 2 // T


def normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- numbers that are not finite ---


POISONS = [(name, value) for name in ("q", "k", "v", "do") for value in (np.nan, np.inf)]
POISONS += [("log_forget", np.nan)]


def arrays(rows):
  same = lambda seed, *shape: np.repeat(normal(seed, 1, T, *shape), rows, axis=0)
  gates = -np.abs(same(3, 4))
  return {"q": same(0, 4, 8), "k": same(1, 2, 8), "v": same(2, 2, 8), "log_forget": gates}


@functools.cache
def poisoned(impl, gated, window):
  """Outputs and gradients, row by row: first without, then with one number that is not finite."""
  inputs = arrays(1 + len(POISONS))
  do = np.repeat(normal(4, 1, T, 4, 8), 1 + len(POISONS), axis=0)
  for row, (name, value) in enumerate(POISONS, 1):
    x = do if name == "do" else inputs[name]
    x[row, BAD] = value
  ids = np.broadcast_to(DOCUMENTS, (len(do), T))

  def run(inputs, do):
    gates = inputs["log_forget"] if gated else None
    call = lambda q, k, v, gates: lajax.attention(
      q, k, v, log_forget=gates, window=window, segment_ids=ids, impl=impl
    )
    o, pull = jax.vjp(call, inputs["q"], inputs["k"], inputs["v"], gates)
    return o, [g for g in pull(do) if g is not None]

  o, gradients = quick_jit(run)(inputs, do)
  return np.asarray(o), [np.asarray(g) for g in gradients]


@pytest.mark.parametrize("window", [None, WINDOW], ids=["all", "window"])
@pytest.mark.parametrize("impl", some_fast(IMPLS, ("chunked", "associative")))
def test_nan_stays_with_the_tokens_that_read_it(impl, window):
  """NaN in exactly the queries that read the number; other documents as without it, bit for bit."""
  gated = impl != "auto" or window is None
  o, gradients = poisoned(impl, gated, window)
  last = T // 2 if window is None else BAD + WINDOW  # of the queries that read token BAD
  for row, (name, _) in enumerate(POISONS, 1):
    if name == "log_forget" and not gated:
      continue
    readers = {"q": [BAD], "do": [], "log_forget": range(BAD, last - (window is not None))}
    nan = np.isin(np.arange(T), list(readers.get(name, range(BAD, last))))
    np.testing.assert_array_equal(np.isnan(o[row]).any((1, 2)), nan, err_msg=name)
    assert np.isnan(o[row, nan]).all(), name
    np.testing.assert_array_equal(o[row, ~nan], o[0, ~nan], err_msg=name)
    for g in gradients:
      np.testing.assert_array_equal(g[row, T // 2 :], g[0, T // 2 :], err_msg=name)
    if name == "do":  # what is wrong with the cotangent must not be lost
      assert np.isnan(gradients[0][row, BAD]).all()


def test_nan_stays_in_its_block_of_keys(monkeypatch):
  """The same where a document spans blocks: blocks of 5 tokens."""
  whole = poisoned("chunked", True, None)
  monkeypatch.setattr(softmax, "BLOCK", 5)
  jax.clear_caches()  # compiled with the block size
  poisoned.cache_clear()
  o, gradients = poisoned("chunked", True, None)
  np.testing.assert_array_equal(np.isnan(o), np.isnan(whole[0]))
  np.testing.assert_allclose(o, whole[0], atol=1e-6)
  for got, want in zip(gradients, whole[1], strict=True):
    assert relative_rms(got[:, T // 2 :], want[:, T // 2 :]) < BUDGET["float32"]["gradient"]
  jax.clear_caches()
  poisoned.cache_clear()


def test_keys_that_no_query_reads_may_hold_anything():
  """Padding keys of NaN, and a query without any key: 0."""
  q, k, v = normal(0, 1, 2, 1, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4)
  k[0, 1] = v[0, 1] = np.nan
  place = {
    "q_positions": np.array([[0, 5]], np.int8),
    "k_positions": np.array([[0, 0, 5]]),
    "q_segments": np.array([[7, 8]], np.int32),
    "k_segments": np.array([[7, -1, 9]], np.int8),
  }
  o = attend(q, k, v, **place)
  np.testing.assert_allclose(o[0, 0], v[0, 0], rtol=1e-6)
  np.testing.assert_array_equal(o[0, 1], 0)


# --- half precision ---


@pytest.mark.parametrize("impl", IMPLS)
def test_float16(impl):
  """float16 has three digits more than bfloat16, whose budget it keeps."""
  inputs = {n: x.astype(np.float16) for n, x in arrays(1).items() if n != "log_forget"}

  def run(impl, q, k, v):
    call = functools.partial(lajax.attention, impl=impl)
    o, pull = jax.vjp(call, q, k, v)
    return o, pull(jnp.cos(o))

  got = quick_jit(functools.partial(run, impl))(*inputs.values())
  want = quick_jit(functools.partial(run, "recurrent"))(
    *(x.astype(np.float32) for x in inputs.values())
  )
  assert all(x.dtype == jnp.float16 for x in jax.tree.leaves(got))
  budget = BUDGET["bfloat16"]
  assert relative_rms(got[0], want[0]) < budget["value"]
  for x, y in zip(got[1], want[1], strict=True):
    assert relative_rms(x, y) < budget["gradient"]


# --- wrong arguments ---


def ones(*shape, dtype=np.float32):
  return np.ones(shape, dtype)


def places(dtype=np.int32):
  return {
    "q_positions": ones(2, 3, dtype=dtype),
    "k_positions": ones(2, 5, dtype=dtype),
    "q_segments": ones(2, 3, dtype=dtype),
    "k_segments": ones(2, 5, dtype=dtype),
  }


GOOD = {"q": ones(2, 3, 4, 8), "k": ones(2, 5, 2, 8), "v": ones(2, 5, 2, 6), **places()}

WRONG = {  # what one argument of `attend` is, and what the message says beside its name
  "integers": ("q", ones(2, 3, 4, 8, dtype=np.int32), ["floating", "int32", "astype"]),
  "none": ("v", None, ["[B S HK V]", "None"]),
  "rank": ("k", ones(2, 5, 8), ["[B S HK K]", "(2, 5, 8)"]),
  "longer": ("k", ones(2, 6, 2, 8), ["[B S HK", "S"]),
  "width": ("k", ones(2, 5, 2, 7), ["[B S HK K] = (2, 5, 2, 8)", "K differs"]),
  "heads": ("q", ones(2, 3, 3, 8), ["multiple", "3", "2"]),
  "list": ("q", [[1.0]], ["array", "list"]),
  "no positions": ("q_positions", None, ["[B T]", "None"]),
  "length of positions": ("k_positions", ones(2, 4, dtype=np.int32), ["(2, 5)", "(2, 4)"]),
  "float positions": ("q_positions", ones(2, 3), ["integer", "float32"]),
  "mask": ("k_segments", ones(2, 5, dtype=bool), ["integer", "bool"]),
  "unsigned": ("k_segments", ones(2, 5, dtype=np.uint32), ["signed", "uint32", "astype"]),
  "64 bits": ("q_segments", np.full((2, 3), 2**32 + 5), ["int32", "4294967301"]),
  "window of -1": ("window", -1, ["at least 1", "-1"]),
  "window of 2^31": ("window", 2**31, ["2147483647", "2147483648"]),
  "window of a half": ("window", 0.5, ["whole number", "0.5"]),
  "text for causal": ("causal", "x", ["True or False", "'x'"]),
  "array for causal": ("causal", jnp.array(True), ["True or False"]),
  "unknown": ("impl", "x", ["'chunked'", "'x'"]),
  "nan": ("scale", jnp.float32(np.nan), ["finite", "nan"]),
  "huge": ("scale", 10**400, ["finite"]),
  "sink": ("sink", ones(2), ["[H] = (4", "(2,)"]),
  "gates of fewer queries": ("log_forget", ones(2, 3, 4), ["T = 3", "S = 5"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_attend_says_what_is_wrong(wrong):
  name, value, pieces = WRONG[wrong]
  with pytest.raises(ValueError) as error:  # noqa: PT011  (the pieces are the match)
    attend(**(GOOD | {name: value}))
  message = str(error.value)
  assert f"`{name}`" in message or wrong == "longer"
  assert all(piece in message for piece in pieces), message


ATTENTION_WRONG = [n for n, (name, *_) in WRONG.items() if name in ("causal", "window", "scale")]


@pytest.mark.parametrize("wrong", ATTENTION_WRONG)
def test_attention_says_what_is_wrong(wrong):
  name, value, pieces = WRONG[wrong]
  x = ones(2, 3, 4, 8)
  with pytest.raises(ValueError, match=f"`{name}`") as error:
    lajax.attention(x, x, x, **{name: value})
  assert all(piece in str(error.value) for piece in pieces)


def test_numpy_numbers_are_numbers():
  """And `attend` is `attention` where queries and keys stand at the same places."""
  x = normal(0, 2, 5, 2, 4)
  index = np.broadcast_to(np.arange(5), (2, 5))
  place = {"q_positions": index, "k_positions": index, "q_segments": 0 * index}
  got = attend(x, x, x, **place, k_segments=0 * index, window=np.int64(2), causal=np.bool_(True))
  np.testing.assert_allclose(got, lajax.attention(x, x, x, window=np.int32(2)), atol=1e-6)


# --- tracing ---


@pytest.mark.parametrize("impl", IMPLS)
def test_export_with_any_batch(impl):
  """A batch that is a symbol; a length that is one is refused in a sentence."""
  B, T = export.symbolic_shape("b, t")
  spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  run = jax.jit(lambda q, ids: lajax.attention(q, q, q, segment_ids=ids, window=3, impl=impl))
  exported = export.export(run)(spec(B, 5, 2, 4), spec(B, 5, dtype=jnp.int32))
  assert exported.out_avals[0].shape[1:] == (5, 2, 4)
  with pytest.raises(NotImplementedError, match="axis T"):
    export.export(run)(spec(2, T, 2, 4), spec(2, T, dtype=jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_strict_promotion_in_bfloat16(impl):
  """No dtype is mixed with another. In float32 all tests show it: the suite is strict."""
  x, gates = ones(2, 5, 2, 4).astype(jnp.bfloat16), ones(2, 5, 2)
  index = ones(2, 5, dtype=np.int32)
  rest = {"causal": True, "sink": ones(2)}

  def run(x):
    gated = impl if impl != "auto" else "chunked"
    yield lajax.attention(x, x, x, segment_ids=index, window=3, impl=impl)
    yield lajax.attention(x, x, x, impl=impl)
    yield attend(x, x, x, **dict.fromkeys(places(), index), log_forget=gates, **rest, impl=gated)

  total = lambda x: sum(o.astype(jnp.float32).sum() for o in run(x))
  jax.eval_shape(jax.grad(total), x)


@pytest.mark.parametrize("promotion", ["strict", "standard"])
def test_gradient_in_bfloat16_under_each_promotion(promotion):
  """Compiled: JAX's own attention mixes dtypes where its gradient is lowered, not traced."""
  x = normal(0, 1, 5, 2, 4)
  loss = lambda x, impl="auto": (lajax.attention(x, x, x, impl=impl).astype(jnp.float32) ** 2).sum()
  with jax.numpy_dtype_promotion(promotion):
    got = quick_jit(jax.grad(loss))(jnp.asarray(x, jnp.bfloat16))
  want = quick_jit(jax.grad(functools.partial(loss, impl="recurrent")))(jnp.asarray(x, jnp.float32))
  assert relative_rms(got, want) < BUDGET["bfloat16"]["gradient"]


def test_eager_calls_compile_once(caplog):
  """A second eager call of the same shapes compiles nothing."""
  x = normal(0, 1, 7, 2, 4)
  index = np.broadcast_to(np.arange(7, dtype=np.int32), (1, 7))

  def call():
    attend(x, x, x, **dict.fromkeys(places(), index))
    lajax.attention(x, x, x, impl="chunked")
    lajax.attention(x, x, x)

  call()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    call()
  assert not [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
