"""The cost experiment: table, lines, figures, expected numbers, one line for a bad flag."""

import io
import json
import pathlib
import sys

import pytest
from rich.console import Console

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import cost as experiment  # noqa: E402
from page.kinds import problem_of  # noqa: E402


@pytest.mark.slow
def test_run_says_whether_the_figures_came_out(tmp_path):
  text = io.StringIO()
  out = tmp_path / "new" / "cost"
  lengths = ["--lengths", "4096", "1000", "10000000"]
  config = experiment.parse(
    ["--models", "softmax", "sophia", "kda_softmax", *lengths, "--out", str(out)]
  )
  out.mkdir(parents=True)
  (out / "results.jsonl").write_text("of an earlier start\n")
  experiment.run(config, Console(file=text, width=200))
  lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
  assert [(line["model"], line["length"]) for line in lines] == [
    (model, length) for model in config.models for length in (1000, 4096, 10**7)
  ]
  assert [problem_of(line) for line in lines] == [""] * len(lines)
  assert all(line["versions"]["jax"] and line["config"]["layers"] == 28 for line in lines)
  said = text.getvalue()
  assert "NOT AS EXPECTED" not in said
  for expected in (
    "3,096,576 numbers of state = 336 x 96 x 96, 12.4 MB in float32, as kept (6.19 MB if kept in",
    "state (float32)",
    "sophia: the layers KDA, KDA, KDA, MLA, repeated",
    "704.6 MB = 672 MiB of cache",
    "176.2 MB of cache",
  ):
    assert expected in said
  assert said.count("as expected") == 3
  assert "1,720.3 GB" in said  # 28 layers of softmax attention at ten million tokens
  for name in ("memory.png", "operations.png"):
    assert (out / name).stat().st_size > 5_000
  assert {path.name for path in out.iterdir()} == {"results.jsonl", "memory.png", "operations.png"}


@pytest.mark.usefixtures("quick_compiles")
def test_measured_bytes_are_those_of_cost(tmp_path, monkeypatch):
  monkeypatch.setattr(experiment.decoding, "ROUNDS", 1)
  monkeypatch.setattr(experiment.decoding, "SECONDS", 0)
  small = ["--layers", "4", "--num-heads", "1", "--head-dim", "8", "--lengths", "9", "5"]
  flags = ["--measure", "--models", "kda_softmax", *small, "--out", str(tmp_path)]
  config = experiment.parse(flags)
  text = io.StringIO()
  experiment.measure(config, Console(file=text, width=200))
  lines = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
  assert [line["length"] for line in lines] == [5, 9]
  assert [problem_of(line) for line in lines] == ["", ""]
  # three states [8 8], three convolutions of 3 tokens x (q, k, v), keys and values per token
  sizes = [4 * (3 * 8 * 8 + 3 * 3 * 3 * 8 + 2 * n * 8) for n in (5, 9)]
  assert [line["bytes"] for line in lines] == [line["expected_bytes"] for line in lines] == sizes
  assert all(line["milliseconds"] > 0 for line in lines)
  assert "as expected: bytes of 2 states are those of lajax.cost" in text.getvalue()
  assert "NOT" not in text.getvalue()
  assert (tmp_path / "decode.png").stat().st_size > 5_000


@pytest.mark.parametrize(("last", "held"), [(1.09, True), (1.11, False)])
def test_measured_facts(last, held):
  """A stack whose bytes do not grow must take the same time at each length, within a tenth."""
  times = {1_000: 1.0, 256_000: last}
  line = dict(model="kda", bytes=8, expected_bytes=8)
  lines = [line | dict(length=n, milliseconds=t) for n, t in times.items()]
  config = experiment.Config(models=("kda",), lengths=tuple(times), measure=True)
  (flat, text), (same, _) = experiment.measured_facts(config, lines)
  assert (flat, same) == (held, True)
  assert text.startswith(f"kda: 256k tokens take {last:.2f} {'<=' if held else '>'} 1.1 times 1k")
  wrong = [dict(x, expected_bytes=9) for x in lines]
  same, text = experiment.measured_facts(config, wrong)[-1]
  assert not same
  assert "kda at 1k: 8 bytes, lajax.cost says 9" in text


def test_figures_have_titles_and_labels_in_words(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(experiment, "save", lambda figure, path: drawn.append(figure))
  lines = [dict(model=m, length=n, carried_bytes=n) for m in ("sophia", "mla") for n in (1, 2)]
  experiment.draw(lines, "carried_bytes", "Memory during decoding", tmp_path / "memory.png")
  (axis,) = drawn[0].axes
  assert axis.get_title() == "Memory during decoding"
  assert axis.get_xlabel() == "tokens of context"
  assert axis.get_legend_handles_labels()[1] == ["sophia: KDA, KDA, KDA, MLA", "MLA"]


@pytest.mark.parametrize("name", list(experiment.STACKS))
def test_every_stack_can_be_made(name):
  config = experiment.Config(layers=9, num_heads=2, head_dim=8)
  layers = experiment.stack(config, name)
  assert len(layers) == 9
  assert len({id(layer) for layer in layers}) == len(set(experiment.STACKS[name].layers))
  found = experiment.cost(layers, 10**7, prefill=False)
  assert found.carried.bytes > 0
  assert found.decode > 2 * found.parameters


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--models softmax nothing", "--models: unknown nothing; known: softmax, "),
    ("--layers 0", "--layers must be at least 1; got 0"),
    ("--head-dim -1", "--head-dim must be at least 1; got -1"),
    ("--lengths 5 0", "--lengths must be at least 1; got (5, 0)"),
    ("--lengths many", "Error parsing --lengths"),
    ("--lenght 5", "--lenght"),
  ],
)
def test_bad_flags_give_one_line(flags, message, capsys):
  with pytest.raises(SystemExit) as end:
    experiment.parse(flags.split())
  assert end.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("cost.py: error: ")
  assert message in error
  assert error.count("\n") == 1


def test_sizes_are_printed_in_decimal_units():
  assert [experiment.size(n) for n in (5, 1234, 12_345_678, 2_500_000_000)] == [
    "5 B",
    "1.23 kB",
    "12.3 MB",
    "2.50 GB",
  ]
  assert [experiment.tokens(n) for n in (7, 4096, 10_000, 10**7)] == ["7", "4,096", "10k", "10M"]
