"""Generation: tokens of the plain model, in any batch, piece and padding; options; compilations."""

import functools
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mesh_cases import report_of
from wrong_arguments import COUNTS, NUMBERS, accepted

import lajax
import lajax.layers as L
from lajax.models import RecallModel, complete, sample

pytestmark = pytest.mark.usefixtures("quick_compiles")

V, D, ROOM = 13, 8, 32
KEY = jax.random.key(3)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5], [9, 8, 7, 6]]


class Successor(nnx.Module):
  """Model that favours token + 1. Its state is the sum of the tokens it has read."""

  def __init__(self, vocab_size=V):
    self.vocab_size = vocab_size
    self.table = nnx.Param(4 * jnp.roll(jnp.eye(vocab_size), 1, axis=1))

  def __call__(self, tokens, state=None, *, segment_ids=None):
    state = self.init_state(tokens.shape[0]) if state is None else state
    real = jnp.where(segment_ids >= 0, tokens, 0)
    return self.table[...][tokens], [state[0] + real.sum(axis=1, dtype=jnp.int32)]

  def init_state(self, batch):
    return [jnp.zeros(batch, jnp.int32)]


@functools.cache
def hybrid(window=None, max_length=ROOM):
  """A recurrent layer and softmax attention with positions. Parameters large enough to differ."""
  layers = [
    functools.partial(L.GatedDeltaNet, D, 2, 4, conv_size=None, impl="recurrent"),
    functools.partial(
      L.SoftmaxAttention, D, 2, 4, rope_theta=100.0, max_length=max_length, window=window
    ),
  ]
  graph, p = nnx.split(nnx.eval_shape(lambda: RecallModel(V, D, layers, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(0)
  p = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), p)
  return nnx.merge(graph, p)


@functools.cache
def whole():
  """The model's logits of whole rows, in one call."""
  graph, p = nnx.split(hybrid())
  run = jax.jit(lambda p, tokens: nnx.merge(graph, p)(tokens)[0])
  return lambda tokens: np.asarray(run(p, tokens))


def rows_of_whole(prompts, tokens):
  """Logits [B max_tokens V] that the model gives in one call, before each new token."""
  found = []
  for prompt, new in zip(prompts, tokens, strict=True):
    row = np.zeros((1, ROOM), np.int32)
    n = len(prompt)
    row[0, : n + len(new)] = [*prompt, *new]
    found.append(whole()(row)[0, n - 1 : n - 1 + len(new)])
  return np.stack(found)


# --- the tokens are the model's ---

TEMPERATURES = np.array([0.0, 0.8, 1.5], np.float32)
OPTIONS = dict(temperature=TEMPERATURES, top_p=0.95, key=jax.random.split(KEY, 3), prefill_piece=4)


@functools.cache
def batch():
  """Three prompts in one batch, one greedy and two sampled."""
  return complete(hybrid(), PROMPTS, 12, **OPTIONS)


def test_tokens_and_log_probabilities_are_the_models():
  found = batch()
  logits = rows_of_whole(PROMPTS, found.tokens)
  np.testing.assert_array_equal(found.tokens[0], logits[0].argmax(-1))
  keys = jax.vmap(lambda k: jax.vmap(lambda t: jax.random.fold_in(k, t))(jnp.arange(12)))
  one = lambda k, x, t: sample(k, x, temperature=t, top_p=0.95)
  choose = jax.jit(lambda k, x, t: jax.vmap(jax.vmap(one, (0, 0, None)))(keys(k), x, t))
  want = choose(OPTIONS["key"], logits, TEMPERATURES)
  np.testing.assert_array_equal(found.tokens, want)
  log_p = jax.nn.log_softmax(logits)
  want = np.take_along_axis(np.asarray(log_p), found.tokens[..., None], axis=2)[..., 0]
  np.testing.assert_allclose(found.logprobs, want, atol=2e-4)  # logits of size 10 in float32
  assert len({*found.tokens[1]}) > 3


def test_rows_alone():
  """A prompt gives the same tokens alone as in a batch, greedy and sampled."""
  for n, prompt in enumerate(PROMPTS):
    options = OPTIONS | {"temperature": TEMPERATURES[n], "key": OPTIONS["key"][n : n + 1]}
    if not n:  # a greedy row compiles nothing of its own here
      options["temperature"] = TEMPERATURES[:1] + np.float32(1e-20)
    alone = lajax.generate(hybrid(), [prompt], 12, **options)
    np.testing.assert_array_equal(alone[0], batch().tokens[n])


@pytest.mark.slow
def test_another_piece_length():
  found = lajax.generate(hybrid(), PROMPTS, 12, **OPTIONS | {"prefill_piece": 7})
  np.testing.assert_array_equal(found, batch().tokens)


PADDING = {
  "right": lambda n, T: [True] * n + [False] * (T - n),
  "left": lambda n, T: [False] * (T - n) + [True] * n,
  "between": lambda n, T: [False, *[True] * (n - 1), *[False] * (T - n - 1), True],
}


@pytest.mark.parametrize("where", PADDING)
def test_padding(where):
  """Padding of arrays may stand anywhere, and may hold anything."""
  mask = np.array([PADDING[where](len(p), 12) for p in PROMPTS])
  prompt = np.full(mask.shape, V + 7)
  prompt[mask] = np.concatenate(PROMPTS)
  ids = lajax.segment_ids(mask=mask)
  found = lajax.generate(hybrid(), prompt, 12, segment_ids=ids, **OPTIONS)
  np.testing.assert_array_equal(found, batch().tokens)


def test_documents():
  """The new tokens continue the last document of their row, and see none before it."""
  prompt = np.array([[4, 4, *p, *p[:1] * (9 - len(p))] for p in PROMPTS])
  ids = np.array([[0, 0, *[1] * len(p), *[-1] * (9 - len(p))] for p in PROMPTS])
  found = complete(hybrid(), prompt, 12, segment_ids=ids, **OPTIONS)
  np.testing.assert_array_equal(found.tokens, batch().tokens)
  again = complete(hybrid(), found.tokens[:, -1:], 2, state=found.state, **OPTIONS)
  assert again.state[0].length.tolist() == [len(p) + 13 for p in PROMPTS]


@pytest.mark.parametrize("numpy", [False, True], ids=["jax", "numpy"])
def test_going_on_from_a_state(numpy):
  """Two calls give the tokens of one; a state can be used again."""
  options = OPTIONS | {"temperature": 1e-20}  # in effect 0, in the program of the tests above
  one = lajax.generate(hybrid(), PROMPTS, 12, **options)
  first = complete(hybrid(), PROMPTS, 5, **options)
  state = jax.device_get(first.state) if numpy else first.state
  for _ in range(2):
    second = lajax.generate(hybrid(), first.tokens[:, -1:], 7, state=state, **options)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second], axis=1), one)


