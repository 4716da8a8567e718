"""Shell of the delta rules with one decay per head: Gated DeltaNet and its relatives."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lajax._numerics import l2_normalize
from lajax._shapes import check_flag, check_option
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops.norm import GATES


class GatedDeltaMixer(Mixer):
  """A mixer with the projections q, k, v, beta, a and gate, and a norm per head.

      g = -exp(A_log) softplus(x W_a + dt_bias), beta = sigmoid(x W_beta)
      q, k = l2norm(silu(conv(x W))), v = silu(conv(x W)),  y = (RMSNorm(o) * act(x W_g)) W_o

  A subclass writes its equation in `mix`, from `queries_and_keys`, `strength` and `decay`.

  Args: those of `GatedDeltaNet`.
  """

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    num_v_heads: int | None = None,
    expand_v: float = 1.0,
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
    check_option("gate_activation", gate_activation, tuple(GATES))
    check_flag("allow_negative_eigenvalues", allow_negative_eigenvalues)
    H, HV = num_heads, value_heads(num_heads, num_v_heads)
    K, V = head_dim, value_width(head_dim, expand_v)
    projections = {"q": (H, K), "k": (H, K), "v": (HV, V), "beta": (HV,), "a": (HV,)}
    super().__init__(
      d_model,
      with_gate(projections, use_gate, HV, V),
      inner=HV * V,
      memory=(HV, K, V),
      conv_size=conv_size,
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.A_log = nnx.Param(log_uniform_rate(rngs.params(), (HV,), 0.0, 16.0, self.gate_dtype))
    self.dt_bias = nnx.Param(step_bias(rngs.params(), (HV,), self.gate_dtype))
    self.norm = self.rms_norm(V, norm_eps, gate_activation)
    self.beta_range = 2.0 if allow_negative_eigenvalues else 1.0

  def queries_and_keys(self, p: dict[str, Array]) -> tuple[Array, Array]:
    """Returns q and k [B T H K] at unit length."""
    return l2_normalize(p["q"]), l2_normalize(p["k"])

  def strength(self, p: dict[str, Array]) -> Float[Array, "B T HV"]:
    """Returns the write strength beta."""
    return self.beta_range * jax.nn.sigmoid(widen(p["beta"]))

  def decay(self, p: dict[str, Array]) -> Float[Array, "B T HV"]:
    """Returns the log decay g."""
    return softplus_decay(p["a"], self.A_log[...], self.dt_bias[...])
