"""Gated linear attention (GLA)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_number, check_whole
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import Linear, widen
from lajax.ops import linear_attention


class GLA(Mixer):
  """Linear attention whose state decays by a data-dependent amount in each key channel.

      S_t = Diag(e^(g_t)) S_{t-1} + k_t v_t^T ;  o_t = K^(-1/2) S_t^T q_t
      g = logsigmoid(x W_1 W_2 + b) / 16,  y = (RMSNorm(o) * silu(x W_g)) W_o

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K. (The paper's models have V = 2 K.)
    gate_rank: the rank of the projection to the decay.
    gate_normalizer: what the logsigmoid is divided by: the larger, the slower the state forgets.
    conv_size: width of a short convolution on q, k, v; None (the default) for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: S. Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training",
  2023, arXiv:2312.06635, equation 3 and section 4.4.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    gate_rank: int = 16,
    gate_normalizer: float = 16.0,
    conv_size: int | None = None,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_whole("gate_rank", gate_rank)
    check_number("gate_normalizer", gate_normalizer, above=0)
    projections = with_gate(
      {"q": (H, K), "k": (H, K), "v": (H, V), "f": (gate_rank,)}, use_gate, H, V
    )
    super().__init__(
      d_model,
      projections,
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.decay_proj = Linear(gate_rank, H * K, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.norm = self.rms_norm(V, norm_eps)
    self.gate_normalizer = gate_normalizer

  def mix(self, p, memory, documents):
    f = widen(self.decay_proj(p["f"])).reshape(p["k"].shape)
    g = jax.nn.log_sigmoid(f) / self.gate_normalizer
    o, memory = self.apply_op(
      linear_attention, p["q"], p["k"], p["v"], g, memory=memory, documents=documents
    )
    return self.norm(o, p.get("gate")), memory
