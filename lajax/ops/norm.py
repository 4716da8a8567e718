"""RMS norm with a gate."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lajax import _shapes, pallas
from lajax._meshes import on_automatic_axes, spec_of
from lajax._numerics import accumulation_dtype
from lajax.ops.run import kernels_compute

GATES = {"swish": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def gated_rms_norm(
  x: Float[Array, "... D"],
  weight: Float[Array, "D"],
  gate: Float[Array, "... D"] | None = None,
  *,
  activation: str = "swish",
  eps: float = 1e-5,
  impl: str = "auto",
) -> Float[Array, "... D"]:
  """RMS norm over the last axis, times a weight and an activated gate.

      y = x / sqrt(mean x^2 + eps) * weight * act(gate)

  The mean, the root and the products are in float32 (float64 if x is), whatever the dtype of x.

  Args:
    x: [.. D].
    weight: [D], one factor per channel.
    gate: [.. D], before its activation; None for no gate.
    activation: "swish" or "sigmoid", of the gate.
    eps: added inside the root, a number of at least 0.
    impl: "pallas" for one GPU kernel, "auto" for the kernel on an NVIDIA GPU where it takes the
      arrays; "recurrent", "associative" and "chunked" are all plain JAX here.

  Returns:
    y [.. D] in x.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
    NotImplementedError: impl="pallas", and the kernel does not take the arrays.

  Papers: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467,
  equation 4; gated as in Y. Sun et al., "Retentive Network", 2023, arXiv:2307.08621, equation 8.
  """
  rows = " ".join(f"D{n}" for n in range(getattr(x, "ndim", 1) - 1))
  _shapes.check_given(x=(x, f"{rows} D"), weight=(weight, "D"))
  _shapes.check(x=(x, f"{rows} D"), weight=(weight, "D"), gate=(gate, f"{rows} D"))
  _shapes.check_option("activation", activation, tuple(GATES))
  eps = _shapes.check_not_negative("eps", eps)
  supports = functools.partial(pallas.supports_gated_rms_norm, x, weight, gate)
  return _norm(x, weight, gate, activation, eps, kernels_compute(impl, supports, x))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _norm(x, weight, gate, activation: str, eps: float, by_kernel: bool):
  def compute(x, weight, gate):
    if by_kernel:
      return pallas.run_gated_rms_norm(x, weight, gate, activation=activation, eps=eps)
    wide = x.astype(accumulation_dtype(x))
    y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    y = y * jnp.broadcast_to(weight.astype(accumulation_dtype(weight)), x.shape).astype(wide.dtype)
    if gate is not None:
      y = y * GATES[activation](gate.astype(wide.dtype))
    return y.astype(x.dtype)

  return on_automatic_axes(compute, lambda x, weight, gate: spec_of(x))(x, weight, gate)
