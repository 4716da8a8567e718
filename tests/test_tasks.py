"""Recall tasks: exact properties, the public generator's statistics, a solver, errors.

Tests draw `BATCH` rows at a time, of a few sizes: one compilation for each size serves them all.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_arguments as wrong
from hypothesis import given, settings
from hypothesis import strategies as st

from lajax.tasks import FILLERS, check_mqar, count_hits, evaluate, mqar, mqar_chance

pytestmark = pytest.mark.usefixtures("quick_compiles")
ORACLE = sorted((pathlib.Path(__file__).parent / "oracle" / "mqar").glob("mqar_*.npz"))
BLANK = 0
BATCH = 512


def sizes_of(path: pathlib.Path) -> dict:
  vocab_size, length, pairs, filler = re.fullmatch(
    r"mqar_v(\d+)_L(\d+)_kv(\d+)_(\w+)", path.stem
  ).groups()
  return dict(vocab_size=int(vocab_size), length=int(length), pairs=int(pairs), filler=filler)


def oracle_rows(path: pathlib.Path):
  with np.load(path) as rows:
    mask = rows["labels"] != -100
    return rows["inputs"], np.where(mask, rows["labels"], 0), mask


@functools.cache
def our_rows(count: int = 4096, first: int = 0, **sizes):
  """Rows of several keys, one after the other, `BATCH` rows per key."""
  parts = [mqar(jax.random.key(first + n), BATCH, **sizes) for n in range(count // BATCH)]
  return tuple(np.concatenate(x) for x in zip(*parts, strict=True))


def slots_by_key(inputs, mask, pairs: int) -> np.ndarray:
  """Returns [B K]: the slot in which the i-th key of each row is asked for."""
  keys = inputs[:, 0 : 2 * pairs : 2]
  asked = np.where(mask, inputs, -1)
  position = (asked[:, None, :] == keys[:, :, None]).argmax(-1)
  return (position - 2 * pairs) // 2


def first_occurrence(vocab_size: int):
  """Makes a model without parameters: it answers with the token behind the first occurrence."""

  @jax.jit
  def logits(inputs):
    first = (inputs[:, :, None] == inputs[:, None, :]).argmax(-1)
    answer = jnp.take_along_axis(inputs, jnp.minimum(first + 1, inputs.shape[1] - 1), axis=1)
    return jax.nn.one_hot(answer, vocab_size)

  return logits


def check_exact(inputs, targets, mask, *, vocab_size, length, pairs, filler):
  """Checks what holds in every row: distinct keys and values, queries, targets, blanks."""
  batch, half = len(inputs), vocab_size // 2
  assert inputs.shape == targets.shape == mask.shape == (batch, length)
  assert (mask.sum(1) == pairs).all()
  keys, values = inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2]
  assert ((keys >= 1) & (keys < half)).all()
  assert ((values >= half) & (values < vocab_size)).all()
  assert all(len(set(row)) == pairs for row in keys)
  assert all(len(set(row)) == pairs for row in values)
  rows, positions = np.nonzero(mask)
  assert (positions % 2 == 0).all()
  assert positions.min() >= 2 * pairs
  assert positions.max() <= length - 2
  asked = inputs[mask].reshape(batch, pairs)
  assert (np.sort(asked, 1) == np.sort(keys, 1)).all()
  answers = {
    (row, key): value
    for row in range(batch)
    for key, value in zip(keys[row], values[row], strict=True)
  }
  assert all(
    targets[r, p] == answers[r, inputs[r, p]] for r, p in zip(rows, positions, strict=True)
  )
  assert (targets[~mask] == 0).all()
  rest = ~mask & (np.arange(length) >= 2 * pairs)
  if filler == "zeros":
    assert (inputs[rest] == BLANK).all()
  if 4 * pairs == length:
    assert mask[:, 2 * pairs :: 2].all()
  return inputs[rest]


CASES = [pytest.param(path, id=path.stem) for path in ORACLE]


@pytest.mark.parametrize("path", CASES)
def test_exact_properties_hold_of_the_oracle_and_of_ours(path):
  sizes = sizes_of(path)
  check_exact(*oracle_rows(path), **sizes)
  check_exact(*our_rows(BATCH, **sizes), **sizes)


@pytest.mark.parametrize("path", CASES)
def test_statistics_are_the_oracles(path):
  """Compares 512 rows with 4096 of ours: means agree to 5 standard errors of the difference."""
  sizes = sizes_of(path)
  pairs, slots = sizes["pairs"], (sizes["length"] - 2 * sizes["pairs"]) // 2

  def statistics(inputs, targets, mask):
    slot = slots_by_key(inputs, mask, pairs)
    per_row = [
      slot,
      2 * pairs + 2 * slot - 2 * np.arange(pairs),
    ]  # slot, and distance from key to query, by key order
    per_row.append(mask[:, 2 * pairs :: 2])  # occupancy of each slot
    per_row += [
      inputs[:, 0 : 2 * pairs : 2],
      inputs[:, 1 : 2 * pairs : 2],
    ]  # keys and values by order
    if sizes["filler"] == "noise":
      rest = np.where(mask | (np.arange(sizes["length"]) < 2 * pairs), np.nan, inputs)
      per_row.append(
        np.nanmean(rest, 1)[:, None] if pairs * 4 < sizes["length"] else rest[:, 2 * pairs + 1 :: 2]
      )
      per_row.append((rest == 0).sum(1)[:, None])
    return np.concatenate([np.asarray(x, float) for x in per_row], 1)

  theirs, ours = statistics(*oracle_rows(path)), statistics(*our_rows(**sizes))
  error = np.sqrt(theirs.var(0) / len(theirs) + ours.var(0) / len(ours))
  assert slots >= pairs
  assert (np.abs(theirs.mean(0) - ours.mean(0)) <= 5 * error + 1e-9).all()


def test_published_statistics():
  """Figures of 20,000 rows of the public generator: slot occupancy, key-to-query distance."""
  sizes = dict(vocab_size=256, length=64, filler="zeros")
  _, _, mask = our_rows(20_480, pairs=4, **sizes)
  occupancy = mask[:, 8::2].mean(0)
  np.testing.assert_allclose(
    occupancy[:8], [0.720, 0.481, 0.349, 0.272, 0.227, 0.194, 0.165, 0.148], atol=0.012
  )
  assert abs(occupancy[-1] - 0.044) < 0.006

  for pairs, mean in {4: 19.3, 8: 23.9, 16: 32.0}.items():
    inputs, _, mask = our_rows(pairs=pairs, **sizes)
    distance = 2 * pairs + 2 * slots_by_key(inputs, mask, pairs) - 2 * np.arange(pairs)
    assert abs(distance.mean() - mean) < 0.4
    if pairs == 4:
      quantiles = np.percentile(distance, [0, 10, 25, 50, 75, 90, 100])
      np.testing.assert_allclose(quantiles, [2, 6, 8, 14, 28, 44, 62], atol=2)


def test_first_draw_follows_the_power_law():
  inputs, _, mask = our_rows(20_480, vocab_size=256, length=64, pairs=4, filler="zeros")
  first = np.bincount(slots_by_key(inputs, mask, 4)[:, 0], minlength=28) / len(inputs)
  weights = np.arange(1, 29) ** (0.01 - 1)
  np.testing.assert_allclose(first, weights / weights.sum(), atol=0.013)


def test_power_one_is_uniform():
  _, _, mask = our_rows(20_480, vocab_size=256, length=64, pairs=4, filler="zeros", power=1.0)
  np.testing.assert_allclose(mask[:, 8::2].mean(0), 4 / 28, atol=0.012)


def test_keys_and_values_are_uniform_ordered_choices():
  """Draws of the first two of 4 keys and of 5 values: every ordered choice is equally likely."""
  inputs, _, _ = our_rows(20_480, vocab_size=10, length=64, pairs=4)
  half = 5
  ordered = np.zeros((half - 1, half - 1))
  np.add.at(ordered, (inputs[:, 0] - 1, inputs[:, 2] - 1), 1 / len(inputs))
  np.testing.assert_allclose(ordered, (1 - np.eye(4)) / 12, atol=0.01)
  ordered = np.zeros((half, half))
  np.add.at(ordered, (inputs[:, 1] - half, inputs[:, 3] - half), 1 / len(inputs))
  np.testing.assert_allclose(ordered, (1 - np.eye(5)) / 20, atol=0.01)


def test_noise_is_uniform_over_the_whole_vocabulary():
  sizes = dict(vocab_size=16, length=64, pairs=4, filler="noise")
  rest = check_exact(*our_rows(**sizes), **sizes)
  np.testing.assert_allclose(np.bincount(rest, minlength=16) / len(rest), 1 / 16, atol=0.004)


def test_rows_are_a_function_of_the_key_alone():
  sizes = dict(vocab_size=256, length=64, pairs=8, filler="noise")
  same, other = (mqar(jax.random.key(seed), BATCH, **sizes) for seed in (3, 4))
  under_jit = jax.jit(functools.partial(mqar, batch=BATCH, **sizes))(jax.random.key(3))
  smaller = mqar(jax.random.key(3), np.int64(64), **sizes)
  for x, y, z in zip(same, under_jit, smaller, strict=True):
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(x[:64], z)
  assert (same[0] != other[0]).any(1).all()
  assert [x.dtype for x in same] == [jnp.int32, jnp.int32, bool]


def test_another_vocabulary_or_power_needs_no_compilation():
  from lajax.tasks.mqar import _rows

  task = functools.partial(mqar, jax.random.key(0), BATCH, length=64, pairs=4)
  task(vocab_size=64)
  before = _rows._cache_size()
  for vocab_size, power in [(65, 0.01), (8192, 0.5), (64, 1)]:
    task(vocab_size=vocab_size, power=power)
  assert _rows._cache_size() <= before + 1  # a power that is an int has another dtype


def test_task_is_pure_under_jit_and_vmap():
  task = functools.partial(mqar, batch=4, vocab_size=64, length=32, pairs=4)
  keys = jax.random.split(jax.random.key(0), 3)
  for many, one in zip(jax.jit(jax.vmap(task))(keys), task(keys[1]), strict=True):
    np.testing.assert_array_equal(many[1], one)


def test_strict_promotion_of_ranks_and_dtypes():
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    rows = mqar(jax.random.key(0), 4, vocab_size=16, length=16, pairs=2, filler="noise")
    assert evaluate(lambda tokens: jnp.ones((4, 16, 3)), lambda *_: rows, rows=4, batch=4).rows == 4


@given(
  pairs=st.integers(1, 6),
  spare=st.integers(0, 5),
  vocabulary=st.integers(0, 5),
  filler=st.sampled_from(FILLERS),
  seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_any_size_that_is_allowed_gives_right_rows(pairs, spare, vocabulary, filler, seed):
  sizes = dict(
    vocab_size=2 * pairs + 2 + vocabulary, length=4 * pairs + 2 * spare, pairs=pairs, filler=filler
  )
  check_exact(*map(np.asarray, mqar(jax.random.key(seed), 16, **sizes)), **sizes)


@pytest.mark.parametrize("filler", FILLERS)
def test_solver_scores_one(filler):
  task = functools.partial(mqar, vocab_size=64, length=64, pairs=8, filler=filler)
  score = evaluate(first_occurrence(64), task, rows=BATCH, batch=BATCH)
  assert (score.accuracy, score.all_correct, score.rows) == (1.0, 1.0, BATCH)


def test_chance_is_a_value_of_the_row():
  """Naming one value of the row at every query scores 1 / K."""
  task = functools.partial(mqar, vocab_size=64, length=64, pairs=8)
  second_value = lambda inputs: jax.nn.one_hot(jnp.broadcast_to(inputs[:, 3:4], inputs.shape), 64)
  score = evaluate(second_value, task, rows=2 * BATCH, batch=BATCH)
  assert score.accuracy == mqar_chance(pairs=8) == 0.125
  assert score.all_correct == 0


def test_evaluate_takes_numpy_and_counts_partial_rows():
  task = functools.partial(mqar, vocab_size=64, length=64, pairs=8)

  def half_right(inputs):
    logits = np.array(first_occurrence(64)(inputs))
    logits[::2] = np.eye(64)[0]  # every second row answers with the blank
    return logits

  score = evaluate(half_right, task, key=jax.random.key(1), rows=BATCH, batch=BATCH)
  assert (score.accuracy, score.all_correct) == (0.5, 0.5)


# --- errors ---

ROW = dict(vocab_size=64, length=64, pairs=8)
KEY = jax.random.key(0)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(pairs=17), r"4 \* 17 > 64.*at most 16 pairs, or a length of at least 68"),
    (dict(length=63), "`length` must be even.*got 63"),
    (dict(vocab_size=17), "vocab_size.*17 gives 7 keys.*at least 18"),
    (dict(vocab_size=0), "vocab_size.*gives 0 keys"),
    (dict(pairs=0), "`pairs` must be a whole number of at least 1; got 0"),
    (dict(pairs=1.5), "`pairs` must be a whole number of at least 1; got 1.5"),
    (dict(power=np.nan), "`power` must be a number of at least -1e.06 and .* 1e.06; got nan"),
    (dict(filler="blanks"), "`filler` must be one of zeros, noise; got 'blanks'"),
  ],
  ids=lambda case: "-".join(case) if isinstance(case, dict) else "",
)
def test_sizes_that_cannot_be_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    mqar(KEY, 2, **{**ROW, **change})
  with pytest.raises(ValueError, match=message):
    check_mqar(**{**ROW, **change})


KEYS = {
  "none": None,
  "seed": 0,
  "text": "key",
  "floats": jnp.zeros(2),
  "several": jax.random.split(KEY),
  "two raw ones": jnp.zeros((2, 2), jnp.uint32),
}
FILLERS_WRONG = {"none": None, "other": "dots", "list": ["zeros"], "number": 0, "nan": np.nan}


def test_wrong_arguments_of_mqar_are_refused():
  faults = []
  for name in ("batch", "vocab_size", "length", "pairs"):
    faults += wrong.accepted(mqar, dict(ROW, key=KEY, batch=2), name, wrong.COUNTS)
  faults += wrong.accepted(mqar, dict(ROW, key=KEY, batch=2), "power", wrong.NUMBERS)
  faults += wrong.accepted(mqar, dict(ROW, key=KEY, batch=2), "filler", FILLERS_WRONG)
  faults += wrong.accepted(mqar, dict(ROW, key=KEY, batch=2), "key", KEYS)
  faults += wrong.accepted(mqar_chance, {}, "pairs", wrong.COUNTS)
  assert not faults, "\n".join(faults)


def test_wrong_arguments_of_evaluate_are_refused():
  task = functools.partial(mqar, **ROW)
  right = dict(model_fn=first_occurrence(64), task=task, rows=BATCH, batch=BATCH)
  faults = wrong.accepted(evaluate, right, "model_fn", {"none": None, "array": jnp.ones(3)})
  faults += wrong.accepted(evaluate, right, "task", {"none": None, "text": "mqar"})
  faults += wrong.accepted(evaluate, right, "rows", wrong.COUNTS)
  faults += wrong.accepted(evaluate, right, "batch", wrong.COUNTS)
  faults += wrong.accepted(evaluate, right, "key", {k: x for k, x in KEYS.items() if k != "none"})
  faults += wrong.accepted(evaluate, right, "rows", {"no multiple": BATCH + 1})
  results = {
    "tuple with a state": lambda tokens: (first_occurrence(64)(tokens), None),
    "answers": lambda tokens: tokens,
    "one row": lambda tokens: first_occurrence(64)(tokens)[:1],
    "no vocabulary": lambda tokens: jnp.ones((*tokens.shape, 0)),
    "none": lambda tokens: None,
    "list": lambda tokens: [[1.0]],
  }
  faults += wrong.accepted(evaluate, right, "model_fn", results)
  rows = task(KEY, BATCH)
  tasks = {
    "too few rows": lambda key, batch: tuple(x[: batch // 2] for x in rows),
    "one row of targets": lambda key, batch: (rows[0], rows[1][:1], rows[2]),
    "no mask": lambda key, batch: rows[:2],
    "mask of ints": lambda key, batch: (*rows[:2], rows[2].astype(jnp.int32)),
    "inputs of floats": lambda key, batch: (rows[0].astype(jnp.float32), *rows[1:]),
    "nothing masked": lambda key, batch: (*rows[:2], rows[2] & False),
    "one array": lambda key, batch: rows[0],
    "none": lambda key, batch: None,
    "lists": lambda key, batch: ([[1]], [[1]], [[True]]),
    "flat": lambda key, batch: tuple(x.reshape(-1) for x in rows),
  }
  faults += wrong.accepted(evaluate, right, "task", tasks)
  assert not faults, "\n".join(faults)


def test_hits_are_counted_and_never_broadcast():
  answers, targets = jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([[1, 2, 0], [4, 5, 6]])
  mask = jnp.array([[True, False, True], [True, True, False]])
  assert [int(x) for x in count_hits(answers, targets, mask)] == [3, 4, 1]
  assert [int(x) for x in jax.jit(count_hits)(answers, np.asarray(targets), mask)] == [3, 4, 1]
  right = dict(answers=answers, targets=targets, mask=mask)
  faults = wrong.accepted(count_hits, right, "targets", wrong.matrices((2, 3), jnp.int32))
  faults += wrong.accepted(count_hits, right, "mask", wrong.matrices((2, 3), bool))
  ranks = ("none", "text", "list", "number", "rank too small", "rank too large", "dtype")
  first = {kind: x for kind, x in wrong.matrices((2, 3), jnp.int32).items() if kind in ranks}
  faults += wrong.accepted(count_hits, right, "answers", first)  # its sizes are those of B and P
  assert not faults, "\n".join(faults)
