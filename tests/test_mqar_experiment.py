"""The recall model and its experiment: flags, presets, resuming, tables and figures from lines."""

import dataclasses
import functools
import io
import itertools
import json
import math
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import wrong_arguments as wrong
from cases import some_fast
from flax import nnx
from rich.console import Console

import lajax.layers as L
from lajax.models import GatedShortConv, RecallModel, masked_positions, recall_loss
from lajax.tasks import mqar

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import mqar as experiment  # noqa: E402
from page.kinds import problem_of  # noqa: E402
from recall import report  # noqa: E402
from recall.config import is_plain, parse, plan  # noqa: E402
from recall.mixers import DEFAULT_MIXERS, MIXERS  # noqa: E402
from recall.presets import PRESETS  # noqa: E402
from recall.runs import Run, line_of, of_runs  # noqa: E402
from recall.training import Program, measure  # noqa: E402
from results import append, read, save  # noqa: E402

KEYS = "task mixer seed learning_rate accuracy all_correct steps rows_per_second parameters"
KEYS += " state_bytes config versions"


# --- the model ---


@functools.cache
@nnx.jit
def small_model() -> RecallModel:
  layers = [
    functools.partial(GatedShortConv, 16),
    functools.partial(L.LinearAttention, 16, num_heads=2, head_dim=8),
  ]
  return RecallModel(32, 16, layers, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_loss_reads_only_the_masked_positions_and_equals_that_of_all():
  inputs, targets, mask = mqar(jax.random.key(0), 4, vocab_size=32, length=16, pairs=3)
  model = small_model()
  logits, _ = nnx.jit(lambda model, tokens: model(tokens))(model, inputs)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  of = nnx.jit(recall_loss, static_argnames="count")
  loss, right = of(model, inputs, targets, mask, count=3)
  np.testing.assert_allclose(loss, losses[mask].mean(), rtol=1e-5)
  np.testing.assert_array_equal(right.sum(1), ((logits.argmax(-1) == targets) & mask).sum(1))
  more, padded = of(model, inputs, targets, mask, count=5)  # rows with fewer queries than positions
  np.testing.assert_allclose(more, loss, rtol=1e-5)
  assert ((padded == -1).sum(1) == 2).all()


@pytest.mark.usefixtures("quick_compiles")
def test_model_continues_from_its_state():
  tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)
  model = small_model()
  call = nnx.jit(lambda model, *arguments: model(*arguments))
  whole, _ = call(model, tokens)
  first, state = call(model, tokens[:, :5])
  second, _ = call(model, tokens[:, 5:], state)
  np.testing.assert_allclose(whole, jnp.concatenate([first, second], 1), atol=1e-5)
  assert jax.tree.structure(model.init_state(2)) == jax.tree.structure(state)


def test_head_is_never_run_on_a_whole_row():
  """The widest array of the loss and its gradient is [B K vocab], not [B L vocab]."""
  rows = mqar(jax.random.key(0), 2, vocab_size=32, length=16, pairs=3)
  graph, parameters = nnx.split(small_model())
  loss = lambda parameters: recall_loss(nnx.merge(graph, parameters), *rows, count=3)[0]
  text = str(jax.make_jaxpr(jax.grad(loss))(parameters))
  assert "f32[2,3,32]" in text
  assert "f32[2,16,32]" not in text.replace("f32[2,16,32] =", "")


COUNTS_AND_RNGS = {"none": None, "seed": 0, "key": jax.random.key(0), "text": "params"}
MATRIX_RANKS = ("none", "text", "list", "number", "rank too small", "rank too large", "dtype")


def first_matrix(shape, dtype):
  """Wrong values of the array that fixes B and T: any size is right, other ranks and dtypes not."""
  return {kind: x for kind, x in wrong.matrices(shape, dtype).items() if kind in MATRIX_RANKS}


