"""A rule's backward pass, its identity, and the gradients of gates."""

import functools
import warnings
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Shape

from lajax.recurrence import delta_rule, dplr, linear_attention, linear_recurrence, momentum
from lajax.recurrence import rule as rules
from lajax.recurrence.chunks import chunked
from lajax.recurrence.rule import Affine, Chunk, Rule, bind, derived
from lajax.recurrence.tokens import recurrent

B, T, H, HV, K, V = 2, 40, 1, 2, 6, 5
DOCUMENTS = np.stack([np.repeat([0, 1, 2, 3], [5, 13, 1, 21]), np.zeros(T)]).astype(np.int32)


def gates(rng, gate: str):
  """Log decays with every strength in them, 0 and -inf too."""
  if gate == "none":
    return None
  strengths = [0, -1e-4, -0.3, -0.3, -5, -20, -1e4, -np.inf]
  return rng.choice(strengths, (B, T, HV) if gate == "head" else (B, T, HV, K))


def additive(rng, gate):
  normal = rng.standard_normal
  return linear_attention.AdditiveTokens(
    normal((B, T, H, K)), normal((B, T, H, K)), normal((B, T, HV, V)), gates(rng, gate)
  )


def positive(rng, gate):
  x = additive(rng, gate)
  return x._replace(q=0.1 + np.abs(x.q), k=0.1 + np.abs(x.k))


def corrected(rng, gate):
  q, k, v, g = additive(rng, gate)
  return delta_rule.DeltaTokens(q, k / 3, v, rng.random((B, T, HV)), None, g)


def by_rows(rng, gate):
  return corrected(rng, gate)._replace(q=rng.standard_normal((B, T, H, V)))


def low_rank(rng, gate):
  q, k, v, g = additive(rng, gate)
  return dplr.DplrTokens(q, k, v, -k / 3, k * rng.random((B, T, H, K)) / 3, g)


def with_momentum(rng, gate):
  q, k, v, g = additive(rng, gate)
  beta, eta = rng.random((2, B, T, HV))
  return momentum.MomentumTokens(q, k / 3, q / 3, v, beta, eta, g, gates(rng, gate))


def elementwise(rng, gate):
  log_a = rng.choice([0, -0.3, -20, -np.inf], (B, T, 1, K))
  return linear_recurrence.ElementwiseTokens(rng.standard_normal((B, T, 1, K)), log_a)


RULES = {
  "linear": (linear_attention.rule, additive),
  "reading_before": (linear_attention.rule_of(before=True), additive),
  "normalized": (linear_attention.normalized(1e-6), positive),
  "delta": (delta_rule.rule, corrected),
  "by_rows": (delta_rule.by_rows, by_rows),
  "dplr": (dplr.rule, low_rank),
}


def value_and_gradients(run, tokens, state):
  def loss(tokens, state):
    o, state = run(tokens, state)
    weigh = lambda x: (x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum()
    return weigh(o) + weigh(state)

  return cases.quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(tokens, state)


def furthest(got, want) -> float:
  """The largest relative RMS of any array of a pytree."""
  return max(jax.tree.leaves(jax.tree.map(cases.relative_rms, got, want)))


def rule_cases():
  for name in RULES:
    for gate in ("none", "head", "channel"):
      fast = (name, gate) in [("linear", "channel"), ("delta", "head"), ("normalized", "none")]
      yield pytest.param(name, gate, marks=() if fast else pytest.mark.slow)
  yield pytest.param("elementwise", "channel")
  yield pytest.param("momentum", "head", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "gate"), [*rule_cases()])
def test_derived_backward_pass_is_the_one_by_hand(x64, name, gate):
  """Grouped heads, packed documents, a carried state, gates of 0 and of -inf."""
  rng = np.random.default_rng(0)
  if name == "elementwise":
    rule, tokens, state = linear_recurrence.rule, elementwise(rng, gate), (B, 1, K, 1)
  elif name == "momentum":
    rule, tokens, state = momentum.rule, with_momentum(rng, gate), (B, HV, 2 * K, V)
  else:
    rule, draw = RULES[name]
    tokens, state = draw(rng, gate), (B, HV, K, V + (name == "normalized"))
  state = np.abs(rng.standard_normal(state))
  run = lambda rule: (
    lambda x, s: chunked(rule, x, s, jnp.asarray(DOCUMENTS), scale=0.5, chunk_size=16)
  )
  by_hand = value_and_gradients(run(rule), tokens, state)
  assert furthest(value_and_gradients(run(derived(rule)), tokens, state), by_hand) < 1e-12


# --- a new family --------------------------------------------------------------------------------


