"""Forgetting attention: softmax attention with a forget gate (FoX)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from lajax._numerics import NEGLIGIBLE, promoted
from lajax._shapes import check_flag, check_number, check_whole
from lajax.layers.kv_cache import CachedArray, CachedMixer, Context, gated, key_heads
from lajax.layers.parameters import aligned, widen
from lajax.layers.state import CallDocuments
from lajax.ops import attention
from lajax.recurrence import attend


class ForgettingAttention(CachedMixer):
  """Causal softmax attention in which a token counts less, the more was forgotten since.

      o_t = sum_{j <= t} softmax_j(q_t . k_j / sqrt K + sum_{j < l <= t} log f_l) v_j
      f = sigmoid(x W_f + b_f) ;  y = o W_o, or (o * sigmoid(x W_g)) W_o

  The state holds the keys, values and log forget gates of the current document, `state.memory =
  (k, v, log_f)`, with S = `max_length` places. A token that does not fit is a ValueError; under
  jit, where the length cannot be seen, its output is NaN.

  Args:
    d_model: D.
    num_heads: H, of the queries and the gates.
    head_dim: K.
    num_kv_heads: HK, of the keys and values, a divisor of H; None for H.
    max_length: tokens of a document that the cache holds; a longer first call makes room for all.
    qk_norm: RMSNorm on the queries and keys of each head.
    output_gate: multiply the outputs by sigmoid(x W_g).
    conv_size: width of short convolutions, without activation, on q, k, v; None for none.
    norm_eps: of qk_norm.
    impl: of `lajax.attention`.
    dtype: of the projections and the cached keys and values; None for that of the inputs and
      parameters together. Gates are float32 at least.
    param_dtype: of the parameters; b_f and those of norms are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range, or num_kv_heads does not divide num_heads.

  Paper: Z. Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025,
  arXiv:2503.02130, equation 3 and section 3.
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
    H, K = check_whole("num_heads", num_heads), check_whole("head_dim", head_dim)
    HK = key_heads(H, num_kv_heads)
    self.max_length = check_whole("max_length", max_length)
    check_number("norm_eps", norm_eps, 0.0)
    check_flag("qk_norm", qk_norm)
    check_flag("output_gate", output_gate)
    projections = {"q": (H, K), "k": (HK, K), "v": (HK, K), "f": (H,)}
    if output_gate:
      projections["gate"] = (H, K)
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
    norm = lambda: self.rms_norm(K, norm_eps) if qk_norm else None
    self.q_norm, self.k_norm = norm(), norm()
    self.f_bias = nnx.Param(jnp.zeros(H, self.gate_dtype))
    self.num_heads = H

  @property
  def cached(self):
    keys = [CachedArray(name, "HK K", self.memory_shape) for name in ("k", "v")]
    return *keys, CachedArray("log_f", "H 1", (self.num_heads, 1), wide=True)

  def mix(self, p, memory, documents):
    q, k, v = p["q"], p["k"], p["v"]
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    f = widen(p["f"])
    log_f = documents.blank_padding(jax.nn.log_sigmoid(f + aligned(self.f_bias[...], f)))
    new = (k, v, log_f[..., None])
    if memory is None:
      o = attention(q, k, v, log_forget=log_f, segment_ids=documents.ids, impl=self.impl)
      memory = self.begin(new, documents)
    else:
      context = self.extend(memory, new, documents)
      o, memory = self._read(q, context, documents), context.cache
    return gated(o, p.get("gate")), memory

  def _read(self, q: Float[Array, "B T H K"], context: Context, documents: CallDocuments):
    """Outputs of the call's queries over cache and call together."""
    k, v, log_f = context.arrays
    T, S, dtype = q.shape[1], k.shape[1], q.dtype
    empty = (context.position < 0)[..., None]  # inside an interval of sums: the gate is 0 there
    log_f = jnp.where(empty, jnp.zeros((), log_f.dtype), log_f[..., 0])
    if T == 1:  # one query: the sum of the gates after each key is a bias of the key
      q, keys = _with_bias(q, k, log_f)
      o = self.attend_cached(q, keys, v, context, documents, scale=1.0)
      return context.nan_if_lost(o.astype(dtype))
    # The sums of gates run over cache and call together. So queries that read nothing stand in
    # front, one for each of the cache's tokens: whole blocks of them cost nothing.
    ahead = ((0, 0), (S - T, 0))
    q = jnp.pad(q, (*ahead, (0, 0), (0, 0)))
    position = jnp.pad(documents.position, ahead)
    document = jnp.pad(context.q_document, ahead, constant_values=-1)
    o = attend(
      q,
      k,
      v,
      log_forget=log_f,
      q_positions=position,
      k_positions=context.position,
      q_segments=document,
      k_segments=context.document,
      impl=self.cached_impl,
    )
    return context.nan_if_lost(o[:, -T:].astype(dtype))


def _with_bias(
  q: Float[Array, "B 1 H K"], k: Float[Array, "B S HK K"], log_f: Float[Array, "B S H"]
):
  """Returns queries and keys with products q . k / sqrt K + the sum of the gates after the key.

  They are wider by one channel for each of the G heads that share a key. The keys are in two parts.
  """
  (B, S, HK, K), H = k.shape, q.shape[2]
  G, dtype = H // HK, promoted(q.dtype, k.dtype, log_f.dtype)
  after = lax.cumsum(log_f, axis=1, reverse=True)[:, 1:]
  # Finite, since the other heads' channel multiplies the bias by 0.
  bias = jnp.maximum(jnp.pad(after, ((0, 0), (0, 1), (0, 0))), NEGLIGIBLE).astype(dtype)
  q = q.astype(dtype) * K**-0.5
  pick = jnp.broadcast_to(np.tile(np.eye(G), (HK, 1)).astype(dtype), (B, 1, H, G))
  return jnp.concatenate([q, pick], axis=-1), (k.astype(dtype), bias.reshape(B, S, HK, G))
