"""Multi-head latent attention (MLA)."""

import functools
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check_flag, check_option, check_positive, check_whole
from lajax.layers.kv_cache import CachedArray, CachedMixer, Context, gated
from lajax.layers.parameters import Linear, check_rotary, rotate
from lajax.layers.state import CallDocuments
from lajax.ops import attention

MOST_JOINED = 16  # queries of one token, over the batch and the heads


class MLA(CachedMixer):
  """Causal softmax attention whose keys and values come from one latent per token, which is cached.

      c = RMSNorm(x W_c),  r = x W_r ;  k_h = [c W_k,h, r],  v_h = c W_v,h,  q_h = x W_q,h
      o_t,h = sum_{j <= t} softmax_j(q_t,h . k_j,h / sqrt(K + P)) v_j,h ;  y = o W_o

  r and the last P channels of the queries are turned by rotary positions, if there are any. The
  state holds c and r of the current document, `state.memory = (c [B S 1 R], r [B S 1 P])`. A call
  with a state never makes the keys and values of a head: q_h W_k,h^T reads the latents, and W_v,h
  comes after the sum over tokens. A token that does not fit into the cache is a ValueError; under
  jit, where the length cannot be seen, its output is NaN.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K, the channels of a key that come from the latent.
    kv_rank: R, width of the latent.
    rope_dim: P, the channels of a key that all heads share; even if they have rotary positions.
    value_dim: V; None for K.
    max_length: tokens of a document that the cache holds; a longer first call makes room for all.
    rope_theta: base of rotary positions, counted from each document's start; None for none (as in
      Kimi Linear).
    rope_pairs: "halves" for pairs (i, i + P/2), "neighbours" for (2 i, 2 i + 1).
    head_gate: multiply the outputs of each head by a number sigmoid(x W_g).
    norm_eps: of the latent's norm.
    impl: of `lajax.attention`.
    dtype: of the projections and the cache; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language
  Model", 2024, arXiv:2405.04434, equations 9 to 19 (queries without a latent of their own); without
  positions: Kimi Team, "Kimi Linear", 2025, arXiv:2510.26692, section 4.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 128,
    *,
    kv_rank: int = 512,
    rope_dim: int = 64,
    value_dim: int | None = None,
    max_length: int = 2048,
    rope_theta: float | None = 10_000.0,
    rope_pairs: str = "halves",
    head_gate: bool = False,
    norm_eps: float = 1e-6,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K = check_whole("num_heads", num_heads), check_whole("head_dim", head_dim)
    R, P = check_whole("kv_rank", kv_rank), check_whole("rope_dim", rope_dim)
    V = check_positive("value_dim", value_dim) or K
    self.max_length = check_whole("max_length", max_length)
    if rope_theta is not None and P % 2:
      raise ValueError(
        f"`rope_dim` must be even for rotary positions; got {P}. Take an even one, or"
        " rope_theta=None."
      )
    check_rotary(rope_theta, P)
    check_option("rope_pairs", rope_pairs, ("halves", "neighbours"))
    check_flag("head_gate", head_gate)
    super().__init__(
      d_model,
      {"q": (H, K + P), "c": (1, R), "r": (1, P)} | ({"gate": (H, 1)} if head_gate else {}),
      inner=H * V,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.norm = self.rms_norm(R, norm_eps)
    self.up_proj = Linear(
      R, H * (K + V), use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    self.num_heads, self.head_dim, self.kv_rank, self.rope_dim = H, K, R, P
    self.rope_theta, self.scale = rope_theta, (K + P) ** -0.5
    self.rope_pairs = rope_pairs

  @property
  def cached(self):
    latent = CachedArray("c", "1 R", (1, self.kv_rank))
    return latent, CachedArray("r", "1 P", (1, self.rope_dim))

  def mix(self, p, memory, documents):
    q, c, r = p["q"], self.norm(p["c"]), p["r"]
    if self.rope_theta is not None:
      content, shared = jnp.split(q, [self.head_dim], axis=-1)
      turn = functools.partial(self._rotated, documents=documents, theta=self.rope_theta)
      q, r = jnp.concatenate([content, turn(shared)], axis=-1), turn(r)
    if memory is None:
      o = self._expanded(q, c, r, documents)
      return gated(o, p.get("gate")), self.begin((c, r), documents)
    context = self.extend(memory, (c, r), documents)
    o = context.nan_if_lost(self._absorbed(q, context, documents))
    return gated(o, p.get("gate")), context.cache

  def _rotated(self, x: Float[Array, "B T H P"], documents: CallDocuments, theta: float):
    """Turns the pairs of x. Neighbours are first sorted into halves, in queries and keys alike."""
    if self.rope_pairs == "neighbours":
      x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    return rotate(x, documents.position, theta)

  def _expanded(
    self,
    q: Float[Array, "B T H K+P"],
    c: Float[Array, "B T 1 R"],
    r: Float[Array, "B T 1 P"],
    documents: CallDocuments,
  ):
    """With the keys and values of every head: fewest operations without a cache."""
    B, T, H, _ = q.shape
    up = self.up_proj(c).reshape(B, T, H, self.up_proj.out_features // H)
    k, v = jnp.split(up, [self.head_dim], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(r, (B, T, H, self.rope_dim)).astype(k.dtype)], axis=-1)
    return attention(q, k, v, scale=self.scale, segment_ids=documents.ids, impl=self.impl)

  def _absorbed(self, q: Float[Array, "B T H K+P"], context: Context, documents: CallDocuments):
    """With W_k on the queries and W_v on the outputs: all heads read the latents as one."""
    up = self.up_proj.kernel[...].astype(q.dtype)
    content, shared = jnp.split(q, [self.head_dim], axis=-1)
    q = jnp.concatenate([self._by_keys(content, up), shared], axis=-1)
    o = self.attend_cached(q, context.arrays, None, context, documents, scale=self.scale)
    return self._by_values(o.astype(q.dtype), up)

  # A product per head needs W_k and W_v with heads in front, and XLA on a CPU copies them into that
  # order for every token. There one product for all heads takes the place of H, if they are few: a
  # query is zero at the channels of other heads, and of an output its own head's channels are kept.

  def _by_keys(self, content: Float[Array, "B T H K"], up: Float[Array, "R H*(K+V)"]):
    """Returns q W_k^T, [B T H R]."""
    H, K = self.num_heads, self.head_dim
    width = up.shape[1] // H

    def by_head(content, up):
      return jnp.einsum("bthk,rhk->bthr", content, up.reshape(-1, H, width)[..., :K])

    def joined(content, up):
      own = np.eye(H, dtype=bool)[None, None, :, :, None]
      content = jnp.pad(content, [(0, 0), (0, 0), (0, 0), (0, width - K)])[:, :, :, None]
      spread = jnp.where(own, content, jnp.zeros((), up.dtype))
      return jnp.einsum("bthn,rn->bthr", spread.reshape(*spread.shape[:3], H * width), up)

    return self._fewest_copies(joined, by_head, content, up)

  def _by_values(self, o: Float[Array, "B T H R"], up: Float[Array, "R H*(K+V)"]):
    """Returns o W_v, [B T H V]."""
    H, K = self.num_heads, self.head_dim
    width = up.shape[1] // H

    def by_head(o, up):
      return jnp.einsum("bthr,rhv->bthv", o, up.reshape(-1, H, width)[..., K:])

    def joined(o, up):
      own = np.eye(H, dtype=bool)[None, None, :, :, None]
      found = jnp.einsum("bthr,rn->bthn", o, up).reshape(*o.shape[:3], H, width)[..., K:]
      return jnp.where(own, found, jnp.zeros((), up.dtype)).sum(3)

    return self._fewest_copies(joined, by_head, o, up)

  def _fewest_copies(self, joined: Callable, by_head: Callable, x: Float[Array, "B T H N"], up):
    """Returns the product of all heads or that of each, whichever costs less for so many tokens."""
    B, T, H, _ = x.shape
    few = T == 1 and not jax.export.is_symbolic_dim(B) and B * H <= MOST_JOINED
    return jax.lax.platform_dependent(x, up, cpu=joined if few else by_head, default=by_head)
