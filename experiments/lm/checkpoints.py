"""Orbax checkpoints of a run: written in the background, and renamed only when they are whole."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
  """The last two checkpoints of a run. A process that dies while one is written leaves the other.

  A checkpoint holds the arrays of training by their paths, such as "parameters/embed/bytes", and a
  few numbers.
  """

  def __init__(self, folder: pathlib.Path):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

  @property
  def step(self) -> int | None:
    """Step of the latest whole checkpoint; None without one."""
    return self.manager.latest_step()

  def save(self, step: int, carry: Any, numbers: dict) -> None:
    """Copies the arrays, and writes them while training goes on."""
    if step != self.step:
      parts = dict(arrays=ocp.args.StandardSave(by_path(carry)), numbers=ocp.args.JsonSave(numbers))
      self.manager.save(step, args=ocp.args.Composite(**parts))

  def restore(self, like: Any) -> tuple[Any, dict]:
    """Returns the arrays and numbers of the latest checkpoint; `like` has the arrays' shapes."""
    wanted = by_path(like)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    parts = dict(arrays=ocp.args.StandardRestore(shapes), numbers=ocp.args.JsonRestore())
    found = self.manager.restore(self.step, args=ocp.args.Composite(**parts))
    arrays = [found["arrays"][name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), arrays), found["numbers"]

  def close(self) -> None:
    """Waits until the last checkpoint is written."""
    self.manager.wait_until_finished()
    self.manager.close()


@contextlib.contextmanager
def checkpoints_in(folder: pathlib.Path) -> Iterator[Checkpoints]:
  """Opens the checkpoints of a run, and waits in the end until the last one is written."""
  checkpoints = Checkpoints(folder / "checkpoints")
  try:
    yield checkpoints
  finally:
    checkpoints.close()


def by_path(tree: Any) -> dict[str, Any]:
  """Returns the arrays of a pytree by their paths, in the pytree's order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def parameters_in(folder: pathlib.Path, like: Any) -> Any:
  """Returns the parameters of the latest checkpoint of a run's folder, in the structure of `like`.

  Raises:
    ValueError: the folder holds no checkpoint, or one of another model.
  """
  if not (folder / "checkpoints").is_dir():
    raise ValueError(f"--init {folder}: no checkpoints in this folder; name that of a run.")
  with checkpoints_in(folder) as checkpoints:
    if checkpoints.step is None:
      raise ValueError(f"--init {folder}: no checkpoint in this folder; name that of a run.")
    parts = ocp.args.Composite(arrays=ocp.args.StandardRestore())
    arrays = checkpoints.manager.restore(checkpoints.step, args=parts)["arrays"]
  prefix = "parameters/"
  found = {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}
  wanted = by_path(like)
  for name in wanted.keys() | found.keys():
    shapes = [tuple(x[name].shape) if name in x else "none" for x in (wanted, found)]
    if shapes[0] != shapes[1]:
      raise ValueError(
        f"--init {folder}: parameter {name} is {shapes[1]} there and {shapes[0]} here; give the "
        "flags of the model that were given there."
      )
  return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])
