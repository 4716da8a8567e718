"""Renders equations as MathML, which browsers show by themselves: no script, no network."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


def setup(app) -> dict:
  """Registers the renderer `mathml` with Sphinx; `html_math_renderer` selects it."""
  app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
  return {"parallel_read_safe": True, "parallel_write_safe": True}


def visit_math(writer, node) -> None:
  writer.body.append(converted(node, as_block=False))
  raise nodes.SkipNode


def visit_math_block(writer, node) -> None:
  writer.body.append(writer.starttag(node, "div", CLASS="math"))
  writer.body.append(converted(node, as_block=True) + "</div>\n")
  raise nodes.SkipNode


def converted(node, as_block: bool) -> str:
  """Returns the MathML of a node that holds LaTeX, and warns of a command that docutils lacks."""
  try:
    return tex2mathml(node.astext(), as_block=as_block)
  except MathError as error:
    logger.warning("equation %r: %s", node.astext(), error, location=node)
    return ""
