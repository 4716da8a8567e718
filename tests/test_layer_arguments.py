"""Every option of every layer, and every argument of a call, is refused in a clear sentence where
it is wrong.
"""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_fast
from flax import nnx
from layer_cases import CASES, EACH, D

import lajax.layers as L

CLASSES = {case.layer.func.__name__: case.layer.func for case in EACH}
CLASSES |= {
  layer.__name__: layer for layer in (L.BidirectionalLinearAttention, L.EfficientAttention)
}

WRONG_COUNTS = (0, -1, 1.5, "8", None, True, math.nan)
WRONG_NUMBERS = ("1", None, True, math.nan, math.inf, -math.inf)
WRONG = {  # by the annotation of an option
  "int": WRONG_COUNTS,
  "int | None": tuple(x for x in WRONG_COUNTS if x is not None),
  "float": WRONG_NUMBERS,
  "float | None": tuple(x for x in WRONG_NUMBERS if x is not None),
  "bool": ("no", 1, None),
  "bool | None": ("no", 1),
  "str": ("fast", 3, None, np.ones(2)),
  "str | None": ("fast", 3, np.ones(2)),
}
WRONG_BY_NAME = {
  "dtype": (jnp.int32, "float33", 7, np.float32(1)),
  "param_dtype": (jnp.int32, "float33", 7, None, np.float32(1)),
  "rngs": (None, 7, jax.ShapeDtypeStruct((2,), jnp.uint32)),
  "norm_eps": (*WRONG_NUMBERS, -1.0),
  "expand_v": (*WRONG_NUMBERS, 0.0, -1.0, 1.1),
  "ridge_bound": (*WRONG_NUMBERS, 0.0),
  "rope_fraction": (*WRONG_NUMBERS, 0.3),
  "lower_bound": ("1", math.nan, math.inf),
  "feature_map": ("elu", 3, None),
  "dt_limits": (1.0, (1.0,), ("a", 2.0), "ab", (math.nan, 1.0)),
  "multipliers": (1.0, (1.0,), (True,) * 5, "zuBCd"),
  "layer_index": (-1, 7, 1.5, "0", None),
}


def parameters(layer) -> dict[str, inspect.Parameter]:
  return dict(list(inspect.signature(layer.__init__).parameters.items())[1:])


def options_of(layer) -> dict[str, tuple]:
  """Wrong values for every option."""
  found = {}
  for name, option in parameters(layer).items():
    kind = inspect.formatannotation(option.annotation)
    found[name] = WRONG_BY_NAME.get(name) or WRONG[kind]
  return found


def made(layer, *sizes, **options):
  """A layer that is traced only; the random streams begin inside the trace."""
  return nnx.eval_shape(lambda: layer(*sizes, **({"rngs": nnx.Rngs(0)} | options)))


def refusal(make) -> str | None:
  """The message of the ValueError that a call raises; None if it raises none, the error if it is
  another one.
  """
  try:
    make()
  except ValueError as error:
    return str(error)
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  return None


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_list_all_options(name):
  """`help` shows them, and any other option is refused."""
  layer = CLASSES[name]
  options = inspect.signature(layer).parameters
  assert dict(options) == parameters(layer)
  named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  assert all(option.kind in named for option in options.values())
  with pytest.raises(TypeError, match="'width_of_nothing'"):
    layer(D, width_of_nothing=3, rngs=nnx.Rngs(0))


FAST = ("SoftmaxAttention", "MLA", "GatedDeltaNet", "Mamba2", "RGLRU")


@pytest.mark.parametrize("name", some_fast(CLASSES, FAST))
def test_wrong_options(name):
  layer, unclear = CLASSES[name], []
  width = next(iter(parameters(layer)))
  for option, values in options_of(layer).items():
    for value in values:
      given = {width: D, option: value}
      message = refusal(lambda given=given: made(layer, **given))
      if message is None or f"`{option}`" not in message or "; got" not in message:
        unclear.append((option, value, message))
  assert not unclear


