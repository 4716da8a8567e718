"""The engine: a queue, slots, and which request the device works for next. All of it plain Python.

`lajax.serve.pool` holds the memory and the compiled functions, `lajax.serve.prefixes` the states of
known prefixes.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from lajax._meshes import explicit_mesh
from lajax._shapes import check_key, check_whole
from lajax.models.drafts import guesses_of, no_token
from lajax.models.graphs import check_model, split, vocabulary_of
from lajax.models.requests import prompts_of, request_of
from lajax.serve import pool as device
from lajax.serve.handle import Handle, Stats
from lajax.serve.pages import Pages
from lajax.serve.prefixes import Prefix, PrefixCache
from lajax.serve.slots import Slots, power_of_two, quotient


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
    self._pages_per_slot = quotient(self.max_length, page_size)
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
    self._news: dict[Handle, None] = {}  # requests whose callbacks wait for tokens
    self._counts = dict(admitted=0, hits=0, prompt_tokens=0, reused_tokens=0)
    self._torn = False  # whether an exception left a step half done
    self._reset()

  def _reset(self) -> None:
    """Makes memory and tables without requests."""
    self._pool = self._first = []  # the old ones first make room
    self._pool, self._first = device.make_pool(
      self._graph, self._layout, self._parameters, self.slots, self._page_count
    )
    of_pages = sum(x.nbytes for x, s in zip(self._pool, self._layout.places, strict=True) if s >= 0)
    self._pages = Pages(self._page_count)
    page_bytes = of_pages // max(1, self._page_count)
    self._cache = PrefixCache(self.prefill_piece, self.cache_bytes, self._pages, page_bytes)
    self._state_bytes = sum(x.nbytes for x in jax.tree.leaves(self._first))
    self._seats: list[Seat | None] = [None] * self.slots
    self._slots = Slots(self.slots, self._pages_per_slot, self._layout.page_size)
    self._reader: Seat | None = None

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
    if quotient(length, size) > self._page_count:
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
    self._slots.release(seat.slot)
    self._pages.release(seat.pages)
    if self._reader is seat:
      self._reader = None

  def _seat_of(self, handle: Handle) -> Seat | None:
    return next((seat for seat in self._seats if seat and seat.handle is handle), None)

  # --- steps ---

  @property
  def is_idle(self) -> bool:
    """True if all requests have ended, and all callbacks have got their tokens."""
    return not self._unfinished and not self._news

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
      del handle.logprobs[len(handle.tokens) :]
      self._finish_if_over(handle)
    self._torn = False

  def _admit(self) -> None:
    """Gives slots and pages to the first requests of the queue, up to one that has to read."""
    while self._queue and self._slots.free and self._reader is None:
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
    total = quotient(total, size) if self._layout.is_paged else 0
    pages = self._own_pages(prefix, total)
    if pages is None and prefix.pages and not any(self._seats):
      prefix = self._cache.root  # the prefix itself stands in the way
      pages = self._own_pages(prefix, total)
    if pages is None:
      return None
    slot = self._slots.take(pages, prefix.length)
    arrays = self._first if prefix is self._cache.root else prefix.arrays
    self._pool = device.write_slot(self._layout, self._pool, np.int32(slot), arrays)
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
    handle = seat.handle
    last = (handle.prompt + handle.tokens)[-1]
    self._slots.run(seat.slot, last, len(handle.tokens), handle._request)

  def _read_piece(self) -> None:
    """Reads the next piece of the prompt that is being read."""
    seat = self._reader
    if seat is None:
      return
    piece = seat.text[seat.read : seat.read + self.prefill_piece]
    width = min(self.prefill_piece, power_of_two(len(piece), 8))
    tokens = np.zeros((1, width), np.int32)
    ids = np.full((1, width), -1, np.int32)
    tokens[0, : len(piece)], ids[0, : len(piece)] = piece, 0
    rows = self._slots.rows(seat.read + width, np.array([seat.slot], np.int32))
    self._pool = device.prefill_piece(
      self._graph, self._layout, self._parameters, self._pool, rows, tokens, ids
    )
    seat.read += len(piece)
    self._slots.length[seat.slot] = seat.read
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
    all_slots = self._slots
    running = np.flatnonzero(all_slots.is_running)
    if not running.size:
      return
    slots = all_slots.of_step(running)
    at = all_slots.existing(slots)
    self._pool, tokens, logprobs = device.decode_step(
      self._graph,
      self._layout,
      self._parameters,
      self._pool,
      all_slots.rows(int(all_slots.length[running].max()) + 1, slots),
      all_slots.last[at],
      all_slots.is_running[at] & (slots < self.slots),
      all_slots.request(running, slots),
      all_slots.number[at],
    )
    tokens, logprobs = jax.device_get((tokens, logprobs))
    for slot in running:
      seat, row = self._seats[slot], int(np.searchsorted(slots, slot))
      assert seat is not None
      if tokens[row] < 0:
        self._fail(seat.handle)
      else:
        self._take(seat, tokens[row : row + 1], logprobs[row : row + 1])

  def _verify(self, seat: Seat, guesses: np.ndarray) -> None:
    handle, slot = seat.handle, seat.slot
    limit = handle.max_tokens - len(handle.tokens)
    inputs = np.full((1, power_of_two(len(guesses) + 1)), -1, np.int32)
    inputs[0, 0], inputs[0, 1 : len(guesses) + 1] = self._slots.last[slot], guesses
    length = int(self._slots.length[slot]) + inputs.shape[1]
    self._pool, found = device.verify_slot(
      self._graph,
      self._layout,
      self._parameters,
      self._pool,
      self._slots.rows(length, np.array([slot], np.int32)),
      inputs,
      handle._request,
      self._slots.number[slot : slot + 1].copy(),
      np.full(1, limit, np.int32),
    )
    found = jax.device_get(found)
    count = int(found.count[0])
    self._take(seat, found.tokens[0, :count], found.logprobs[0, :count])
    if found.failed[0]:
      self._fail(handle)

  # --- tokens ---

  def _take(self, seat: Seat, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Adds new tokens to a request, for each of which the model has read one."""
    handle = seat.handle
    self._slots.go_on(seat.slot, tokens)
    if handle._callback is not None:
      self._news[handle] = None
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
      handle.logprobs.append(logprob)
      handle.tokens.append(token)
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
    """Calls the callbacks with new tokens, each once, whatever interrupts this."""
    while self._news:
      handle = next(iter(self._news))
      while (token := handle._next_heard()) is not None:
        try:
          handle._callback(token)
        except Exception as error:
          with self._changing():
            handle._is_deaf = True
            self._finish(handle, "error", error)
      self._news.pop(handle, None)

  # --- numbers ---

  def stats(self) -> Stats:
    """Returns how full the engine is, and what known prefixes have saved."""
    return Stats(
      slots=self.slots,
      free_slots=len(self._slots.free),
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
