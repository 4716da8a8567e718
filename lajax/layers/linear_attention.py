"""Linear attention with a feature map."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_flag, check_whole
from lajax.layers.features import FeatureMap, identity, scaled_exp
from lajax.layers.features import feature_map as _feature_map
from lajax.layers.mixer import Mixer, value_heads, value_width
from lajax.layers.parameters import widen
from lajax.layers.state import CallDocuments
from lajax.ops import linear_attention, normalized_linear_attention
from lajax.recurrence.running import running_maximum

EXACT = (jax.nn.relu, identity)  # feature maps that half precision does not round


class KernelAttention(Mixer):
  """The shell of attention by features phi of queries and keys: a subclass writes `features`.

      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    num_features: F, the width of what `features` returns.
    logarithmic: whether `features` returns the logarithms of the features, for those that are
      exponentials.
    normalize: divide by z . phi(q); without it, o = S^T phi(q).
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None for none.
    impl, chunk_size: of the op.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int,
    head_dim: int,
    *,
    num_features: int,
    logarithmic: bool = False,
    normalize: bool = True,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    super().__init__(
      d_model,
      {"q": (H, K), "k": (H, K), "v": (H, V)},
      inner=H * V,
      memory=(H, num_features, V),
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.logarithmic, self.normalize = logarithmic, normalize
    parts = 3 if logarithmic else 2
    self.memory_letters = ("B H F V", "B H F", "B H F")[:parts] if normalize else "B H F V"

  def features(
    self, q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], documents: CallDocuments
  ) -> tuple[Float[Array, "B T H F"], Float[Array, "B T H F"]]:
    """Returns phi(q) and phi(k), or their logarithms, in float32 at least unless phi is exact."""
    raise NotImplementedError

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    z = jnp.zeros(S.shape[:-1], S.dtype)
    if not self.normalize:
      return S
    return (S, z, z) if self.logarithmic else (S, z)

  def mix(self, p, memory, documents):
    q, k = self.features(p["q"], p["k"], documents)
    if self.logarithmic:
      return self._mix_exp(q, k, p["v"], memory, documents)
    op = normalized_linear_attention if self.normalize else linear_attention
    return self.apply_op(op, q, k, p["v"], scale=1.0, memory=memory, documents=documents)

  def _mix_exp(self, q, k, v, memory, documents):
    """Computes with keys relative to their largest so far, m_t, of each feature.

    Row f of the state is scaled by exp(-m_tf): a decay of exp(m_{t-1,f} - m_tf) where m grows, and
    a factor exp(m_tf) of the query. The largest weight of a query is then 1, and so is its
    normalizer at least, however far apart the features are.
    """
    before = jnp.zeros_like(k[:, 0]) if memory is None else memory[2]
    m, g = running_maximum(k, before, documents.ids, documents.carried)
    q = q + m
    q = jnp.exp(q - jax.lax.stop_gradient(q.max(-1, keepdims=True)))  # a factor of q cancels
    k = jnp.exp(documents.blank_padding(k - m))
    sums = None if memory is None else memory[:2]
    op = functools.partial(normalized_linear_attention, eps=0.0)
    o, sums = self.apply_op(op, q, k, v, g, scale=1.0, memory=sums, documents=documents)
    has_tokens = (documents.length > 0)[:, None, None]
    return o, (*sums, jnp.where(has_tokens, m[:, -1], before))


class LinearAttention(KernelAttention):
  """Attention with a kernel phi(q) . phi(k) in place of exp(q . k), normalised as softmax is.

      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  `lajax.layers.BidirectionalLinearAttention` is the form that is not causal.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K; the feature map may widen it to F.
    feature_map: "elu+1", "relu", "exp" (of x / sqrt K, computed with a running maximum),
      "identity", "taylor2", "squares", "dpfp", or a function [.. K] -> [.. F] without parameters.
    normalize: divide by z . phi(q); without it, o = S^T phi(q).
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    impl, chunk_size: of the op.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or an unknown feature map.

  Paper: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with
  Linear Attention", 2020, arXiv:2006.16236, equations 16 to 20.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    feature_map: str | FeatureMap = "elu+1",
    normalize: bool = True,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    phi = _feature_map(feature_map)
    check_flag("normalize", normalize)
    F = jax.eval_shape(phi, jax.ShapeDtypeStruct((1, 1, 1, head_dim), jnp.float32)).shape[-1]
    super().__init__(
      d_model,
      num_heads,
      head_dim,
      num_features=F,
      logarithmic=normalize and phi is scaled_exp,
      normalize=normalize,
      expand_v=expand_v,
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.phi = phi

  def features(self, q, k, documents):
    if self.logarithmic:
      return widen(q) * q.shape[-1] ** -0.5, widen(k) * k.shape[-1] ** -0.5
    if self.phi not in EXACT:
      q, k = widen(q), widen(k)
    return self.phi(q), self.phi(k)
