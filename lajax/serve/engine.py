"""The engine: a queue, slots, and which request the device works for next. All of it plain Python.

`lajax.serve.pool` holds the memory and the compiled functions, `lajax.serve.prefixes` the states of
known prefixes.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from lajax._meshes import explicit_mesh
from lajax._shapes import INT32, check_key, check_whole
from lajax.models.drafts import guesses_of, no_token
from lajax.models.graphs import check_model, split, vocabulary_of
from lajax.models.requests import Request, prompts_of, request_of
from lajax.serve import pool as device
from lajax.serve.pages import Pages
from lajax.serve.prefixes import Prefix, PrefixCache


class Stats(NamedTuple):
  """Numbers of an engine at one time. Counts of requests and tokens are since it was made."""

  slots: int
  free_slots: int
  queued: int  # requests that wait for a slot or for pages
  pages: int  # of key-value memory; 0 for a model without it
  free_pages: int
  pool_bytes: int  # of all slots and pages
  cache_bytes: int  # of the states of known prefixes, and of the pages that they hold
  prefixes: int  # known ones
  admitted: int  # requests that got a slot
  hits: int  # of them, those that began behind a known prefix
  prompt_tokens: int  # of the admitted requests
  reused_tokens: int  # of them, those of known prefixes

  @property
  def hit_rate(self) -> float:
    """Part of the admitted requests that began behind a known prefix; 0 if there are none."""
    return self.hits / self.admitted if self.admitted else 0.0


class Handle:
  """A request to an engine, and the tokens that it has so far.

      for token in handle:  # as they come; the engine works for all requests meanwhile
        print(token)

  Attributes:
    prompt: list of its tokens.
    tokens: list of the new tokens.
    logprobs: list of log softmax(logits) at each of them.
    finish_reason: None until the request has ended. Then "stop" (by a stop token, the last one),
      "length" (`max_tokens`), "cancelled" or "error".
    error: the exception of a request that ended by "error"; otherwise None.
  """

  def __init__(self, engine: "Engine", prompt: list[int], max_tokens: int, request: Request,
               stop_tokens: frozenset[int], callback: Callable | None):  # fmt: skip
    self.prompt = prompt
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.finish_reason: str | None = None
    self.error: Exception | None = None
    self.max_tokens = max_tokens
    self._engine, self._request, self._callback = engine, request, callback
    self._stop_tokens = stop_tokens

  def __iter__(self) -> Iterator[int]:
    """Yields the new tokens as they come; raises the error of a request that ends by one."""
    n = 0
    while True:
      if n < len(self.tokens):
        yield self.tokens[n]
        n += 1
      elif self.finish_reason is None:
        self._engine.step()
      else:
        break
    if self.error is not None:
      raise self.error

  def result(self) -> list[int]:
    """Runs the engine until this request has ended, and returns its new tokens.

    Raises:
      Exception: the error of a request that ended by "error".
    """
    return list(self)

  def cancel(self) -> None:
    """Ends the request where it is. Nothing happens if it has ended."""
    self._engine._cancel(self)

  def __repr__(self) -> str:
    state = self.finish_reason or "not finished"
    return f"Handle({len(self.prompt)} + {len(self.tokens)} tokens, {state})"


class Seat:
  """A request in a slot.

  Attributes:
    handle: the request.
    slot: its slot.
    pages: its pages, in the order of the tokens.
    text: the tokens to read before the first new one is chosen: all but the last.
    read: how many of them are read.
    prefix: the longest known prefix of what is read.
  """

  def __init__(self, handle: Handle, slot: int, pages: list[int], text: list[int], prefix: Prefix):
    self.handle, self.slot, self.pages, self.text = handle, slot, pages, text
    self.read, self.prefix = prefix.length, prefix

  @property
  def is_reading(self) -> bool:
    return self.read < len(self.text)


class Engine:
  """Serves many requests with one model: they join and leave between tokens.

      engine = lajax.serve.Engine(model, slots=16)
      handle = engine.submit([5, 3, 8], max_tokens=20)
      print(handle.result())

  Each request gets the tokens that `lajax.generate` gives it alone, up to the rounding of the
  model's numbers, whatever the other requests are and whenever they come.

  * Requests wait in one queue and get slots in the order in which they came. A request gets its
    slot together with pages for all tokens that it may have, so no running request is ever taken
    back.
  * A step reads at most one piece of one prompt, then writes one token of every running request. So
    no running request waits for longer than one piece.
  * A prompt that begins like an earlier one goes on from the longest known prefix, if `cache_bytes`
    is above 0. A prefix is a whole number of pieces of a prompt without its last token.
  * An error ends one request: a callback that raises, or logits that are NaN. The others go on.
  * An interrupt (Ctrl-C) may come at any time. The next step goes on; where the interrupt came
    during a step, it reads the tokens of the running requests again, and forgets known prefixes.

  Everything is compiled once for each of these: a piece of a power of two of tokens, a power of two
  of pages, a step of a quarter of the slots or of all, and kind of sampling (greedy; with a
  temperature; sorted for top_k or top_p).

  An engine belongs to one thread. It keeps the parameters that the model has when it is made.

  Args:
    model: as for `lajax.generate`. Its parameters may not lie on a mesh of explicit axes.
    slots: requests that run at once.
    prefill_piece: tokens of a prompt per step.
    max_length: tokens of the longest request, prompt and new tokens together, less the last one.
      Without softmax attention over the whole document there is no limit, and this has no effect.
    cache_bytes: of known prefixes: their states, and the pages that they hold; 0 for none. The
      pages are those of `pages` that running requests do not need.
    page_size: tokens per page of key-value memory. With a divisor of `prefill_piece` no page has
      to be copied where a prefix ends.
    pages: of key-value memory; None for slots times the pages of `max_length`, so that pages never
      run out. Fewer pages save memory where most requests are short.

  Raises:
    ValueError: an argument is wrong.
    NotImplementedError: the parameters lie on a mesh of explicit axes.
  """

  def __init__(
    self,
    model: Any,
    slots: int = 16,
    *,
    prefill_piece: int = 256,
    max_length: int = 4096,
    cache_bytes: int = 0,
    page_size: int = 64,
    pages: int | None = None,
  ):
    check_model("model", model)
    self.slots = check_whole("slots", slots)
    self.prefill_piece = check_whole("prefill_piece", prefill_piece)
    self.max_length = check_whole("max_length", max_length)
    self.cache_bytes = check_whole("cache_bytes", cache_bytes, 0, 2**63 - 1)
    page_size = check_whole("page_size", page_size)
    self._vocab_size = vocabulary_of(model)
    self._graph, self._parameters = split(model)
    if explicit_mesh(self._parameters) is not None:
      raise NotImplementedError(
        "the model's parameters lie on a mesh of explicit axes, which an engine does not support. "
        "Put them on one device, or on a mesh of automatic axes; lajax.generate takes both kinds."
      )
    self._pages_per_slot = _quotient(self.max_length, page_size)
    whole = self._pages_per_slot * page_size
    self._layout = device.layout_of(self._graph, self._parameters, page_size, whole)
    if not self._layout.is_paged:
      self._pages_per_slot = 0
    count = self.slots * self._pages_per_slot
    if pages is not None:
      count = check_whole("pages", pages) if self._layout.is_paged else 0
    self._page_count = count
    self._queue: deque[Handle] = deque()
    self._unfinished: dict[Handle, None] = {}  # in the order of their submission
    self._deliveries: deque[tuple[Handle, int]] = deque()  # tokens for callbacks
    self._counts = dict(admitted=0, hits=0, prompt_tokens=0, reused_tokens=0)
    self._torn = False  # whether an exception left a step half done
    self._reset()

  def _reset(self) -> None:
    """Makes memory and tables without requests."""
    self._pool, self._first = device.make_pool(
      self._graph, self._layout, self._parameters, self.slots, self._page_count
    )
    of_pages = sum(x.nbytes for x, s in zip(self._pool, self._layout.places, strict=True) if s >= 0)
    self._pages = Pages(self._page_count)
    page_bytes = of_pages // max(1, self._page_count)
    self._cache = PrefixCache(self.prefill_piece, self.cache_bytes, self._pages, page_bytes)
    self._state_bytes = sum(x.nbytes for x in jax.tree.leaves(self._first))
    self._seats: list[Seat | None] = [None] * self.slots
    self._free_slots = list(range(self.slots))[::-1]
    self._reader: Seat | None = None
    B = self.slots
    self._table = np.zeros((B, self._pages_per_slot), np.int32)
    self._length = np.zeros(B, np.int32)  # tokens that the model has read
    self._last = np.zeros(B, np.int32)  # the token that it reads next
    self._number = np.zeros(B, np.int32)  # of new tokens
    self._running = np.zeros(B, bool)
    self._options = Request(
      np.zeros((B, 2), np.uint32),  # type: ignore[arg-type]  # raw keys
      np.zeros(B, np.float32),
      np.full(B, INT32.max, np.int32),
      np.ones(B, np.float32),
      np.zeros(B, np.float32),
      None,
    )

  # --- requests ---

  def submit(
    self,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Array | None = None,
    callback: Callable[[int], Any] | None = None,
  ) -> Handle:
    """Puts a request at the end of the queue.

    Args:
      prompt: its tokens, at least one.
      max_tokens: number of new tokens, if no stop token comes earlier.
      temperature, top_k, top_p, min_p: as for `lajax.generate`, one number each.
      stop_tokens: the request ends with the first of these tokens.
      key: a random key, where the temperature is above 0. The new token t is drawn by
        fold_in(key, t), as by `lajax.generate` with the keys `key[None]`.
      callback: called with each new token. An exception ends the request.

    Returns:
      The handle of the request, which `step` and `run` work for.

    Raises:
      ValueError: an argument is wrong, or the request could never fit into the engine.
    """
    prompts = prompts_of([prompt], None, self._vocab_size)
    max_tokens = check_whole("max_tokens", max_tokens)
    if callback is not None and not callable(callback):
      raise ValueError(f"`callback` must be callable or None; got {type(callback).__name__}.")
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    request = request_of(1, **options, stop_tokens=stop_tokens, key=_rows_of_key(key))
    tokens = prompts.tokens[0].tolist()
    self._check_room(len(tokens), max_tokens)
    stop = frozenset() if request.stop is None else frozenset(request.stop.tolist()) - {-1}
    handle = Handle(self, tokens, max_tokens, request, stop, callback)
    self._unfinished[handle] = None
    self._queue.append(handle)
    return handle

  def _check_room(self, prompt: int, max_tokens: int) -> None:
    """ValueError for a request that could never fit, even alone."""
    if not self._layout.is_paged:
      return
    size, length = self._layout.page_size, prompt + max_tokens - 1
    if length > self.max_length:
      raise ValueError(
        f"`prompt` and `max_tokens` must fit into max_length = {self.max_length} tokens; got "
        f"{prompt} + {max_tokens} - 1 = {length}. Take fewer tokens, or make the engine with a "
        "larger max_length."
      )
    if _quotient(length, size) > self._page_count:
      raise ValueError(
        f"`prompt` and `max_tokens` must fit into the engine's {self._page_count} pages of {size} "
        f"tokens; got {prompt} + {max_tokens} - 1 = {length} tokens. Take fewer tokens, or make "
        "the engine with more pages."
      )

  def _cancel(self, handle: Handle) -> None:
    if handle.finish_reason is None:
      with self._changing():
        self._finish(handle, "cancelled")

  def _finish(self, handle: Handle, reason: str, error: Exception | None = None) -> None:
    """Ends a request, and frees its slot and pages. Ending it twice changes reason and error."""
    handle.finish_reason, handle.error = reason, error
    if handle not in self._unfinished:
      return
    del self._unfinished[handle]
    seat = self._seat_of(handle)
    if seat is None:
      self._queue.remove(handle)
      return
    self._seats[seat.slot] = None
    self._running[seat.slot] = False
    self._length[seat.slot] = 0
    self._free_slots.append(seat.slot)
    self._pages.release(seat.pages)
    if self._reader is seat:
      self._reader = None

  def _seat_of(self, handle: Handle) -> Seat | None:
    return next((seat for seat in self._seats if seat and seat.handle is handle), None)

  # --- steps ---

  @property
  def is_idle(self) -> bool:
    """Whether all requests have ended, and all callbacks have got their tokens."""
    return not self._unfinished and not self._deliveries

  def run(self) -> None:
    """Works until all requests have ended."""
    while self.step():
      pass

  def step(self) -> bool:
    """Reads at most one piece of one prompt, then writes one token of each running request.

    Returns:
      True as long as there is work left.
    """
    self._deliver()  # what an interrupt left
    with self._changing():
      self._admit()
      self._read_piece()
      self._write_tokens()
    self._deliver()
    return not self.is_idle

  def verify(self, handle: Handle, draft: Sequence[int]) -> list[int]:
    """Verifies drafted tokens of a running request in one call, and returns its new tokens.

        new = engine.verify(handle, guesses)  # from 1 to len(guesses) + 1 tokens

    The new tokens are those that steps would have written: the accepted beginning of the draft, and
    the model's own token behind it. The states of rejected tokens are never kept.

    Args:
      handle: a request that has written its first token, and not ended.
      draft: guesses of its next tokens; may be empty.

    Raises:
      ValueError: the request is not running, or the draft is no list of tokens.
    """
    guesses = guesses_of(draft, self._vocab_size)
    self._mend()
    seat = self._seat_of(handle)
    if seat is None or seat.is_reading:
      raise ValueError(
        f"`handle` must be a running request of this engine; got {handle!r}. Call step() until it "
        "has its first token."
      )
    before = len(handle.tokens)
    with self._changing():
      self._verify(seat, guesses)
    self._deliver()
    return handle.tokens[before:]

  @contextlib.contextmanager
  def _changing(self):
    """Marks the engine as torn while it changes."""
    self._mend()
    self._torn = True
    yield
    self._torn = False

  def _mend(self) -> None:
    """Begins anew, after an exception, with all requests that have not ended.

    They keep their tokens. The exception may have taken the pool along, which was donated.
    """
    if not self._torn:
      return
    self._reset()
    self._queue = deque(self._unfinished)
    for handle in list(self._unfinished):
      self._finish_if_over(handle)
    self._torn = False

  def _admit(self) -> None:
    """Gives slots and pages to the first requests of the queue, up to one that has to read."""
    while self._queue and self._free_slots and self._reader is None:
      seat = self._seat(self._queue[0])
      if seat is None:
        return
      self._queue.popleft()
      self._seats[seat.slot] = seat
      if seat.is_reading:
        self._reader = seat
      else:
        self._begin_writing(seat)

  def _seat(self, handle: Handle) -> Seat | None:
    """Returns a seat behind the longest known prefix; None if there are too few pages for now."""
    text = (handle.prompt + handle.tokens)[:-1]
    size = self._layout.page_size
    prefix = self._cache.longest(text) if self.cache_bytes else self._cache.root
    total = len(handle.prompt) + handle.max_tokens - 1
    total = _quotient(total, size) if self._layout.is_paged else 0
    pages = self._own_pages(prefix, total)
    if pages is None and prefix.pages and not any(self._seats):
      prefix = self._cache.root  # the prefix itself stands in the way
      pages = self._own_pages(prefix, total)
    if pages is None:
      return None
    slot = self._free_slots.pop()
    arrays = self._first if prefix is self._cache.root else prefix.arrays
    self._pool = device.write_slot(self._layout, self._pool, np.int32(slot), arrays)
    self._table[slot, : len(pages)] = pages
    self._length[slot] = prefix.length
    self._counts["admitted"] += 1
    self._counts["hits"] += prefix is not self._cache.root
    self._counts["prompt_tokens"] += len(handle.prompt)
    self._counts["reused_tokens"] += prefix.length
    return Seat(handle, slot, pages, text, prefix)

  def _own_pages(self, prefix: Prefix, total: int) -> list[int] | None:
    """Returns a request's pages: the full ones of a prefix, which it shares, and new ones.

    The last page of a prefix that is partly filled is copied, since the request writes to it.
    """
    full = prefix.length // self._layout.page_size if prefix.pages else 0
    shared, partial = prefix.pages[:full], prefix.pages[full:]
    self._pages.share(prefix.pages)
    need = total - full
    if not self._cache.make_room(need):
      self._pages.release(prefix.pages)
      return None
    new = self._pages.take(need)
    if partial:
      self._copy_page(partial[0], new[0])
      self._pages.release(partial)
    return shared + new

  def _copy_page(self, source: int, target: int) -> None:
    self._pool = device.copy_page(self._layout, self._pool, np.int32(source), np.int32(target))

  def _begin_writing(self, seat: Seat) -> None:
    handle, slot = seat.handle, seat.slot
    self._last[slot] = (handle.prompt + handle.tokens)[-1]
    self._number[slot] = len(handle.tokens)
    self._running[slot] = True
    given, options = handle._request, self._options
    defaults = (0, 0.0, INT32.max, 1.0, 0.0)  # these values have no effect
    for array, value, default in zip(options[:-1], given[:-1], defaults, strict=True):
      array[slot] = default if value is None else np.asarray(value)[0]

  def _read_piece(self) -> None:
    """Reads the next piece of the prompt that is being read."""
    seat = self._reader
    if seat is None:
      return
    piece = seat.text[seat.read : seat.read + self.prefill_piece]
    width = min(self.prefill_piece, _power_of_two(len(piece), 8))
    tokens = np.zeros((1, width), np.int32)
    ids = np.full((1, width), -1, np.int32)
    tokens[0, : len(piece)], ids[0, : len(piece)] = piece, 0
    rows = self._rows(seat.read + width, np.array([seat.slot], np.int32))
    self._pool = device.prefill_piece(
      self._graph, self._layout, self._parameters, self._pool, rows, tokens, ids
    )
    seat.read += len(piece)
    self._length[seat.slot] = seat.read
    self._keep_prefix(seat)
    if not seat.is_reading:
      self._reader = None
      self._begin_writing(seat)

  def _keep_prefix(self, seat: Seat) -> None:
    """Keeps the state behind a piece, unless it is known, or the prefix before it is not."""
    cache, before = self._cache, seat.prefix
    behind = before.length + self.prefill_piece == seat.read
    if not behind or not cache.knows(before) or self._state_bytes > self.cache_bytes:
      return
    known = cache.child(before, seat.text)
    if known is not None:
      seat.prefix = known
      return
    full, copies = seat.read // self._layout.page_size, []
    if self._layout.is_paged and seat.read % self._layout.page_size:
      if not cache.make_room(1):
        return
      copies = self._pages.take(1)  # the request goes on to write to the page itself
      self._copy_page(seat.pages[full], copies[0])
    pages = seat.pages[:full] + copies
    if cache.knows(before):
      arrays = device.read_slot(self._layout, self._pool, np.int32(seat.slot))
      seat.prefix = cache.add(before, seat.text, arrays, pages)
    self._pages.release(copies)

  def _write_tokens(self) -> None:
    """Writes one token of each running request."""
    running = np.flatnonzero(self._running)
    if not running.size:
      return
    slots = self._rows_of_step(running)
    rows = self._rows(int(self._length[running].max()) + 1, slots)
    at = np.minimum(slots, self.slots - 1)
    self._pool, tokens, logprobs = device.decode_step(
      self._graph,
      self._layout,
      self._parameters,
      self._pool,
      rows,
      self._last[at],
      self._running[at] & (slots < self.slots),
      self._request(running, at),
      self._number[at],
    )
    tokens, logprobs = jax.device_get((tokens, logprobs))
    for slot in running:
      seat, row = self._seats[slot], int(np.searchsorted(slots, slot))
      assert seat is not None
      if tokens[row] < 0:
        self._fail(seat.handle)
      else:
        self._take(seat, tokens[row : row + 1], logprobs[row : row + 1])

  def _rows_of_step(self, running: np.ndarray) -> np.ndarray:
    """Returns the slots of a step, in order: those that run if they are few, otherwise all.

    A step of few rows has a quarter of all; behind the last one stands padding.
    """
    few = max(4, _quotient(self.slots, 4))
    if len(running) > few or self.slots <= few:
      return np.arange(self.slots, dtype=np.int32)
    padding = np.full(few - len(running), self.slots)
    return np.concatenate([running, padding]).astype(np.int32)

  def _verify(self, seat: Seat, guesses: np.ndarray) -> None:
    handle, slot = seat.handle, seat.slot
    limit = handle.max_tokens - len(handle.tokens)
    inputs = np.full((1, _power_of_two(len(guesses) + 1)), -1, np.int32)
    inputs[0, 0], inputs[0, 1 : len(guesses) + 1] = self._last[slot], guesses
    rows = self._rows(int(self._length[slot]) + inputs.shape[1], np.array([slot], np.int32))
    self._pool, found = device.verify_slot(
      self._graph,
      self._layout,
      self._parameters,
      self._pool,
      rows,
      inputs,
      handle._request,
      self._number[slot : slot + 1].copy(),
      np.full(1, limit, np.int32),
    )
    found = jax.device_get(found)
    count = int(found.count[0])
    self._take(seat, found.tokens[0, :count], found.logprobs[0, :count])
    if found.failed[0]:
      self._fail(handle)

  def _rows(self, length: int, slots: np.ndarray) -> device.Rows:
    """Returns the rows of a call whose longest row has so many tokens after it."""
    pages = _power_of_two(_quotient(length, self._layout.page_size))
    width = min(pages, self._pages_per_slot)
    at = np.minimum(slots, self.slots - 1)
    given: Any = None if len(slots) == self.slots else slots
    return device.Rows(self._table[at, :width], self._length[at], given)  # type: ignore[arg-type]

  def _request(self, running: np.ndarray, rows: np.ndarray) -> Request:
    """Returns the options of some slots, without those that no running request needs."""
    o = self._options
    assert o.temperature is not None
    assert o.top_k is not None
    assert o.top_p is not None
    drawn = running[o.temperature[running] > 0]
    if not drawn.size:
      return Request(None, None, None, None, None, None)
    needs_order = ((o.top_k[drawn] < INT32.max) | (o.top_p[drawn] < 1)).any()
    o = jax.tree.map(lambda x: x[rows], o)
    return o if needs_order else o._replace(top_k=None, top_p=None)

  # --- tokens ---

  def _take(self, seat: Seat, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Adds new tokens to a request, for each of which the model has read one."""
    handle, slot = seat.handle, seat.slot
    self._length[slot] += len(tokens)
    self._number[slot] += len(tokens)
    if len(tokens):
      self._last[slot] = tokens[-1]
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
      handle.logprobs.append(logprob)
      handle.tokens.append(token)
      if handle._callback is not None:
        self._deliveries.append((handle, token))
    self._finish_if_over(handle)

  def _finish_if_over(self, handle: Handle) -> None:
    if handle.tokens and handle.tokens[-1] in handle._stop_tokens:
      self._finish(handle, "stop")
    elif len(handle.tokens) >= handle.max_tokens:
      self._finish(handle, "length")

  def _fail(self, handle: Handle) -> None:
    number = len(handle.tokens)
    self._finish(handle, "error", FloatingPointError(no_token("this request", number)))

  def _deliver(self) -> None:
    """Calls the callbacks. A token is taken off the list first: an interrupt repeats no call."""
    while self._deliveries:
      handle, token = self._deliveries.popleft()
      if handle.finish_reason == "cancelled" or self._has_raised(handle):
        continue
      try:
        handle._callback(token)  # type: ignore[misc]
      except Exception as error:
        with self._changing():
          self._finish(handle, "error", error)

  def _has_raised(self, handle: Handle) -> bool:
    return handle.error is not None and not isinstance(handle.error, FloatingPointError)

  # --- numbers ---

  def stats(self) -> Stats:
    """Returns how full the engine is, and what known prefixes have saved."""
    return Stats(
      slots=self.slots,
      free_slots=len(self._free_slots),
      queued=len(self._queue),
      pages=self._page_count,
      free_pages=self._pages.free,
      pool_bytes=sum(x.nbytes for x in self._pool),
      cache_bytes=self._cache.nbytes,
      prefixes=len(self._cache),
      **self._counts,
    )


def _rows_of_key(key: Any) -> Array | None:
  """Returns a key as an array of one, in words: [1 2]."""
  if key is None:
    return None
  check_key("key", key)
  is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
  words = np.asarray(jax.random.key_data(key) if is_typed else key)
  if words.shape != (2,):
    raise ValueError(
      "`key` must be of JAX's default kind, threefry, of two words; got one of "
      f"{words.size}. Make one by jax.random.key(0)."
    )
  return words[None]  # type: ignore[return-value]


def _quotient(number: int, divisor: int) -> int:
  """Returns number / divisor, rounded up."""
  return -(-number // divisor)


def _power_of_two(number: int, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `number` and `least`."""
  return max(least, 1 << (number - 1).bit_length())
