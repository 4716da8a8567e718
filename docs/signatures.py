"""Makes the signatures of the API reference short enough to read: `Float[Array, "B T H K"]`, `float32`."""

import inspect
import re

from flax import nnx
from sphinx.util.inspect import signature, stringify_signature

ARRAY = re.compile(r"(jaxlib\._jax|jax)\.Array\b")
DEFAULT_CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")  # jnp.float32 as a default


def on_signature(app, what, name, obj, options, arguments: str | None, result: str | None):
  """Handles Sphinx's event `autodoc-process-signature`: returns new texts of the arguments and the result."""
  if inspect.isclass(obj) and issubclass(obj, nnx.Module):  # Flax's metaclass hides the arguments
    found = signature(obj.__init__, bound_method=True)
    arguments = stringify_signature(found, show_return_annotation=False, unqualified_typehints=True)
  return shortened(arguments), shortened(result)


def shortened(text: str | None) -> str | None:
  return text and DEFAULT_CLASS.sub(r"\1", ARRAY.sub("Array", text))
