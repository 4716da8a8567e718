"""The call that all stateful layers share: checks, documents, the mesh, and the state's dtypes."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lajax._meshes import explicit_mesh, on_automatic_axes, spec_of
from lajax._numerics import promoted
from lajax._shapes import check, check_batch, check_dtype_option, check_given
from lajax.layers.state import CallDocuments, LayerState, check_arrays, check_state, follow


class OptionsOfClass:
  """Signature of a class, which Flax's metaclass hides from `help` and `inspect.signature`."""

  def __get__(self, layer: nnx.Module | None, owner: type) -> inspect.Signature:
    if layer is not None:
      raise AttributeError("a layer is called, and its class has the options.")
    signature = inspect.signature(owner.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class StatefulLayer(nnx.Module):
  """A layer [B T D] -> [B T D] with a state: a subclass writes the methods of the first part."""

  __signature__ = OptionsOfClass()
  dtype: Any  # of the computation; None for that of the inputs and parameters together
  memory_letters: Any = None  # axis letters of the memory: "B HV K V", or a tuple of such
  conv_letters: str = "B W-1 D"

  # --- what a subclass writes ---

  @property
  def input_width(self) -> int:
    """D of the inputs."""
    raise NotImplementedError

  @property
  def parameters_dtype(self) -> Any:
    """Dtype of the parameters that multiply the inputs, as they are now."""
    raise NotImplementedError

  def advance(
    self, x: Float[Array, "B T D"], memory: Any, conv: Any, documents: CallDocuments
  ) -> tuple[Array, Any, Any]:
    """Returns y, memory and conv after the tokens x, which are zero at padding.

    `memory` and `conv` are None before the first call, and zero in rows that begin a new document.
    """
    raise NotImplementedError

  def init_memory(self, batch: int, dtype) -> Any:
    """Returns the memory before the first token of a computation in `dtype`."""
    return None

  def init_conv(self, batch: int, dtype) -> Any:
    """Returns what short convolutions carry before the first token of a computation in `dtype`."""
    return None

  def continued(self, memory: Any, documents: CallDocuments) -> Any:
    """Returns the memory of a state, zero in rows where the call begins a document."""
    return documents.continued(memory)

  def check_memory(self, memory: Any, batch: int) -> Any:
    """Returns the memory of a state as JAX arrays; ValueError if it is not this layer's."""
    wanted = jax.eval_shape(lambda: self.init_memory(batch, jnp.float32))
    return check_arrays("state.memory", memory, self.memory_letters, wanted)

  # --- what all of them do ---

  def __call__(
    self,
    x: Float[Array, "B T D"],
    state: LayerState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T D"], LayerState]:
    """Mixes the tokens of x behind a state.

    Args:
      x: [B T D], D = d_model; T >= 1.
      state: from `init_state` or from the call before; None for zeros.
      segment_ids: [B T] int32, the document of each token, ids >= 0; -1 for padding. A change of id
        begins a new document. The first real token continues the state's document if its id is the
        same, or if the state has seen none.

    Returns:
      y [B T D], zero at padding, and the state after the last real token of each row. A state has
      the dtypes of the computation, promoted with those of the state that came in:
      `init_state(batch, dtype=x.dtype)` has them from the start, as the carry of a `lax.scan` needs
      it.

    Raises:
      ValueError: an argument, or a part of the state, has the wrong rank, size or dtype.
    """
    check_given(x=(x, "B T D"))
    sizes = check({"D": self.input_width}, x=(x, "B T D"), segment_ids=(segment_ids, "B T", "int"))
    if state is not None:
      state = self.check_state(state, sizes["B"])
    return on_layer_mesh(_call, self, jnp.asarray(x), state, segment_ids)

  def check_state(self, state: Any, batch: int) -> LayerState:
    """Returns a state as JAX arrays; ValueError that names the part which is not this layer's."""
    state = check_state(state, batch)
    wanted = jax.eval_shape(lambda: self.init_conv(batch, jnp.float32))
    return state._replace(
      memory=self.check_memory(state.memory, batch),
      conv=check_arrays("state.conv", state.conv, self.conv_letters, wanted),
    )

  def init_state(self, batch: int, *, dtype=None) -> LayerState:
    """Returns the state before the first token: zeros.

    Args:
      batch: B.
      dtype: of the inputs that will come; None for the layer's `dtype`, or that of its parameters.
    """
    batch = check_batch(batch)
    check_dtype_option("dtype", dtype)
    dtype = computation_dtype(self, self.parameters_dtype if dtype is None else dtype)
    return LayerState(
      self.init_memory(batch, dtype),
      self.init_conv(batch, dtype),
      jnp.full(batch, -1, jnp.int32),
      jnp.zeros(batch, jnp.int32),
    )


def computation_dtype(layer: StatefulLayer, inputs) -> jnp.dtype:
  """Returns the dtype of a layer's call on inputs of the dtype `inputs`."""
  return jnp.dtype(layer.dtype or promoted(inputs, layer.parameters_dtype))


def _call(
  layer: StatefulLayer, x: Array, state: LayerState | None, segment_ids
) -> tuple[Array, LayerState]:
  return advance(layer, x, state, follow(state, (x.shape[0], x.shape[1]), segment_ids))


def advance(
  layer: StatefulLayer, x: Array, state: LayerState | None, documents: CallDocuments
) -> tuple[Array, LayerState]:
  """Returns y and the state after the tokens x, whose documents are known; checks nothing."""
  dtype = computation_dtype(layer, x.dtype)
  before = [None, None]
  if state is not None:
    before = [layer.continued(state.memory, documents), documents.continued(state.conv)]
  y, *after = layer.advance(documents.blank_padding(x), before[0], before[1], documents)
  wanted = jax.eval_shape(
    lambda: [layer.init_memory(x.shape[0], dtype), layer.init_conv(x.shape[0], dtype)]
  )
  if state is None:
    settled = jax.tree.map(lambda s, like: s.astype(like.dtype), after, wanted)
  else:
    settled = jax.tree.map(
      lambda s, like, old: s.astype(promoted(like.dtype, old.dtype)), after, wanted, before
    )
  memory, conv = settled
  return documents.blank_padding(y), LayerState(memory, conv, documents.segment, documents.length)


# --- explicit meshes ------------------------------------------------------------------------------


def on_layer_mesh(call, layer: nnx.Module, x: Array, state, segment_ids):
  """Calls `call(layer, x, state, segment_ids) -> (y, state)`, on automatic axes of its mesh.

  y is laid out as x. An array of the state keeps the layout of the one that came in, if its type
  names a mesh; otherwise it is split as the rows of x.
  """
  if explicit_mesh(x, state, segment_ids, layer) is None:
    return call(layer, x, state, segment_ids)
  graph, parameters = nnx.split(layer)
  return _call_on_mesh(call, graph, parameters, x, state, segment_ids)


@functools.partial(jax.jit, static_argnames=("call", "graph"))
def _call_on_mesh(call, graph, parameters, x, state, segment_ids):
  def f(parameters, x, state, segment_ids):
    return call(nnx.merge(graph, parameters), x, state, segment_ids)

  def specs(parameters, x, state, segment_ids):
    rows = PartitionSpec(spec_of(x)[0])
    of_state = lambda s: rows if explicit_mesh(s) is None else spec_of(s)
    return spec_of(x), rows if state is None else jax.tree.map(of_state, state)

  return on_automatic_axes(f, specs)(parameters, x, state, segment_ids)
