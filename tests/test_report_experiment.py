"""The page of results: every kind of line, hostile text, broken lines, and a real browser."""

import copy
import html.parser
import io
import itertools
import json
import pathlib
import random
import re
import sys
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest
from browser import NAMES, PROGRAM, Browser

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import report as experiment  # noqa: E402
import results  # noqa: E402
from page import chart as charts  # noqa: E402
from page.document import page, sections_of  # noqa: E402
from page.drawing import COLOURS, STYLE, WIDTH, draw, width_of  # noqa: E402
from page.kinds import KINDS, problem_of  # noqa: E402
from page.lines import Line, Problem, latest, read  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
VERSIONS = dict(
  python="3.11.7", device="a CPU, 2 cores", jax="0.10.1", command="python experiments/x.py"
)


def made(config: dict, **values) -> dict:
  return values | dict(config=config, versions=VERSIONS)


def recall_lines(row: str = "") -> list[dict]:
  """Lines of two mixers, two learning rates and two seeds."""
  lines = []
  for n, (mixer, rate, seed) in enumerate(
    itertools.product(("kda", "linear"), (0.01, 0.02), (0, 1))
  ):
    accuracy = 0.9 - 0.05 * n
    line = dict(task="mqar", mixer=mixer, seed=seed, learning_rate=rate, accuracy=accuracy)
    line |= dict(all_correct=0.8, steps=50, steps_to_99=None, seconds=1.5, parameters=100 + n)
    line |= dict(rows_per_second=10.0, rows_per_cpu_second=5.0, compile_seconds=1.0)
    line |= dict(state_bytes=1000 if mixer == "kda" else 4000, loss=0.5, stopped_early=False)
    line |= dict(curve=[[25, accuracy / 2, 1.0], [50, accuracy, 0.5]])
    config = dict(mixer=mixer, seed=seed, learning_rate=rate, d_model=64, steps=50)
    if row:
      tests = {"length 32": accuracy, "length 96": accuracy / 2}
      config |= dict(row=row, train=dict(length=32), tests={name: {} for name in tests})
      line |= dict(row=row, task="parity", accuracy_by_test=tests)
    else:
      line |= dict(accuracy_by_rows={"L64 K8": accuracy, "L128 K8": accuracy / 2})
      config |= dict(train_rows=[[64, 8]], test_rows=[[64, 8], [128, 8]])
    lines.append(made(config, **line))
  return lines


def lm_lines() -> list[dict]:
  lines = []
  for n, mixers in enumerate((["kda", "kda", "mla"], ["softmax"])):
    line = dict(
      task="lm", name=f"run{n}", bits_per_byte=1.9 + n, parameters=10, steps=20, tokens=99
    )
    line |= dict(seconds=90.0, cpu_seconds=120.0, tokens_per_second=1.1, utilisation=0.2)
    line |= dict(compile_seconds=3.0, held_out_bytes=1000, ngram_parameters=5, mixers=mixers)
    line |= dict(curve=[[0, 5.0, 8.0 + n], [10, 50.0, 3.0 + n]], training_curve=[[0, 6.0, 8.0]])
    line |= dict(references={"gzip": 1.95, "xz": 1.64})
    lines.append(made(dict(pattern=mixers, seed=0, batch=8), **line))
  return lines


