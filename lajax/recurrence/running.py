"""Running results over each document: the maximum of keys, and the sum of angles."""

from collections.abc import Callable

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

  Sums of exponentials are kept relative to it.

  Args:
    k: [B T ..], each entry a maximum of its own.
    before: [B ..], the maximum of the document that a call continues.
    document: [B T], 0 for that document, 1, 2, .. for those that begin in the call, -1 for padding,
      which takes no part; None if there is one document without padding.
    carried: [B], tokens of that document so far; 0 where `before` is a maximum over none.

  Returns:
    m and g, [B T ..]. A maximum over no keys is -1e30: finite, so that no difference is NaN.
  """
  before = jnp.where(_aligned(carried, before) > 0, before, NEGLIGIBLE)[:, None]
  if document is None:
    m = jax.lax.cummax(jnp.concatenate([before, k], axis=1), axis=1)
    return m[:, 1:], m[:, :-1] - m[:, 1:]
  k = jnp.where(_aligned(document, k) < 0, NEGLIGIBLE, k)
  # Selections, not `jnp.maximum`, whose derivative is a product: 0 times NaN would carry a
  # cotangent that is not finite to other documents.
  larger = lambda x, y: jnp.where(x > y, x, y)
  numbers, m = _over_documents(larger, jnp.concatenate([before, k], axis=1), document)
  return m[:, 1:], jnp.where(numbers[:, 1:] == numbers[:, :-1], m[:, :-1] - m[:, 1:], 0)


def running_angle(
  x: Float[Array, "B T *A"], before: Float[Array, "B *A"] | None, document: Int[Array, "B T"] | None
) -> Float[Array, "B T *A"]:
  """Returns the sum of x over each document up to each token, in half turns between -1 and 1.

  In half turns, whole turns are taken off without rounding. So angles stay right at any length.

  Args:
    x: [B T ..], the angle by which each token turns further, in half turns.
    before: [B ..], the angle behind the last token of the document that a call continues; None
      for 0.
    document: [B T], as in `running_maximum`; padding turns by nothing.
  """
  within = lambda y: y - 2 * jnp.round(y / 2)
  add = lambda x, y: within(x + y)
  if document is not None:
    x = jnp.where(_aligned(document, x) < 0, jnp.zeros((), x.dtype), x)
  before = jnp.zeros_like(x[:, 0]) if before is None else before.astype(x.dtype)
  x = within(jnp.concatenate([before[:, None], x], axis=1))
  if document is None:
    return jax.lax.associative_scan(add, x, axis=1)[:, 1:]
  return _over_documents(add, x, document)[1][:, 1:]


def _over_documents(
  join: Callable[[Array, Array], Array], x: Float[Array, "B T+1 *F"], document: Int[Array, "B T"]
) -> tuple[Int[Array, "B T+1 ..."], Float[Array, "B T+1 *F"]]:
  """Returns the document of each entry, and its result of `join` over that document so far.

  The first entry comes before the tokens, and is of document 0.
  """
  number = jax.lax.cummax(jnp.maximum(document, 0), axis=1)
  number = _aligned(jnp.pad(number, [(0, 0), (1, 0)]), x)
  join_in_document = lambda x, y: (y[0], jnp.where(x[0] == y[0], join(x[1], y[1]), y[1]))
  return jax.lax.associative_scan(join_in_document, (number, x), axis=1)


def _aligned(x: Array, other: Array) -> Array:
  """Returns x with axes of size 1 behind, up to the rank of the other array."""
  return x.reshape(x.shape + (1,) * (other.ndim - x.ndim))
