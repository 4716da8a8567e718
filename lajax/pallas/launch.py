"""How a kernel is launched: all that depends on the version of JAX, or on whether there is a GPU.

Kernels are written for Pallas' Triton lowering. Where a program is lowered for another platform than CUDA they are
interpreted: the same kernels, as ordinary JAX operations. The platform is that of the lowering, so a program can be
compiled here for a GPU that is elsewhere.
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

DEPRECATION = (
  "The Pallas Triton backend is deprecated"  # said at each lowering for a GPU from JAX 0.11 on
)
warnings.filterwarnings("ignore", message=DEPRECATION)

load, store = plgpu_triton.load, plgpu_triton.store


def wanted(impl: str) -> bool:
  """Whether kernels are asked for: by name, or by "auto" where JAX computes on NVIDIA GPUs since Ampere."""
  return impl == "pallas" or (impl == "auto" and _on_supported_gpu())


def _on_supported_gpu() -> bool:
  if jax.default_backend() != "gpu" or jax.config.jax_default_device is not None:  # pyright: ignore[reportAttributeAccessIssue]
    return False
  versions = [
    str(getattr(device, "compute_capability", "")) for device in jax.devices()
  ]  # of other makers no such number
  return all(re.fullmatch(r"\d+\.\d+", version) and float(version) >= 8 for version in versions)


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
  """Runs kernel(input refs, output refs, interpreted=...) in so many programs.

  There is one grid axis, the first one, which alone may pass 65,535. An input that is None has None for its ref.
  `aliases` maps inputs that are written in place to outputs.
  """
  present = [n for n, x in enumerate(inputs) if x is not None]
  arrays = [inputs[n] for n in present]
  kinds = [jax.typeof(x).manual_axis_type for x in arrays]
  widest = max(
    kinds, key=lambda kind: len(kind.varying)
  )  # under `jax.shard_map`, results vary as inputs do
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
  """f(static, *arrays) with its derivative in reverse mode.

  Args:
    forward: (static, *arrays) -> results, residuals.
    backward: (static, residuals, cotangents) -> the cotangents of the arrays. Both say so where they are differentiated.
    alone: (static, *arrays) -> results and anything, where no derivative is asked for; None for `forward`.
  """
  primal = alone or forward

  @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
  def f(static, *arrays):
    return primal(static, *arrays)[0]

  f.defvjp(_once(forward), _once(backward))
  return lambda static, *arrays: f(static, *jax.tree.map(lambda x: vary_like(x, arrays), arrays))


def _once(f: Callable) -> Callable:
  """f(static, ...), which says so where it is to be differentiated: it is a derivative, or goes with one."""
  wrapped = jax.custom_jvp(f, nondiff_argnums=(0,))

  @wrapped.defjvp
  def refuse(static, primals, tangents):
    raise NotImplementedError(
      "impl='pallas' has first derivatives only, and a second one was asked for; use impl='recurrent' or impl='associative'."
    )

  return wrapped
