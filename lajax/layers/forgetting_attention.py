"""Forgetting attention: softmax attention with a forget gate (FoX)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from lajax._shapes import check_positive
from lajax.layers.kv_cache import CachedMixer, Seen
from lajax.layers.parameters import GatedRMSNorm, widen
from lajax.layers.state import Documents
from lajax.ops import attention
from lajax.recurrence import attend

NEGLIGIBLE = -1e30  # a bias that removes a token: finite, so that a product with 0 is 0


class ForgettingAttention(CachedMixer):
  """Causal softmax attention in which a token counts the less, the more was forgotten since.

      o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt K + sum_{j < l <= t} log f_l) v_j ;  f = sigmoid(x W_f + b_f)
      y = o W_o, or (o * sigmoid(x W_g)) W_o

  The state holds the keys, values and log forget gates of the current document, `state.memory = (k, v, log_f)`, with S =
  `max_length` places. Where it is full, a further token is a ValueError; under jit, where the length cannot be seen, its
  output is NaN.

  Args:
    d_model: D.
    num_heads: H, of the queries and the gates.
    head_dim: K.
    num_kv_heads: HK, of the keys and values, a divisor of H; None for H.
    max_length: how many tokens of a document the cache holds; a first call with more makes a cache for as many.
    qk_norm: RMSNorm on the queries and keys of each head.
    output_gate: multiply the outputs by sigmoid(x W_g).
    conv_size: the width of a short convolution, without activation, on q, k, v; None (the default) for none.
    norm_eps: of qk_norm.
    impl: passed on to `lajax.attention`.
    dtype: the dtype of the projections and the cached keys and values; None for that of the inputs and parameters together,
      and of the parameters for the cache. Gates are float32 at least.
    param_dtype: the dtype of the parameters; b_f is float32 at least.
    rngs: the random streams of the parameters.

  Raises:
    ValueError: an option is out of its range, or num_kv_heads does not divide num_heads.

  Paper: Z. Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025, arXiv:2503.02130, equation 3
  and section 3.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_kv_heads: int | None = None,
    max_length: int = 2048,
    qk_norm: bool = False,
    output_gate: bool = False,
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
    }.items():
      check_positive(name, value)
    check_positive("max_length", max_length)
    H, HK, K = num_heads, num_kv_heads or num_heads, head_dim
    if H % HK:
      raise ValueError(
        f"`num_kv_heads` must divide num_heads = {H}; got {HK}. Take a divisor of it."
      )
    projections = {"q": (H, K), "k": (HK, K), "v": (HK, K), "f": (H,)} | (
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
    self.f_bias = nnx.Param(jnp.zeros(H, self.gate_dtype))
    self.num_heads, self.max_length = H, max_length

  @property
  def places(self):
    return (*((self.memory_shape, self.cache_dtype),) * 2, ((self.num_heads, 1), self.state_dtype))

  def mix(self, p, memory, documents):
    q, k, v = p["q"], p["k"], p["v"]
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    log_f = documents.only_real(jax.nn.log_sigmoid(widen(p["f"]) + self.f_bias[...]))
    new = (k, v, log_f[..., None])
    if memory is None:
      o = attention(q, k, v, log_forget=log_f, segment_ids=documents.ids, impl=self.impl)
      memory = self.begin(new, documents)
    else:
      seen = self.extend(memory, new, documents)
      o, memory = seen.only_kept(self._read(q, seen, documents)), seen.cache
    if "gate" in p:
      o = (o * jax.nn.sigmoid(widen(p["gate"]))).astype(o.dtype)
    return o, memory

  def _read(self, q: Float[Array, "B T H K"], seen: Seen, documents: Documents):
    """The call's queries over all keys, in the order of the document."""
    k, v, log_f = seen.arrays
    T, S = q.shape[1], k.shape[1]
    v = v.astype(q.dtype)
    log_f = jnp.where(
      (seen.position < 0)[..., None], 0, log_f[..., 0]
    )  # an empty place stands in an interval: no gradient
    position, segment, gates, scale = documents.position, seen.q_segment, log_f, None
    if T == 1:  # one query: the sum of the gates after each key is a bias of the key
      (q, k), gates, scale = _with_bias(q, k, log_f), None, 1.0
    else:
      # The sums are over intervals of the cache and the call together. So the cache's tokens stand among the queries too, as
      # ones that read nothing: blocks of them cost nothing.
      ahead = ((0, 0), (S - T, 0))
      q, k = jnp.pad(q, (*ahead, (0, 0), (0, 0))), k.astype(q.dtype)
      position, segment = jnp.pad(position, ahead), jnp.pad(segment, ahead, constant_values=-1)
    o = attend(
      q,
      k,
      v,
      log_forget=gates,
      scale=scale,
      q_positions=position,
      k_positions=seen.position,
      q_segments=segment,
      k_segments=seen.segment,
      impl="chunked" if self.impl in ("auto", "pallas") else self.impl,
    )
    return o[:, -T:]


def _with_bias(
  q: Float[Array, "B 1 H K"], k: Float[Array, "B S HK K"], log_f: Float[Array, "B S H"]
):
  """Queries and keys, widened by one channel for each head that shares a key, with products q . k / sqrt K + bias."""
  (B, S, HK, K), H = k.shape, q.shape[2]
  G = H // HK
  after = lax.cumsum(log_f, axis=1, reverse=True)[:, 1:]
  bias = jnp.maximum(jnp.pad(after, ((0, 0), (0, 1), (0, 0))), NEGLIGIBLE)
  q = widen(q) * K**-0.5
  pick = jnp.broadcast_to(jnp.tile(jnp.eye(G, dtype=q.dtype), (HK, 1)), (B, 1, H, G))
  return jnp.concatenate([q, pick], axis=-1), jnp.concatenate(
    [widen(k), bias.reshape(B, S, HK, G)], axis=-1
  )
