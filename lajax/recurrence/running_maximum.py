"""Running maximum of keys that are logarithms of features: what their sums are kept relative to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax._numerics import NEGLIGIBLE


def running_maximum(
  k: Float[Array, "B T *F"],
  before: Float[Array, "B *F"],
  document: Int[Array, "B T"] | None,
  carried: Int[Array, "B"],
) -> tuple[Float[Array, "B T *F"], Float[Array, "B T *F"]]:
  """Returns the largest key of each document up to each token, and its change as a log decay.

      m_t = max(m_{t-1}, k_t) ,   g_t = m_{t-1} - m_t <= 0

  Args:
    k: [B T ..], each entry a maximum of its own.
    before: [B ..], the maximum of the document that a call continues.
    document: [B T], 0 for that document, 1, 2, .. for those that begin in the call, -1 for padding,
      which takes no part; None if there is one document without padding.
    carried: [B], tokens of that document so far; 0 where `before` is a maximum over none.

  Returns:
    m and g, [B T ..]. A maximum over no keys is -1e30: finite, so that no difference is NaN.
  """
  aligned = lambda x: x.reshape(x.shape + (1,) * (k.ndim - x.ndim))
  before = jnp.where(aligned(carried[:, None])[:, 0] > 0, before, NEGLIGIBLE)[:, None]
  if document is None:
    m = jax.lax.cummax(jnp.concatenate([before, k], axis=1), axis=1)
    return m[:, 1:], m[:, :-1] - m[:, 1:]
  k = jnp.where(aligned(document) < 0, NEGLIGIBLE, k)
  current = jnp.broadcast_to(aligned(jax.lax.cummax(jnp.maximum(document, 0), axis=1)), k.shape)
  # Selections, not `jnp.maximum`, whose derivative is a product: 0 times NaN would carry a
  # cotangent that is not finite to other documents.
  join = lambda x, y: (y[0], jnp.where((x[0] == y[0]) & (x[1] > y[1]), x[1], y[1]))
  first = (jnp.zeros_like(current[:, :1]), before)
  pairs = (jnp.concatenate(pair, axis=1) for pair in zip(first, (current, k), strict=True))
  numbers, m = jax.lax.associative_scan(join, tuple(pairs), axis=1)
  return m[:, 1:], jnp.where(numbers[:, 1:] == numbers[:, :-1], m[:, :-1] - m[:, 1:], 0)
