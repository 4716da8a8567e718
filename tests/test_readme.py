"""README's examples run, its commands are the ones that are tested, and its figures exist."""

import contextlib
import io
import pathlib
import re
import subprocess

import cases
import pytest

import lajax
import lajax.layers as L

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
TEST_COMMAND = 'pip install -e ".[test]" && pytest'


def blocks(language: str) -> list[tuple[int, str]]:
  """(line, text) of every fenced block of a language."""
  found = re.finditer(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
  return [(README[: match.start()].count("\n") + 2, match.group(1)) for match in found]


def test_there_is_a_readme_with_examples():
  assert blocks("python")


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
  ("line", "source"),
  [
    pytest.param(*block, id=f"line{block[0]}", marks=[pytest.mark.slow] if n else [])
    for n, block in enumerate(blocks("python"))
  ],
)
def test_python_example_runs(line, source, tmp_path, monkeypatch):
  """In a namespace of its own, in an empty folder, so that it can be pasted as it stands."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("MPLBACKEND", "agg")
  code = compile("\n" * (line - 1) + source, str(ROOT / "README.md"), "exec")
  with contextlib.redirect_stdout(io.StringIO()):
    exec(code, {"__name__": "readme"})


def test_the_test_command_is_the_one_that_ci_runs():
  assert TEST_COMMAND in README
  assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()
  assert TEST_COMMAND in (ROOT / "CONTRIBUTING.md").read_text()


def test_ci_script_parses():
  subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_files_named_in_readme_exist():
  """Links and pictures that point into the repository."""
  targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", README) + re.findall(r'src="([^"]+)"', README)
  missing = [t for t in targets if not re.match(r"[a-z]+:", t) and not (ROOT / t).exists()]
  assert not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_paths_named_in_the_docs_exist(name):
  """`lajax/...`, `tests/...`, `experiments/...` in code quotes: files that are there (or patterns that match some)."""
  if not (ROOT / name).exists():
    pytest.fail(f"no {name}")
  text = (ROOT / name).read_text()
  named = set(re.findall(r"`((?:lajax|tests|experiments|\.ci)/[\w./*-]*)`", text))
  missing = sorted(path for path in named if not list(ROOT.glob(path.rstrip("/"))))
  assert not missing


def systems() -> list[dict[str, str]]:
  """The rows of the table of systems, by column."""
  lines = README[README.index("| system |") :].split("\n\n")[0].splitlines()
  split = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
  head = split(lines[0])
  return [dict(zip(head, split(line), strict=True)) for line in lines[2:]]


def test_the_table_of_systems_is_whole():
  """Every layer that mixes tokens stands in it once, every op at least once."""
  names = lambda column: [name for row in systems() for name in re.findall(r"`(\w+)`", row[column])]
  mixers = [name for name in L.__all__ if isinstance(getattr(L, name), type) and name not in PIECES]
  assert sorted(names("layer `L.…`")) == sorted(mixers)
  assert set(names("op `lajax.…`")) == set(lajax.__all__)


PIECES = ("GatedRMSNorm", "LayerState", "Mixer", "ShortConv")


KERNELS = (
  "linear_attention",
  "normalized_linear_attention",
  "mlstm",
  "delta_rule",
  "delta_product",
  "dplr",
  "linear_recurrence",
  "attention",
)
REFUSED = ("ForgettingAttention",)  # for `log_forget`


def test_the_table_of_systems_names_the_forms_that_ops_have():
  forms = {case.op: case.impls for case in cases.CASES.values()}
  for row in systems():
    op, layer = (row[name].strip("`") for name in ("op `lajax.…`", "layer `L.…`"))
    want = set(forms.get(op, ())) | (
      {"pallas"} if op in KERNELS and layer not in REFUSED else set()
    )
    assert {
      form for form in ("recurrent", "associative", "chunked", "pallas") if row[form] == "✓"
    } == want, row
