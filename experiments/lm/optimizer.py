"""The optimizer of a run: optax's AdamW, and Muon for the matrices of the layers."""

import jax
import optax
from lm.run import Run
from optax.contrib import MuonDimensionNumbers

SMALLEST = 8  # rows and columns of a matrix that Muon takes; that of beta has one column per head


def optimizer_of(run: Run) -> optax.GradientTransformation:
  """Returns the optimizer. Its updates still have to be multiplied by the schedule, 0 to 1."""
  if run.optimizer == "adam":
    update = optax.adamw(run.learning_rate, b2=0.99, weight_decay=run.weight_decay, mask=is_matrix)
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
  """Returns for each parameter whether it is a matrix of a layer: [.. inputs outputs].

  Those of projections and MLPs are; embeddings, head, convolutions, gates and norms are not.
  """
  of_layer = lambda path: (
    "kernel" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")
  )
  return jax.tree_util.tree_map_with_path(
    lambda path, x: of_layer(path) and min(x.shape[-2:]) >= SMALLEST, parameters
  )


def muon_axes(parameters):
  """Returns the axes of each matrix of a layer that Muon makes orthogonal, and None elsewhere.

  Axes before the last two belong to stacked layers.
  """
  axes = lambda x, chosen: MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if chosen else None
  return jax.tree.map(axes, parameters, is_matrix(parameters))
