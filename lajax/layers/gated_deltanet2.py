"""Gated DeltaNet 2: erase and write gates per channel."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_positive
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import Linear, log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops import delta_rule


class GatedDeltaNet2(Mixer):
  """The gated delta rule with a strength of erasing per key channel, of writing per value channel.

      S_t = Diag(e^(g_t)) S_{t-1} ;  S_t += k_t (w_t * v_t - S_t^T (b_t * k_t))^T
      o_t = K^(-1/2) S_t^T q_t
      b = sigmoid(x W_b) [H K], w = sigmoid(x W_w) [H V]
      g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias)
      y = (RMSNorm(o) * silu(x W_g)) W_o,  q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    gate_rank: the rank of the projection to the decay; None for V.
    conv_size: width of the short convolution on q, k, v; None for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.delta_rule`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; A_log [H], dt_bias [H K] and the norm's weight are float32 at
      least.
    rngs: random streams of the initial parameters. A ~ U(1, 16), softplus(dt_bias) log-uniform in
      [1e-3, 1e-1].

  Raises:
    ValueError: an option is out of its range.

  Paper: the parameterisation of Kimi Team, "Kimi Linear", 2025, arXiv:2510.26692, equation 1, with
  its write strength beta split in two, as Gated DeltaNet 2 does.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    gate_rank: int | None = None,
    conv_size: int | None = 4,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_positive("gate_rank", gate_rank)
    R = V if gate_rank is None else gate_rank
    direct = {"q": (H, K), "k": (H, K), "v": (H, V), "erase": (H, K), "write": (H, V), "f": (R,)}
    projections = with_gate(direct, use_gate, H, V)
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
    self.decay_proj = Linear(
      R, H * K, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.A_log = nnx.Param(log_uniform_rate(rngs.params(), (H,), 1.0, 16.0, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (H, K), self.gate_dtype))
    self.norm = self.rms_norm(V, norm_eps)

  def mix(self, p, memory, documents):
    q, k = l2_normalize(p["q"]), l2_normalize(p["k"])
    erase, write = (jax.nn.sigmoid(widen(p[name])) for name in ("erase", "write"))
    f = self.decay_proj(p["f"]).reshape(k.shape)
    g = softplus_decay(f, self.A_log[...][:, None], self.dt_bias[...])
    op = functools.partial(delta_rule, erase=erase, write=write)
    o, memory = self.apply_op(op, q, k, p["v"], None, g, memory=memory, documents=documents)
    return self.norm(o, p.get("gate")), memory