def speed_lines() -> list[dict]:
  config = dict(ops=["gla", "kda"], batch=1, dtype="float32", out="runs/speed")
  lines = []
  for n, (op, name) in enumerate(itertools.product(("gla", "kda"), ("chunked", "token scan"))):
    times = dict(forward_ms=1.5 + n, both_ms=9.0 + n, ratio=2.0, compile_seconds=0.5, temp_mib=1.0)
    rounds = dict(forward_seconds=[0.001, 0.002], both_seconds=[0.008, 0.02])
    line = dict(task="speed", op=op, kind="implementation", name=name, length=64, why_not="")
    lines.append(made(config, **line, **times, **rounds))
  untimed = dict(forward_ms=None, both_ms=None, forward_seconds=None, both_seconds=None, ratio=None)
  untimed |= dict(compile_seconds=None, temp_mib=None, why_not="takes long to compile")
  where = dict(task="speed", op="gla", kind="implementation", name="associative", length=64)
  lines.append(made(config, **where, **untimed))
  for op, place in itertools.product(("gla", "kda"), (10, 1000)):
    step = dict(task="speed_decode", op=op, position=place, step_us=9.0 + len(op) * place / 500)
    lines.append(made(config, **step, step_seconds=[9e-6]))
    both = dict(task="speed_scaling", op=op, name="chunked", length=place, slope=1.01)
    lines.append(made(config, **both, both_ms=place * (0.1 + (op == "kda")), both_seconds=[1.0]))
  for layers in (1, 4):
    line = dict(task="speed_compile", name=f"{layers} x KDA", layers=layers, d_model=8, length=16)
    lines.append(made(config, **line, compile_seconds=2.0 * layers, compile_cpu_seconds=1.5))
  return lines


def cost_lines() -> list[dict]:
  config = dict(models=["kda", "softmax"], layers=4, measure=False)
  lines = []
  for model, length in itertools.product(("kda", "softmax"), (1000, 4096, 10_000)):
    grows = length if model == "softmax" else 1
    line = dict(model=model, length=length, parameters=1000)
    counted = line | dict(task="cost", decode_operations=9 * grows, prefill_operations=5 * grows)
    for n, part in enumerate(("state", "conv", "cache", "carried")):
      counted |= {f"{part}_numbers": n * grows, f"{part}_bytes": 4 * n * grows}
    lines.append(made(config, **counted))
    timed = line | dict(task="decode", milliseconds=0.1 * grows, cpu_milliseconds=0.2)
    lines.append(made(config, **timed, bytes=40 * grows, expected_bytes=40 * grows))
  return lines


def serve_lines() -> list[dict]:
  config = dict(slots=[1, 4], draft_tokens=4, out="runs/serve")
  late = dict(first_median=0.1, first_95=0.4, between_median=0.01, between_95=0.02)
  lines = [dict(task="slots", way="one by one", slots=1, tokens_per_second=100.0)]
  for slots in (1, 4):
    lines.append(dict(task="slots", way="engine", slots=slots, tokens_per_second=120.0 * slots))
    lines[-1] |= {name: x * slots for name, x in late.items()}
  lines.append(dict(task="slots", way="static", slots=4, tokens_per_second=300.0))
  lines.append(dict(task="prefix", way="one by one", cache=False, first_median=0.3))
  cached = dict(way="engine", cache=True, first_median=0.03, hit_rate=0.9, cache_bytes=5000)
  lines.append(dict(task="prefix", **cached, tokens_per_second=350.0))
  lines.append(dict(task="drafts", step=0.005, accepted=0.006, rejected=0.0065, stored=0.015))
  return [made(config, **line) for line in lines]


def files() -> dict[str, list[dict]]:
  return {
    "mqar/results.jsonl": recall_lines(),
    "recall/results.jsonl": recall_lines("G"),
    "lm/results.jsonl": lm_lines(),
    "speed/results.jsonl": speed_lines(),
    "cost/results.jsonl": cost_lines(),
    "serve/results.jsonl": serve_lines(),
  }


def write(folder: pathlib.Path, lines: dict[str, list[dict]]) -> None:
  for name, found in lines.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def report(folder: pathlib.Path, *flags: str, monkeypatch) -> pathlib.Path:
  """Runs the command. Returns the page."""
  out = folder.parent / "page.html"
  arguments = ["--results", str(folder), "--out", str(out), *flags]
  monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
  experiment.main()
  return out


