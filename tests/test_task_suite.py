"""Laws of all tasks: solvers, no leak, uniform answers, keys, limits, statistics, examples.

One draw of `BATCH` rows per case serves all tests.
"""

import doctest
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_arguments as wrong

import lajax.tasks
from lajax.tasks import (
  MQAR_TRAIN_SIZES,
  TASKS,
  Score,
  TaskSpec,
  evaluate,
  group_order,
  parity,
  stale_rate,
)
from lajax.tasks.grammar import successors
from lajax.tasks.groups import products

pytestmark = pytest.mark.usefixtures("quick_compiles")
BATCH = 256

# Changes of the defaults, and how much better than chance a reader of two tokens may be: the tasks
# in which the first positions, or an instruction just before, give some answers away say how many.
CASES = {
  "mqar_mixture": (
    "mqar_mixture", dict(vocab_size=64, sizes=((16, 2), (30, 6)), filler="noise"), 0.1,
  ),
  "overwrite": ("overwrite", {}, 0.06),
  "overwrite-some": ("overwrite", dict(length=50, rewritten=3, writes=3), 0.06),
  "noisy_recall": ("noisy_recall", dict(length=120), 0.06),
  "compositional": ("compositional", dict(length=56), 0.06),
  "palindrome": ("palindrome", dict(vocab_size=20, length=40), 0.15),
  "stack": ("stack", dict(length=125, stacks=8, symbols=10), 0.08),
  "selective_copy": ("selective_copy", dict(length=64, copies=8), 0.1),
  "parity": ("parity", {}, 0.06),
  "modular": ("modular", dict(scored="last"), 0.1),
  "group": ("group", {}, 0.1),
  "group-swaps": ("group", dict(group="S5", elements="swaps", length=17), 0.25),
  "s3_pairs": ("s3_pairs", {}, 0.3),
  "s3_pairs-test": ("s3_pairs", dict(split="test", held_out=2, length=33), 0.1),
  "flip_flop": ("flip_flop", {}, 0.2),
  "undo_flip_flop": ("undo_flip_flop", dict(length=51), 0.2),
  "undo_flip_flop-deep": ("undo_flip_flop", dict(undos=4), 0.15),
  "mod_arith": ("mod_arith", dict(length=41), 0.15),
  "mod_arith-brackets": ("mod_arith", dict(brackets=True, multiply=True), 0.2),
  "selective_next": ("selective_next", {}, 0.65),
}  # fmt: skip
ALL = pytest.mark.parametrize("case", CASES)
# Answers that are not uniform over the possible ones.
NOT_UNIFORM = {"group-swaps", "mod_arith-brackets", "mod_arith", "selective_next"}


@functools.cache
def drawn(case: str, seed: int = 3):
  """Returns the spec, its config, and `BATCH` rows."""
  name, changes, _ = CASES[case]
  spec = TASKS[name]
  rows = spec.bind(changes)(jax.random.key(seed), BATCH)
  return spec, spec.config(changes), tuple(map(np.asarray, rows))


@ALL
def test_contract(case):
  spec, config, (inputs, targets, mask) = drawn(case)
  assert inputs.shape == targets.shape == mask.shape == (BATCH, inputs.shape[1])
  assert (inputs.dtype, targets.dtype, mask.dtype) == (np.int32, np.int32, bool)
  assert inputs.shape[1] == config.get("length", inputs.shape[1])
  assert mask.any(1).all()
  assert min(inputs.min(), targets.min()) >= 0
  assert max(inputs.max(), targets.max()) < spec.vocab_size(config)
  assert 0 < spec.chance(config) < 1


