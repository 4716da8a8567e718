"""Based and ReBased: features that are polynomials of degree two."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_number, check_whole
from lajax.layers.features import squares, taylor2
from lajax.layers.linear_attention import KernelAttention
from lajax.layers.parameters import widen


class Based(KernelAttention):
  """Attention whose kernel is the second Taylor polynomial of exp; the state grows as K^2.

      phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt K ;  F = 1 + K + K^2
      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  The paper's model has these layers and softmax attention in a short window in turn:
  `SoftmaxAttention(window=...)`.

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

  Paper: S. Arora et al., "Simple linear attention language models balance the recall-throughput
  tradeoff", 2024, arXiv:2402.18668, section 4.1.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 16,
    *,
    expand_v: float = 4.0,
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
      num_features=1 + head_dim + head_dim**2,
      expand_v=expand_v,
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def features(self, q, k, documents):
    return taylor2(widen(q)), taylor2(widen(k))


class ReBased(KernelAttention):
  """Attention whose kernel is a square, of normed queries and keys under a learned affine map.

  So weights can be zero.

      phi(q) . phi(k) = (q' . k')^2 / K
      q' = gamma_q * norm(q) + beta_q, k' = gamma_k * norm(k) + beta_k
      F = K (K + 1) / 2
      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  norm is LayerNorm over K; the square of a vector, in the paper (gamma * norm(x) + beta)^2, is all
  products of two channels.

  Args:
    d_model: D.
    num_heads: H; they share gamma and beta.
    head_dim: K.
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    norm_eps: of LayerNorm.
    impl, chunk_size: of `lajax.normalized_linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; gamma and beta are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: Y. Aksenov et al., "Linear Transformers with Learnable Kernel Functions are Better
  In-Context Models", 2024, arXiv:2402.10644, its kernel with learnable scale and shift.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 16,
    *,
    expand_v: float = 4.0,
    conv_size: int | None = None,
    norm_eps: float = 1e-5,
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
      num_features=head_dim * (head_dim + 1) // 2,
      expand_v=expand_v,
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    check_number("norm_eps", norm_eps, 0.0)
    options = {
      "epsilon": norm_eps,
      "use_fast_variance": False,
      "param_dtype": self.gate_dtype,
      "rngs": rngs,
    }
    self.q_norm, self.k_norm = (
      nnx.LayerNorm(head_dim, **options),
      nnx.LayerNorm(head_dim, **options),
    )

  def features(self, q, k, documents):
    with jax.numpy_dtype_promotion("standard"):  # Flax's own code mixes dtypes
      return squares(self.q_norm(widen(q))), squares(self.k_norm(widen(k)))
