"""RWKV-7 (Goose)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._numerics import l2_normalize
from lajax._shapes import check_whole
from lajax.layers.mixer import value_heads, value_width
from lajax.layers.parameters import Linear, aligned, widen
from lajax.layers.token_shift import HeadNorm, LowRank, TokenShiftMixer
from lajax.ops import dplr

SHIFTED = ("r", "w", "k", "v", "iclr", "gate")
SLOWEST = -0.606531  # -exp(-1/2): the strongest log decay of a token


class RWKV7(TokenShiftMixer):
  """A generalised delta rule: removal keys, in-context learning rates and decays per channel.

      S_t = Diag(e^(w_t)) S_{t-1} + (kappa_t * a_t) (S_{t-1}^T (-kappa_t))^T + k~_t v_t^T
      o_t = S_t^T r_t
      w = -e^(-1/2) sigmoid(b_w + tanh(x_w W_1) W_2), a = sigmoid(b_a + x_a A_1 A_2)
      kappa = l2norm(k * kk), k~ = k * (1 + (a - 1) * ka)
      y = ((LayerNorm_head(o) + (r . (rk * k~)) v) * sigmoid(x_g G_1) G_2) W_o
      x_i = x + (x' - x) mu_i, x' the token before

  The mixing of values with those of the first layer is left to the model.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    decay_rank, iclr_rank, gate_rank: the ranks of W_1 W_2, A_1 A_2 and G_1 G_2.
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.dplr`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; b_w, b_a, kk, ka, rk and the norm's are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: B. Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025,
  arXiv:2503.14456, its time mixing.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    decay_rank: int = 64,
    iclr_rank: int = 64,
    gate_rank: int = 128,
    norm_eps: float = 64e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_whole("decay_rank", decay_rank)
    check_whole("iclr_rank", iclr_rank)
    check_whole("gate_rank", gate_rank)
    super().__init__(
      d_model,
      {"r": (H, K), "k": (H, K), "v": (H, V)},
      inner=H * V,
      memory=(H, K, V),
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.mu = nnx.Param(jnp.full((len(SHIFTED), d_model), 0.5, param_dtype))
    first = jnp.tile(jnp.linspace(-6.0, 1.0, K, dtype=self.gate_dtype), H)
    self.decay = LowRank(d_model, decay_rank, H * K, jnp.tanh, bias=first, **options)
    self.iclr = LowRank(
      d_model, iclr_rank, H * K, bias=jnp.zeros(H * K, self.gate_dtype), **options
    )
    self.gate_down = Linear(d_model, gate_rank, use_bias=False, **options)
    self.gate_up = Linear(gate_rank, H * V, use_bias=False, **options)
    self.removal = nnx.Param(jnp.full((H, K), 0.85, self.gate_dtype))  # kk
    self.replacement = nnx.Param(jnp.ones((H, K), self.gate_dtype))  # ka
    self.own = nnx.Param(jnp.zeros((H, K), self.gate_dtype))  # rk
    self.norm = HeadNorm(H, V, eps=norm_eps, param_dtype=self.gate_dtype)

  def inputs(self, x, change):
    mu = self.mu[...].astype(widen(x).dtype)[:, None, None]
    towards = lambda mu: (widen(x) + widen(change) * mu).astype(x.dtype)
    return {name: towards(mu[n]) for n, name in enumerate(SHIFTED)}

  def mix(self, p, memory, documents):
    r, k, v = p["r"], widen(p["k"]), p["v"]
    w = SLOWEST * jax.nn.sigmoid(self.decay(p["w"])).reshape(k.shape)
    a = jax.nn.sigmoid(self.iclr(p["iclr"])).reshape(k.shape)
    kappa = l2_normalize(k * aligned(self.removal[...], k))
    k = k * (1 + (a - 1) * aligned(self.replacement[...], k))
    o, memory = self.apply_op(
      dplr, r, k, v, -kappa, kappa * a, w, memory=memory, documents=documents, scale=1.0
    )
    own = (widen(r) * k * aligned(self.own[...], k)).sum(-1, keepdims=True) * widen(v)
    gate = self.gate_up(jax.nn.sigmoid(self.gate_down(p["gate"]))).reshape(o.shape)
    return ((widen(self.norm(o)) + own) * widen(gate)).astype(o.dtype), memory
