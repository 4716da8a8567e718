"""Softmax attention with a key-value cache: the baseline of the linear mixers, and their partner in hybrid models."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_positive
from lajax.layers.kv_cache import CachedMixer
from lajax.layers.parameters import GatedRMSNorm, check_rotary, rotate, widen
from lajax.layers.state import Documents
from lajax.ops import attention
from lajax.recurrence import attend


class SoftmaxAttention(CachedMixer):
  """Causal softmax attention, with the same state protocol as the linear mixers.

      o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt K) v_j ;  y = o W_o, or (o * sigmoid(x W_g)) W_o

  The state holds the keys and values of the current document, `state.memory = (k, v)`, each [B S HK K], and their number,
  `state.length`. S is `max_length`, or `window` where that is smaller: the cache then is a ring, of constant size.
  Where the cache is full and the window does not allow for forgetting, a further token is a ValueError; under jit, where
  the length cannot be seen, its output is NaN.

  Args:
    d_model: D.
    num_heads: H, of the queries.
    head_dim: K.
    num_kv_heads: HK, of the keys and values, a divisor of H; None for H. (1: multi-query attention.)
    window: how many of the last tokens, itself included, a token reads; None for all.
    max_length: how many tokens of a document the cache holds; a first call with more makes a cache for as many.
    rope_theta: the base of rotary positions, counted from each document's start; None (the default) for none.
    qk_norm: RMSNorm on the queries and keys of each head.
    output_gate: multiply the outputs by sigmoid(x W_g).
    sink: a learned logit a head that takes part in the softmax without a value.
    conv_size: the width of a short convolution, without activation, on q, k, v; None (the default) for none.
    norm_eps: of qk_norm.
    impl: passed on to `lajax.attention`.
    dtype: the dtype of the projections and the cache; None for that of the inputs and parameters together, and of the
      parameters for the cache.
    param_dtype: the dtype of the parameters.
    rngs: the random streams of the parameters.

  Raises:
    ValueError: an option is out of its range, or num_kv_heads does not divide num_heads.

  Paper: A. Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1; grouped heads: J. Ainslie et
  al., "GQA", 2023, arXiv:2305.13245, section 2.2.
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
    qk_norm: bool = False,
    output_gate: bool = False,
    sink: bool = False,
    conv_size: int | None = None,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    for name, value in {
      "num_heads": num_heads,
      "head_dim": head_dim,
      "num_kv_heads": num_kv_heads,
      "window": window,
    }.items():
      check_positive(name, value)
    check_positive("max_length", max_length)
    check_rotary(rope_theta, head_dim)
    H, HK, K = num_heads, num_kv_heads or num_heads, head_dim
    if H % HK:
      raise ValueError(f"`num_kv_heads` must divide num_heads = {H}; got {HK}.")
    projections = {"q": (H, K), "k": (HK, K), "v": (HK, K)} | (
      {"gate": (H, K)} if output_gate else {}
    )
    super().__init__(
      d_model,
      projections,
      inner=H * K,
      memory=(HK, K),
      conv_size=conv_size,
      conv_activation=None,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    norm = lambda: (
      GatedRMSNorm(K, eps=norm_eps, impl=impl, param_dtype=self.gate_dtype) if qk_norm else None
    )
    self.q_norm, self.k_norm = norm(), norm()
    self.sink = nnx.Param(jnp.zeros(H, self.gate_dtype)) if sink else None
    self.window, self.max_length, self.rope_theta = window, max_length, rope_theta

  @property
  def places(self):
    return ((self.memory_shape, self.cache_dtype),) * 2

  def mix(self, p, memory, documents):
    q, k, v = p["q"], p["k"], p["v"]
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    if self.rope_theta is not None:
      q, k = (
        rotate(q, documents.position, self.rope_theta),
        rotate(k, documents.position, self.rope_theta),
      )
    sink = None if self.sink is None else self.sink[...]
    options = {"window": self.window, "sink": sink}
    if memory is None:
      o = attention(q, k, v, segment_ids=documents.ids, impl=self.impl, **options)
      memory = self.begin((k, v), documents)
    else:
      o, memory = self._with_cache(q, k, v, memory, documents, options)
    if "gate" in p:
      o = (o * jax.nn.sigmoid(widen(p["gate"]))).astype(o.dtype)
    return o, memory

  def _with_cache(self, q, k, v, cache, documents: Documents, options):
    seen = self.extend(cache, (k, v), documents)
    keys, values = seen.arrays
    o = attend(
      q,
      keys.astype(q.dtype),
      values.astype(v.dtype),
      q_positions=documents.position,
      k_positions=seen.position,
      q_segments=seen.q_segment,
      k_segments=seen.segment,
      impl="chunked" if self.impl in ("auto", "pallas") else self.impl,
      **options,
    )
    return seen.only_kept(o), seen.cache
