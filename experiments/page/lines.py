"""Lines of results: where they stand, what is wrong with them, what tells them apart."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Line:
  """A JSON object of a file, and its text. `file` is relative to the folder of the results."""

  file: str
  number: int
  values: dict
  text: str


@dataclasses.dataclass(frozen=True)
class Problem:
  """A line, or a file, that cannot be shown as results, and the reason."""

  file: str
  number: int
  reason: str
  text: str


def files_in(paths: Sequence[pathlib.Path]) -> list[tuple[str, pathlib.Path]]:
  """Returns (name, path) of all JSONL files. Raises a ValueError where there is none."""
  found: dict[str, pathlib.Path] = {}
  if not paths:
    raise ValueError("--results needs at least one file or folder")
  for path in paths:
    if not path.exists():
      raise ValueError(
        f"--results {path}: no such file or folder; run an experiment with --out {path}"
      )
    inside = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not inside:
      raise ValueError(f"--results {path}: no file in this folder ends with .jsonl")
    for file in inside:
      name = file.relative_to(path).as_posix() if path.is_dir() else file.name
      known = name in found and found[name].resolve() != file.resolve()
      found[file.as_posix() if known else name] = file
  return list(found.items())


def read(name: str, path: pathlib.Path) -> tuple[list[Line], list[Problem]]:
  """Returns the lines of a file that are JSON objects, and a problem for each other one."""
  lines, problems = [], []
  try:
    texts = path.read_bytes().decode("utf-8", errors="replace").split("\n")
  except OSError as error:
    return [], [Problem(name, 0, f"cannot be read: {error.strerror}", "")]
  for number, text in enumerate(texts, 1):
    if not text.strip():
      continue
    try:
      values = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
      cut = " (the last line has no end: its run was interrupted)" * (number == len(texts))
      problems.append(Problem(name, number, f"not JSON: {error}{cut}", text))
      continue
    if isinstance(values, dict):
      lines.append(Line(name, number, values, text))
    else:
      reason = "a line of results is a JSON object {...}"
      problems.append(Problem(name, number, reason, text))
  if not lines and not problems:
    problems.append(Problem(name, 0, "the file has no lines", ""))
  return lines, problems


def _refuse(name: str) -> None:
  raise ValueError(f"{name} is no number of JSON")


def command_of(line: Line) -> str:
  """Returns the command that made a line, or "" if the line does not say it."""
  versions = line.values.get("versions")
  return str(versions.get("command", "")) if isinstance(versions, dict) else ""


def latest(lines: Sequence[Line], decides: Sequence[str]) -> tuple[list[Line], list[Line]]:
  """Returns the latest line of each run, and the older lines of runs that were repeated.

  A run is told by its configuration, without device and folder, and its values under `decides`.
  """
  last: dict[str, Line] = {}
  for line in lines:
    config = without(line.values["config"], ("out", "device"))
    key = json.dumps([config, [line.values.get(name) for name in decides]], sort_keys=True)
    last.pop(key, None)
    last[key] = line
  kept = sorted(last.values(), key=lambda line: (line.file, line.number))
  return kept, [line for line in lines if line not in kept]


def without(values: dict, names: Iterable[str]) -> dict:
  dropped = set(names)
  return {name: value for name, value in values.items() if name not in dropped}


def shared(dicts: Sequence[dict]) -> dict:
  """Returns the items that all have."""
  first = dicts[0] if dicts else {}
  return {k: v for k, v in first.items() if all(k in d and d[k] == v for d in dicts)}


def text_of(value) -> str:
  """Formats a value of a configuration."""
  if value is None:
    return "none"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.6g}"
  if isinstance(value, list):
    return ", ".join(f"({text_of(v)})" if isinstance(v, list) else text_of(v) for v in value) or "–"
  if isinstance(value, dict):
    return ", ".join(f"{name} {text_of(v)}" for name, v in value.items()) or "–"
  return str(value)


def differences(dicts: Sequence[dict]) -> list[str]:
  """Describes each by the items that not all have: "batch 64, steps 600"; empty if all agree."""
  same = shared(dicts)
  return [
    ", ".join(
      f"{name.replace('_', ' ')} {text_of(d[name])}" for name in d if name not in same
    )
    for d in dicts
  ]  # fmt: skip


def by_setting(lines: Sequence[Line], free: Sequence[str]) -> list[tuple[str, list[dict]]]:
  """Groups lines whose configurations agree but for the names in `free`, with a description."""
  groups: dict[str, tuple[dict, list[dict]]] = {}
  for line in lines:
    setting = without(line.values["config"], (*free, "out", "device"))
    groups.setdefault(json.dumps(setting, sort_keys=True), (setting, []))[1].append(line.values)
  texts = differences([setting for setting, _ in groups.values()])
  return [(text, found) for text, (_, found) in zip(texts, groups.values(), strict=True)]