class Leaky(NamedTuple):
  """S = r S + k v^T, where r = 1 - rate where the token writes; it reads S^T q + c v."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  written: jax.Array  # 1 for a token that writes, 0 for one that does not


def _leaky_step(rate, c, state, x):
  state = (1 - rate * x.written) * state + x.k[:, None] * x.v[None]
  return state, state.T @ x.q + c * x.v


def _leaky_lift(rate, x):
  return Affine(1 - rate * x.written, x.k[:, None] * x.v[None])


def _leaky_read(c, before, after, x):
  return after.T @ x.q + c * x.v


def _leaky_chunk(rate, c, x, masks, precision):
  logs = jnp.log1p(-rate * x.written)
  sums = jnp.cumsum(logs)
  lower = np.tri(len(logs), dtype=bool)
  between = jnp.where(lower, jnp.exp(jnp.where(lower, sums[:, None] - sums[None], 0)), 0)
  from_start, to_end, total = jnp.exp(sums), between[-1], jnp.exp(sums[-1])
  if masks is not None:
    between = jnp.where(masks.between, between, 0)
    from_start = jnp.where(masks.from_start, from_start, 0)
    to_end, total = jnp.where(masks.to_end, to_end, 0), jnp.where(masks.total, total, 0)
  O = (between * (x.q @ x.k.T)) @ x.v + c * x.v
  return Chunk(total, (x.k * to_end[:, None]).T @ x.v, x.q * from_start[:, None], O)


def leaky(rate, c):
  return Rule(
    bind(_leaky_step, rate, c),
    bind(_leaky_lift, rate),
    bind(_leaky_read, c),
    bind(_leaky_chunk, rate, c),
  )


def leaky_inputs():
  rng = np.random.default_rng(1)
  x = additive(rng, "none")
  tokens = Leaky(x.q, x.k, x.v, rng.integers(0, 2, (B, T, HV)).astype(float))
  return tokens, rng.standard_normal((B, HV, K, V))


@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["whole", "packed"])
def test_new_family_trains_through_chunks(x64, document):
  """A family is four functions: its chunked form equals its equation, with all gradients."""
  document = None if document is None else jnp.asarray(document)
  run = lambda loop, **options: value_and_gradients(
    lambda x, s: loop(leaky(0.2, 0.5), x, s, document, **options), *leaky_inputs()
  )
  assert furthest(run(chunked, chunk_size=16), run(recurrent)) < 1e-12


# --- the identity of rules -----------------------------------------------------------------------


def test_rules_of_equal_functions_are_equal():
  assert leaky(0.2, 0.5) == leaky(0.2, 0.5) != leaky(0.3, 0.5)
  assert hash(leaky(0.2, 0.5)) == hash(leaky(0.2, 0.5))
  assert linear_attention.normalized(1e-6) == linear_attention.normalized(1e-6)
  assert linear_attention.normalized(1e-6) != linear_attention.normalized(1e-5)


def test_rule_made_in_each_call_compiles_once():
  traced = []

  @functools.partial(jax.jit, static_argnames="rule")
  def run(rule, tokens, state):
    traced.append(rule)
    return chunked(rule, tokens, state)

  inputs = jax.tree.map(lambda x: np.asarray(x, np.float32), leaky_inputs())
  for _ in range(3):
    run(leaky(0.2, 0.5), *inputs)
  assert len(traced) == 1


def test_rules_of_new_functions_are_warned_of(monkeypatch):
  """Functions made in each call make other rules; after a few of them there is a warning."""

  def made_anew():
    chunk = lambda x, masks, precision: _leaky_chunk(0.2, 0.5, x, masks, precision)
    return leaky(0.2, 0.5)._replace(chunk=chunk)

  inputs = jax.tree.map(lambda x: np.asarray(x, np.float32), leaky_inputs())
  trace = lambda: jax.eval_shape(lambda x, s: chunked(made_anew(), x, s), *inputs)
  monkeypatch.setattr(rules, "MADE_ANEW", 3)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    trace()
    trace()
  with pytest.warns(UserWarning, match="3 rules were made of the same functions .*made_anew"):
    trace()


# --- gradients of gates --------------------------------------------------------------------------

GATED = [case.id for case in CASES.values() if "inf" in case.rows and case.op != "attention"]


@pytest.mark.parametrize(
  ("case_id", "impl"),
  [
    pytest.param(
      case_id, impl, marks=() if case_id in cases.CORE and impl == "chunked" else pytest.mark.slow
    )
    for case_id in GATED
    for impl in CASES[case_id].impls
  ],
)
def test_gate_that_forgets_everything_has_no_gradient(case_id, impl):
  """A caller's chain rule multiplies this gradient by g, and g may be -inf."""
  case = CASES[case_id]
  arrays = cases.inputs(case_id, Shape(), cases.batch(case))
  got = cases.evaluate(case, impl, "float32", arrays)
  name = next(name for name in ("g", "log_a", "f") if name in arrays)
  forgets = np.exp(arrays[name].astype(np.float32)) == 0
  assert forgets.any()
  assert (np.asarray(got.gradients[name])[forgets] == 0).all()


@pytest.mark.parametrize(
  "case_id",
  [
    pytest.param(id, marks=() if id in cases.CORE else pytest.mark.slow)
    for id in GATED
    if CASES[id].op != "mlstm"
  ],
)
def test_small_gate_gradients_are_no_rounding_of_large_ones(case_id):
  """Gates of -20 among weak ones: their gradients of 1e-9 are held to the budget by themselves."""
  case = CASES[case_id]
  rows = cases.batch(case)
  arrays = cases.inputs(case_id, Shape(), rows)
  name = "log_a" if "log_a" in arrays else "g"
  got = cases.evaluate(case, "chunked", "float32", arrays)
  want = cases.reference(case, arrays, values="float32")
  for n in (n for n, row in enumerate(rows) if row == "mixed"):
    strong = arrays[name][n] == -20
    pair = (np.asarray(x.gradients[name])[n][strong] for x in (got, want))
    assert cases.relative_rms(*pair) <= cases.BUDGET["float32"]["gate"]


def test_gate_gradients_where_every_token_forgets():
  """Two corrections per token, g about -20; a difference of sums over all pairs is off by 2e-7."""
  case, shape = CASES["delta_product-head"], Shape(T=70, H=1, HV=1, K=8, V=6)
  arrays = dict(cases.inputs(case.id, shape, ("plain",)))
  arrays["g"] = -20 + arrays["g"]
  got = cases.evaluate(case, "chunked", "float32", arrays)
  want = cases.reference(case, arrays, values="float32")
  assert np.abs(want.gradients["g"]).max() < 1e-7
  error = cases.relative_rms(got.gradients["g"], want.gradients["g"])
  assert error <= cases.BUDGET["float32"]["gate"]
