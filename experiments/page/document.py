"""The page: sections of lines, and their HTML."""

import dataclasses
import itertools
import pathlib
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from page.chart import Chart, with_common_colours
from page.drawing import STYLE, draw
from page.kinds import KINDS, Kind, name_of
from page.lines import Line, Problem, command_of, latest, shared, text_of, without
from page.table import MISSING, Cell, Table, numbers, table, words

LONG = 40  # characters of a cell whose text may have several lines
FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Part:
  """Lines of one kind in a section.

  Attributes:
    kind: what they are.
    lines: all of them.
    used: the latest of each run, which figures and tables are made from.
    older: those of runs that were repeated later.
  """

  kind: Kind
  lines: list[Line]
  used: list[Line]
  older: list[Line]


@dataclasses.dataclass(frozen=True)
class Section:
  """The lines of one experiment in one file. `key` is its name in links and files of figures."""

  key: str
  experiment: str
  file: str
  parts: list[Part]

  @property
  def lines(self) -> list[Line]:
    return [line for part in self.parts for line in part.lines]

  def charts(self) -> list[Chart]:
    """Returns the figures, with keys that are unique on the page."""
    return [
      dataclasses.replace(chart, key=f"{self.key}-{chart.key}")
      for part in self.parts
      for chart in with_common_colours(part.kind.charts(part.used))
    ]


def sections_of(lines: Iterable[Line]) -> list[Section]:
  """Returns the sections, in the order of KINDS and then of files. Each line has a known task."""
  order = list(dict.fromkeys(kind.experiment for kind in KINDS.values()))
  groups: dict[tuple[str, str], dict[str, list[Line]]] = {}
  for line in lines:
    task = name_of(line.values)
    groups.setdefault((KINDS[task].experiment, line.file), {}).setdefault(task, []).append(line)
  found, taken = [], set()
  for (experiment, file), tasks in sorted(
    groups.items(), key=lambda g: (order.index(g[0][0]), g[0][1])
  ):
    parts = []
    for task in KINDS:
      if task in tasks:
        parts.append(Part(KINDS[task], tasks[task], *latest(tasks[task], KINDS[task].decides)))
    key = unique(slug(re.sub(r"(/results)?\.jsonl$", "", file)), taken)
    found.append(Section(key, experiment, file, parts))
  return found


def slug(text: str) -> str:
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "results"


def unique(name: str, taken: set[str]) -> str:
  """Returns a name that is not taken yet, and takes it."""
  names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
  found = next(candidate for candidate in names if candidate not in taken)
  taken.add(found)
  return found


def page(sections: Sequence[Section], problems: Sequence[Problem], files: Sequence[str]) -> str:
  """Returns the HTML of the whole page: one file, without anything from elsewhere."""
  count = sum(len(section.lines) for section in sections)
  body = [
    "<header>",
    "<h1>Results of lajax’s experiments</h1>",
    f"<p>{count:,} lines of {len(files)} {'file' if len(files) == 1 else 'files'}. "
    "Hover over a figure, or focus it and press the arrow keys, for its values. "
    "Press a name in a legend to see it alone, and a column’s head to sort.</p>",
    *_navigation(sections, problems),
    "</header>",
    "<main>",
    *(text for section in sections for text in _section(section)),
    *_problems(problems),
    *_files(sections, problems, files),
    "</main>",
    "<footer><p>Made by <code>python experiments/report.py</code> from these lines alone.</p>",
    "</footer>",
  ]
  read = lambda name: (FOLDER / name).read_text(encoding="utf-8")
  template = string.Template(read("page.html"))
  style = STYLE.read_text(encoding="utf-8") + read("page.css")
  return template.substitute(style=style, script=read("page.js"), body="\n".join(body))


def _navigation(sections: Sequence[Section], problems: Sequence[Problem]) -> Iterator[str]:
  if problems:
    yield f'<p class="warning"><a href="#problems">{_problem_count(problems)}</a></p>'
  if not sections:
    yield '<p class="warning">No line of these files is one that this page knows.</p>'
    return
  yield '<nav aria-label="Sections"><ul>'
  for section in sections:
    count = len(section.lines)
    yield (
      f'<li><a href="#{section.key}">{escape(section.experiment)}</a> '
      f"<span>{escape(section.file)}, {count:,} {'line' if count == 1 else 'lines'}</span></li>"
    )
  yield "</ul></nav>"


def _problem_count(problems: Sequence[Problem]) -> str:
  if len(problems) == 1:
    return "1 line or file is not shown in figures"
  return f"{len(problems):,} lines or files are not shown in figures"


def _section(section: Section) -> Iterator[str]:
  yield f'<section id="{section.key}" aria-labelledby="{section.key}-head">'
  yield f'<h2 id="{section.key}-head">{escape(section.experiment)}</h2>'
  yield from _made_by(section)
  charts = section.charts()
  if charts:
    yield f'<div class="figures{" few" * (len(charts) < 3)}">'
    yield from map(_figure, charts)
    yield "</div>"
  names = (f"{section.key}-table-{n}" for n in itertools.count())
  for part in section.parts:
    for found in part.kind.tables(part.used):
      yield from _table(next(names), found)
  yield "<details><summary>Configuration</summary>"
  for part in section.parts:
    yield from _table(next(names), configuration(part))
  yield "</details>"
  yield f"<details><summary>Every line ({len(section.lines):,})</summary>"
  for part in section.parts:
    yield from _table(next(names), every_line(part))
  yield "</details>"
  yield "</section>"


