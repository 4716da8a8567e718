"""Speculative decoding: one call of the model verifies several drafted tokens.

The model reads k drafted tokens at once. At each place it chooses its own token, by the key that
this place has without a draft, and the draft is accepted as long as it agrees. So the tokens are
those without a draft, greedy and sampled, whatever the draft says: a draft decides the time alone.

For one drafted token x this is the rule of speculative sampling: x is accepted with its probability
p(x), and otherwise replaced by a token drawn from p without x. A draft model draws its tokens by
the same keys, so that both models tend to choose the same token; the probability that they agree is
at least (1 - d) / (1 + d), with d the total variation between their distributions.

Papers: Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023,
arXiv:2211.17192; M. Daliri et al., "Coupling without Communication and Drafter-Invariant
Speculative Decoding", 2024, arXiv:2408.07978.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lajax._meshes import on_automatic_axes, spec_of
from lajax.models.graphs import check_model, choose, prefill, vocabulary_of
from lajax.models.requests import Prompts, Request


class Verified(NamedTuple):
  """Tokens that a model chose along a draft; behind the last one stand -1 and 0."""

  tokens: Int[Array, "B k+1"]
  logprobs: Float[Array, "B k+1"]
  count: Int[Array, "B"]  # of them
  failed: Bool[Array, "B"]  # rows in which no further token can be chosen


def verify(
  read: Callable,
  request: Request,
  state: Any,
  inputs: Int[Array, "B k+1"],
  document: Int[Array, "B"],
  running: Bool[Array, "B"],
  number: Int[Array, "B"],
  limit: Int[Array, "B"],
) -> tuple[Any, Verified]:
  """Returns the state after the accepted tokens of a draft, and the tokens that the model chose.

  The states of rejected tokens are never kept: where a token is rejected in any row, the model
  reads the accepted tokens once more from the kept state, with padding behind them.

  Args:
    read: (tokens [B T], state, ids [B T]) -> logits [B T V] and the state after.
    request: what is asked of the rows.
    state: before `inputs`.
    inputs: [B k+1], the last token, which the model has not read yet, and the drafted ones; -1
      behind the last of a row.
    document: [B], of the rows' tokens.
    running: [B]; the other rows read nothing.
    number: [B], how many new tokens a row has already.
    limit: [B], how many more it may have.

  Returns:
    The state has read as many of `inputs` as tokens were chosen.
  """
  place = jnp.arange(inputs.shape[1], dtype=jnp.int32)
  is_input = (jnp.cumsum(inputs < 0, axis=1, dtype=jnp.int32) == 0) & running[:, None]
  is_input &= place[None] < limit[:, None]
  ids = lambda is_read: jnp.where(is_read, document[:, None], -1)
  tokens = jnp.maximum(inputs, 0)
  logits, after = read(tokens, state, ids(is_input))
  of_place = lambda x, n: choose(request, x, number + n)
  chosen, logprobs = jax.vmap(of_place, (1, 0), 1)(logits, place)

  agrees = (chosen[:, :-1] == inputs[:, 1:]) & is_input[:, 1:]
  is_reached = jnp.pad(jnp.cumprod(agrees, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
  is_reached = is_input & (is_reached > 0).at[:, 0].set(True)
  if request.stop is not None:
    stops = (chosen[..., None] == request.stop[None, None]).any(axis=-1)
    is_reached &= jnp.cumsum(stops, axis=1, dtype=jnp.int32) - stops.astype(jnp.int32) == 0
  is_chosen = is_reached & (jnp.cumsum(chosen < 0, axis=1, dtype=jnp.int32) == 0)
  count = is_chosen.sum(axis=1, dtype=jnp.int32)
  found = Verified(
    jnp.where(is_chosen, chosen, -1),
    jnp.where(is_chosen, logprobs.astype(jnp.float32), 0),
    count,
    (is_reached & (chosen < 0)).any(axis=1),
  )
  again = lambda: read(tokens, state, ids(is_chosen))[1]
  return jax.lax.cond((is_chosen == is_input).all(), lambda: after, again), found


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def verify_rows(
  graph, parameters, request: Request, document, state, inputs, running, number, limit
):
  """Returns `verify` of a model."""

  def f(parameters, request, document, state, inputs, running, number, limit):
    model = graph.merge(parameters)
    read = lambda tokens, state, ids: model(tokens, state, segment_ids=ids)
    return verify(read, request, state, inputs, document, running, number, limit)

  def specs(parameters, request, document, state, *_):
    row: Any = PartitionSpec(spec_of(document)[0])
    return jax.tree.map(spec_of, state), Verified(row, row, row, row)

  return on_automatic_axes(f, specs)(
    parameters, request, document, state, inputs, running, number, limit
  )


# --- drafts ---------------------------------------------------------------------------------------


class FunctionDraft:
  """A function that guesses the next tokens of a row from its tokens so far."""

  def __init__(self, function: Callable, prompts: Prompts, count: int, vocab_size: int | None):
    self.function, self.count, self.vocab_size = function, count, vocab_size
    rows = zip(prompts.tokens, prompts.lengths, strict=True)
    self.texts = [row[:length].tolist() for row, length in rows]

  def propose(self, token: np.ndarray, running: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Returns guesses [B count], -1 behind the last of a row."""
    guesses = np.full((len(self.texts), self.count), -1, np.int32)
    for row in np.flatnonzero(running):
      guess = guesses_of(self.function(list(self.texts[row])), self.vocab_size)[: self.count]
      guesses[row, : len(guess)] = guess
    return guesses

  def accept(self, inputs: np.ndarray, found: Verified) -> None:
    """Goes on behind the tokens that the model chose."""
    for text, tokens, count in zip(self.texts, found.tokens, found.count, strict=True):
      text += tokens[:count].tolist()


