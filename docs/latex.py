"""Translates the equations of docstrings into LaTeX.

A docstring writes its equations as plain text, so that `help()` can be read:

    S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ;  o_t = scale S_t^T q_t

`rows` cuts such a block into its equations, and `latex` translates one of them. The notation is
LaTeX but for these points:

| written | read as |
|---|---|
| `x_t`, `x_{t-1}`, `W_k,h`, `A_log` | a subscript: a name, a group, or names joined by commas |
| `x^T`, `x^(g_t)`, `x^{r-1}` | a superscript: a name, or a group; T is the transpose |
| `x'`, `k~` | a prime, a tilde |
| `beta`, `Lambda` | a Greek letter |
| `a . b`, `a * b`, `a / b` | inner product, elementwise product, fraction |
| `sum_j`, `sqrt K`, `log_a` | a sum, a root, a logarithm |
| `1 .. R`, `<=`, `+=`, `x ~ N` | ellipsis, at most, "is increased by", "is distributed as" |
| ` ; `, ` , ` or a comma and two spaces | the end of an equation |
| any other word | upright text |
"""

import re

GREEK = {
  *("alpha", "beta", "gamma", "delta", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu"),
  *("xi", "pi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega"),
  *("Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega"),
}
FUNCTIONS = {"cos", "exp", "log", "sin", "tanh"}
SYMBOLS = {"eps": r"\epsilon", "phi": r"\phi", "epsilon": r"\epsilon"}
RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": r"\le", ">=": r"\ge", "->": r"\to", "~": r"\sim"}
RELATIONS |= {"+=": "{+}{=}", "-=": "{-}{=}"}
ADDITIVE = {"+": "+", "-": "-"}
PRODUCTS = {".": r"\cdot", "*": r"\odot"}
SEPARATORS = {",": ",", ";": ";", ":": ":"}
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}

TOKEN = re.compile(
  r"(?P<space>\s+)"
  r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)"
  r"|(?P<hyphenated>[A-Za-z]{2,}(?:-[A-Za-z]{2,})+)"
  r"|(?P<name>[A-Za-z][A-Za-z0-9]*)"
  r"|(?P<ellipsis>\.\.+)"
  r"|(?P<operator>\+=|-=|<=|>=|->|[-+=<>/*.,;:|()\[\]{}~^_'])"
)
SUBSCRIPT = re.compile(r"[A-Za-z0-9]+(?:,[A-Za-z0-9]+)*'*")
RELATION = re.compile(r"[^<>]=|\s~\s")
# The end of an equation within a line: a semicolon, or a comma that is set apart.
END = re.compile(r"\s*;(?:\s+|$)|\s+,(?:\s+|$)|,\s{2,}|,$")
# Another one: a comma between "name = ..." and "name = ..." or "name, name = ...".
NEXT = re.compile(r",\s+(?=[^=~;]*(?:[^<>=;]=|\s~\s))")


class EquationError(ValueError):
  """An equation that is not in the notation of this module."""


def rows(block: str) -> list[str]:
  """Returns the equations of an indented block, one a string, without the marks that part them."""
  found = []
  for line in block.splitlines():
    start = depth = 0
    position = 0
    while position < len(line):
      depth += (line[position] in "([{") - (line[position] in ")]}")
      end = None
      if depth == 0:
        end = END.match(line, position)
        if end is None and RELATION.search(line[start:position]):
          end = NEXT.match(line, position)
      if end:
        found.append(line[start : end.start()])
        start = position = end.end()
      else:
        position += 1
    found.append(line[start:])
  return [row.strip() for row in found if row.strip()]


def latex(equation: str) -> str:
  """Translates one equation.

  Raises:
    EquationError: a part does not belong to the notation; the message holds the equation.
  """
  return _Parser(equation).expression(stop=None)