# --- options ---


def test_stop_tokens():
  """A row ends with its stop token; the state has read all tokens but the last."""
  found = complete(Successor(), [[3], [7, 7]], 6, stop_tokens=[9, 11])
  assert found.tokens.tolist() == [[4, 5, 6, 7, 8, 9], [8, 9, -1, -1, -1, -1]]
  assert found.lengths.tolist() == [6, 2]
  assert found.stopped.tolist() == [True] * 2
  assert found.state[0].tolist() == [33, 22]
  assert (found.logprobs < 0).sum(axis=1).tolist() == [6, 2]
  found = complete(Successor(), [[3], [7, 7]], 3, stop_tokens={9})
  assert found.stopped.tolist() == [False, True]


def test_callback():
  """It gets every new token of the batch, until all rows have ended."""
  seen = []
  tokens = lajax.generate(
    Successor(), [[3], [7]], 100, stop_tokens=(9,), callback=lambda x: seen.append(x)
  )
  assert tokens.shape == (2, 100)
  np.testing.assert_array_equal(np.stack(seen, axis=1), tokens[:, :6])
  assert (tokens[:, 6:] == -1).all()


def test_more_tokens_than_a_block():
  tokens = lajax.generate(Successor(), [[0], [5]], 150, stop_tokens=[V])
  assert tokens.tolist() == [[n % V for n in range(k, k + 150)] for k in (1, 6)]


def test_token_depends_on_key_row_and_number_alone():
  """Not on the batch, nor on how many tokens the prompt or an earlier row has."""
  model = Successor()
  model.table[...] = jnp.zeros((V, V))
  options = dict(temperature=1.0, key=KEY)
  few = lajax.generate(model, [[1], [2, 3, 4]], 9, **options)
  np.testing.assert_array_equal(lajax.generate(model, [[8, 6], [3]], 5, **options), few[:, :5])
  assert len({tuple(row) for row in few}) == 2
  raw = jax.random.fold_in(jax.random.key_data(KEY), 1)  # a key of the old kind
  alone = lajax.generate(model, [[2]], 9, temperature=1.0, key=raw[None])
  np.testing.assert_array_equal(alone[0], few[1])


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=["nan", "minus inf"])
def test_logits_without_a_token(bad):
  model = Successor()
  model.table[...] = model.table[...].at[5].set(bad)
  for options in (dict(stop_tokens=[0]), dict(temperature=1e-9, key=KEY)):
    with pytest.raises(FloatingPointError, match=r"logits of row 1 hold NaN.* at new token 2"):
      lajax.generate(model, [[9], [3]], 4, **options)
  assert lajax.generate(model, [[9], [3]], 2, stop_tokens=[0]).tolist() == [[10, 11], [4, 5]]


