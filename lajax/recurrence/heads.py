"""How arrays of grouped heads are laid out inside the drivers, and how functions of one head are mapped over them.

Rows are batch times heads of queries and keys, R = B H; each has a group of G value heads. Arrays are kept at few axes
([R ..] or, where G > 1, [R G ..]): XLA's CPU products take no more than eight.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array


class Heads(NamedTuple):
  """Batch, heads of queries and keys, value heads of each."""

  B: int
  H: int
  G: int

  def rows(self, x: Array) -> Array:
    """State [B HV ..] -> [R (G) ..]."""
    return x.reshape(self.B * self.H, *((self.G,) if self.G > 1 else ()), *x.shape[2:])

  def unrows(self, x: Array) -> Array:
    return x.reshape(self.B, self.H * self.G, *x.shape[1 if self.G == 1 else 2 :])

  def grouped(self, x: Array) -> bool:
    """Whether tokens [B T H or HV ..] have value heads that are more than the heads of the queries."""
    return self.G > 1 and x.shape[2] == self.H * self.G

  def split(self, x: Array) -> Array:
    """Tokens [B T HV ..] -> [B T H G ..] where they are grouped."""
    return x.reshape(*x.shape[:2], self.H, self.G, *x.shape[3:]) if self.grouped(x) else x

  def axes(self, tokens):
    """For each array of tokens, what to map over for the groups: 0, or None where the group shares it."""
    return jax.tree.map(lambda x: 0 if self.grouped(x) else None, tokens)

  def over(self, f: Callable, axes) -> Callable:
    """Maps f(per row, tokens, *per value head) over the axes [R (G)]."""

    def mapped(per_row, tokens, *rest):
      g = f if self.G == 1 else jax.vmap(f, in_axes=(None, axes, *(0,) * len(rest)))
      return jax.vmap(g)(per_row, tokens, *rest)

    return mapped

  def nest(self, f: Callable, extra: int = 0) -> Callable:
    """Maps f over the axes [R (G)], and over more in front."""
    return _nest(f, extra + (1 if self.G == 1 else 2))


def heads_of(tokens, state: Array) -> Heads:
  """Of tokens [B T H or HV ..] and a state [B HV ..]."""
  H = min(x.shape[2] for x in jax.tree.leaves(tokens))
  return Heads(state.shape[0], H, state.shape[1] // H)


def _nest(f: Callable, axes: int) -> Callable:
  return f if axes == 0 else jax.vmap(_nest(f, axes - 1))
