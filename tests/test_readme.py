"""The examples of README and of the guides run, their links exist, the tables are true."""

import contextlib
import inspect
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import layer_cases
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import lajax
import lajax.layers as L
from lajax.models import families
from lajax.models.families import own

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = (
  "docs/implementations.md",
  "docs/equation_to_layer.md",
  "docs/decode_and_packing.md",
  "docs/serving.md",
)
PAGES = ("README.md", "CONTRIBUTING.md", "docs/index.md", *GUIDES)
README = (ROOT / "README.md").read_text()


def examples(page: str) -> list[tuple[int, str]]:
  """(line, source) of every Python example of a page."""
  text = (ROOT / page).read_text()
  found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
  return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in found]


@pytest.fixture
def place_of_its_own(tmp_path, monkeypatch):
  """An empty folder, and JAX's settings as they were."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("MPLBACKEND", "agg")
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def run(page: str, line: int, source: str, names: dict) -> None:
  """Runs an example as it stands; an error shows its line in the page."""
  code = compile("\n" * (line - 1) + source, str(ROOT / page), "exec")
  with contextlib.redirect_stdout(io.StringIO()):
    exec(code, names)


@pytest.mark.usefixtures("quick_compiles", "place_of_its_own")
@pytest.mark.parametrize(
  ("page", "line", "source"),
  [
    pytest.param(
      page,
      *example,
      id=f"{page}:{example[0]}",
      marks=[] if page == "README.md" and n == 0 else [pytest.mark.slow],
    )
    for page in ("README.md", "docs/index.md")
    for n, example in enumerate(examples(page))
  ],
)
def test_example_can_be_pasted(page, line, source):
  run(page, line, source, {"__name__": "example"})


@pytest.mark.usefixtures("quick_compiles", "place_of_its_own")
@pytest.mark.parametrize(
  "page",
  [pytest.param(page, marks=[pytest.mark.slow] if n else []) for n, page in enumerate(GUIDES)],
)
def test_guide_runs_from_top_to_bottom(page):
  names = {"__name__": "guide"}
  found = examples(page)
  assert found
  for line, source in found:
    run(page, line, source, names)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
  """Links and pictures, also into a heading, and `lajax/...` and the like in code quotes."""
  text, here = (ROOT / page).read_text(), (ROOT / page).parent
  wrong = []
  for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
    file, _, heading = target.partition("#")
    path = here / file if file else ROOT / page
    if re.match(r"[a-z]+:", target):
      continue
    if not path.exists() or (heading and heading not in headings(path)):
      wrong.append(target)
  named = re.findall(r"`((?:lajax|tests|experiments|docs|\.ci)/[\w./*-]*)`", text)
  wrong += [path for path in named if not list(ROOT.glob(path.rstrip("/")))]
  assert not wrong


def headings(page: pathlib.Path) -> set[str]:
  """The anchors of a page's headings, as GitHub and the documentation make them."""
  found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def systems() -> list[dict[str, str]]:
  """The rows of the table of systems, by column."""
  lines = README[README.index("| system |") :].split("\n\n")[0].splitlines()
  split = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
  head = split(lines[0])
  return [dict(zip(head, split(line), strict=True)) for line in lines[2:]]


PIECES = (
  "DoubleGatedConv",
  "GatedRMSNorm",
  "LayerState",
  "Mixer",
  "ShortConv",
)  # classes that are no system


def test_the_table_of_systems_is_whole():
  """Every layer that mixes tokens stands in it once, every op at least once."""
  names = lambda column: [name for row in systems() for name in re.findall(r"`(\w+)`", row[column])]
  mixers = [name for name in L.__all__ if isinstance(getattr(L, name), type) and name not in PIECES]
  assert sorted(names("layer `L.…`")) == sorted(mixers)
  ops = [name for name in lajax.__all__ if is_op(getattr(lajax, name))]
  assert set(names("op `lajax.…`")) == set(ops)


def test_the_table_of_models_is_whole():
  """Every kind of config that can be read stands in it, but for other names of the same kind."""
  rows = README[README.index("| `model_type` |") :].split("\n\n")[0]
  named = set(re.findall(r"`(\w+)`", rows)) - {"model_type"}
  kinds = {kind for family in families.FAMILIES for kind in family.model_types}
  assert named == {kind for kind in kinds if not kind.endswith("_text")} - {own.MODEL_TYPE}


def is_op(function) -> bool:
  """Tells if a name of `lajax` is an op: a function of queries, or of inputs x with log decays."""
  names = list(inspect.signature(function).parameters)
  return names[0] == "q" or names[:2] == ["x", "log_a"]


@pytest.mark.parametrize("row", systems(), ids=lambda row: row["layer `L.…`"].split("`")[1])
def test_the_table_of_systems_names_the_implementations(row):
  """A layer without `impl` has none; tracing a layer shows whether it has kernels."""
  layer = getattr(L, re.findall(r"`(\w+)`", row["layer `L.…`"])[0])
  cases = [case for case in layer_cases.EACH if case.layer.func is layer]
  want = {"recurrent", "associative", "chunked"} if cases else set()
  if cases and has_kernels(cases[0]):
    want.add("pallas")
  columns = ("recurrent", "associative", "chunked", "pallas")
  assert {impl for impl in columns if row[impl] == "✓"} == want


def has_kernels(case: layer_cases.Case) -> bool:
  x = jax.ShapeDtypeStruct((1, 20, layer_cases.D), jnp.float32)
  graph, parameters = layer_cases.abstract(case, impl="pallas")
  try:
    jax.eval_shape(lambda parameters, x: nnx.merge(graph, parameters)(x)[0], parameters, x)
  except NotImplementedError:
    return False
  return True