class _Parser:
  """A cursor over one equation."""

  def __init__(self, text: str):
    self.text, self.position = text.strip(), 0

  def fail(self, reason: str) -> EquationError:
    return EquationError(f"{reason} at character {self.position} of the equation {self.text!r}")

  def peek(self) -> tuple[str, str]:
    """The kind and the text of the next token; ("end", "") behind the last."""
    if self.position == len(self.text):
      return "end", ""
    match = TOKEN.match(self.text, self.position)
    if match is None:
      raise self.fail(f"unknown character {self.text[self.position]!r}")
    return str(match.lastgroup), match.group()

  def next(self) -> tuple[str, str]:
    kind, text = self.peek()
    self.position += len(text)
    return kind, text

  def expression(self, stop: str | None, fractions: bool = True) -> str:
    """Everything up to the bracket `stop`, which is consumed; None: up to the end."""
    out: list[
      tuple[str, str]
    ] = []  # kind (operand, word, relation, additive, product, separator) and LaTeX
    spaced = False
    while True:
      kind, text = self.peek()
      if kind == "end" or (stop is not None and text == stop):
        if kind == "end" and stop is not None:
          raise self.fail(f"missing {stop!r}")
        self.next()
        return _joined(out)
      if kind == "space":
        self.next()
        spaced = True
        continue
      if text == "/":
        self.next()
        if self.peek()[0] == "space":
          self.next()
        if fractions:
          numerator = _take_product(out)
          out.append(("operand", rf"\frac{{{_bare(numerator)}}}{{{_bare(self.operand_run())}}}"))
        else:
          out.append(("product", "/"))
      else:
        part = self.part(kind, text, spaced, fractions)
        if spaced and out and part[0] == out[-1][0] == "word":
          out[-1] = ("word", f"{out[-1][1]} {part[1]}")
        else:
          if spaced and out and {part[0], out[-1][0]} <= {"operand", "word"}:
            out.append(("space", r"\;" if "word" in (part[0], out[-1][0]) else r"\,"))
          out.append(part)
      spaced = False

  def part(self, kind: str, text: str, spaced: bool, fractions: bool) -> tuple[str, str]:
    """One operand, word or operator, and its kind."""
    for table, name in (
      (RELATIONS, "relation"),
      (ADDITIVE, "additive"),
      (PRODUCTS, "product"),
      (SEPARATORS, "separator"),
    ):
      if text in table:
        self.next()
        return name, table[text]
    if kind == "ellipsis":
      self.next()
      return "additive", r"\ldots"
    if kind == "hyphenated":
      self.next()
      return "word", text
    return self.operand(fractions)

  def operand_run(self) -> str:
    """The denominator of a fraction: operands that touch, as in 2M."""
    pieces = [self.operand(fractions=False)[1]]
    while self.peek()[0] in ("name", "number") or self.peek()[1] in ("(", "["):
      pieces.append(self.operand(fractions=False)[1])
    return "".join(pieces)

  def operand(self, fractions: bool = True) -> tuple[str, str]:
    """A number, a name or a group in brackets, with its scripts; or a word, which has none."""
    kind, text = self.next()
    if kind == "number":
      return "operand", self.scripts(_number(text))
    if text in CLOSING:
      inner = self.expression(CLOSING[text], fractions)
      opening, closing = (rf"\{x}" if x in "{}" else x for x in (text, CLOSING[text]))
      if text == "|" or r"\frac" in inner:  # brackets that grow with what they hold
        opening, closing = rf"\left{opening}", rf"\right{closing}"
      return "operand", self.scripts(f"{opening}{inner}{closing}")
    if kind != "name":
      raise self.fail(f"{text!r} where an operand was expected")
    if text == "sqrt":
      return "operand", self.root()
    if text == "log" and self.peek()[1] == "_":  # log_a: the logarithm of a
      self.next()
      return "operand", r"\log \, " + self.operand(fractions)[1]
    touching = self.peek()[1]
    if len(text) > 1 and touching not in ("_", "^", "'", "~", "(", "[") and not _is_symbol(text):
      return ("operand", _name(text)) if text in FUNCTIONS else ("word", text)
    if text == "sum" and touching == "_":
      return "operand", self.scripts(r"\sum")
    return "operand", self.scripts(_name(text))

  def root(self) -> str:
    if self.peek()[0] == "space":
      self.next()
    return rf"\sqrt{{{_bare(self.operand(fractions=False)[1])}}}"

  def scripts(self, base: str) -> str:
    """The base with the primes, subscripts and superscripts that touch it, in LaTeX's order."""
    subscripts, superscripts = [], []
    while True:
      _, text = self.peek()
      if text == "'":
        superscripts.append(r"\prime")
      elif text == "~" and base:
        base = rf"\tilde{{{base}}}"
      elif text == "_":
        self.next()
        subscripts.append(self.script())
        continue
      elif text == "^":
        self.next()
        superscripts.append(self.superscript())
        continue
      else:
        break
      self.next()
    below = f"_{{{' '.join(subscripts)}}}" if subscripts else ""
    above = f"^{{{' '.join(superscripts)}}}" if superscripts else ""
    apart = (
      "{}" if base.startswith(r"\tilde") else ""
    )  # MathML would set the scripts under the tilde's base
    return f"{base}{apart}{below}{above}" if below or above else base

  def script(self) -> str:
    """Reads what follows "_": a group in braces, or names joined by commas, with their primes."""
    if self.peek()[1] == "{":
      self.next()
      return self.expression("}", fractions=False)
    match = SUBSCRIPT.match(self.text, self.position)
    if match is None:
      raise self.fail("a subscript is missing")
    self.position = match.end()
    names = match.group().split(",")
    return ",".join(_subscript_name(name) for name in names)

  def superscript(self) -> str:
    """Reads what follows "^": a group in braces or parentheses, or one name or number."""
    kind, text = self.next()
    if text in ("{", "("):
      return self.expression(CLOSING[text], fractions=False)
    if text == "T":
      return r"\top"
    if kind not in ("name", "number"):
      raise self.fail("a superscript is missing")
    return _name(text) if kind == "name" else text


