"""Drawing of a chart as SVG, by hand: deterministic text, colours and fonts by classes."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from page.chart import Axis, Chart, Point, Series, ticks

STYLE = pathlib.Path(__file__).with_name("figure.css")
WIDTH, PLOT, ROW = 400.0, 210.0, 22.0  # of a figure, height of a plot, height per row of names
FONT = 12.0
COLOURS, DASHES, SHAPES = 8, 3, 7
MOST_TICKS = 6
MOST_MARKS = 40  # points per series that are drawn; with more, hovering still finds each


def width_of(text: str, font: float = FONT) -> float:
  """Estimates the width of a text. Fonts differ: a tenth more than that of common ones."""
  return 0.6 * font * len(text)


@dataclasses.dataclass(frozen=True)
class Scale:
  """Maps the values of an axis to places."""

  axis: Axis
  low: float
  high: float
  start: float
  end: float
  log: bool

  def __call__(self, value: float) -> float:
    low, high, at = self.low, self.high, value
    if self.log:
      low, high, at = math.log(low), math.log(high), math.log(value)
    return self.start + (at - low) / (high - low) * (self.end - self.start)


def scale_of(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
  """Returns a scale on which all values have a place, with a little room around them."""
  if axis.names:
    return Scale(axis, -0.5, len(axis.names) - 0.5, start, end, log=False)
  log = axis.log and min(values) > 0
  low = min(values) if axis.low is None else min(axis.low, *values)
  high = max(values) if axis.high is None else max(axis.high, *values)
  if low == high:
    low, high = (
      (low / 2, high * 2) if log else (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1)
    )
  room = 0.03
  if log:
    factor = (high / low) ** room
    return Scale(axis, low / factor, high * factor, start, end, log=True)
  below = 0.0 if axis.low == low else room * (high - low)
  return Scale(axis, low - below, high + room * (high - low), start, end, log=False)


def places(scale: Scale, values: Sequence[float], most: int) -> list[float]:
  """Returns the values of the ticks."""
  own = sorted(set(values))
  if scale.axis.own_ticks and len(own) <= MOST_TICKS:
    return own
  return ticks(scale.low, scale.high, log=scale.log, most=most)


def draw(chart: Chart, *, alone: bool = False) -> str:
  """Returns the chart as an SVG element; `alone`: with title and style, as a file of its own."""
  legend = legend_rows(chart)
  names = chart.y.names
  xs = [p.x for s in chart.series for p in s.points]
  x_ends = [end for s in chart.series for p in s.points for end in (p.low, p.high)] if names else xs
  ys = [end for s in chart.series for p in s.points for end in (p.low, p.high)]
  top = 26.0 + (26.0 + 17.0 * bool(chart.setting)) * alone
  bottom = top + (ROW * len(names) if names else PLOT)
  y = scale_of(chart.y, ys, *((top, bottom) if names else (bottom, top)))
  y_ticks = list(range(len(names))) if names else places(y, [], MOST_TICKS)
  y_texts = list(names) if names else [chart.y.write(v) for v in y_ticks]
  left = min(12.0 + max(width_of(text) for text in y_texts), 0.45 * WIDTH)
  x = scale_of(chart.x, [*xs, *x_ends], left, WIDTH - 26)
  height = bottom + 44 + 19 * len(legend) + 4
  parts = [
    f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    f' role="img" aria-label={quoteattr(chart.title)}>'
  ]
  if alone:
    parts.append(f"<style>{STYLE.read_text(encoding='utf-8')}</style>")
    parts.append(f'<rect class="paper" width="{WIDTH:.0f}" height="{height:.0f}"/>')
    parts += [_text(8, 20, chart.title, "heading"), _text(8, 37, chart.setting, "tick")]
  parts += _axes(chart, x, y, y_ticks, y_texts, [*xs, *x_ends])
  for index, series in enumerate(chart.series):
    parts.append(f'<g class="series {look(chart, index)}" data-series="{index}">')
    parts += _series(series, x, y, _shape(chart, index), chart)
    parts.append("</g>")
  parts += _legend(chart, legend, bottom + 58)
  return "\n".join([*parts, "</svg>"])


def slot(chart: Chart, index: int) -> int:
  """Returns the number of a series's look: its own, or that of the label that it is like."""
  labels = chart.labels or [s.label for s in chart.series if not s.like]
  series = chart.series[index]
  name = series.like or series.label
  return labels.index(name) if name in labels else len(labels)


def look(chart: Chart, index: int) -> str:
  n = slot(chart, index)
  return f"c{n % COLOURS} d{n // COLOURS % DASHES} is-{chart.series[index].style}"


def _shape(chart: Chart, index: int) -> int:
  return slot(chart, index) % SHAPES