# --- sampling ---

EQUAL = [1.0, 2.0, 2.0, 0.0, 2.0]
HALVES = np.log([0.5, 0.25, 0.125, 0.125])
SUPPORT = {  # logits, options, the tokens that can come
  "all": (EQUAL, {}, {0, 1, 2, 3, 4}),
  "greedy": (EQUAL, dict(temperature=0.0), {1}),
  "tiny temperature": (EQUAL, dict(temperature=1e-37), {1, 2, 4}),
  "top_k of equal logits": (EQUAL, dict(top_k=2), {1, 2}),
  "top_k of one": (EQUAL, dict(top_k=1), {1}),
  "top_k of all": (EQUAL, dict(top_k=5), {0, 1, 2, 3, 4}),
  "top_k of more": (EQUAL, dict(top_k=2**31 - 1), {0, 1, 2, 3, 4}),
  "top_p of one": (HALVES, dict(top_p=1.0), {0, 1, 2, 3}),
  "top_p met": (HALVES, dict(top_p=0.5), {0}),
  "top_p passed": (HALVES, dict(top_p=0.5001), {0, 1}),
  "top_p of equal logits": (HALVES, dict(top_p=0.8), {0, 1, 2}),
  "tiny top_p": (HALVES, dict(top_p=1e-30), {0}),
  "top_p after top_k": (HALVES, dict(top_k=2, top_p=0.6), {0}),
  "top_p after temperature": (HALVES, dict(temperature=100.0, top_p=0.5), {0, 1}),
  "min_p of zero": (HALVES, dict(min_p=0.0), {0, 1, 2, 3}),
  "min_p passed": (HALVES, dict(min_p=0.3), {0, 1}),
  "min_p of one": (EQUAL, dict(min_p=1.0), {1, 2, 4}),
  "all three": (HALVES, dict(top_k=3, top_p=0.9, min_p=0.4), {0, 1}),
  "one possible": ([-np.inf, 0.0, -np.inf], dict(top_k=3, top_p=1.0), {1}),
  "all mass on one": ([0.0, 1e4, 0.0], dict(top_p=1.0), {1}),
  "infinite": ([np.inf, 3.0, np.inf], {}, {0, 2}),
  "infinite, greedy": ([0.0, np.inf, np.inf], dict(temperature=0.0), {1}),
  "nan": ([0.0, np.nan, 5.0], dict(top_k=1), {-1}),
  "nan, greedy": ([0.0, np.nan, 5.0], dict(temperature=0.0), {-1}),
  "none possible": ([-np.inf, -np.inf], dict(min_p=0.5), {-1}),
  "huge": ([3e38, -3e38, 3e38], dict(temperature=1e-3), {0, 2}),
}
NEUTRAL = dict(temperature=1.0, top_k=2**31 - 1, top_p=1.0, min_p=0.0)


@jax.jit
def draw(keys, logits, options):
  """One program for all options, as they are traced."""
  rows = lambda key: jax.vmap(lambda x, o: sample(key, x, **o))(logits, options)
  return jax.vmap(rows, out_axes=1)(keys)


def test_support():
  """All cases in one call: which tokens come in 500 draws."""
  logits = np.full((len(SUPPORT), 5), -np.inf, np.float32)
  for row, (given, _, _) in zip(logits, SUPPORT.values(), strict=True):
    row[: len(given)] = given
  every = [NEUTRAL | options for _, options, _ in SUPPORT.values()]
  options = {name: np.array([o[name] for o in every]) for name in NEUTRAL}
  options = {
    n: x.astype(np.int32 if x.dtype == np.int64 else np.float32) for n, x in options.items()
  }
  drawn = np.asarray(draw(jax.random.split(KEY, 500), logits, options))
  found = {name: set(row.tolist()) for name, row in zip(SUPPORT, drawn, strict=True)}
  assert found == {name: want for name, (_, _, want) in SUPPORT.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frequencies(dtype):
  """Those of softmax(logits / temperature), restricted and renormalised; top_k, not traced."""
  logits = jnp.array([0.0, 1.0, 2.0, 0.5], dtype)
  options = dict(temperature=2.0, top_k=3)
  tokens = jax.jit(jax.vmap(lambda key: sample(key, logits, **options)))(
    jax.random.split(KEY, 4000)
  )
  p = np.exp(np.array([-np.inf, 1.0, 2.0, 0.5]) / 2)
  # 4 standard deviations of 4000 draws
  np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, p / p.sum(), atol=0.032)


