"""Costs of layers: published numbers exactly, and counts of operations against sums by hand."""

import jax
import jax.numpy as jnp
import pytest
import wrong_arguments as wrong
from flax import nnx
from layer_cases import CASES, D

import lajax.layers as L
from lajax import cost as costs

MB, MIB = 10**6, 2**20


def traced(layer, *sizes, **options):
  return nnx.eval_shape(lambda: layer(*sizes, **options, rngs=nnx.Rngs(0)))


def softmax(dtype=None, heads=16, width=96):
  return traced(L.SoftmaxAttention, 1536, heads, width, dtype=dtype)


def kda(dtype=None):
  return traced(L.KimiDeltaAttention, 1536, 16, 96, dtype=dtype)


def test_sophia():
  """[KDA, KDA, KDA, attention] x 7, against attention in all 28 layers, at 4,096 tokens."""
  mixer, attention = kda(jnp.bfloat16), softmax(jnp.bfloat16)
  hybrid = costs.cost([mixer, mixer, mixer, attention] * 7, 4096, prefill=False)
  matrices = 21 * 16
  assert hybrid.state.numbers == matrices * 96 * 96 == 336 * 9216 == 3_096_576  # 3.1 M
  assert hybrid.state.bytes_in(jnp.bfloat16) == 6_193_152  # 6.19 MB
  assert (
    hybrid.state.bytes == hybrid.state.bytes_in(jnp.float32) == 12_386_304
  )  # 12.4 MB, as it is kept
  assert hybrid.conv.numbers == 21 * 3 * 3 * 1536
  whole = costs.cost([attention] * 28, 4096, prefill=False)
  assert whole.cache.bytes == 704_643_072 == 672 * MIB
  assert round(whole.cache.bytes / MB, 1) == 704.6
  assert hybrid.cache.bytes * 4 == whole.cache.bytes
  assert whole.state.numbers == whole.conv.numbers == 0
  assert hybrid.carried.numbers == hybrid.state.numbers + hybrid.conv.numbers + hybrid.cache.numbers


def test_one_head_of_128():
  linear = traced(L.LinearAttention, 128, 1, 128, feature_map="identity", normalize=False)
  assert costs.memory(linear, 10_000).state.numbers == 16_384
  assert costs.memory(softmax(heads=1, width=128), 10_000).cache.numbers == 2_560_000


def test_scores_in_half_precision():
  assert costs.score_numbers(16, 1000) * 2 == 32 * 1000**2


def test_mla_keeps_576_numbers_a_token():
  for heads in (1, 16):
    layer = traced(L.MLA, 256, heads, dtype=jnp.bfloat16)
    assert costs.memory(layer, 1000).cache == costs.Size(576_000, 1_152_000)


@pytest.mark.parametrize("layer", [L.KimiDeltaAttention, L.Mamba, L.GriffinBlock, L.RetNet])
def test_recurrences_cost_the_same_at_any_length(layer):
  layer = traced(layer, 64)
  assert costs.cost(layer, 1) == costs.cost(layer, 10_000_000)


def test_log_linear_attention_grows_by_a_state_when_the_length_doubles():
  layer = traced(L.LogLinearGatedDeltaNet, 64, 2, 16, max_length=2**20)
  numbers = lambda length: costs.memory(layer, length).state.numbers
  assert [numbers(2**n) for n in (1, 10, 20, 30)] == [2 * 16 * 16 * n + 1 for n in (1, 10, 20, 20)]
  assert numbers(2**10 + 1) == numbers(2**11)
  per_level = costs.decode_operations(layer, 2**11) - costs.decode_operations(layer, 2**10)
  assert per_level == costs.decode_operations(layer, 2**12) - costs.decode_operations(layer, 2**11)
  assert costs.memory(layer, 2**10).cache.numbers == 0


def test_attention_grows_with_the_context():
  layer = softmax()
  short, long = (costs.cost(layer, n) for n in (1_024_000, 10_240_000))
  per_key = 4 * 1536  # scores and values: two products of 16 heads of 96
  # A block of 256 keys is added to those before it: a few operations per number of the output,
  # 1.03 in all.
  assert per_key <= (long.decode - short.decode) / 9_216_000 <= 1.04 * per_key
  assert per_key / 2 <= (long.prefill - short.prefill) / 9_216_000 <= 1.02 * per_key / 2
  windowed = traced(L.SoftmaxAttention, 1536, 16, 96, window=512)
  assert costs.cost(windowed, 10**6).cache == costs.cost(windowed, 10**7).cache
  assert costs.cost(windowed, 10**6).decode == costs.cost(windowed, 10**7).decode
  assert costs.cost(windowed, 10**7).prefill < costs.cost(windowed, 10**7).decode


def test_of_a_choice_by_platform_the_default_counts():
  """On a CPU the products of few key heads are joined, which multiplies zeros."""
  layer = traced(L.SoftmaxAttention, 256, 8, 32, num_kv_heads=2)
  short, long = (costs.cost(layer, n).decode for n in (10_240, 102_400))
  assert 4 * 256 <= (long - short) / 92_160 <= 1.04 * 4 * 256


