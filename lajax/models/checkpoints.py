"""Checkpoints: a folder with config.json and safetensors files, as Hugging Face's hub has them."""

import functools
import json
import logging
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import Sharding

from lajax._meshes import on_automatic_axes, spec_of
from lajax._numerics import bits_of_half, promoted
from lajax._shapes import check_dtype_option
from lajax.models.config import ModelConfig
from lajax.models.families import family_of, published_config, read_config
from lajax.models.families.options import Options
from lajax.models.language_model import LanguageModel
from lajax.models.tables import DerivedTensor, Place, Tables, derived_tensors, places
from lajax.models.tensor_files import INDEX, SINGLE, TensorFiles

FILE_BYTES = 4 * 2**30  # of a file that `save` writes
SHOWN = 12  # names in a message
ChooseSharding = Callable[[str, tuple[int, ...]], Sharding | None]
LOG = logging.getLogger("lajax.models")
# Of each loaded model: its folder, its config, and the tables of that folder's tensors.
_SOURCES: weakref.WeakKeyDictionary[LanguageModel, "_Source"] = weakref.WeakKeyDictionary()


def from_config(
  config: ModelConfig | Mapping[str, Any] | str | os.PathLike,
  *,
  dtype=None,
  param_dtype=jnp.float32,
  remat: bool = False,
  rngs: nnx.Rngs,
) -> LanguageModel:
  """Returns a model with initial parameters.

      model = from_config("folder", rngs=nnx.Rngs(0))
      shapes = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))   # no memory

  Args:
    config: the dict of a config.json, its path or that of its folder, or a `ModelConfig`.
    dtype, param_dtype, remat, rngs: of `LanguageModel`.

  Raises:
    ValueError: an option of the config is not understood or not implemented; its name is said.
  """
  if not isinstance(config, ModelConfig):
    config = read_config(_published(config))
  return LanguageModel(config, dtype=dtype, param_dtype=param_dtype, remat=remat, rngs=rngs)


def load(
  folder: str | os.PathLike,
  dtype=None,
  sharding: Sharding | ChooseSharding | None = None,
  *,
  remat: bool = False,
) -> LanguageModel:
  """Returns the model of a checkpoint's folder.

  Tensors are read one by one onto the devices, so that the host never holds more than two of them.
  Those that a text model has no place for (of a vision tower, or of multi-token prediction) are
  left out; one line of the logger "lajax.models" says how many.

  Args:
    folder: with config.json and model.safetensors, or model.safetensors.index.json and the files
      that it names; or a repository of the hub, "owner/name", which is downloaded (extra `hub`).
    dtype: of all parameters; None for those of the tensors.
    sharding: of all parameters; or a function of a parameter's path ("stacks/0/blocks/1/...") and
      shape, that returns its sharding or None; None for the default device.
    remat: of `LanguageModel`.

  Raises:
    ValueError: config.json has an option that is not understood or not implemented; a tensor is
      missing, unknown, or has the wrong shape: all are named. FileNotFoundError: a file is missing.
  """
  check_dtype_option("dtype", dtype)
  folder = _local(folder)
  published = _published(folder)
  files = TensorFiles(folder)
  config, tables = read_config(published), _tables(published).fitting(files.tensors)
  options = {"param_dtype": dtype or jnp.float32, "remat": remat}
  model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0), **options))
  found = list(places(model, tables))
  derived = {x.name for x in derived_tensors(model, tables)}
  _check_tensors(files, found, derived, tables, config)
  _say_left_out(_left_out(files, tables, config), folder)
  paths = {id(v): "/".join(map(str, p)) for p, v in nnx.iter_graph(model) if _is_variable(v)}
  dtypes: dict[int, Any] = {}
  for place in found:
    given = [files.dtype(name) for name in place.tensors] if dtype is None else [dtype]
    for v in place.variables:
      dtypes[id(v)] = promoted(*given, *([dtypes[id(v)]] if id(v) in dtypes else []))
  made: dict[int, Any] = {}
  for place in found:
    parts = place.row.to_parameters([files.read(name) for name in place.tensors], place.shapes)
    for v, part in zip(place.variables, parts, strict=True):
      chosen = sharding(paths[id(v)], v.shape) if callable(sharding) else sharding
      made[id(v)] = _written(made.get(id(v)), part, place.index, v.shape, dtypes[id(v)], chosen)
  for _, v in nnx.iter_graph(model):
    if _is_variable(v):
      v.set_value(made[id(v)])
  model.param_dtype = jnp.dtype(model.embedding.dtype)
  _SOURCES[model] = _Source(folder, config, tables)
  return model


