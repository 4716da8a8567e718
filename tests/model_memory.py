"""Memory of loading a checkpoint: makes one of random bits, and measures a process that loads it.

python tests/model_memory.py FOLDER     # prints what loading it takes, as JSON
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import lajax

# Kimi Linear: its experts are the most tensors per parameter, and its largest tensor is small.
CONFIG: dict[str, Any] = {
  "model_type": "kimi_linear",
  "vocab_size": 16_384,
  "hidden_size": 1024,
  "num_hidden_layers": 9,
  "num_attention_heads": 8,
  "num_key_value_heads": 8,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "kv_lora_rank": 512,
  "linear_attn_config": {
    "num_heads": 8,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "full_attn_layers": [4, 8],
  },
  "intermediate_size": 4096,
  "first_k_dense_replace": 1,
  "num_experts": 36,
  "num_experts_per_token": 4,
  "num_shared_experts": 1,
  "moe_intermediate_size": 1024,
}
SMALL = CONFIG | {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 32,
  "num_experts": 4,
  "moe_intermediate_size": 16,
}
FILE_BYTES = 256 * 2**20


def make(folder: pathlib.Path, config=CONFIG) -> dict[str, int]:
  """Writes a checkpoint of random bits in bfloat16. Returns its bytes, and those of a tensor at most."""
  (folder / "config.json").write_text(json.dumps(config))
  model = nnx.eval_shape(lambda: lajax.models.from_config(config, rngs=nnx.Rngs(0)))
  bits = np.random.default_rng(0).integers(0, 2**14, 2**25, np.uint16)  # below 2, and none is NaN
  sizes, weight_map, held = [], {}, {}

  def write():
    name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    save_file(held, folder / name, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(held, name))
    held.clear()

  for name, x in lajax.models.tensors(model).items():
    held[name] = bits[len(sizes) : len(sizes) + x.size].view(jnp.bfloat16).reshape(x.shape)
    sizes.append(held[name].nbytes)
    if sum(h.nbytes for h in held.values()) >= FILE_BYTES:
      write()
  if held:
    write()
  index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return {"bytes": sum(sizes), "largest": max(sizes), "files": len(set(weight_map.values()))}


def resident(what: str) -> int:
  """Returns the bytes of this process that are in memory: now ("VmRSS"), or at most ("VmHWM")."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def measure(folder: str) -> dict[str, Any]:
  """Loads a checkpoint. Returns what the process held before, at most, and after.

  Before means after a first load of another checkpoint with as many layers: what tracing and
  compilation take is no tensor.
  """
  with tempfile.TemporaryDirectory() as small:
    make(pathlib.Path(small), SMALL)
    lajax.models.load(small)
  before = resident("VmRSS")
  model = lajax.models.load(folder)
  parameters = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
  held = sum(p.nbytes for p in parameters)
  return {"before": before, "peak": resident("VmHWM"), "after": resident("VmRSS"), "held": held}


if __name__ == "__main__":
  print(json.dumps(measure(sys.argv[1])))
