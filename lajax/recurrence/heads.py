"""Layout of grouped heads inside the drivers, and maps of functions of one head over them.

Rows are batch times heads of queries and keys, R = B H. Each row has a group of G value heads.
Arrays have few axes ([R ..] or, where G > 1, [R G ..]): XLA's CPU products take at most eight.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array


class Heads(NamedTuple):
  """Batch, heads of queries and keys, value heads per head of queries and keys."""

  B: int
  H: int
  G: int

  def rows(self, x: Array) -> Array:
    """State [B HV ..] -> [R (G) ..]."""
    return x.reshape(self.B * self.H, *((self.G,) if self.G > 1 else ()), *x.shape[2:])

  def unrows(self, x: Array) -> Array:
    """[R (G) ..] -> [B HV ..]."""
    return x.reshape(self.B, self.H * self.G, *x.shape[1 if self.G == 1 else 2 :])

  def grouped(self, x: Array) -> bool:
    """Returns whether tokens [B T H or HV ..] differ between the value heads of a group."""
    return self.G > 1 and x.shape[2] == self.H * self.G

  def split(self, x: Array) -> Array:
    """Tokens [B T HV ..] -> [B T H G ..]; others stay as they are."""
    return x.reshape(*x.shape[:2], self.H, self.G, *x.shape[3:]) if self.grouped(x) else x

  def axes(self, tokens):
    """Axis to map over for the groups, per array of tokens: 0, or None if the group shares it."""
    return jax.tree.map(lambda x: 0 if self.grouped(x) else None, tokens)

  def over(self, f: Callable, axes) -> Callable:
    """Returns f(per row, tokens, *per value head), mapped over the axes [R (G)]."""

    def mapped(per_row, tokens, *rest):
      g = f if self.G == 1 else jax.vmap(f, in_axes=(None, axes, *(0,) * len(rest)))
      return jax.vmap(g)(per_row, tokens, *rest)

    return mapped

  def nest(self, f: Callable, extra: int = 0) -> Callable:
    """Returns f mapped over the axes [R (G)], and over `extra` axes in front of them."""
    return _nest(f, extra + (1 if self.G == 1 else 2))


def heads_of(tokens, state: Array) -> Heads:
  """Heads of tokens [B T H or HV ..] and a state [B HV ..]."""
  H = min(x.shape[2] for x in jax.tree.leaves(tokens))
  return Heads(state.shape[0], H, state.shape[1] // H)


def _nest(f: Callable, axes: int) -> Callable:
  return f if axes == 0 else jax.vmap(_nest(f, axes - 1))