def _made_by(section: Section) -> Iterator[str]:
  facts = [("File", f"<code>{escape(section.file)}</code>")]
  commands = list(dict.fromkeys(map(command_of, section.lines)))
  for command in commands:
    text = f"<code>{escape(str(command))}</code>"
    if not command:
      some = "Some lines" if len(commands) > 1 else "The lines"
      usual = escape(section.parts[0].kind.command)
      text = f"{some} do not say it; <code>{usual}</code> makes such lines."
    facts.append(("Command", text))
  facts.append(("Versions", escape(versions_text(section.lines))))
  older = sum(len(part.older) for part in section.parts)
  if older:
    text = f"{older:,} older {'line' if older == 1 else 'lines'} of runs that were repeated: "
    facts.append(("Repeated", f"{text}under “Every line”, but not in figures."))
  yield '<dl class="made">'
  yield from (f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts)
  yield "</dl>"


def versions_text(lines: Sequence[Line]) -> str:
  """Returns the versions of the lines: "python 3.11.7, jax 0.10.1 or 0.11.0, ..."."""
  found: dict[str, list[str]] = {}
  for line in lines:
    versions = line.values.get("versions")
    for name, version in versions.items() if isinstance(versions, dict) else ():
      if name != "command" and str(version) not in found.setdefault(str(name), []):
        found[str(name)].append(str(version))
  return ", ".join(f"{name} {' or '.join(v)}" for name, v in found.items()) or "not stated"


def _figure(chart: Chart) -> str:
  note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
  setting = f" <span>{escape(chart.setting)}</span>" if chart.setting else ""
  title = f"<figcaption>{escape(chart.title)}{setting}</figcaption>"
  return f'<figure id="{chart.key}">{title}\n{draw(chart)}\n{note}</figure>'


def configuration(part: Part) -> Table:
  """Makes a table of the configuration that all lines share, and of the values of the others."""
  configs = [line.values["config"] for line in part.lines]
  same = shared(configs)
  names = list(dict.fromkeys(name for config in configs for name in config))
  values = []
  for name in names:
    found = [text_of(config[name]) for config in configs if name in config]
    values.append(text_of(same[name]) if name in same else " | ".join(dict.fromkeys(found)))
  return table(
    f"{len(configs):,} {'line' if len(configs) == 1 else 'lines'} of the task"
    f" “{name_of(part.lines[0].values)}”",
    {"name": words(names), "value": words(values)},
    "Values that differ between lines are separated by |.",
  )


def every_line(part: Part) -> Table:
  """Makes a table of all lines: their values, and what differs in their configurations."""
  same = shared([line.values["config"] for line in part.lines])
  rows = [
    without(line.values, ("config", "versions"))
    | {
      f"config: {name}": value
      for name, value in line.values["config"].items()
      if name not in same and name not in line.values
    }
    for line in part.lines
  ]
  columns: dict[str, list[Cell]] = {"line": numbers(line.number for line in part.lines)}
  if part.older:
    columns["in figures"] = words("no" if line in part.older else "yes" for line in part.lines)
  for name in dict.fromkeys(name for row in rows for name in row):
    columns[name.replace("_", " ")] = [_cell(row.get(name)) for row in rows]
  return table(f"Lines of the task “{name_of(part.lines[0].values)}”", columns)


def _cell(value) -> Cell:
  if value is None:
    return MISSING
  if isinstance(value, int | float) and not isinstance(value, bool):
    return Cell(text_of(value), float(value))
  if isinstance(value, list) and len(value) > 4:
    return Cell(f"{len(value)} values", float(len(value)))
  return Cell(text_of(value))


def _table(key: str, found: Table) -> Iterator[str]:
  yield f'<h3 id="{key}">{escape(found.title)}</h3>'
  yield f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{key}"><table>'
  numeric = [any(row[n].value is not None for row in found.rows) for n in range(len(found.columns))]
  heads = (
    f'<th scope="col"{" class=number" * is_number}>'
    f'<button type="button">{escape(column)}</button></th>'
    for column, is_number in zip(found.columns, numeric, strict=True)
  )
  yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"
  for row in found.rows:
    cells = []
    for n, (cell, is_number) in enumerate(zip(row, numeric, strict=True)):
      tag = '<th scope="row"' if n == 0 else "<td"
      value = "" if cell.value is None else f' data-value="{cell.value!r}"'
      kind = " class=number" * is_number + " class=long" * (len(cell.text) > LONG and not is_number)
      cells.append(f"{tag}{kind}{value}>{escape(cell.text)}</{'th' if n == 0 else 'td'}>")
    yield f"<tr>{''.join(cells)}</tr>"
  yield "</tbody></table></div>"
  if found.note:
    yield f'<p class="note">{escape(found.note)}</p>'


def _problems(problems: Sequence[Problem]) -> Iterator[str]:
  if not problems:
    return
  yield '<section id="problems" aria-labelledby="problems-head">'
  yield '<h2 id="problems-head">Not shown in figures</h2><ul class="problems">'
  for problem in problems:
    where = f"{problem.file}:{problem.number}" if problem.number else problem.file
    text = f"<pre>{escape(problem.text)}</pre>" if problem.text else ""
    yield f"<li><code>{escape(where)}</code> {escape(problem.reason)}{text}</li>"
  yield "</ul></section>"


def _files(
  sections: Sequence[Section], problems: Sequence[Problem], files: Sequence[str]
) -> Iterator[str]:
  shown = [sum(len(s.lines) for s in sections if s.file == file) for file in files]
  others = [sum(problem.file == file for problem in problems) for file in files]
  columns = {"file": words(files), "lines shown": numbers(shown), "not shown": numbers(others)}
  yield '<section id="files" aria-labelledby="files-head"><h2 id="files-head">Files</h2>'
  yield from _table("files-table", table("All files that were read", columns))
  yield "</section>"
