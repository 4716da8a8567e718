"""The short causal depthwise convolution that stands before most linear mixers."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lajax import pallas
from lajax._shapes import IMPLS, check, check_option, check_positive
from lajax.layers.parameters import over_tokens, widen
from lajax.layers.state import Documents, LayerState, check_state, follow


class ShortConv(nnx.Module):
  """Causal depthwise convolution over the last `width` tokens, with its cache.

      y_t = act(sum_{w < W} weight[:, W - 1 - w] * x_{t - w} + bias)

  Documents do not mix: a tap that would reach into another document reads zero. Padding is passed over: the taps run over
  real tokens only.

  Args:
    channels: D.
    width: W >= 1, the current token included.
    use_bias: add a bias a channel.
    activation: "silu", or None for none.
    impl: "pallas" for one kernel, where it takes the arrays, as "auto" does on NVIDIA GPUs; all others are shifted products.
    dtype: the dtype of the computation; None for that of the inputs and parameters together.
    param_dtype: the dtype of the parameters.
    rngs: the random streams of the parameters.

  Raises:
    ValueError: width < 1, or an unknown activation.

  Paper: D. Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models", 2022, arXiv:2212.14052,
  section 3.1 (the shift matrix, here with learned weights).
  """

  impl: str = "auto"

  def __init__(
    self,
    channels: int,
    width: int = 4,
    *,
    use_bias: bool = False,
    activation: str | None = "silu",
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_positive("channels", channels)
    check_positive("width", width)
    check_option("impl", impl, IMPLS)
    if activation not in ("silu", None):
      raise ValueError(
        f"`activation` must be 'silu' or None; got {activation!r}. Apply another one to the outputs."
      )
    bound = width**-0.5
    self.weight = nnx.Param(
      jax.random.uniform(rngs.params(), (channels, width), param_dtype, -bound, bound)
    )
    self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if use_bias else None
    self.channels, self.width, self.activation, self.impl = channels, width, activation, impl
    self.dtype, self.param_dtype = dtype, param_dtype

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """Convolves x, continuing from a state; returns the outputs and the state after the last real token of each row."""
    sizes = check({"D": self.channels}, x=(x, "B T D"), segment_ids=(segment_ids, "B T", "int"))
    check_state(state, sizes["B"])
    documents = follow(state, (sizes["B"], sizes["T"]), segment_ids)
    y, cache = self.convolve(
      documents.only_real(x), None if state is None else state.conv, documents
    )
    return y, LayerState(None, cache, documents.segment, documents.length)

  def init_state(self, batch: int) -> LayerState:
    """The state before the first token."""
    return LayerState(
      None, self.init_cache(batch), jnp.full(batch, -1, jnp.int32), jnp.zeros(batch, jnp.int32)
    )

  def init_cache(self, batch: int) -> Float[Array, "B W-1 D"]:
    return jnp.zeros((batch, self.width - 1, self.channels), self.dtype or self.param_dtype)

  def convolve(
    self, x: Float[Array, "B T D"], cache: Array | None, documents: Documents
  ) -> tuple[Array, Array]:
    """The convolution behind a cache; x must be zero at the padding."""
    past = self.init_cache(x.shape[0]) if cache is None else documents.only_continued(cache)
    check(
      {"D": self.channels, "B": x.shape[0], "W-1": self.width - 1},
      **{"state.conv": (past, "B W-1 D")},
    )
    dtype = self.dtype or jnp.promote_types(x.dtype, self.param_dtype)
    if (
      pallas.wanted(self.impl)
      and x.size
      and pallas.supports_short_conv(x, self.weight[...], past) is None
    ):
      bias, silu = None if self.bias is None else self.bias[...], self.activation == "silu"
      y, rest = pallas.run_short_conv(
        x.astype(dtype), self.weight[...], bias, past.astype(dtype), documents.ids, silu=silu
      )
      return documents.only_real(y), rest.astype(past.dtype)
    reach = self.width - 1
    if documents.ids is None:
      seen = jnp.concatenate([past.astype(dtype), x.astype(dtype)], axis=1)
      y = self._taps(seen, lambda read, w: read)
      rest = seen[:, seen.shape[1] - reach :]
      return y, rest.astype(past.dtype)

    # Real tokens are moved together, so that each has the tokens it reads right before it; then back to their places.
    ids, (B, T) = documents.ids, documents.ids.shape
    real = ids >= 0
    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    rows = jnp.arange(B)[:, None]
    together = lambda a, fill: (
      jnp.full_like(a, fill).at[rows, jnp.where(real, rank, T)].set(a, mode="drop")
    )
    seen = jnp.concatenate([past.astype(dtype), together(x.astype(dtype), 0)], axis=1)
    runs = jnp.pad(together(ids, -1), ((0, 0), (reach, 0)))  # the cache belongs to run 0
    y = self._taps(
      seen, lambda read, w: jnp.where((runs[:, w : w + T] == runs[:, reach:])[..., None], read, 0)
    )
    y = documents.only_real(jnp.take_along_axis(y, jnp.maximum(rank, 0)[..., None], axis=1))
    last = (
      rank[:, -1:] + 1 + jnp.arange(reach)
    )  # in `seen`: the cache's length after the last real token
    last_run = jnp.take_along_axis(runs, rank[:, -1:] + reach, axis=1)
    rest = jnp.take_along_axis(seen, last[..., None], axis=1)
    rest = jnp.where((jnp.take_along_axis(runs, last, axis=1) == last_run)[..., None], rest, 0)
    return y, rest.astype(past.dtype)

  def _taps(self, seen: Array, mask) -> Array:
    """W shifted products: on a CPU ten times faster than a grouped convolution, and five times with gradients."""
    shape = (seen.shape[0], seen.shape[1] - self.width + 1, self.channels)
    wide, weight = widen(seen), widen(self.weight[...])
    taps = (
      mask(wide[:, w : w + shape[1]], w) * over_tokens(weight[:, w], shape)
      for w in range(self.width)
    )
    y = functools.reduce(jnp.add, taps)
    if self.bias is not None:
      y = y + over_tokens(widen(self.bias[...]), shape)
    return (jax.nn.silu(y) if self.activation == "silu" else y).astype(seen.dtype)