class Document(html.parser.HTMLParser):
  """Elements of a page: tags are balanced, ids are unique, and links inside it have a target."""

  VOID = ("meta", "link", "br", "rect", "path")

  def __init__(self, text: str):
    super().__init__()
    self.open: list[str] = []
    self.ids: list[str] = []
    self.targets: list[str] = []
    self.feed(text)
    self.close()
    assert not self.open
    assert len(set(self.ids)) == len(self.ids)
    assert set(self.targets) <= set(self.ids)

  def handle_starttag(self, tag, attrs):
    found = dict(attrs)
    assert len(found) == len(attrs)
    self.ids += [found["id"]] if "id" in found else []
    href = found.get("href") or "data:"
    assert href.startswith(("#", "data:"))
    assert "src" not in found
    self.targets += [href[1:]] if href.startswith("#") else []
    self.targets += found.get("aria-labelledby", "").split()
    if tag not in ("meta", "link"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    pass

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_all_lines_are_on_the_page(tmp_path, monkeypatch, capsys):
  folder, lines = tmp_path / "results", files()
  write(folder, lines)
  out = report(folder, "--figures", str(tmp_path / "svg"), monkeypatch=monkeypatch)
  text = out.read_text()
  Document(text)
  count = sum(map(len, lines.values()))
  assert f"{count} lines of {len(lines)} files" in capsys.readouterr().out
  assert f"{count} lines of {len(lines)} files" in text
  tables = re.findall(r"<h3[^>]*>Lines of the task.*?</table>", text, flags=re.DOTALL)
  assert sum(table.count("<tr>") - 1 for table in tables) == count
  assert len(tables) == len(KINDS)  # each kind has lines here
  assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", text)
  assert (
    text.count("<code>python experiments/x.py</code>") == len(lines) + 1
  )  # cost has two sections
  assert "jax 0.10.1" in text
  figures = {path.stem for path in (tmp_path / "svg").iterdir()}
  assert figures == set(re.findall(r'<figure id="([^"]+)"', text))
  before = text
  assert report(folder, monkeypatch=monkeypatch).read_text() == before


def numbered(lines: list[dict], file: str = "x/results.jsonl") -> list[Line]:
  return [Line(file, n, values, json.dumps(values)) for n, values in enumerate(lines, 1)]


def test_figures_are_well_formed_and_inside_their_box():
  found = [
    c
    for name, lines in files().items()
    for s in sections_of(numbered(lines, name))
    for c in s.charts()
  ]
  assert len(found) > 20
  for chart, alone in itertools.product(found, (False, True)):
    root = ET.fromstring(draw(chart, alone=alone))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for text in root.iter(f"{SVG}text"):
      x, y, wide = float(text.attrib["x"]), float(text.attrib["y"]), width_of(text.text or "")
      left = x - wide * {"middle": 0.5, "end": 1.0}.get(text.attrib["class"].split()[-1], 0.0)
      if "heading" not in text.attrib["class"] and "tick" in text.attrib["class"]:
        assert -1 <= left <= left + wide <= WIDTH + 1, text.text
      assert 0 < y < height
    for path in root.iter(f"{SVG}path"):
      numbers = [float(x) for x in re.findall(r"-?[\d.]+", path.attrib["d"])]
      assert np.isfinite(numbers).all()
      assert max(map(abs, numbers)) <= max(width, height)
    drawn = [g for g in root.iter(f"{SVG}g") if g.attrib["class"].startswith("series")]
    assert len(drawn) == len(chart.series)
    for g, series in zip(drawn, chart.series, strict=True):
      marks = [p for p in g.iter(f"{SVG}path") if p.attrib["class"].startswith("mark")]
      assert len(marks) == (0 if series.style == "faint" else len(series.points))


def test_curves_are_means_with_the_range_of_the_seeds():
  (section,) = sections_of(numbered(recall_lines()))
  steps = next(c for c in section.charts() if "steps" in c.key)
  first = steps.series[0]
  assert first.label == "Kimi Delta Attention"
  # the better learning rate: seeds with accuracies 0.9 and 0.85, half of them at step 25
  want = [(25, 0.4375, 0.425, 0.45), (50, 0.875, 0.85, 0.9)]
  got = [(p.x, p.y, p.low, p.high) for p in first.points]
  np.testing.assert_allclose(got, want)
  assert "band" in draw(steps)
  (found,) = section.parts[0].kind.tables(section.parts[0].used)
  accuracy = found.columns.index("accuracy")
  assert found.rows[0][accuracy].text == "0.875 ± 0.035"


def test_rows_of_the_suite_have_verdicts():
  """Row G demands mixers of which the lines have none; a row that is not known has no verdict."""
  (section,) = sections_of(numbered(recall_lines("G") + recall_lines("parity")))
  verdicts, *tables = section.parts[0].kind.tables(section.parts[0].used)
  assert [row[1].text for row in verdicts.rows] == ["incomplete"]
  assert "not trained: deltanet_negative" in verdicts.rows[0][-1].text
  titles = ["G: parity, trained on 32 bits, tested on 96", "parity: length 32"]
  assert [table.title for table in tables] == titles
  assert "length 96" in tables[0].columns


def test_a_repeated_run_counts_once_and_stays_on_the_page():
  lines = recall_lines()[:2]
  lines.append(copy.deepcopy(lines[0]) | {"accuracy": 0.123456})
  kept, older = latest(numbered(lines), ())
  assert [line.number for line in kept] == [2, 3]
  assert [line.number for line in older] == [1]
  text = page(sections_of(numbered(lines)), [], ["x/results.jsonl"])
  assert "1 older line of runs that were repeated" in text
  assert text.count(">0.123456<") == 1
  assert "Every line (3)" in text


def test_settings_are_not_mixed():
  """Runs that differ in more than mixer, seed, rate and width are in different figures."""
  lines = recall_lines()
  other = copy.deepcopy(lines)
  for line in other:
    line["config"]["steps"] = 75
  (section,) = sections_of(numbered(lines + other))
  settings = {c.setting for c in section.charts() if c.title == "Accuracy over training steps"}
  row = "64 tokens, 8 key-value pairs"
  assert settings == {f"{row}; steps 50, width 64", f"{row}; steps 75, width 64"}


HOSTILE = "</script><script>alert(1)</script>\"'&<b>]]>"


def test_hostile_text_is_escaped():
  lines = [line for found in files().values() for line in found]
  names = ("mixer", "op", "name", "model", "way", "row")
  for line in lines:
    for name in names:
      if name in line:
        line[name] = HOSTILE
        line["config"][name] = HOSTILE
    line["config"]["extra"] = {HOSTILE: [HOSTILE] * 9}
    line["versions"] = {"command": HOSTILE, HOSTILE: HOSTILE}
  sections = sections_of(numbered(lines, f"{HOSTILE}.jsonl"))
  problems = [Problem(HOSTILE, 1, HOSTILE, HOSTILE)]
  text = page(sections, problems, [f"{HOSTILE}.jsonl"])
  assert "<script>alert" not in text
  assert "<b>" not in text
  Document(text)
  for section in sections:
    for chart in section.charts():
      ET.fromstring(draw(chart, alone=True))


def test_broken_lines_are_named(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "results"
  write(folder, {"mqar/results.jsonl": recall_lines()})
  good = json.dumps(recall_lines()[0])
  broken = {
    '{"task": "mq': "not JSON",
    "[1, 2]": "a line of results is a JSON object",
    '{"a": NaN}': "NaN is no number of JSON",
    "{}": 'it has no "task"',
    '{"task": "dance"}': 'unknown task "dance"; known: mqar',
    '{"task": "mqar"}': 'a line of the task "mqar" that lacks some of its values',
    '{"step": 3, "held_out": 2.0}': "a log of lm.py",
  }
  (folder / "other.jsonl").write_bytes(b"\xff\n" + "\n".join([*broken, good]).encode())
  (folder / "empty.jsonl").write_text("\n")
  text = report(folder, monkeypatch=monkeypatch).read_text()
  said = capsys.readouterr().out
  Document(text)
  for place in (said, text.replace("&quot;", '"')):
    for number, reason in enumerate(broken.values(), 2):
      assert re.search(rf"other\.jsonl:{number}\S* {re.escape(reason)}", place) or (
        f"other.jsonl:{number}" in place and reason in place
      )
    assert "the file has no lines" in place
  assert "9 lines or files are not shown in figures" in text
  assert said.startswith("9 lines of 3 files")


def test_a_file_without_known_lines_gives_a_page(tmp_path, monkeypatch):
  folder = tmp_path / "results"
  write(folder, {"a.jsonl": [{"task": "dance"}]})
  text = report(folder, monkeypatch=monkeypatch).read_text()
  Document(text)
  assert "No line of these files is one that this page knows." in text


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--results nothing/here", "--results nothing/here: no such file or folder"),
    ("--results docs/_static", "--results docs/_static: no file in this folder ends with .jsonl"),
    ("--results", "--results"),
    ("--result docs", "--result"),
    ("--results {lines} --out docs", "--out docs: must be a file, such as docs/report.html"),
    ("--results {lines} --out LICENSE/x/y", "--out LICENSE/x: cannot make this folder"),
    ("--results {lines} --figures LICENSE/x", "--figures LICENSE/x: cannot make"),
  ],
)
def test_bad_flags_give_one_line(flags, message, tmp_path, monkeypatch, capsys):
  write(tmp_path, {"a.jsonl": [{"task": "dance"}]})
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, "argv", ["report.py", *flags.format(lines=tmp_path).split()])
  with pytest.raises(SystemExit) as end:
    experiment.main()
  assert end.value.code == 2
  error = capsys.readouterr().err
  assert error.startswith("report.py: error: ")
  assert message in error
  assert error.count("\n") == 1