class ModelDraft:
  """A model that guesses the next tokens, with its state after all tokens of a row but the last."""

  def __init__(
    self, graph, parameters, state, request: Request, document, count: int, place: Callable
  ):
    self.graph, self.parameters, self.state = graph, parameters, state
    self.request, self.document, self.count, self.place = request, document, count, place

  def propose(self, token: np.ndarray, running: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Returns guesses [B count]; -1 from where no token can be chosen."""
    rows = map(self.place, (token, running, number))
    args = (self.graph, self.parameters, self.count, self.request, self.document, self.state)
    return np.asarray(_propose(*args, *rows))

  def accept(self, inputs: np.ndarray, found: Verified) -> None:
    """Reads those of `inputs` that the model has read, from the kept state."""
    is_read = np.arange(inputs.shape[1]) < found.count[:, None]
    ids = np.where(is_read, np.asarray(self.document)[:, None], -1).astype(np.int32)
    tokens = self.place(np.maximum(inputs, 0))
    self.state = prefill(self.graph, self.parameters, self.state, tokens, self.place(ids))


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def _propose(
  graph, parameters, count: int, request: Request, document, state, token, running, number
):
  """Returns `count` tokens that a model writes; its state behind them is dropped."""

  def f(parameters, request, document, state, token, running, number):
    def step(carry, n):
      token, running, state = carry
      ids = jnp.where(running, document, -1)[:, None]
      tokens = jnp.maximum(token, 0)[:, None]
      logits, state = graph.merge(parameters)(tokens, state, segment_ids=ids)
      token, _ = choose(request, logits[:, 0], number + n)
      token = jnp.where(running, token, -1)
      return (token, running & (token >= 0), state), token

    numbers = jnp.arange(count, dtype=jnp.int32)
    return jax.lax.scan(step, (token, running, state), numbers)[1].T

  specs = lambda parameters, request, document, *_: PartitionSpec(spec_of(document)[0])
  return on_automatic_axes(f, specs)(parameters, request, document, state, token, running, number)


# --- the loop -------------------------------------------------------------------------------------


def decode_drafted(
  advance: Callable,
  draft: FunctionDraft | ModelDraft,
  token: Int[np.ndarray, "B"],
  state: Any,
  max_tokens: int,
  request: Request,
  callback: Callable | None,
  place: Callable,
) -> tuple:
  """Runs a draft and its verification in turn, until all rows have ended.

  Returns:
    The parts of a `lajax.models.Completion`.
  """
  B = len(token)
  tokens, logprobs = np.full((B, max_tokens), -1, np.int32), np.zeros((B, max_tokens), np.float32)
  number, stopped, shown = np.zeros(B, np.int32), np.zeros(B, bool), 0
  while (running := ~stopped & (number < max_tokens)).any():
    guesses = draft.propose(token, running, number)
    inputs = np.concatenate([token[:, None], guesses], axis=1)
    limit = np.where(running, max_tokens - number, 0).astype(np.int32)
    state, found = advance(state, *map(place, (inputs, running, number, limit)))
    found = jax.device_get(found)
    draft.accept(inputs, found)
    for row in np.flatnonzero(found.count):
      count = found.count[row]
      new = slice(number[row], number[row] + count)
      tokens[row, new] = found.tokens[row, :count]
      logprobs[row, new] = found.logprobs[row, :count]
      token[row] = found.tokens[row, count - 1]
      stopped[row] = request.stop is not None and token[row] in request.stop
    number += found.count
    check_possible(found.failed, tokens)
    while callback is not None and shown < max_tokens and _is_whole(shown, number, stopped):
      callback(tokens[:, shown].copy())
      shown += 1
  return tokens, logprobs, number.astype(int), stopped, state


def _is_whole(column: int, number: np.ndarray, stopped: np.ndarray) -> bool:
  """Tells if a column of new tokens is complete, and not empty."""
  return bool((stopped | (number > column)).all() and (number > column).any())


# --- checks ---------------------------------------------------------------------------------------


def check_draft(draft: Any, model: Any) -> None:
  """ValueError unless a draft is None, a function, or a model of the same vocabulary."""
  if draft is None or (callable(draft) and not isinstance(draft, nnx.Module | type)):
    return
  if not isinstance(draft, nnx.Module):
    raise ValueError(
      "`draft` must be None, a model, or a function from a row's tokens to a list of guesses; got "
      f"{type(draft).__name__}."
    )
  check_model("draft", draft)
  want, got = vocabulary_of(model), vocabulary_of(draft)
  if want is not None and got is not None and want != got:
    raise ValueError(
      f"`draft` must have the model's vocabulary of {want} tokens; got one of {got}. Both must "
      "read the same tokens."
    )


def guesses_of(guesses: Any, vocab_size: int | None) -> np.ndarray:
  """Returns a row of guessed tokens; ValueError unless they are tokens of the vocabulary."""
  try:
    array = np.asarray(guesses)
  except ValueError:  # lists of different lengths
    array = np.asarray(guesses, object)
  if array.shape == (0,):
    return np.zeros(0, np.int32)
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    got = (
      f"an array of shape {array.shape} of {array.dtype}" if array.ndim else type(guesses).__name__
    )
    raise ValueError(f"`draft` must give a list of tokens, as [5, 3]; got {got}.")
  limit = 2**31 - 1 if vocab_size is None else vocab_size - 1
  wrong = array[(array < 0) | (array > limit)]
  if wrong.size:
    raise ValueError(f"`draft` must give tokens from 0 to {limit}; got {wrong[0]}.")
  return array


def check_possible(failed: np.ndarray, tokens: np.ndarray) -> None:
  """FloatingPointError if no token can be chosen in a row."""
  if failed.any():
    row = int(failed.argmax())
    raise FloatingPointError(no_token(f"row {row}", int((tokens[row] >= 0).sum())))


def no_token(name: str, number: int) -> str:
  """Message for logits from which no token can be chosen."""
  return (
    f"the logits of {name} hold NaN, or -inf alone, at new token {number}: no token can be chosen. "
    "Look at the model's parameters, and whether the prompt's tokens are in its vocabulary."
  )
