"""Turns lajax's docstrings into reStructuredText for Sphinx.

The docstrings are written for `help()`: plain text in Google style, with indented blocks of
equations and names in single backquotes. Sphinx calls `on_docstring` on each before napoleon reads its sections.
"""

import re

from latex import latex, rows

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$")
ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")
DOI = re.compile(r"\bdoi:(10\.\S+\w)")
QUOTED = re.compile(r"(`[^`]+`)")
ENUMERATOR = re.compile(r"(:\s+|^\s*)([A-Za-z]|[ivxlcdmIVXLCDM]+|\d+)\.(?=\s|$)")  # "D." is no list
PUBLIC = re.compile(r"lajax(\.\w+)+$")


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
  """Handles Sphinx's event `autodoc-process-docstring`: rewrites the lines in place."""
  try:
    lines[:] = restructured(lines)
  except ValueError as error:
    raise ValueError(f"docstring of {name}: {error}") from error


def restructured(lines: list[str]) -> list[str]:
  """Returns a docstring, without its common indentation, as reStructuredText with Google's sections.

  An indented block before the first section is a block of equations; other text keeps its words.
  """
  out: list[str] = []
  equations: list[str] = []
  before_sections = True
  for line in [*lines, ""]:
    before_sections = before_sections and not SECTION.match(line)
    if before_sections and line.startswith("    ") and (equations or not (out and out[-1].strip())):
      equations.append(line.strip())
      continue
    if equations:
      out += math_block("\n".join(equations))
      equations = []
    out.append(prose(line))
  return out[:-1]


def math_block(block: str) -> list[str]:
  """Returns equations as a `math` directive, one equation a row."""
  body = " \\\\\n".join(latex(row) for row in rows(block))
  return [".. math::", "", *(f"   {line}" for line in body.splitlines()), ""]


def prose(line: str) -> str:
  """Returns a line of text: its names are quoted, its papers linked, and all else stands for itself."""
  return "".join(
    quoted(part[1:-1]) if QUOTED.fullmatch(part) else linked(escaped(part))
    for part in QUOTED.split(line)
  )


def quoted(name: str) -> str:
  """Returns a name of lajax as a link to its page, and other code as it stands."""
  return f":py:obj:`{name}`" if PUBLIC.match(name) else f"``{name}``"


def escaped(text: str) -> str:
  """Returns text whose marks stand for themselves; an inner product gets its dot."""
  bullet = re.match(r"\s*[*] ", text)
  start = bullet.end() if bullet else 0
  body = re.sub(r"([\\*|]|_(?!\w))", r"\\\1", text[start:])
  return text[:start] + ENUMERATOR.sub(r"\1\2\.", body).replace(" . ", " · ")


def linked(text: str) -> str:
  text = ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", text)
  return DOI.sub(r"`doi:\1 <https://doi.org/\1>`__", text)