def places_in(value, place=()):
  """Yields the places of all values inside a JSON value."""
  inside = (
    value.items()
    if isinstance(value, dict)
    else enumerate(value)
    if isinstance(value, list)
    else ()
  )
  for key, part in inside:
    yield (*place, key)
    yield from places_in(part, (*place, key))


def test_damaged_lines_are_shown_or_named():
  """Any value of any line replaced or left out: a page comes out, and no line is lost."""
  rng = random.Random(0)
  lines = [line for found in files().values() for line in found]
  junk = (None, True, -1, 0, 1e30, -1e30, "x", "", [], [[]], {}, {"a": [1]})
  for _ in range(60):
    some = copy.deepcopy(rng.sample(lines, 3))
    damaged = rng.choice(some)
    *path, last = rng.choice(list(places_in(damaged)))
    target = damaged
    for key in path:
      target = target[key]
    if isinstance(last, str) and rng.random() < 0.3:
      del target[last]
    else:
      target[last] = rng.choice(junk)
    known = [line for line in numbered(some) if not problem_of(line.values)]
    text = page(sections_of(known), [], ["x/results.jsonl"])
    Document(text)
    assert f"{len(known)} lines of 1 file" in text
    for section in sections_of(known):
      for chart in section.charts():
        ET.fromstring(draw(chart))


