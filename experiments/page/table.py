"""Tables of the page, and the cells that they are made of."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Cell:
  """The text of a cell; `value` orders numbers, and is None in a cell of words or without one."""

  text: str
  value: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
  """A table. All rows have as many cells as there are columns."""

  title: str
  columns: tuple[str, ...]
  rows: tuple[tuple[Cell, ...], ...]
  note: str = ""


MISSING = Cell("–")


def table(title: str, columns: Mapping[str, Sequence[Cell]], note: str = "") -> Table:
  """Makes a table of columns. Columns without any value are left out."""
  full = {name: cells for name, cells in columns.items() if any(c != MISSING for c in cells)}
  return Table(title, tuple(full), tuple(zip(*full.values(), strict=True)), note)


def words(values: Iterable) -> list[Cell]:
  return [MISSING if value in (None, "") else Cell(str(value)) for value in values]


def numbers(values: Iterable, form: str = ",.4g", factor: float = 1.0) -> list[Cell]:
  """Makes cells of numbers times `factor`; None is a cell without a value."""
  scaled = (x if x is None or factor == 1 else factor * x for x in values)
  return [MISSING if x is None else Cell(format(x, form), float(x)) for x in scaled]


def spreads(samples: Iterable[Sequence[float]], form: str = ".3f") -> list[Cell]:
  """Makes cells of mean ± standard deviation; one value alone has no deviation."""
  cells = []
  for values in samples:
    if not values:
      cells.append(MISSING)
      continue
    mean = statistics.fmean(values)
    text = format(mean, form)
    if len(values) > 1:
      text += f" ± {statistics.stdev(values):{form}}"
    cells.append(Cell(text, mean))
  return cells
