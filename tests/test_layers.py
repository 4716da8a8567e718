"""The law of all layers: any split of a sequence into calls, any packing of documents, any
padding gives the same.

All in float64, where a leak of one part in 1e10 shows. Outputs, states and gradients with respect
to parameters, inputs and the incoming state.
"""

import functools

import jax
import numpy as np
import pytest
from cases import BUDGET, relative_rms
from layer_cases import CASES, PLAIN, B, Result, T, compiled, floats

pytestmark = pytest.mark.usefixtures("x64")

# The laws are about what stands around the ops, whose forms have tests of their own: so they are
# held in the form that compiles fastest, for one layer of each kind in the fast set; the whole set
# adds all others, in the form that users run where they have more than one.
KINDS = ("SoftmaxAttention", "LinearAttention", "Mamba2", "GatedDeltaNet")
FAST = [
  pytest.param(case.in_form("recurrent"), id=f"{case.name}-recurrent")
  for case in PLAIN
  if case.name in KINDS
]
FULL = [
  pytest.param(
    case if case.plain else case.in_form("recurrent"), id=case.name, marks=pytest.mark.slow
  )
  for case in CASES
]
every_layer = pytest.mark.parametrize("case", FAST + FULL)


def _runs(*lengths):
  return [n for n, length in enumerate(lengths) for _ in range(length)]


PACKED = np.stack(
  [
    np.array(_runs(T)),
    np.array(_runs(1, 16, 46, 1, 6)),  # borders at 1, 17, 63, 64, and a document of one token
    np.array(
      [-1] * 5 + [3] * 12 + [-1] * 3 + [3] * 5 + [1] * 30 + [-1] * 2 + [1] * 3 + [-1] * 10
    ),  # padding everywhere
    np.array([9] * 17 + [2] * 20 + [9] * 28 + [-1] * 5),  # an id comes back
  ]
)
RUNS = np.stack(
  [
    np.array(_runs(T)),
    np.array(_runs(1, 16, 46, 1, 6)),
    np.where(PACKED[2] < 0, -1, np.where(PACKED[2] == 3, 0, 1)),
    np.array(_runs(17, 20, 28) + [-1] * 5),
  ]
)


@functools.cache
def packed(case):
  """The whole batch of packed documents in one call, behind a state that is not zero, with
  gradients.
  """
  m = compiled(case)
  rng = np.random.default_rng(1)
  _, state = m(rng.normal(size=m.x.shape), m.init)
  dstate = jax.tree.map(lambda s: rng.normal(size=s.shape), floats(state))
  return state, dstate, m.with_gradients(m.x, state, PACKED, m.dy, dstate)


def agree(got, want, what: str):
  got, want = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for (path, g), w in zip(got, want, strict=True):
    if not np.issubdtype(w.dtype, np.floating):
      np.testing.assert_array_equal(g, w, err_msg=jax.tree_util.keystr(path))
      continue
    error = relative_rms(g, w, floor=1e-3)
    assert error <= BUDGET["float64"][what], (
      f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"
    )


def agree_in_all(got: Result, want: Result):
  agree((got.y, got.state), (want.y, want.state), "value")
  agree((got.dx, got.dstate), (want.dx, want.dstate), "gradient")
  agree(got.dparams, want.dparams, "gate")


CUTS = (1, 17, 20, 37, 63, 64, 65, 69)


@pytest.mark.parametrize(
  ("case", "cuts"),
  [pytest.param(*p.values, (17,), id=f"{p.id}-two") for p in FAST]
  + [pytest.param(*p.values, CUTS, id=p.id, marks=p.marks) for p in FULL],
)
def test_split_is_whole(case, cuts):
  m = compiled(case)
  state, dstate, want = packed(case)
  agree_in_all(m.in_calls(m.x, state, PACKED, m.dy, dstate, cuts), want)


