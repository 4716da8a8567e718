"""Models as arguments of compiled functions: graph and arrays, first states, the choice of tokens.

A model is an argument by its graph and its arrays, so equal models share what is compiled.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._meshes import on_automatic_axes, spec_of
from lajax._numerics import promoted
from lajax.layers.kv_cache import CachedMixer
from lajax.models.requests import Request
from lajax.models.sampling import sample


class Graph:
  """All of a model but its arrays, as a static argument of jit: compared and hashed once."""

  def __init__(self, definition: Any, parameters: Any):
    self.definition, self.parameters = definition, parameters
    self._hash = hash((definition, parameters))

  def merge(self, arrays: list[Array]) -> Any:
    return nnx.merge(self.definition, jax.tree.unflatten(self.parameters, arrays))

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other) -> bool:
    if self is other or not isinstance(other, Graph):
      return self is other
    return self.definition == other.definition and self.parameters == other.parameters


def split(model: nnx.Module) -> tuple[Graph, list[Array]]:
  """Returns a model's graph, the same object for equal models, and its arrays.

  jit compares static arguments in every call. For 28 layers that takes milliseconds, unless they
  are one object.
  """
  definition, state = nnx.split(model)
  arrays, parameters = jax.tree.flatten(state)
  return _first_of_equal(Graph(definition, parameters)), arrays


@functools.lru_cache(maxsize=1024)
def _first_of_equal(graph: Graph) -> Graph:
  return graph


def check_model(name: str, model: Any) -> None:
  """ValueError unless a model can be called as `lajax.generate` calls it."""
  if not isinstance(model, nnx.Module) or not callable(getattr(model, "init_state", None)):
    raise ValueError(
      f"`{name}` must be an nnx.Module with `init_state(batch)` and the call `logits, state = "
      f"model(tokens, state, segment_ids=ids)`, as lajax.models.RecallModel; got "
      f"{type(model).__name__}."
    )


def vocabulary_of(model: Any) -> int | None:
  """Returns the number of a model's tokens, where it says so."""
  return getattr(model, "vocab_size", getattr(getattr(model, "config", None), "vocab_size", None))


# --- states ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graph", "batch", "longer", "max_length"))
def first_state(graph: Graph, parameters, batch: int, longer: int = 0, max_length=None):
  """Returns the model's first state.

  Args:
    graph, parameters: the model.
    batch: B.
    longer: places of the caches beyond `max_length`.
    max_length: tokens that the caches hold; None for each layer's own.
  """
  model = graph.merge(parameters)
  for _, module in nnx.iter_modules(model):
    if isinstance(module, CachedMixer):
      module.max_length = (max_length or module.max_length) + longer
  return model.init_state(batch)


def axes_that_differ(graph: Graph, parameters, one: tuple, other: tuple):
  """Axis of each array of a state whose size differs between two first states; -1 for none.

  Args:
    graph, parameters: the model.
    one, other: (batch, longer) or (batch, longer, max_length) of `first_state`.
  """

  def axis(a, b) -> int:
    pairs = zip(a.shape, b.shape, strict=True)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), -1)

  shapes = lambda sizes: first_state.eval_shape(graph, parameters, *sizes)
  return jax.tree.map(axis, shapes(one), shapes(other))


def settled(model: Any, state: Any, token: Int[Array, "B"]) -> Any:
  """Returns a state in the dtypes that calls keep, and in buffers of its own.

  Args:
    model: the model.
    state: its state before the call.
    token: [B], of which only the type is used.
  """
  one = token[:, None]
  _, after = jax.eval_shape(lambda s: model(one, s, segment_ids=jnp.zeros_like(one)), state)
  like, structure = jax.tree.flatten(after)
  pairs = zip(jax.tree.leaves(state), like, strict=True)
  return jax.tree.unflatten(structure, [jnp.copy(s.astype(x.dtype)) for s, x in pairs])


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def prefill(graph, parameters, state, tokens: Int[Array, "B P"], ids: Int[Array, "B P"]):
  """Returns the state after a piece. Its logits are not used, so XLA leaves the output head out."""
  read = lambda p, state, tokens, ids: graph.merge(p)(tokens, state, segment_ids=ids)[1]
  specs = lambda p, state, tokens, ids: jax.tree.map(spec_of, state)
  return on_automatic_axes(read, specs)(parameters, state, tokens, ids)


# --- tokens ---------------------------------------------------------------------------------------


def choose(request: Request, logits: Float[Array, "B V"], number: Int[Array, "B"]):
  """Returns the new token of every row and the log-probability that the model gives it.

  Args:
    request: what is asked of the rows.
    logits: [B V].
    number: [B] or without axes; how many new tokens a row has already.
  """
  keys = request.keys
  if keys is not None:
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(number, logits.shape[:1]))
  options = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "min_p")}
  token = jax.vmap(lambda k, x, o: sample(k, x, **o))(keys, logits, options)
  wide = logits.astype(promoted(logits.dtype, jnp.float32))
  at_token = jnp.take_along_axis(wide, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
  return token, at_token - jax.nn.logsumexp(wide, axis=1)
