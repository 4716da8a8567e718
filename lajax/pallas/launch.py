"""Launches kernels: everything that depends on the version of JAX, or on whether there is a GPU.

Kernels are written for Pallas' Triton lowering. Where a program is lowered for another platform
than CUDA, they are interpreted: the same kernels run as ordinary JAX operations. The platform is
that of the lowering, so a program can be compiled on one machine for a GPU that is elsewhere.

Importing this module filters one warning for the whole process, by text and category: from JAX 0.11
on, each lowering of a kernel for a GPU says that the Triton lowering is deprecated. All other
warnings stay as they are.
"""

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu_triton
from jaxtyping import Array

from lajax._numerics import vary_like

DEPRECATION = "The Pallas Triton backend is deprecated"
warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)

load, store = plgpu_triton.load, plgpu_triton.store


def wanted(impl: str) -> bool:
  """Returns whether kernels are asked for: by name, or by "auto" where JAX computes on NVIDIA GPUs
  since Ampere.
  """
  return impl == "pallas" or (impl == "auto" and _on_supported_gpu())


def _on_supported_gpu() -> bool:
  if jax.default_backend() != "gpu" or jax.config.jax_default_device is not None:  # pyright: ignore[reportAttributeAccessIssue]
    return False
  # GPUs of other makers have no such number, or one of another form.
  versions = [str(getattr(device, "compute_capability", "")) for device in jax.devices()]
  return all(re.fullmatch(r"\d+\.\d+", version) and float(version) >= 8 for version in versions)


def float64_refusal(arrays: Mapping[str, Array | None]) -> str | None:
  """Returns a sentence that names an array of float64, which the kernels do not take, or None."""
  for name, x in arrays.items():
    if x is not None and x.dtype == "float64":
      return f"the kernels compute in float32, and `{name}` is float64."
  return None


def launch(
  kernel: Callable,
  inputs: Sequence[Array | None],
  *,
  name: str,
  programs: int,
  in_specs: Sequence[pl.BlockSpec | None],
  out_specs: Sequence[pl.BlockSpec],
  out_shapes: Sequence[jax.ShapeDtypeStruct],
  warps: int,
  stages: int,
  aliases: Mapping[int, int] | None = None,
) -> Sequence[Array]:
  """Runs kernel(input refs, output refs, interpreted=...) in `programs` programs.

  The grid has one axis: a GPU bounds all axes but the first to 65,535 programs. The ref of an input
    that is None is None.
  `aliases` maps inputs that are written in place to outputs.
  """
  present = [n for n, x in enumerate(inputs) if x is not None]
  arrays = [inputs[n] for n in present]
  kinds = [jax.typeof(x).manual_axis_type for x in arrays]
  # Under `jax.shard_map` results vary over the mesh axes that inputs vary over.
  widest = max(kinds, key=lambda kind: len(kind.varying))
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=widest) for x in out_shapes]

  def run(interpreted: bool, *arrays):
    def body(*refs):
      given = dict(zip(present, refs, strict=False))
      kernel(
        [given.get(n) for n in range(len(inputs))], refs[len(present) :], interpreted=interpreted
      )

    return pl.pallas_call(
      body,
      name=name,
      grid=(programs,),
      in_specs=[in_specs[n] for n in present],
      out_specs=list(out_specs),
      out_shape=shapes,
      input_output_aliases={present.index(n): m for n, m in (aliases or {}).items()},
      interpret=interpreted,
      compiler_params=None
      if interpreted
      else plgpu_triton.CompilerParams(num_warps=warps, num_stages=stages),
    )(*arrays)

  return lax.platform_dependent(
    *arrays, cuda=functools.partial(run, False), default=functools.partial(run, True)
  )


def differentiable(
  forward: Callable, backward: Callable, alone: Callable | None = None
) -> Callable:
  """Returns f(static, *arrays) with first derivatives in reverse mode. Second derivatives raise
  NotImplementedError.

  Args:
    forward: (static, *arrays) -> results, residuals.
    backward: (static, residuals, cotangents) -> cotangents of the arrays.
    alone: the same as `forward` where no derivative is asked for, so residuals are not used; None
      for `forward`.
  """
  primal = alone or forward

  @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
  def f(static, *arrays):
    return primal(static, *arrays)[0]

  f.defvjp(_once(forward), _once(backward))
  return lambda static, *arrays: f(static, *jax.tree.map(lambda x: vary_like(x, arrays), arrays))


def _once(f: Callable) -> Callable:
  """Returns f(static, ...) that raises a readable error when it is differentiated."""
  wrapped = jax.custom_jvp(f, nondiff_argnums=(0,))

  @wrapped.defjvp
  def refuse(static, primals, tangents):
    raise NotImplementedError(
      "impl='pallas' has first derivatives only, and a second one was asked for; use "
      "impl='recurrent' or impl='associative'."
    )

  return wrapped
