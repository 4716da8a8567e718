"""Feature maps phi of linear attention: exp(q . k) is replaced by phi(q) . phi(k)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FeatureMap = Callable[[Float[Array, "... K"]], Float[Array, "... F"]]


def elu_plus_one(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  """elu(x) + 1: positive. (Katharopoulos et al. 2020, arXiv:2006.16236, equation 7.)"""
  return jax.nn.elu(x) + 1


def scaled_exp(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  """exp(x / sqrt K), elementwise: positive."""
  return jnp.exp(x * x.shape[-1] ** -0.5)


def identity(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  return x


def taylor2(x: Float[Array, "... K"]) -> Float[Array, "... 1+K+K*K"]:
  """phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt K: the second Taylor polynomial of exp(s), positive.

  Paper: S. Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff" (Based), 2024,
  arXiv:2402.18668, section 4.1.
  """
  x = x * x.shape[-1] ** -0.25
  squares = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
  return jnp.concatenate([jnp.ones_like(x[..., :1]), x, squares * 2**-0.5], axis=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
  "elu+1": elu_plus_one,
  "relu": jax.nn.relu,
  "exp": scaled_exp,
  "identity": identity,
  "taylor2": taylor2,
}


def feature_map(choice: str | FeatureMap) -> FeatureMap:
  """The map of that name, or the callable itself."""
  if callable(choice):
    return choice
  if choice not in FEATURE_MAPS:
    known = ", ".join(map(repr, FEATURE_MAPS))
    raise ValueError(f"`feature_map` must be one of {known}, or a function of an array; got {choice!r}.")
  return FEATURE_MAPS[choice]
