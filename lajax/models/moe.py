"""Mixture of experts: a router, the experts it chooses for each token, and a shared MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._numerics import accumulation_dtype, promoted
from lajax.layers.parameters import Buffer, Linear, wide_dtype, widen
from lajax.models.config import MoEConfig
from lajax.models.mlp import ACTIVATE, MLP


class MixtureOfExperts(nnx.Module):
  """Each token goes through the experts that a router chooses: see `MoEConfig`.

  Tokens are sorted by expert, and each expert multiplies its own rows (`jax.lax.ragged_dot`). There
  is no capacity, so no token is dropped, and tokens do not disturb each other. The router computes
  in float32 at least.

  Papers: N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
  Mixture-of-Experts Layer", 2017, arXiv:1701.06538, equation 1; sigmoid scores with a bias of the
  choice, in groups: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, equations
  12 to 16.
  """

  def __init__(
    self, d_model: int, config: MoEConfig, *, dtype=None, param_dtype=jnp.float32, rngs: nnx.Rngs
  ):
    E, I = config.num_experts, config.width
    D = config.latent or d_model
    common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    init = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    matrices = lambda *shape: nnx.Param(init(rngs.params(), shape, param_dtype))
    self.router = Linear(d_model, E, use_bias=False, param_dtype=param_dtype, rngs=rngs)
    wide = wide_dtype(param_dtype)
    self.selection_bias = Buffer(jnp.zeros(E, wide)) if config.selection_bias else None
    self.gate = matrices(E, D, I) if config.gated else None
    self.up, self.down = matrices(E, D, I), matrices(E, I, D)
    self.shared = None if config.shared is None else MLP(d_model, config.shared, **common)
    linear = lambda inputs, outputs: Linear(inputs, outputs, use_bias=False, **common)
    self.shared_gate = linear(d_model, 1) if config.shared_gate else None
    self.latent_in = linear(d_model, D) if config.latent else None
    self.latent_out = linear(D, d_model) if config.latent else None
    self.config, self.dtype = config, dtype

  def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """Applies to each token the experts that are chosen for it."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = self.route(tokens)
    inside = tokens if self.latent_in is None else self.latent_in(tokens)
    y = self.experts(inside, chosen, weights)
    y = y if self.latent_out is None else self.latent_out(y)
    if self.shared is not None:
      shared = self.shared(tokens)
      if self.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(widen(self.shared_gate(tokens))).astype(shared.dtype)
      y = y + shared
    return y.reshape(x.shape).astype(x.dtype)

  @property
  def idle_parameters(self) -> int:
    """Number of parameters of the experts that one token does not use."""
    c = self.config
    matrices = [m for m in (self.gate, self.up, self.down) if m is not None]
    return sum(m.size for m in matrices) // c.num_experts * (c.num_experts - c.top_k)

  def route(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Returns the experts of each token, and their weights in float32 at least."""
    c, kernel = self.config, widen(self.router.kernel[...])
    logits = jnp.matmul(widen(x).astype(kernel.dtype), kernel, precision="highest")
    scores = jax.nn.softmax(logits, -1) if c.router == "softmax" else jax.nn.sigmoid(logits)
    choice = scores
    if self.selection_bias is not None:
      choice = scores + self.selection_bias[...].astype(scores.dtype)[None]
    if c.num_groups > 1:
      choice = _within_groups(choice, c.num_groups, c.top_groups)
    _, chosen = jax.lax.top_k(choice, c.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if c.normalize:
      weights = weights / (weights.sum(-1, keepdims=True) + c.normalize_eps)
    return chosen, weights * c.scale

  def experts(
    self, x: Float[Array, "N D"], chosen: Int[Array, "N k"], weights: Float[Array, "N k"]
  ) -> Float[Array, "N D"]:
    """Returns the weighted sum of the chosen experts' outputs."""
    N, k = chosen.shape
    dtype = self.dtype or promoted(x.dtype, self.up.dtype)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros(self.config.num_experts, jnp.int32).at[chosen.reshape(-1)].add(1)
    product = lambda rows, matrices: jax.lax.ragged_dot(rows, matrices[...].astype(dtype), sizes)
    rows = x.astype(dtype)[order // k]
    act, up = ACTIVATE[self.config.activation], product(rows, self.up)
    if self.gate is None:
      hidden = act(widen(up))
    else:
      hidden = act(widen(product(rows, self.gate))) * widen(up)
    y = product(hidden.astype(dtype), self.down)
    y = y[jnp.argsort(order)].reshape(N, k, -1)
    wide = accumulation_dtype(y)
    return (y.astype(wide) * weights.astype(wide)[..., None]).sum(1).astype(dtype)


def _within_groups(scores: Float[Array, "N E"], groups: int, kept: int) -> Float[Array, "N E"]:
  """Returns -inf for the experts outside the `kept` groups whose best two scores sum highest."""
  split = scores.reshape(scores.shape[0], groups, -1)
  best, _ = jax.lax.top_k(split, min(2, split.shape[-1]))
  _, top = jax.lax.top_k(best.sum(-1), kept)
  allowed = jax.nn.one_hot(top, groups, dtype=jnp.int32).sum(1) > 0
  return jnp.where(allowed[..., None], split, -jnp.inf).reshape(scores.shape)
