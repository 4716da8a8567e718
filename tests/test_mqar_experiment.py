"""The recall model, and the experiment on it: flags, presets, resuming, tables and figures from the lines alone."""

import dataclasses
import functools
import io
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import lajax.layers as L
from lajax.models import GatedShortConv, RecallModel, recall_loss
from lajax.tasks import mqar

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import mqar as experiment  # noqa: E402
import recall_report  # noqa: E402
from recall_mixers import DEFAULT_MIXERS, MIXERS  # noqa: E402
from recall_presets import PRESETS  # noqa: E402
from recall_results import append, line_of, of_runs, read  # noqa: E402
from recall_training import Program, Run, measure  # noqa: E402

KEYS = "task mixer seed learning_rate accuracy all_correct steps rows_per_second parameters state_bytes config versions"


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


# --- flags ---


def refusal(arguments: str, capsys) -> str:
  with pytest.raises(SystemExit) as end:
    experiment.plan(experiment.parse(arguments.split()))
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
    ("--key-width 0", "--key-width must be None or at least 1"),
    (
      "--d-model 63 --num-heads 2",
      "--d-model must be a positive multiple of --num-heads 2; got 63",
    ),
    ("--steps 0", "--batch and --steps must be at least 1"),
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
def test_a_bad_flag_gets_one_line(arguments, says, capsys):
  assert says in refusal(arguments, capsys)


def test_a_device_that_is_not_there_gets_one_line(capsys):
  with pytest.raises(SystemExit) as end:
    experiment.choose_device("tpu")
  assert end.value.code == 2
  assert "JAX sees no such device" in capsys.readouterr().err


def test_default_is_the_row_that_must_come_out():
  runs = experiment.plan(experiment.parse([]))
  assert [(run.mixer, run.seed) for run in runs] == [
    (mixer, seed) for mixer in DEFAULT_MIXERS for seed in range(3)
  ]
  assert {(r.vocab_size, r.train_rows, r.test_rows, r.d_model, r.key_width) for r in runs} == {
    (64, ((64, 8),), ((64, 8),), 64, 16)
  }
  assert set(PRESETS["quick"].at_least) == {"softmax", "deltanet", "gated_deltanet", "kda"}
  assert set(PRESETS["quick"].below) == {"linear"}


def test_flags_override_a_preset_and_go_together():
  config = experiment.parse(
    ["--preset", "zoology-fig2", "--mixers", "all", "--d-model", "64", "--seeds", "2"]
  )
  runs = experiment.plan(config)
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
  assert not experiment.is_plain(config)
  assert experiment.is_plain(experiment.parse(["--seeds", "1"]))


def test_preset_of_based_is_its_mixture():
  runs = experiment.plan(experiment.parse(["--preset", "based-fig2", "--mixers", "deltanet"]))
  assert {run.train_rows for run in runs} == {((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))}
  assert {run.test_rows for run in runs} == {
    ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
  }
  assert {(run.shares, run.batch, run.filler) for run in runs} == {
    ((1e5, 2e4, 2e4, 2e4, 2e4), 256, "noise")
  }
  assert {run.learning_rate for run in runs} == {1e-3, 3.16e-3, 1e-2, 3.16e-2}
  assert {run.d_model for run in runs} == {64, 128, 256}


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_can_be_planned(preset):
  config = experiment.parse(["--preset", preset])
  assert experiment.is_plain(config)
  assert experiment.plan(config)
  for published in PRESETS[preset].published:
    assert published.axis in ("d_model", "length", "state_bytes")


# --- sizes, lines, report ---


