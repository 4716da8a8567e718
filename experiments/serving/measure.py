"""Measurements: the engine, one-by-one generation, static batches, shared prefixes and drafts."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from serving.config import Asked, Config, model_of, requests_of, with_prefix

from lajax.models import LanguageModel, complete, generate
from lajax.models.drafts import verify_rows
from lajax.models.graphs import split
from lajax.models.requests import request_of
from lajax.serve import Engine, Handle

Show = Callable[[str], None]


def longest_of(requests: Sequence[Asked]) -> int:
  """Returns the tokens that are read of the longest request in the worst batch."""
  return max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests) - 1


def tokens_of(requests: Sequence[Asked]) -> int:
  return sum(r.max_tokens for r in requests)


def seconds_of(call: Callable[[], object], rounds: int = 2) -> float:
  """Returns the seconds of the fastest call of some: other programs only make a call slower."""
  return min(elapsed(call) for _ in range(rounds))


def elapsed(call: Callable[[], object]) -> float:
  started = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - started


# --- throughput and latency ---


def by_slots(config: Config, show: Show) -> list[dict]:
  """Returns one line per way to serve the requests and number of slots."""
  requests = requests_of(config)
  model = model_of(config, longest_of(requests))
  rate = lambda seconds: tokens_of(requests) / seconds
  write = functools.partial(generate, model, prefill_piece=config.prefill_piece)
  show("one by one")
  alone = lambda rs: [write([r.prompt], r.max_tokens) for r in rs]
  alone(requests[:1])  # compiles
  seconds = seconds_of(lambda: alone(requests))
  lines = [dict(way="one by one", slots=1, tokens_per_second=rate(seconds))]
  for slots in config.slots:
    if slots > 1:
      show(f"static batches of {slots}")
      static_batches(write, requests[:slots], slots)  # compiles
      seconds = seconds_of(lambda n=slots: static_batches(write, requests, n))
      lines.append(dict(way="static", slots=slots, tokens_per_second=rate(seconds)))
    show(f"engine of {slots} {'slots' if slots > 1 else 'slot'}")
    engine = Engine(
      model, slots, prefill_piece=config.prefill_piece, max_length=longest_of(requests),
      page_size=config.prefill_piece,
    )  # fmt: skip
    run_all(engine, requests[: 2 * slots])  # compiles
    seconds = seconds_of(lambda engine=engine: run_all(engine, requests))
    line = dict(way="engine", slots=slots, tokens_per_second=rate(seconds))
    gaps = seconds / len(requests) / config.load
    lines.append(line | latencies(config, engine, requests, gaps))
  return lines


def static_batches(write: Callable, requests: Sequence[Asked], slots: int) -> None:
  """Generates in batches of so many requests, each until its longest one has ended."""
  for n in range(0, len(requests), slots):
    batch = list(requests[n : n + slots])
    batch += [batch[-1]] * (slots - len(batch))  # another size would compile
    write([r.prompt for r in batch], max(r.max_tokens for r in batch))


def run_all(engine: Engine, requests: Sequence[Asked]) -> None:
  for r in requests:
    engine.submit(r.prompt, max_tokens=r.max_tokens)
  engine.run()


def latencies(config: Config, engine: Engine, requests: Sequence[Asked], gap: float) -> dict:
  """Returns medians and 95th percentiles in seconds, while requests arrive at random.

  Args:
    config: of the run.
    engine: compiled.
    requests: the requests.
    gap: mean of the seconds between arrivals, which are exponentially distributed.
  """
  rng = np.random.default_rng(config.seed + 2)
  arrivals = np.cumsum(rng.exponential(gap, len(requests)))
  times: list[list[float]] = [[] for _ in requests]
  started, n = time.perf_counter(), 0
  now = lambda: time.perf_counter() - started
  while n < len(requests) or not engine.is_idle:
    if engine.is_idle:
      time.sleep(max(0.0, arrivals[n] - now()))
    while n < len(requests) and arrivals[n] <= now():
      record = lambda _, own=times[n]: own.append(now())
      engine.submit(requests[n].prompt, max_tokens=requests[n].max_tokens, callback=record)
      n += 1
    engine.step()
  first = [own[0] - arrival for own, arrival in zip(times, arrivals, strict=True)]
  between = np.concatenate([np.diff(own) for own in times])
  found = {}
  for name, values in (("first", first), ("between", between)):
    found[f"{name}_median"], found[f"{name}_95"] = np.percentile(values, [50, 95]).tolist()
  return found


# --- shared prefixes ---


def prefixes(config: Config, show: Show) -> list[dict]:
  """Returns a line for requests that share a prefix: with a cache of prefixes, and without."""
  requests = with_prefix(config)
  model = model_of(config, longest_of(requests))
  lines = []
  for budget in (0, 2**30):
    show(f"a shared prefix, {'with' if budget else 'without'} a cache")
    engine = Engine(
      model, max(config.slots), prefill_piece=config.prefill_piece, cache_bytes=budget,
      max_length=longest_of(requests), page_size=config.prefill_piece,
    )  # fmt: skip
    run_all(engine, requests[:2])  # compiles, and makes the prefix known
    first = [first_token(engine, r) for r in requests]
    seconds = seconds_of(lambda engine=engine: run_all(engine, requests))
    stats = engine.stats()
    lines.append(
      dict(
        way="engine",
        cache=bool(budget),
        first_median=float(np.median(first)),
        tokens_per_second=tokens_of(requests) / seconds,
        hit_rate=stats.hit_rate,
        cache_bytes=stats.cache_bytes,
      )
    )
  show("a shared prefix, one by one")
  one = lambda r: generate(model, [r.prompt], 1, prefill_piece=config.prefill_piece)
  first = [elapsed(lambda r=r: one(r)) for r in [requests[0], *requests]]  # the first compiles
  return [dict(way="one by one", cache=False, first_median=float(np.median(first[1:]))), *lines]


def first_token(engine: Engine, request: Asked) -> float:
  """Returns the seconds from a request to its first token, on an idle engine."""
  started = time.perf_counter()
  handle: Handle = engine.submit(request.prompt, max_tokens=request.max_tokens)
  next(iter(handle))
  seconds = time.perf_counter() - started
  handle.cancel()
  return seconds


# --- drafts ---


def drafts(config: Config, show: Show, rounds: int = 20) -> dict:
  """Returns seconds of the ways to verify a draft of one row, and of a step without one.

  "accepted" is one call that keeps all tokens; "rejected" is that call and a second one from the
  kept state; "stored" runs one token after the other and stores the state behind each, of which one
  is chosen.
  """
  show("drafts")
  request = requests_of(config)[0]
  model = model_of(config, longest_of([request]) + config.draft_tokens)
  graph, parameters = split(model)
  options = request_of(
    1, temperature=0.0, top_k=None, top_p=None, min_p=None, stop_tokens=(), key=None
  )
  ids, running = np.zeros(1, np.int32), np.ones(1, bool)
  number, limit = np.zeros(1, np.int32), np.full(1, config.draft_tokens + 1, np.int32)
  state = complete(model, [request.prompt], 1).state
  last = request.prompt[-1]
  own = continuation(model, request.prompt, config.draft_tokens)
  wrong = [(token + 1) % 256 for token in own]

  def verify(guesses: list[int]):
    inputs = np.array([[last, *guesses]], np.int32)
    copied = jax.tree.map(jnp.copy, state)
    return verify_rows(
      graph, parameters, options, ids, copied, inputs, running, number, limit
    )  # fmt: skip

  def stored():
    inputs = np.array([[last, *own]], np.int32)
    return _stored(graph, parameters, jax.tree.map(jnp.copy, state), inputs)

  def timed(call: Callable) -> float:
    call()  # compiles
    return float(np.median([elapsed(call) for _ in range(rounds)]))

  return dict(
    step=timed(lambda: verify([])),
    accepted=timed(lambda: verify(own)),
    rejected=timed(lambda: verify(wrong)),
    stored=timed(stored),
  )


def continuation(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
  return generate(model, [prompt], count)[0].tolist()


@functools.partial(jax.jit, static_argnames="graph")
def _stored(graph, parameters, state, inputs):
  """Reads tokens one by one, stores all states, and chooses the last accepted one."""

  def step(state, token):
    logits, state = graph.merge(parameters)(token[:, None], state)
    return state, (state, logits[:, 0].argmax(-1))

  _, (states, chosen) = jax.lax.scan(step, state, inputs.T)
  agrees = (chosen[:-1, 0] == inputs[0, 1:]).astype(jnp.int32)
  count = jnp.cumprod(agrees).sum()
  return jax.tree.map(lambda s: s[count], states), chosen
