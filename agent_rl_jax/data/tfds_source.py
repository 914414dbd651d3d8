"""Tasks from a tensorflow-datasets data set, without TensorFlow.

Reads through `as_data_source`, which is random access over ArrayRecord files.
Needs the packages tensorflow-datasets and array_record, and a data set that
was prepared with file_format='array_record' (tfds_export.py writes one).
Leaves out downloading and preparing.  Invariant: TensorFlow is not imported;
text, which arrives as bytes, leaves as str, numbers as Python's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.data import records


def import_tfds():
  """The tensorflow_datasets module.

  Raises:
    ImportError: A package is missing; names it and the command.
  """
  try:
    import array_record  # noqa: F401
    import tensorflow_datasets
  except ImportError as error:
    raise ImportError(
        f'TFDS sources need {error.name}: pip install tensorflow-datasets'
        ' array_record (TensorFlow itself is not needed)'
    ) from error
  return tensorflow_datasets


def _plain(value: Any) -> Any:
  """A stored value as plain Python; raises RecordError on invalid UTF-8."""
  if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0:
    value = value.item()
  if isinstance(value, bytes):
    try:
      return value.decode('utf-8')
    except UnicodeDecodeError as error:
      raise records.RecordError(f'invalid UTF-8: {error}') from None
  return value


class TfdsSource:
  """Task source over one split of a prepared TFDS data set.

  Attributes:
    name: Name of the data set, the first part of every task's uid.
    fingerprint: Name, version, split and size of what is read.
  """

  def __init__(
      self,
      options: records.RecordOptions | None = None,
      *,
      path: str = '',
      dataset: str = '',
      data_dir: str = '',
      split: str = 'train',
      name: str = '',
  ):
    """Opens a data set given by folder or by name.

    Args:
      options: How records become tasks.
      path: Folder of the prepared data set (it holds dataset_info.json).
      dataset: Or its registered name, as `tfds.builder` takes it.
      data_dir: Root of the prepared data sets for `dataset`; TFDS's own
        default when empty.
      split: Split or slice, as TFDS writes it: 'train', 'test[:100]'.
      name: Name of the data set; the one in its dataset_info by default.

    Raises:
      ValueError: Not exactly one of path and dataset is given, the data set
        cannot be opened so, lacks the split or a field, or is empty.
      ImportError: A package is missing.
    """
    if bool(path) == bool(dataset):
      raise ValueError(
          f'path={path!r} and dataset={dataset!r}: give one of them, the'
          ' folder of a prepared data set or a TFDS name'
      )
    self.options = options or records.RecordOptions()
    tfds = import_tfds()
    try:
      if path:
        builder = tfds.builder_from_directory(os.path.expanduser(path))
      else:
        builder = tfds.builder(dataset, data_dir=data_dir or None)
      self._data = builder.as_data_source(split)
    except Exception as error:  # TFDS raises many kinds, none with the fix.
      raise ValueError(
          f'cannot read split={split!r} of TFDS {path or dataset!r}:'
          f' {str(error)[:400]}. It must be prepared with'
          " file_format='array_record'; data/tfds_export.py makes one from a"
          ' JSONL file'
      ) from error
    info = builder.info
    missing = sorted(set(self.options.fields) - set(info.features))
    if missing:
      raise ValueError(
          f'TFDS {info.full_name} has no fields {missing} among'
          f' {sorted(info.features)}; set question_field and answer_field'
      )
    self.name = name or info.name
    self.split = split
    if not len(self):
      raise ValueError(f'split={split!r} of TFDS {info.full_name} is empty')
    size = sum(int(item.num_bytes) for item in info.splits.values())
    self.fingerprint = f'{info.full_name}/{split}/{len(self)}/bytes={size}'

  def __len__(self) -> int:
    return len(self._data)

  def __getitem__(self, index: int) -> types.Task:
    if not 0 <= index < len(self):
      raise IndexError(f'{self.name} has {len(self)} records, not {index}')
    stored: Mapping[str, Any] = self._data[index]
    try:
      record = {field: _plain(stored[field]) for field in self.options.fields}
      return records.to_task(record, f'{self.name}/{index}', self.options)
    except records.RecordError as error:
      raise records.RecordError(
          f'TFDS {self.name} split {self.split!r} record {index}: {error}'
      ) from None
