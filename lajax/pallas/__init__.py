"""GPU kernels, in Pallas; interpreted where there is no GPU. `lajax.ops` is their only caller.

`run_linear_attention` and `decode_linear_attention` compute, `supports_linear_attention` says what they do not take,
and `python -m lajax.pallas.report` what the compiler makes of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lajax.pallas import linear_attention as _linear

__all__ = ["decode_linear_attention", "run_linear_attention", "supports_linear_attention"]

supports_linear_attention = _linear.supports
decode_linear_attention = _linear.decode


def run_linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  real: Bool[Array, "B T"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`lajax.linear_attention` by kernels: S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t.

  How `lajax.ops` calls it: after `_shapes` has checked the arguments, `supports_linear_attention` has answered None,
  and T is not 0 nor an axis of the state empty.

  Args:
    q, k, v: as the user gave them, not cast: their dtype is that of the products. Either q is already scaled and
      `scale` is 1, or `scale` is given, which costs bfloat16 no rounding.
    g: None, [B T HV] or [B T HV K], in float32.
    state: the initial state in float32, zeros where the user gave none.
    runs, real: what `drive.segments(segment_ids)` gives, int32 and bool; both None without segment_ids. In padding q,
      k, v and g must already be zeros, as `drive.blank_padding` makes them.
    scale: of the output.

  Returns:
    o [B T HV V] in v.dtype, zeros in padding, and the final state in float32. Has first derivatives in reverse mode
    in q, k, v, g and state.
  """
  o, state = _linear.linear_attention(q, k, v, g, state, runs, scale)
  return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype)), state
