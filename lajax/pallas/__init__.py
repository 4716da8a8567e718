"""GPU kernels, in Pallas; interpreted where there is no GPU. `lajax.ops` calls them, and `lajax.layers` the convolution and norm.

`run_linear_attention` and `decode_linear_attention` compute, `supports_linear_attention` says what they do not take,
and `python -m lajax.pallas.report` what the compiler makes of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lajax.pallas import attention as _attention
from lajax.pallas import delta_rule as _delta
from lajax.pallas import linear_attention as _linear
from lajax.pallas import linear_recurrence as _recurrence
from lajax.pallas import norm as _norm
from lajax.pallas import short_conv as _short_conv
from lajax.pallas.launch import wanted

__all__ = [
  "decode_delta_rule",
  "decode_linear_attention",
  "run_attention",
  "run_delta_rule",
  "run_gated_rms_norm",
  "run_linear_attention",
  "run_linear_recurrence",
  "run_short_conv",
  "supports_attention",
  "supports_delta_rule",
  "supports_gated_rms_norm",
  "supports_linear_attention",
  "supports_linear_recurrence",
  "supports_short_conv",
  "wanted",
]

run_gated_rms_norm = _norm.gated_rms_norm
supports_gated_rms_norm = _norm.supports
run_short_conv = _short_conv.short_conv
supports_short_conv = _short_conv.supports
supports_linear_recurrence = _recurrence.supports
supports_attention = _attention.supports

supports_linear_attention = _linear.supports
decode_linear_attention = _linear.decode
supports_delta_rule = _delta.supports
decode_delta_rule = _delta.decode


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


def run_delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None,
  state: Float[Array, "B HV K V"],
  runs: Int[Array, "B T"] | None = None,
  real: Bool[Array, "B T"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
  """`lajax.delta_rule` by kernels: S'_t = Diag(exp g_t) S_{t-1}, S_t = S'_t + k_t (beta_t (v_t - S'_t^T k_t))^T.

  Args, Returns: those of `run_linear_attention`, and beta [B T HV] in float32, in padding zeros.
  """
  o, state = _delta.delta_rule(q, k, v, beta, g, state, runs, scale)
  return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype)), state


def run_linear_recurrence(
  x: Float[Array, "B T D"],
  log_a: Float[Array, "B T D"],
  state: Float[Array, "B D"],
  runs: Int[Array, "B T"] | None = None,
  real: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
  """`lajax.linear_recurrence` by kernels: h_t = exp(log_a_t) h_{t-1} + x_t.

  Args:
    x, log_a: in padding zeros. Not cast: h is of x.dtype, computed in float32.
    state: the initial state in float32, zeros where the user gave none.
    runs, real: those of `run_linear_attention`.

  Returns:
    h [B T D] in x.dtype, zeros in padding, and the final state in float32. Has first derivatives in reverse mode.
  """
  h, state = _recurrence.linear_recurrence(x, log_a, state, runs)
  return h if real is None else jnp.where(real[..., None], h, jnp.zeros((), h.dtype)), state


def run_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T HK K"],
  v: Float[Array, "B T HK V"],
  sink: Float[Array, "H"] | None = None,
  runs: Int[Array, "B T"] | None = None,
  real: Bool[Array, "B T"] | None = None,
  *,
  causal: bool = True,
  window: int | None = None,
  scale: float = 1.0,
) -> Float[Array, "B T H V"]:
  """`lajax.attention` by kernels: o_i = sum_j p_ij v_j, p the softmax of scale q_i . k_j over the tokens that i reads.

  Args:
    q, k, v: not cast: their dtype is that of the products. In padding zeros.
    sink, causal, window, scale: those of `lajax.attention`.
    runs, real: those of `run_linear_attention`.

  Returns:
    o [B T H V] in v.dtype, zeros in padding. Has first derivatives in reverse mode in q, k, v and sink.
  """
  return _attention.attention(q, k, v, sink, runs, real, causal=causal, window=window, scale=scale)