def save(model: LanguageModel, folder: str | os.PathLike) -> None:
  """Writes config.json and the tensors of a model, bitwise as `load` read them.

  The tensors have the names that they had in the folder from which `load` read this model. A copy
  of a model (by `nnx.merge` or `nnx.clone`) does not know that folder: its tensors have the names
  that transformers gives them, which differ for the experts of published Qwen 3.5 files.

  Tensors that are computed from others (MiniMax's tables of decays) are copied from the folder.
  They are computed again where it is gone, or where the others have changed since; then they can
  differ in the last bit.

  Args:
    model: of any config. One that was not read from a config.json gets one that spells it out.
    folder: is made if it is missing. Tensors of more than 4 GiB go to several files and an index.

  Raises:
    ValueError: `model` is no LanguageModel, is unrolled, or has mixers from outside lajax.layers.
  """
  if not isinstance(model, LanguageModel):
    raise ValueError(f"`model` must be a LanguageModel; got {type(model).__name__}.")
  if not model.stacked:
    raise ValueError(
      "`model` must have stacked layers; got one that is unrolled. Save the model that "
      "`lajax.models.unrolled` was called with."
    )
  published = published_config(model.config)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n")
  tables = _tables_of(model, published)
  found = list(places(model, tables))
  groups = list(_groups(found))
  extra = _derived_arrays(model, tables, found)
  if len(groups) == 1:
    _write(folder / SINGLE, groups[0], extra)
    return
  weight_map = {}
  for n, group in enumerate(groups):
    name = f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors"
    here = extra if n == len(groups) - 1 else {}
    _write(folder / name, group, here)
    weight_map |= {tensor: name for place in group for tensor in place.tensors}
    weight_map |= dict.fromkeys(here, name)
  size = sum(_bytes(place) for place in found)
  index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
  (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def tensors(model: LanguageModel) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the tensors of the model's checkpoint by name; of an abstract model too."""
  tables = _tables_of(model, published_config(model.config))
  found = {
    name: jax.ShapeDtypeStruct(place.tensor_shape, place.variables[0].dtype)
    for place in places(model, tables)
    for name in place.tensors
  }
  kinds: dict[str, Any] = {}  # one layer's is computed for all
  for derived in derived_tensors(model, tables):
    kind = derived.name.rsplit(".", 1)[-1]
    if kind not in kinds:
      x = derived.compute()
      kinds[kind] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found[derived.name] = kinds[kind]
  return found


# --- configs and folders --------------------------------------------------------------------------


def _published(config: Any) -> dict[str, Any]:
  """Returns the dict of a config.json."""
  if isinstance(config, Mapping):
    return dict(config)
  if not isinstance(config, str | os.PathLike):
    raise ValueError(
      "`config` must be the dict of a config.json, a path, or a ModelConfig; "
      f"got {type(config).__name__}."
    )
  path = pathlib.Path(config)
  path = path / "config.json" if path.is_dir() else path
  if not path.is_file():
    raise FileNotFoundError(f"there is no config.json at {path}")
  return json.loads(path.read_text())


def _tables(published: Mapping[str, Any]) -> Tables:
  return family_of(published).tables(Options(published))


class _Source(NamedTuple):
  folder: pathlib.Path
  config: ModelConfig
  tables: Tables


def _tables_of(model: LanguageModel, published: Mapping[str, Any]) -> Tables:
  """Returns the tables by which a model was loaded, or those of its config."""
  source = _SOURCES.get(model)
  return source.tables if source and source.config is model.config else _tables(published)


def _local(folder: str | os.PathLike) -> pathlib.Path:
  """Returns a folder on this machine: that of a path, or of a repository of the hub."""
  path = pathlib.Path(folder)
  if path.is_dir():
    return path
  name = os.fspath(folder)
  if name.count("/") != 1 or name.startswith((".", "/", "~")):
    raise FileNotFoundError(f"there is no folder {name}")
  try:
    import huggingface_hub  # pyright: ignore[reportMissingImports]
  except ImportError:
    raise FileNotFoundError(
      f"there is no folder {name}. To download the repository {name} of the hub, install "
      "huggingface_hub: pip install 'lajax[hub]'."
    ) from None
  patterns = ["*.json", "*.safetensors", "*.jinja"]
  return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))


# --- reading --------------------------------------------------------------------------------------


