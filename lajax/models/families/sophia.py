"""Sophia: Kimi Delta Attention and MLA, 3:1, in 28 layers; 6.19 MB of state in bfloat16.

There is no published checkpoint; `save` writes models of this config in lajax's own form.
"""

import lajax.layers as L
from lajax.models.config import MixerConfig, MLPConfig, ModelConfig, MoEConfig, hybrid_config


def sophia(
  vocab_size: int = 32_768,
  *,
  d_model: int = 1536,
  mlp: MLPConfig | MoEConfig | int | None = None,
  tied_head: bool = True,
) -> ModelConfig:
  """Returns the config of "Sophia": [KDA, KDA, KDA, MLA] x 7, with 16 heads of 96 channels.

      model = LanguageModel(sophia(), rngs=nnx.Rngs(0))

  The 21 layers of Kimi Delta Attention have 21 x 16 = 336 states of 96 x 96: 3,096,576 numbers.
  MLA has no positions, as in Kimi Linear; its cache holds 512 + 64 numbers per token.

  Args:
    vocab_size: number of tokens.
    d_model: D; that of the heads together by default. The states do not depend on it.
    mlp, tied_head: of `hybrid_config`.

  Raises:
    ValueError: an argument is out of its range.
  """
  heads = {"num_heads": 16, "head_dim": 96}
  kda = MixerConfig(L.KimiDeltaAttention, heads)
  mla = MixerConfig(L.MLA, heads | {"kv_rank": 512, "rope_dim": 64, "rope_theta": None})
  return hybrid_config(vocab_size, d_model, [kda, kda, kda, mla], 28, mlp=mlp, tied_head=tied_head)
