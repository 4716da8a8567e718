"""What a layer costs: parameters, bytes that it carries from token to token, operations a token.

Bytes are read off the real state, operations off the real program; both are only traced, so that a context of ten million
tokens costs no memory. Give layers that are traced too: `nnx.eval_shape(lambda: L.MLA(2048, rngs=nnx.Rngs(0)))`.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._operations import operations
from lajax._shapes import check_positive

STEP = 1024  # tokens between the programs that the work of a first call is read off


@dataclasses.dataclass(frozen=True)
class Size:
  """How many numbers, and their bytes in the dtypes that they are kept in."""

  numbers: int = 0
  bytes: int = 0

  def __add__(self, other: "Size") -> "Size":
    return Size(self.numbers + other.numbers, self.bytes + other.bytes)

  def bytes_in(self, dtype) -> int:
    """Their bytes in another dtype."""
    return self.numbers * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of a layer or of a stack of layers, at one length of context.

  `decode` and `prefill` are operations a token, multiplications and additions counted one each: of one more token behind
  `length` others, and the mean over the first `length` tokens in one call.
  """

  parameters: int = 0
  state: Size = Size()  # of recurrences
  conv: Size = Size()  # of short convolutions
  cache: Size = Size()  # of tokens: keys and values, or latents
  decode: int = 0
  prefill: float = 0.0

  def __add__(self, other: "Cost") -> "Cost":
    names = [field.name for field in dataclasses.fields(self)]
    return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

  @property
  def carried(self) -> Size:
    """All that goes from token to token."""
    return self.state + self.conv + self.cache


def cost(
  layers: nnx.Module | Sequence[nnx.Module], length: int, *, batch: int = 1, prefill: bool = True
) -> Cost:
  """The cost of a layer, or the sum over a stack.

      bytes = state + conv + cache(length) ;  operations a token: decode(length), prefill(length)

  Args:
    layers: a layer, or a sequence of them; one that stands in it several times is counted as often, and traced once.
    length: T >= 1, tokens of context. Caches are made for as many.
    batch: B, rows that the state is for. Operations are those of one row.
    prefill: count the operations of a first call too; without it, `prefill` is 0.

  Returns:
    Numbers, bytes and operations.

  Raises:
    ValueError: length or batch is below 1, or there is no layer.
  """
  check_positive("length", length)
  check_positive("batch", batch)
  stack = [layers] if isinstance(layers, nnx.Module) else list(layers)
  if not stack:
    raise ValueError(
      "`layers` must be a layer or a sequence of at least one; got none. Pass the layers of a model."
    )
  known: dict[int, Cost] = {}
  for layer in stack:
    if id(layer) not in known:
      work = prefill_operations(layer, length) if prefill else 0.0
      known[id(layer)] = dataclasses.replace(
        memory(layer, length, batch=batch),
        parameters=parameters(layer),
        decode=decode_operations(layer, length),
        prefill=work,
      )
  return sum((known[id(layer)] for layer in stack), Cost())


def parameters(layer: nnx.Module) -> int:
  """How many numbers a layer learns."""
  return sum(p.size for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))


def memory(layer: nnx.Module, length: int, *, batch: int = 1) -> Cost:
  """The parts of `init_state(batch)`, whose cache, if it has one, is for `length` tokens. (Not its two counters a row.)"""
  state = _shape_of_state(layer, length, batch)
  kept, conv = _size(state.memory), _size(state.conv)
  return Cost(conv=conv, cache=kept) if keeps_tokens(layer) else Cost(conv=conv, state=kept)


def keeps_tokens(layer: nnx.Module) -> bool:
  """Whether the layer's state is a cache that is made for a number of tokens."""
  return "max_length" in inspect.signature(getattr(layer, "init_state")).parameters  # noqa: B009


def score_numbers(num_heads: int, length: int) -> int:
  """The scores of softmax attention over n tokens, H n^2, where the matrix is made whole (lajax does not beyond 512)."""
  return num_heads * length * length


def decode_operations(layer: nnx.Module, length: int) -> int:
  """The operations of one token behind a state for `length` tokens: all places of a cache are read."""
  graph, params = nnx.split(layer)
  state, x = _shape_of_state(layer, length, 1), _tokens(layer, 1)
  return operations(
    jax.make_jaxpr(lambda p, x, s: nnx.merge(graph, p)(x, s))(params, x, state).jaxpr
  )


def prefill_operations(layer: nnx.Module, length: int) -> float:
  """The operations a token of a first call of `length` tokens.

  The work of a call of T tokens is a polynomial in T, read off programs of 1,024, 2,048 (and 3,072) tokens: a T for a
  recurrence; a T + b T^2 for attention, of whose scores a causal program skips, block by block, those that no token reads:
  so b counts for each token as often as it reads keys.
  """
  graph, params = nnx.split(layer)
  call = lambda p, x: nnx.merge(graph, p)(x)
  total = lambda n: operations(jax.make_jaxpr(call)(params, _tokens(layer, n * STEP)).jaxpr)
  if not keeps_tokens(layer):
    return (total(2) - total(1)) / STEP
  first, second, third = total(1), total(2), total(3)
  each_key = (third - 2 * second + first) / (2 * STEP**2)
  return (
    (second - first) / STEP
    - 3 * STEP * each_key
    + keys_read(length, getattr(layer, "window", None)) * each_key
  )


def keys_read(length: int, window: int | None = None) -> float:
  """How many keys a token reads in the mean over a sequence: itself, and those before it in the window."""
  seen = length if window is None else min(length, window)
  return seen - seen * (seen - 1) / (2 * length)


# --- shapes ----------------------------------------------------------------------------------------------------------


def _shape_of_state(layer, length: int, batch: int):
  options = {"max_length": length} if keeps_tokens(layer) else {}
  return jax.eval_shape(lambda: layer.init_state(batch, **options))


def _tokens(layer, length: int):
  width = getattr(layer, "d_model", None) or layer.channels
  dtype = getattr(layer, "dtype", None) or getattr(layer, "param_dtype", jnp.float32)
  return jax.ShapeDtypeStruct((1, length, width), dtype)


def _size(arrays) -> Size:
  leaves: Iterable = jax.tree.leaves(arrays)
  return sum((Size(x.size, x.size * x.dtype.itemsize) for x in leaves), Size())