def test_one_row_by_hand():
  """Options that are None, and Python numbers, under strict promotion."""
  logits = np.array([0.0, 3.0, 1.0], np.float32)
  assert sample(None, logits) == 1
  assert jax.jit(lambda: sample(KEY, logits, temperature=0.5, top_k=1))() == 1
  with pytest.raises(ValueError, match="`key` must be a JAX random key"):
    sample(None, logits, temperature=1.0)
  with pytest.raises(ValueError, match=r"`logits` must be \[V\]"):
    sample(KEY, logits[None])


# --- compilations ---


def compiled(caplog, call):
  """Names of what a call compiles."""
  caplog.clear()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    call()
  texts = [record.getMessage() for record in caplog.records]
  return [text.split()[1] for text in texts if text.startswith("Compiling")]


def test_compilations(caplog):
  """One per function, batch and piece; other values, lengths and an equal model compile nothing."""
  model, others = Successor(11), Successor(11)
  options = dict(temperature=0.5, top_k=3, key=KEY, prefill_piece=8, stop_tokens=[1])
  run = lambda prompts, n, model=model, **o: lajax.generate(model, prompts, n, **options | o)
  first = compiled(caplog, lambda: run([[1, 2], [3]], 4))
  # Keys of two rows may have been drawn by an earlier test.
  assert sorted(set(first) - {"jit(_fold_rows)"}) == ["jit(_begin)", "jit(_decode)", "jit(prefill)"]
  for call in (
    lambda: run([[1, 2], [3]], 4),
    lambda: run([[1] * 30, [2] * 7], 90, model=others, callback=lambda tokens: None),
    lambda: run([[4], [5]], 1, temperature=np.array([0.0, 2.0]), top_k=9, stop_tokens=[2, 3]),
  ):
    assert compiled(caplog, call) == []
  again = compiled(caplog, lambda: run([[1, 2], [3]], 4, prefill_piece=5))
  assert again == ["jit(prefill)"]


# --- room in the caches ---


def test_room():
  """A document that outgrows a cache is refused before anything is computed."""
  with pytest.raises(ValueError, match="caches of 32 tokens; got a document of 33 tokens"):
    complete(hybrid(), PROMPTS, 25)
  found = complete(hybrid(), PROMPTS, 24, **OPTIONS)
  assert found.state[1].length.tolist() == [32, 24, 27]
  with pytest.raises(ValueError, match="got a document of 33 tokens"):
    complete(hybrid(), found.tokens[:, -1:], 1, state=found.state)
  ids = np.ones((3, 1), np.int32)  # a new document has room
  complete(hybrid(), found.tokens[:, -1:], 32, state=found.state, segment_ids=ids, **OPTIONS)


class RoomFound(Exception):
  """Raised in place of the first computation."""


@pytest.mark.parametrize("case", ["window", "larger state"])
def test_any_length_fits(case, monkeypatch):
  """A ring of a window never overflows; a state may have more room than the layer's own."""

  def begin(*_):
    raise RoomFound

  monkeypatch.setattr(sys.modules["lajax.models.generate"], "_begin", begin)
  model = hybrid(window=5) if case == "window" else hybrid()
  state = None
  if case == "larger state":
    state = [layer.init_state(1) for layer in model.layers]
    state[1] = model.layers[1].init_state(1, max_length=100)
  with pytest.raises(RoomFound):
    lajax.generate(model, [[1, 2]], 99, state=state)


# --- meshes ---


def on_mesh(count: int, model, kind=AxisType.Explicit) -> list[str]:
  """Says what differs on a mesh from no mesh; on explicit axes the state is laid out as the rows."""
  mesh = jax.make_mesh((count,), ("devices",), axis_types=(kind,))
  prompt = np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
  options = dict(temperature=0.9, key=KEY, prefill_piece=4)
  want = complete(model, prompt, 8, **options).tokens
  sharded = jax.device_put(prompt, NamedSharding(mesh, PartitionSpec("devices")))
  found = complete(model, sharded, 8, **options)
  wrong = [] if (found.tokens == want).all() else [f"{found.tokens} for {want}"]
  specs = {tuple(jax.typeof(x).sharding.spec)[:1] for x in jax.tree.leaves(found.state)}
  wrong += (
    []
    if specs == {("devices",)} or kind == AxisType.Auto
    else [f"the state is laid out as {specs}"]
  )
  again = complete(model, sharded[:, :1], 3, state=found.state, **options)
  wrong += [] if (again.tokens >= 0).all() else ["the second call fails"]
  graph, p = nnx.split(model)
  replicated = jax.device_put(p, NamedSharding(mesh, PartitionSpec()))
  found = complete(nnx.merge(graph, replicated), prompt, 8, **options)
  return wrong + ([] if (found.tokens == want).all() else ["parameters on a mesh"])


