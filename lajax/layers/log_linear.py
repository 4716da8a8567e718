"""Log-linear attention: Mamba-2 and Gated DeltaNet whose state has levels."""

import functools
from math import expm1, log

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_whole
from lajax.layers.gated_deltanet import GatedDeltaNet
from lajax.layers.mamba2 import Mamba2
from lajax.layers.mixer import Mixer, extends
from lajax.layers.parameters import aligned, widen
from lajax.layers.state import check_arrays
from lajax.ops import log_linear_attention


def levels_for(max_length: int) -> int:
  """Returns L: the token itself, and a level for each bit of a position below `max_length`."""
  return 1 + (check_whole("max_length", max_length) - 1).bit_length()


class _Levels(Mixer):
  """Parts of both layers: a scale per level, head and token, and a state of L - 1 levels."""

  num_levels: int  # L; set before the projections are made
  memory_letters = "B HV L-1 K V", "B"

  def further_projections(self, projections):
    heads = projections["beta" if "beta" in projections else "dt"]
    return {"levels": (*heads, self.num_levels)}

  def add_parameters(self, rngs):
    shape = dict(self.projections)["levels"]
    self.level_bias = nnx.Param(jnp.full(shape, log(expm1(1.0)), self.gate_dtype))

  def level_scales(self, p, memory):
    """Returns lambda [B T HV L], of as many levels as the state that came in."""
    scales = widen(p["levels"])
    scales = jax.nn.softplus(scales + aligned(self.level_bias[...], scales))
    return scales if memory is None else scales[..., : memory[0].shape[2] + 1]

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    shape = (*S.shape[:2], max(1, self.num_levels - 1), *S.shape[2:])
    return jnp.zeros(shape, S.dtype), jnp.zeros((batch,), S.dtype)

  def init_state(self, batch: int, *, max_length: int | None = None, dtype=None):
    """Returns the state before the first token: zeros.

    Args:
      batch: B.
      max_length: tokens of the longest document that will come; None for the layer's. The state has
        a level for each bit of a position, and no more than the layer.
      dtype: of the inputs that will come; None for the layer's `dtype`, or that of its parameters.
    """
    state = super().init_state(batch, dtype=dtype)
    if max_length is None:
      return state
    S, position = state.memory
    return state._replace(memory=(S[:, :, : max(1, levels_for(max_length) - 1)], position))

  def check_memory(self, memory, batch):
    S, position = jax.eval_shape(lambda: self.init_memory(batch, jnp.float32))
    given = memory[0] if isinstance(memory, tuple | list) and len(memory) == 2 else None
    levels = getattr(given, "shape", ())[2:3]
    if levels and 1 <= levels[0] <= S.shape[2]:  # fewer levels than the layer's are a state too
      S = jax.ShapeDtypeStruct((*S.shape[:2], *levels, *S.shape[3:]), S.dtype)
    return check_arrays("state.memory", memory, self.memory_letters, (S, position))


class LogLinearMamba2(_Levels, Mamba2):
  """Mamba-2 that reads a hierarchy of log T states.

      dt_t = softplus(x W_dt + dt_bias) ;  S_t = e^(-exp(A_log) dt_t) S_{t-1} + dt_t B_t u_t^T
      o_t = sum_l lambda_t^l S_t^l^T C_t + D u_t,  lambda = softplus(x W_l + b_l)
      u, B, C = silu(conv(x W)),  y = RMSNorm(o * silu(x W_z)) W_o

  S^l are the parts of S that the tokens of bucket l wrote; see `lajax.log_linear_attention`.

  Args: those of `Mamba2` but norm_groups, dt_limits and multipliers, with impl and chunk_size of
    `lajax.log_linear_attention`, and
    max_length: tokens of the longest document; there are 1 + ceil(log2 max_length) levels. In
      longer documents the last level holds all that is older.
    rngs: b_l begins such that lambda is 1.

  Raises:
    ValueError: an option is out of its range, or num_groups does not divide num_heads.

  Paper: H. Guo et al., "Log-Linear Attention", 2025, arXiv:2506.04761, its log-linear Mamba-2.
  """

  @extends(Mamba2)
  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    state_dim: int = 128,
    num_groups: int = 1,
    max_length: int = 16384,
    conv_size: int | None = 4,
    conv_bias: bool = True,
    use_bias: bool = False,
    use_norm: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.num_levels = levels_for(max_length)

  def op(self, p, memory):
    return functools.partial(log_linear_attention, level_scales=self.level_scales(p, memory))


class LogLinearGatedDeltaNet(_Levels, GatedDeltaNet):
  """Gated DeltaNet that reads a hierarchy of log T states.

      S_t = e^(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
      o_t = K^(-1/2) sum_l lambda_t^l S_t^l^T q_t,  lambda = softplus(x W_l + b_l)
      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      y = (RMSNorm(o) * act(x W_g)) W_o,  q, k = l2norm(silu(conv(x W))), v = silu(conv(x W))

  S^l are the parts of S that the tokens of bucket l wrote; see `lajax.log_linear_attention`.

  Args: those of `GatedDeltaNet`, with impl and chunk_size of `lajax.log_linear_attention`, and
    max_length: tokens of the longest document; there are 1 + ceil(log2 max_length) levels. In
      longer documents the last level holds all that is older.
    rngs: b_l begins such that lambda is 1.

  Raises:
    ValueError: an option is out of its range.

  Paper: H. Guo et al., "Log-Linear Attention", 2025, arXiv:2506.04761, its log-linear Gated
  DeltaNet.
  """

  @extends(GatedDeltaNet)
  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_v_heads: int | None = None,
    expand_v: float = 1.0,
    max_length: int = 16384,
    conv_size: int | None = 4,
    use_gate: bool = True,
    gate_activation: str = "swish",
    allow_negative_eigenvalues: bool = False,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.num_levels = levels_for(max_length)

  def correct(self, p, q, k, beta, g, memory, documents):
    gates = g, self.level_scales(p, memory), beta
    return self.apply_op(
      log_linear_attention, q, k, p["v"], *gates, memory=memory, documents=documents
    )
