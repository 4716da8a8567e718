"""Costs of layers: parameters, bytes carried from token to token, operations per token.

Bytes are read off the real state, operations off the real program. Both are only traced, so a
context of ten million tokens costs no memory. Layers may be traced too: `nnx.eval_shape(lambda:
L.MLA(2048, rngs=nnx.Rngs(0)))`.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._operations import operations
from lajax._shapes import check_flag, check_whole

STEP = 1024  # tokens between the programs from which the work of a first call is computed


@dataclasses.dataclass(frozen=True)
class Size:
  """A count of numbers, and their bytes in the dtypes that they are kept in."""

  numbers: int = 0
  bytes: int = 0

  def __add__(self, other: "Size") -> "Size":
    if not isinstance(other, Size):
      return NotImplemented
    return Size(self.numbers + other.numbers, self.bytes + other.bytes)

  def bytes_in(self, dtype) -> int:
    """Returns the bytes of as many numbers in another dtype."""
    try:
      width = 0 if dtype is None else jnp.dtype(dtype).itemsize
    except TypeError:
      width = 0
    if not width:
      raise ValueError(f"`dtype` must be a dtype, such as jnp.bfloat16; got {dtype!r}.")
    return self.numbers * width


@dataclasses.dataclass(frozen=True)
class Cost:
  """Cost of a layer or of a stack of layers, at one length of context.

  Attributes:
    parameters: number of parameters.
    state: states of recurrences. That of log-linear attention grows by a matrix per head each time
      that the length doubles, up to the layer's `max_length`.
    conv: caches of short convolutions.
    cache: what is kept per token: keys and values, or latents.
    decode: operations of one more token after `length` tokens.
    prefill: operations per token of a first call of `length` tokens, in the mean.

  An operation is one multiplication or one addition.
  """

  parameters: int = 0
  state: Size = Size()
  conv: Size = Size()
  cache: Size = Size()
  decode: int = 0
  prefill: float = 0.0

  def __add__(self, other: "Cost") -> "Cost":
    if not isinstance(other, Cost):
      return NotImplemented
    names = [field.name for field in dataclasses.fields(self)]
    return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

  @property
  def carried(self) -> Size:
    """Everything that is carried from token to token."""
    return self.state + self.conv + self.cache


def cost(
  layers: nnx.Module | Sequence[nnx.Module], length: int, *, batch: int = 1, prefill: bool = True
) -> Cost:
  """Returns the cost of a layer, or the sum over a stack.

      bytes = state + conv + cache(length) ;  operations per token: decode(length), prefill(length)

  Args:
    layers: a layer, a language model, or a sequence of them. A layer that occurs n times counts n
      times, and is traced once.
    length: T, tokens of context, at least 1. Caches are made for T tokens.
    batch: B, the number of rows of the state, at least 1. Operations are those of one row.
    prefill: also count the operations of a first call; if False, `prefill` of the result is 0.

  Returns:
    A `Cost`: numbers, bytes and operations.

  Raises:
    ValueError: `length` or `batch` is not a whole number of at least 1, or `layers` is not a layer
      or a sequence of at least one.
  """
  length, batch = check_whole("length", length), check_whole("batch", batch)
  prefill = check_flag("prefill", prefill)
  stack = [layers] if isinstance(layers, nnx.Module) else layers
  if not isinstance(stack, Sequence | nnx.List) or isinstance(stack, str) or not len(stack):
    got = "none" if isinstance(stack, Sequence) and not len(stack) else type(layers).__name__
    raise ValueError(
      "`layers` must be a layer or a sequence of at least one; "
      f"got {got}. Pass the layers of a model."
    )
  known: dict[int, Cost] = {}
  for n, layer in enumerate(stack):
    if id(layer) not in known:
      _check_layer(layer, "`layers`" if layer is layers else f"`layers[{n}]`")
      work = prefill_operations(layer, length) if prefill else 0.0
      known[id(layer)] = dataclasses.replace(
        memory(layer, length, batch=batch),
        parameters=parameters(layer),
        decode=decode_operations(layer, length),
        prefill=work,
      )
  return sum((known[id(layer)] for layer in stack), Cost())


def parameters(layer: nnx.Module) -> int:
  """Returns the number of parameters of a layer, or of any module."""
  if not isinstance(layer, nnx.Module):
    raise ValueError(f"`layer` must be an nnx.Module; got {type(layer).__name__}.")
  return sum(p.size for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))


def memory(layer: nnx.Module, length: int, *, batch: int = 1) -> Cost:
  """Returns the sizes of the parts of `init_state(batch)`; a cache is made for `length` tokens.

  The two counters per row of a state are left out.
  """
  _check_layer(layer)
  length, batch = check_whole("length", length), check_whole("batch", batch)
  if _is_model(layer):
    parts = [(memory(mixer, length, batch=batch), n) for mixer, n in _mixers(layer)]
    return sum((part for part, n in parts for _ in range(n)), Cost())
  state = _shape_of_state(layer, length, batch)
  memory_, conv = _size(state.memory), _size(state.conv)
  return Cost(conv=conv, cache=memory_) if keeps_tokens(layer) else Cost(conv=conv, state=memory_)


def keeps_tokens(layer: nnx.Module) -> bool:
  """Returns whether the layer's state is a cache that is made for a number of tokens."""
  _check_layer(layer)
  return _sized_by_length(layer) and not hasattr(layer, "num_levels")