@every_layer
def test_decode_is_one_call(case):
  m = compiled(case)
  first, state = m.decode(m.x[:, : T // 2], m.init)
  rest, state = m.decode(m.x[:, T // 2 :], state)
  agree((np.concatenate([first, rest], axis=1), state), m(m.x, m.init), "value")


@every_layer
def test_without_ids_is_one_document(case):
  m = compiled(case)
  y, state = m(m.x, m.init)
  same = m.with_gradients(m.x, m.init, np.zeros((B, T)))
  agree((same.y, same.state._replace(segment=state.segment)), (y, state), "value")
  np.testing.assert_array_equal(same.state.segment, np.zeros(B))
  np.testing.assert_array_equal(state.segment, np.full(B, -1))
  np.testing.assert_array_equal(state.length, np.full(B, T))


@every_layer
def test_documents_equal_their_own_runs(case):
  m = compiled(case)
  state, dstate, want = packed(case)
  last = RUNS.max(axis=1)
  got = Result(
    np.zeros_like(want.y),
    want.state,
    *jax.tree.map(np.zeros_like, (want.dparams, want.dx, want.dstate)),
  )
  for run in range(RUNS.max() + 1):
    rows = lambda keep, xs: jax.tree.map(
      lambda x: np.where(keep.reshape(-1, *(1,) * (x.ndim - 1)), x, np.zeros_like(x)), xs
    )
    alone = m.with_gradients(
      m.x,
      state if run == 0 else m.init,
      np.where(run == RUNS, 0, -1),
      m.dy,
      rows(last == run, dstate),
    )
    begun = alone.dstate if run == 0 else jax.tree.map(np.zeros_like, alone.dstate)
    got = got._replace(
      y=got.y + alone.y,
      dparams=jax.tree.map(np.add, got.dparams, alone.dparams),
      dx=got.dx + alone.dx,
      dstate=jax.tree.map(np.add, got.dstate, begun),
    )
    agree(rows(last == run, floats(alone.state)), rows(last == run, floats(want.state)), "value")
  agree_in_all(got, want)


@every_layer
def test_padding_is_inert(case):
  m = compiled(case)
  state, dstate, want = packed(case)
  padding = (PACKED < 0)[..., None]
  got = m.with_gradients(
    np.where(padding, np.nan, m.x), state, PACKED, np.where(padding, 1e9, m.dy), dstate
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert not np.where(padding, want.y, 0).any()
  assert not np.where(padding, want.dx, 0).any()
  nothing = m.with_gradients(m.x, state, np.full((B, T), -1), m.dy, dstate)
  jax.tree.map(np.testing.assert_array_equal, nothing.state, state)
  assert not nothing.y.any()
  # The maximum that mLSTM's state is relative to gets two products that cancel: one rounding of
  # them may remain.
  rounding = 1e-14 if case.name == "MLSTM" else 0
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rounding), nothing.dstate, dstate)
  jax.tree.map(
    np.testing.assert_array_equal, m.with_gradients(m.x, m.init, np.full((B, T), -1)).state, m.init
  )


@every_layer
def test_padding_anywhere_is_no_padding(case):
  m = compiled(case)
  y, _ = m(m.x, m.init)
  places = np.sort(np.random.default_rng(0).choice(T, 50, replace=False))
  spread = np.full_like(m.x, np.nan)
  spread[:, places] = m.x[:, :50]
  ids = np.full((B, T), -1)
  ids[:, places] = 4
  got = m.with_gradients(spread, m.init, ids)
  agree(got.y[:, places], y[:, :50], "value")
  _, state = m.decode(m.x[:, : T // 2], m.init)
  front = m.with_gradients(m.x, m.init, np.where(np.arange(T) < T // 2, 4, -1) * np.ones((B, 1)))
  agree(front.state._replace(segment=state.segment), state, "value")


@every_layer
def test_a_call_without_ids_continues_the_last_document(case):
  m = compiled(case)
  half = T // 2
  ids = np.where(np.arange(T) < 17, 0, np.where(np.arange(T) < half, 1, -1)) * np.ones((B, 1))
  first = m.with_gradients(m.x, m.init, ids)
  got, state = m.decode(m.x[:, half:], first.state)
  want, _ = m(np.roll(m.x, -17, axis=1), m.init)  # the second document, from its start
  agree(got, want[:, half - 17 : T - 17], "value")
  np.testing.assert_array_equal(state.segment, np.ones(B))
  np.testing.assert_array_equal(state.length, np.full(B, T - 17))
