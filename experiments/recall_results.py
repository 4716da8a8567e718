"""Lines of results: one JSON object a run, with its whole configuration; a run whose line exists is not run again."""

import importlib.metadata
import json
import pathlib
import platform

import jax

PACKAGES = ("lajax", "jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
  """What the run was made with: Python, the packages, and the kind of device."""
  found = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
  for package in PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def line_of(run, metrics: dict) -> dict:
  """One line of results; `config` is the whole of the run, and names it."""
  return dict(
    task=run.task,
    mixer=run.mixer,
    seed=run.seed,
    learning_rate=run.learning_rate,
    **metrics,
    config=run.as_json(),
    versions=versions(),
  )


def read(path: pathlib.Path) -> list[dict]:
  """The lines of a file, in order; a last line that was cut off in writing is passed over."""
  if not path.exists():
    return []
  lines = []
  for text in path.read_text().splitlines():
    try:
      lines.append(json.loads(text))
    except json.JSONDecodeError:
      continue
  return lines


def append(path: pathlib.Path, line: dict) -> None:
  """Adds a line, whole or not at all as far as a reader can tell."""
  path.parent.mkdir(parents=True, exist_ok=True)
  cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
  with path.open("a") as file:
    file.write("\n" * cut_off + json.dumps(line, allow_nan=False) + "\n")


def of_runs(lines: list[dict], runs) -> list[dict]:
  """The lines that belong to these runs, in the order of the runs; the latest where there are several."""
  by_config = {json.dumps(line["config"], sort_keys=True): line for line in lines}
  names = [json.dumps(run.as_json(), sort_keys=True) for run in runs]
  return [by_config[name] for name in names if name in by_config]
