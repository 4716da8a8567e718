"""Command lines of the experiments: a frozen dataclass becomes flags, an error becomes one line."""

import contextlib
import io
import itertools
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeVar

import jax
import tyro
from rich.console import Console

Config = TypeVar("Config")
SIDES, RULES = "│| ", "╭╮╰╯─+-"  # of the box that tyro draws around a message


def parse(default: Config, arguments: Sequence[str], prog: str) -> Config:
  """Returns `default` with the values of the flags. A bad flag ends the program with one line.

  The line is read off the box that tyro prints, since tyro's hook for errors is private and missing
  in older releases.
  """
  printed = io.StringIO()
  try:
    with contextlib.redirect_stderr(printed):
      no_pairs = (tyro.conf.FlagCreatePairsOff,)  # --scaling without --no-scaling
      kind = type(default)
      return tyro.cli(kind, args=arguments, default=default, prog=prog, config=no_pairs)
  except SystemExit as end:
    if not end.code:  # --help
      raise
  lines = [line.strip(SIDES) for line in printed.getvalue().splitlines()[1:]]
  is_rule = lambda line: not line.strip(RULES)
  message = itertools.takewhile(lambda line: not is_rule(line), itertools.dropwhile(is_rule, lines))
  fail(prog, " ".join(message))  # behind the second rule tyro repeats the help


def fail(prog: str, message: str) -> NoReturn:
  """Ends the program with one line on stderr and the exit status 2."""
  print(f"{prog}: error: {message}", file=sys.stderr)
  raise SystemExit(2)


def check_at_least_one(config, *names: str) -> None:
  """Raises a ValueError unless each number under these names is None or at least 1."""
  for name in names:
    value = getattr(config, name)
    numbers = value if isinstance(value, tuple) else (value,)
    if not numbers:
      raise ValueError(f"{flag(name)} needs at least one value")
    if any(number is not None and number < 1 for number in numbers):
      raise ValueError(f"{flag(name)} must be at least 1; got {value}")


def check_known(config, name: str, known: Sequence[str]) -> None:
  """Raises a ValueError unless the values of a flag are known names, at least one."""
  given = getattr(config, name)
  if not given:
    raise ValueError(f"{flag(name)} needs at least one value")
  unknown = [value for value in given if value not in known]
  if unknown:
    raise ValueError(f"{flag(name)}: unknown {', '.join(unknown)}; known: {', '.join(known)}")


def flag(name: str) -> str:
  return f"--{name.replace('_', '-')}"


def console(width: int) -> Console:
  """Returns a console as wide as the terminal, or of this width where there is none."""
  return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def print_facts(console: Console, facts: Iterable[tuple[bool, str]]) -> None:
  """Prints a line for each expectation: whether it held, and its figures."""
  for held, text in facts:
    console.print(f"{'as expected' if held else 'NOT AS EXPECTED'}: {text}")


def use_device(name: str) -> None:
  """Makes a device JAX's default, unless "auto". Raises a ValueError if there is none."""
  if name == "auto":
    return
  try:
    jax.config.update("jax_default_device", jax.devices(name)[0])
  except RuntimeError:
    found = ", ".join(map(str, jax.devices()))
    raise ValueError(f"--device {name}: JAX sees no such device, only {found}") from None


def make_folder(path: pathlib.Path, name: str = "out") -> None:
  """Makes the folder that a flag names. Raises a ValueError where that is impossible."""
  if path.suffix == ".jsonl":
    raise ValueError(f"{flag(name)} {path}: must be a folder; it gets a file results.jsonl")
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"{flag(name)} {path}: cannot make this folder: {error.strerror}") from None