def _check_tensors(
  files: TensorFiles, found: list[Place], derived: set[str], tables: Tables, config: ModelConfig
) -> None:
  """ValueError that names the tensors which are missing, unknown or misshapen."""
  wanted = {name: place for place in found for name in place.tensors}
  left_out = _left_out(files, tables, config)
  there = set(files.tensors) - set().union(*left_out.values()) - derived
  problems = {
    "missing": sorted(wanted.keys() - there),
    "unknown": sorted(there - wanted.keys()),
    "misshapen": [
      f"{name} (must be {wanted[name].tensor_shape}; got {files.shape(name)})"
      for name in sorted(wanted.keys() & there)
      if not wanted[name].accepts(name, files.shape(name))
    ],
  }
  lines = [
    f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{', ..' if len(names) > SHOWN else ''}"
    for kind, names in problems.items()
    if names
  ]
  if lines:
    raise ValueError(
      "the checkpoint does not have the tensors of its config.json. " + "; ".join(lines)
    )


def _left_out(files: TensorFiles, tables: Tables, config: ModelConfig) -> dict[str, list[str]]:
  """Returns the tensors that the model leaves out, by the beginning of their names."""
  beginnings = tables.ignored + (("lm_head.",) if config.tied_head else ())
  found = {b: [name for name in files.tensors if name.startswith(b)] for b in beginnings}
  return {beginning: names for beginning, names in found.items() if names}


def _say_left_out(left_out: Mapping[str, list[str]], folder: pathlib.Path) -> None:
  if left_out:
    parts = ", ".join(f"{len(names)} of {b}*" for b, names in left_out.items())
    LOG.warning("load leaves out tensors that a text model does not use: %s (%s)", parts, folder)


def _written(array, part: np.ndarray, index: tuple[int, ...], shape, dtype, sharding):
  """Returns a parameter on its devices, with one layer's (and expert's) part written in place."""
  if all(n == 1 for n in shape[: len(index)]):
    return jax.device_put(np.asarray(part.reshape(shape)).astype(dtype), sharding)
  if array is None:
    array = jnp.zeros(shape, dtype, device=sharding)
  options = {} if sharding is None else {"out_shardings": sharding}
  written = _writer(**options)(array, part, np.asarray(index, np.int32))
  return jax.block_until_ready(written)  # before the next tensor is read: the host holds no queue


@functools.cache
def _writer(**options):
  def write(array, part, index):
    starts = [*index, *(np.int32(0) for _ in part.shape)]
    piece = part.astype(array.dtype).reshape((1,) * index.shape[0] + part.shape)
    written = jax.lax.dynamic_update_slice(bits_of_half(array), bits_of_half(piece), starts)
    return jax.lax.bitcast_convert_type(written, array.dtype)

  on_any_mesh = on_automatic_axes(write, lambda array, *_: spec_of(array))
  return jax.jit(on_any_mesh, donate_argnums=0, **options)


# --- writing --------------------------------------------------------------------------------------


def _groups(found: list[Place]) -> Iterator[list[Place]]:
  """Yields the places of each file."""
  group, size = [], 0
  for place in found:
    if group and size + _bytes(place) > FILE_BYTES:
      yield group
      group, size = [], 0
    group.append(place)
    size += _bytes(place)
  yield group


def _bytes(place: Place) -> int:
  return sum(int(np.prod(shape)) * place.variables[0].dtype.itemsize for shape in place.shapes)


def _derived_arrays(
  model: LanguageModel, tables: Tables, found: list[Place]
) -> dict[str, np.ndarray]:
  """Returns the derived tensors by name: those of the model's folder where they still hold."""
  derived = list(derived_tensors(model, tables))
  source = _SOURCES.get(model)
  try:
    files = TensorFiles(source.folder) if derived and source is not None else None
  except (OSError, safetensors.SafetensorError):  # the folder is gone, or other files are there
    files = None
  sources = {x.source for x in derived}
  now = {name: x for p in found if sources & {*p.tensors} for name, x in p.arrays().items()}

  def of_folder(x: DerivedTensor) -> np.ndarray | None:
    if files is None or not {x.name, x.source} <= files.tensors.keys():
      return None
    then = files.read(x.source)
    same = then.dtype == now[x.source].dtype and np.array_equal(then, now[x.source])
    return files.read(x.name) if same else None

  copied = {x.name: of_folder(x) for x in derived}
  return {x.name: x.compute() if (y := copied[x.name]) is None else y for x in derived}


def _write(path: pathlib.Path, group: list[Place], derived: Mapping[str, np.ndarray]) -> None:
  arrays = {name: np.ascontiguousarray(x) for name, x in derived.items()}
  for place in group:
    arrays |= {name: np.ascontiguousarray(x) for name, x in place.arrays().items()}
  safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)
