"""HGRN2: the gates of HGRN on a matrix state."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax.layers.hgrn import bound_value, forget_gate, lower_bound_of
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.ops import linear_attention


class HGRN2(Mixer):
  """Linear attention whose key is what the state forgets, in each key channel.

      S_t = Diag(e^(g_t)) S_{t-1} + k_t v_t^T ;  o_t = K^(-1/2) S_t^T q_t
      e^g = lb + (1 - lb) sigmoid(x W_f), k = 1 - e^g, v = x W_i, q = silu(x W_q)
      y = RMSNorm(o) W_o, the norm over all heads

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K, how much wider than HGRN's the state is.
    lower_bound: lb, a number in [0, 1), or an array [H K] of such, as `hgrn_lower_bounds` gives for
      the layers of a model. An array is kept in `layer.lower_bound`, an `nnx.Variable` that is no
      `nnx.Param`; a model that learns the bounds sets it before each call: `layer.lower_bound[...]
      = hgrn_lower_bounds(logits)[l]`.
    expand_v: V / K.
    conv_size: width of a short convolution, without activation, on x W_q, x W_f, x W_i; None (the
      default) for none.
    use_gate: multiply the normed outputs by silu(x W_g). (The paper has none: q is its output
      gate.)
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: Z. Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", 2024, arXiv:2404.07904,
  section 3.2.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    lower_bound: float | Float[Array, "H K"] = 0.0,
    expand_v: float = 1.0,
    conv_size: int | None = None,
    use_gate: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    projections = with_gate({"q": (H, K), "f": (H, K), "i": (H, V)}, use_gate, H * V)
    super().__init__(
      d_model,
      projections,
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      conv_on=("q", "f", "i"),
      conv_activation=None,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.lower_bound = lower_bound_of(lower_bound, (H, K))
    self.norm = self.rms_norm(H * V, norm_eps)

  def mix(self, p, memory, documents):
    g, k = forget_gate(p["f"], bound_value(self.lower_bound, p["f"]))
    o, memory = self.apply_op(
      linear_attention, jax.nn.silu(p["q"]), k, p["i"], g, memory=memory, documents=documents
    )
    return self.norm(jax.lax.collapse(o, 2), p.get("gate")), memory
