"""The shell of every mixer: projections in, short convolutions, an equation, one projection out."""

import functools
import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from lajax._shapes import (
  IMPLS,
  check_dtype_option,
  check_flag,
  check_number,
  check_option,
  check_positive,
  check_rngs,
  check_whole,
)
from lajax.layers.parameters import GatedRMSNorm, Linear, wide_dtype
from lajax.layers.short_conv import ShortConv, convolve_together
from lajax.layers.state import CallDocuments
from lajax.layers.stateful import StatefulLayer

Shapes = Mapping[str, tuple[int, ...]]  # of projections, by name
P = ParamSpec("P")


def value_width(head_dim: int, expand_v: float) -> int:
  """Returns V = K * expand_v; ValueError unless it is a whole number."""
  check_whole("head_dim", head_dim)
  check_number("expand_v", expand_v, above=0)
  width = round(head_dim * expand_v)
  if width < 1 or abs(width - head_dim * expand_v) > 1e-9 * width:  # 49 * (1 / 49) < 1
    raise ValueError(
      f"`expand_v` times head_dim = {head_dim} must be a whole number of at least 1; "
      f"got expand_v={expand_v}."
    )
  return width


def value_heads(num_heads: int, num_v_heads: int | None = None) -> int:
  """Returns HV, a multiple of H; H where it is not given."""
  check_whole("num_heads", num_heads)
  check_positive("num_v_heads", num_v_heads)
  heads = num_heads if num_v_heads is None else num_v_heads
  if heads % num_heads:
    raise ValueError(f"`num_v_heads` must be a multiple of num_heads = {num_heads}; got {heads}.")
  return heads


def key_groups(num_heads: int, num_groups: int) -> int:
  """Returns G, a divisor of H."""
  check_whole("num_groups", num_groups)
  if value_heads(num_heads) % num_groups:
    raise ValueError(f"`num_groups` must divide num_heads = {num_heads}; got {num_groups}.")
  return num_groups


def with_gate(projections: Shapes, use_gate: bool, *shape: int) -> Shapes:
  """Returns the projections, and `gate` of this shape if the flag `use_gate` is True."""
  check_flag("use_gate", use_gate)
  return {**projections, "gate": shape} if use_gate else projections