def test_wrong_arguments_of_the_models_are_refused():
  layers = [functools.partial(GatedShortConv, 16)]
  right = dict(vocab_size=32, d_model=16, layers=layers, rngs=nnx.Rngs(0))
  faults = []
  for name in ("vocab_size", "d_model"):
    faults += wrong.accepted(RecallModel, right, name, wrong.COUNTS)
  many = {"none": None, "text": "ab", "number": 3, "numbers": [1], "maker": layers[0]}
  faults += wrong.accepted(RecallModel, right, "layers", many)
  faults += wrong.accepted(RecallModel, right, "rngs", COUNTS_AND_RNGS)
  right = dict(d_model=16, width=3, rngs=nnx.Rngs(0))
  for name in ("d_model", "width"):
    faults += wrong.accepted(GatedShortConv, right, name, wrong.COUNTS)
  faults += wrong.accepted(GatedShortConv, right, "rngs", COUNTS_AND_RNGS)
  model, conv = small_model(), GatedShortConv(16, rngs=nnx.Rngs(0))
  faults += wrong.accepted(conv, {}, "x", first_matrix((2, 4, 16), jnp.float32))
  faults += wrong.accepted(conv, {}, "x", {"width": jnp.ones((2, 4, 15))})
  faults += wrong.accepted(conv.init_state, {}, "batch", wrong.COUNTS)
  faults += wrong.accepted(model.init_state, {}, "batch", wrong.COUNTS)
  tokens = jnp.zeros((2, 4), jnp.int32)
  faults += wrong.accepted(model, {}, "tokens", first_matrix((2, 4), jnp.int32))
  faults += wrong.accepted(model, {}, "tokens", {"outside": tokens + 32, "negative": tokens - 1})
  ids = {kind: x for kind, x in wrong.matrices((2, 4), jnp.int32).items() if kind != "none"}
  faults += wrong.accepted(model, dict(tokens=tokens), "segment_ids", ids)
  states = {"number": 3, "text": "ab", "empty": [], "too many": model.init_state(2) * 2}
  faults += wrong.accepted(model, dict(tokens=tokens), "state", states)
  right = dict(tokens=tokens, positions=tokens[:, :2])
  faults += wrong.accepted(model.answers, right, "tokens", first_matrix((2, 4), jnp.int32))
  faults += wrong.accepted(model.answers, right, "positions", first_matrix((2, 2), jnp.int32))
  faults += wrong.accepted(model.answers, right, "positions", {"one row": tokens[:1]})
  assert not faults, "\n".join(faults)


def test_wrong_arguments_of_the_loss_are_refused_and_never_broadcast():
  tokens, mask = jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4), bool)
  right = dict(model=small_model(), inputs=tokens, targets=tokens, mask=mask, count=2)
  counts = wrong.COUNTS | {"more than tokens": 5}
  faults = wrong.accepted(recall_loss, right, "model", {"none": None, "function": jnp.sin})
  faults += wrong.accepted(recall_loss, right, "inputs", first_matrix((2, 4), jnp.int32))
  faults += wrong.accepted(recall_loss, right, "targets", wrong.matrices((2, 4), jnp.int32))
  faults += wrong.accepted(recall_loss, right, "mask", wrong.matrices((2, 4), bool))
  faults += wrong.accepted(recall_loss, right, "count", counts)
  faults += wrong.accepted(masked_positions, dict(mask=mask, count=2), "count", counts)
  faults += wrong.accepted(masked_positions, dict(count=2), "mask", first_matrix((2, 4), bool))
  assert not faults, "\n".join(faults)


# --- flags ---


