"""The MLP of a block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax.layers.parameters import Linear, widen
from lajax.models.config import MLPConfig

ACTIVATE: dict[str, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class MLP(nnx.Module):
  """y = down(act(gate(x)) * up(x)), or down(act(up(x))): see `MLPConfig`.

  Papers: N. Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202, equation 6; relu
  squared: D. So et al., "Primer", 2021, arXiv:2109.08668, section 3.
  """

  def __init__(
    self, d_model: int, config: MLPConfig, *, dtype=None, param_dtype=jnp.float32, rngs: nnx.Rngs
  ):
    options = {"use_bias": config.use_bias, "dtype": dtype, "param_dtype": param_dtype}
    self.gate = Linear(d_model, config.width, rngs=rngs, **options) if config.gated else None
    self.up = Linear(d_model, config.width, rngs=rngs, **options)
    self.down = Linear(config.width, d_model, rngs=rngs, **options)
    self.config = config

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Applies the MLP to each token."""
    act, up = ACTIVATE[self.config.activation], self.up(x)
    if self.gate is None:
      hidden = act(widen(up))
    else:
      hidden = act(widen(self.gate(x)) * self.config.gate_multiplier) * widen(up)
    return self.down(hidden.astype(up.dtype)) * self.config.down_multiplier