def extends(base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
  """Marks the `__init__` of a class whose options are, but for a few, those of its base class.

  Its signature lists all options. Its body stores those that the base class lacks; then
  `base.__init__` is called with all others.
  """
  construct_base: Callable[..., None] = base.__init__
  inherited = inspect.signature(construct_base).parameters

  def mark(init: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(init)
    def construct(*args: P.args, **kwargs: P.kwargs) -> None:
      init(*args, **kwargs)
      given = inspect.signature(init).bind(*args, **kwargs)
      given.apply_defaults()
      construct_base(**{name: x for name, x in given.arguments.items() if name in inherited})

    return construct

  return mark


class Mixer(StatefulLayer):
  """A layer [B T D] -> [B T D] that mixes tokens causally and carries a state.

  A subclass names its projections and the shape of its memory in `__init__`, and writes its
  equation in `mix`. Each projection has a kernel of its own, `in_proj.q.kernel`, and its own short
  convolution. So parameters that are sharded by heads need no reshuffle: `out_proj` alone sums over
  devices.

  Args:
    d_model: D.
    projections: names of the projections of the input, with their shapes [.. *shape] after [B T].
    inner: the width of what `mix` returns, before the output projection.
    memory: the shape of the recurrence's state without the batch, for `init_state`.
    conv_size: width of the short convolutions; None for none.
    conv_on: the projections that pass through one.
    conv_bias, conv_activation: options of the convolutions.
    use_bias: biases on the projections in and out.
    out_bias: a bias on the projection out; None for `use_bias`.
    multipliers: factors of projections, by name; 1 where absent.
    impl, chunk_size: of the op; impl also of convolutions and norms.
    dtype: of the projections; None for that of the inputs and parameters together. Gates, norms and
      the recurrence's state are float32 at least.
    param_dtype: of the parameters; those of gates and norms are float32 at least.
    rngs: random streams of the initial parameters.

  Raises:
    ValueError: an option is out of its range.
  """

  memory_letters: Any = "B HV K V"

  def __init__(
    self,
    d_model: int,
    projections: Shapes,
    *,
    inner: int,
    memory: tuple[int, ...] = (),
    conv_size: int | None = None,
    conv_on: tuple[str, ...] = ("q", "k", "v"),
    conv_bias: bool = False,
    conv_activation: str | None = "silu",
    use_bias: bool = False,
    out_bias: bool | None = None,
    multipliers: Mapping[str, float] | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
    dtype=None,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_whole("d_model", d_model)
    check_option("impl", impl, IMPLS)
    check_positive("chunk_size", chunk_size)
    check_positive("conv_size", conv_size)
    check_flag("use_bias", use_bias)
    out_bias = check_flag("out_bias", use_bias if out_bias is None else out_bias)
    check_dtype_option("dtype", dtype)
    check_dtype_option("param_dtype", param_dtype, optional=False)
    check_rngs(rngs)
    projections = {**projections, **self.further_projections(projections)}
    common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = lambda inputs, outputs: Linear(inputs, outputs, use_bias=use_bias, **common)
    self.projections = tuple((name, tuple(shape)) for name, shape in projections.items())
    columns = {name: prod(shape) for name, shape in projections.items()}
    self.in_proj = nnx.Dict({name: linear(d_model, width) for name, width in columns.items()})
    self.out_proj = Linear(inner, d_model, use_bias=out_bias, **common)
    options = {"use_bias": conv_bias, "activation": conv_activation, "impl": impl, **common}
    conv = lambda width: ShortConv(width, conv_size or 1, **options)
    self.multipliers = tuple((multipliers or {}).items())
    self.convolved = conv_on if conv_size else ()
    self.conv = nnx.Dict({name: conv(columns[name]) for name in conv_on}) if conv_size else None
    self.d_model, self.memory_shape = d_model, tuple(memory)
    self.impl, self.chunk_size = impl, chunk_size
    self.dtype, self.param_dtype = dtype, param_dtype
    self.add_parameters(rngs)

  # --- what a relative of another mixer adds ---

  def further_projections(self, projections: Shapes) -> Shapes:
    """Returns projections besides those of the class that this one stands on."""
    return {}

  def add_parameters(self, rngs: nnx.Rngs) -> None:
    """Makes parameters besides those of the class that this one stands on."""

  # --- what a subclass writes ---

  def mix(self, p: dict[str, Array], memory, documents: CallDocuments) -> tuple[Array, Any]:
    """The mixer's equation.

    Args:
      p: the projections by name, [B T *shape]; zero at padding, but for biases.
      memory: the memory before the first token; None for zeros.
      documents: of the call's tokens.

    Returns:
      Outputs [B T ..] before the output projection, and the memory after the last real token.
    """
    raise NotImplementedError

  def project(self, x: Array, conv: Any, documents: CallDocuments) -> tuple[dict[str, Array], Any]:
    """Returns the projections [B T *shape] of x, zero at padding, and the convolutions' cache."""
    p = {name: self.projected(name, x) for name, _ in self.projections}
    if self.conv is None:
      return p, None
    convolved = {name: p[name] for name in self.convolved}
    convolved, conv = convolve_together(self.conv, convolved, conv, documents)
    return p | convolved, conv

  def init_memory(self, batch: int, dtype):
    """Returns the memory before the first token of a computation in `dtype`: zeros."""
    return jnp.zeros((batch, *self.memory_shape), wide_dtype(dtype, self.param_dtype))

  # --- what it uses ---

  @property
  def gate_dtype(self) -> jnp.dtype:
    """Dtype of the parameters of gates and norms."""
    return wide_dtype(self.param_dtype)

  def rms_norm(
    self,
    width: int,
    norm_eps: float,
    activation: str = "swish",
    *,
    unit_offset: bool = False,
    use_weight: bool = True,
  ) -> GatedRMSNorm:
    """Returns a norm with this layer's options."""
    check_number("norm_eps", norm_eps, 0.0)
    options = {"eps": norm_eps, "impl": self.impl}
    options |= {"unit_offset": unit_offset, "use_weight": use_weight}
    return GatedRMSNorm(width, activation, param_dtype=self.gate_dtype, **options)

  def projected(self, name: str, x: Array) -> Array:
    """Returns one projection [B T *shape] of x."""
    y = self.in_proj[name](x)
    factor = dict(self.multipliers).get(name, 1.0)
    y = y if factor == 1 else y * factor
    return y.reshape(*y.shape[:2], *dict(self.projections)[name])

  def apply_op(
    self,
    op: Callable,
    *arrays: Array | None,
    memory,
    documents: CallDocuments,
    scale: float | None = None,
    bound: float | None = None,
  ) -> tuple[Array, Any]:
    """Calls an op on this layer's arrays with its memory, documents, impl and chunk size.

    `bound` is for ops that take one.
    """
    options = {} if bound is None else {"bound": bound}
    return op(
      *arrays,
      initial_state=memory,
      segment_ids=documents.ids,
      impl=self.impl,
      chunk_size=self.chunk_size,
      scale=scale,
      **options,
    )

  # --- what all of them do ---

  @property
  def input_width(self) -> int:
    return self.d_model

  @property
  def parameters_dtype(self):
    return self.out_proj.kernel.dtype

  def init_conv(self, batch, dtype) -> Any:
    """Returns the convolutions' cache before the first token, by projection, or None."""
    if self.conv is None:
      return None
    return {name: self.conv[name].init_conv(batch, dtype) for name in self.convolved}

  def advance(self, x, memory, conv, documents):
    p, conv = self.project(x, conv, documents)
    o, memory = self.mix(p, memory, documents)
    return self.out_proj(jax.lax.collapse(o, 2)), memory, conv
