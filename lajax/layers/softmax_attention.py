"""Softmax attention with a key-value cache: the baseline, and the partner in hybrid models."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_flag, check_number, check_positive, check_whole
from lajax.layers.kv_cache import CachedArray, CachedMixer, Context, gated, key_heads
from lajax.layers.parameters import GatedRMSNorm, check_rotary, rotate, widen
from lajax.layers.state import CallDocuments
from lajax.ops import attention


class SoftmaxAttention(CachedMixer):
  """Causal softmax attention, with the same state protocol as the linear mixers.

      o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt K) v_j ;  y = o W_o, or (o * sigmoid(x W_g)) W_o

  The state holds the keys and values of the current document, `state.memory = (k, v)`, each
  [B S HK K], and their number, `state.length`. S is `max_length`. With a smaller `window`, S is the
  window, and the cache is a ring of constant size. Without one, a token that does not fit is a
  ValueError; under jit, where the length cannot be seen, its output is NaN.

  Args:
    d_model: D.
    num_heads: H, of the queries.
    head_dim: K.
    num_kv_heads: HK, of the keys and values, a divisor of H; None for H; 1 is multi-query.
    window: how many of the last tokens, itself included, a token reads; None for all.
    max_length: tokens of a document that the cache holds; a longer first call makes room for all.
    rope_theta: base of rotary positions, counted from each document's start; None for none.
    rope_dim: how many channels of a head, the first ones, have rotary positions; None for all.
    qk_norm: RMSNorm on the queries and keys of each head.
    qk_norm_offset: multiply by 1 + weight in these norms, as in Gemma.
    qk_norm_whole: norm the channels of all heads together, as in OLMo.
    key_multiplier: factor of the keys.
    output_gate: multiply the outputs by sigmoid(x W_g).
    sink: one learned logit per head that takes part in the softmax without a value.
    conv_size: width of short convolutions, without activation, on q, k, v; None for none.
    use_bias: biases on all projections.
    out_bias: a bias on the output projection; None for `use_bias`.
    scale: factor of the scores; None for K^(-1/2).
    norm_eps: of qk_norm.
    impl: of `lajax.attention`.
    dtype: of the projections and the cache; None for that of the inputs and parameters together.
    param_dtype: of the parameters; those of norms and the sink are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or num_kv_heads does not divide num_heads.

  Paper: A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1; grouped
  heads: J. Ainslie et al., "GQA", 2023, arXiv:2305.13245, section 2.2.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_kv_heads: int | None = None,
    window: int | None = None,
    max_length: int = 2048,
    rope_theta: float | None = None,
    rope_dim: int | None = None,
    qk_norm: bool = False,
    qk_norm_offset: bool = False,
    qk_norm_whole: bool = False,
    key_multiplier: float = 1.0,
    output_gate: bool = False,
    sink: bool = False,
    conv_size: int | None = None,
    use_bias: bool = False,
    out_bias: bool | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K = check_whole("num_heads", num_heads), check_whole("head_dim", head_dim)
    HK = key_heads(H, num_kv_heads)
    self.window = check_positive("window", window)
    self.max_length = check_whole("max_length", max_length)
    self.rope_dim = check_positive("rope_dim", rope_dim, head_dim) or head_dim
    check_rotary(rope_theta, self.rope_dim)
    check_number("norm_eps", norm_eps, 0.0)
    check_flag("qk_norm", qk_norm)
    check_flag("qk_norm_offset", qk_norm_offset)
    check_flag("qk_norm_whole", qk_norm_whole)
    check_number("key_multiplier", key_multiplier)
    check_flag("output_gate", output_gate)
    check_flag("sink", sink)
    projections = {"q": (H, K), "k": (HK, K), "v": (HK, K)}
    if output_gate:
      projections["gate"] = (H, K)
    super().__init__(
      d_model,
      projections,
      inner=H * K,
      memory=(HK, K),
      conv_size=conv_size,
      conv_activation=None,
      use_bias=use_bias,
      out_bias=out_bias,
      multipliers={"k": key_multiplier},
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

    def norm(heads: int) -> GatedRMSNorm | None:
      width = heads * K if qk_norm_whole else K
      return self.rms_norm(width, norm_eps, unit_offset=qk_norm_offset) if qk_norm else None

    self.q_norm, self.k_norm = norm(H), norm(HK)
    self.sink = nnx.Param(jnp.zeros(H, self.gate_dtype)) if sink else None
    self.rope_theta = rope_theta
    self.scale = None if scale is None else check_number("scale", scale)

  @property
  def cached(self):
    return tuple(CachedArray(name, "HK K", self.memory_shape) for name in ("k", "v"))

  def mix(self, p, memory, documents):
    q, k, v = p["q"], p["k"], p["v"]
    if self.q_norm is not None and self.k_norm is not None:
      q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
    if self.rope_theta is not None:
      options = (documents.position, self.rope_theta, self.rope_dim)
      q, k = rotate(q, *options), rotate(k, *options)
    sink = None if self.sink is None else widen(self.sink[...])
    options = {"window": self.window, "sink": sink, "scale": self.scale}
    if memory is None:
      o = attention(q, k, v, segment_ids=documents.ids, impl=self.impl, **options)
      memory = self.begin((k, v), documents)
    else:
      context = self.extend(memory, (k, v), documents)
      o, memory = self._read(q, context, documents, options), context.cache
    return gated(o, p.get("gate")), memory

  def _read(self, q, context: Context, documents: CallDocuments, options):
    """Outputs of the call's queries over cache and call together."""
    keys, values = context.arrays
    o = self.attend_cached(q, (keys,), values, context, documents, **options)
    return context.nan_if_lost(o.astype(q.dtype))


def _normed(norm: GatedRMSNorm, x: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
  """Returns x, normed head by head, or over all heads if the norm is as wide."""
  return norm(x) if norm.width == x.shape[-1] else norm(jax.lax.collapse(x, 2)).reshape(x.shape)
