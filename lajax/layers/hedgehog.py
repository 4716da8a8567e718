"""Hedgehog: learned features that are spiky as softmax is."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_whole
from lajax.layers.linear_attention import KernelAttention
from lajax.layers.parameters import widen


class Hedgehog(KernelAttention):
  """Attention with learned features, a softmax over the channels of a linear map and its negative.

      phi_q(x) = softmax([x W_q, -x W_q]), phi_k(x) = softmax([x W_k, -x W_k]) ;  F = 2 K
      S_t = S_{t-1} + phi_k(k_t) v_t^T, z_t = z_{t-1} + phi_k(k_t)
      o_t = S_t^T phi_q(q_t) / (z_t . phi_q(q_t)) ;  y = o W_o

  W_q and W_k are [K K], one for each head, and begin as the identity.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    impl, chunk_size: of `lajax.normalized_linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: M. Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax
  Mimicry", 2024, arXiv:2402.04347, its trained feature map with softmax over the channels in the
  place of exp.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    super().__init__(
      d_model,
      num_heads,
      head_dim,
      num_features=2 * head_dim,
      expand_v=expand_v,
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    identity = jnp.broadcast_to(
      jnp.eye(head_dim, dtype=param_dtype), (num_heads, head_dim, head_dim)
    )
    self.q_map, self.k_map = nnx.Param(identity), nnx.Param(identity)

  def features(self, q, k, documents):
    return _both_signs(q, self.q_map[...]), _both_signs(k, self.k_map[...])


def _both_signs(
  x: Float[Array, "B T H K"], weight: Float[Array, "H K K"]
) -> Float[Array, "B T H 2*K"]:
  x = widen(x)
  x = jnp.einsum("bthk,hkf->bthf", x, weight.astype(x.dtype), precision="highest")
  return jax.nn.softmax(jnp.concatenate([x, -x], axis=-1), axis=-1)
