"""The model of the recall benchmarks: a short gated convolution and one mixer, nothing else that could remember."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lajax.layers import LayerState, ShortConv


class GatedShortConv(nnx.Module):
  """Short convolution with a multiplicative gate, y = (x W + b) * (conv(x) + c): the layer that joins a value to its key.

  Args:
    d_model: D.
    width: tokens that the convolution sees, the present one included.
    rngs: the random streams of the parameters.

  Paper: S. Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023, arXiv:2312.04927,
  section 5 (BaseConv, here with its short filter).
  """

  def __init__(self, d_model: int, width: int = 3, *, rngs: nnx.Rngs):
    self.gate = nnx.Linear(d_model, d_model, rngs=rngs)
    self.conv = ShortConv(d_model, width, use_bias=True, activation=None, rngs=rngs)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """Convolves and gates x, continuing from a state; returns the outputs and the state behind them."""
    y, state = self.conv(x, state, segment_ids=segment_ids)
    return y * self.gate(x), state

  def init_state(self, batch: int) -> LayerState:
    """The state before the first token."""
    return self.conv.init_state(batch)


class RecallModel(nnx.Module):
  """Token embedding, layers as pre-norm residual blocks, norm, output head: no MLP, no positions.

      x = E[tokens] ;  x += layer(RMSNorm(x)) for each layer ;  logits = RMSNorm(x) W

  Args:
    vocab_size: the number of tokens, and of logits.
    d_model: D.
    layers: makers of layers, each called with `rngs`, such as `[partial(GatedShortConv, 64), partial(DeltaNet, 64)]`. A
      layer is `layer(x, state=None, *, segment_ids=None) -> (y, state)` with `init_state(batch)`.
    rngs: the random streams of the parameters.
  """

  def __init__(
    self, vocab_size: int, d_model: int, layers: Sequence[Callable[..., Any]], *, rngs: nnx.Rngs
  ):
    self.embed = nnx.Embed(vocab_size, d_model, rngs=rngs)
    self.layers = nnx.List([make(rngs=rngs) for make in layers])
    self.norms = nnx.List([nnx.RMSNorm(d_model, rngs=rngs) for _ in layers])
    self.final_norm = nnx.RMSNorm(d_model, rngs=rngs)
    self.head = nnx.Linear(d_model, vocab_size, use_bias=False, rngs=rngs)

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    state: list | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T vocab_size"], list]:
    """Logits after every token, and the state behind the last: what a layer returns, for a model."""
    x, state = self.hidden(tokens, state, segment_ids=segment_ids)
    return self.head(x), state

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    state: list | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], list]:
    """What the output head reads, and the state behind the last token."""
    x = self.embed(tokens)
    after = []
    for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
      y, left = layer(norm(x), None if state is None else state[i], segment_ids=segment_ids)
      x = x + y
      after.append(left)
    return self.final_norm(x), after

  def answers(
    self, tokens: Int[Array, "B T"], positions: Int[Array, "B P"]
  ) -> Float[Array, "B P vocab_size"]:
    """Logits at P positions of each row only: the head, the widest product of a small model, runs nowhere else."""
    x, _ = self.hidden(tokens)
    return self.head(jnp.take_along_axis(x, positions[:, :, None], axis=1))

  def init_state(self, batch: int) -> list:
    """The state before the first token, of every layer."""
    layers: Any = self.layers
    return [layer.init_state(batch) for layer in layers]


def masked_positions(mask: Bool[Array, "B L"], count: int) -> Int[Array, "B count"]:
  """The first `count` masked positions of each row, in order; unmasked ones follow where a row has fewer."""
  return jax.lax.top_k(mask.astype(jnp.float32), count)[1]


def recall_loss(
  model: RecallModel,
  inputs: Int[Array, "B L"],
  targets: Int[Array, "B L"],
  mask: Bool[Array, "B L"],
  *,
  count: int,
) -> tuple[Float[Array, ""], Int[Array, "B count"]]:
  """Mean cross entropy over the masked positions, gathered BEFORE the output head.

  Args:
    model: the model.
    inputs, targets, mask: rows of a task.
    count: the largest number of masked positions in a row; further ones would be left out.

  Returns:
    The loss, and how the positions were answered: 1 right, 0 wrong, -1 not asked, int32 [B count].
  """
  positions = masked_positions(mask, count)
  logits = model.answers(inputs, positions)
  labels, asked = (
    jnp.take_along_axis(targets, positions, axis=1),
    jnp.take_along_axis(mask, positions, axis=1),
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  right = jnp.where(asked, (logits.argmax(-1) == labels).astype(jnp.int32), -1)
  return jnp.where(asked, losses, 0).sum() / jnp.maximum(asked.sum(), 1), right
