"""Tables that map the tensors of a checkpoint to the parameters of a model, in both directions.

A row says that some tensors, joined along their channels, are some parameters, joined likewise:

    linear("self_attn.q_proj", "in_proj.q")                        # .weight [out in], and .bias
    linear("mlp.gate_up_proj", "gate", "up")                       # one tensor, two parameters
    linear("self_attn.q_proj", "in_proj.q", "in_proj.gate", groups=4)   # joined head by head
    conv("conv1d", "conv.u", "conv.B", "conv.C")                   # [C 1 W], and .bias
    same("A_log", "A_log", shape=(1, 1, -1, 1))                    # same numbers, another shape
    experts("experts.{expert}.up_proj.weight", "up")               # one tensor per expert

Parameters are paths inside a module, whose class the table is for (`Tables`). A row is passed over
where the module has none of its parameters (a bias, say).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
  """Tensors that hold parameters.

  Attributes:
    tensors: their names, with {expert} for a number of an expert.
    parameters: paths of the parameters.
    layout: of the tensors' last axes. "linear": [out in], the parameter is [in out]; "conv":
      [channels 1 width], the parameter is [channels width]; "same": as the parameter.
    groups: channels are joined group by group: of each group, those of every parameter.
    shape: of the tensor, -1 for one size that follows; None for that of the parameter.
  """

  tensors: tuple[str, ...]
  parameters: tuple[str, ...]
  layout: Literal["linear", "conv", "same"]
  groups: int = 1
  shape: Shape | None = None

  @property
  def per_expert(self) -> bool:
    return "{expert}" in self.tensors[0]

  @property
  def axis(self) -> int:
    """The axis of a parameter along which channels are joined."""
    return -2 if self.layout == "conv" else -1

  def to_parameters(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list:
    """Returns the parameters of one layer (and expert), views of the tensors where possible."""
    joined = [self._from_tensor(x, shapes) for x in tensors]
    whole = joined[0] if len(joined) == 1 else np.concatenate(joined, axis=self.axis)
    if len(shapes) == 1:
      return [whole.reshape(shapes[0])]
    axis, sizes = self.axis % whole.ndim, [shape[self.axis] for shape in shapes]
    grouped = whole.reshape(*whole.shape[:axis], self.groups, -1, *whole.shape[axis + 1 :])
    ends = np.cumsum([size // self.groups for size in sizes])[:-1]
    parts = np.split(grouped, ends, axis=axis + 1)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

  def to_tensors(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the tensors of one layer (and expert)."""
    axis = self.axis % max(parameters[0].ndim, 1)
    if len(parameters) == 1:
      whole = parameters[0]
    else:
      cut = lambda x: x.reshape(*x.shape[:axis], self.groups, -1, *x.shape[axis + 1 :])
      grouped = np.concatenate([cut(x) for x in parameters], axis=axis + 1)
      whole = grouped.reshape(*grouped.shape[:axis], -1, *grouped.shape[axis + 2 :])
    return [self._to_tensor(x) for x in np.split(whole, len(self.tensors), axis=self.axis)]

  def tensor_shape(self, shapes: Sequence[Shape]) -> Shape:
    """Returns the shape of each tensor, from those of one layer's parameters."""
    joined = list(shapes[0])
    if joined:
      joined[self.axis] = sum(shape[self.axis] for shape in shapes) // len(self.tensors)
    if self.layout == "linear":
      joined[-1], joined[-2] = joined[-2], joined[-1]
    if self.layout == "conv":
      joined.insert(-1, 1)
    return tuple(joined) if self.shape is None else _completed(self.shape, math.prod(joined))

  def _from_tensor(self, x: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    if self.layout == "linear":
      return np.swapaxes(x, -1, -2)
    if self.layout == "conv":
      return x.reshape(*x.shape[:-2], x.shape[-1])
    return x if self.shape is None else x.reshape(shapes[0])

  def _to_tensor(self, x: np.ndarray) -> np.ndarray:
    if self.layout == "linear":
      return np.swapaxes(x, -1, -2)
    if self.layout == "conv":
      return x[..., None, :]
    return x if self.shape is None else x.reshape(self.shape)


def linear(tensor: str, *parameters: str, groups: int = 1) -> list[Row]:
  """Rows of a projection: the kernels of `parameters`, and their biases if they have any."""
  kernels = tuple(f"{p}.kernel" for p in parameters)
  biases = tuple(f"{p}.bias" for p in parameters)
  return [
    Row((f"{tensor}.weight",), kernels, "linear", groups),
    Row((f"{tensor}.bias",), biases, "same", groups),
  ]


def conv(tensor: str | tuple[str, ...], *parameters: str) -> list[Row]:
  """Rows of short convolutions that are joined, and of their biases if they have any."""
  tensors = (tensor,) if isinstance(tensor, str) else tensor
  names = lambda whose, what: tuple(f"{name}.{what}" for name in whose)
  return [
    Row(names(tensors, "weight"), names(parameters, "weight"), "conv"),
    Row(names(tensors, "bias"), names(parameters, "bias"), "same"),
  ]


def same(tensor: str | tuple[str, ...], *parameters: str, shape: Shape | None = None) -> list[Row]:
  """Row of a tensor with the numbers of its parameters in the same order."""
  tensors = (tensor,) if isinstance(tensor, str) else tensor
  return [Row(tensors, parameters, "same", shape=shape)]


def experts(tensor: str, *parameters: str) -> list[Row]:
  """Row of the matrices of experts: [E out in], or [out in] each if the name has {expert}."""
  return [Row((tensor,), parameters, "linear")]


def head(tensor: str) -> list[Row]:
  """Row of the output head, where it is not tied to the embedding."""
  return [Row((tensor,), ("head",), "linear")]


def swiglu(tensors: str, module: str = "") -> list[Row]:
  """Rows of an MLP with a gate, whose projections have the usual names."""
  return [
    *linear(f"{tensors}gate_proj", f"{module}gate"),
    *linear(f"{tensors}up_proj", f"{module}up"),
    *linear(f"{tensors}down_proj", f"{module}down"),
  ]


@dataclasses.dataclass(frozen=True)
class Derived:
  """A tensor of a checkpoint that holds no parameter: `load` passes it over, `save` computes it.

  Attributes:
    tensor: its name.
    source: name of the tensor that it is computed from.
    compute: makes it from the module of one layer.
  """

  tensor: str
  source: str
  compute: Callable[[Any], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Tables:
  """The rows of a family.

  Attributes:
    model: rows of the model itself: embedding, final norm, head.
    block: rows of a block's norms.
    parts: rows of mixers and MLPs, by class; None for a tensor per parameter, named by its path.
    prefix: of the tensors of a layer, with {layer}.
    ignored: beginnings of the names of tensors that a text model leaves out.
    names: of a layer's tensors where they depend on the layer: (its number, a name of the tables)
      -> the name after the prefix. None for the name itself.
    derived: tensors of mixers that are computed from others, by class.
    other_parts: rows that some published files have in place of those of `parts`, by class.
  """

  model: Sequence[Row]
  block: Sequence[Row]
  parts: Mapping[type, Sequence[Row]] | None
  prefix: str = "model.layers.{layer}."
  ignored: tuple[str, ...] = ()
  names: Callable[[int, str], str] | None = None
  derived: Mapping[type, Sequence[Derived]] = dataclasses.field(default_factory=dict)
  other_parts: Mapping[type, Sequence[Row]] = dataclasses.field(default_factory=dict)

  def fitting(self, names: Iterable[str]) -> "Tables":
    """Returns the tables of a checkpoint with these tensors, which chooses among `other_parts`."""
    start = self.prefix.split("{layer}")[0]
    inside = {n.removeprefix(start).partition(".")[2] for n in names if n.startswith(start)}
    parts = dict(self.parts or {})
    for kind, rows in self.other_parts.items():
      own = {name for row in parts[kind] for name in row.tensors}
      if inside & {name for row in rows for name in row.tensors} - own:
        parts[kind] = rows
    return dataclasses.replace(self, parts=parts) if self.other_parts else self


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a row's tensors in a model.

  Attributes:
    tensors: their full names.
    row: how they become parameters.
    variables: the parameters, each [R ..] or [R E ..] in a stack.
    index: the layer's place in these arrays: (), (repeat,) or (repeat, expert).
  """

  tensors: tuple[str, ...]
  row: Row
  variables: tuple[nnx.Variable, ...]
  index: tuple[int, ...]

  @property
  def shapes(self) -> list[Shape]:
    """Shapes of the parameters of one layer (and expert)."""
    return [tuple(v.shape[len(self.index) :]) for v in self.variables]

  @property
  def tensor_shape(self) -> Shape:
    return self.row.tensor_shape(self.shapes)

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the tensors by name, made from the parameters."""
    parameters = [np.asarray(v[...][self.index]) for v in self.variables]
    return dict(zip(self.tensors, self.row.to_tensors(parameters), strict=True))

  def accepts(self, tensor: str, shape: Shape) -> bool:
    """Says whether a tensor may have this shape: several may be cut evenly, or by parameter."""
    if shape == self.tensor_shape:
      return True
    if len(self.tensors) != len(self.variables):
      return False
    return shape == self.row.tensor_shape(
      [self.shapes[self.tensors.index(tensor)]] * len(self.tensors)
    )


def places(model: Any, tables: Tables) -> Iterator[Place]:
  """Yields the places of all tensors of a model, layer by layer.

  Raises:
    ValueError: a parameter of the model is in no row, or in two.
  """
  left = {id(v): "/".join(map(str, path)) for path, v in _variables(model)}
  found = list(_places(model, tables))
  seen: dict[tuple, str] = {}
  for place in found:
    for variable in place.variables:
      left.pop(id(variable), None)
      key = (id(variable), place.index)
      if key in seen:
        raise ValueError(f"two rows fill one parameter: {seen[key]} and {place.tensors[0]}.")
      seen[key] = place.tensors[0]
  if left:
    raise ValueError(
      f"no tensor of the checkpoint holds the parameters {', '.join(left.values())}."
    )
  yield from found


def _places(model: Any, tables: Tables) -> Iterator[Place]:
  for row, variables in _rows(model, tables.model):
    yield Place(row.tensors, row, variables, ())
  for layer, block, repeat in layers(model):
    yield from _block_places(block, tables, layer, repeat)


def layers(model: Any) -> Iterator[tuple[int, Any, int]]:
  """Yields of each layer its number, its stacked block, and its place in the stack."""
  first = 0
  for stack in model.stacks:
    period = len(stack.blocks)
    for repeat in range(stack.repeats):
      for p, block in enumerate(stack.blocks):
        yield first + repeat * period + p, block, repeat
    first += period * stack.repeats


class DerivedTensor(NamedTuple):
  """A derived tensor of one layer: its name, that of its source, and what computes it."""

  name: str
  source: str
  compute: Callable[[], np.ndarray]


def derived_tensors(model: Any, tables: Tables) -> Iterator[DerivedTensor]:
  """Yields the derived tensors of a model."""
  for layer, block, repeat in layers(model):
    for mixer in block.mixers:
      for row in tables.derived.get(type(mixer), ()):
        graph, state = nnx.split(mixer)
        one = jax.tree.map(lambda p, r=repeat: _of_layer(p, r), state)
        compute = functools.partial(row.compute, nnx.merge(graph, one))
        prefix = tables.prefix.format(layer=layer)
        yield DerivedTensor(prefix + row.tensor, prefix + row.source, compute)


def _of_layer(p: Any, repeat: int) -> Any:
  if isinstance(p, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(p.shape[1:], p.dtype)
  return p[repeat]


def _block_places(block: Any, tables: Tables, layer: int, repeat: int) -> Iterator[Place]:
  if tables.parts is None:
    for path, variable in _variables(block):
      name = ".".join(map(str, path))
      row = Row((name,), (name,), "same")
      yield Place((tables.prefix.format(layer=layer) + name,), row, (variable,), (repeat,))
    return
  parts = [(block, tables.block), *((m, tables.parts[type(m)]) for m in block.mixers)]
  if block.mlp is not None:
    parts.append((block.mlp, tables.parts[type(block.mlp)]))
  prefix = tables.prefix.format(layer=layer)
  for module, rows in parts:
    for row, variables in _rows(module, rows):
      names = row.tensors if tables.names is None else [tables.names(layer, n) for n in row.tensors]
      for expert in range(variables[0].shape[1]) if row.per_expert else (None,):
        full = tuple(prefix + name.replace("{expert}", str(expert)) for name in names)
        yield Place(full, row, variables, (repeat,) if expert is None else (repeat, expert))


def _rows(module: Any, rows: Sequence[Row]) -> Iterator[tuple[Row, tuple[nnx.Variable, ...]]]:
  """Yields the rows whose parameters the module has, with these."""
  for row in rows:
    found = [_variable(module, path) for path in row.parameters]
    variables = tuple(v for v in found if v is not None)
    if len(variables) == len(found):
      yield row, variables
    elif variables:
      missing = [p for p, v in zip(row.parameters, found, strict=True) if v is None]
      raise ValueError(
        f"{type(module).__name__} has no parameter {', '.join(missing)} for {row.tensors[0]}."
      )


def _variable(module: Any, path: str) -> nnx.Variable | None:
  for name in path.split("."):
    if module is None:
      return None
    module = (
      module.get(name) if isinstance(module, nnx.Dict | dict) else getattr(module, name, None)
    )
  return module


def _variables(model: Any) -> list[tuple[tuple, nnx.Variable]]:
  return [(path, v) for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]


def _completed(shape: Shape, size: int) -> Shape:
  known = math.prod(n for n in shape if n != -1)
  return tuple(size // known if n == -1 else n for n in shape)
