"""The shape of the package: imports point down, public names are documented, annotations hold at run time."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import lajax
import lajax.recurrence

PACKAGE = pathlib.Path(lajax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Each part of the package and the parts it may import (itself apart). `recurrence` and `pallas` do not know each other.
BASE = {"_shapes", "_numerics", "_meshes", "_cpu_hang"}
ALLOWED = {
  "_cpu_hang": set(),
  "_shapes": set(),
  "_numerics": {"_shapes"},
  "_operations": set(),
  "recurrence": BASE,
  "pallas": BASE | {"_operations"},
  "pallas/compiled.py": BASE
  | {"pallas", "layers"},  # compiles whole layers; nothing but the report imports it
  "ops": BASE | {"recurrence", "pallas"},
  "tasks": BASE,
  "cost": BASE | {"_operations"},
  "bidirectional": BASE | {"recurrence", "ops"},
  "layers": BASE | {"recurrence", "pallas", "ops", "bidirectional"},
  "models": BASE | {"recurrence", "ops", "layers"},
  "__init__": BASE | {"ops", "recurrence", "bidirectional"},
}


def part_of(path: pathlib.Path) -> str:
  path = path.relative_to(PACKAGE)
  return str(path) if str(path) in ALLOWED else path.parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> set[str]:
  """The parts of lajax that a file imports, wherever in the file it does."""
  package = ["lajax", *path.relative_to(PACKAGE).parts[:-1]]
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
      module = ".".join(filter(None, [base, node.module]))
      found |= {f"{module}.{alias.name}" for alias in node.names}
  names = [name.split(".") for name in found]
  return {
    "__init__" if len(name) == 1 or name[1] in lajax.__all__ else name[1]
    for name in names
    if name[0] == "lajax"
  }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
  part = part_of(path)
  assert part in ALLOWED, (
    f"lajax/{part} has no place in the ladder of imports: give it one in ALLOWED"
  )
  allowed = ALLOWED[part] | {part}
  if part in ("layers", "models", "tasks"):
    allowed |= {"__init__"} if "ops" in allowed else set()  # `import lajax` for the ops themselves
  assert imports(path) <= allowed


def test_no_library_file_imports_tests_or_experiments():
  for path in FILES:
    for node in ast.walk(ast.parse(path.read_text())):
      modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
      modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      assert not any(
        module.split(".")[0] in ("tests", "experiments", "cases") for module in modules
      ), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_swallowed_keywords(path):
  """No **kwargs in a public function or method: an unknown keyword is a TypeError."""
  module = ast.parse(path.read_text())
  classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
  for node in [*module.body, *(method for c in classes for method in c.body)]:
    if (
      isinstance(node, ast.FunctionDef)
      and not path.name.startswith("_")
      and not node.name.startswith("_")
    ):
      assert not node.args.kwarg, f"{path.name}: {node.name} takes **{node.args.kwarg.arg}"


# --- docstrings ------------------------------------------------------------------------------------------------------

OPS = [name for name in lajax.__all__ if inspect.isfunction(getattr(lajax, name))]
MODULES = [
  name
  for name in ("lajax.layers", "lajax.tasks", "lajax.recurrence", "lajax.pallas", "lajax.models")
  if (PACKAGE / name[6:]).exists()
]


def public(module: str) -> list[str]:
  return list(getattr(importlib.import_module(module), "__all__", []))


def test_all_ops_are_public():
  assert {
    "attention",
    "delta_rule",
    "linear_attention",
    "linear_recurrence",
    "normalized_linear_attention",
  } <= set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_ops_are_documented(name):
  """One line, the equation, every argument, what is returned and raised, and the paper."""
  op = getattr(lajax, name)
  doc = inspect.getdoc(op) or ""
  for section in ("Args:", "Returns:", "Raises:"):
    assert section in doc, f"{name} has no section {section}"
  arguments = doc.split("Args:")[1].split("Returns:")[0]
  for parameter in inspect.signature(op).parameters:
    assert re.search(rf"^\s*(\w+, )*{parameter}(, \w+)*:", arguments, re.MULTILINE), (
      f"{name} does not explain {parameter}"
    )
  assert re.search(r"\b\d{4}\.\d{4,5}\b", doc), f"{name} cites no arXiv number"
  assert "=" in doc.split("Args:")[0], f"{name} does not print its equation"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module):
  for name in public(module):
    x = getattr(importlib.import_module(module), name)
    if inspect.isfunction(x) or inspect.isclass(x):
      written = x.__doc__ or f"{name}("  # a dataclass without one gets its signature
      assert not written.startswith(f"{name}("), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_have_docstrings(path):
  source = path.read_text()
  assert not source.strip() or ast.get_docstring(ast.parse(source)), (
    f"{path.name} does not say what it is"
  )


# --- annotations -----------------------------------------------------------------------------------------------------


def _arguments(name: str) -> dict:
  B, T, H, HV, K, V = 2, 5, 1, 2, 3, 4
  ones = jnp.ones
  qkv = {"q": ones((B, T, H, K)), "k": ones((B, T, H, K)), "v": ones((B, T, HV, V))}
  gated = qkv | {"g": -ones((B, T, HV, K)), "segment_ids": jnp.zeros((B, T), jnp.int32)}
  state = ones((B, HV, K, V))
  return {
    "linear_attention": gated | {"initial_state": state},
    "normalized_linear_attention": gated | {"initial_state": (state, ones((B, HV, K)))},
    "delta_rule": gated | {"beta": ones((B, T, HV)), "initial_state": state},
    "linear_recurrence": {
      "x": ones((B, T, 3, 4)),
      "log_a": -ones((B, T, 3, 4)),
      "initial_state": ones((B, 3, 4)),
    },
    "attention": {
      "q": ones((B, T, HV, K)),
      "k": ones((B, T, H, K)),
      "v": ones((B, T, H, V)),
      "log_forget": -ones((B, T, HV)),
      "sink": ones((HV,)),
    },
  }[name]


@pytest.mark.parametrize(
  "name",
  [
    "attention",
    "delta_rule",
    "linear_attention",
    "linear_recurrence",
    "normalized_linear_attention",
  ],
)
def test_annotations_hold(name):
  op = jaxtyping.jaxtyped(typechecker=beartype.beartype)(getattr(lajax, name))
  arguments = _arguments(name)
  for impl in ("auto", "recurrent", "associative", "chunked"):
    jax.eval_shape(lambda arguments, impl=impl: op(**arguments, impl=impl), arguments)
  wrong = arguments | {"segment_ids": jnp.zeros((2, 6), jnp.int32)}
  with pytest.raises(jaxtyping.TypeCheckError):
    jax.eval_shape(lambda: op(**wrong))


@pytest.mark.slow
def test_every_annotation_of_the_package_holds():
  """All of lajax under jaxtyping's import hook: inner functions are checked too."""
  program = f"""
    import jaxtyping
    with jaxtyping.install_import_hook("lajax", "beartype.beartype"):
      import lajax
    import sys
    sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
    import jax, jax.numpy as jnp, test_imports
    for name in test_imports.OPS:
      if name in ("attention", "delta_rule", "linear_attention", "linear_recurrence", "normalized_linear_attention"):
        for impl in ("recurrent", "associative", "chunked"):
          jax.eval_shape(lambda x: getattr(lajax, name)(**x, impl=impl), test_imports._arguments(name))
    x, v, b = jnp.ones((1, 33, 2, 4)), jnp.ones((1, 33, 2, 3)), jnp.ones((1, 33, 2))  # a chunk of several halves
    for segment_ids in (None, jnp.zeros((1, 33), jnp.int32)):
      for op, inputs in [
        *((op, (*inputs, g)) for g in (-b, -x) for op, inputs in [
          (lajax.linear_attention, (x, x, v)), (lajax.normalized_linear_attention, (x, x, v)),
          (lajax.delta_rule, (x, x, v, b)), (lajax.dplr, (x, x, v, x, x))]),
        (lajax.gated_oja, (x, x, v, b, -v)), (lajax.mlstm, (x, x, v, b, b)),
        (lajax.delta_product, (x, x[:, :, None], v[:, :, None], b[:, :, None])),
      ]:
        total = lambda inputs: sum(y.sum() for y in jax.tree.leaves(op(*inputs, segment_ids=segment_ids, impl="chunked")))
        jax.eval_shape(jax.grad(total), inputs)
    print("done")
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
  )
  assert done.stdout.strip() == "done", done.stderr
