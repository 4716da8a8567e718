"""A whole model on two devices gives the numbers of one: logits, state, a step of gradients; and
an engine gives its tokens.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mesh_cases import TOLERANCE, report_of, spec

import lajax.layers as L
import lajax.models as M
from lajax.serve import Engine

HEADS = {"num_heads": 2, "head_dim": 8}
DELTA = M.MixerConfig(L.GatedDeltaNet, HEADS | {"impl": "recurrent"})  # the fastest to compile
PATTERN = [DELTA, M.MixerConfig(L.SoftmaxAttention, HEADS)]
EXPERTS = M.MoEConfig(12, 4, 2)
CONFIG = M.hybrid_config(50, 16, PATTERN, 4, mlp=EXPERTS)
B, T = 4, 12
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 50, (B, T)).astype(np.int32)
IDS = np.array([[0] * 12, [0] * 5 + [1] * 7, [-1] * 3 + [2] * 9, [4] * 10 + [-1] * 2], np.int32)


def step(graph):
  """Returns a function of parameters, tokens, ids and a state: logits, states, new parameters."""

  def loss(parameters, tokens, ids, state):
    logits, state = nnx.merge(graph, parameters)(tokens, state, segment_ids=ids)
    return jnp.square(logits).mean(), (logits, state)

  def run(parameters, tokens, ids, state):
    gradients, (logits, after) = jax.grad(loss, has_aux=True)(parameters, tokens, ids, state)
    moved = jax.tree.map(lambda p, g: p - g, parameters, gradients)
    return {"logits": logits, "state": after, "parameters": moved}

  return jax.jit(run)


def report() -> dict[str, list[str]]:
  """Returns what differs from one device: of two calls, the second with the state of the first."""
  jax.config.update("jax_disable_most_optimizations", True)
  model = nnx.eval_shape(lambda: M.LanguageModel(CONFIG, rngs=nnx.Rngs(0)))
  graph, parameters = nnx.split(model)
  value = lambda p: (RNG.normal(size=p.shape) * 0.3).astype(p.dtype)
  parameters = jax.tree.map(value, parameters)
  empty = jax.device_get(model.init_state(B, 2 * T))
  mesh = jax.make_mesh((2,), ("data",))
  place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
  everywhere = jax.tree.map(place, parameters)
  tokens, empty_rows = place(TOKENS, "data"), jax.tree.map(lambda s: place(s, None, "data"), empty)

  found, run = {}, step(graph)
  want = run(parameters, TOKENS, IDS, empty)
  got = run(everywhere, tokens, place(IDS, "data"), empty_rows)
  found["first call"] = differences(got, want) + layouts(got)
  eager, state = nnx.merge(graph, everywhere)(tokens, segment_ids=place(IDS, "data"))
  found["eager, no state"] = differences(eager, want["logits"])
  found["eager, no state"] += layouts({"logits": eager, "state": state, "parameters": ()})
  want = run(parameters, TOKENS, IDS + 1, jax.device_get(want["state"]))
  got = run(everywhere, tokens, place(IDS + 1, "data"), got["state"])
  found["second call"] = differences(got, want) + layouts(got)
  found["load"] = differences_of_loading(nnx.merge(graph, parameters), mesh)
  found["engine"] = differences_of_serving(graph, parameters)
  return found


def differences_of_serving(graph, parameters) -> list[str]:
  """Says what an engine writes otherwise if its parameters are split over automatic axes."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

  def split(p):
    axes = [None] * (p.ndim - 1) + ["data" if p.shape[-1] % 2 == 0 else None]
    return jax.device_put(p, NamedSharding(mesh, PartitionSpec(*axes)))

  def tokens(parameters):
    model = nnx.merge(graph, parameters)
    engine = Engine(model, slots=2, prefill_piece=4, max_length=16, page_size=8)
    handles = [engine.submit(prompt, max_tokens=4) for prompt in ([1, 2, 3, 4, 5, 6], [7], [8, 9])]
    engine.run()
    return [handle.result() for handle in handles]

  pairs = zip(tokens(jax.tree.map(split, parameters)), tokens(parameters), strict=True)
  return [f"{got} in place of {want}" for got, want in pairs if got != want]


def differences_of_loading(model, mesh) -> list[str]:
  """Says which parameters, written and read onto two devices, have other numbers or layouts."""

  def chosen(path: str, shape: tuple[int, ...]) -> NamedSharding:
    axes = [None] * (len(shape) - 1) + ["data" if shape[-1] % 2 == 0 else None]
    return NamedSharding(mesh, PartitionSpec(*axes))

  with tempfile.TemporaryDirectory() as folder:
    M.save(model, folder)
    read = M.load(folder, sharding=chosen)
  want, got = (nnx.to_flat_state(nnx.state(m)) for m in (model, read))
  lines = differences([p[...] for _, p in got], [p[...] for _, p in want])
  wrong = [path for path, p in got if p[...].sharding != chosen("", p.shape)]
  return lines + [f"{path} has another sharding" for path in wrong]


def differences(got, want) -> list[str]:
  lines = []
  pairs = zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True)
  for (path, a), b in pairs:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-3)
    if not error <= TOLERANCE:
      lines.append(f"{jax.tree_util.keystr(path)} is off by {error:.1e}")
  return lines


def layouts(got) -> list[str]:
  """Says what is not sharded by rows, or, of the parameters, not on both devices."""
  lines = [] if spec(got["logits"])[0] == "data" else [f"logits are {spec(got['logits'])}"]
  lines += [f"a state is {spec(s)}" for s in jax.tree.leaves(got["state"]) if spec(s)[1] != "data"]
  parameters = jax.tree.leaves(got["parameters"])
  return lines + [f"a parameter is {spec(p)}" for p in parameters if any(spec(p))]


@pytest.mark.slow
def test_a_model_on_two_devices_gives_the_numbers_of_one():
  """The axes of the mesh are explicit, as `jax.make_mesh` makes them; rows are sharded."""
  found = report_of("test_model_meshes")
  assert {name: lines for name, lines in found.items() if lines} == {}
