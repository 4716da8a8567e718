"""The matrix LSTM (mLSTM) of xLSTM."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax._shapes import check_option
from lajax.layers.mixer import Mixer, value_heads, value_width, with_gate
from lajax.layers.parameters import aligned, widen
from lajax.ops import mlstm


class MLSTM(Mixer):
  """Linear attention with exponential gates and a normaliser.

      C_t = f_t C_{t-1} + i_t k_t v_t^T, n_t = f_t n_{t-1} + i_t k_t
      o_t = C_t^T q_t / max(|n_t . q_t|, 1)
      i = exp(x W_i + b_i), f = sigmoid(x W_f + b_f), q scaled by K^(-1/2)
      y = (RMSNorm(o) * sigmoid(x W_g)) W_o

  computed relative to a running maximum, so that no gate overflows.

  Args:
    d_model: D.
    num_heads: H.
    head_dim: K.
    expand_v: V / K.
    forget_gate: "sigmoid", or "exp" for f = exp(x W_f + b_f).
    conv_size: width of a short convolution on q and k; None for none.
    use_gate: multiply the normed outputs by sigmoid(x W_g).
    norm_eps: of the output norm.
    impl, chunk_size: of `lajax.mlstm`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; b_i, b_f and the norm's weight are float32 at least.
    rngs: random streams of the initial parameters. b_i = -10; b_f from 3 to 6 over the heads (0 for
      "exp").

  Raises:
    ValueError: an option is out of its range.

  Paper: M. Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024, arXiv:2405.04517, equations
  19 to 27.
  """

  memory_letters = "B HV K V", "B HV K", "B HV"

  def __init__(
    self,
    d_model: int,
    num_heads: int = 4,
    head_dim: int = 64,
    *,
    expand_v: float = 1.0,
    forget_gate: str = "sigmoid",
    conv_size: int | None = 4,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    H, K, V = value_heads(num_heads), head_dim, value_width(head_dim, expand_v)
    check_option("forget_gate", forget_gate, ("sigmoid", "exp"))
    projections = with_gate(
      {"q": (H, K), "k": (H, K), "v": (H, V), "i": (H,), "f": (H,)}, use_gate, H, V
    )
    super().__init__(
      d_model,
      projections,
      inner=H * V,
      memory=(H, K, V),
      conv_size=conv_size,
      conv_on=("q", "k"),
      impl=impl,
      chunk_size=chunk_size,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.input_bias = nnx.Param(jnp.full(H, -10.0, self.gate_dtype))
    first = (
      jnp.zeros(H, self.gate_dtype)
      if forget_gate == "exp"
      else jnp.linspace(3.0, 6.0, H, dtype=self.gate_dtype)
    )
    self.forget_bias = nnx.Param(first)
    self.norm = self.rms_norm(V, norm_eps, "sigmoid")
    self.forget_gate = forget_gate

  def init_memory(self, batch, dtype):
    C = super().init_memory(batch, dtype)
    return C, jnp.zeros(C.shape[:-1], C.dtype), jnp.zeros(C.shape[:2], C.dtype)

  def mix(self, p, memory, documents):
    i, f = widen(p["i"]), widen(p["f"])
    i, f = i + aligned(self.input_bias[...], i), f + aligned(self.forget_bias[...], f)
    f = jax.nn.log_sigmoid(f) if self.forget_gate == "sigmoid" else f
    o, memory = self.apply_op(
      mlstm, p["q"], p["k"], p["v"], i, f, memory=memory, documents=documents
    )
    return self.norm(o, p.get("gate")), memory
