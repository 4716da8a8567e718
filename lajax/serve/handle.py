"""Requests to an engine as their senders see them, and the numbers of an engine."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lajax.models.requests import Request

if TYPE_CHECKING:
  from lajax.serve.engine import Engine


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

  def __init__(
    self,
    engine: "Engine",
    prompt: list[int],
    max_tokens: int,
    request: Request,
    stop_tokens: frozenset[int],
    callback: Callable | None,
  ):
    self.prompt = prompt
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.finish_reason: str | None = None
    self.error: Exception | None = None
    self.max_tokens = max_tokens
    self._engine, self._request = engine, request
    self._callback: Any = callback
    self._stop_tokens = stop_tokens
    self._heard = 0  # tokens that the callback got
    self._is_deaf = False  # whether the callback has raised

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

  def _next_heard(self) -> int | None:
    """Returns the next token for the callback, which counts as heard; None if it gets none."""
    if self._is_deaf or self.finish_reason == "cancelled" or self._heard == len(self.tokens):
      return None
    self._heard += 1
    return self.tokens[self._heard - 1]

  def __repr__(self) -> str:
    state = self.finish_reason or "not finished"
    return f"Handle({len(self.prompt)} + {len(self.tokens)} tokens, {state})"
