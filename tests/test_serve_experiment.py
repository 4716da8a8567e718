"""The experiment of the engine: table, lines, figure, ratios, one line for a bad flag."""

import io
import json
import pathlib
import sys

import pytest
from rich.console import Console

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments"))

import serve as experiment
from page.kinds import problem_of
from serving import report
from serving.config import Config, parse

TINY = "--slots 2 1 --requests 3 --prompt 4 --max-tokens 3 --prefix 20 --prefix-requests 2"
SMALL = "--prefill-piece 8 --draft-tokens 2 --layers 1 --d-model 64"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_run(tmp_path):
  text = io.StringIO()
  config = parse([*TINY.split(), *SMALL.split(), "--out", str(tmp_path)])
  experiment.run(config, Console(file=text, width=140))
  lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
  assert [(line["task"], line.get("way"), line.get("slots")) for line in lines] == [
    ("slots", "one by one", 1),
    ("slots", "engine", 1),
    ("slots", "static", 2),
    ("slots", "engine", 2),
    ("prefix", "one by one", None),
    ("prefix", "engine", None),
    ("prefix", "engine", None),
    ("drafts", None, None),
  ]
  assert [problem_of(line) for line in lines] == [""] * len(lines)
  assert all(line["config"]["seed"] == 0 and line["versions"]["jax"] for line in lines)
  assert lines[6]["hit_rate"] > 0.5
  assert lines[5]["hit_rate"] == 0
  said = text.getvalue()
  for expected in ("static batches", "hit rate", "all states stored", "tokens/s of one by one"):
    assert expected in said
  assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "serve.png"}


def test_ratios():
  """Of one run, against what the docstring expects of the default run."""
  slots = [("one by one", 1, 100.0), ("static", 16, 700.0), ("engine", 16, 490.0)]
  first = [("one by one", False, 0.5), ("engine", False, 0.6), ("engine", True, 0.1)]
  lines = [dict(task="slots", way=w, slots=n, tokens_per_second=x) for w, n, x in slots]
  lines += [dict(task="prefix", way=w, cache=c, first_median=x) for w, c, x in first]
  assert report.facts(Config(), lines) == [
    (False, "16 slots: 4.9 times the tokens/s of one by one ≥ 5"),
    (True, "a known prefix of 2,000 tokens: the first token 6.0 times earlier ≥ 5"),
  ]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--device abacus", "--device"),
    ("--slots 1 0", "--slots must be at least 1; got (1, 0)"),
    ("--requests 0", "--requests must be at least 1; got 0"),
    ("--load 1.5", "--load must be between 0 and 1; got 1.5"),
    ("--d-model 100", "--d-model must be a multiple of 64; got 100"),
    ("--slot 1 --prompts 5", "--prompts"),
  ],
)
def test_bad_flags_give_one_line(flags, message, capsys):
  with pytest.raises(SystemExit) as end:
    parse(flags.split())
  assert end.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("serve.py: error: ")
  assert message in error
  assert error.count("\n") == 1
