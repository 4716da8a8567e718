"""Description of a task, for experiments and tests: more than the function that makes its rows."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from lajax._shapes import check_option
from lajax.tasks.evaluate import Task

Rows = tuple[Int[Array, "B L"], Int[Array, "B L"], Bool[Array, "B L"]]
Config = Mapping[str, Any]
METRICS = ("accuracy", "scaled accuracy")


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """Description of a task: how to make its rows, solve them and read a score.

      task = TASKS["parity"].bind({"length": 96})
      inputs, targets, mask = task(jax.random.key(0), 4)

  Attributes:
    make: the task, `make(key, batch, **config) -> inputs, targets, mask`.
    solve: the symbolic solver, `solve(inputs, config) -> answers`: NumPy int [B L] to int [B L].
      Its answers at the masked positions are the targets; it reads no token behind a position.
    chance: `chance(config)`, the accuracy of an answer drawn from the possible ones.
    vocab_size: `vocab_size(config)`, the number of tokens; inputs and targets are below it.
    defaults: the config that `bind` starts from.
    metric: "accuracy", or "scaled accuracy" where papers print `Score.scaled(chance)`.
  """

  make: Callable[..., Rows]
  solve: Callable[[np.ndarray, Config], np.ndarray]
  chance: Callable[[Config], float]
  vocab_size: Callable[[Config], int]
  defaults: Config
  metric: str = "accuracy"

  def __post_init__(self):
    check_option("metric", self.metric, METRICS)
    object.__setattr__(self, "defaults", MappingProxyType(dict(self.defaults)))
    self.config(self.defaults)

  @property
  def name(self) -> str:
    """The name of `make`."""
    return self.make.__name__

  def config(self, changes: Config | None = None) -> dict[str, Any]:
    """Returns the defaults with some changes.

    Raises:
      ValueError: `changes` names an option that the task does not have.
    """
    known = list(inspect.signature(self.make).parameters)[2:]
    wrong = sorted(set(changes or {}) - set(known))
    if wrong:
      raise ValueError(
        f"`changes` must name options of {self.name} ({', '.join(known)}); got {', '.join(wrong)}."
      )
    return {**self.defaults, **(changes or {})}

  def bind(self, changes: Config | None = None) -> Task:
    """Returns the task with its config given, as `evaluate` takes it: `task(key, batch)`."""
    return functools.partial(self.make, **self.config(changes))
