"""Gates of the matrix LSTM, as decays and weights of linear attention relative to a maximum m.

    m_t = max(f_t + m_{t-1}, i_t) ,   f' = exp(f_t + m_{t-1} - m_t) ,   i' = exp(i_t - m_t)

Outputs do not depend on m, only on C exp(m) and n exp(m). So derivatives do not pass through m,
where they would be small differences of large terms. `rescaled` gives the states that enter and
leave the derivatives that they have.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lajax._numerics import NEGLIGIBLE
from lajax.recurrence.documents import packing, previous

# The largest m of which exp(m) is formed, by bytes of a number. Beyond it, 1 / |n.q| is smaller.
LARGEST = {4: 80.0, 8: 700.0}


def stabilise(
  i: Float[Array, "B T HV"],
  f: Float[Array, "B T HV"],
  m: Float[Array, "B HV"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Array, Array, Array]:
  """Returns the running maximum after each token, log f' <= 0, and i', each [B T HV].

  A document begins with m = 0.
  """
  i, f, m = (jnp.maximum(x, NEGLIGIBLE) for x in (i, f, m))
  # NaN stays out of the maxima, which it would not leave; through i' and f' it reaches its
  # document.
  terms, first = tuple(jnp.where(x < jnp.inf, x, 0) for x in (i, f, m)), None
  if segment_ids is not None:
    document, is_token = packing(segment_ids)
    first = (document != previous(document))[..., None]
    # Padding writes nothing and raises no maximum.
    i = jnp.where(is_token[..., None], i, NEGLIGIBLE)
    terms = (jnp.where(is_token[..., None], terms[0], NEGLIGIBLE), *terms[1:])
    # Derivatives pass through the last maximum alone. Its cotangent, which may be NaN, stays in the
    # last document: 0 times NaN is NaN.
    last = (document == document[:, -1:])[..., None]
    masks = (last, last, last[:, 0])
    terms = tuple(
      jnp.where(mask, x, lax.stop_gradient(x)) for mask, x in zip(masks, terms, strict=True)
    )
  top = _running_maximum(*terms, first)
  fixed = lax.stop_gradient(top)
  before = jnp.concatenate([lax.stop_gradient(m)[:, None], fixed[:, :-1]], axis=1)
  before = before if first is None else jnp.where(first, 0, before)
  # f + (before - fixed) in this order: m may be large, but its change is not.
  return top, f + (before - fixed), jnp.exp(i - fixed)


@jax.jit
def _running_maximum(i, f, m, first):
  """Returns the maxima, by an associative scan over the maps m -> max(c + m, d).

  Every sum that it forms is that of an interval.
  """

  def join(x, y):
    return x[0] + y[0], jnp.maximum(y[0] + x[1], y[1])

  if first is None:
    c, d = f, i
  else:
    c, d = jnp.where(first, NEGLIGIBLE, f), jnp.where(first, jnp.maximum(f, i), i)
  c, d = lax.associative_scan(join, (c, d), axis=1)
  return jnp.maximum(c + m[:, None], d)


def rescaled(
  state: Float[Array, "B HV K V"], m: Float[Array, "B HV"], sign: int
) -> Float[Array, "B HV K V"]:
  """Returns the state itself, with the derivatives of state * exp(sign m)."""
  return state * jnp.exp(sign * (m - lax.stop_gradient(m)))[..., None, None]


def normalizer(denominator: Array, m: Array) -> Array:
  """Returns 1 / max(|denominator|, exp(-m)), finite and with finite gradients.

  It is the smaller one of 1 / |denominator| and exp(m).
  """
  size = jnp.abs(denominator)
  zero = size == 0
  inverse = jnp.where(zero, jnp.inf, 1 / jnp.where(zero, 1, size))
  return jnp.minimum(inverse, lax.stop_gradient(jnp.exp(jnp.minimum(m, LARGEST[m.dtype.itemsize]))))
