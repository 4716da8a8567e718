"""Drafts: whatever they guess, the tokens are those without one; right guesses save calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve_cases as cases
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import stats
from serve_cases import Asked, Markov, alone
from wrong_arguments import accepted

import lajax
from lajax.models import complete, generate

pytestmark = pytest.mark.usefixtures("quick_compiles")

PROMPTS = [[1, 2, 3, 4, 5, 6], [5], [9, 8, 7]]
OPTIONS = {
  "greedy": {},
  "sampled": {"temperature": np.array([0.0, 0.8, 1.5], np.float32), "top_p": 0.9, "stop_tokens": [3, 7], "key": jax.random.key(3)},
}  # fmt: skip


@functools.cache
def plain(name: str, kind: str):
  return complete(cases.model(name), PROMPTS, 10, prefill_piece=4, **OPTIONS[kind])


def oracle(name: str, kind: str):
  """A function that guesses the model's own tokens, now and then a wrong one, and at times none."""
  texts = [
    prompt + row[row >= 0].tolist()
    for prompt, row in zip(PROMPTS, plain(name, kind).tokens, strict=True)
  ]

  def guess(text: list[int]) -> list[int]:
    whole = next(t for t in texts if t[: len(text)] == text)
    guesses = whole[len(text) : len(text) + len(text) % 5]
    if len(text) % 3 == 0 and guesses:
      guesses[-1] = (guesses[-1] + 1) % cases.V
    return guesses

  return guess


