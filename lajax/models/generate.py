"""Generation of tokens: prefill in pieces of one length, then a compiled loop over new tokens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lajax._meshes import explicit_mesh, on_automatic_axes, spec_of
from lajax._shapes import check_whole
from lajax.layers import LayerState
from lajax.models.drafts import (
  FunctionDraft,
  ModelDraft,
  check_draft,
  check_possible,
  decode_drafted,
  verify_rows,
)
from lajax.models.graphs import (
  axes_that_differ,
  check_model,
  choose,
  first_state,
  prefill,
  settled,
  split,
  vocabulary_of,
)
from lajax.models.requests import UNNAMED, Prompts, Request, prompts_of, request_of

BLOCK = 64  # tokens per call of the compiled loop; the host looks at each block once


class Completion(NamedTuple):
  """Tokens that follow a batch of prompts, and what goes with them."""

  tokens: Int[np.ndarray, "B max_tokens"]  # int32; -1 behind the last one of a row
  logprobs: Float[np.ndarray, "B max_tokens"]  # log softmax(logits) at the token; 0 behind the last
  lengths: Int[np.ndarray, "B"]  # tokens of each row, its stop token included
  stopped: Bool[np.ndarray, "B"]  # whether the last one is a stop token
  state: Any  # the model's, after all tokens of a row but the last


def generate(
  model: Any,
  prompt: Int[Array, "B T"] | Sequence[Sequence[int]],
  max_tokens: int,
  *,
  segment_ids: Int[Array, "B T"] | None = None,
  temperature: float | Float[Array, "B"] = 0.0,
  top_k: int | Int[Array, "B"] | None = None,
  top_p: float | Float[Array, "B"] | None = None,
  min_p: float | Float[Array, "B"] | None = None,
  stop_tokens: Sequence[int] = (),
  key: Array | None = None,
  prefill_piece: int = 256,
  callback: Callable[[np.ndarray], Any] | None = None,
  state: Any = None,
  draft: Any = None,
  draft_tokens: int = 4,
) -> Int[np.ndarray, "B max_tokens"]:
  """Tokens that a model writes behind a batch of prompts.

      tokens = lajax.generate(model, [[5, 3, 8], [7]], 20)
      tokens = lajax.generate(model, prompt, 20, temperature=0.8, top_p=0.9, key=jax.random.key(0))

  * Prompts of different lengths, in one batch or one by one, give the same tokens, up to the
    rounding of the model's numbers; so does every `prefill_piece`. Padding costs time only.
  * Token t of row b (t counts the new tokens from 0) depends on the key, b and t, whatever the
    batch and the length of the prompt: its key is fold_in(fold_in(key, b), t). This needs a key of
    JAX's default kind, threefry.
  * The prompt is read in pieces of `prefill_piece` tokens. A prompt of a million tokens needs the
    memory of one piece and of the states.
  * Everything is compiled once for each batch size, piece length and set of sampling options (none
    count while all temperatures are 0). Another prompt, `max_tokens` or value of an option compiles
    nothing. Nor does `callback`; with it the host waits for every token, otherwise for every 64th.

  Args:
    model: an `nnx.Module` with `logits, state = model(tokens, state=None, *, segment_ids=None)` and
      `model.init_state(batch)`, such as `lajax.models.RecallModel`.
    prompt: integers [B T] with padding by `segment_ids`, or B lists of integers of any lengths.
      Each row needs a token.
    max_tokens: the number of new tokens of a row, if no stop token comes earlier.
    segment_ids: [B T], the document of each token of the prompt, -1 for padding anywhere. The new
      tokens continue the last document of their row. None for one document without padding.
    temperature: at least 0; 0 takes the most likely token. This option and the next three are one
      number, or an array [B] of one per row; `lajax.models.sample` defines them.
    top_k: a whole number of at least 1; None for all tokens.
    top_p: in (0, 1]; None for 1.
    min_p: in [0, 1]; None for 0.
    stop_tokens: a row ends with the first of these tokens.
    key: a random key, where a temperature is above 0; or an array [B] of keys, one per row in place
      of fold_in(key, b).
    prefill_piece: tokens per call in the prefill.
    callback: called for each new token of the batch as callback(tokens [B]), -1 in rows that have
      ended.
    state: of a `Completion` or of the model, which the prompt continues; None to begin. The state
      of a completion lacks its last token, so a prompt that goes on begins with that token. A
      state that is passed can be used again.
    draft: what guesses the next tokens, so that the model reads several in one call: a smaller
      model of the same vocabulary, or a function from the list of a row's tokens so far to a list
      of guesses, which may be empty. At every temperature the tokens are those without a draft, up
      to the rounding of the model's numbers. A draft model reads the prompt alone, and not what
      `state` has read.
    draft_tokens: guesses per call at most; what a function guesses beyond is left out.

  Returns:
    int32 [B max_tokens]; -1 behind the end of a row. `lajax.models.complete` takes the same
    arguments and returns log-probabilities, lengths and the state too.

  Raises:
    ValueError: an argument is wrong, or a document would not fit into a key-value cache.
    FloatingPointError: a logit is NaN, or all of a row are -inf.
  """
  return complete(
    model,
    prompt,
    max_tokens,
    segment_ids=segment_ids,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    stop_tokens=stop_tokens,
    key=key,
    prefill_piece=prefill_piece,
    callback=callback,
    state=state,
    draft=draft,
    draft_tokens=draft_tokens,
  ).tokens


def complete(
  model: Any,
  prompt: Int[Array, "B T"] | Sequence[Sequence[int]],
  max_tokens: int,
  *,
  segment_ids: Int[Array, "B T"] | None = None,
  temperature: float | Float[Array, "B"] = 0.0,
  top_k: int | Int[Array, "B"] | None = None,
  top_p: float | Float[Array, "B"] | None = None,
  min_p: float | Float[Array, "B"] | None = None,
  stop_tokens: Sequence[int] = (),
  key: Array | None = None,
  prefill_piece: int = 256,
  callback: Callable[[np.ndarray], Any] | None = None,
  state: Any = None,
  draft: Any = None,
  draft_tokens: int = 4,
) -> Completion:
  """Returns the tokens of `lajax.generate`, their log-probabilities and the state after them.

      a = complete(model, prompt, 20)
      b = complete(model, a.tokens[:, -1:], 20, state=a.state)  # the next 20, if no row has stopped

  Arguments and errors are those of `lajax.generate`. The log-probabilities are those of the model:
  temperature and filters do not change them.
  """
  check_model("model", model)
  max_tokens = check_whole("max_tokens", max_tokens)
  piece = check_whole("prefill_piece", prefill_piece)
  if callback is not None and not callable(callback):
    raise ValueError(f"`callback` must be callable or None; got {type(callback).__name__}.")
  check_draft(draft, model)
  draft_tokens = check_whole("draft_tokens", draft_tokens)
  prompts = prompts_of(prompt, segment_ids, vocabulary_of(model))
  B = len(prompts.lengths)
  request = request_of(
    B,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    stop_tokens=stop_tokens,
    key=key,
  )
  graph, parameters = split(model)
  _check_state(graph, parameters, B, state)
  prompts, carried = _behind(prompts, state)
  _check_room(graph, parameters, B, state, prompts.longest_document(carried, max_tokens))
  place = _placer(prompt, parameters)
  state = _begin(graph, parameters, state, place(prompts.last))
  for tokens, ids in prompts.pieces(piece):
    state = prefill(graph, parameters, state, place(tokens), place(ids))
  if draft is None:
    rows = Rows(place(prompts.last), place(np.ones(B, bool)))
    advance = functools.partial(_decode, graph, parameters, request, place(prompts.document))
    return Completion(*_decode_all(advance, rows, state, (B, max_tokens), callback))
  if isinstance(draft, nnx.Module):
    guess, others = split(draft)
    _check_room(guess, others, B, None, prompts.longest_document(np.zeros(B, int), max_tokens))
    guessed = _begin(guess, others, None, place(prompts.last))
    for tokens, ids in prompts.pieces(piece):
      guessed = prefill(guess, others, guessed, place(tokens), place(ids))
    drafter = ModelDraft(
      guess, others, guessed, request, place(prompts.document), draft_tokens, place
    )
  else:
    drafter = FunctionDraft(draft, prompts, draft_tokens, vocabulary_of(model))
  advance = functools.partial(verify_rows, graph, parameters, request, place(prompts.document))
  return Completion(
    *decode_drafted(advance, drafter, prompts.last, state, max_tokens, request, callback, place)
  )


def _decode_all(advance, rows: "Rows", state, shape: tuple[int, int], callback) -> tuple:
  """Runs the compiled loop, block by block, until all rows have ended: parts of a `Completion`."""
  tokens, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
  done, running = 0, np.ones(shape[0], bool)
  while done < shape[1] and running.any():
    steps = 1 if callback is not None else min(BLOCK, shape[1] - done)
    rows, state, block = advance(rows, state, np.int32(done), np.int32(steps))
    running, block = jax.device_get((rows.running, block))
    now = slice(done, done + steps)
    tokens[:, now], logprobs[:, now] = block.tokens[:, :steps], block.logprobs[:, :steps]
    done += steps
    check_possible(block.failed, tokens)
    if callback is not None:
      callback(tokens[:, done - 1].copy())
  return tokens, logprobs, (tokens >= 0).sum(axis=1), ~running, state


# --- the compiled functions -----------------------------------------------------------------------


class Rows(NamedTuple):
  """Values that the loop carries from token to token, besides the model's state."""

  token: Int[Array, "B"]  # the last one, which the model has not read yet
  running: Bool[Array, "B"]


