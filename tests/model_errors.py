"""Prints, for each checkpoint of the oracle, how far logits are from the original's, and times.

    python tests/model_errors.py [NAME ...]

Columns: the largest absolute difference of logits, its bound in the tests, and seconds to compile
and to run one training step (loss and all gradients of the folder's rows of tokens).
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "experiments"))
import before_jax  # noqa: F401  # isort: skip
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from model_cases import FOLDERS, Oracle, folder_of, worst

import lajax


def training_step(model, tokens):
  graph, parameters, rest = nnx.split(model, nnx.Param, ...)

  @jax.jit
  def step(parameters, rest, tokens):
    def loss(parameters):
      logits, _ = nnx.merge(graph, parameters, rest)(tokens)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
      return losses.mean()

    return jax.value_and_grad(loss)(parameters)

  return step, (parameters, rest, tokens)


def seconds(call) -> float:
  started = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - started


def main(names) -> None:
  print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
  print(f"{'checkpoint':20} {'error':>8} {'bound':>8} {'compile s':>10} {'step s':>8}")
  for name in names:
    if folder_of(name) is None:
      print(f"{name:20} not found")
      continue
    data = Oracle(name)
    model = lajax.models.load(data.folder)
    logits, _ = model(data.tokens)
    step, arguments = training_step(model, jnp.asarray(data.tokens))
    started = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    compiling = time.perf_counter() - started
    times = sorted(seconds(lambda c=compiled, a=arguments: c(*a)) for _ in range(5))
    error = worst(logits, data.io["logits"])
    print(
      f"{name:20} {error:8.1e} {data.tolerance:8.1e} {compiling:10.1f} {times[2]:8.3f}", flush=True
    )


if __name__ == "__main__":
  main(sys.argv[1:] or FOLDERS)