def _is_symbol(name: str) -> bool:
  return name in GREEK or name in SYMBOLS


def _name(name: str) -> str:
  """A single letter is a variable, a Greek name its letter, and any other name upright."""
  if name in SYMBOLS:
    return SYMBOLS[name]
  if name in GREEK or name in FUNCTIONS:
    return rf"\{name}"
  return name if len(name) == 1 else rf"\operatorname{{{name}}}"


def _subscript_name(name: str) -> str:
  primes = len(name) - len(name.rstrip("'"))
  name = name.rstrip("'")
  if not _is_symbol(name) and len(name) > 2 and name.isalpha():
    name = rf"\mathrm{{{name}}}"
  elif _is_symbol(name):
    name = _name(name)
  return name + r"^{\prime}" * (primes > 0)


def _number(text: str) -> str:
  mantissa, _, exponent = text.partition("e")
  if not exponent:
    return mantissa
  power = f"10^{{{exponent}}}"
  return power if mantissa == "1" else rf"{mantissa} \cdot {power}"


def _take_product(out: list[tuple[str, str]]) -> str:
  """Removes the last product from the parts of an expression: the numerator of a fraction."""
  start = len(out)
  while start and out[start - 1][0] in ("operand", "word", "product", "space"):
    start -= 1
  product = out[start:]
  del out[start:]
  return _joined(product)


def _bare(text: str) -> str:
  """The text without the parentheses that enclose all of it."""
  depth = 0
  for n, character in enumerate(text):
    depth += (character == "(") - (character == ")")
    if depth == 0 and (n < len(text) - 1 or character != ")"):
      return text
  return text[1:-1]


def _joined(parts: list[tuple[str, str]]) -> str:
  """The parts of an expression as one line of LaTeX."""
  pieces = []
  for n, (kind, text) in enumerate(parts):
    if kind == "word":
      text = rf"\text{{{text}}}"
    if kind == "separator" and n < len(parts) - 1:
      text += r"\;"
    pieces.append(text)
  return " ".join(pieces)
