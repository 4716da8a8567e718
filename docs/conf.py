"""Sphinx's settings. `python -m sphinx -W docs site` builds the pages, and stops at a warning."""

import importlib
import pathlib
import shutil
import sys
from importlib.metadata import version as installed_version

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402
import signatures  # noqa: E402

project = "lajax"
author = "the lajax authors"
version = release = installed_version("lajax")

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
  "mathml",
]

# --- pages in Markdown ---

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# --- the API reference: one page for each public name, from its docstring ---


def constants(name: str) -> dict[str, str]:
  """Names and contents of a module's public constants."""
  module = importlib.import_module(name)
  values = {x: getattr(module, x) for x in getattr(module, "__all__", ())}
  constant = {x: value for x, value in values.items() if not callable(value)}
  return {x: ", ".join(v) if isinstance(v, dict) else repr(v) for x, v in constant.items()}


autosummary_context = {
  "constants": {name: constants(name) for name in ("lajax.layers", "lajax.tasks")}
}
shutil.rmtree(HERE / "api", ignore_errors=True)  # pages of names that are gone would be orphans
autosummary_generate = True
autosummary_ignore_module_all = False  # the public names of a module are its __all__
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 60
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

# --- looks ---

html_theme = "furo"
html_title = f"lajax {version}"
html_math_renderer = "mathml"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["lajax.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
pygments_style = "friendly"


def setup(app) -> None:
  app.connect("autodoc-process-docstring", docstrings.on_docstring, priority=400)  # napoleon: 500
  app.connect("autodoc-skip-member", docstrings.on_member)
  app.connect("source-read", docstrings.on_page)
  app.connect("autodoc-process-signature", signatures.on_signature)
