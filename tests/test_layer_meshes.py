"""Layers on meshes of two devices give the numbers of one; sharded by heads, only the output
projection reduces.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layer_cases import EACH, Case, D, abstract, values
from mesh_cases import MeshCase, differences, report_of

import lajax.layers as L

B, T = 2, 5
BIDIRECTIONAL = (
  Case("EfficientAttention", lambda **o: L.EfficientAttention(D, 2, 8, **o)),
  Case("BidirectionalLinearAttention", lambda **o: L.BidirectionalLinearAttention(D, 2, 8, **o)),
)
FAST = ("GatedDeltaNet", "EfficientAttention")
IDS = np.array([[0, 0, 1, 1, -1], [3, 3, 3, 4, 4]], np.int32)


def mesh_case(case: Case) -> MeshCase:
  """A layer's call on parameters, inputs, ids, and a state if it has one; rows are sharded."""
  stateful = hasattr(case.layer, "func")
  graph, params = abstract(case.in_form("recurrent") if stateful else case)
  params = nnx.to_pure_dict(values(params))
  x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
  arrays = {"params": params, "x": x, "ids": IDS}
  batch = {"params": None, "x": 0, "ids": 0}
  layer = lambda params: nnx.merge(graph, nnx.State(params))
  if not stateful:
    return MeshCase(lambda a: layer(a["params"])(a["x"], segment_ids=a["ids"]), arrays, batch)
  state = layer(params).init_state(B)
  floats = jax.tree.map(np.asarray, (state.memory, state.conv))

  def call(a):
    before = L.LayerState(*a["floats"], a["segment"], a["length"])
    return layer(a["params"])(a["x"], before, segment_ids=a["ids"])

  counters = {"segment": np.asarray(state.segment), "length": np.asarray(state.length)}
  arrays |= {"floats": floats, **counters}
  return MeshCase(call, arrays, batch | {"floats": 0, "segment": 0, "length": 0})


def differences_of(cases, places=("explicit, batch", "auto, batch")) -> dict[str, list[str]]:
  """Returns what differs from one device: results, gradients and layouts, under jit."""
  return {c.name: differences(mesh_case(c), places) for c in cases}


def report() -> dict[str, list[str]]:
  """Returns what differs, of two layers and of an eager call, and the collectives of a step."""
  cases = [case for case in (*EACH, *BIDIRECTIONAL) if case.name in FAST]
  eager = mesh_case(next(case for case in EACH if case.name == "ShortConv"))
  found = differences_of(cases) | {"eager": differences(eager, (), eager=True)}
  return found | {"collectives": collectives()}


def report_of_all() -> dict[str, list[str]]:
  """Returns what differs, of all layers, on explicit axes: automatic ones change no program."""
  return differences_of((*EACH, *BIDIRECTIONAL), ("explicit, batch",))


def failures(found: dict[str, list[str]]) -> dict[str, list[str]]:
  return {name: lines for name, lines in found.items() if lines}


def test_layers_on_two_devices():
  """Their numbers are those of one device; sharded by heads, a training step has reductions alone.

  These are one of the outputs, one of the inputs' gradient per projection, and one of the norm's weight.
  """
  found = report_of("test_layer_meshes")
  collectives = dict(line.split(": ") for line in found.pop("collectives"))
  assert failures(found) == {}
  assert set(collectives) == {"all-reduce"}
  assert int(collectives["all-reduce"]) <= 8


@pytest.mark.slow
def test_every_layer_on_two_devices():
  assert failures(report_of("test_layer_meshes", "report_of_all")) == {}


# --- tensor parallelism ---------------------------------------------------------------------------


def by_heads(path: tuple, p) -> PartitionSpec:
  """Columns of projections and rows of the output projection by heads; all else but the norm by
  heads.
  """
  if path[0] == "norm":
    return PartitionSpec()
  if path[0] == "in_proj":
    return PartitionSpec(None, "model")
  return PartitionSpec("model", *(None,) * (p.ndim - 1))


def collectives() -> list[str]:
  """The collectives of one layer's training step, its parameters sharded by heads."""
  mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
  graph, params = abstract(Case("", functools.partial(L.GatedDeltaNet, D, 4, 8)))
  flat = nnx.to_flat_state(params)
  shardings = {path: NamedSharding(mesh, by_heads(path, p)) for path, p in flat}
  put = lambda path, p: p.replace(jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=shardings[path]))
  params = nnx.from_flat_state([(path, put(path, p)) for path, p in flat])

  def step(params, x):
    loss = lambda params, x: (nnx.merge(graph, params)(x)[0] ** 2).sum()
    d, dx = jax.grad(loss, (0, 1))(params, x)
    return jax.tree.map(lambda p, d: p - d, params, d), dx

  # One row: the drivers join rows and heads to one axis, which can be cut by heads in this case
  # alone.
  x = jax.ShapeDtypeStruct((1, 32, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  out = jax.tree.map(lambda p: p.sharding, (params, x))
  program = jax.jit(step, out_shardings=out).lower(params, x).compile().as_text()
  collective = r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
  counts = collections.Counter(re.findall(rf"{collective}(?:-start)?\(", program))
  return [f"{name}: {n}" for name, n in sorted(counts.items())]
