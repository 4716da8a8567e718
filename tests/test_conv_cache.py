"""The cache of the short convolution, row by row: pieces of any length against the whole, in NumPy.

A cache row of an earlier document, of padding, or of the wrong token changes some output here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BUDGET, quick_jit, relative_rms
from flax import nnx

import lajax.layers as L

B, T, D, W = 3, 12, 2, 4
IDS = np.array(
  [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # one document
    [0, 1, 1, 2, 2, 2, 2, 2, 5, 5, 5, 5],  # documents shorter than the cache
    [-1, -1, 3, 3, -1, 3, 4, -1, -1, -1, 4, 4],  # padding before, inside and between
  ],
  np.int32,
)


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """Convolution of each document by itself, over its tokens without padding."""
  y = np.zeros_like(x)
  for row in range(B):
    for t in np.flatnonzero(IDS[row] >= 0):
      own = [s for s in range(t + 1) if IDS[row, s] == IDS[row, t]][-W:]
      for back, s in enumerate(reversed(own)):
        y[row, t] += weight[:, W - 1 - back] * x[row, s]
  return y


@functools.cache
def layer():
  return L.ShortConv(D, W, activation=None, rngs=nnx.Rngs(0))


@functools.cache
def one_piece():
  """Shared by all pieces of one length: (x, state, segment_ids) -> (y, state)."""
  return quick_jit(lambda x, state, ids: layer()(x, state, segment_ids=ids))


@pytest.mark.parametrize("pieces", [(1,) * 12, (2, 1, 2, 1, 2, 1, 2, 1), (5, 2, 5)], ids=str)
def test_pieces_equal_the_whole(pieces):
  x = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
  state, outputs = layer().init_state(B), []
  for end, length in zip(np.cumsum(pieces), pieces, strict=True):
    piece = slice(end - length, end)
    y, state = one_piece()(jnp.asarray(x[:, piece]), state, jnp.asarray(IDS[:, piece]))
    outputs.append(y)
  whole = convolved(x, np.asarray(layer().weight[...]))
  assert relative_rms(np.concatenate(outputs, axis=1), whole) <= BUDGET["float32"]["value"]
  jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), state, layer().init_state(B))