DRAFTS = {
  "itself": lambda name, kind: cases.model(name),
  "another": lambda name, kind: cases.model("linear", seed=1),
  "oracle": oracle,
  "nothing": lambda name, kind: lambda text: [],
  "wrong": lambda name, kind: lambda text: np.array([0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize(
  ("name", "kind", "draft"),
  [
    ("hybrid", "sampled", "oracle"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ("hybrid", "greedy", "itself"),
        ("hybrid", "sampled", "another"),
        ("linear", "greedy", "another"),
        ("linear", "sampled", "wrong"),
        ("window", "greedy", "nothing"),
        ("window", "sampled", "itself"),
      )
    ),
  ],
)
def test_a_draft_changes_no_token(name, kind, draft):
  """Tokens, log-probabilities, stops and the state after them."""
  want = plain(name, kind)
  options = OPTIONS[kind] | {"prefill_piece": 4, "draft_tokens": 3}
  found = complete(cases.model(name), PROMPTS, 10, draft=DRAFTS[draft](name, kind), **options)
  np.testing.assert_array_equal(found.tokens, want.tokens)
  np.testing.assert_array_equal(found.lengths, want.lengths)
  np.testing.assert_array_equal(found.stopped, want.stopped)
  # logits of size 10 to 100 in float32
  np.testing.assert_allclose(found.logprobs, want.logprobs, atol=1e-3)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3)
  jax.tree.map(close, found.state, want.state)


@pytest.fixture
def calls(monkeypatch):
  """The tokens that each call of verification chose, [calls, B]."""
  counts, whole = [], generate.__globals__["verify_rows"]

  def verify(*arguments):
    state, found = whole(*arguments)
    counts.append(np.asarray(found.count).tolist())
    return state, found

  monkeypatch.setitem(generate.__globals__, "verify_rows", verify)
  return counts


@pytest.mark.slow
def test_right_guesses_save_calls(calls):
  """Rows accept different numbers; a model that drafts for itself is always right."""
  options = OPTIONS["greedy"] | {"prefill_piece": 4, "draft_tokens": 3}
  complete(cases.model("hybrid"), PROMPTS, 10, draft=cases.model("hybrid"), **options)
  assert calls == [[4, 4, 4], [4, 4, 4], [2, 2, 2]]
  calls.clear()
  complete(cases.model("hybrid"), PROMPTS, 10, draft=oracle("hybrid", "greedy"), **options)
  assert len({tuple(row) for row in np.transpose(calls).tolist()}) > 1
  assert 3 < len(calls) < 10


@pytest.mark.slow
def test_callback():
  """Gets whole columns, though rows accept different numbers of tokens."""
  columns = []
  options = OPTIONS["sampled"] | {"prefill_piece": 4, "draft_tokens": 3, "callback": columns.append}
  complete(cases.model("hybrid"), PROMPTS, 10, draft=oracle("hybrid", "sampled"), **options)
  want = plain("hybrid", "sampled")
  np.testing.assert_array_equal(np.stack(columns, axis=1), want.tokens[:, : want.lengths.max()])


B, TEMPERATURE = 5000, 0.7


@functools.cache
def two_models():
  rng = np.random.default_rng(6)
  return tuple(Markov(rng.normal(size=(4, 4))) for _ in range(2))


def probabilities(model: Markov) -> np.ndarray:
  """Of the next token, by the last one."""
  x = np.exp(np.asarray(model.table[...], np.float64) / TEMPERATURE)
  return x / x.sum(axis=1, keepdims=True)


def drawn() -> np.ndarray:
  """Three tokens of one model behind token 1, drafted by the other."""
  target, draft = two_models()
  options = {"temperature": TEMPERATURE, "key": jax.random.key(8), "draft_tokens": 2}
  return lajax.generate(target, np.ones((B, 1), int), 3, draft=draft, **options)


def test_distribution(calls):
  """Chi-square of three tokens of 5,000 rows against the model's own probabilities."""
  observed = np.zeros((4, 4, 4))
  np.add.at(observed, tuple(drawn().T), 1)
  for model, is_right in zip(two_models(), (True, False), strict=True):
    p = probabilities(model)
    want = (p[1][:, None, None] * p[:, :, None] * p[None]).ravel() * B
    rare = want < 5  # counted as one
    grouped = lambda x, rare=rare: np.append(x[~rare], x[rare].sum())
    pvalue = stats.chisquare(grouped(observed.ravel()), grouped(want)).pvalue
    assert pvalue > 0.01 if is_right else pvalue < 1e-9
  # Two models agree at least with probability (1 - d) / (1 + d), d the total variation.
  p, q = (probabilities(model)[1] for model in two_models())
  d = 0.5 * np.abs(p - q).sum()
  agreed = (np.array(calls[0]) > 1).mean()
  assert (1 - d) / (1 + d) - 3 / np.sqrt(B) < agreed < 1 - d + 3 / np.sqrt(B)


def test_nan_behind_a_draft():
  """Guesses are accepted up to the token behind which the logits are NaN; then it is an error."""
  table = 20 * np.roll(np.eye(9), 1, axis=1)
  table[5] = np.nan
  draft = lambda text: [text[-1] + 1, text[-1] + 2]
  with pytest.raises(FloatingPointError, match="row 1 hold NaN, or -inf alone, at new token 2"):
    lajax.generate(Markov(table), [[0], [3]], 3, draft=draft)
  assert lajax.generate(Markov(table), [[0], [2]], 3, draft=draft).tolist() == [
    [1, 2, 3],
    [3, 4, 5],
  ]


# --- an engine ---


@pytest.mark.parametrize("kind", ["greedy", pytest.param("sampled", marks=pytest.mark.slow)])
def test_verify(kind):
  """One call of an engine, beside another request, gives the tokens of steps."""
  engine, model = cases.engine("hybrid"), cases.model("hybrid")
  options = {"max_tokens": 10, "stop_tokens": [3]}
  if kind == "sampled":
    options |= {"temperature": 0.8, "key": jax.random.key(5), "top_p": 0.9}
  request = Asked([1, 2, 3, 4, 5, 6], options)
  other = Asked([7, 7], {"max_tokens": 8})
  want = alone(model, request)[0]
  assert len(want) == 10
  handle, beside = (engine.submit(r.prompt, **r.options) for r in (request, other))
  with pytest.raises(ValueError, match=r"`handle` must be a running request .* Handle\(6 \+ 0"):
    engine.verify(handle, [])
  while not handle.tokens:
    engine.step()
  assert engine.verify(handle, want[1:4]) == want[1:5]
  assert engine.verify(handle, [(want[5] + 1) % cases.V] * 2) == want[5:6]
  engine.step()
  assert handle.tokens == want[:7]
  wrong = (want[8] + 1) % cases.V
  assert engine.verify(handle, [want[7], wrong, want[9]]) == want[7:9]
  assert engine.verify(handle, [*want[9:], 1, 2]) == want[9:]
  assert handle.finish_reason == "length"
  np.testing.assert_allclose(handle.logprobs, alone(model, request)[1], atol=1e-3)
  assert beside.result() == alone(model, other)[0]
  with pytest.raises(ValueError, match="`handle` must be a running request"):
    engine.verify(handle, [1])
  with pytest.raises(ValueError, match="`draft` must give tokens from 0 to 16; got 17"):
    engine.verify(beside, [17])


# --- arguments ---


def on_mesh(count: int) -> list[str]:
  """What differs between one device and parameters on an explicit mesh, with a draft model."""
  rng = np.random.default_rng(9)
  target, draft = (Markov(rng.normal(size=(4, 4))) for _ in range(2))
  mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Explicit,))
  lay = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
  meshed = [nnx.merge(graph, lay(p)) for graph, p in map(nnx.split, (target, draft))]
  options = {"temperature": 0.7, "key": jax.random.key(1), "draft_tokens": 2}
  prompt = jnp.ones((2, 3), int)
  want = lajax.generate(target, prompt, 5, draft=draft, **options)
  found = lajax.generate(meshed[0], prompt, 5, draft=meshed[1], **options)
  return [] if (found == want).all() else ["tokens"]


def test_explicit_mesh_of_one_device():
  assert on_mesh(1) == []


RIGHT = dict(model=Markov(np.eye(4)), prompt=[[1, 2], [3]], max_tokens=4)


def test_wrong_drafts():
  wrong = {
    "text": "x",
    "number": 3,
    "class": Markov,
    "layer": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    "vocabulary": Markov(np.eye(5)),
    "gives text": lambda text: "x",
    "gives floats": lambda text: [1.0],
    "gives lists": lambda text: [[1]],
    "gives no token": lambda text: [-1],
    "gives a token too large": lambda text: [4],
    "gives none": lambda text: None,
    "gives a number": lambda text: 3,
  }
  assert accepted(complete, RIGHT, "draft", wrong) == []
  counts = {"none": None, "zero": 0, "text": "x", "float": 1.5}
  assert accepted(complete, RIGHT | {"draft": lambda text: []}, "draft_tokens", counts) == []