def refusal(arguments: str, capsys) -> str:
  with pytest.raises(SystemExit) as end:
    experiment.prepare(arguments.split())
  assert end.value.code == 2
  out, error = capsys.readouterr()
  assert out == ""
  assert error.startswith("mqar.py: error: ")
  assert error.count("\n") == 1
  return error


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ("--pairs 17", "4 * 17 > 64"),
    ("--length 63", "must be even"),
    ("--vocab-size 12", "`vocab_size` is too small: 12 gives 5 keys"),
    ("--mixers softmax tofu", "unknown mixer tofu; known: softmax, linear,"),
    ("--mixers", "--mixers needs at least one value"),
    ("--pairs eight", "--pairs"),
    ("--piars 8", "--piars"),
    ("--filler dots", "'zeros', 'noise'"),
    ("--preset nothing", "'quick', 'zoology-fig2'"),
    ("--preset", "--preset"),
    ("--length 32 64 128 --pairs 4 8", "--length has 3, --pairs has 2"),
    ("--key-width 0", "--key-width must be at least 1; got 0"),
    ("--d-model 63 --num-heads 2", "--d-model must be a multiple of --num-heads 2; got 63"),
    ("--d-model 0", "--d-model must be at least 1; got (0,)"),
    ("--steps 0", "--steps must be at least 1; got (0,)"),
    ("--batch 64 0 --pairs 4 8", "--batch must be at least 1; got (64, 0)"),
    ("--power nan", "`power` must be a number of at least -1e+06 and of at most 1e+06; got nan"),
    ("--clip -1", "--clip must be positive; got -1"),
    ("--weight-decay nan", "--weight-decay must be at least 0; got nan"),
    ("--out setup.cfg/x", "--out setup.cfg/x: cannot make this folder"),
    ("--seeds 0", "--seeds must be at least 1"),
    ("--learning-rates 1e-3 -1", "--learning-rates must be positive; got -1"),
    ("--pairs 4 8 --mixture --batch 32 64", "give one --batch"),
    (
      "--pairs 4 8 --mixture --shares 1 2 3",
      "--shares needs one positive number for each of the 2",
    ),
    ("--test-pairs 32", "4 * 32 > 64"),
  ],
)
def test_a_bad_flag_gets_one_line(arguments, says, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "setup.cfg").write_text("a file where a folder is asked for")
  assert says in refusal(arguments, capsys)


def test_a_device_that_is_not_there_gets_one_line(capsys, monkeypatch):
  def no_devices(name=None):
    if name is not None:
      raise RuntimeError(f"Unknown backend {name}")
    return ["TFRT_CPU_0"]

  monkeypatch.setattr(jax, "devices", no_devices)
  with pytest.raises(SystemExit) as end:
    experiment.prepare(["--device", "gpu", "--mixers", "softmax"])
  assert end.value.code == 2
  assert "--device gpu: JAX sees no such device, only " in capsys.readouterr().err


def test_default_is_the_row_that_must_come_out():
  runs = plan(parse([]))
  assert [(run.mixer, run.seed) for run in runs] == [
    (mixer, seed) for mixer in DEFAULT_MIXERS for seed in range(3)
  ]
  assert {(r.vocab_size, r.train_rows, r.test_rows, r.d_model, r.key_width) for r in runs} == {
    (64, ((64, 8),), ((64, 8),), 64, 16)
  }
  assert set(PRESETS["quick"].at_least) == {"softmax", "deltanet", "gated_deltanet", "kda"}
  assert set(PRESETS["quick"].below) == {"linear"}


def test_flags_override_a_preset_and_go_together():
  config = parse(["--preset", "zoology-fig2", "--mixers", "all", "--d-model", "64", "--seeds", "2"])
  runs = plan(config)
  assert {run.mixer for run in runs} == set(MIXERS)
  assert {(run.train_rows[0], run.batch, run.steps) for run in runs} == {
    ((64, 4), 512, 12_544),
    ((128, 8), 512, 12_544),
    ((256, 16), 256, 25_024),
    ((512, 64), 128, 50_048),
  }
  assert {run.learning_rate for run in runs} == {1e-4, 4.64e-4, 2.15e-3, 1e-2}
  assert {(run.vocab_size, run.filler, run.power) for run in runs} == {(8192, "zeros", 0.01)}
  assert len(runs) == len(MIXERS) * 4 * 4 * 2
  assert not is_plain(config)
  assert is_plain(parse(["--seeds", "1"]))


