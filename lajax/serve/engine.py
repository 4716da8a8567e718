"""The engine: a queue, and which request the device works for next. All of it plain Python.

`lajax.serve.memory` gives a request its slot and pages, and calls the model.
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
from lajax.serve.memory import Memory, Seat, Sizes
from lajax.serve.slots import quotient


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
    per_slot = quotient(self.max_length, page_size)
    whole = per_slot * page_size
    self._layout = device.layout_of(self._graph, self._parameters, page_size, whole)
    if not self._layout.is_paged:
      per_slot = 0
    count = self.slots * per_slot
    if pages is not None:
      count = check_whole("pages", pages) if self._layout.is_paged else 0
    self._sizes = Sizes(self.slots, count, per_slot, self.prefill_piece, self.cache_bytes)
    self._queue: deque[Handle] = deque()
    self._unfinished: dict[Handle, None] = {}  # in the order of their submission
    self._news: dict[Handle, None] = {}  # requests whose callbacks wait for tokens
    self._counts = dict(admitted=0, hits=0, prompt_tokens=0, reused_tokens=0)
    self._torn = False  # whether an exception left a step half done
    self._reset()

  def _reset(self) -> None:
    """Makes memory without requests."""
    self._memory: Memory = None  # type: ignore[assignment]  # the old one first makes room
    self._memory = Memory(self._graph, self._parameters, self._layout, self._sizes)
    self._seats: list[Seat | None] = [None] * self.slots
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
    if quotient(length, size) > self._sizes.pages:
      raise ValueError(
        f"`prompt` and `max_tokens` must fit into the engine's {self._sizes.pages} pages of {size} "
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
    self._memory.leave(seat)
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
      found = self._memory.verify(seat, guesses)
      count = int(found.count[0])
      self._take(seat, found.tokens[0, :count], found.logprobs[0, :count])
      if found.failed[0]:
        self._fail(handle)
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
    while self._queue and self._memory.slots.free and self._reader is None:
      seat = self._memory.seat(self._queue[0], alone=not any(self._seats))
      if seat is None:
        return
      self._count(seat)
      self._queue.popleft()
      self._seats[seat.slot] = seat
      if seat.is_reading:
        self._reader = seat
      else:
        self._memory.begin_writing(seat)

  def _count(self, seat: Seat) -> None:
    self._counts["admitted"] += 1
    self._counts["hits"] += seat.prefix is not self._memory.cache.root
    self._counts["prompt_tokens"] += len(seat.handle.prompt)
    self._counts["reused_tokens"] += seat.prefix.length

  def _read_piece(self) -> None:
    """Reads the next piece of the prompt that is being read."""
    seat = self._reader
    if seat is None:
      return
    self._memory.read_piece(seat)
    if not seat.is_reading:
      self._reader = None
      self._memory.begin_writing(seat)

  def _write_tokens(self) -> None:
    """Writes one token of each running request."""
    for slot, token, logprob in self._memory.write_tokens():
      seat = self._seats[slot]
      assert seat is not None
      if token[0] < 0:
        self._fail(seat.handle)
      else:
        self._take(seat, token, logprob)

  # --- tokens ---

  def _take(self, seat: Seat, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Adds new tokens to a request, for each of which the model has read one."""
    handle = seat.handle
    self._memory.slots.go_on(seat.slot, tokens)
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
      free_slots=len(self._memory.slots.free),
      queued=len(self._queue),
      pages=self._sizes.pages,
      free_pages=self._memory.pages.free,
      pool_bytes=sum(x.nbytes for x in self._memory.pool),
      cache_bytes=self._memory.cache.nbytes,
      prefixes=len(self._memory.cache),
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
