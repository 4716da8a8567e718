"""Model of the recall benchmarks: a short gated convolution and a mixer, which alone remembers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lajax._numerics import promoted
from lajax._shapes import check, check_given, check_rngs, check_whole
from lajax.layers import LayerState, ShortConv
from lajax.layers.parameters import Linear
from lajax.models.vocabulary import check_vocabulary


class GatedShortConv(nnx.Module):
  """Short convolution with a multiplicative gate: the layer that joins a value to its key.

      y = (x W + b) * (conv(x) + c)

  Args:
    d_model: D.
    width: number of tokens that the convolution reads, the present one included.
    rngs: random streams of the parameters.

  Raises:
    ValueError: a size is not a whole number of at least 1, or `rngs` is not `nnx.Rngs`.

  Paper: S. Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models",
    2023, arXiv:2312.04927,
  section 5 (BaseConv, here with its short filter).
  """

  def __init__(self, d_model: int, width: int = 3, *, rngs: nnx.Rngs):
    self.d_model = check_whole("d_model", d_model)
    width = check_whole("width", width)
    check_rngs(rngs)
    self.gate = Linear(self.d_model, self.d_model, rngs=rngs)
    self.conv = ShortConv(self.d_model, width, use_bias=True, activation=None, rngs=rngs)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """Convolves and gates x, continuing from a state. Returns outputs and the state after them."""
    _check({"D": self.d_model}, x=(x, "B T D", "float"))
    y, state = self.conv(x, state, segment_ids=segment_ids)
    return y * self.gate(x), state

  def init_state(self, batch: int) -> LayerState:
    """Returns the state before the first token."""
    return self.conv.init_state(check_whole("batch", batch))


class RecallModel(nnx.Module):
  """Token embedding, layers as pre-norm residual blocks, norm, output head: no MLP, no positions.

      x = E[tokens] ;  x += layer(RMSNorm(x)) for each layer ;  logits = RMSNorm(x) W

  Args:
    vocab_size: number of tokens, and of logits.
    d_model: D.
    layers: makers of layers, each called with `rngs`, such as `[partial(GatedShortConv, 64),
      partial(DeltaNet, 64)]`. A layer is `layer(x, state=None, *, segment_ids=None) -> (y, state)`
      with `init_state(batch)`.
    rngs: random streams of the parameters.

  Raises:
    ValueError: a size is not a whole number of at least 1, `layers` is not a sequence of callables,
      or `rngs` is not `nnx.Rngs`.
  """

  def __init__(
    self, vocab_size: int, d_model: int, layers: Sequence[Callable[..., Any]], *, rngs: nnx.Rngs
  ):
    self.vocab_size = check_whole("vocab_size", vocab_size)
    self.d_model = check_whole("d_model", d_model)
    if not isinstance(layers, Sequence) or not all(map(callable, layers)):
      raise ValueError(
        "`layers` must be a sequence of callables that make a layer from `rngs`; "
        f"got {type(layers).__name__}. Pass [functools.partial(DeltaNet, {self.d_model})], say."
      )
    check_rngs(rngs)
    self.embed = nnx.Embed(self.vocab_size, self.d_model, rngs=rngs)
    self.layers = nnx.List([make(rngs=rngs) for make in layers])
    self.norms = nnx.List([nnx.RMSNorm(self.d_model, rngs=rngs) for _ in layers])
    self.final_norm = nnx.RMSNorm(self.d_model, rngs=rngs)
    self.head = Linear(self.d_model, self.vocab_size, use_bias=False, rngs=rngs)

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    state: list | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T vocab_size"], list]:
    """Returns the logits after every token, and the state after the last token.

    Raises:
      ValueError: an argument has the wrong rank, size or dtype, or a token that is not padding is
        outside the vocabulary. Tokens that are traced are not checked.
    """
    x, state = self.hidden(tokens, state, segment_ids=segment_ids)
    return self.head(x), state

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    state: list | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], list]:
    """Returns the inputs of the output head, and the state after the last token."""
    sizes = _check(tokens=(tokens, "B T", "int"))
    if segment_ids is not None:
      check({"B": sizes.B, "T": sizes.T}, segment_ids=(segment_ids, "B T", "int"))
    check_vocabulary(tokens, segment_ids, self.vocab_size)
    count = len(self.layers)
    if state is not None and (not isinstance(state, list | tuple) or len(state) != count):
      got = len(state) if isinstance(state, list | tuple) else type(state).__name__
      raise ValueError(
        f"`state` must be None or the list of {count} states, one per layer, that a call returns; "
        f"got {got}."
      )
    x = self.embed(tokens)
    after = []
    for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
      y, last = layer(norm(x), None if state is None else state[i], segment_ids=segment_ids)
      dtype = promoted(x.dtype, y.dtype)
      x = x.astype(dtype) + y.astype(dtype)
      after.append(last)
    return self.final_norm(x), after

  def answers(
    self, tokens: Int[Array, "B T"], positions: Int[Array, "B P"]
  ) -> Float[Array, "B P vocab_size"]:
    """Returns the logits at P positions of each row. The head runs only there."""
    _check(tokens=(tokens, "B T", "int"), positions=(positions, "B P", "int"))
    x, _ = self.hidden(tokens)
    return self.head(jnp.take_along_axis(x, positions[:, :, None], axis=1))

  def init_state(self, batch: int) -> list:
    """Returns the state of every layer before the first token."""
    batch = check_whole("batch", batch)
    layers: Any = self.layers
    return [layer.init_state(batch) for layer in layers]


def masked_positions(mask: Bool[Array, "B L"], count: int) -> Int[Array, "B count"]:
  """Returns the first `count` masked positions of each row; unmasked ones if a row has fewer.

  Args:
    mask: bool [B L].
    count: number of positions per row, from 1 to L.

  Raises:
    ValueError: `mask` is not bool [B L], or `count` is not a whole number from 1 to L.
  """
  length = _check(mask=(mask, "B L", "bool"))["L"]
  return jax.lax.top_k(
    jnp.asarray(mask, jnp.float32), check_whole("count", count, 1, max(length, 1))
  )[1]


def recall_loss(
  model: RecallModel,
  inputs: Int[Array, "B L"],
  targets: Int[Array, "B L"],
  mask: Bool[Array, "B L"],
  *,
  count: int,
) -> tuple[Float[Array, ""], Int[Array, "B count"]]:
  """Mean cross entropy over the masked positions, which are gathered BEFORE the output head.

      loss = -sum(mask * log softmax(logits)[target]) / sum(mask)

  Args:
    model: a model with `answers(tokens, positions)`, as `RecallModel` has.
    inputs: int [B L], the rows of a task.
    targets: int [B L].
    mask: bool [B L].
    count: largest number of masked positions in a row, from 1 to L; further ones do not count.

  Returns:
    The loss, and an int32 [B count] that says of each position: 1 right, 0 wrong, -1 not masked.

  Raises:
    ValueError: the arrays are not int, int and bool of one shape [B L], `count` is not a whole
      number from 1 to L, or `model` has no `answers`.
  """
  if not hasattr(model, "answers"):
    raise ValueError(
      f"`model` must have `answers(tokens, positions)`, as RecallModel has; "
      f"got {type(model).__name__}."
    )
  rows = {"inputs": (inputs, "B L", "int"), "targets": (targets, "B L", "int")}
  _check(**rows, mask=(mask, "B L", "bool"))
  positions = masked_positions(mask, count)
  logits = model.answers(inputs, positions)
  at_positions = lambda x: jnp.take_along_axis(jnp.asarray(x), positions, axis=1)
  labels, asked = at_positions(targets), at_positions(mask)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  right = jnp.where(asked, (logits.argmax(-1) == labels).astype(jnp.int32), -1)
  number = jnp.maximum(asked.sum(), 1).astype(losses.dtype)
  return jnp.where(asked, losses, 0).sum() / number, right


def _check(sizes=None, /, **arrays):
  """Checks required arrays against their letters, and returns the sizes of the letters."""
  check_given(**arrays)
  return check(sizes, **arrays)