def test_preset_of_based_is_its_mixture():
  runs = plan(parse(["--preset", "based-fig2", "--mixers", "deltanet"]))
  assert {run.train_rows for run in runs} == {((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))}
  assert {run.test_rows for run in runs} == {
    ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
  }
  assert {(run.shares, run.batch, run.filler) for run in runs} == {
    ((1e5, 2e4, 2e4, 2e4, 2e4), 256, "noise")
  }
  assert {run.learning_rate for run in runs} == {1e-3, 3.16e-3, 1e-2, 3.16e-2}
  assert {run.d_model for run in runs} == {64, 128, 256}


@pytest.mark.parametrize("preset", some_fast(PRESETS, list(PRESETS)[:2]))
def test_every_preset_can_be_planned(preset):
  config = parse(["--preset", preset])
  assert is_plain(config)
  assert plan(config)
  for published in PRESETS[preset].published:
    assert published.axis in ("d_model", "length", "state_bytes")


# --- sizes, lines, report ---


def small_run(**change) -> Run:
  return dataclasses.replace(_small_run(), **change)


@functools.cache
def _small_run() -> Run:
  flags = "--mixers deltanet --steps 4 --eval-every 2 --eval-rows 8 --batch 4 --length 16 --pairs 2"
  return plan(parse(flags.split()))[0]


measured = functools.cache(measure)  # traces a model


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_state_is_measured_whole(mixer):
  """Counts by hand: float32 arrays of one row, and two int32 counters per layer."""
  conv = 4 * 2 * 64
  memory = 4 * 16 * 64
  short_conv = 4 * 3 * (16 + 16 + 64)  # the cache of the convolution on q, k, v
  own = dict.fromkeys(MIXERS, memory + short_conv)
  own["softmax"] = own["mla"] = 4 * 2 * 16 * 16  # keys and values, or latents, of all 16 positions
  own["forgetting"] = 4 * (2 * 16 + 1) * 16
  own["mamba"], own["griffin"] = memory + 4 * 3 * 64, 4 * 64 + 4 * 3 * 64
  own["linear"] += 4 * 16
  for name, F in {
    "performer": 64,
    "cosformer": 32,
    "based": 273,
    "rebased": 136,
    "hedgehog": 32,
  }.items():
    own[name] += 4 * (F * (64 + 1) - 16 * 64)
  own["performer"] += 4 * 64  # a maximum per feature
  own["hgrn"] = 4 * 64 + 4 * 3 * (64 + 64)
  own["delta_product"] += 4 * 3 * (16 + 64)  # R = 2 keys and values a token
  own["mlstm"] += 4 * (16 + 1) - 4 * 3 * 64  # n and m; values are not convolved
  for name in ("preconditioned_gdn", "preconditioned_kda"):
    own[name] += 4 * 16  # the curvature
  own["momentum_deltanet"] += memory
  own["mesanet"] += 4 * 16 * 16  # the keys' own matrix
  for name in ("log_linear_mamba2", "log_linear_gdn"):  # a state for each of 4 bits of a position
    own[name] += 3 * memory + 4
  own["mamba3"] = memory + 4 * (4 + 16 + 64)  # angles, and the last token's key and value
  own["rwkv6"] = own["rwkv7"] = memory + 4 * 64  # the token before
  sizes = measure(small_run(mixer=mixer))
  assert sizes["state_bytes"] == conv + own[mixer] + 2 * 2 * 4
  assert sizes["parameters"] > 64 * 64


def fake_line(**change) -> dict:
  rate, accuracy = change.pop("learning_rate", 1e-2), change.pop("accuracy", 0.5)
  run = small_run(learning_rate=rate, **change)
  metrics = dict(
    accuracy=accuracy,
    all_correct=accuracy / 2,
    accuracy_by_rows={"L16 K2": accuracy},
    steps=4,
    steps_to_99=None,
    stopped_early=False,
    loss=1.0,
    seconds=1.0,
    rows_per_second=16.0,
    rows_per_cpu_second=8.0,
    compile_seconds=1.0,
    curve=[[2, accuracy / 2, 2.0], [4, accuracy, 1.0]],
    **measured(run.program),
  )
  return line_of(run, metrics)


def shown(table) -> str:
  console = Console(file=io.StringIO(), width=200)
  console.print(table)
  return console.file.getvalue()