def test_a_layer_multiplies_by_each_weight_once_a_token():
  """Counts the work beside the weights, per number of the state.

  It is decay, outer product, sum, and one product with a vector, two in the delta rule.
  """
  for layer, passes in [(kda(), 7), (traced(L.GLA, 1536, 16, 96), 5)]:
    state = costs.memory(layer, 1).state.numbers
    work = costs.decode_operations(layer, 1) - 2 * costs.parameters(layer)
    assert passes * state <= work <= 1.1 * passes * state
    assert (
      costs.decode_operations(layer, 1)
      < costs.prefill_operations(layer, 4096)
      < 1.2 * costs.decode_operations(layer, 1)
    )


def test_parameters():
  assert costs.parameters(softmax()) == 4 * 1536**2
  assert costs.cost([softmax()] * 3, 1, prefill=False).parameters == 12 * 1536**2


def test_keys_read():
  assert costs.keys_read(1) == 1
  assert costs.keys_read(5) == (1 + 2 + 3 + 4 + 5) / 5
  assert costs.keys_read(5, 2) == (1 + 2 + 2 + 2 + 2) / 5
  assert costs.keys_read(5, 9) == costs.keys_read(5)


def test_operations_of_a_program():
  def program(a, b):
    c, _ = jax.lax.scan(lambda c, _: (c @ b + 1, None), a, length=7)
    return jax.lax.cond(a[0, 0] > 0, lambda: c * 2, lambda: c).sum() + jnp.cumsum(jnp.arange(4))[
      0
    ].astype(a.dtype)

  a, b = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3), jnp.float32)
  traced_program = jax.make_jaxpr(program)(a, b)
  count = costs.operations(traced_program.jaxpr)
  assert count == costs.operations(traced_program)
  assert count == 7 * (2 * 2 * 3 * 3 + 6) + 6 + 6 + 1
  with pytest.raises(NotImplementedError, match="operations of a loop of unknown length"):
    costs.operations(
      jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x))(1.0).jaxpr
    )


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_layer_has_a_cost(case):
  layer = nnx.eval_shape(case.make)
  found = costs.cost(layer, 10_000_000, batch=2, prefill=False)
  assert found.parameters >= D
  assert found.carried.numbers > 0 or case.name == "ShortConv-width1"
  assert found.decode >= D  # a convolution of one token multiplies each channel once


def test_empty_and_zero_are_refused():
  with pytest.raises(ValueError, match=r"`length` must be a whole number of at least 1; got 0"):
    costs.cost(softmax(), 0)
  with pytest.raises(
    ValueError, match="`layers` must be a layer or a sequence of at least one; got none"
  ):
    costs.cost([], 5)


def test_wrong_arguments_are_refused():
  layer = traced(L.RetNet, 16)
  faults, right = [], dict(layers=layer, length=5)
  no_layers = {"none": None, "text": "ab", "number": 3, "class": L.RetNet, "empty": ()}
  no_layer = no_layers | {"linear": traced(nnx.Linear, 3, 4)}
  stacks = no_layer | {"one of them": [layer, 3], "linear in it": [layer, traced(nnx.Linear, 3, 4)]}
  faults += wrong.accepted(costs.cost, right, "layers", stacks)
  faults += wrong.accepted(costs.cost, right, "length", wrong.COUNTS)
  faults += wrong.accepted(costs.cost, right, "batch", wrong.COUNTS)
  flags = {"none": None, "text": "no", "number": 1, "array": jnp.ones(2)}
  faults += wrong.accepted(costs.cost, right, "prefill", flags)
  for f in (costs.memory, costs.decode_operations, costs.prefill_operations):
    faults += wrong.accepted(f, dict(layer=layer, length=5), "layer", no_layer)
    faults += wrong.accepted(f, dict(layer=layer, length=5), "length", wrong.COUNTS)
  faults += wrong.accepted(costs.memory, dict(layer=layer, length=5), "batch", wrong.COUNTS)
  faults += wrong.accepted(costs.keeps_tokens, {}, "layer", no_layer)
  faults += wrong.accepted(costs.parameters, {}, "layer", no_layers)
  for name in ("num_heads", "length"):
    right = dict(num_heads=2, length=3)
    faults += wrong.accepted(costs.score_numbers, right, name, wrong.COUNTS)
  windows = {kind: x for kind, x in wrong.COUNTS.items() if kind != "none"}
  faults += wrong.accepted(costs.keys_read, {}, "length", wrong.COUNTS)
  faults += wrong.accepted(costs.keys_read, dict(length=3), "window", windows)
  dtypes = {"none": None, "text": "float33", "number": 7, "nan": float("nan")}
  faults += wrong.accepted(costs.Size(3).bytes_in, {}, "dtype", dtypes)
  programs = {"none": None, "function": jnp.sin, "text": "a + b", "number": 1}
  faults += wrong.accepted(costs.operations, {}, "program", programs)
  assert not faults, "\n".join(faults)
  with pytest.raises(TypeError):
    costs.Size(3) + 4
  with pytest.raises(TypeError):
    costs.Cost() + costs.Size(3)
