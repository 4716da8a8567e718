"""Linear attention with a feature map."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_positive
from lajax.layers.features import FeatureMap, scaled_exp
from lajax.layers.features import feature_map as _feature_map
from lajax.layers.mixer import Mixer, value_heads, value_width
from lajax.layers.parameters import widen
from lajax.layers.state import Documents
from lajax.ops import linear_attention, normalized_linear_attention

EXACTLY_NORMALIZED = partial(
  normalized_linear_attention, eps=1e-30
)  # features relative to their largest may be that small
LOWEST = -1e30  # the maximum over no keys: finite, so that differences are never NaN


class KernelAttention(Mixer):
  """The shell of attention by features phi of queries and keys: a subclass writes `features`.

      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t) ;  o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    num_features: F, the width of what `features` returns.
    logarithmic: whether `features` returns the logarithms of the features, for those that are exponentials.
    normalize: divide by z . phi(q); without it, o = S^T phi(q).
    expand_v: V / K.
    conv_size: the width of a short convolution on q, k, v; None for none.
    impl, chunk_size: passed on to the op.
    dtype: the dtype of the projections; None for that of the inputs and parameters together.
    param_dtype: the dtype of the parameters.
    rngs: the random streams of the parameters.
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
    H, K, V = value_heads(num_heads, None), head_dim, value_width(head_dim, expand_v)
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

  def features(
    self, q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], documents: Documents
  ) -> tuple[Float[Array, "B T H F"], Float[Array, "B T H F"]]:
    """phi(q) and phi(k), or their logarithms."""
    raise NotImplementedError

  def init_memory(self, batch):
    S = super().init_memory(batch)
    z = jnp.zeros(S.shape[:-1], S.dtype)
    if not self.normalize:
      return S
    return (S, z, z[..., 0]) if self.logarithmic else (S, z)

  def mix(self, p, memory, documents):
    q, k = self.features(p["q"], p["k"], documents)
    if self.logarithmic:
      return self._mix_exp(q, k, p["v"], memory, documents)
    op = normalized_linear_attention if self.normalize else linear_attention
    return self.run(op, q, k, p["v"], scale=1.0, memory=memory, documents=documents)

  def _mix_exp(self, q, k, v, memory, documents):
    """exp features relative to the largest key so far, m: the state scales by exp(m_{t-1} - m_t), a decay, as m grows."""
    before = jnp.zeros_like(k[:, 0, :, 0]) if memory is None else memory[2]
    m, g = running_maximum(k.max(-1), before, documents)
    q = jnp.exp(q - jax.lax.stop_gradient(q.max(-1, keepdims=True)))  # a factor of q cancels
    k = jnp.exp(documents.only_real(k - m[..., None]))
    sums = None if memory is None else memory[:2]
    o, sums = self.run(EXACTLY_NORMALIZED, q, k, v, g, scale=1.0, memory=sums, documents=documents)
    return o, (*sums, jnp.where(documents.length[:, None] > 0, m[:, -1], before))


class LinearAttention(KernelAttention):
  """Attention with a kernel phi(q) . phi(k) in place of exp(q . k), normalised as softmax is.

      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t) ;  o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  `lajax.layers.BidirectionalLinearAttention` is the form that is not causal.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K; the feature map may widen it to F.
    feature_map: "elu+1", "relu", "exp" (of x / sqrt K, computed with a running maximum), "identity", "taylor2", "squares",
      "dpfp", or a function [.. K] -> [.. F] without parameters.
    normalize: divide by z . phi(q); without it, o = S^T phi(q).
    expand_v: V / K.
    conv_size: the width of a short convolution on q, k, v; None (the default) for none.
    impl, chunk_size: passed on to the op.
    dtype: the dtype of the projections; None for that of the inputs and parameters together.
    param_dtype: the dtype of the parameters.
    rngs: the random streams of the parameters.

  Raises:
    ValueError: an option is out of its range, or an unknown feature map.

  Paper: A. Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", 2020,
  arXiv:2006.16236, equations 16 to 20.
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
    check_positive("head_dim", head_dim)
    phi = _feature_map(feature_map)
    F = jax.eval_shape(phi, jax.ShapeDtypeStruct((1, 1, 1, head_dim), param_dtype)).shape[-1]
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
    return self.phi(q), self.phi(k)


def running_maximum(top: Float[Array, "B T H"], before: Float[Array, "B H"], documents: Documents):
  """The largest value of each document up to each token, and the log decay <= 0 of what is kept relative to it."""
  before = jnp.where(documents.carried[:, None] > 0, before, LOWEST)[:, None]
  run = jnp.zeros(top.shape[:2], jnp.int32)
  if documents.ids is not None:
    top = jnp.where(documents.ids[..., None] < 0, LOWEST, top)
    run = jax.lax.cummax(jnp.maximum(documents.ids, 0), axis=1)

  def later(x, y):
    return y[0], jnp.where(x[0] == y[0], jnp.maximum(x[1], y[1]), y[1])

  run = jnp.broadcast_to(run[..., None], top.shape)
  start = (jnp.zeros_like(run[:, :1]), before)
  joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), start, (run, top))
  m = jax.lax.associative_scan(later, joined, axis=1)[1]
  return m[:, 1:], jnp.minimum(m[:, :-1] - m[:, 1:], 0)