def test_lines_read_back_and_a_cut_off_one_is_passed_over(tmp_path):
  path = tmp_path / "new" / "results.jsonl"
  lines = [fake_line(seed=seed) for seed in range(2)]
  append(path, lines[0])
  with path.open("a") as file:
    file.write('{"task": "mqar", "mix')
  append(path, lines[1])
  assert read(path) == json.loads(json.dumps(lines))
  runs = [small_run(seed=seed) for seed in (1, 0, 2)]
  assert [line["seed"] for line in of_runs(read(path), runs)] == [1, 0]
  assert set(KEYS.split()) <= set(lines[0])


def test_lines_that_are_no_results_are_passed_over(tmp_path):
  path, good = tmp_path / "results.jsonl", fake_line()
  unused = {"task", "seed", "versions", "stopped_early", "loss"}  # by tables and figures
  broken = [{}, None, 3, [], "x", {"config": 3}, {"config": good["config"]}]
  broken += [{name: good[name] for name in good if name != left} for left in set(good) - unused]
  changes = dict(accuracy="1", curve=[], accuracy_by_rows={}, steps_to_99="soon", seconds=None)
  broken += [good | {name: value} for name, value in changes.items()]
  broken += [good | {"curve": [[1, None, 0]]}, good | {"curve": [3]}, good | {"accuracy": math.nan}]
  lines = "".join(json.dumps(x) + "\n" for x in broken)
  path.write_bytes(b"\xff\xfe\n" + lines.encode())
  assert of_runs(read(path), [small_run()]) == []
  append(path, good)
  assert of_runs(read(path), [small_run()]) == [json.loads(json.dumps(good))]


class FakeProgram:
  """Stands for the training of a run: notes the runs that it trains."""

  trained: list[Run]

  def __init__(self, program: Run):
    self.program = program

  def train(self, seed, learning_rate, show):
    run = dataclasses.replace(self.program, seed=seed, learning_rate=learning_rate)
    show(1, 0.5, 1.0)
    FakeProgram.trained.append(run)
    names = ("task", "mixer", "seed", "learning_rate", "config", "versions")
    return {name: x for name, x in fake_line().items() if name not in names}


