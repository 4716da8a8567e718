"""Single-token steps: a scan of them is the op, in outputs, final state and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, GATES, quick_jit, relative_rms

import lajax
import lajax.recurrence

B, T, H, HV, K, V, R = 2, 9, 2, 4, 4, 3, 2
rng = np.random.default_rng(0)


def normal(*shape):
  return rng.standard_normal(shape)


def unit(*shape):
  x = normal(*shape)
  return x / np.sqrt((x * x).sum(-1, keepdims=True))


def strength(*shape):
  return rng.uniform(0.1, 0.9, shape)


QKV = dict(q=normal(B, T, H, K), k=unit(B, T, H, K), v=normal(B, T, HV, V))
PER_HEAD, PER_CHANNEL = -abs(normal(B, T, HV)), -abs(normal(B, T, HV, K))
S = normal(B, HV, K, V)
STEPS = {  # op: arguments with an axis T, others, first state
  "linear_attention": (QKV | dict(g=PER_HEAD), {}, S),
  "linear_attention, bonus": (QKV | dict(g=PER_CHANNEL), dict(bonus=normal(H, K)), S),
  "normalized_linear_attention": (
    QKV | dict(q=strength(B, T, H, K), k=strength(B, T, H, K), g=PER_CHANNEL), {}, (S, strength(B, HV, K)),
  ),
  "delta_rule": (QKV | dict(beta=strength(B, T, HV), g=PER_CHANNEL), {}, S),
  "delta_rule, erase and write": (
    QKV | dict(erase=strength(B, T, HV, K), write=strength(B, T, HV, V), g=PER_HEAD), {}, S,
  ),
  "delta_product": (
    dict(q=QKV["q"], k=unit(B, T, R, H, K), v=normal(B, T, R, HV, V), beta=strength(B, T, R, HV), g=PER_HEAD), {}, S,
  ),
  "gated_oja": (QKV | dict(v=unit(B, T, HV, V), beta=strength(B, T, HV), g=-abs(normal(B, T, HV, V))), {}, S),
  "dplr": (QKV | dict(a=-unit(B, T, H, K), b=0.5 * unit(B, T, H, K), g=PER_CHANNEL), {}, S),
  "mlstm": (
    QKV | dict(q=strength(B, T, H, K), k=strength(B, T, H, K), i=normal(B, T, HV), f=PER_HEAD),
    {},
    (S, strength(B, HV, K), normal(B, HV)),
  ),
  "preconditioned_delta_rule": (
    QKV | dict(beta=strength(B, T, HV), g=PER_CHANNEL, beta_precond=strength(B, T, H), g_precond=-strength(B, T, H)),
    {},
    (S, strength(B, H, K)),
  ),
  "momentum_delta_rule": (
    QKV | dict(p=unit(B, T, H, K), beta=strength(B, T, HV), eta=strength(B, T, HV), g=PER_HEAD, g_momentum=-strength(B, T, HV)),
    {},
    (S, normal(B, HV, K, V)),
  ),
  "mesa": (
    QKV | dict(beta=strength(B, T, HV), g=PER_HEAD), dict(ridge=strength(H, K)), (np.tile(np.eye(K), (B, HV, 1, 1)), S),
  ),
  "log_linear_attention": (
    QKV | dict(g=PER_HEAD, level_scales=strength(B, T, HV, 5), beta=strength(B, T, HV)),
    {},
    (normal(B, HV, 4, K, V), np.array([3.0, 13.0])),
  ),
  "mamba3": (
    QKV | dict(g=PER_HEAD, dt=strength(B, T, HV), trapezoid=strength(B, T, HV)), {}, (S, normal(B, H, K), normal(B, HV, V)),
  ),
  "mamba3, ranks": (
    dict(q=normal(B, T, R, H, K), k=normal(B, T, R, H, K), v=normal(B, T, R, HV, V), g=PER_HEAD, dt=strength(B, T, HV),
         trapezoid=strength(B, T, HV)),
    {},
    (S, normal(B, R, H, K), normal(B, R, HV, V)),
  ),
  "linear_recurrence": (dict(x=normal(B, T, 3, 2), log_a=-abs(normal(B, T, 3, 2))), {}, normal(B, 3, 2)),
}  # fmt: skip


def functions(name: str):
  """(tokens, others, state) -> (o, state): a scan of steps, and the op token by token."""
  op, step = (
    getattr(lajax, name.split(",")[0]),
    getattr(lajax.recurrence, f"{name.split(',')[0]}_step"),
  )
  if "erase" in name:
    op, step = functools.partial(op, beta=None), functools.partial(step, beta=None)

  def scan(tokens, others, state):
    major = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, o = jax.lax.scan(lambda s, x: step(s, **x, **others), state, major)
    return jnp.moveaxis(o, 0, 1), state

  def whole(tokens, others, state):
    return op(**tokens, **others, initial_state=state, impl="recurrent")

  return scan, whole


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", STEPS)
def test_a_scan_of_steps_is_the_op(name):
  arguments = STEPS[name]

  def total(f):
    def loss(*arguments):
      results = f(*arguments)
      return sum(jnp.sin(x).sum() for x in jax.tree.leaves(results)), results

    return quick_jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

  scan, whole = functions(name)
  (gradients, results), (wanted, want) = total(scan)(*arguments), total(whole)(*arguments)
  for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
    assert relative_rms(a, b) <= BUDGET["float64"]["value"]
  for (path, a), b in zip(
    jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True
  ):
    gate = any(repr(gate) in jax.tree_util.keystr(path) for gate in GATES)
    kind = "gate" if gate else "gradient"
    assert relative_rms(a, b) <= BUDGET["float64"][kind], jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", STEPS)
def test_dtypes(name):
  """The state is float32 and the output has the dtype of the values, whatever the inputs."""
  tokens, others, state = STEPS[name]
  half = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((B, *x.shape[2:]), jnp.bfloat16), tokens)
  step = getattr(lajax.recurrence, f"{name.split(',')[0]}_step")
  step = functools.partial(step, beta=None) if "erase" in name else step
  after, o = jax.eval_shape(lambda s, x, y: step(s, **x, **y), half(state), one, half(others))
  assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.float32)}
  assert o.dtype == jnp.bfloat16
