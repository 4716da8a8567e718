"""The pages made from docstrings: equations become LaTeX, and everything else keeps its words."""

import importlib
import inspect
import pathlib
import re
import sys
from typing import NamedTuple

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "docs"))

import docstrings
from latex import EquationError, latex, rows

MODULES = (
  "lajax",
  *(f"lajax.{name}" for name in ("layers", "recurrence", "tasks", "cost", "models", "serve")),
)


@pytest.mark.parametrize(
  ("equation", "expected"),
  [
    ("S_t = k_t v_t^T", r"S_{t} = k_{t} \, v_{t}^{\top}"),
    ("S_{t-1}^T k", r"S_{t - 1}^{\top} \, k"),
    ("S'_t^T", r"S_{t}^{\prime \top}"),
    ("k~_t * k~", r"\tilde{k}{}_{t} \odot \tilde{k}"),
    ("beta_t W_beta", r"\beta_{t} \, W_{\beta}"),
    ("A_log + dt_bias", r"A_{\mathrm{log}} + \operatorname{dt}_{\mathrm{bias}}"),
    ("Diag(exp g_t)", r"\operatorname{Diag} (\exp \, g_{t})"),
    ("e^(-1/2) x", r"e^{- 1 / 2} \, x"),
    ("q . k / sqrt K", r"\frac{q \cdot k}{\sqrt{K}}"),
    ("a + b c / (d + e)", r"a + \frac{b \, c}{d + e}"),
    ("max(|n . q|, 1)", r"\operatorname{max} (\left|n \cdot q\right| ,\; 1)"),
    ("sum_{j <= t} v_j,h", r"\sum_{j \le t} \, v_{j,h}"),
    ("log_forget_l", r"\log \, \operatorname{forget}_{l}"),
    ("1e-5 S += x", r"10^{-5} \, S {+}{=} x"),
    ("scale x for r = 1 .. R", r"\text{scale} \; x \; \text{for} \; r = 1 \ldots R"),
    ("RG-LRU (x / 2)", r"\text{RG-LRU} \; \left(\frac{x}{2}\right)"),
  ],
)
def test_latex(equation, expected):
  assert latex(equation) == expected


@pytest.mark.parametrize("equation", ["S & T", "(a + b", "a + b)", "x_ = 1", "x^ = 1", "a / + b"])
def test_what_is_no_equation_is_an_error_that_shows_it(equation):
  with pytest.raises(EquationError, match="of the equation"):
    latex(equation)


def test_rows():
  """Semicolons, commas set apart and commas between equations end a row; other commas do not."""
  block = "S = f(a, b) ;  o = S q ,   q, k = l(x), v = x\ny = o, the norm over heads"
  assert rows(block) == [
    "S = f(a, b)",
    "o = S q",
    "q, k = l(x)",
    "v = x",
    "y = o, the norm over heads",
  ]


def test_every_equation_of_the_library_is_understood():
  wrong = []
  for module in map(importlib.import_module, MODULES):
    for name in getattr(module, "__all__", vars(module)):
      try:
        docstrings.restructured((inspect.getdoc(getattr(module, name)) or "").splitlines())
      except EquationError as error:
        wrong.append(f"{module.__name__}.{name}: {error}")
  assert not wrong, "\n".join(wrong)


def test_docstring():
  source = """\
Adds k v^T [B T *shape], see `lajax.delta_rule` and `impl =
x`; q . k.

    S = k v^T

    o, state = lajax.delta_rule(q, k, v, beta)  # an op

step(state) -> state
  one token.
read(state) -> output

first: an array,
  of two lines.
second: a number.

Args:
  x: D.

    S & T

Paper: Yang et al.,
  arXiv:2406.06484, equation 4."""
  expected = r"""Adds k v^T [B T \*shape], see :py:obj:`lajax.delta_rule` and ``impl =
x``; q · k.

.. math::

   S = k \, v^{\top}

.. code-block:: python

   o, state = lajax.delta_rule(q, k, v, beta)  # an op

step(state) -> state
  one token.

read(state) -> output

* first: an array,
  of two lines.
* second: a number.

Args:
  x: D\.

    S & T

Paper: Yang et al.,
`arXiv:2406.06484 <https://arxiv.org/abs/2406.06484>`__, equation 4."""
  lines = docstrings.restructured(source.splitlines())
  assert re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) == expected


class Fields(NamedTuple):
  """Two numbers."""

  A: int  # the first
  B: int | None = None  # the second


def test_fields_of_a_named_tuple_are_explained_by_their_comments():
  assert docstrings.fields(Fields) == ["", "Args:", "  A: the first", "  B: the second"]