def other(value):
  """Returns another value of the same kind."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, str):
    return {"deltanet": "softmax", "zeros": "noise"}.get(value, value + "2")
  return value + value[:1] if isinstance(value, tuple) else (value or 0) + 1


def test_a_run_that_differs_in_any_field_is_another_run(tmp_path, monkeypatch):
  monkeypatch.setattr(experiment, "Program", FakeProgram)
  FakeProgram.trained = []
  path, run = tmp_path / "results.jsonl", small_run()
  append(path, fake_line())
  names = [field.name for field in dataclasses.fields(Run)]
  changed = [dataclasses.replace(run, **{name: other(getattr(run, name))}) for name in names]
  console = Console(file=io.StringIO())
  experiment.train_missing([run, *changed], path, console)
  assert FakeProgram.trained == changed
  assert f"1 of {1 + len(changed)} runs stand in" in console.file.getvalue().replace("\n", " ")
  experiment.train_missing([run, *changed], path, console)
  assert FakeProgram.trained == changed


def test_ctrl_c_says_what_is_saved_and_what_the_next_start_does(tmp_path, monkeypatch):
  class Interrupted(FakeProgram):
    def train(self, seed, learning_rate, show):
      if FakeProgram.trained:
        raise KeyboardInterrupt
      return super().train(seed, learning_rate, show)

  monkeypatch.setattr(experiment, "Program", Interrupted)
  FakeProgram.trained = []
  flags = ["--mixers", "softmax", "--seeds", "2", "--out", str(tmp_path)]
  monkeypatch.setattr(sys, "argv", ["mqar.py", *flags])
  with pytest.raises(KeyboardInterrupt) as stop:
    experiment.main()
  (note,) = stop.value.__notes__
  assert note.startswith(
    f"1 of 2 runs stand in {tmp_path / 'results.jsonl'}; the same command trains"
  )


def test_ctrl_c_is_one_line():
  code = "import before_jax; e = KeyboardInterrupt(); e.add_note('Saved.'); raise e"
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT / "experiments",
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == -signal.SIGINT
  assert done.stderr.strip() == "-c: stopped. Saved."


def test_report_marks_the_best_rate_and_gives_the_spread():
  lines = [fake_line(learning_rate=1e-3, seed=seed, accuracy=0.2) for seed in range(2)]
  lines += [fake_line(seed=seed, accuracy=0.6 + 0.2 * seed) for seed in range(2)]
  lines += [fake_line(mixer="softmax", seed=0, accuracy=1.0)]
  text = shown(report.main_table(lines, {}))
  assert "0.700 ± 0.141" in text
  assert "1.000 ± 0.000" in text
  rates = shown(report.rate_table(lines))
  assert "0.700*" in rates
  assert "0.200 " in rates
  quick = PRESETS["quick"]
  assert report.order(lines, quick) == [
    ("softmax", True, "1.000 ≥ 0.99"),
    ("deltanet", False, "0.700 ≥ 0.99"),
  ]
  drawn = report.styles([{"mixer": mixer} for mixer in reversed(MIXERS)]).values()
  assert len({tuple(style.items()) for style in drawn}) == len(MIXERS)  # no two look alike
  assert (
    len(
      {style["color"] for style in report.styles([{"mixer": m} for m in DEFAULT_MIXERS]).values()}
    )
    == 7
  )


def test_the_best_rate_is_that_of_the_mean_over_seeds():
  """The first seed ranks the two rates the other way round."""
  accuracies = {1e-3: (0.99, 0.1), 1e-2: (0.6, 0.8)}
  lines = [
    fake_line(learning_rate=rate, seed=seed, accuracy=accuracy)
    for rate, seeds in accuracies.items()
    for seed, accuracy in enumerate(seeds)
  ]
  assert {line["learning_rate"] for line in report.best_rate(lines)} == {1e-2}
  assert "0.700 ± 0.141" in shown(report.main_table(lines, {}))
  assert "0.700*" in shown(report.rate_table(lines))
  assert report.order(lines, PRESETS["quick"]) == [("deltanet", False, "0.700 ≥ 0.99")]


def test_figures_have_titles_in_words_and_ticks_that_do_not_touch(tmp_path):
  widths = (16, 64, 512)
  lines = [fake_line(mixer=mixer, d_model=d) for mixer in ("softmax", "kda") for d in widths]
  figures = [report.accuracy_over_steps(lines)]
  figures += [
    report.accuracy_against_state(lines, PRESETS[name]) for name in ("quick", "based-fig2")
  ]
  figures += [report.accuracy_against_state(lines[:1], PRESETS["quick"])]
  for figure in figures:
    assert "Multi-query associative recall" in figure.get_suptitle()
    for axis in figure.axes:
      assert "16 tokens, 2 key-value pairs" in axis.get_title()
      figure.draw_without_rendering()
      low, high = axis.get_xlim()
      labels = [x for x in axis.get_xticklabels() if low <= x.get_position()[0] <= high]
      boxes = [label.get_window_extent() for label in labels]
      assert len(boxes) > 1
      assert all(a.x1 + 5 < b.x0 for a, b in itertools.pairwise(boxes))
    assert "Kimi Delta Attention" in str(figures[0].axes[0].get_legend_handles_labels())
  save(figures[0], tmp_path / "steps.png")
  assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
  assert report.rows_label([(64, 4), (256, 32)]) == ("mixture: 64-256 tokens, 4-32 key-value pairs")


def test_an_interrupted_figure_leaves_the_old_one(tmp_path):
  class Broken:
    def savefig(self, path, **_):
      pathlib.Path(path).write_bytes(b"half")
      raise KeyboardInterrupt

  path = tmp_path / "figure.png"
  path.write_bytes(b"old")
  with pytest.raises(KeyboardInterrupt):
    save(Broken(), path)
  assert [x.name for x in tmp_path.iterdir()] == ["figure.png"]
  assert path.read_bytes() == b"old"


def test_published_figures_stand_beside_ours():
  lines = [
    fake_line(mixer="gla", d_model=width, train_rows=((512, 64),), test_rows=((512, 64),))
    for width in (64, 128)
  ]
  texts = report.published_texts(lines, PRESETS["zoology-fig2"])
  assert list(texts.values()) == [".22", ".95"]
  assert ".22" in shown(report.main_table(lines, texts))
  lines = [fake_line(mixer="kda", train_rows=((2048, 512),), test_rows=((2048, 512),))]
  assert list(report.published_texts(lines, PRESETS["kimi-fig4"]).values()) == [".48"]


# --- training ---


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_a_run_ends_after_its_steps_and_depends_on_its_seed_alone():
  run = small_run(eval_every=3, steps=4)
  program, seen = Program(run), []
  first = program.train(0, 1e-2, lambda *progress: seen.append(progress[0]))
  again = program.train(0, 1e-2, lambda *_: None)
  other = program.train(1, 1e-2, lambda *_: None)
  assert seen == [3, 4] == [point[0] for point in first["curve"]]
  assert first["curve"] == again["curve"] != other["curve"]
  assert first["steps"] == 4
  assert not first["stopped_early"]
  assert first["rows_per_second"] > 0
  assert first["rows_per_cpu_second"] > 0


@pytest.mark.slow
def test_the_command_trains_writes_draws_and_resumes(tmp_path):
  command = [
    sys.executable,
    str(ROOT / "experiments" / "mqar.py"),
    *["--mixers", "softmax", "--steps", "6", "--eval-every", "3"],
  ]
  command += [
    *[
      "--eval-rows",
      "16",
      "--batch",
      "16",
      "--seeds",
      "2",
      "--learning-rates",
      "1e-3",
      "1e-2",
      "--out",
    ],
    str(tmp_path),
  ]
  first = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
  assert first.stderr == ""
  assert "Accuracy by learning rate" in first.stdout
  lines = read(tmp_path / "results.jsonl")
  assert [(line["learning_rate"], line["seed"]) for line in lines] == [
    (1e-3, 0),
    (1e-3, 1),
    (1e-2, 0),
    (1e-2, 1),
  ]
  assert all(set(KEYS.split()) <= set(line) for line in lines)
  assert [problem_of(line) for line in lines] == [""] * 4
  assert lines[0]["versions"]["command"].startswith("python experiments/mqar.py --mixers softmax")
  assert (tmp_path / "accuracy_over_steps.png").exists()
  assert (tmp_path / "accuracy_against_state.png").exists()
  (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
  second = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
  assert "3 of 4 runs stand in" in second.stdout
  assert len(read(tmp_path / "results.jsonl")) == 4


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_a_mixture_trains_one_model_on_several_kinds_of_rows():
  config = parse(
    [
      "--mixers",
      "linear",
      "--length",
      "8",
      "16",
      "--pairs",
      "2",
      "2",
      "--mixture",
      "--shares",
      "3",
      "1",
      "--steps",
      "4",
      "--batch",
      "4",
      "--eval-every",
      "4",
      "--eval-rows",
      "8",
      "--test-length",
      "8",
      "16",
      "32",
      "--test-pairs",
      "2",
      "2",
      "4",
      "--seeds",
      "1",
    ]
  )
  (run,) = plan(config)
  result = Program(run).train(0, 1e-2, lambda *_: None)
  assert set(result["accuracy_by_rows"]) == {"L8 K2", "L16 K2", "L32 K4"}


@pytest.mark.slow
def test_the_delta_rule_recalls_where_elu_does_not():
  """The default run's order, on one seed and half of its steps."""
  accuracy = {}
  for run in plan(
    parse(["--mixers", "linear", "gated_deltanet", "--seeds", "1", "--steps", "300"])
  ):
    accuracy[run.mixer] = Program(run).train(run.seed, run.learning_rate, lambda *_: None)[
      "accuracy"
    ]
  assert accuracy["linear"] < 0.85
  assert accuracy["gated_deltanet"] >= 0.99
