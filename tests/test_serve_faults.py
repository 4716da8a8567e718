"""Faults of an engine: an error ends one request, an interrupt ends none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve_cases as cases
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from serve_cases import Asked, Markov, asked, check_alone

import lajax.serve.pool
from lajax.serve import Engine

pytestmark = pytest.mark.usefixtures("quick_compiles")


def submit_all(engine: Engine, requests: list[Asked]) -> list:
  return [engine.submit(r.prompt, **r.options) for r in requests]


def check_all(handles, requests) -> None:
  for handle, request in zip(handles, requests, strict=True):
    check_alone(handle, cases.model("hybrid"), request)


def some(count: int) -> list[Asked]:
  rng = np.random.default_rng(5)
  return [asked(rng) for _ in range(count)]


def test_a_callback_that_raises_ends_its_own_request():
  engine, requests = cases.engine("hybrid"), some(5)
  fault = RuntimeError("no more")

  def fail(token: int) -> None:
    if len(handle.tokens) == 2:
      raise fault

  handle = engine.submit([1, 2, 3], max_tokens=8, callback=fail)
  handles = submit_all(engine, requests)
  engine.run()
  assert handle.finish_reason == "error"
  assert handle.error is fault
  assert len(handle.tokens) == 2
  with pytest.raises(RuntimeError, match="no more"):
    handle.result()
  check_all(handles, requests)
  assert engine.stats().free_slots == 4


def test_a_callback_may_use_the_engine():
  """It submits, cancels and steps; every token is delivered once, in order."""
  engine, seen, more = cases.engine("hybrid"), [], []

  def callback(token: int) -> None:
    seen.append(token)
    if len(seen) == 2:
      more.append(engine.submit([4, 4], max_tokens=2))
      engine.step()

  handle = engine.submit([1, 2, 3], max_tokens=6, callback=callback)
  engine.run()
  assert seen == handle.tokens
  assert len(more[0].tokens) == 2


def chain(bad: int) -> Markov:
  """A model that goes from token n to n + 1; the logits behind the token `bad` are NaN."""
  table = 20 * np.roll(np.eye(9), 1, axis=1)
  table[bad] = np.nan
  return Markov(table)


def test_nan_ends_one_request():
  engine = Engine(chain(5), 4, prefill_piece=8)
  handles = [engine.submit([n], max_tokens=3) for n in (0, 3, 5, 6)]
  queued = engine.submit([5, 1], max_tokens=3)  # NaN in its prompt is read, and not chosen from
  engine.run()
  assert [h.tokens for h in handles] == [[1, 2, 3], [4, 5], [], [7, 8, 0]]
  assert [h.finish_reason for h in handles] == ["length", "error", "error", "length"]
  with pytest.raises(
    FloatingPointError, match="this request hold NaN, or -inf alone, at new token 2"
  ):
    handles[1].result()
  assert queued.result() == [2, 3, 4]
  seen = []
  with pytest.raises(FloatingPointError):  # tokens before the error come first
    seen.extend(iter(handles[1]))
  assert list(handles[1].tokens) == [4, 5]


def test_an_interrupt_in_a_callback_loses_nothing():
  engine, requests, seen = cases.engine("hybrid"), some(5), []

  def callback(token: int) -> None:
    seen.append(token)
    if len(seen) == 2:
      raise KeyboardInterrupt

  handle = engine.submit([1, 2, 3], max_tokens=5, callback=callback)
  handles = submit_all(engine, requests)
  with pytest.raises(KeyboardInterrupt):
    engine.run()
  engine.run()
  assert seen == handle.tokens
  assert handle.finish_reason == "length"
  check_all(handles, requests)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
  "name", ["write_slot", "prefill_piece", "copy_page", "read_slot", "decode_step"]
)
def test_an_interrupt_of_a_step(name, when, monkeypatch):
  """It comes before a call of the device, or after one that has taken the pool along."""
  engine, requests = cases.engine("hybrid", cache_bytes=10**6), some(6)
  requests = [r._replace(prompt=[1, 2, 3, 4, *[n] * 5]) for n, r in enumerate(requests)]
  handles = submit_all(engine, requests)
  whole, calls = getattr(lajax.serve.pool, name), []

  def call(*arguments):
    calls.append(name)
    if len(calls) % 2 == 0 and len(calls) < 8:
      if when == "after":
        whole(*arguments)
      raise KeyboardInterrupt
    return whole(*arguments)

  monkeypatch.setattr(lajax.serve.pool, name, call)
  interrupts = 0
  for _ in range(10):
    try:
      engine.run()
      break
    except KeyboardInterrupt:
      interrupts += 1
  assert interrupts in (1, 2, 3)
  check_all(handles, requests)
  stats = engine.stats()
  assert stats.free_slots == 4
  held = len(engine._memory.cache._held)
  assert stats.pages == stats.free_pages + held


def test_an_interrupt_while_tokens_are_taken(monkeypatch):
  """A request that has its last token ends, although the step did not get that far."""
  engine, seen = cases.engine("hybrid"), []
  requests = some(4)
  requests[1].options["callback"] = seen.append
  handles = submit_all(engine, requests)
  del requests[1].options["callback"]
  whole = Engine._finish_if_over

  def interrupt(self, handle):
    if handle is handles[1] and len(handle.tokens) == handle.max_tokens:
      monkeypatch.setattr(Engine, "_finish_if_over", whole)
      raise KeyboardInterrupt
    whole(self, handle)

  monkeypatch.setattr(Engine, "_finish_if_over", interrupt)
  with pytest.raises(KeyboardInterrupt):
    engine.run()
  handles[0].cancel()
  engine.run()
  check_all(handles, requests)
  assert seen == handles[1].tokens


def test_an_interrupt_between_a_log_probability_and_its_token():
  engine, request = cases.engine("hybrid"), Asked([1, 2, 3], {"max_tokens": 4})

  class Tokens(list):
    """A list that an interrupt keeps from growing once."""

    interrupted = False

    def append(self, token):
      if len(self) == 2 and not self.interrupted:
        self.interrupted = True
        raise KeyboardInterrupt
      super().append(token)

  seen = []
  handle = engine.submit(request.prompt, **request.options, callback=seen.append)
  handle.tokens = Tokens()
  with pytest.raises(KeyboardInterrupt):
    engine.run()
  engine.run()
  check_alone(handle, cases.model("hybrid"), request)
  assert seen == handle.tokens


def test_an_explicit_mesh_is_refused():
  mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
  graph, p = nnx.split(chain(5))
  model = nnx.merge(graph, jax.device_put(p, NamedSharding(mesh, PartitionSpec())))
  with pytest.raises(NotImplementedError, match="mesh of explicit axes"):
    Engine(model)


class Shared(Markov):
  """A model whose state has no rows."""

  def init_state(self, batch):
    return jnp.zeros((), jnp.int32)


def test_a_state_without_rows_is_refused():
  with pytest.raises(ValueError, match="an axis for the rows of a batch; got 1 without, of 1"):
    Engine(Shared(np.eye(3)))
