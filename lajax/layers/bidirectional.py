"""Linear attention that is not causal, for encoders: each token reads the whole document."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax._shapes import (
  check,
  check_dtype_option,
  check_given,
  check_option,
  check_rngs,
  check_whole,
)
from lajax.layers.features import FeatureMap, scaled_exp
from lajax.layers.features import feature_map as _feature_map
from lajax.layers.mixer import value_heads, value_width
from lajax.layers.parameters import Linear, widen
from lajax.layers.stateful import OptionsOfClass, on_layer_mesh
from lajax.ops.bidirectional import (
  NORMALIZATIONS,
  bidirectional_linear_attention,
  document_maximum,
  efficient_attention,
)


class _Bidirectional(nnx.Module):
  """Projections in, an op on q, k, v, one projection out; a subclass writes `mix`."""

  __signature__ = OptionsOfClass()

  def __init__(
    self,
    d_model: int,
    num_heads: int,
    head_dim: int,
    expand_v: float,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_whole("d_model", d_model)
    check_dtype_option("dtype", dtype)
    check_dtype_option("param_dtype", param_dtype, optional=False)
    check_rngs(rngs)
    linear = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    widths = {"q": H * K, "k": H * K, "v": H * V}
    self.in_proj = nnx.Dict({name: Linear(d_model, n, **linear) for name, n in widths.items()})
    self.out_proj = Linear(H * V, d_model, **linear)
    self.d_model, self.num_heads = d_model, num_heads

  def mix(self, q, k, v, segment_ids) -> Array:
    raise NotImplementedError

  def __call__(
    self, x: Float[Array, "B T D"], *, segment_ids: Int[Array, "B T"] | None = None
  ) -> Float[Array, "B T D"]:
    """Mixes all tokens of each document.

    Args:
      x: [B T D], D = d_model.
      segment_ids: [B T] int32, the document of each token, ids >= 0; -1 for padding. A change of id
        begins a new document.

    Returns:
      y [B T D], zero at padding.

    Raises:
      ValueError: an argument has the wrong rank, size or dtype.
    """
    check_given(x=(x, "B T D"))
    check({"D": self.d_model}, x=(x, "B T D"), segment_ids=(segment_ids, "B T", "int"))
    return on_layer_mesh(_call, self, jnp.asarray(x), None, segment_ids)[0]


def _call(layer: _Bidirectional, x: Array, state: None, segment_ids) -> tuple[Array, None]:
  if segment_ids is not None:
    x = jnp.where((segment_ids >= 0)[..., None], x, jnp.zeros((), x.dtype))

  def heads(name):
    y = layer.in_proj[name](x)
    return y.reshape(*y.shape[:2], layer.num_heads, y.shape[-1] // layer.num_heads)

  o = layer.mix(heads("q"), heads("k"), heads("v"), segment_ids)
  return layer.out_proj(jax.lax.collapse(o, 2)), None


class EfficientAttention(_Bidirectional):
  """Attention whose queries read a K by V summary of the whole document.

  Not causal: `layer(x, *, segment_ids=None) -> y`.

      G = rho_k(K)^T V ,  O = rho_q(Q) G ;  Q, K, V = x W ;  y = O W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    normalization: "softmax" (rho_q over the channels of a query, rho_k over the tokens of the
      document), or "scaling" (by 1 / sqrt n both: O = Q K^T V / n).
    expand_v: V / K.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: Z. Shen et al., "Efficient Attention: Attention with Linear Complexities", 2018,
  arXiv:1812.01243, equations 3 to 6.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    normalization: str = "softmax",
    expand_v: float = 1.0,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_option("normalization", normalization, NORMALIZATIONS)
    super().__init__(d_model, num_heads, head_dim, expand_v, dtype, param_dtype, rngs)
    self.normalization = normalization

  def mix(self, q, k, v, segment_ids):
    return efficient_attention(q, k, v, normalization=self.normalization, segment_ids=segment_ids)


class BidirectionalLinearAttention(_Bidirectional):
  """`LinearAttention` over the whole document. Not causal: `layer(x, *, segment_ids=None) -> y`.

      S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j) over all tokens j
      o_i = S^T phi(q_i) / (z . phi(q_i)) ;  y = o W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K; the feature map may widen it.
    feature_map: "elu+1", "relu", "exp" (of x / sqrt K, computed relative to the maximum),
      "identity", "taylor2", or a function [.. K] -> [.. F] without parameters.
    expand_v: V / K.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or an unknown feature map.

  Paper: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with
  Linear Attention", 2020, arXiv:2006.16236, equation 5.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    feature_map: str | FeatureMap = "elu+1",
    expand_v: float = 1.0,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.phi = _feature_map(feature_map)
    super().__init__(d_model, num_heads, head_dim, expand_v, dtype, param_dtype, rngs)

  def mix(self, q, k, v, segment_ids):
    q, k = widen(q), widen(k)
    if self.phi is scaled_exp:  # a factor of q cancels, and one of all keys of a document
      q = q - jax.lax.stop_gradient(q.max(-1, keepdims=True))
      k = k - document_maximum(jax.lax.stop_gradient(k.max(-1, keepdims=True)), segment_ids)
    return bidirectional_linear_attention(self.phi(q), self.phi(k), v, segment_ids=segment_ids)
