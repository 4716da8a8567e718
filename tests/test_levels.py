"""Levels of log-linear attention by their definition: the buckets of a Fenwick tree, in NumPy."""

import functools

import cases
import jax
import numpy as np
import pytest

import lajax

T, H, HV, K, V, L, FIRST = 37, 1, 2, 3, 2, 7, 21


def buckets(t: int):
  """The level, the first token and the end of each bucket of the tokens before token t."""
  while t:
    size = t & -t  # the lowest bit that is set
    yield size.bit_length(), t - size, t
    t -= size


def by_buckets(q, k, v, g, level_scales, beta=None):
  """o_t = sum over buckets of their scale times what their writes, each carried to t, answer q."""
  o, eye = np.zeros_like(v), np.eye(K)
  strength = np.ones(g.shape) if beta is None else beta
  for h, t in np.ndindex(HV, T):
    carried = eye  # the product of the transitions behind token j, up to token t
    answers = np.zeros((T, V))
    for j in range(t, -1, -1):
      answers[j] = q[t, 0] @ carried @ k[j, 0] * strength[j, h] * v[j, h]
      erased = 0 if beta is None else beta[j, h] * np.outer(k[j, 0], k[j, 0])
      carried = carried @ (np.exp(g[j, h]) * (eye - erased))
    o[t, h] = level_scales[t, h, 0] * answers[t]
    for level, first, end in buckets(t):
      o[t, h] += level_scales[t, h, level] * answers[first:end].sum(0)
  return o


def test_buckets_cover_the_past():
  assert list(buckets(13)) == [(1, 12, 13), (3, 8, 12), (4, 0, 8)]


@pytest.mark.parametrize("gate", ["head", "delta"])
def test_levels_are_buckets(x64, gate):
  """One call, and two of which the second continues inside a bucket."""
  rng = np.random.default_rng(0)
  x = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV,), "level_scales": (HV, L)}
  x = {name: rng.standard_normal((1, T, *shape)) for name, shape in x.items()}
  x["g"] = -abs(x["g"]) / 4
  if gate == "delta":
    x |= {"k": x["k"] / 2, "beta": rng.uniform(size=(1, T, HV))}
  op = functools.partial(lajax.log_linear_attention, impl="chunked", chunk_size=16)

  def calls(x):
    part = lambda tokens: jax.tree.map(lambda a: a[:, tokens], x)
    first, state = op(**part(slice(FIRST)))
    return op(**x)[0], first, op(**part(slice(FIRST, None)), initial_state=state)[0]

  whole, *parts = cases.quick_jit(calls)(x)
  want = by_buckets(**{name: a[0] for name, a in x.items()})
  assert cases.relative_rms(np.asarray(whole[0]), want) < 1e-13
  assert cases.relative_rms(np.concatenate(parts, axis=1)[0], want) < 1e-13
