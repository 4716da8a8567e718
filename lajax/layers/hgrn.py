"""HGRN: an elementwise recurrence whose forget gate has a lower bound; and the gate, for HGRN2."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lajax._shapes import check, check_number, check_positive, check_whole
from lajax.layers.mixer import Mixer, with_gate
from lajax.layers.parameters import aligned, widen
from lajax.ops import linear_recurrence

LOWEST = -80.0  # of what the sigmoid gets: below it, float32 has no normal number for the gate


class LowerBound(nnx.Variable):
  """Lower bounds that come from outside: in the module's state, but not among its parameters."""


def hgrn_lower_bounds(logits: Float[Array, "L *D"]) -> Float[Array, "L *D"]:
  """Lower bounds of the forget gates of all layers, growing with depth, for HGRN and HGRN2.

      lb_l = sum_{1 <= i <= l} softmax(logits)_i over the layers, so that lb_0 = 0 and lb_l < 1

  Args:
    logits: [L ..], learned, with any axes behind the layers.

  Returns:
    lb in [0, 1), of the shape and dtype of `logits`.

  Raises:
    ValueError: logits have no axis.

  Paper: Z. Qin, S. Yang, Y. Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence
  Modeling", 2023, arXiv:2311.04823, section 3.2.
  """
  if np.ndim(logits) < 1:
    raise ValueError(
      f"`logits` must be [L ..], with the layers in front; got shape {np.shape(logits)}."
    )
  shares = jax.nn.softmax(widen(logits), axis=0)
  return jnp.cumsum(shares.at[0].set(0), axis=0).astype(logits.dtype)


def lower_bound_of(bound: float | Array, shape: tuple[int, ...]) -> "float | LowerBound":
  """The bound in the form in which it is stored: a number, or a Variable of shape `shape`."""
  if isinstance(bound, (Array, np.ndarray)) and bound.ndim:
    letters = [f"D{n}" for n in range(len(shape))]
    check(dict(zip(letters, shape, strict=True)), lower_bound=(bound, " ".join(letters)))
    return LowerBound(widen(jnp.asarray(bound)))
  number = check_number("lower_bound", bound)
  if not 0 <= number < 1:
    raise ValueError(
      f"`lower_bound` must be in [0, 1), so that the gate can both keep and forget; got {number}."
    )
  return number


def bound_value(bound: "float | LowerBound", f: Float[Array, "B T *D"]) -> float | Array:
  """Returns the bound that a layer keeps, aligned with the gate's inputs f."""
  return aligned(bound[...], f) if isinstance(bound, LowerBound) else bound


def forget_gate(
  f: Float[Array, "B T *D"], lower_bound: float | Float[Array, "*D"]
) -> tuple[Float[Array, "B T *D"], Float[Array, "B T *D"]]:
  """Returns g = log(lb + (1 - lb) sigmoid(f)) and 1 - e^g without cancellation; f >= -80."""
  f = widen(f)
  rest = 1 - lower_bound
  forgets = rest * jax.nn.sigmoid(-f)
  keeps = f > 0  # e^g is near 1 or above 1/2: from 1 - e^g; else from e^g
  near_one = jnp.log1p(-rest * jax.nn.sigmoid(-jnp.where(keeps, f, 0)))
  below = jnp.log(lower_bound + rest * jax.nn.sigmoid(jnp.where(keeps, 0, jnp.maximum(f, LOWEST))))
  return jnp.where(keeps, near_one, below), forgets


class HGRN(Mixer):
  """An elementwise recurrence: its forget gate is tied to the input gate and bounded from below.

      h_t = e^(g_t) h_{t-1} + i_t ;  e^g = lb + (1 - lb) sigmoid(x W_f), i = (1 - e^g) silu(x W_i)
      y = (RMSNorm(h) * silu(x W_g)) W_o

  (The paper also turns a complex h by a learned angle; this is its real form.)

  Args:
    d_model: D.
    width: the channels of h; None for D.
    lower_bound: lb, a number in [0, 1), or an array [width] of such, as `hgrn_lower_bounds` gives
      for the layers of a model. An array is kept in `layer.lower_bound`, an `nnx.Variable` that is
      no `nnx.Param`; a model that learns the bounds sets it before each call:
      `layer.lower_bound[...] = hgrn_lower_bounds(logits)[l]`.
    conv_size: width of a short convolution, without activation, on x W_f and x W_i; None (the
      default) for none.
    use_gate: multiply the normed outputs by silu(x W_g).
    norm_eps: of the output norm.
    impl: of `lajax.linear_recurrence`.
    dtype: of the projections; None for that of the inputs and parameters together.
    param_dtype: of the parameters; the norm's weight is float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.

  Paper: Z. Qin, S. Yang, Y. Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence
  Modeling", 2023, arXiv:2311.04823, section 3.2.
  """

  memory_letters = "B D"

  def __init__(
    self,
    d_model: int,
    *,
    width: int | None = None,
    lower_bound: float | Float[Array, "width"] = 0.0,
    conv_size: int | None = None,
    use_gate: bool = True,
    norm_eps: float = 1e-5,
    impl: str = "auto",
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("d_model", d_model)
    check_positive("width", width)
    W = width or d_model
    super().__init__(
      d_model,
      with_gate({"i": (W,), "f": (W,)}, use_gate, W),
      inner=W,
      memory=(W,),
      conv_size=conv_size,
      conv_on=("i", "f"),
      conv_activation=None,
      impl=impl,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.lower_bound = lower_bound_of(lower_bound, (W,))
    self.norm = self.rms_norm(W, norm_eps)

  def mix(self, p, memory, documents):
    g, forgets = forget_gate(p["f"], bound_value(self.lower_bound, p["f"]))
    i = forgets * jax.nn.silu(widen(p["i"]))
    h, memory = linear_recurrence(
      i, g, initial_state=memory, segment_ids=documents.ids, impl=self.impl
    )
    return self.norm(h, p.get("gate")).astype(p["i"].dtype), memory
