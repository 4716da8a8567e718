"""Compile times of layers: how long a researcher waits for the first training step.

Each figure is the time from the first call of `jit(grad)` of a layer's loss to the end of that
call: tracing, lowering, compilation, and one step, which takes milliseconds.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.progress import Progress

import lajax.layers as L

D_MODEL, TOKENS = 128, 256


@dataclasses.dataclass(frozen=True)
class Stack:
  """Layers one after the other, each with a residual connection."""

  layer: Callable
  depth: int = 1

  @property
  def name(self) -> str:
    return f"{self.depth} x {self.layer.__name__}"


STACKS = (
  Stack(L.SoftmaxAttention),
  Stack(L.GatedDeltaNet),
  Stack(L.KimiDeltaAttention),
  Stack(L.KimiDeltaAttention, 4),
  Stack(L.KimiDeltaAttention, 8),
)


def compile_times(
  console: Console,
  stacks: Sequence[Stack] = STACKS,
  *,
  d_model: int = D_MODEL,
  tokens: int = TOKENS,
) -> list[dict]:
  """Compiles the gradient of each stack, and returns one line of results for each."""
  lines = []
  with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    task = progress.add_task("compiling", total=len(stacks))
    for stack in stacks:
      progress.update(task, description=f"compiling {stack.name}")
      line = {"task": "speed_compile", "name": stack.name, "layers": stack.depth}
      line |= {"d_model": d_model, "length": tokens}
      lines.append(line | seconds(stack, d_model, tokens))
      progress.advance(task)
  return lines


def seconds(stack: Stack, d_model: int, tokens: int) -> dict[str, float]:
  """Returns the wall time, and the CPU time, which a busy machine does not stretch."""
  layers = nnx.List([stack.layer(d_model, rngs=nnx.Rngs(0)) for _ in range(stack.depth)])
  graph, parameters = nnx.split(layers)
  x = jnp.ones((1, tokens, d_model))

  def loss(parameters, x):
    for layer in nnx.merge(graph, parameters):
      x = x + layer(x)[0]
    return (x**2).sum()

  jax.clear_caches()  # layers share traced and compiled functions: each stack starts from none
  wall, cpu = time.perf_counter(), time.process_time()
  jax.block_until_ready(jax.jit(jax.grad(loss))(parameters, x))
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  return {"compile_seconds": wall, "compile_cpu_seconds": cpu}
