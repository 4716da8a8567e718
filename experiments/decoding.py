"""Times the decode step of a stack of layers at several contexts."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lajax.layers import LayerState

ROUNDS = 8  # of each context: a table shows the fastest, since other programs only slow a step down
SECONDS = 0.15  # of one round
MOST_STEPS = 64  # in one round


@dataclasses.dataclass(frozen=True)
class Timing:
  """The decode step of a stack behind a context.

  Attributes:
    milliseconds: per token, in the fastest round.
    cpu_milliseconds: per token, of all cores together, in the round that needed least.
    bytes: of the arrays that are carried, without the counters.
  """

  milliseconds: float
  cpu_milliseconds: float
  bytes: int


def time_stack(
  layers: Sequence[nnx.Module], width: int, lengths: Sequence[int], seed: int = 0
) -> dict[int, Timing]:
  """Returns a `Timing` for each context: T = 1, batch 1, jitted, the state donated.

  The contexts take turns, so that other programs slow all of them down. A context is not read: its
  states and caches are random numbers, and the counters say how many tokens they stand for. A cache
  has as many places as the context has tokens, and the timed tokens are written into the last ones.

  Args:
    layers: layers [B T D] -> [B T D]; each adds to the residual stream.
    width: D.
    lengths: tokens of each context.
    seed: of the random numbers.
  """
  graph, parameters = nnx.split(nnx.List(layers))
  dtype = getattr(layers[0], "dtype", None) or jnp.float32

  def step(parameters, x, states):
    after = []
    for layer, state in zip(nnx.merge(graph, parameters), states, strict=True):
      y, state = layer(x, state)
      x = x + y
      after.append(state)
    return x, tuple(after)

  step = jax.jit(step, donate_argnums=2)
  random = np.random.default_rng(seed)
  x = jnp.asarray(random.standard_normal((1, 1, width), np.float32)).astype(dtype)
  states = {n: tuple(_filled(layer, n, random) for layer in layers) for n in lengths}
  sizes = {n: sum(map(_bytes, of_layers)) for n, of_layers in states.items()}
  steps = dict.fromkeys(lengths, 1)
  best = dict.fromkeys(lengths, (np.inf, np.inf))

  def run(n: int) -> tuple[float, float]:
    """Seconds per token, and CPU seconds."""
    state = tuple(_before(s, n - steps[n]) for s in states.pop(n))
    jax.block_until_ready(state)
    started, used = time.perf_counter(), time.process_time()
    for _ in range(steps[n]):
      _, state = step(parameters, x, state)
    jax.block_until_ready(state)
    found = time.perf_counter() - started, time.process_time() - used
    states[n] = state
    return found[0] / steps[n], found[1] / steps[n]

  for n in lengths:
    run(n)  # compiles
    first, _ = run(n)
    steps[n] = int(np.clip(SECONDS / first, 1, min(MOST_STEPS, n)))
  for _ in range(ROUNDS):
    for n in lengths:
      (wall, cpu), (least_wall, least_cpu) = run(n), best[n]
      best[n] = min(wall, least_wall), min(cpu, least_cpu)
  return {n: Timing(1e3 * best[n][0], 1e3 * best[n][1], sizes[n]) for n in lengths}


def make_layers(makers: Sequence[Callable[[nnx.Rngs], nnx.Module]], seed: int = 0) -> list:
  """Makes layers with parameters, each with its own."""
  rngs = nnx.Rngs(seed)
  return [make(rngs) for make in makers]


def _filled(layer, length: int, random: np.random.Generator) -> LayerState:
  """A state of random numbers, with places for `length` tokens where the layer keeps tokens."""
  options = {"max_length": length} if hasattr(layer, "max_length") else {}
  state = layer.init_state(1, **options)
  fill = lambda a: jnp.asarray(random.standard_normal(a.shape, np.float32)).astype(a.dtype)
  return state._replace(
    memory=jax.tree.map(fill, state.memory), conv=jax.tree.map(fill, state.conv)
  )


def _before(state: LayerState, length: int) -> LayerState:
  """The state as if its document had so many tokens."""
  return state._replace(length=jnp.full_like(state.length, length))


def _bytes(state: LayerState) -> int:
  return sum(a.nbytes for a in jax.tree.leaves((state.memory, state.conv)))
