"""Reads and writes folders of safetensors files, sharded or not.

Which tensor means what is names.py's subject, and config.json families.py's.
Invariant: reading maps the files and copies one tensor at a time; a folder
that lacks a shard or a tensor of its index is refused before anything is read.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping

import ml_dtypes  # noqa: F401  (gives numpy the name 'bfloat16')
import numpy as np

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


class SafetensorsFolder:
  """The tensors of a folder: `shapes` by name, `read(name)` for the values.

  Raises:
    FileNotFoundError: the folder has no safetensors file, or lacks a shard.
    ValueError: a file is no safetensors file, or a tensor is not where the
      index says.
  """

  def __init__(self, folder: str | pathlib.Path):
    from safetensors import SafetensorError, safe_open  # lazy: the [hub] extra

    self.path = pathlib.Path(folder)
    files = _files(self.path)
    shapes: dict[str, tuple[int, ...]] = {}
    self._open = {}
    for file in files:
      try:
        handle = safe_open(file, framework='numpy')
      except SafetensorError as error:
        raise ValueError(
            f'{file} is no safetensors file ({error}); when it is a few lines'
            ' of text it is a Git LFS pointer: fetch the file itself'
        ) from error
      for name in handle.keys():
        self._open[name] = handle
        shapes[name] = tuple(handle.get_slice(name).get_shape())
    self.shapes: Mapping[str, tuple[int, ...]] = shapes
    _check_index(self.path, shapes)

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor in its stored dtype (bfloat16 by ml_dtypes)."""
    return self._open[name].get_tensor(name)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / INDEX
  if index.exists():
    shards = sorted(set(json.loads(index.read_text())['weight_map'].values()))
    missing = [s for s in shards if not (folder / s).exists()]
    if missing:
      raise FileNotFoundError(
          f'{folder} lacks {", ".join(missing)}, which {INDEX} names'
      )
    return [folder / s for s in shards]
  files = sorted(folder.glob('*.safetensors'))
  if not files:
    raise FileNotFoundError(
        f'{folder} has no *.safetensors file (pytorch_model.bin is not read:'
        ' save the model with safe_serialization=True)'
    )
  return files


def _check_index(folder: pathlib.Path, shapes: Mapping[str, object]) -> None:
  index = folder / INDEX
  if index.exists():
    listed = json.loads(index.read_text())['weight_map']
    lost = sorted(set(listed) - set(shapes))
    if lost:
      raise ValueError(f'{folder}: {INDEX} lists {lost[:8]}, which no file has')


def write(
    folder: pathlib.Path,
    tensors: Iterable[tuple[str, int, Callable[[], np.ndarray]]],
    shard_bytes: int,
) -> None:
  """Writes tensors into `folder`, in shards of at most `shard_bytes`.

  Args:
    folder: An existing folder.
    tensors: (name, bytes, function that makes the array) for each tensor; one
      shard's arrays are in memory at a time.
    shard_bytes: A tensor larger than this has a shard of its own.
  """
  from safetensors.numpy import save_file  # lazy: the [hub] extra

  tensors = list(tensors)
  shards: list[list[tuple[str, Callable[[], np.ndarray]]]] = [[]]
  room = shard_bytes
  for name, size, make in tensors:
    if size > room and shards[-1]:
      shards.append([])
      room = shard_bytes
    shards[-1].append((name, make))
    room -= size
  count = len(shards)
  weight_map = {}
  for i, shard in enumerate(shards):
    file = (
        SINGLE
        if count == 1
        else f'model-{i + 1:05d}-of-{count:05d}.safetensors'
    )
    # The writer takes the bytes as they lie: a transposed view must be copied.
    arrays = {name: np.ascontiguousarray(make()) for name, make in shard}
    save_file(arrays, folder / file, metadata={'format': 'pt'})
    # It makes them readable by their owner only; the folder decides that.
    (folder / file).chmod(0o644)
    weight_map.update(dict.fromkeys(arrays, file))
  if count > 1:
    index = {
        'metadata': {'total_size': sum(size for _, size, _ in tensors)},
        'weight_map': weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')
