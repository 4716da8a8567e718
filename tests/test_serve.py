"""Laws of the engine: each request gets the tokens that it gets alone, whatever else happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve_cases as cases
from serve_cases import Asked, alone, asked, check_alone
from wrong_arguments import COUNTS, NUMBERS, accepted

import lajax
from lajax.serve import Engine, Handle

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODELS = sorted(cases.MAKE)
SLOW = [pytest.mark.slow]  # compiles anew
HELLO = [5, 3, 8, 1, 9, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_requests_get_the_tokens_they_get_alone(name):
  """Random lengths, arrivals and options; every tenth request is cancelled at a random step."""
  rng = np.random.default_rng(1)
  engine = cases.engine(name, slots=6, max_length=32, page_size=16, prefill_piece=8)
  pairs, cancelled = [], []
  for n in range(200):
    request = asked(rng, longest=20, most=13)
    pairs.append((engine.submit(request.prompt, **request.options), request))
    if n % 10 == 3:
      cancelled.append(pairs[-1][0])
    for _ in range(rng.integers(0, 6)):
      engine.step()
      if cancelled and rng.random() < 0.2:
        cancelled.pop().cancel()
  engine.run()
  for handle, request in pairs:
    check_alone(handle, cases.model(name), request)
  reasons = {handle.finish_reason for handle, _ in pairs}
  assert reasons == {"stop", "length", "cancelled"}
  stats = engine.stats()
  assert stats.free_slots == 6
  assert stats.free_pages == stats.pages == (12 if name == "hybrid" else 0)


@pytest.mark.slow
def test_streams_interleave():
  """Iteration yields tokens as they come, and works for the other requests meanwhile."""
  engine = cases.engine("hybrid")
  requests = [Asked(HELLO[:3], {"max_tokens": 5}), Asked(HELLO * 2, {"max_tokens": 4})]
  first, second = (engine.submit(r.prompt, **r.options) for r in requests)
  seen = []
  for token in first:
    seen.append((token, len(second.tokens)))
  assert [token for token, _ in seen] == alone(cases.model("hybrid"), requests[0])[0]
  assert [count for _, count in seen] == [0, 0, 0, 1, 2]  # three pieces, then a token per step
  assert second.result() == alone(cases.model("hybrid"), requests[1])[0]
  assert engine.is_idle


def poison(engine: Engine) -> None:
  """Writes NaN to all slots and pages that no request holds."""
  free_pages = [n for n in range(engine._sizes.pages) if not engine._memory.pages.holders(n)]
  axes = zip(engine._layout.batch, engine._layout.places, engine._memory.pool, strict=True)
  pool = []
  for batch, places, x in axes:
    rows = engine._memory.slots.free if places < 0 else free_pages
    bad = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 10**6
    pool.append(x.at[(slice(None),) * batch + (np.array(rows, int),)].set(jnp.array(bad, x.dtype)))
  engine._memory.pool = pool


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_leftovers_reach_nobody(name):
  """Slots and pages that are free hold NaN, before a request comes and beside running ones."""
  rng = np.random.default_rng(2)
  engine = cases.engine(name)
  poison(engine)
  pairs = []
  for _ in range(6):
    request = asked(rng)
    pairs.append((engine.submit(request.prompt, **request.options), request))
    engine.step()
    poison(engine)
  while engine.step():
    poison(engine)
  for handle, request in pairs:
    check_alone(handle, cases.model(name), request)


def submitted(engine: Engine, request: Asked) -> Handle:
  """A request, which the engine has ended."""
  handle = engine.submit(request.prompt, **request.options)
  handle.result()
  return handle


def with_pages(engine: Engine, count: int) -> Engine:
  """The engine with so many free pages; an engine of fewer pages would compile anew."""
  engine._memory.pages.take(engine._memory.pages.free - count)
  return engine


# --- known prefixes ---


@pytest.mark.parametrize(
  ("name", "page_size"),
  [
    ("hybrid", 8),
    *(pytest.param(*case, marks=SLOW) for case in (("linear", 8), ("hybrid", 4), ("window", 8))),
  ],
)
def test_a_known_prefix_changes_no_token(name, page_size):
  """A page of 8 tokens is partly filled where a piece of 4 ends, and copied; one of 4 is not."""
  engine = cases.engine(name, cache_bytes=10**6, page_size=page_size)
  rng = np.random.default_rng(3)
  shared = rng.integers(0, cases.V, 9).tolist()
  requests = []
  for n in range(12):
    request = asked(rng, longest=2)
    requests.append(request._replace(prompt=shared[: (9, 8, 7, 5)[n % 4]] + request.prompt))
  pairs = [(engine.submit(r.prompt, **r.options), r) for r in requests]
  engine.run()
  for handle, request in pairs:
    check_alone(handle, cases.model(name), request)
  stats = engine.stats()
  assert stats.admitted == 12
  assert stats.hits == 11
  assert stats.hit_rate == 11 / 12
  assert stats.reused_tokens >= 11 * 4
  assert 0 < stats.cache_bytes <= 10**6


def test_the_longest_prefix_is_reused_and_one_token_is_left():
  engine = cases.engine("hybrid", cache_bytes=10**6)
  prompt = HELLO * 2  # 12 tokens: pieces end at 4 and 8; the one at 12 would leave no token
  reused = []
  for text in (prompt, prompt, [*prompt, 1], [*prompt, 1], prompt[:8], prompt[:9], prompt[1:]):
    before = engine.stats().reused_tokens
    engine.submit(text, max_tokens=1).result()
    reused.append(engine.stats().reused_tokens - before)
  assert reused == [0, 8, 8, 12, 4, 8, 0]


def test_prefixes_keep_to_their_budget():
  """The least recently used ones go first; pages that requests need are given up."""
  engine = with_pages(cases.engine("hybrid", cache_bytes=10**6), 4)
  texts = [[n] * 9 for n in range(5)]  # two pages, and one and a half of prefixes
  for text in texts:
    engine.submit(text, max_tokens=2).result()
  known = [engine._memory.cache.longest(text).length for text in texts]
  assert known == [0, 0, 0, 4, 8]  # the longer prefix gives up its page first
  stats = engine.stats()
  assert stats.prefixes == 3
  assert stats.free_pages == 1  # half a page of the last prefix is a copy
  with_pages(engine, 0)  # now the last prefix stands in its own way
  request = Asked(texts[4] + [0] * 2, {"max_tokens": 6})
  check_alone(submitted(engine, request), cases.model("hybrid"), request)
  small = cases.engine("hybrid", cache_bytes=5000)
  for text in texts * 2:
    small.submit(text, max_tokens=2).result()
  assert 0 < small.stats().cache_bytes <= 5000
  none = cases.engine("hybrid", cache_bytes=100)  # less than one state
  none.submit(texts[0], max_tokens=2).result()
  assert none.stats().cache_bytes == none.stats().prefixes == 0


# --- overload ---


def test_more_requests_than_slots_queue_in_order():
  engine = cases.engine("hybrid")
  handles = [engine.submit([n + 1], max_tokens=3) for n in range(10)]
  assert engine.stats().queued == 10
  counts = []
  while engine.step():
    counts.append([len(handle.tokens) for handle in handles])
  assert counts[0] == [1] * 4 + [0] * 6
  assert counts[2] == [3] * 4 + [0] * 6
  assert counts[3] == [3] * 4 + [1] * 4 + [0] * 2
  assert len(counts) == 8


def test_requests_wait_for_pages_in_order():
  """A small request does not overtake a large one."""
  engine = with_pages(cases.engine("hybrid"), 3)
  large = [engine.submit([n] * 9, max_tokens=5) for n in range(3)]  # two of three pages each
  small = engine.submit([1], max_tokens=1)
  engine.step()
  assert engine.stats().queued == 3
  assert engine.stats().free_slots == 3
  small.result()
  assert [h.finish_reason for h in large[:2]] == ["length"] * 2
  engine.run()
  for n, handle in enumerate(large):
    check_alone(handle, cases.model("hybrid"), Asked([n] * 9, {"max_tokens": 5}))


def test_a_request_that_can_never_fit_is_refused():
  with pytest.raises(ValueError, match=r"max_length = 16 tokens; got 14 \+ 4 - 1 = 17"):
    cases.engine("hybrid").submit([1] * 14, max_tokens=4)
  with pytest.raises(ValueError, match=r"the engine's 1 pages of 8 tokens; got 7 \+ 3 - 1 = 9"):
    cases.engine("hybrid", pages=1).submit([1] * 7, max_tokens=3)
  handle = cases.engine("hybrid").submit([1] * 14, max_tokens=3)
  assert handle.result() == alone(cases.model("hybrid"), Asked([1] * 14, {"max_tokens": 3}))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "window"])
def test_without_pages_there_is_no_limit(name):
  request = Asked([1] * 40, {"max_tokens": 3})
  check_alone(submitted(cases.engine(name), request), cases.model(name), request)


def test_cancel():
  """Wherever a request is: in the queue, in its prompt, between tokens, in a callback, over."""
  engine = cases.engine("hybrid")
  others = [engine.submit([n], max_tokens=12) for n in range(3)]
  reading, queued = (engine.submit(HELLO * 2, max_tokens=3) for _ in range(2))
  engine.step()
  queued.cancel()
  reading.cancel()
  stopping = engine.submit(HELLO, max_tokens=9, callback=lambda _: stopping.cancel())
  last = engine.submit(HELLO, max_tokens=3)
  engine.run()
  last.cancel()
  handles = (reading, queued, stopping, last)
  assert [h.finish_reason for h in handles] == ["cancelled"] * 3 + ["length"]
  assert [len(h.tokens) for h in handles] == [0, 0, 1, 3]
  assert stopping.tokens == last.tokens[:1]
  assert stopping.result() == stopping.tokens
  assert engine.stats().free_slots == 4
  assert "cancelled" in repr(queued)
  for n, handle in enumerate(others):
    check_alone(handle, cases.model("hybrid"), Asked([n], {"max_tokens": 12}))


@pytest.mark.slow
def test_memory_does_not_grow():
  """After 1,000 requests as after 10, with known prefixes that come and go."""
  rng = np.random.default_rng(4)
  engine = cases.engine("hybrid", cache_bytes=20_000)
  submit = lambda: engine.submit(rng.integers(0, 3, rng.integers(1, 12)).tolist(), max_tokens=2)
  size = lambda: sum(x.nbytes for x in jax.live_arrays()) - engine._memory.cache.state_bytes
  for _ in range(10):
    submit()
  engine.run()
  before = size()
  for _ in range(990):
    submit()
    engine.step()
  engine.run()
  stats = engine.stats()
  assert size() == before
  assert 0 < stats.cache_bytes <= 20_000
  assert not engine._unfinished
  assert not engine._news
  assert len(engine._memory.cache._held) == stats.pages - stats.free_pages


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype):
  """The pool has the dtypes that calls keep."""
  with jax.enable_x64(dtype == "float64"):
    model = cases.model("hybrid", dtype=dtype)
    engine = Engine(model, **cases.SIZES)
    before = [x.dtype for x in engine._memory.pool]
    request = Asked(HELLO[:3], {"max_tokens": 5})
    handle = engine.submit(request.prompt, **request.options)
    assert handle.result() == alone(model, request)[0]
    assert [x.dtype for x in engine._memory.pool] == before
    assert jnp.dtype(dtype) in before


# --- wrong arguments ---

SINGLE = {kind: x for kind, x in NUMBERS.items() if kind not in ("none", "array")}
WRONG_ENGINE = {
  "model": {"none": None, "text": "x", "function": lambda x: x},
  "slots": COUNTS,
  "prefill_piece": COUNTS,
  "max_length": COUNTS,
  "page_size": COUNTS,
  "pages": {k: x for k, x in COUNTS.items() if k != "none"},
  "cache_bytes": {"none": None, "negative": -1, "text": "x", "float": 1.5},
}
RIGHT = dict(prompt=[1, 2], max_tokens=2, key=jax.random.key(0), temperature=1.0)
WRONG_REQUEST = {
  "prompt": {"none": None, "text": "x", "empty": [], "nested": [[1]], "floats": [1.0], "vocabulary": [17], "negative": [-1]},
  "max_tokens": COUNTS,
  "temperature": SINGLE | {"negative": -1.0},
  "top_k": {k: x for k, x in COUNTS.items() if k != "none"},
  "top_p": SINGLE | {"zero": 0.0},
  "min_p": SINGLE | {"negative": -0.1},
  "stop_tokens": {"none": None, "number": 3, "text": "x"},
  "key": {"none": None, "number": 0, "text": "x", "two keys": jax.random.split(jax.random.key(0))},
  "callback": {"number": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ENGINE)
def test_wrong_arguments_of_an_engine(name):
  right = dict(model=cases.model("hybrid"), **cases.SIZES)
  assert accepted(Engine, right, name, WRONG_ENGINE[name]) == []


@pytest.mark.parametrize("name", WRONG_REQUEST)
def test_wrong_arguments_of_a_request(name):
  assert accepted(cases.engine("linear").submit, RIGHT, name, WRONG_REQUEST[name]) == []


def test_a_key_of_another_kind_is_refused():
  key = jax.random.key(0, impl="rbg")
  with pytest.raises(ValueError, match="`key` must be of JAX's default kind"):
    cases.engine("linear").submit([1], max_tokens=1, temperature=1.0, key=key)


def test_names():
  assert "serve" in dir(lajax)
  assert lajax.serve.Engine is Engine
