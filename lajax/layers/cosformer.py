"""cosFormer: relu features, weighted by a cosine of the distance."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from lajax._shapes import check_whole
from lajax.layers.linear_attention import KernelAttention
from lajax.layers.parameters import widen


class CosFormer(KernelAttention):
  """Attention with the kernel relu(q_i) . relu(k_j) cos(pi (i - j) / 2M): near tokens weigh more.

      phi(x_i) = [relu(x_i) cos(pi i / 2M), relu(x_i) sin(pi i / 2M)]
      S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t)
      o_t = S_t^T phi(q_t) / (z_t . phi(q_t)) ;  y = o W_o

  Positions i = 0, 1, .. count from each document's start, over all calls. From i = M on, weights
  would be negative: such a token is a ValueError; under jit, where the length cannot be seen, its
  output is NaN.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K; the features are F = 2 K.
    max_length: M, the tokens of the longest document.
    expand_v: V / K.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    impl, chunk_size: of `lajax.normalized_linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or a document is longer than max_length.

  Paper: Z. Qin et al., "cosFormer: Rethinking Softmax in Attention", 2022, arXiv:2202.08791, the
  cos-based re-weighting of its linear form.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    max_length: int = 2048,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("head_dim", head_dim)
    check_whole("max_length", max_length)
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
    self.max_length = max_length

  def features(self, q, k, documents):
    q, k = jax.nn.relu(widen(q)), jax.nn.relu(widen(k))
    angle = documents.position[..., None, None].astype(q.dtype) * (jnp.pi / (2 * self.max_length))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    placed = lambda x: jnp.concatenate([x * cos, x * sin], axis=-1)
    return placed(q), placed(k)

  def mix(self, p, memory, documents):
    self._check_room(documents.position)
    o, memory = super().mix(p, memory, documents)
    return jnp.where((documents.position >= self.max_length)[..., None, None], jnp.nan, o), memory

  def _check_room(self, position) -> None:
    if isinstance(position, Tracer) or not position.size:
      return
    longest = int(position.max()) + 1
    if longest > self.max_length:
      raise ValueError(
        f"a document must have at most max_length = {self.max_length} tokens; got {longest}. "
        f"Make the layer with max_length={longest} or more."
      )
