"""RWKV-6 (Finch)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_whole
from lajax.layers.mixer import value_heads, value_width
from lajax.layers.parameters import Linear, aligned, widen
from lajax.layers.token_shift import HeadNorm, LowRank, TokenShiftMixer
from lajax.ops import linear_attention

SHIFTED = ("w", "k", "v", "r", "gate")


class RWKV6(TokenShiftMixer):
  """Linear attention with one decay per channel, and a bonus for the token itself.

      o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t ;  S_t = Diag(e^(w_t)) S_{t-1} + k_t v_t^T
      w = -exp(b_w + tanh(x_w W_1) W_2) ;  y = (LayerNorm_head(o) * silu(x_g W_g)) W_o
      x_i = x + (x' - x) (mu_i + m_i), x' the token before, m = tanh((x + (x' - x) mu_x) A) B

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    decay_rank, shift_rank: the ranks of W_1 W_2, and of A B for each of the five inputs.
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.linear_attention`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; b_w, u and the norm's are float32 at least.
    rngs: random streams of the initial parameters. b_w from -6 to -1 over the channels of a head.

  Raises:
    ValueError: an option is out of its range.

  Paper: B. Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence",
  2024, arXiv:2404.05892, the time mixing of Finch.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    decay_rank: int = 64,
    shift_rank: int = 32,
    norm_eps: float = 64e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_whole("decay_rank", decay_rank)
    check_whole("shift_rank", shift_rank)
    super().__init__(
      d_model,
      {"k": (H, K), "v": (H, V), "r": (H, K), "gate": (H, V)},
      inner=H * V,
      memory=(H, K, V),
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.mu_x = nnx.Param(jnp.full(d_model, 0.5, param_dtype))
    self.mu = nnx.Param(jnp.full((len(SHIFTED), d_model), 0.5, param_dtype))
    self.shift_down = Linear(d_model, len(SHIFTED) * shift_rank, use_bias=False, **options)
    self.shift_up = nnx.Param(
      0.01 * jax.random.normal(rngs.params(), (len(SHIFTED), shift_rank, d_model), param_dtype)
    )
    first = jnp.tile(jnp.linspace(-6.0, -1.0, K, dtype=self.gate_dtype), H)
    self.decay = LowRank(d_model, decay_rank, H * K, jnp.tanh, bias=first, **options)
    self.bonus = nnx.Param(0.5 * jax.random.normal(rngs.params(), (H, K), self.gate_dtype))
    self.norm = HeadNorm(H, V, eps=norm_eps, param_dtype=self.gate_dtype)

  def inputs(self, x, change):
    wide, change = widen(x), widen(change)
    towards = lambda mu: (wide + change * mu).astype(x.dtype)
    m = jnp.tanh(self.shift_down(towards(aligned(self.mu_x[...], wide))))
    m = m.reshape(*m.shape[:2], len(SHIFTED), m.shape[-1] // len(SHIFTED))
    m = widen(jnp.einsum("btir,ird->ibtd", m, self.shift_up[...].astype(m.dtype)))
    mu = self.mu[...].astype(wide.dtype)[:, None, None]
    return {name: towards(mu[n] + m[n]) for n, name in enumerate(SHIFTED)}

  def mix(self, p, memory, documents):
    w = -jnp.exp(self.decay(p["w"])).reshape(p["k"].shape)
    op = functools.partial(linear_attention, bonus=widen(self.bonus[...]))
    o, memory = self.apply_op(
      op, p["r"], p["k"], p["v"], w, scale=1.0, memory=memory, documents=documents
    )
    return self.norm(o) * jax.nn.silu(p["gate"]), memory