class Block(NamedTuple):
  """New tokens of one call of the loop; all but `failed` are empty behind the number of steps."""

  tokens: Int[Array, "B BLOCK"]
  logprobs: Float[Array, "B BLOCK"]
  failed: Bool[Array, "B"]  # rows in which no token can be chosen


# keep_unused: `token`, of which only the type is used, brings the mesh of the result.
@functools.partial(jax.jit, static_argnames="graph", keep_unused=True)
def _begin(graph, parameters, state, token: Int[Array, "B"]):
  """Returns a state in the dtypes that calls keep, and in buffers of its own, so that it can be
  donated.
  """
  B = token.shape[0]

  def f(parameters, state, token):
    model = graph.merge(parameters)
    return settled(model, model.init_state(B) if state is None else state, token)

  def specs(parameters, state, token):
    rows = spec_of(token)[0]
    of_batch = lambda axis: PartitionSpec(*[None] * axis, rows) if axis >= 0 else PartitionSpec()
    made = jax.tree.map(of_batch, axes_that_differ(graph, parameters, (B, 0), (B + 1, 0)))
    if state is None:
      return made
    own = lambda s, spec: spec if explicit_mesh(s) is None else spec_of(s)
    given = zip(jax.tree.leaves(state), jax.tree.leaves(made), strict=True)
    return jax.tree.unflatten(jax.tree.structure(made), [own(*pair) for pair in given])

  return on_automatic_axes(f, specs)(parameters, state, token)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _decode(graph, parameters, request: Request, document, rows: Rows, state, done, steps):
  """Returns the rows, the state and the block after `steps` tokens, the first of number `done`."""
  B = document.shape[0]

  def f(parameters, request, document, rows, state, done, steps):
    def step(carry):
      n, (token, running), state, block = carry
      ids = jnp.where(running, document, -1)[:, None]
      logits, state = graph.merge(parameters)(token[:, None], state, segment_ids=ids)
      token, logprob = choose(request, logits[:, 0], done + n)
      failed = running & (token < 0)
      token, logprob = jnp.where(running, token, -1), jnp.where(running, logprob, 0)
      running &= ~failed
      if request.stop is not None:
        running &= (token[:, None] != request.stop[None]).all(axis=1)
      block = Block(
        block.tokens.at[:, n].set(token),
        block.logprobs.at[:, n].set(logprob.astype(jnp.float32)),
        block.failed | failed,
      )
      return n + 1, Rows(jnp.maximum(token, 0), running), state, block

    empty = Block(
      jnp.full((B, BLOCK), -1, jnp.int32), jnp.zeros((B, BLOCK), jnp.float32), jnp.zeros(B, bool)
    )
    more = lambda carry: (carry[0] < steps) & carry[1].running.any()
    return jax.lax.while_loop(more, step, (jnp.zeros_like(steps), rows, state, empty))[1:]

  def specs(parameters, request, document, rows, state, done, steps):
    row: Any = PartitionSpec(spec_of(document)[0])
    return Rows(row, row), jax.tree.map(spec_of, state), Block(row, row, row)

  arguments = (parameters, request, document, rows, state, done, steps)
  return on_automatic_axes(f, specs)(*arguments)


