"""Linear attention with a feature map."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax.layers.features import FeatureMap, scaled_exp
from lajax.layers.features import feature_map as _feature_map
from lajax.layers.mixer import Mixer, value_heads, value_width
from lajax.layers.parameters import widen
from lajax.layers.state import Documents
from lajax.ops import linear_attention, normalized_linear_attention

LOWEST = -1e30  # the maximum over no keys: finite, so that differences are never NaN


class LinearAttention(Mixer):
  """Attention with a kernel phi(q) . phi(k) in place of exp(q . k), normalised as softmax is.

      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t) ;  o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K; the feature map may widen it to F.
    feature_map: "elu+1", "relu", "exp" (of x / sqrt K, computed with a running maximum), "identity", "taylor2", or a
      function [.. K] -> [.. F] without parameters.
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
    H, K, V = value_heads(num_heads, None), head_dim, value_width(head_dim, expand_v)
    self.phi = _feature_map(feature_map)
    F = jax.eval_shape(self.phi, jax.ShapeDtypeStruct((1, 1, H, K), param_dtype)).shape[-1]
    super().__init__(
      d_model, {"q": (H, K), "k": (H, K), "v": (H, V)}, inner=H * V, memory=(H, F, V), conv_size=conv_size,
      impl=impl, chunk_size=chunk_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
    )  # fmt: skip
    self.normalize = normalize

  def init_memory(self, batch):
    S = super().init_memory(batch)
    z = jnp.zeros(S.shape[:-1], S.dtype)
    if not self.normalize:
      return S
    return (S, z, z[..., 0]) if self.phi is scaled_exp else (S, z)

  def mix(self, p, memory, documents):
    if not self.normalize:
      return self.run(linear_attention, self.phi(p["q"]), self.phi(p["k"]), p["v"], scale=1.0, memory=memory, documents=documents)
    if self.phi is scaled_exp:
      return self._mix_exp(p, memory, documents)
    q, k = self.phi(p["q"]), self.phi(p["k"])
    return self.run(normalized_linear_attention, q, k, p["v"], scale=1.0, memory=memory, documents=documents)

  def _mix_exp(self, p, memory, documents):
    """exp features relative to the largest key so far, m: the state scales by exp(m_{t-1} - m_t), a decay, as m grows."""
    q, k = (widen(p[name]) * p[name].shape[-1] ** -0.5 for name in "qk")
    before = jnp.zeros_like(k[:, 0, :, 0]) if memory is None else memory[2]
    m, g = running_maximum(k.max(-1), before, documents)
    q = jnp.exp(q - jax.lax.stop_gradient(q.max(-1, keepdims=True)))  # a factor of q cancels
    k = jnp.exp(documents.only_real(k - m[..., None]))
    sums = None if memory is None else memory[:2]
    o, sums = self.run(normalized_linear_attention, q, k, p["v"], g, scale=1.0, memory=sums, documents=documents)
    return o, (*sums, jnp.where(documents.length[:, None] > 0, m[:, -1], before))


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
