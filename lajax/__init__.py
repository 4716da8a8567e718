"""lajax: linear attention for JAX. A recurrence by name, exact however computed, and layers.

    import lajax
    from flax import nnx

    o, state = lajax.delta_rule(q, k, v, beta, g)  # an op: q, k [B T H K], v, o [B T HV V]
    layer = lajax.layers.GatedDeltaNet(512, rngs=nnx.Rngs(0))
    y, state = layer(x)  # a layer: x, y [B T D]

Ops: `linear_attention`, `normalized_linear_attention`, `delta_rule`, `delta_product`, `gated_oja`,
`dplr`, `preconditioned_delta_rule`, `momentum_delta_rule`, `mlstm`, `mamba3`, `mesa`,
`log_linear_attention`, `linear_recurrence`, softmax `attention`, and over whole documents
`bidirectional_linear_attention` and `efficient_attention`. Every op takes packed documents
(`segment_ids`, `loss_mask`) and carries a state (`initial_state`) from call to call; `impl` chooses
how it is computed, never what.

`lajax.generate` writes tokens with a model behind prompts, from states of constant size.

Modules: `lajax.layers` (Flax NNX layers), `lajax.recurrence` (one token of each op, for decoding),
`lajax.models`, `lajax.serve` (many requests on one device), `lajax.tasks` (recall), `lajax.cost`
(operations and bytes of a layer).

On jaxlib before 0.11, importing lajax adds a flag to XLA_FLAGS that keeps XLA from hanging on CPUs
with few cores; `lajax._cpu_hang` says when and why.
"""

import importlib as _importlib
from importlib import metadata as _metadata

from lajax import _cpu_hang

_cpu_hang.guard()  # before anything that could start a JAX client

from lajax.ops import (  # noqa: E402
  attention,
  bidirectional_linear_attention,
  delta_product,
  delta_rule,
  dplr,
  efficient_attention,
  gated_oja,
  linear_attention,
  linear_recurrence,
  log_linear_attention,
  loss_mask,
  mamba3,
  mesa,
  mlstm,
  momentum_delta_rule,
  normalized_linear_attention,
  preconditioned_delta_rule,
  segment_ids,
)

__all__ = [
  "attention",
  "bidirectional_linear_attention",
  "delta_product",
  "delta_rule",
  "dplr",
  "efficient_attention",
  "gated_oja",
  "linear_attention",
  "linear_recurrence",
  "log_linear_attention",
  "loss_mask",
  "mamba3",
  "mesa",
  "mlstm",
  "momentum_delta_rule",
  "normalized_linear_attention",
  "preconditioned_delta_rule",
  "segment_ids",
]

_MODULES = (
  "cost",
  "layers",
  "models",
  "recurrence",
  "serve",
  "tasks",
)  # imported when first asked for


def __getattr__(name: str):
  if name in _MODULES:
    return _importlib.import_module(f"lajax.{name}")
  if name == "generate":
    return _importlib.import_module("lajax.models").generate
  if name == "__version__":
    try:
      return _metadata.version("lajax")
    except _metadata.PackageNotFoundError:  # a source tree that is not installed
      return "unknown"
  raise AttributeError(f"module 'lajax' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(
    {*__all__, *_MODULES, "generate", "__version__", "__doc__", "__all__", "__name__", "__file__"}
  )
