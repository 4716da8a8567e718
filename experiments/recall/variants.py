"""The mixers of `recall.py`: those of `mqar.py` with the options that its rows compare.

A recurrent variant has the short convolution with SiLU on q, k and v, no output gate, and an
RMSNorm, as in `mqar.py`.
"""

import dataclasses

from recall.mixers import MIXERS, Make, attention, matrix_state

import lajax.layers as L


@dataclasses.dataclass(frozen=True)
class Variant:
  """A mixer with options: its name in tables and figures, and the function that makes its layer."""

  label: str
  make: Make


def _delta(layer, *, gate: bool = True, **options) -> Make:
  return matrix_state(layer, has_output_gate=gate, **options)


def _of_mqar(*names: str) -> dict[str, Variant]:
  return {name: Variant(MIXERS[name].label, MIXERS[name].make) for name in names}


_NEGATIVE = dict(allow_negative_eigenvalues=True)
_ONE, _TWO = "β in (0, 1)", "β in (0, 2)"

VARIANTS: dict[str, Variant] = {
  **_of_mqar("softmax"),
  "softmax_conv": Variant(
    "softmax attention, short convolution", attention(L.SoftmaxAttention, conv_size=4)
  ),
  **_of_mqar("linear", "gla", "mamba2", "mamba3", "rwkv7", "deltanet", "gated_deltanet", "kda"),
  "deltanet_negative": Variant(f"DeltaNet, {_TWO}", _delta(L.DeltaNet, gate=False, **_NEGATIVE)),
  "gated_deltanet_negative": Variant(
    f"Gated DeltaNet, {_TWO}", _delta(L.GatedDeltaNet, **_NEGATIVE)
  ),
  "kda_negative": Variant(
    f"Kimi Delta Attention, {_TWO}", _delta(L.KimiDeltaAttention, **_NEGATIVE)
  ),
  "delta_product": Variant(f"DeltaProduct, R = 2, {_TWO}", _delta(L.DeltaProduct, **_NEGATIVE)),
  "delta_product_1": Variant(
    f"DeltaProduct, R = 1, {_TWO}", _delta(L.DeltaProduct, num_householder=1, **_NEGATIVE)
  ),
  "delta_product_positive": Variant(
    f"DeltaProduct, R = 2, {_ONE}", _delta(L.DeltaProduct, allow_negative_eigenvalues=False)
  ),
}