def _axes(
  chart: Chart,
  x: Scale,
  y: Scale,
  y_ticks: Sequence[float],
  y_texts: Sequence[str],
  xs: Sequence[float],
) -> Iterator[str]:
  left, right = x.start, x.end
  bottom, top = max(y.start, y.end), min(y.start, y.end)
  yield _text(8, top - 12, chart.y.label, "label")
  for value, text in zip(y_ticks, y_texts, strict=True):
    at = y(value)
    yield f'<path class="grid" d="M{left:.1f} {at:.1f}H{right:.1f}"/>'
    most = round((left - 12) / (0.6 * FONT))
    shown = text if len(text) <= most else f"{text[: max(1, most - 1)]}…"
    title = f"<title>{escape(text)}</title>" if shown != text else ""
    yield _text(left - 7, at + 4, shown, "tick end", title)
  taken = -math.inf
  for value in places(x, xs, MOST_TICKS):
    text, at = chart.x.write(value), x(value)
    half = width_of(text) / 2
    if at - half < taken + 4 or at + half > WIDTH:
      continue
    taken = at + half
    yield f'<path class="grid" d="M{at:.1f} {top:.1f}V{bottom + 4:.1f}"/>'
    yield _text(at, bottom + 18, text, "tick middle")
  yield f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>'
  yield _text((left + right) / 2, bottom + 37, chart.x.label, "label middle")


def _series(series: Series, x: Scale, y: Scale, shape: int, chart: Chart) -> Iterator[str]:
  points, rows = series.points, bool(chart.y.names)
  path = lambda found: "L".join(f"{x(p.x):.1f} {y(p.y):.1f}" for p in found)
  if series.style == "line" and any(p.low < p.high for p in points):
    above = [f"{x(p.x):.1f} {y(p.high):.1f}" for p in points]
    below = [f"{x(p.x):.1f} {y(p.low):.1f}" for p in reversed(points)]
    yield f'<path class="band" d="M{"L".join(above + below)}Z"/>'
  if series.style != "points" and len(points) > 1:
    yield f'<path class="line" d="M{path(points)}"/>'
  if series.style == "points":
    for p in points:
      if rows and p.low < p.high:
        yield f'<path class="bar" d="M{x(p.low):.1f} {y(p.y):.1f}H{x(p.high):.1f}"/>'
      elif p.low < p.high:
        yield f'<path class="bar" d="M{x(p.x):.1f} {y(p.low):.1f}V{y(p.high):.1f}"/>'
  if series.style == "faint":
    return
  hidden = " hidden" * (series.style == "level" or len(points) > MOST_MARKS)
  for p in points:
    title = f"<title>{escape(value_text(series, p, chart))}</title>"
    mark = marker(x(p.x), y(p.y), shape, 4.0 if series.style == "points" else 2.8)
    yield f'<path class="mark{hidden}" d="{mark}">{title}</path>'


def value_text(series: Series, p: Point, chart: Chart) -> str:
  """Returns what hovering over a point says: name, value, range, place."""
  exact = lambda axis, v: f"{v:.4g}" if 0 < abs(v) < 1e3 else axis.write(round(v, 3))
  if chart.y.names:
    of = chart.x
    place = chart.y.names[round(p.y)]
    value = p.x
  else:
    of, value = chart.y, p.y
    place = f"{chart.x.label}: {chart.x.write(p.x)}"
  spread = f" ({exact(of, p.low)} to {exact(of, p.high)})" if p.low < p.high else ""
  return f"{series.label}\n{of.label}: {exact(of, value)}{spread}\n{place}"


def marker(x: float, y: float, shape: int, r: float) -> str:
  """Returns the outline of a marker; shapes tell series apart where colours do not."""
  corners = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.25), (1.15, 0.9), (-1.15, 0.9)),
    ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    ((0, 1.25), (1.15, -0.9), (-1.15, -0.9)),
    ((-1.3, -0.5), (1.3, -0.5), (1.3, 0.5), (-1.3, 0.5)),
    ((-0.5, -1.3), (0.5, -1.3), (0.5, 1.3), (-0.5, 1.3)),
  )[shape]
  if not corners:
    return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
  return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in corners) + "Z"


def legend_rows(chart: Chart) -> list[list[tuple[int, float]]]:
  """Returns rows of (index of a series, place) that fit in the width. Faint series have none."""
  shown = [n for n, series in enumerate(chart.series) if series.style != "faint"]
  if len(shown) < 2:
    return []
  rows: list[list[tuple[int, float]]] = [[]]
  at = 8.0
  for n in shown:
    wide = 34 + width_of(chart.series[n].label)
    if rows[-1] and at + wide > WIDTH - 4:
      rows.append([])
      at = 8.0
    rows[-1].append((n, at))
    at += wide
  return rows


def _legend(chart: Chart, rows: list[list[tuple[int, float]]], top: float) -> Iterator[str]:
  for r, row in enumerate(rows):
    y = top + 19 * r
    for n, x in row:
      series = chart.series[n]
      kind = f"key {look(chart, n)}"
      mark = f'<path class="mark" d="{marker(x + 9, y, _shape(chart, n), 3.4)}"/>'
      parts = [
        f'<path class="line" d="M{x:.1f} {y:.1f}h18"/>' * (series.style != "points"),
        mark * (series.style != "level"),
        _text(x + 23, y + 4, series.label, "tick"),
      ]
      yield f'<g class="{kind}" data-series="{n}">{"".join(parts)}</g>'


def _text(x: float, y: float, text: str, kind: str, inner: str = "") -> str:
  return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}{inner}</text>'
