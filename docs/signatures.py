"""Shortens the signatures of the API reference: `Float[Array, "B T H K"]`, `float32`."""

import inspect
import re

from flax import nnx
from sphinx.util.inspect import signature, stringify_signature

ARRAY = re.compile(r"(jaxlib\._jax|jax)\.Array\b")
LAMBDA = re.compile(r"<function [\w.]*<lambda>>")
DEFAULT = re.compile(r"<(?:class '|PjitFunction of <function )(?:\w+\.)*(\w+)'?>+")  # jnp.float32


def on_signature(app, what, name, obj, options, arguments: str | None, result: str | None):
  """Handles Sphinx's event `autodoc-process-signature`: returns texts of arguments and result."""
  function = None
  if inspect.isclass(obj) and issubclass(obj, nnx.Module):  # Flax's metaclass hides the arguments
    function = obj.__init__
  elif getattr(obj, "_is_protocol", False):  # nobody makes one: show how it is called
    function = obj.__call__
  if function is not None:
    found = signature(function, bound_method=True)
    arguments = stringify_signature(found, show_return_annotation=False, unqualified_typehints=True)
  return shortened(arguments), shortened(result)


def shortened(text: str | None) -> str | None:
  return text and DEFAULT.sub(r"\1", LAMBDA.sub("...", ARRAY.sub("Array", text)))