@pytest.mark.parametrize(
  ("arguments", "want"),
  [
    (["experiments/mqar.py", "--steps", "5"], "python experiments/mqar.py --steps 5"),
    (
      [str(ROOT / "experiments" / "lm.py"), "--prompt", "a b"],
      "python experiments/lm.py --prompt 'a b'",
    ),
    (["-m", "experiments.speed"], "python -m experiments.speed"),
    (["/elsewhere/x.py"], "python x.py"),
  ],
)
def test_lines_name_the_command(arguments, want, monkeypatch):
  """And no path of a machine."""
  monkeypatch.setattr(sys, "orig_argv", ["/opt/bin/python3.11", *arguments])
  assert results.versions()["command"] == want


def test_interrupted_line(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"task": "x"}\n{"task"')
  lines, problems = read("a.jsonl", path)
  assert [line.values for line in lines] == [{"task": "x"}]
  assert "its run was interrupted" in problems[0].reason


@pytest.mark.parametrize(
  ("low", "high", "log", "want"),
  [
    (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (0.01, 3000, True, [0.01, 0.1, 1, 10, 100, 1000]),
    (0.7, 40, True, [1, 2, 5, 10, 20]),
    (1.6, 8, True, [2, 4, 6, 8]),
    (-3, 7, False, [-2, 0, 2, 4, 6]),
  ],
)
def test_ticks(low, high, log, want):
  assert charts.ticks(low, high, log=log, most=6) == want


def test_numbers_of_axes():
  assert [charts.number(x) for x in (0, 0.25, 1000, 4096, 16000, 10**7, 1.5e9)] == [
    *("0", "0.25", "1,000", "4,096", "16k", "10M", "1.5G")
  ]  # fmt: skip
  assert [charts.size(x) for x in (5, 1234, 12_345_678)] == ["5 B", "1.23 kB", "12.3 MB"]


# --- colours ---

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB; the last is normal vision.
VISION = (
  [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
  [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
  [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
)  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
  c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
  return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
  """Returns CIE L*a*b* of linear RGB."""
  ratio = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
  x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
  return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: str, b: str) -> float:
  dark, light = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (a, b))
  return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_can_be_read_and_told_apart(dark):
  """By WCAG's contrasts, and by CIE76 distances under three kinds of colour blindness."""
  texts = STYLE.read_text(), STYLE.with_name("page.css").read_text()
  colours: dict[str, str] = {}
  for text in texts:
    found = text.split("prefers-color-scheme: dark")[dark]
    colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", found))
  for ground, ink in itertools.product(("paper", "page"), ("ink", "soft", "link")):
    assert contrast(colours[ground], colours[ink]) >= 4.5, (ground, ink)
  assert contrast(colours["warning-paper"], colours["warning"]) >= 4.5
  own = [colours[f"c{n}"] for n in range(COLOURS)]
  assert min(contrast(colour, colours["paper"]) for colour in own) >= 3
  for matrix in VISION:
    seen = [lab(np.array(matrix) @ linear(colour)) for colour in own]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 15


# --- a browser ---

MEASURE = """(() => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const outside = [];
  for (const element of document.querySelectorAll("body *")) {
    const r = element.getBoundingClientRect();
    if (r.right > innerWidth + 0.5 && !element.closest(".scroll table, pre")) {
      outside.push(`${element.tagName} ${element.className?.baseVal ?? element.className}`);
    }
  }
  const cut = [], close = [];
  for (const svg of document.querySelectorAll("svg.figure")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([said, r], n) => {
      if (r.left < frame.left - 1 || r.right > frame.right + 1) cut.push(said);
      for (const [other, s] of texts.slice(n + 1)) {
        const wide = Math.min(r.right, s.right) - Math.max(r.left, s.left);
        const high = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
        if (wide > 1 && high > 3) close.push(`${said} / ${other}`);
      }
    });
  }
  const figures = [...document.querySelectorAll("svg.figure")].map((svg) => {
    const { x, y, width } = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll(".series .mark:not(.hidden)")];
    const mark = marks[0].getBoundingClientRect();
    return {
      frame: [x, y, width, svg.querySelector(".axis").getBoundingClientRect().bottom - y],
      colours: [...new Set(marks.map((mark) => getComputedStyle(mark).fill))],
      mark: [mark.x + mark.width / 2, mark.y + mark.height / 2],
    };
  });
  const root = document.documentElement;
  return { width: innerWidth, wide: root.scrollWidth, height: root.scrollHeight, outside, cut, close, figures };
})()"""

SORT = """[...document.querySelectorAll("table")].map((table) =>
  [...table.tHead.rows[0].cells].map((head, n) => [0, 1].map(() => {
    head.querySelector("button").click();
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[n]);
    return [head.getAttribute("aria-sort"), cells.map((cell) => cell.dataset.value ?? cell.textContent)];
  })))"""

KEYS = """[...document.querySelectorAll("figure")].map((figure) => {
  const press = (element, key) =>
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const svg = figure.querySelector("svg"), tip = document.getElementById("tip");
  const key = figure.querySelector(".key");
  press(svg, "ArrowRight");
  const shown = tip.hidden ? "" : tip.textContent;
  press(svg, "Escape");
  if (key) press(key, "Enter");
  const opacity = [...figure.querySelectorAll(".series")].map((part) => Number(getComputedStyle(part).opacity));
  if (key) press(key, "Enter");
  return [shown, tip.hidden, key?.getAttribute("aria-pressed") ?? null, opacity];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  if not PROGRAM:
    pytest.skip(f"the page was not opened: none of {', '.join(NAMES)} is installed")
  found = Browser(tmp_path_factory.mktemp("profile"))
  yield found
  found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)], ids=["400", "1400"])
def test_in_a_browser(browser, width, dark, tmp_path, monkeypatch):
  """No errors, nothing outside the window, ink of every series; hovering, keys and sorting work."""
  write(tmp_path / "results", files())
  (tmp_path / "results" / "broken.jsonl").write_text("{" + "x" * 3000)
  page_file = report(tmp_path / "results", monkeypatch=monkeypatch)
  browser.open(page_file, width, 900, dark=dark)
  found = browser.evaluate(MEASURE)
  assert found["width"] == width
  assert found["wide"] <= width
  assert (found["outside"], found["cut"], found["close"]) == ([], [], [])

  browser.resize(width, found["height"])
  pixels = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
  assert (pixels.mean() < 0.3) == dark
  assert len(found["figures"]) == page_file.read_text().count("<svg")
  for figure in found["figures"]:
    x, y, wide, high = map(round, figure["frame"])
    plot = pixels[y : y + high, x : x + wide]
    assert plot.size
    for colour in figure["colours"]:
      rgb = np.array([int(part) for part in re.findall(r"\d+", colour)[:3]]) / 255
      assert (abs(plot - rgb).max(axis=-1) < 0.04).sum() >= 6, (colour, figure)
    browser.hover(*figure["mark"])
    tip = browser.evaluate('document.querySelector("#tip:not([hidden])")?.textContent')
    assert tip.count("\n") == 2

  for shown, hidden, pressed, opacity in browser.evaluate(KEYS):
    assert shown.count("\n") == 2
    assert hidden
    if pressed is not None:
      assert pressed == "false"
      assert max(opacity) == 1
      assert min(opacity) < 0.5

  for (up, ascending), (down, descending) in itertools.chain(*browser.evaluate(SORT)):
    assert (up, down) == ("ascending", "descending")
    values = [value for value in ascending if value != "–"]
    missing = ["–"] * (len(ascending) - len(values))
    assert [ascending[len(values) :], descending[len(values) :]] == [missing, missing]
    try:
      numbers = [[float(v) for v in order[: len(values)]] for order in (ascending, descending)]
    except ValueError:
      continue  # words, in the browser's order
    assert numbers == [sorted(numbers[0]), sorted(numbers[0], reverse=True)]
  assert browser.faults() == []


@pytest.mark.slow
def test_the_browser_reports_faults(browser, tmp_path):
  """Else a page with errors would pass."""
  path = tmp_path / "page.html"
  path.write_text(
    '<script src="other.js"></script><script>console.error("no"); throw Error("x")</script>'
  )
  browser.open(path, 400, 400, dark=False)
  faults = " ".join(browser.faults())
  assert all(text in faults for text in ("other.js", "Error: x", '"no"'))
