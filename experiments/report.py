"""Makes one HTML page of all results: figures, tables, configurations, commands and versions.

    python experiments/report.py

reads every JSONL file under `experiments/results/` and writes `runs/report.html`, one file that
needs nothing from a network. Figures are SVG with their values on hovering, tables can be sorted,
and the page follows the light or dark colours of the system. It takes a few seconds.

It knows the lines of `mqar.py`, `recall.py`, `lm.py`, `speed.py`, `cost.py` and `serve.py`. Lines
that it cannot show are listed on the page with the reason, and counted in the output.

`--results PATH...` reads other files or folders, such as `runs/`. `--figures FOLDER` also writes
each figure as an SVG file of its own. `--help` lists the flags.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
from page.document import Section, page, sections_of
from page.drawing import draw
from page.kinds import problem_of
from page.lines import Line, Problem, files_in, read
from results import replace

PROG = "report.py"
RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Config:
  """Makes one HTML page of all results."""

  results: tuple[pathlib.Path, ...] = (RESULTS,)
  """Files of lines, and folders that hold such files."""
  out: pathlib.Path = pathlib.Path("runs", "report.html")
  """File of the page."""
  figures: pathlib.Path | None = None
  """Folder that gets each figure as an SVG file; None: no files."""


def main() -> None:
  config = cli.parse(Config(), sys.argv[1:], PROG)
  try:
    files = files_in(config.results)
    cli.make_folder(config.out.parent)
    if config.out.is_dir():
      raise ValueError(f"--out {config.out}: must be a file, such as {config.out / 'report.html'}")
    if config.figures is not None:
      cli.make_folder(config.figures, "figures")
  except ValueError as error:
    cli.fail(PROG, str(error))
  print(run(config, files))


def run(config: Config, files: Sequence[tuple[str, pathlib.Path]]) -> str:
  """Writes the page and the figures. Returns what the command prints."""
  lines: list[Line] = []
  problems: list[Problem] = []
  for name, path in files:
    good, bad = read(name, path)
    problems += bad
    for line in good:
      reason = problem_of(line.values)
      if reason:
        problems.append(Problem(name, line.number, reason, line.text))
      else:
        lines.append(line)
  sections = sections_of(lines)
  write(config.out, page(sections, problems, [name for name, _ in files]))
  said = [f"{len(lines):,} lines of {len(files):,} {'file' if len(files) == 1 else 'files'}"]
  said += [f"not shown in figures: {p.file}:{p.number}: {p.reason}" for p in problems]
  if config.figures is not None:
    said += figures(sections, config.figures)
  return "\n".join([*said, f"{config.out}: open it in a browser"])


def figures(sections: Sequence[Section], folder: pathlib.Path) -> list[str]:
  """Writes each figure as a file. Returns a sentence for each."""
  said = []
  for section in sections:
    for chart in section.charts():
      write(folder / f"{chart.key}.svg", draw(chart, alone=True) + "\n")
      said.append(f"{folder / chart.key}.svg: {chart.title}")
  return said


def write(path: pathlib.Path, text: str) -> None:
  replace(path, lambda new: new.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
  main()