def small_run(**change) -> Run:
  config = experiment.parse(
    [
      "--mixers",
      "deltanet",
      "--steps",
      "4",
      "--eval-every",
      "2",
      "--eval-rows",
      "8",
      "--batch",
      "4",
      "--length",
      "16",
      "--pairs",
      "2",
    ]
  )
  return dataclasses.replace(experiment.plan(config)[0], **change)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_state_is_measured_whole(mixer):
  """Hand counts: float32 arrays of one row, and per layer the two int32 of its place in the document."""
  conv = 4 * 2 * 64
  memory = 4 * 16 * 64
  own = dict.fromkeys(
    MIXERS, memory + 4 * 3 * (16 + 16 + 64)
  )  # the cache of the convolution on q, k, v
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
  own["performer"] += 4  # the largest key so far
  own["hgrn"] = 4 * 64 + 4 * 3 * (64 + 64)
  own["delta_product"] += 4 * 3 * (16 + 64)  # R = 2 keys and values a token
  own["mlstm"] += 4 * (16 + 1) - 4 * 3 * 64  # n and m; values are not convolved
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
    **measure(run),
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


def test_report_marks_the_best_rate_and_gives_the_spread(tmp_path):
  lines = [fake_line(learning_rate=1e-3, seed=seed, accuracy=0.2) for seed in range(2)]
  lines += [fake_line(seed=seed, accuracy=0.6 + 0.2 * seed) for seed in range(2)]
  lines += [fake_line(mixer="softmax", seed=0, accuracy=1.0)]
  text = shown(recall_report.main_table(lines, {}))
  assert "0.700 ± 0.141" in text
  assert "1.000 ± 0.000" in text
  rates = shown(recall_report.rate_table(lines))
  assert "0.700*" in rates
  assert "0.200 " in rates
  quick = PRESETS["quick"]
  assert recall_report.order(lines, quick) == [
    ("softmax", True, "1.000 ≥ 0.99"),
    ("deltanet", False, "0.700 ≥ 0.99"),
  ]
  drawn = recall_report.styles([{"mixer": mixer} for mixer in reversed(MIXERS)]).values()
  assert len({tuple(style.items()) for style in drawn}) == len(MIXERS)  # no two look alike
  assert (
    len(
      {
        style["color"]
        for style in recall_report.styles([{"mixer": m} for m in DEFAULT_MIXERS]).values()
      }
    )
    == 7
  )
  recall_report.accuracy_over_steps(lines, tmp_path / "steps.png")
  recall_report.accuracy_against_state(lines, tmp_path / "state.png", PRESETS["based-fig2"])
  assert all(
    (tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("steps.png", "state.png")
  )


def test_published_figures_stand_beside_ours():
  lines = [
    fake_line(mixer="gla", d_model=width, train_rows=((512, 64),), test_rows=((512, 64),))
    for width in (64, 128)
  ]
  texts = recall_report.published_texts(lines, PRESETS["zoology-fig2"])
  assert list(texts.values()) == [".22", ".95"]
  assert ".22" in shown(recall_report.main_table(lines, texts))
  lines = [fake_line(mixer="kda", train_rows=((2048, 512),), test_rows=((2048, 512),))]
  assert list(recall_report.published_texts(lines, PRESETS["kimi-fig4"]).values()) == [".48"]


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
  assert (tmp_path / "accuracy_over_steps.png").exists()
  assert (tmp_path / "accuracy_against_state.png").exists()
  (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
  second = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
  assert "3 of 4 runs stand in" in second.stdout
  assert len(read(tmp_path / "results.jsonl")) == 4


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.slow
def test_a_mixture_trains_one_model_on_several_kinds_of_rows():
  config = experiment.parse(
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
  (run,) = experiment.plan(config)
  result = Program(run).train(0, 1e-2, lambda *_: None)
  assert set(result["accuracy_by_rows"]) == {"L8 K2", "L16 K2", "L32 K4"}


@pytest.mark.slow
def test_the_delta_rule_recalls_where_elu_does_not():
  """The default run's order, on one seed and a third of its steps."""
  accuracy = {}
  for run in experiment.plan(
    experiment.parse(["--mixers", "linear", "gated_deltanet", "--seeds", "1", "--steps", "200"])
  ):
    accuracy[run.mixer] = Program(run).train(run.seed, run.learning_rate, lambda *_: None)[
      "accuracy"
    ]
  assert accuracy["linear"] < 0.85
  assert accuracy["gated_deltanet"] >= 0.99