@ALL
def test_solver_scores_one_and_reads_nothing_ahead(case):
  """Every query is answerable, and from the tokens up to it alone."""
  spec, config, (inputs, targets, mask) = drawn(case)
  assert (spec.solve(inputs, config) == targets)[mask].all()
  for cut in (1, inputs.shape[1] // 3, inputs.shape[1] * 2 // 3):
    answers = spec.solve(inputs[:20, :cut], config)
    assert (answers == targets[:20, :cut])[mask[:20, :cut]].all()


@ALL
def test_answers_are_not_given_away(case):
  """A reader of the last two tokens, fitted on half of the rows, stays near chance."""
  spec, config, (inputs, targets, mask) = drawn(case)
  before = np.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
  for context in (inputs, inputs + spec.vocab_size(config) * before):
    counts: dict[int, np.ndarray] = {}
    fit, test = mask.copy(), mask.copy()
    fit[BATCH // 2 :], test[: BATCH // 2] = False, False
    for name, target in zip(context[fit], targets[fit], strict=True):
      counts.setdefault(name, np.zeros(spec.vocab_size(config)))[target] += 1
    best = {name: count.argmax() for name, count in counts.items()}
    right = [best.get(x, -1) == y for x, y in zip(context[test], targets[test], strict=True)]
    assert np.mean(right) <= spec.chance(config) + CASES[case][2]


@pytest.mark.parametrize("case", sorted(CASES.keys() - NOT_UNIFORM))
def test_answers_are_uniform_over_the_possible_ones(case):
  """Chi-squared of one answer per row stays within 5 standard deviations of its mean."""
  spec, config, (_, targets, mask) = drawn(case)
  pick = np.array([np.flatnonzero(row)[-1] for row in mask])
  answers = targets[np.arange(BATCH), pick]
  half = config.get("vocab_size", 0) // 2
  possible = {
    **dict.fromkeys(("mqar", "mqar_mixture", "overwrite", "noisy_recall"), range(half, 2 * half)),
    "compositional": range(5, config.get("vocab_size", 0)),
  }.get(spec.name)
  if possible is None:
    first = answers.min()
    possible = range(first, first + round(1 / spec.chance(config)))
  count = np.bincount(answers, minlength=possible.stop)[possible.start :]
  freedom = len(possible) - 1
  assert count.sum() == BATCH
  assert len(count) == len(possible)
  chi = ((count - BATCH / len(possible)) ** 2).sum() / (BATCH / len(possible))
  assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("case", ["overwrite", "noisy_recall", "compositional",
                                  "selective_copy"])  # fmt: skip
def test_answers_stand_neither_at_nor_behind_their_query(case):
  _, _, (inputs, targets, mask) = drawn(case)
  behind = np.pad(inputs, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
  assert (inputs != targets)[mask].all()
  assert (behind != targets)[mask].all()
  if case != "selective_copy":  # whose symbols are drawn independently
    rows, at = np.nonzero(mask)
    stands = [(inputs[row] == targets[row, t]).sum() for row, t in zip(rows, at, strict=True)]
    assert set(stands) == {1}


# --- keys ---


@ALL
def test_rows_are_a_function_of_the_key(case):
  """Another key gives other rows; raw and typed keys trace alike."""
  spec, config, rows = drawn(case)
  again = spec.bind(config)(jax.random.key(3), BATCH)
  for x, y in zip(rows, again, strict=True):
    np.testing.assert_array_equal(x, y)
  other = spec.bind(config)(jax.random.key(4), BATCH)
  assert (np.asarray(other[0]) != rows[0]).any()
  shapes = [
    jax.eval_shape(lambda key: spec.bind(config)(key, BATCH), key)
    for key in (jax.random.key(0), jax.random.PRNGKey(0))
  ]
  assert shapes[0] == shapes[1]


def test_raw_keys_jit_vmap_and_smaller_batches_give_the_same_rows():
  spec, config, rows = drawn("overwrite")
  task = spec.bind(config)
  many = jax.jit(jax.vmap(lambda key: task(key, 4)))(jnp.stack([jax.random.PRNGKey(3)] * 2))
  for x, y in zip(many, rows, strict=True):
    np.testing.assert_array_equal(x[1], y[:4])


# --- statistics ---


def close(count: float, trials: float, p: float) -> bool:
  """Whether a count of independent trials is within 5 standard deviations of its mean."""
  return abs(count - trials * p) <= 5 * (trials * p * (1 - p)) ** 0.5


def test_mixture_holds_its_sizes():
  spec = TASKS["mqar_mixture"]
  assert spec.chance(spec.config()) == pytest.approx(9 / (5 * 4 + 8 + 16 + 32 + 64))
  assert MQAR_TRAIN_SIZES[0] == (64, 4)
  _, _, (inputs, _, mask) = drawn("mqar_mixture")
  short = mask.sum(1) == 2
  assert set(mask.sum(1)) == {2, 6}
  assert close(short.sum(), BATCH, 0.5)
  assert (inputs[short, 16:] == 0).all()
  assert (inputs[~short, 16:] != 0).any(0).all()
  asked = (mask & (inputs == inputs[:, :1]))[short].argmax(1)  # where the first key is asked for
  weights = np.arange(1, 7) ** (0.01 - 1)
  for slot, p in enumerate(weights / weights.sum()):
    assert close((asked == 4 + 2 * slot).sum(), len(asked), p)


def test_overwritten_keys_are_interleaved():
  _, _, (inputs, _, mask) = drawn("overwrite")
  keys = inputs[:, :32:2]
  assert all(np.unique(row, return_counts=True)[1].tolist() == [2] * 8 for row in keys)
  ages = [b - a for row in keys for key in set(row) for a, b in [np.flatnonzero(row == key)]]
  # The distance of two of 16 places has the mean 17 / 3.
  assert abs(np.mean(ages) - 17 / 3) < 5 * np.std(ages) / len(ages) ** 0.5
  assert (mask[:, :32] == 0).all()
  _, _, (inputs, _, _) = drawn("overwrite-some")
  times = np.sort([np.unique(row, return_counts=True)[1] for row in inputs[:, :28:2]], axis=1)
  assert (times == [1] * 5 + [3] * 3).all()


def test_stale_answers_are_told_from_other_errors():
  spec, config, rows = drawn("overwrite")
  solve = TASKS["mqar"].solve  # the first value of each key: always one that was written over
  answer = lambda tokens: np.eye(64)[solve(np.asarray(tokens), config)]
  task = lambda key, batch: rows
  assert stale_rate(answer, task, rows=BATCH, batch=BATCH) == 1.0
  right = lambda tokens: np.eye(64)[spec.solve(np.asarray(tokens), config)]
  assert stale_rate(right, task, rows=BATCH, batch=BATCH) == 0.0
  score = evaluate(right, task, rows=BATCH, batch=BATCH)
  assert score == Score(accuracy=1.0, all_correct=1.0, rows=BATCH)
  blank = lambda tokens: np.eye(64)[np.zeros_like(tokens)]
  assert stale_rate(blank, task, rows=BATCH, batch=BATCH) == 0.0


def test_noise_has_tokens_of_its_own():
  _, _, (inputs, _, mask) = drawn("noisy_recall")
  assert ((inputs >= 64).sum(1) == 120 - 3 * 8).all()
  first = mask.argmax(1) // 2  # the ninth of 16 slots out of 60
  assert abs(first.mean() - (61 * 9 / 17 - 1)) < 2


def test_compositional_keys_share_their_parts():
  _, _, (inputs, _, _) = drawn("compositional")
  keys = inputs[:, :24].reshape(BATCH, 8, 3)
  assert all(len({(a, b) for a, b, _ in row}) == 8 for row in keys)
  assert keys[..., :2].max() == 4


def test_stacks_are_pushed_and_popped_as_a_reflected_walk():
  _, _, (inputs, _, _) = drawn("stack")
  operations = inputs[:, :123].reshape(BATCH, 41, 3)
  assert (inputs[:, 123:] == 0).all()
  pops = pushes = 0
  for row in operations:
    height = np.zeros(8, int)
    for operation, name, _ in row:
      busy = height[name - 3] > 0
      assert busy or operation == 1
      pops, pushes = pops + (operation == 2), pushes + (busy and operation == 1)
      height[name - 3] += 1 if operation == 1 else -1
  assert close(pops, pops + pushes, 0.5)


def test_held_out_pairs_are_for_the_test_alone():
  generators = [12, 18, 24, 2, 3, 4]
  number = {element: n for n, element in enumerate(generators)}
  for case, held_out in (("s3_pairs", 1), ("s3_pairs-test", 2)):
    _, _, (inputs, _, _) = drawn(case)
    words = np.vectorize(number.get)(inputs)
    step = (words[:, 1:] - words[:, :-1]) % 6
    held = (step >= 1) & (step <= held_out)
    if case == "s3_pairs":
      assert not held.any()
      np.testing.assert_allclose(np.bincount(step.flat, minlength=6) / step.size, [0.2, 0] + [0.2] * 4,
                                 atol=0.05)  # fmt: skip
    else:
      assert held.any(1).all()
  reached = {0}
  for _ in range(12):
    reached |= {6 * products("S3")[g // 6, s // 6] + products("S3")[g % 6, s % 6]
                for g in generators for s in reached}  # fmt: skip
  assert len(reached) == 36


@pytest.mark.parametrize(("name", "size"), [("S3", 6), ("S4", 24), ("A5", 60), ("S5", 120)])
def test_tables_are_groups(name, size):
  table = products(name)
  assert table.shape == (size, size) == (group_order(name),) * 2
  np.testing.assert_array_equal(table[0], np.arange(size))
  np.testing.assert_array_equal(table[:, 0], np.arange(size))
  assert (np.sort(table, axis=0) == np.arange(size)[:, None]).all()
  assert (np.sort(table, axis=1) == np.arange(size)).all()
  a, b, c = np.random.default_rng(0).integers(size, size=(3, 1000))
  np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])


def test_the_last_position_alone_is_scored():
  _, _, (_, _, mask) = drawn("modular")
  assert mask[:, -1].all()
  assert mask.sum() == BATCH


def test_swaps_are_swaps():
  _, _, (inputs, _, _) = drawn("group-swaps")
  used = np.unique(inputs)
  assert len(used) == 1 + 10
  assert (products("S5")[used, used] == 0).all()
  assert close((inputs == 0).sum(), inputs.size, 1 / 11)


def test_instructions_have_their_probabilities():
  _, _, (inputs, _, _) = drawn("flip_flop")
  instruction = inputs[:, 2:-2:2]
  for token, p in ((2, 0.1), (3, 0.8), (4, 0.1)):
    assert close((instruction == token).sum(), instruction.size, p)
  _, _, (inputs, _, _) = drawn("undo_flip_flop")
  counts = {False: np.zeros(6), True: np.zeros(6)}
  for row in inputs:
    height, t = 1, 2
    while t < len(row) - 2:  # the last two places have rules of their own
      counts[height > 1][row[t]] += 1
      height += int(row[t] == 2) - int(row[t] == 5)
      t += 2 if row[t] in (2, 3) else 1
  for deep, expected in ((False, (0.1, 0.8, 0.1, 0)), (True, (0.05, 0.8, 0.1, 0.05))):
    for token, p in zip((2, 3, 4, 5), expected, strict=True):
      assert close(counts[deep][token], counts[deep].sum(), p)


def test_expressions_have_their_lengths_and_digits():
  for case, least, digit in (("mod_arith", 2, 5), ("mod_arith-brackets", 3, 7)):
    _, _, (inputs, _, mask) = drawn(case)
    size = mask.argmax(1) + 1
    assert size.min() >= least
    assert size.max() == 40
    assert abs(size.mean() - 21.5) < 4
    digits = inputs[inputs >= digit]
    np.testing.assert_allclose(np.bincount(digits - digit) / len(digits), 0.2, atol=0.06)


@pytest.mark.parametrize(("case", "names"), [("mod_arith", "_+-*=01234"),
                                             ("mod_arith-brackets", "_+-*=()01234")])  # fmt: skip
def test_values_are_those_of_python(case, names):
  _, _, (inputs, targets, mask) = drawn(case)
  for row, end, target in zip(inputs, mask.argmax(1), targets[mask], strict=True):
    assert eval("".join(names[token] for token in row[:end])) % 5 == int(names[target])


def test_grammar_gaps_and_noise():
  _, _, (inputs, _, mask) = drawn("selective_next")
  table = successors(40, 4, 0)
  assert (table[:, 0] == table[:, 1]).sum() == 80
  assert ((table[:, 0] % 40 != table[:, 1] % 40) | (table[:, 0] == table[:, 1])).all()
  assert len(set(table[:, 0])) == 160
  rest = inputs[:, 1:]
  assert close((rest == 0).sum(), rest.size, 0.3)
  state, noise = np.zeros(BATCH, int), 0
  for t in range(rest.shape[1]):
    follows = 1 + table[state] % 40 == rest[:, t, None]
    noise += (~follows.any(1) & (rest[:, t] > 0)).sum()
    state = np.where(follows.any(1), table[state, follows.argmax(1)], state)
  assert close(noise, rest.size, 0.1)
  assert abs(mask.mean() - 0.6 * 0.5) < 0.05
  assert (successors(40, 4, 0) != successors(40, 4, 1)).any()


# --- examples, limits, errors ---


@pytest.mark.parametrize("name", TASKS)
def test_example_of_the_docstring(name):
  """The example prints what the docstring says, and its solver finds the answers."""
  spec, calls = TASKS[name], []

  def recorded(key, batch, **config):
    calls.append((config, spec.make(key, batch, **config)))
    return calls[-1][1]

  names = {"jax": jax, name: recorded}
  example = doctest.DocTestParser().get_doctest(spec.make.__doc__, names, name, None, None)
  assert doctest.DocTestRunner().run(example).failed == 0
  assert len(example.examples) >= 2
  (config, (inputs, targets, mask)), *_ = calls
  assert (spec.solve(np.asarray(inputs), config) == np.asarray(targets))[np.asarray(mask)].all()


# The smallest sizes; the largest is 2^20 tokens for all.
SMALLEST = [
  ("mqar_mixture", dict(vocab_size=4, sizes=((4, 1),))),
  ("overwrite", dict(vocab_size=4, length=4, pairs=1, rewritten=0)),
  ("overwrite", dict(vocab_size=4, length=6, pairs=1)),
  ("noisy_recall", dict(vocab_size=4, length=4, pairs=1, noise_tokens=1)),
  ("compositional", dict(vocab_size=3, length=6, pairs=1, parts=1)),
  ("palindrome", dict(vocab_size=2, length=2)),
  ("stack", dict(length=6, stacks=1, symbols=1)),
  ("selective_copy", dict(vocab_size=3, length=2, copies=1)),
  ("parity", dict(length=1)),
  ("group", dict(group="Z_2", length=1)),
  ("group", dict(group="S3", length=1)),
  ("s3_pairs", dict(length=2, split="test", held_out=4)),
  ("flip_flop", dict(length=4)),
  ("undo_flip_flop", dict(length=3)),
  ("undo_flip_flop", dict(length=6, undos=1)),
  ("mod_arith", dict(length=2, min_length=2, modulus=2)),
  ("mod_arith", dict(length=2, min_length=2, brackets=True)),
  ("selective_next", dict(length=2, symbols=4, copies=1)),
]


@pytest.mark.parametrize(("name", "changes"), SMALLEST, ids=str)
def test_smallest_and_longest_rows_trace(name, changes):
  """The smallest with x64, where they are int32 too."""
  small = TASKS[name].bind(changes)
  with jax.enable_x64(True):
    rows = jax.eval_shape(lambda key: small(key, 1), jax.random.key(0))
  assert {x.shape for x in rows} == {(1, changes.get("length", 4))}
  assert [x.dtype for x in rows] == [jnp.int32, jnp.int32, bool]
  if "sizes" in changes:
    changes = dict(changes, sizes=((2**20, 1),))
  else:
    changes = dict(changes, length=2**20)
  task = TASKS[name].bind(changes)
  assert jax.eval_shape(lambda key: task(key, 2), jax.random.key(0))[2].shape == (2, 2**20)


REFUSED = [
  ("mqar_mixture", dict(sizes=()), "`sizes` must be pairs"),
  ("mqar_mixture", dict(sizes=((16, 5),)), r"4 \* 5 > 16"),
  ("mqar_mixture", dict(weights=(1, 2)), "`weights` must be 5 positive numbers"),
  ("overwrite", dict(length=46), "`length` must be even and at least 48.*got 46"),
  ("overwrite", dict(vocab_size=31), "`vocab_size` must be at least 32, to hold 8 keys and 16"),
  ("overwrite", dict(rewritten=9), "`rewritten` must be a whole number of at most 8; got 9"),
  ("noisy_recall", dict(length=30), "at least 32.*got 30"),
  ("compositional", dict(parts=2), r"parts\^2 = 4.*got 8. Use at least 3 parts"),
  ("compositional", dict(length=47), "at least 48.*got 47"),
  ("palindrome", dict(length=7), "`length` must be even.*got 7"),
  ("stack", dict(length=5), "`length` must be a whole number of at least 6; got 5"),
  ("selective_copy", dict(copies=129), "at least 2 copies = 258.*got 256"),
  ("modular", dict(modulus=2**20, length=2**11), r"below 2\^31"),
  ("group", dict(group="S6"), "`group` must be one of S3, S4, A5, S5, or Z_n.*got 'S6'"),
  ("group", dict(group="Z_1"), "got 'Z_1'"),
  ("group", dict(group="A5", elements="swaps"), "'all' for A5, which has no swaps"),
  ("parity", dict(scored="first"), "`scored` must be one of 'all', 'last'; got 'first'"),
  ("s3_pairs", dict(held_out=5), "`held_out` must be at most 4.*got 5"),
  ("s3_pairs", dict(held_out=0, split="test"), "`held_out` must be at least 1"),
  ("flip_flop", dict(length=5), "`length` must be even.*got 5"),
  ("undo_flip_flop", dict(length=50, undos=16), "at least 51; got 50"),
  ("mod_arith", dict(min_length=41), "at most 40; got 41"),
  ("selective_next", dict(gap=0.5, noise=0.5), "at most 0.9.*got 0.5"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=str)
def test_sizes_beyond_the_limits_are_refused(name, changes, message):
  with pytest.raises(ValueError, match=message):
    TASKS[name].bind(changes)(jax.random.key(0), 2)


@pytest.mark.parametrize("name", TASKS)
def test_wrong_arguments_are_refused(name):
  spec = TASKS[name]
  right = dict(spec.config(), key=jax.random.key(0), batch=2)
  kinds = {"int": wrong.COUNTS, "float": wrong.NUMBERS}
  faults = wrong.accepted(spec.make, right, "key", {"none": None, "seed": 0, "text": "key"})
  for option, parameter in inspect.signature(spec.make).parameters.items():
    annotation = parameter.annotation
    kind = str(getattr(annotation, "__name__", annotation))
    kind = "float" if option == "power" else kind  # which may be an array in `mqar`
    values = dict(
      kinds.get(kind.removesuffix(" | None"), {"number": 3, "nan": np.nan, "list": [1]})
    )
    if kind.endswith("None") or parameter.default is None:
      values.pop("none", None)
    if parameter.default == 0 or option in ("held_out", "rewritten"):
      values.pop("zero", None)
    if option != "key":
      faults += wrong.accepted(spec.make, right, option, values)
  assert not faults, "\n".join(faults)


def test_specs():
  spec = TASKS["parity"]
  assert spec.name == "parity"
  assert spec.config({"length": 9}) == {"length": 9}
  assert TASKS["mod_arith"].vocab_size(TASKS["mod_arith"].config()) == 10
  with pytest.raises(ValueError, match=r"`changes` must name options of parity.*got size"):
    spec.bind({"size": 3})
  with pytest.raises(ValueError, match="`metric` must be one of"):
    TaskSpec(parity, spec.solve, spec.chance, spec.vocab_size, {}, "loss")
  with pytest.raises(TypeError):
    spec.defaults["length"] = 3
  assert all(spec is TASKS[spec.name] for spec in TASKS.values())
  assert all(getattr(lajax.tasks, name) is spec.make for name, spec in TASKS.items())


def test_scaled_accuracy():
  score = Score(accuracy=0.6, all_correct=0.0, rows=4)
  assert score.scaled(0.2) == pytest.approx(0.5)
  faults = wrong.accepted(score.scaled, {}, "chance", wrong.NUMBERS | {"one": 1.0, "low": -0.1})
  assert not faults, "\n".join(faults)
