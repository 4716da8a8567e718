"""Feature maps phi of linear attention: exp(q . k) is replaced by phi(q) . phi(k)."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lajax._numerics import accumulation_dtype

FeatureMap = Callable[[Float[Array, "... K"]], Float[Array, "... F"]]


def in_float32(phi: FeatureMap) -> FeatureMap:
  """Returns phi, computed in float32 at least and rounded once, to the dtype of its input."""

  @functools.wraps(phi)
  def wide(x, *options, **named):
    return phi(x.astype(accumulation_dtype(x)), *options, **named).astype(x.dtype)

  return wide


@in_float32
def elu_plus_one(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  """elu(x) + 1, positive: x + 1 from 0 on, else exp(x), which is never a difference of two ones.

  Katharopoulos et al. 2020, arXiv:2006.16236, equation 7.
  """
  return jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@in_float32
def scaled_exp(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  """exp(x / sqrt K), elementwise: positive."""
  return jnp.exp(x * x.shape[-1] ** -0.5)


def identity(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  return x


@in_float32
def taylor2(x: Float[Array, "... K"]) -> Float[Array, "... 1+K+K*K"]:
  """Second Taylor polynomial of exp(s): phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt K.

  Paper: S. Arora et al., "Simple linear attention language models balance the recall-throughput
  tradeoff" (Based), 2024, arXiv:2402.18668, section 4.1.
  """
  x = x * x.shape[-1] ** -0.25
  squares = jax.lax.collapse(x[..., :, None] * x[..., None, :], x.ndim - 1)
  return jnp.concatenate([jnp.ones_like(x[..., :1]), x, squares * 2**-0.5], axis=-1)


@in_float32
def squares(x: Float[Array, "... K"]) -> Float[Array, "... K*(K+1)/2"]:
  """phi(q) . phi(k) = (q . k)^2 / K: the products x_i x_j, each pair once."""
  i, j = np.triu_indices(x.shape[-1])
  weight = np.where(i == j, 1, 2**0.5) * x.shape[-1] ** -0.5
  return x[..., i] * x[..., j] * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


@in_float32
def dpfp(x: Float[Array, "... K"], nu: int = 1) -> Float[Array, "... 2*K*nu"]:
  """Deterministic parameter-free projection: phi(x) = (r_i r_{i-j}), r = relu(x, -x).

  For j = 1 .. nu, indices modulo 2 K.

  Paper: I. Schlag, K. Irie, J. Schmidhuber, "Linear Transformers Are Secretly Fast Weight
  Programmers", 2021, arXiv:2102.11174, equation 37.
  """
  r = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
  return jnp.concatenate([r * jnp.roll(r, j, axis=-1) for j in range(1, nu + 1)], axis=-1)


def orthogonal_projection(
  key: Array, width: int, count: int, dtype=jnp.float32
) -> Float[Array, "K M"]:
  """Draws M directions of N(0, I_K), orthogonal in each block of K, of Gaussian lengths."""
  blocks = -(-count // width)
  directions, lengths = jax.random.normal(key, (2, blocks, width, width), dtype)
  q, r = jnp.linalg.qr(directions)
  signs = jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))
  q = q * signs[:, None]  # so that it is uniform over all rotations
  columns = q * jnp.linalg.norm(lengths, axis=-2, keepdims=True)
  return jnp.moveaxis(columns, 0, 1).reshape(width, blocks * width)[:, :count]


def favor_features(
  x: Float[Array, "... K"], projection: Float[Array, "K M"]
) -> Float[Array, "... M"]:
  """The logarithms of the M positive random features of FAVOR+.

      log phi(x)_m = w_m . x' - |x'|^2 / 2 - log(M) / 2,  x' = x / K^(1/4)
      E[phi(q) . phi(k)] = exp(q . k / sqrt K)

  Args:
    x: [.. K].
    projection: [K M], the directions w, from `orthogonal_projection`.

  Returns:
    [.. M], in float32 at least; float64 where an argument is.

  Paper: K. Choromanski et al., "Rethinking Attention with Performers", 2020, arXiv:2009.14794,
  equation 7 (lemma 1), and section 2.4 for the orthogonal directions.
  """
  dtype = accumulation_dtype(x, projection)
  x = x.astype(dtype) * x.shape[-1] ** -0.25
  along = jnp.matmul(x, projection.astype(dtype), precision="highest")
  return along - (x * x).sum(-1, keepdims=True) / 2 - 0.5 * math.log(projection.shape[-1])


FEATURE_MAPS: dict[str, FeatureMap] = {
  "elu+1": elu_plus_one,
  "relu": jax.nn.relu,
  "exp": scaled_exp,
  "identity": identity,
  "taylor2": taylor2,
  "squares": squares,
  "dpfp": dpfp,
}


def feature_map(choice: str | FeatureMap) -> FeatureMap:
  """Returns the map of that name, or the callable itself."""
  if callable(choice):
    return choice
  if not isinstance(choice, str) or choice not in FEATURE_MAPS:
    known = ", ".join(map(repr, FEATURE_MAPS))
    raise ValueError(
      f"`feature_map` must be one of {known}, or a function of an array; got {choice!r}."
    )
  return FEATURE_MAPS[choice]