def test_explicit_mesh_of_one_device():
  assert on_mesh(1, Successor()) == []


def report() -> dict[str, list[str]]:
  return {kind.name: on_mesh(2, hybrid(), kind) for kind in (AxisType.Explicit,)}


@pytest.mark.slow
def test_two_devices():
  assert report_of("test_generate") == {"Explicit": []}


# --- wrong arguments ---

SINGLE = {kind: x for kind, x in NUMBERS.items() if kind != "array"}
RIGHT = dict(model=Successor(), prompt=[[1, 2], [3]], max_tokens=2, key=KEY, temperature=1.0)
WRONG = {
  "model": {"none": None, "text": "x", "function": lambda x: x, "layer": nnx.Linear},
  "prompt": {
    "none": None,
    "text": "hello",
    "number": 3,
    "one list": [1, 2],
    "floats": [[1.0, 2.0]],
    "ragged": [[1, [2, 3]]],
    "text in a list": ["ab"],
    "no rows": [],
    "empty row": [[1], []],
    "rank": np.ones(3, int),
    "dtype": np.ones((2, 3)),
    "bool": np.ones((2, 3), bool),
    "negative": [[1, -1]],
    "not in the vocabulary": np.array([[1, V]]),
    "no tokens": np.ones((2, 0), int),
  },
  "max_tokens": COUNTS,
  "prefill_piece": COUNTS,
  "segment_ids": {
    "with lists": np.zeros((2, 2), int),
    "text": "x",
  },
  "temperature": SINGLE | {"negative": -1.0, "shape": np.ones(3), "in a row": np.array([1, -1.0])},
  "top_k": {k: x for k, x in COUNTS.items() if k not in ("none", "array")} | {"shape": np.ones(3, int)},
  "top_p": {k: x for k, x in SINGLE.items() if k != "none"} | {"zero": 0.0, "above 1": 1.1},
  "min_p": {k: x for k, x in SINGLE.items() if k != "none"} | {"negative": -0.1, "above 1": 1.1},
  "stop_tokens": {"none": None, "number": 3, "text": "x", "negative": [-1], "floats": [1.0], "rank": np.ones((2, 2), int)},
  "key": {"none": None, "number": 0, "text": "x", "three keys": jax.random.split(KEY, 3), "floats": np.ones(2)},
  "callback": {"number": 3, "text": "print"},
  "state": {"text": "x", "number": 3, "empty": [], "too many": [jnp.zeros(2, int)] * 2},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
  """Each is refused by one sentence that names it; nothing is compiled before."""
  assert accepted(complete, RIGHT, name, WRONG[name]) == []


def test_wrong_segment_ids():
  right = RIGHT | {"prompt": np.ones((2, 3), int)}
  wrong = {
    "shape": np.zeros((2, 2), int),
    "dtype": np.zeros((2, 3)),
    "mask": np.ones((2, 3), bool),
    "large": np.full((2, 3), 2**40),
  }
  assert accepted(complete, right, "segment_ids", wrong) == []
  with pytest.raises(ValueError, match="`prompt` must have at least one token in each row"):
    complete(**right, segment_ids=np.array([[0, 0, 0], [-1, -1, -1]]))


def test_traced_arguments():
  for name in ("prompt", "temperature"):
    right = RIGHT | {"prompt": jnp.ones((2, 3), int)}
    call = lambda x, name=name, right=right: lajax.generate(**right | {name: x})
    with pytest.raises(ValueError, match=f"`{name}` must .* got a traced array"):
      jax.jit(call)(jnp.asarray(right[name]))


def test_a_state_of_another_batch_is_refused():
  with pytest.raises(ValueError, match="`state"):
    complete(hybrid(), [[1]], 2, state=hybrid().init_state(2))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_x64():
  """Where JAX's defaults have 64 bits, and so do the logits."""
  model = Successor()
  model.table[...] = model.table[...].astype(jnp.float64)
  options = dict(temperature=0.01, stop_tokens=[9], top_k=2, top_p=0.9, min_p=0.1, key=KEY)
  assert lajax.generate(model, [[3], [8]], 3, **options).tolist() == [[4, 5, 6], [9, -1, -1]]


def test_names():
  assert lajax.generate is lajax.models.generate
  assert "generate" in dir(lajax)