def _sized_by_length(layer) -> bool:
  """Says whether a state is made for a number of tokens: a cache, or levels that are its log."""
  return "max_length" in inspect.signature(getattr(layer, "init_state")).parameters  # noqa: B009


def score_numbers(num_heads: int, length: int) -> int:
  """Returns the number of scores of softmax attention over n tokens, H n^2, if it stored them."""
  return check_whole("num_heads", num_heads) * check_whole("length", length) ** 2


def decode_operations(layer: nnx.Module, length: int) -> int:
  """Returns the operations of one token whose cache holds `length` tokens; all of them are read."""
  _check_layer(layer)
  state, x = _shape_of_state(layer, check_whole("length", length), 1), _tokens(layer, 1)
  graph, params = nnx.split(layer)
  return operations(
    jax.make_jaxpr(lambda p, x, s: nnx.merge(graph, p)(x, s))(params, x, state).jaxpr
  )


def prefill_operations(layer: nnx.Module, length: int) -> float:
  """Returns the operations per token of a first call of `length` tokens.

  The work of a call of T tokens is a polynomial in T, computed from programs of 1,024, 2,048 (and
  3,072) tokens: a T for a recurrence, a T + b T^2 for attention. A causal program skips the blocks
  of scores that no token reads, so the term in b counts each token as often as it reads keys.
  """
  _check_layer(layer)
  length = check_whole("length", length)
  if _is_model(layer):
    mixers = _mixers(layer)
    inside = sum(n * decode_operations(mixer, 1) for mixer, n in mixers)
    outside = decode_operations(layer, 1) - inside  # MLPs, norms and head work per token
    return outside + sum(n * prefill_operations(mixer, length) for mixer, n in mixers)
  graph, params = nnx.split(layer)
  call = lambda p, x: nnx.merge(graph, p)(x)
  total = lambda n: operations(jax.make_jaxpr(call)(params, _tokens(layer, n * STEP)).jaxpr)
  if not keeps_tokens(layer):
    return (total(2) - total(1)) / STEP
  first, second, third = total(1), total(2), total(3)
  per_key = (third - 2 * second + first) / (2 * STEP**2)
  per_token = (second - first) / STEP - 3 * STEP * per_key
  return per_token + keys_read(length, getattr(layer, "window", None)) * per_key


def keys_read(length: int, window: int | None = None) -> float:
  """Returns the mean number of keys that a token reads: its own, and earlier ones in the window."""
  length = check_whole("length", length)
  seen = length if window is None else min(length, check_whole("window", window))
  return seen - seen * (seen - 1) / (2 * length)


# --- shapes ---


def _check_layer(layer, name: str = "`layer`") -> None:
  if not isinstance(layer, nnx.Module) or not callable(getattr(layer, "init_state", None)):
    raise ValueError(
      f"{name} must be a layer of lajax.layers, or a module like it with `init_state(batch)`; "
      f"got {type(layer).__name__}."
    )


def _shape_of_state(layer, length: int, batch: int):
  options = {"max_length": length} if _sized_by_length(layer) else {}
  return jax.eval_shape(lambda: layer.init_state(batch, **options))


def _is_model(layer) -> bool:
  """Says whether a module is a language model, whose mixers are counted one by one."""
  return hasattr(layer, "mixer_layers")


def _mixers(model: Any) -> list[tuple[nnx.Module, int]]:
  """Returns every kind of mixer of a language model, and how many layers have it."""
  return model.mixer_layers()


def _tokens(layer, length: int):
  if _is_model(layer):
    return jax.ShapeDtypeStruct((1, length), jnp.int32)
  width = getattr(layer, "d_model", None) or layer.channels
  dtype = getattr(layer, "dtype", None) or getattr(layer, "param_dtype", jnp.float32)
  return jax.ShapeDtypeStruct((1, length, width), dtype)


def _size(arrays) -> Size:
  leaves: Iterable = jax.tree.leaves(arrays)
  return sum((Size(x.size, x.size * x.dtype.itemsize) for x in leaves), Size())
