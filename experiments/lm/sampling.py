"""Texts that a trained model writes, byte by byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm.data import START, tokens_of
from lm.model import ByteModel


def write(model: ByteModel, prompt: bytes, number: int, length: int, seed: int = 0) -> list[bytes]:
  """Returns `number` texts: the prompt, and `length` bytes drawn from the model's distribution.

  A token also holds the three bytes before it (`lm.data`), so the loop shifts each new byte in.
  """
  graph, variables = nnx.split(model)
  start = tokens_of(np.frombuffer(START + prompt, np.uint8))

  def advance(variables, carry, forced):
    state, token, key = carry
    logits, state = nnx.merge(graph, variables)(token[:, None], state)
    key, of_draw = jax.random.split(key)
    drawn = jax.random.categorical(of_draw, logits[:, 0].astype(jnp.float32)).astype(jnp.int32)
    shifted = (token << 8 & 0x7FFFFFFF) | drawn
    return (state, jnp.where(forced >= 0, forced, shifted), key), drawn

  @jax.jit
  def run(variables, key):
    forced = jnp.pad(jnp.asarray(start[1:]), (0, length), constant_values=-1)
    state = nnx.merge(graph, variables).init_state(number, len(forced))
    carry = state, jnp.full(number, start[0]), key
    return jax.lax.scan(functools.partial(advance, variables), carry, forced)[1]

  drawn = np.asarray(run(variables, jax.random.key(seed))).astype(np.uint8).T
  return [prompt + row[len(prompt) :].tobytes() for row in drawn]
