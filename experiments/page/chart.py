"""Charts: what a figure shows, without its drawing."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Point:
  """A mean, and the lowest and highest of the values behind it."""

  x: float
  y: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Series:
  """Points of one name.

  Attributes:
    label: its name in the legend.
    points: from left to right.
    style: "line" joins the points and fills the band between lowest and highest; "points" draws
      each with a bar from lowest to highest; "faint" is a thin line without points; "level" is a
      dashed line without points.
    like: the label whose colour it takes; empty: its own.
  """

  label: str
  points: tuple[Point, ...]
  style: str = "line"
  like: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
  """An axis: its label with the unit, its scale, and how its numbers are written.

  Attributes:
    label: quantity and unit.
    log: logarithmic, if all values are positive.
    own_ticks: ticks stand at the values of the points, if these are few.
    write: number -> text of a tick.
    low: lower end; None: that of the data.
    high: upper end; None: that of the data.
    names: of rows 0, 1, ... from the top, on a vertical axis without numbers.
  """

  label: str
  log: bool = False
  own_ticks: bool = False
  write: Callable[[float], str] = lambda x: number(x)
  low: float | None = None
  high: float | None = None
  names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
  """A figure.

  Attributes:
    key: name in files and links: letters, digits and hyphens.
    title: of the figure.
    setting: configuration that tells the figure from others of the same title; may be empty.
    x: horizontal axis.
    y: vertical axis.
    series: what is drawn, the first below the others.
    note: what bands, bars and lines mean; may be empty.
    labels: of all figures that share colours, in order; empty: of this figure.
  """

  key: str
  title: str
  setting: str
  x: Axis
  y: Axis
  series: tuple[Series, ...]
  note: str = ""
  labels: tuple[str, ...] = ()


def with_common_colours(charts: Sequence[Chart]) -> list[Chart]:
  """Gives each label the same colour and shape in all charts."""
  labels = tuple(dict.fromkeys(s.label for c in charts for s in c.series if not s.like))
  return [dataclasses.replace(chart, labels=labels) for chart in charts]


def points_of(values: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
  """Returns a point per x, from left to right: the mean over all values there, and their range."""
  at: dict[float, list[float]] = {}
  for x, y in values:
    at.setdefault(x, []).append(y)
  return tuple(Point(x, statistics.fmean(at[x]), min(at[x]), max(at[x])) for x in sorted(at))


def curves(
  lines: Sequence[dict], x: str, y: str, label: Callable[[dict], str], style: str = "line"
) -> tuple[Series, ...]:
  """Returns a series per label, of the lines that have both numbers."""
  values: dict[str, list[tuple[float, float]]] = {}
  for line in lines:
    if line.get(x) is not None and line.get(y) is not None:
      values.setdefault(label(line), []).append((line[x], line[y]))
  return tuple(Series(name, points_of(found), style) for name, found in values.items())


def number(x: float) -> str:
  """Formats a number of an axis: 0.25, 4,096, 16k, 10M."""
  for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if abs(x) >= scale and (abs(x) >= 1e6 or (abs(x) >= 1e4 and x % scale == 0)):
      return f"{x / scale:.3g}{unit}"
  return f"{x:,.4g}" if abs(x) < 1e3 else f"{x:,.0f}"


def size(count: float) -> str:
  """Formats bytes in decimal units."""
  for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if count >= scale:
      return f"{count / scale:.3g} {unit}"
  return f"{count:.3g} B"


def percent(share: float) -> str:
  return f"{100 * share:.4g} %"


def ticks(low: float, high: float, *, log: bool, most: int) -> list[float]:
  """Returns round numbers between two ends, at most about `most`."""
  if log and high >= 10 * low:
    exponents = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    decades = [10.0**n for n in exponents]
    if len(decades) > 2:
      return decades[:: -(-len(decades) // most)]
    fine = [m * 10.0 ** (n - 1) for n in (*exponents, exponents[-1] + 1) for m in (1, 2, 5)]
    return [x for x in fine if low <= x <= high]
  step = 10.0 ** math.floor(math.log10((high - low) / most))
  step *= next((m for m in (1, 2, 5) if (high - low) / (m * step) <= most), 10)
  first = math.ceil(low / step - 1e-9)
  return [float(f"{n * step:.12g}") for n in range(first, math.floor(high / step + 1e-9) + 1)]
