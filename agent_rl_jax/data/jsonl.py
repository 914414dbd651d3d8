"""Tasks from a JSONL file, with random access.

One pass at construction reads every line once: it notes where each good record
lies, reports each malformed one with file and line, and takes the content's
digest.  Only offsets stay in memory.  Blank lines are not records.  Leaves out
what a record means (records.py) and compressed files.  Invariant: item i is
the i-th good record of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from typing import Any

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.data import records

_REPORTED = 20  # Malformed lines named in the log; the rest are only counted.

_log = logging.getLogger(__name__)


def dataset_name(path: str) -> str:
  """Name of a data set after its file: lower case, words joined by `_`."""
  stem = os.path.splitext(os.path.basename(path))[0]
  return re.sub(r'\W+', '_', stem).strip('_').lower() or 'records'


def _refuse_constant(text: str):
  raise records.RecordError(f'{text} is not JSON')


def _decode(line: bytes) -> Any:
  try:
    return json.loads(line.decode('utf-8-sig'), parse_constant=_refuse_constant)
  except UnicodeDecodeError as error:
    raise records.RecordError(f'invalid UTF-8: {error}') from None
  except records.RecordError:
    raise
  except (ValueError, RecursionError) as error:
    raise records.RecordError(f'invalid JSON: {error}') from None


class JsonlSource:
  """Task source over one JSONL file.

  Attributes:
    name: Name of the data set, the first part of every task's uid.
    fingerprint: Name and digest of the file's content; moving the file does
      not change it.
    errors: The malformed records that were left out, as 'file:line: reason'
      (the first few), of which there are `skipped`.
  """

  def __init__(
      self,
      path: str,
      options: records.RecordOptions | None = None,
      *,
      on_error: str = 'skip',
      name: str = '',
  ):
    """Indexes the file.

    Args:
      path: The file.
      options: How records become tasks.
      on_error: 'skip' leaves malformed records out and logs them; 'raise'
        fails on the first.
      name: Name of the data set; the file's name by default.

    Raises:
      FileNotFoundError: There is no such file.
      records.RecordError: A malformed record with on_error='raise'.
      ValueError: The file holds no good record at all.
    """
    records.check_on_error(on_error)
    self.path = os.path.expanduser(path)
    self.options = options or records.RecordOptions()
    self.name = name or dataset_name(path)
    if not os.path.isfile(self.path):
      raise FileNotFoundError(
          f'path={path!r} is not a file; give the JSONL file to read'
      )
    self.errors: list[str] = []
    self.skipped = 0
    self._index(on_error)
    if not len(self):
      raise ValueError(
          f'{self.path} holds no usable record ({self.skipped} malformed).'
          + ''.join(f'\n  {error}' for error in self.errors[:3])
      )

  def _index(self, on_error: str) -> None:
    offsets, lines, offset = [], [], 0
    digest = hashlib.blake2b(digest_size=16)
    with open(self.path, 'rb') as file:
      for number, line in enumerate(file, start=1):
        digest.update(line)
        if line.strip():
          try:
            records.to_task(_decode(line), '', self.options)
          except records.RecordError as error:
            self._report(f'{self.path}:{number}: {error}', on_error)
          else:
            offsets.append(offset)
            lines.append(number)
        offset += len(line)
    self._offsets = np.asarray(offsets, dtype=np.int64)
    self._lines = np.asarray(lines, dtype=np.int64)
    self.fingerprint = f'{self.name}/{digest.hexdigest()}'
    if self.skipped:
      _log.warning('%s: %d malformed records left out', self.path, self.skipped)

  def _report(self, message: str, on_error: str) -> None:
    if on_error == 'raise':
      raise records.RecordError(message)
    self.skipped += 1
    if self.skipped <= _REPORTED:
      self.errors.append(message)
      _log.warning('malformed record left out: %s', message)

  def __len__(self) -> int:
    return len(self._offsets)

  def record(self, index: int) -> Any:
    """Record `index` as its JSON value.

    Raises:
      IndexError: There is no such record.
      records.RecordError: The line is no longer what was indexed.
    """
    if not 0 <= index < len(self):
      raise IndexError(f'{self.name} has {len(self)} records, not {index}')
    # Opened for each read: threads share no position and nothing needs closing.
    with open(self.path, 'rb') as file:
      file.seek(int(self._offsets[index]))
      line = file.readline()
    try:
      return _decode(line)
    except records.RecordError as error:
      raise self._located(index, error) from None

  def __getitem__(self, index: int) -> types.Task:
    record = self.record(index)
    try:
      return records.to_task(record, f'{self.name}/{index}', self.options)
    except records.RecordError as error:
      raise self._located(index, error) from None

  def _located(self, index: int, error: Exception) -> records.RecordError:
    return records.RecordError(f'{self.path}:{self._lines[index]}: {error}')
