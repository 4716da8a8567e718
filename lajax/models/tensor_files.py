"""The tensors in the safetensors files of a checkpoint's folder."""

import json
import math
import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Tensor(NamedTuple):
  """The place of a tensor in a safetensors file."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int


class TensorFiles:
  """The tensors of a folder's safetensors files, by name.

  Tensors are read and not mapped: the pages of a mapped file count as memory of the process.
  """

  def __init__(self, folder: pathlib.Path):
    if (folder / INDEX).is_file():
      names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
      names = [SINGLE]
    self.tensors: dict[str, _Tensor] = {}
    for name in names:
      if not (folder / name).is_file():
        raise FileNotFoundError(f"the checkpoint {folder} has no file {name}")
      self.tensors |= _tensors_of(folder / name)

  def shape(self, name: str) -> tuple[int, ...]:
    return self.tensors[name].shape

  def dtype(self, name: str) -> np.dtype:
    dtype = self.tensors[name].dtype
    if dtype not in DTYPES:
      raise ValueError(f"the tensor {name} must be of {', '.join(DTYPES)}; got {dtype}.")
    return jnp.dtype(DTYPES[dtype])

  def read(self, name: str) -> np.ndarray:
    x = self.tensors[name]
    flat = np.fromfile(x.file, self.dtype(name), math.prod(x.shape), offset=x.offset)
    return flat.reshape(x.shape)


def _tensors_of(file: pathlib.Path) -> dict[str, _Tensor]:
  """Returns the tensors of a file: 8 bytes with the length of its header, JSON, then numbers."""
  with safetensors.safe_open(file, "np"):  # says what is wrong with a damaged file
    pass
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(length))
  header.pop("__metadata__", None)
  start = 8 + length
  return {
    name: _Tensor(file, x["dtype"], tuple(x["shape"]), start + x["data_offsets"][0])
    for name, x in header.items()
  }
