"""Turns lajax's docstrings into reStructuredText for Sphinx.

The docstrings are written for `help()`: plain text in Google style, with indented blocks of
equations and names in single backquotes. Sphinx calls `on_docstring` on each before napoleon reads
its sections.
"""

import ast
import inspect
import re
import textwrap

from latex import latex, rows

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note):$")
CODE = re.compile(r"#|>>>|\bimport\b|\b(jax|jnp|lajax|L|nnx)\.\w")  # of Python, not an equation
ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")
DOI = re.compile(r"\bdoi:(10\.\S+\w)")
FIELD = re.compile(r"[a-z_]+(, [a-z_]+)*: ")
QUOTED = re.compile(r"(`[^`\n]+(?:\n[^`\n]+)?`)")
MARK = re.compile(r"([\\|]|(?<=\S)[*]|[*](?=\S)|_(?!\w))")  # a star before a space begins an item
ENUMERATOR = re.compile(
  r"(: +|^ *)([A-Za-z]|[ivxlcdmIVXLCDM]+|\d+)\.(?=\s|$)", re.MULTILINE
)  # "D."
NAME_IN_PAGE = re.compile(r"(?<![`}\w])`(lajax(?:\.\w+)+)`(?!`)")
PUBLIC = re.compile(r"lajax(\.\w+)+$")


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
  """Handles Sphinx's event `autodoc-process-docstring`: rewrites the lines in place."""
  if is_named_tuple(obj) and not any(map(SECTION.match, lines)):
    lines += fields(obj)
  try:
    lines[:] = restructured(lines)
  except ValueError as error:
    raise ValueError(f"docstring of {name}: {error}") from error


def on_member(app, what, name, obj, skip: bool, options) -> bool | None:
  """Handles Sphinx's event `autodoc-skip-member`: leaves out fields, which `fields` describes."""
  return True if type(obj).__name__ == "_tuplegetter" else None


def on_page(app, page: str, source: list[str]) -> None:
  """Handles Sphinx's event `source-read`: links the names of lajax in a page of Markdown."""
  if str(app.env.doc2path(page)).endswith(".md"):
    source[0] = NAME_IN_PAGE.sub(r"{py:obj}`\1`", source[0])


def is_named_tuple(obj) -> bool:
  return inspect.isclass(obj) and issubclass(obj, tuple) and hasattr(obj, "_fields")


def fields(named_tuple: type) -> list[str]:
  """Returns a section of a NamedTuple's fields, each with the comment behind its definition."""
  source = textwrap.dedent(inspect.getsource(named_tuple))
  lines = source.splitlines()
  definition = ast.parse(source).body[0]
  comments = {}
  for node in getattr(definition, "body", ()):
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      own = [line.partition("#")[2].strip() for line in lines[node.lineno - 1 : node.end_lineno]]
      comments[node.target.id] = " ".join(filter(None, own))
  found = [f"  {name}: {comment}" for name, comment in comments.items() if comment]
  return ["", "Args:", *found] if found else []


def restructured(lines: list[str]) -> list[str]:
  """Returns a docstring, already dedented, as reStructuredText with Google's sections.

  An indented block before the first section holds equations, or code if it looks like code; other
  text keeps its words.
  """
  out: list[str] = []
  text: list[str] = []
  block: list[str] = []
  before_sections = True
  for line in [*separated(itemized(without_hanging_indent(lines))), ""]:
    before_sections = before_sections and not SECTION.match(line)
    begins_block = line.startswith("    ") and not (text and text[-1].strip())
    if before_sections and (begins_block or (block and line.startswith("    "))):
      block.append(line)
      continue
    if block:
      out += prose(text) + indented_block(textwrap.dedent("\n".join(block)))
      text, block = [], []
    text.append(line)
  return [*out, *prose(text[:-1])]


def without_hanging_indent(lines: list[str]) -> list[str]:
  """Returns the lines with the citation of papers, a paragraph, as one without indentation."""
  out: list[str] = []
  cites = False
  for line in lines:
    cites = bool(line.strip()) and (cites or line.startswith(("Paper:", "Papers:")))
    out.append(line.strip() if cites else line)
  return out


def itemized(lines: list[str]) -> list[str]:
  """Turns a paragraph of lines "name: text", as of a dataclass's fields, into items."""
  out: list[str] = []
  for paragraph in re.split(r"\n(?=\s*\n)", "\n".join(lines)):
    own = paragraph.strip("\n").splitlines()
    starts = [line for line in own if not line.startswith(" ")]
    if len(starts) > 1 and all(map(FIELD.match, starts)) and starts[0] == own[0]:
      own = ["* " + line if line in starts else "  " + line.strip() for line in own]
    out += ["", *own] if out else own
  return out


def separated(lines: list[str]) -> list[str]:
  """Puts a blank line before and after a term with an indented definition, such as

  step(state, token) -> output
    the equation of the paper.
  """
  out: list[str] = []
  for n, line in enumerate(lines):
    if SECTION.match(line):
      return out + lines[n:]
    before, after = (lines[m] if 0 <= m < len(lines) else "" for m in (n - 1, n + 1))
    is_item = re.match(r"[-*] ", line.lstrip())
    starts_term = indent(after) > indent(line) and bool(after.strip())
    ends_definition = indent(before) > indent(line)
    if before.strip() and line.strip() and not is_item and (starts_term or ends_definition):
      out.append("")
    out.append(line)
  return out


def indent(line: str) -> int:
  return len(line) - len(line.lstrip())


def indented_block(block: str) -> list[str]:
  """Returns equations as a `math` directive, one equation a row, and code as a `code-block`."""
  if CODE.search(block):
    return [".. code-block:: python", "", *(f"   {line}" for line in block.splitlines()), ""]
  body = " \\\\\n".join(latex(row) for row in rows(block))
  return [".. math::", "", *(f"   {line}" for line in body.splitlines()), ""]


def prose(lines: list[str]) -> list[str]:
  """Returns text with names quoted and papers linked; everything else stands for itself."""
  parts = QUOTED.split("\n".join(lines))
  return "".join(
    quoted(part[1:-1]) if QUOTED.fullmatch(part) else linked(escaped(part)) for part in parts
  ).split("\n")


def quoted(name: str) -> str:
  """Returns a name of lajax as a link to its page, and other code as it stands."""
  return f":py:obj:`{name}`" if PUBLIC.match(name) else f"``{name}``"


def escaped(text: str) -> str:
  """Returns text whose marks stand for themselves; an inner product gets its dot."""
  text = MARK.sub(r"\\\1", text)
  return ENUMERATOR.sub(r"\1\2\.", text).replace(" . ", " · ")


def linked(text: str) -> str:
  text = ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", text)
  return DOI.sub(r"`doi:\1 <https://doi.org/\1>`__", text)