def test_messages_name_what_is_wrong_between_options():
  make = lambda layer, *sizes, **options: refusal(lambda: made(layer, D, *sizes, **options))
  for message, words in [
    (make(L.SoftmaxAttention, 4, 8, num_kv_heads=3), "`num_kv_heads` must divide num_heads = 4; got 3"),
    (make(L.SoftmaxAttention, 2, 7, rope_theta=1e4), "`head_dim` must be even"),
    (make(L.RetNet, 2, 7), "`head_dim` must be even"),
    (make(L.MLA, 2, 8, rope_dim=3), "`rope_dim` must be even"),
    (make(L.MLA, 2, 8, rope_theta=0.5), "`rope_theta` must be a number above 1; got 0.5"),
    (make(L.LinearAttention, 2, 8, feature_map="elu"), "one of 'elu+1', 'relu', 'exp', 'identity'"),
    (make(L.GatedDeltaNet, 2, 8, num_v_heads=3), "must be a multiple of num_heads = 2; got 3"),
    (make(L.GatedDeltaNet, 2, 5, expand_v=1.5), "`expand_v` times head_dim = 5 must be a whole number"),
    (make(L.Mamba2, 4, 8, num_groups=3), "`num_groups` must divide num_heads = 4; got 3"),
    (make(L.KimiDeltaAttention, 2, 8, lower_bound=5.0), "`lower_bound` must be a negative log decay"),
    (make(L.GLA, 2, 8, gate_normalizer=0), "`gate_normalizer` must be a number above 0; got 0"),
    (make(L.RGLRU, 3), "`num_blocks` must divide channels = 16; got 3"),
    (make(L.GriffinBlock, 12, 5), "`num_blocks` must divide channels = 12; got 5"),
    (make(L.Lightning, layer_index=4, num_layers=4), "must be in 0 .. num_layers - 1 = 3; got 4"),
  ]:  # fmt: skip
    assert message is not None
    assert words in message


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_wrong_arguments_of_a_call(case):
  layer = nnx.eval_shape(case.make)
  x, ids = jnp.ones((2, 3, D)), jnp.ones((2, 3), jnp.int32)
  said = lambda x, state=None, **named: refusal(lambda: layer(x, state, **named))
  for message, words in [
    (said(None), "`x` must be an array [B T D]; got None"),
    (said(7), "`x` must be an array [B T D]; got int"),
    (said(jnp.ones((2, 3, 5))), f"`x` must be [B T D] = (2, 3, {D})"),
    (said(jnp.ones((3, D))), "`x` must be [B T D]; got rank 2"),
    (said(jnp.ones((2, 3, D), jnp.int32)), "`x` must have a floating dtype"),
    (said(jnp.ones((2, 0, D))), "`x` must be [B T D] with at least one token; got T = 0"),
    (said(x, segment_ids=jnp.ones((2, 4), jnp.int32)), "`segment_ids` must be [B T] = (2, 3)"),
    (said(x, segment_ids=jnp.ones((2, 3))), "`segment_ids` must have an integer dtype"),
    (said(x, segment_ids=ids > 0), "jnp.where(segment_ids, 0, -1)"),
    (said(x, layer.init_state(3)), "`state.segment` must be [B] = (2,)"),
    (said(x, (jnp.ones(2),)), "`state` must be a LayerState"),
    (said(x, 7), "`state` must be a LayerState"),
    *((refusal(lambda n=n: layer.init_state(n)), "`batch` must be") for n in (None, -1, 1.5, "8")),
    (refusal(lambda: layer.init_state(2, dtype=jnp.int32)), "`dtype` must be a floating dtype"),
  ]:
    assert message is not None, words
    assert words in message
  with pytest.raises(TypeError):
    case.make(unknown=1)


# --- strict flags ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in EACH])
def test_strict_promotion_in_bfloat16(case):
  """Calls and gradients trace where JAX promotes no rank and no dtype.

  In float32 all tests of layers show it: the suite sets these flags.
  """
  dtype = jnp.bfloat16
  graph, params = nnx.split(nnx.eval_shape(lambda: case.make(param_dtype=dtype)))
  x = jax.ShapeDtypeStruct((2, 3, D), dtype)
  ids = np.zeros((2, 3), np.int32)

  def step(params, x):
    def loss(params, x):
      layer = nnx.merge(graph, params)
      _, state = layer(x)
      y, after = layer(x, state, segment_ids=ids)
      return y.astype(jnp.float32).sum(), (y, state, after)

    return jax.grad(loss, (0, 1), has_aux=True)(params, x)

  _, (y, *states) = jax.eval_shape(step, params, x)
  state = jax.eval_shape(lambda p: nnx.merge(graph, p).init_state(2, dtype=dtype), params)
  assert y.dtype == dtype
  for found in states:
    assert jax.tree.map(lambda s: s.dtype, found) == jax.tree.map(lambda s: s.dtype, state)
