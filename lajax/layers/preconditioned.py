"""Preconditioned Gated DeltaNet and Kimi Delta Attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from lajax.layers.gated_deltanet import GatedDeltaNet
from lajax.layers.kimi_delta_attention import KimiDeltaAttention
from lajax.layers.mixer import Mixer
from lajax.layers.parameters import log_uniform_rate, softplus_decay, step_bias, widen
from lajax.ops import preconditioned_delta_rule


class _Preconditioned(Mixer):
  """Parts of both layers: the curvature A in the memory, and its two gates per head of the keys."""

  memory_letters = "B HV K V", "B H K"

  def further_projections(self, projections):
    H = projections["k"][:1]
    return {"beta_precond": H, "a_precond": H}

  def add_parameters(self, rngs):
    shape, dtype = dict(self.projections)["k"][:1], self.gate_dtype
    self.A_log_precond = nnx.Param(log_uniform_rate(rngs.params(), shape, 0.0, 16.0, dtype))
    self.dt_bias_precond = nnx.Param(step_bias(rngs.params(), shape, dtype))

  def init_memory(self, batch, dtype):
    S = super().init_memory(batch, dtype)
    return S, jnp.zeros((batch, *dict(self.projections)["k"]), S.dtype)

  def correct(self, p, q, k, beta, g, memory, documents):
    strength = jax.nn.sigmoid(widen(p["beta_precond"]))
    decay = softplus_decay(p["a_precond"], self.A_log_precond[...], self.dt_bias_precond[...])
    gates = beta, g, strength, decay
    return self.apply_op(
      preconditioned_delta_rule, q, k, p["v"], *gates, memory=memory, documents=documents
    )


class PreconditionedGatedDeltaNet(_Preconditioned, GatedDeltaNet):
  """Gated DeltaNet that writes by the curvature that each channel of the keys has seen.

      A_t = e^(g'_t) A_{t-1} + beta'_t k_t^2 ;  m = 1.5^(-r / (1 + |r|)), r = log(A_t + 1e-6) + 0.2
      S_t = e^(g_t) S_{t-1} ;  S_t += beta_t (m_t k_t) (v_t - S_t^T k_t)^T
      g' = -exp(A_log') softplus(x W_a' + dt_bias'), beta' = sigmoid(x W_beta')

  Everything else is as in `GatedDeltaNet`.

  Args: those of `GatedDeltaNet`; impl and chunk_size are of `lajax.preconditioned_delta_rule`, and
    A_log', dt_bias' are drawn like A_log, dt_bias.

  Raises:
    ValueError: an option is out of its range.

  Paper: N. Tumma, N. Loo, D. Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for
  Linear Recurrences", 2026, arXiv:2604.21100, its preconditioned GDN.
  """


class PreconditionedKDA(_Preconditioned, KimiDeltaAttention):
  """Kimi Delta Attention that writes by the curvature that each channel of the keys has seen.

      A_t = e^(g'_t) A_{t-1} + beta'_t k_t^2 ;  m = 1.5^(-r / (1 + |r|)), r = log(A_t + 1e-6) + 0.2
      S_t = Diag(e^(g_t)) S_{t-1} ;  S_t += beta_t (m_t k_t) (v_t - S_t^T k_t)^T
      g' = -exp(A_log') softplus(x W_a' + dt_bias'), beta' = sigmoid(x W_beta')

  Everything else is as in `KimiDeltaAttention`.

  Args: those of `KimiDeltaAttention`; impl and chunk_size are of `lajax.preconditioned_delta_rule`.
    A' ~ U(0, 16), and dt_bias' is drawn like dt_bias.

  Raises:
    ValueError: an option is out of its range.

  Paper: N. Tumma, N. Loo, D. Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for
  Linear Recurrences", 2026, arXiv:2604.21100, its preconditioned KDA.
  """
