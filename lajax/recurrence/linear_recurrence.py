"""Elementwise state: h = exp(log_a) h + x, o = h."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax.recurrence.drive import Affine, Rule


class Tokens(NamedTuple):
  x: Float[Array, "B T 1 D"]
  log_a: Float[Array, "B T 1 D"]


def _step(h, t: Tokens):
  h = jnp.exp(t.log_a)[:, None] * h + t.x[:, None]
  return h, h[:, 0]


def _lift(t: Tokens) -> Affine:
  return Affine(jnp.exp(t.log_a), t.x[:, None])


def _read(before, after, t: Tokens):
  return after[:, 0]


rule = Rule(_step, _lift, _read, None, None, None)