# --- models, states and meshes --------------------------------------------------------------------


def _check_state(graph, parameters, B: int, state: Any) -> None:
  """ValueError unless a state has as many arrays as the model's own. The model checks the rest."""
  if state is None:
    return
  leaves = jax.tree.leaves(state)
  wanted = len(jax.tree.leaves(first_state.eval_shape(graph, parameters, B)))
  if len(leaves) != wanted or not all(hasattr(x, "shape") for x in leaves):
    raise ValueError(
      f"`state` must be None, a completion's state or model.init_state({B}), {wanted} arrays; "
      f"got {type(state).__name__} of {len(leaves)} leaves."
    )


def _behind(prompts: Prompts, state: Any) -> tuple[Prompts, np.ndarray]:
  """Returns the prompts with the state's documents where they name none, and what it carries.

  The second is [B]: tokens of each row's first document that the state holds.
  """
  B = len(prompts.lengths)
  is_layer = lambda x: isinstance(x, LayerState)
  layer = next(filter(is_layer, jax.tree.leaves(state, is_leaf=is_layer)), None)
  segment, length = np.full(B, -1, np.int32), np.zeros(B, np.int32)
  if layer is not None and np.shape(layer.segment)[-1:] == (B,):  # stacked layers: [N B]
    segment, length = (
      np.asarray(x).reshape(-1, B)[0] for x in jax.device_get((layer.segment, layer.length))
    )
  own = np.maximum(segment, 0)[:, None]
  prompts = prompts._replace(ids=np.where(prompts.ids == UNNAMED, own, prompts.ids))
  continues = (segment < 0) | (prompts.ids[:, 0] == segment)
  return prompts, np.where(continues, length, 0)


