"""The optimizer of a run: optax's AdamW, and Muon for the matrices of the layers."""

from collections.abc import Sequence

import jax
import optax
from lm.run import Run
from optax.contrib import MuonDimensionNumbers

MATRICES = ("kernel",)  # of projections and MLPs; not embeddings, head, convolutions, gates, norms


def optimizer_of(run: Run, learning_rate: optax.Schedule | float = 1.0) -> optax.GradientTransformation:
  """Returns the optimizer. Its updates still have to be multiplied by the schedule, 0 to 1."""
  if run.optimizer == "adam":
    update = optax.adamw(
      run.learning_rate, b2=0.99, weight_decay=run.weight_decay, mask=is_matrix
    )
  else:
    update = optax.contrib.muon(
      run.muon_learning_rate,
      adam_learning_rate=run.learning_rate,
      adam_b2=0.99,
      weight_decay=run.weight_decay,
      muon_weight_dimension_numbers=muon_axes,
    )
  whole = optax.chain(optax.clip_by_global_norm(run.clip), update)
  if run.accumulate == 1:
    return whole
  return optax.MultiSteps(whole, run.accumulate).gradient_transformation()


def is_matrix(parameters):
  """Returns for each parameter whether it is a matrix of a layer, with its inputs before outputs."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: _names(path)[-1] == "kernel" and min(x.shape[-2:]) > 8, parameters
  )


def muon_axes(parameters):
  """Returns the axes of each matrix of a layer that Muon makes orthogonal, and None elsewhere.

  Axes before the last two belong to stacked layers.
  """
  axes = lambda x, chosen: MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if chosen else None
  return jax.tree.map(axes, parameters, is_matrix(parameters))


def _names(path: Sequence) -> list[str]:
  return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
