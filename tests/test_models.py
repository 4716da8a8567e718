"""Language models of one's own: configs, stacks, experts, states, checkpoints and their errors."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import model_memory
import numpy as np
import pytest
from flax import nnx
from model_cases import in_pieces, worst
from safetensors.numpy import load_file, save_file

import lajax
import lajax.layers as L
from lajax.models.config import periods
from lajax.models.families import published_config
from lajax.models.moe import MixtureOfExperts

pytestmark = pytest.mark.usefixtures("quick_compiles")
M = lajax.models
KDA = M.MixerConfig(L.KimiDeltaAttention, {"num_heads": 2, "head_dim": 8})
MLA = M.MixerConfig(L.MLA, {"num_heads": 2, "head_dim": 8, "kv_rank": 6, "rope_dim": 4})
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 24)).astype(np.int32)


def config(layers: int = 5, **options) -> M.ModelConfig:
  return M.hybrid_config(50, 16, [KDA, KDA, MLA], layers, mlp=24, **options)


def filled(module, seed: int = 0):
  """An abstract module with random parameters, without the time to compile their initial values."""
  rng = np.random.default_rng(seed)

  def value(p):
    x = rng.normal(size=p.shape)
    return jnp.asarray(x * (p.shape[-2] ** -0.5 if len(p.shape) > 2 else 0.3), p.dtype)

  graph, state = nnx.split(module)
  return nnx.merge(graph, jax.tree.map(value, state))


def abstract(made: M.ModelConfig, **options) -> M.LanguageModel:
  return nnx.eval_shape(lambda: M.LanguageModel(made, rngs=nnx.Rngs(0), **options))


@functools.cache
def model() -> M.LanguageModel:
  return filled(abstract(config()))


# --- stacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("kinds", "wanted"),
  [
    ("A", [(1, 1)]),
    ("AAAA", [(1, 4)]),
    ("KKKMKKKM", [(4, 2)]),
    ("DKKMKKKMKKKMKKM", [(1, 1), (1, 1), (4, 3), (1, 1)]),
    ("ABC", [(1, 1), (1, 1), (1, 1)]),
  ],
)
def test_periods_trace_the_fewest_layers(kinds, wanted):
  found = periods(kinds)
  assert sum(p for p, _ in found) == sum(p for p, _ in wanted)
  start = 0
  for period, repeats in found:
    part = kinds[start : start + period * repeats]
    assert part == part[:period] * repeats
    start += len(part)
  assert start == len(kinds)


def test_stacked_layers_are_the_layers_one_after_the_other():
  """A stack of R = 1 each, with the same parameters, gives the same numbers."""
  whole = model()
  assert [(s.repeats, len(s.blocks)) for s in whole.stacks] == [(2, 1), (1, 1), (2, 1)] or any(
    s.repeats > 1 for s in whole.stacks
  )

  @jax.jit
  def one_by_one(parameters):
    m = nnx.merge(graph, parameters)
    x = m.embedding[...][TOKENS]
    for stack in m.stacks:
      for repeat in range(stack.repeats):
        for block in stack.blocks:
          of_block, stacked = nnx.split(block)
          one = nnx.merge(of_block, jax.tree.map(lambda p, r=repeat: p[r], stacked))
          x = x + one.mixers[0](one.mixer_norm(x))[0]
          x = x + one.mlp(one.mlp_norm(x))
    return m.norm(x)

  graph, parameters = nnx.split(whole)
  assert worst(one_by_one(parameters), streams_of_whole()[-1]) <= 1e-5


@functools.cache
def streams_of_whole():
  return model().hidden_states(TOKENS)[0]


def test_pieces_change_nothing():
  streams, logits, _ = in_pieces(model(), TOKENS, piece=10)
  whole = streams_of_whole()
  assert whole.shape == (6, 2, 24, 16)
  assert worst(streams, whole) <= 1e-5
  assert worst(logits, model().logits(whole[-1])) <= 1e-5


@pytest.mark.slow
def test_rematerialisation_gives_the_same_gradients():
  def gradients(remat: bool):
    graph, parameters = nnx.split(filled(abstract(config(3), remat=remat)))
    loss = lambda p: nnx.merge(graph, p)(TOKENS)[0].std()
    return jax.jit(jax.grad(loss))(parameters)

  differ = jax.tree.map(worst, gradients(False), gradients(True))
  assert max(jax.tree.leaves(differ)) <= 1e-5


PERIOD = (L.RetNet, L.RetNet, L.RetNet, L.SoftmaxAttention)


@pytest.mark.slow
def test_depth_costs_no_compile_time():
  """The program of a step of 28 layers, 7 periods, is as long as that of 8 layers, 2 periods.

  Instructions are counted, not seconds, which differ by a fifth from run to run. (One period alone
  has no loop, and a shorter program: 28 layers took 1.5 times its time to compile, measured once.)
  """

  def instructions(layers: int) -> int:
    kinds = [M.MixerConfig(kind, {"num_heads": 2, "head_dim": 8}) for kind in PERIOD]
    made = M.hybrid_config(50, 16, kinds, layers, mlp=24)
    graph, parameters = nnx.split(abstract(made))
    loss = lambda p, t: nnx.merge(graph, p)(t)[0].std()
    tokens = jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
    program = jax.jit(jax.value_and_grad(loss)).lower(parameters, tokens).compile()
    return program.as_text().count("\n")

  few, many = instructions(8), instructions(28)
  assert many <= 1.02 * few, (few, many)


def test_float64_and_half_precision_keep_their_dtypes(x64):
  for dtype, logits in ((jnp.float64, jnp.float64), (jnp.bfloat16, jnp.float32)):
    m = abstract(config(3), param_dtype=dtype)
    graph, parameters = nnx.split(m)
    shapes = jax.eval_shape(lambda p, t, g=graph: nnx.merge(g, p)(t), parameters, TOKENS)
    assert shapes[0].dtype == logits
    assert m.stream_dtype == dtype


# --- experts --------------------------------------------------------------------------------------

EXPERTS = {
  "softmax": M.MoEConfig(6, 4, 2, normalize=False),
  "sigmoid-groups": M.MoEConfig(
    6, 8, 2, router="sigmoid", selection_bias=True, num_groups=4, top_groups=2, scale=2.5,
    activation="relu2", gated=False, latent=5, shared=M.MLPConfig(7, "relu2", gated=False),
  ),
  "shared-gate": M.MoEConfig(6, 4, 3, shared=M.MLPConfig(7), shared_gate=True),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_the_loop_over_tokens(name):
  c = EXPERTS[name]
  moe = filled(nnx.eval_shape(lambda: MixtureOfExperts(8, c, rngs=nnx.Rngs(0))), seed=3)
  x = np.random.default_rng(1).normal(size=(2, 5, 8)).astype(np.float32)
  graph, parameters = nnx.split(moe)
  got = np.asarray(jax.jit(lambda p, x: nnx.merge(graph, p)(x))(parameters, x))
  array = lambda v: np.asarray(v[...], np.float64)
  silu = lambda z: z / (1 + np.exp(-z))
  act = silu if c.activation == "silu" else lambda z: np.maximum(z, 0) ** 2

  def mlp(z, gate, up, down):
    return (act(z @ gate) * (z @ up) if gate is not None else act(z @ up)) @ down

  for z, y in zip(x.reshape(-1, 8).astype(np.float64), got.reshape(-1, 8), strict=True):
    logits = z @ array(moe.router.kernel)
    scores = 1 / (1 + np.exp(-logits)) if c.router == "sigmoid" else np.exp(logits)
    scores = scores if c.router == "sigmoid" else scores / scores.sum()
    choice = scores + (array(moe.selection_bias) if c.selection_bias else 0)
    groups = choice.reshape(c.num_groups, -1)
    kept = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1))[: c.top_groups]
    allowed = np.isin(np.arange(c.num_experts) // groups.shape[1], kept)
    chosen = np.argsort(-np.where(allowed, choice, -np.inf))[: c.top_k]
    weights = scores[chosen] * c.scale / (scores[chosen].sum() if c.normalize else 1)
    inside = z if c.latent is None else z @ array(moe.latent_in.kernel)
    gates = array(moe.gate) if c.gated else [None] * c.num_experts
    out = sum(
      w * mlp(inside, gates[e], array(moe.up)[e], array(moe.down)[e])
      for e, w in zip(chosen, weights, strict=True)
    )
    out = out if c.latent is None else out @ array(moe.latent_out.kernel)
    if c.shared is not None:
      gate = None if moe.shared.gate is None else array(moe.shared.gate.kernel)
      shared = mlp(z, gate, array(moe.shared.up.kernel), array(moe.shared.down.kernel))
      if c.shared_gate:
        shared = shared / (1 + np.exp(-z @ array(moe.shared_gate.kernel)))
      out = out + shared
    assert worst(out, y) <= 2e-5 * max(1, np.abs(out).max())


# --- Sophia ---------------------------------------------------------------------------------------


def test_sophia_carries_336_matrices_of_96_by_96():
  """3,096,576 numbers at any length, 6.19 MB in bfloat16; a loop over a period of 4."""
  made = M.sophia()
  kinds = [block.mixers[0].layer for block in made.blocks]
  assert kinds == [L.KimiDeltaAttention, L.KimiDeltaAttention, L.KimiDeltaAttention, L.MLA] * 7
  whole = abstract(made)
  assert [(s.repeats, len(s.blocks)) for s in whole.stacks] == [(7, 4)]
  for length in (1, 4096):
    size = lajax.cost.memory(whole, length)
    assert size.state.numbers == 336 * 96 * 96 == 3_096_576
    assert size.state.bytes_in(jnp.bfloat16) == 6_193_152
    assert size.cache.numbers == 7 * length * (512 + 64)
  small = abstract(M.sophia(300, d_model=64, mlp=0, tied_head=False))
  assert lajax.cost.memory(small, 1).state.numbers == 3_096_576
  assert small.head.shape == (64, 300)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda m: m(None), "`tokens` must be an array"),
    (lambda m: m(TOKENS[0]), "`tokens` must be"),
    (lambda m: m(TOKENS.astype(np.float32)), "`tokens` must have an integer dtype"),
    (lambda m: m(TOKENS[:, :0]), "at least one token"),
    (lambda m: m(TOKENS + 40), "`tokens` must be in 0 .. vocab_size - 1 = 49"),
    (lambda m: m(TOKENS, segment_ids=TOKENS[:, 1:]), "`segment_ids` must be"),
    (lambda m: m(TOKENS, 3), "`state` must be a tuple of"),
    (lambda m: m(TOKENS, m.init_state(3)), r"must be \[R B ..\]"),
    (lambda m: m(TOKENS, m.init_state(2, 5)), "the cache of 5 tokens is full"),
    (lambda m: m.init_state(2, 0), "`max_length` must be"),
    (lambda m: m.init_state(-1), "`batch` must be"),
  ],
)
def test_a_wrong_argument_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call(model())


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: M.LanguageModel({}, rngs=nnx.Rngs(0)), "`config` must be a ModelConfig"),
    (lambda: M.MixerConfig("KDA"), "`layer` must be a layer class"),
    (lambda: M.MixerConfig(L.GLA, {"a": {}}), "`options` must be a mapping"),
    (lambda: M.BlockConfig(), "a mixer or an MLP"),
    (lambda: M.BlockConfig((KDA,), mlp=3), "`mlp` must be"),
    (lambda: M.ModelConfig(50, 16, ()), "`blocks` must be"),
    (lambda: M.MoEConfig(6, 4, 5), "`top_k` must be"),
    (lambda: M.MoEConfig(6, 4, 2, num_groups=3), "`num_groups` must divide"),
    (lambda: M.MoEConfig(6, 8, 3, num_groups=4), "`top_k` must be at most"),
    (lambda: M.ResidualConfig("middle"), "`place` must be one of"),
    (lambda: M.hybrid_config(50, 16, []), "`pattern` must be"),
    (
      lambda: M.from_config({"model_type": "gpt9"}, rngs=nnx.Rngs(0)),
      "`model_type` must be one of",
    ),
    (lambda: M.from_config({"model_type": "mamba2"}, rngs=nnx.Rngs(0)), "must have the option"),
  ],
)
def test_a_wrong_config_is_named(make, message):
  with pytest.raises(ValueError, match=message):
    make()


MAMBA = {
  "model_type": "mamba",
  "vocab_size": 50,
  "hidden_size": 16,
  "num_hidden_layers": 2,
  "time_step_rank": 2,
}


@pytest.mark.parametrize(
  ("option", "value"), [("hidden_act", "gelu"), ("new_option", 1), ("quantization_config", {})]
)
def test_an_option_that_is_not_understood_is_named(option, value):
  with pytest.raises(ValueError, match=option):
    M.from_config(MAMBA | {option: value}, rngs=nnx.Rngs(0))


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_model_of_ones_own_is_saved_and_loaded(tmp_path):
  m = model()
  M.save(m, tmp_path)
  back = M.load(tmp_path)
  assert back.config == m.config
  differ = jax.tree.map(worst, nnx.state(m), nnx.state(back))
  assert max(jax.tree.leaves(differ)) == 0
  assert set(M.tensors(m)) == set(load_file(tmp_path / "model.safetensors"))
  assert published_config(m.config)["model_type"] == "lajax"


def mamba(folder, monkeypatch=None):
  """A Mamba checkpoint in a folder."""
  m = filled(nnx.eval_shape(lambda: M.from_config(MAMBA, rngs=nnx.Rngs(0))))
  M.save(m, folder)
  return m


def test_files_and_dtypes(tmp_path, monkeypatch):
  monkeypatch.setattr("lajax.models.checkpoints.FILE_BYTES", 8_000)
  m = mamba(tmp_path)
  assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert set(index["weight_map"]) == set(M.tensors(m))
  back = M.load(tmp_path)
  assert max(jax.tree.leaves(jax.tree.map(worst, nnx.state(m), nnx.state(back)))) == 0
  half = M.load(tmp_path, dtype=jnp.bfloat16)
  wanted = jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(m))
  assert {p.dtype for p in jax.tree.leaves(nnx.state(half))} == {jnp.dtype(jnp.bfloat16)}
  assert max(jax.tree.leaves(jax.tree.map(worst, wanted, nnx.state(half)))) == 0
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  placed = M.load(tmp_path, sharding=lambda path, shape: sharding if "in_proj" in path else None)
  assert placed.stacks[0].blocks[0].mixers[0].in_proj["u"].kernel[...].sharding == sharding


def test_wrong_tensors_are_named(tmp_path):
  mamba(tmp_path)
  file = tmp_path / "model.safetensors"
  tensors = load_file(file)
  first = "backbone.layers.0.mixer."
  tensors["extra.weight"] = tensors.pop(f"{first}A_log")
  tensors[f"{first}D"] = tensors[f"{first}D"][:3]
  save_file(tensors, file)
  with pytest.raises(ValueError, match=r"A_log.*extra\.weight.*mixer\.D"):
    M.load(tmp_path)


def test_a_dtype_that_is_no_float_is_named(tmp_path):
  mamba(tmp_path)
  tensors = load_file(tmp_path / "model.safetensors")
  name = "backbone.layers.0.mixer.D"
  tensors[name] = tensors[name].astype(np.int8)
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=rf"{name} must be of F64, .*; got I8"):
    M.load(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_loading_takes_two_tensors_more_than_the_model(tmp_path):
  """A checkpoint of 2 GB in 8 files, whose largest tensor is 34 MB: memory of a process that loads it.

  On a CPU the devices' memory is the process's, so its peak is what it held before, the model, and
  at most two tensors. 32 MiB are allowed for the programs of the larger shapes and for what malloc
  keeps; 34 to 40 MiB in all beyond the model were measured.
  """
  try:
    made = model_memory.make(tmp_path)
    program = [sys.executable, model_memory.__file__, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
  finally:
    shutil.rmtree(tmp_path)  # pytest keeps folders of three runs
  assert made["bytes"] >= 2e9
  assert made["files"] >= 4
  assert found["held"] == made["bytes"]
  assert found["peak"] - found["before"] - found["held"] <= 2 * made["largest"] + 32 * 2**20


def test_a_folder_that_is_missing_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as where it is not installed
  with pytest.raises(FileNotFoundError, match="no folder"):
    M.load(tmp_path / "nothing")
  with pytest.raises(FileNotFoundError, match=r"lajax\[hub\]"):
    M.load("owner/name")
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    M.load(tmp_path)


def test_stacked_layers_differ_in_their_buffers():
  lightning = lambda n: M.MixerConfig(
    L.Lightning, {"num_heads": 2, "head_dim": 8}, buffers={"slopes": (0.1 + n, 0.2 + n)}
  )
  blocks = tuple(M.BlockConfig((lightning(n),)) for n in range(3))
  made = nnx.eval_shape(lambda: M.LanguageModel(M.ModelConfig(50, 16, blocks), rngs=nnx.Rngs(0)))
  assert [(s.repeats, len(s.blocks)) for s in made.stacks] == [(3, 1)]
  assert made.stacks[0].blocks[0].mixers[0].slopes.shape == (3, 2)
  assert dataclasses.replace(blocks[0]).structure == blocks[1].structure