def _check_room(graph, parameters, B: int, state: Any, longest: int) -> None:
  """ValueError where a document outgrows a key-value cache. A ring of a window takes any length."""
  given = jax.tree.leaves(first_state.eval_shape(graph, parameters, B) if state is None else state)
  axes = jax.tree.leaves(axes_that_differ(graph, parameters, (B, 0), (B, 1)))
  places = min((x.shape[n] for x, n in zip(given, axes, strict=True) if n >= 0), default=longest)
  if longest > places:
    raise ValueError(
      f"`max_tokens` and the prompt must fit into the model's key-value caches of {places} tokens; "
      f"got a document of {longest} tokens. Take fewer tokens, or give the attention layers a "
      "larger max_length or a window."
    )


def _placer(prompt: Any, parameters: list[Array]) -> Callable:
  """Returns a function that lays out arrays [B ..] as the prompt's rows, on its mesh or the
  model's.
  """
  on_mesh = lambda x: isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
  like: Any = next(filter(on_mesh, (prompt, *parameters)), None)
  if like is None:
    return lambda x: x
  rows = PartitionSpec(*like.sharding.spec[:1]) if like is prompt else PartitionSpec()
  sharding = NamedSharding(like.sharding.mesh, rows)
  return lambda x: jax.device_put(x, sharding)
