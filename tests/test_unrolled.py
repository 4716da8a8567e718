"""A model that is unrolled is the stacked one, and its decode step copies no cache."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lajax
import lajax.layers as L
from lajax.models import LanguageModel, hybrid_config, save, unrolled


@pytest.fixture(scope="module")
def models():
  config = hybrid_config(16, 32, [L.GatedDeltaNet, L.MLA], num_layers=4)
  graph, p = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)
  model = nnx.merge(graph, jax.tree.map(draw, p))
  assert [stack.repeats for stack in model.stacks] == [2]
  return model, unrolled(model)


@pytest.mark.slow
def test_logits_and_states_are_the_same(models):
  """Of a prompt with padding, and of one token more."""
  stacked, each = models
  tokens = jax.random.randint(jax.random.key(0), (2, 7), 0, 32)
  ids = np.int32([[0] * 5 + [-1, 0], [-1] + [3] * 6])

  def run(model):
    graph, parameters = nnx.split(model)

    def f(parameters, tokens, ids):
      model = nnx.merge(graph, parameters)
      _, state = model(tokens, model.init_state(2, 16), segment_ids=ids)
      logits, state = model(tokens[:, :1], state, segment_ids=ids[:, -1:])
      return logits, model.hidden_states(tokens, segment_ids=ids)[0], state

    return cases.quick_jit(f)(parameters, tokens, ids)

  (logits, hidden, state), (own_logits, own_hidden, own_state) = run(stacked), run(each)
  np.testing.assert_allclose(own_logits, logits, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(own_hidden, hidden, rtol=1e-5, atol=1e-5)
  (period,), (layers,) = state, own_state
  for n, layer in enumerate(layers):
    want = jax.tree.map(lambda a, n=n: a[n // 2], period[n % 2])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), layer, want)


def test_what_else_knows_of_layers(models):
  stacked, each = models
  assert unrolled(each).stacked is False
  count = lambda model: sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
  assert count(each) == count(stacked) == each.active_parameters == stacked.active_parameters
  kinds = lambda model: [(type(m), n) for m, n in model.mixer_layers()]
  assert kinds(each) == [(kind, 1) for kind, _ in kinds(stacked)] * 2
  with pytest.raises(ValueError, match=r"must be \[B \.\.\] = \(3, \.\.\); got \(2,"):
    each(jnp.zeros((3, 1), int), each.init_state(2))
  with pytest.raises(
    ValueError, match=r"Save the model that `lajax.models.unrolled` was called with"
  ):
    save(each, "nowhere")
  with pytest.raises(ValueError, match="must be a LanguageModel; got Linear"):
    unrolled(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_generation_and_serving(models):
  """The same tokens, by generation and by the engine."""
  stacked, each = models
  prompt = [[1, 2, 3, 4, 5], [6, 7]]
  want = lajax.generate(stacked, prompt, 6, prefill_piece=4)
  np.testing.assert_array_equal(lajax.generate(each, prompt, 6, prefill_piece=4), want)
  engine = lajax.serve.Engine(each, slots=2, prefill_piece=4, max_length=32)
  handles = [engine.submit(tokens, max_tokens=6) for tokens in prompt]
  engine.run()
  assert [list(handle.tokens) for handle in handles] == want.tolist()


@pytest.mark.slow
def test_a_decode_step_copies_no_cache(models):
  """Compiled with the state donated: nothing of the size of a cache is allocated."""
  _, each = models
  graph, parameters = nnx.split(each)
  state = each.init_state(1, 4096)
  step = lambda p, x, state: nnx.merge(graph, p)(x, state)
  tokens = jnp.zeros((1, 1), jnp.int32)
  program = jax.jit(step, donate_argnums=2).lower(parameters, tokens, state).compile()
  caches = [x.nbytes for x in jax.tree.leaves(state) if 4096 in x.shape]
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes >= sum(caches)
  assert memory.temp_size_in_bytes < max(caches)
