"""Imports point down, no keyword is swallowed, public names are documented."""

import ast
import importlib
import inspect
import pathlib
import re

import lajax
import lajax.recurrence

PACKAGE = pathlib.Path(lajax.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# Each part of the package, and the parts that it may import beside itself. `recurrence` and
# `pallas` do not know each other: a test that compares the two compares two derivations.
BASE = {"_shapes", "_arguments", "_numerics", "_meshes", "_cpu_hang"}
ALLOWED = {
  "_cpu_hang": set(),
  "_shapes": set(),
  "_arguments": {"_shapes"},
  "_meshes": {"_shapes"},
  "_numerics": {"_shapes", "_meshes"},
  "_operations": set(),
  "recurrence": BASE,
  "pallas": BASE | {"_operations"},
  # compiles whole layers; nothing but the report imports it
  "pallas/compiled.py": BASE | {"pallas", "layers"},
  "ops": BASE | {"recurrence", "pallas"},
  "tasks": BASE,
  "cost": BASE | {"_operations"},
  "layers": BASE | {"recurrence", "ops", "lajax"},
  "models": BASE | {"recurrence", "ops", "layers", "lajax"},
  "serve": BASE | {"models", "lajax"},
  "__init__": BASE | {"ops"},
}
# The loops and the algebra of `recurrence` serve every family: they import none of them.
FAMILY_FREE = ("rule", "documents", "decays", "triangle", "tokens", "chunks")
FAMILIES = {
  "attention", "delta_rule", "dplr", "linear_attention", "linear_recurrence", "mlstm",
  "families", "steps",
}  # fmt: skip


def name_of(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).as_posix()


def part_of(path: pathlib.Path) -> str:
  name = name_of(path)
  return name if name in ALLOWED else name.split("/")[0].removesuffix(".py")


def imports(path: pathlib.Path) -> set[str]:
  """Full names of everything that a file imports, wherever in the file it does."""
  package = ["lajax", *path.relative_to(PACKAGE).parts[:-1]]
  found = set()
  for node in ast.walk(TREES[path]):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
      module = ".".join(filter(None, [base, node.module]))
      found |= {f"{module}.{alias.name}" for alias in node.names}
  return found


def imported_parts(path: pathlib.Path) -> set[str]:
  """Parts of lajax that a file imports; "lajax" stands for the package itself and its ops."""
  names = [name.split(".") for name in imports(path)]
  return {
    "lajax" if len(name) == 1 or name[1] in lajax.__all__ else name[1]
    for name in names
    if name[0] == "lajax"
  }


def test_imports_point_down():
  wrong = {}
  for path in TREES:
    part = part_of(path)
    upward = imported_parts(path) - ALLOWED.get(part, set()) - {part}
    foreign = {n for n in imports(path) if n.split(".")[0] in ("tests", "experiments", "cases")}
    if part not in ALLOWED:
      wrong[name_of(path)] = f"no place in the ladder of imports: give lajax/{part} one in ALLOWED"
    elif upward | foreign:
      wrong[name_of(path)] = sorted(upward | foreign)
  assert not wrong


def test_loops_know_no_family():
  names = [PACKAGE / "recurrence" / f"{name}.py" for name in FAMILY_FREE]
  wrong = {name_of(path): sorted(families_of(path)) for path in names if families_of(path)}
  assert not wrong


def families_of(path: pathlib.Path) -> set[str]:
  inside = [name.split(".") for name in imports(path) if name.startswith("lajax.recurrence.")]
  return {name[2] for name in inside} & FAMILIES


def test_no_swallowed_keywords():
  """No **kwargs in a public function or method: an unknown keyword is a TypeError."""
  wrong = []
  for path, tree in TREES.items():
    if path.name.startswith("_") and path.name != "__init__.py":
      continue
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    nodes = [*tree.body, *(method for c in classes for method in c.body)]
    for node in nodes:
      public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
      if public and node.args.kwarg:
        wrong.append(f"{name_of(path)}: {node.name} takes **{node.args.kwarg.arg}")
  assert not wrong


def test_modules_and_public_names_have_docstrings():
  """A module without code needs none."""
  wrong = [
    name_of(path) for path, tree in TREES.items() if tree.body and not ast.get_docstring(tree)
  ]
  for module in ("layers", "tasks", "recurrence", "pallas", "models", "serve"):
    package = importlib.import_module(f"lajax.{module}")
    for name in getattr(package, "__all__", []):
      x = getattr(package, name)
      written = x.__doc__ or ""
      # a dataclass without a docstring gets its signature for one
      if callable(x) and (not written or written.startswith(f"{name}(")):
        wrong.append(f"lajax.{module}.{name}")
  assert not wrong


def test_ops_are_documented():
  """Every parameter is explained, and so is what the op returns and raises."""
  wrong = []
  for name in lajax.__all__:
    op = getattr(lajax, name)
    if not inspect.isfunction(op):
      continue
    doc = inspect.getdoc(op) or ""
    wrong += [f"{name}: no {part}" for part in ("Args:", "Returns:", "Raises:") if part not in doc]
    described = doc.partition("Args:")[2].partition("Returns:")[0]
    for parameter in inspect.signature(op).parameters:
      if not re.search(rf"^\s*(\w+, )*{parameter}(, \w+)*:", described, re.MULTILINE):
        wrong.append(f"{name}: no {parameter}")
  assert not wrong
