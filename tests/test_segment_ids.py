"""Ids of documents: made from lengths and masks, told apart in every integer dtype; tokens that
have a target.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lajax

B, T = 1, 6
BIG = 2**32 + 5


def test_lengths():
  ids = lajax.segment_ids(lengths=[2, 0, 3])
  np.testing.assert_array_equal(ids, [[0, 0, -1], [-1, -1, -1], [0, 0, 0]])
  assert ids.dtype == jnp.int32
  np.testing.assert_array_equal(lajax.segment_ids(lengths=jnp.array([1]), length=3), [[0, -1, -1]])


def test_lengths_of_packed_documents():
  """An empty document has a number and no tokens."""
  ids = lajax.segment_ids(lengths=[[1, 2, 0], [3, 0, 1]])
  np.testing.assert_array_equal(ids, [[0, 1, 1, -1], [0, 0, 0, 2]])


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.int64])
def test_mask(dtype):
  """Padding on the left, on the right and in between."""
  mask = np.array([[0, 1, 1], [1, 1, 0], [1, 0, 1]], dtype)
  np.testing.assert_array_equal(lajax.segment_ids(mask=mask), [[-1, 0, 0], [0, 0, -1], [0, -1, 0]])
  np.testing.assert_array_equal(
    lajax.segment_ids(None, jnp.asarray(mask)), lajax.segment_ids(mask=mask)
  )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_sums_of_narrow_lengths(dtype):
  """200 is no int8; the sum of the lengths is not in their dtype."""
  made = lajax.segment_ids(lengths=np.array([[100, 100, 100]], dtype))
  np.testing.assert_array_equal(made, np.repeat([[0, 1, 2]], 100, axis=1))


def test_under_jit():
  made = jax.jit(lambda n: lajax.segment_ids(lengths=n, length=4))(jnp.array([[1, 2]]))
  np.testing.assert_array_equal(made, [[0, 1, 1, -1]])
  made = jax.jit(lambda m: lajax.segment_ids(mask=m))(jnp.array([[False, True]]))
  np.testing.assert_array_equal(made, [[-1, 0]])
  with pytest.raises(ValueError, match="`length` must be T where `lengths` is traced"):
    jax.jit(lambda n: lajax.segment_ids(lengths=n))(jnp.array([1]))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({}, "either `lengths` or `mask`; got none"),
    (dict(lengths=[1], mask=[[True]]), "either `lengths` or `mask`; got both"),
    (dict(lengths=[1.5]), "`lengths` must be an array .* of whole numbers; got float64"),
    (dict(lengths=[-1]), "`lengths` must be at least 0; got -1"),
    (dict(lengths=[[1], [1, 2]]), "`lengths` .* rows of different lengths"),
    (dict(lengths="1"), "`lengths` must be an array .*; got str"),
    (dict(lengths=[4], length=3), "`length` must be at least 4"),
    (dict(lengths=[4], length=2.5), "`length` must be a whole number"),
    (dict(mask=[True]), r"`mask` must be \[B T\]; got rank 1"),
    (dict(mask=[[0.5]]), "`mask` must be an array .*; got float64"),
    (dict(mask=[[0, 7]]), "`mask` must be True .*; got 7"),
    (dict(mask=[[True]], length=2), "`length` goes with `lengths`"),
  ],
)
def test_wrong_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    lajax.segment_ids(**arguments)


def test_loss_mask():
  """The last token of a document predicts nothing, nor does padding, nor a token before padding."""
  ids = jnp.array([[0, 0, 1, 1, -1, 1], [-1, -1, 3, 3, 3, 2]])
  want = [[True, False, True, False, False, False], [False, False, True, True, False, False]]
  np.testing.assert_array_equal(lajax.loss_mask(ids), want)
  np.testing.assert_array_equal(jax.jit(lajax.loss_mask)(ids), want)
  assert lajax.loss_mask(jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)
  with pytest.raises(ValueError, match="`segment_ids` must have an integer dtype; got bool"):
    lajax.loss_mask(ids >= 0)


# --- ids of all integer dtypes ---


def decays(ids):
  """The sum of ones over each document: 1, 2, 3, .."""
  one = jnp.ones((B, T, 1))
  return lajax.linear_recurrence(one, 0 * one, segment_ids=ids, impl="recurrent")[0][0, :, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64])
def test_ids_of_any_integer_dtype(dtype):
  ids = np.array([[5, 5, 6, 6, 6, 5]], dtype)
  np.testing.assert_array_equal(decays(ids), [1, 2, 1, 2, 3, 1])


@pytest.mark.parametrize(
  "wrong", [np.int64(BIG), np.uint32(2**31), np.uint64(2**63), np.int64(-BIG)]
)
def test_ids_that_do_not_fit(wrong):
  """5 and 2^32 + 5 are the same in 32 bits, and 2^31 would be padding."""
  ids = np.array([[5, 5, 5, wrong, wrong, wrong]], wrong.dtype)
  for call in (lambda: decays(ids), lambda: lajax.loss_mask(ids)):
    with pytest.raises(
      ValueError, match=f"`segment_ids` must be ids of at most 2147483647.*{wrong}"
    ):
      call()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_ids_of_64_bits_under_jit(dtype):
  """Values cannot be seen there; ids are compared with all their bits."""
  big = BIG if np.dtype(dtype).itemsize == 8 else 2**31 + 5
  ids = np.array([[5, 5, big, big, big, 5]], dtype)
  np.testing.assert_array_equal(jax.jit(decays)(ids), [1, 2, 1, 2, 3, 1])


def test_unsigned_ids_under_jit():
  ids = np.array([[5, 5, 2**31, 2**31, 2**31 + 5, 5]], np.uint32)
  np.testing.assert_array_equal(jax.jit(decays)(ids), [1, 2, 1, 2, 1, 1])


def test_a_mask_is_no_ids():
  """The message must not advise a cast: False would be document 0, and padding would be read."""
  mask = jnp.array([[True] * 4 + [False] * 2])
  with pytest.raises(ValueError, match=r"got bool.*jnp\.where\(segment_ids, 0, -1\)"):
    decays(mask)
