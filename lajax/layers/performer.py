"""Performer: softmax attention estimated by positive orthogonal random features (FAVOR+)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_whole
from lajax.layers.features import favor_features, orthogonal_projection
from lajax.layers.linear_attention import KernelAttention


class RandomFeatures(nnx.Variable):
  """Directions that are drawn, not trained: in the module's state, but not among its parameters."""


class Performer(KernelAttention):
  """Attention with the kernel exp(q . k / sqrt K), estimated without bias by M random features.

      phi(x)_m = exp(w_m . x' - |x'|^2 / 2) / sqrt M, x' = x / K^(1/4)
      w_m ~ N(0, I), orthogonal in each block of K
      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  The exponentials are computed relative to maxima that cancel: of each feature, over the keys so
  far. The directions w are `projection`, one draw for all heads, an `nnx.Variable` that is no
  `nnx.Param`; `redraw` draws anew.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    num_features: M; the estimate's variance falls as 1 / M.
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    impl, chunk_size: of `lajax.normalized_linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the directions are float32 at least.
    rngs: random streams of the initial parameters and of the directions.

  Raises:
    ValueError: an option is out of its range.

  Paper: K. Choromanski et al., "Rethinking Attention with Performers", 2020, arXiv:2009.14794,
  equations 5 to 7 and section 2.4.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_features: int = 256,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    check_whole("num_features", num_features)
    super().__init__(
      d_model,
      num_heads,
      head_dim,
      num_features=num_features,
      logarithmic=True,
      expand_v=expand_v,
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.projection = RandomFeatures(
      orthogonal_projection(rngs.params(), head_dim, num_features, self.gate_dtype)
    )

  def redraw(self, rngs: nnx.Rngs) -> None:
    """Draws new directions. Old states hold sums of old features: begin anew."""
    K, M = self.projection[...].shape
    self.projection[...] = orthogonal_projection(rngs.params(), K, M, self.gate_dtype)

  def features(self, q, k, documents):
    projection = jax.lax.stop_gradient(self.projection[...])
    return favor_features(q, projection), favor_features(k, projection)
