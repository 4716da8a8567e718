"""Progress of a run from 0 to 1, by the clock or by steps, and its learning rate."""

import time

from lm.run import Run

SPARE_SECONDS = 4.0  # of a run's minutes, for figures and the last checkpoint


class Progress:
  """The share of a run that is over when a step begins.

  With `--steps` it is step / steps. With `--minutes` the clock decides, so each share is written to
  the log, and a run that is resumed takes the shares of its log again: its losses are the same.

  Args:
    run: a run.
    started: `time.perf_counter()` when the program began.
    before: seconds that earlier programs spent on the run up to its checkpoint.
    recorded: shares of the log, by step.
  """

  def __init__(self, run: Run, started: float, before: float = 0.0, recorded: dict | None = None):
    self.run, self.started, self.before = run, started, before
    self.recorded = recorded or {}
    self.reserve = 0.1 * 60 * run.minutes  # seconds for held-out files and samples, until measured
    self.last = 0.0

  @property
  def seconds(self) -> float:
    """Seconds spent on the run."""
    return self.before + time.perf_counter() - self.started

  def at(self, step: int) -> float:
    """Returns the share that is over before a step; at least 1 after the last one."""
    if self.run.steps is not None:
      return step / self.run.steps
    share = self.recorded.get(step)
    if share is None:
      share = self.seconds / max(60 * self.run.minutes - self.reserve - SPARE_SECONDS, 1.0)
    self.last = max(self.last, share)
    return self.last


def learning_rate(run: Run, step: int, progress: float) -> float:
  """Returns the learning rate of a step as a fraction of its peak."""
  return min(1.0, (step + 1) / (run.warmup + 1)) * max(0.0, 1.0 - progress)
