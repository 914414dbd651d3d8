"""Reads GGUF files: metadata and dequantized tensors, one tensor at a time.

The header is parsed here, because the reader of the `gguf` package keeps every
string of the vocabulary as an array of its own and needs seconds for what is
0.1 s of work; block formats and dequantization are that package's.  Writing
GGUF and big-endian files are left out.  Invariant: the file is memory-mapped
and read-only, and nothing but the tensor asked for is ever expanded.
"""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_MAGIC = b'GGUF'
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format; strings and arrays are read by hand.
_SCALARS = {
    0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?',
    10: 'Q', 11: 'q', 12: 'd',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GgufTensor:
  """Where a tensor lies: `shape` is row-major, (out, in) for a matrix."""

  shape: tuple[int, ...]
  kind: int
  offset: int


class _Cursor:
  """Walks the header of a mapped file."""

  def __init__(self, data: np.ndarray):
    self._data = memoryview(data)
    self.position = 0

  def unpack(self, form: str) -> Any:
    values = struct.unpack_from('<' + form, self._data, self.position)
    self.position += struct.calcsize('<' + form)
    return values[0]

  def string(self) -> str:
    size = self.unpack('Q')
    start, self.position = self.position, self.position + size
    if self.position > len(self._data):
      raise struct.error('a string ends past the end of the file')
    # Token texts of byte-level vocabularies are UTF-8; a damaged one is kept
    # readable, not fatal: the tokenizer is the one to judge it.
    return bytes(self._data[start : self.position]).decode('utf-8', 'replace')

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      inner, count = self.unpack('I'), self.unpack('Q')
      if inner in _SCALARS:
        form = f'<{count}{_SCALARS[inner]}'
        values = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return list(values)
      return [self.value(inner) for _ in range(count)]
    if kind not in _SCALARS:
      raise struct.error(f'unknown metadata type {kind}')
    return self.unpack(_SCALARS[kind])


class GgufFile:
  """A GGUF file: `fields` is its metadata, `shapes` and `read` its tensors.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no little-endian GGUF of version 2 or 3, or is cut short.
  """

  def __init__(self, path: str | pathlib.Path):
    self.path = pathlib.Path(path)
    self._data = np.memmap(self.path, np.uint8, mode='r')
    cursor = _Cursor(self._data)
    if bytes(self._data[:4]) != _MAGIC:
      raise ValueError(
          f'{self.path} is no GGUF file: it starts with'
          f' {bytes(self._data[:4])!r} instead of {_MAGIC!r}'
      )
    try:
      self.fields, self.tensors, start = _header(cursor)
    except (struct.error, OverflowError, MemoryError) as error:
      raise ValueError(f'{self.path}: damaged GGUF header: {error}') from error
    self._start = start
    self.shapes: Mapping[str, tuple[int, ...]] = {
        name: tensor.shape for name, tensor in self.tensors.items()
    }

  def read(self, name: str) -> np.ndarray:
    """Returns one tensor, float32, in its row-major shape.

    Raises:
      KeyError: the file has no tensor of that name.
      ValueError: its quantization is unknown to the installed `gguf` package,
        or the file ends before it does.
    """
    from gguf import constants, quants  # lazy: the [hub] extra

    tensor = self.tensors[name]
    try:
      kind = constants.GGMLQuantizationType(tensor.kind)
      block, size = constants.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
      raise ValueError(
          f'{self.path}: tensor {name} has quantization type {tensor.kind},'
          ' which the installed gguf package does not know; upgrade it'
      ) from error
    width = tensor.shape[-1] if tensor.shape else 1
    if width % block:
      raise ValueError(
          f'{self.path}: rows of {name} hold {width} values, not whole blocks'
          f' of {block} ({kind.name})'
      )
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    row_bytes = width // block * size
    begin = self._start + tensor.offset
    end = begin + rows * row_bytes
    if end > len(self._data):
      raise ValueError(
          f'{self.path} is cut short: {name} ends at byte {end}, the file at'
          f' {len(self._data)}; fetch it again'
      )
    raw = np.asarray(self._data[begin:end]).reshape(rows, row_bytes)
    try:
      values = quants.dequantize(raw, kind)
    except NotImplementedError as error:
      raise ValueError(
          f'{self.path}: tensor {name} is {kind.name}, which the gguf package'
          ' cannot dequantize; convert the file to another quantization'
      ) from error
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _header(
    cursor: _Cursor,
) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
  """Returns metadata, tensors and the byte at which tensor data starts."""
  cursor.position = len(_MAGIC)
  version = cursor.unpack('I')
  if version not in (2, 3):
    raise struct.error(
        f'version {version} is not 2 or 3 (a big-endian file, or a newer one)'
    )
  num_tensors, num_fields = cursor.unpack('Q'), cursor.unpack('Q')
  fields: dict[str, Any] = {}
  for _ in range(num_fields):
    key = cursor.string()
    fields[key] = cursor.value(cursor.unpack('I'))
  tensors: dict[str, GgufTensor] = {}
  for _ in range(num_tensors):
    name = cursor.string()
    dims = [cursor.unpack('Q') for _ in range(cursor.unpack('I'))]
    kind, offset = cursor.unpack('I'), cursor.unpack('Q')
    # GGUF lists the fastest axis first.
    tensors[name] = GgufTensor(tuple(reversed(dims)), kind, offset)
  alignment = int(fields.get('general.alignment', 32))
  return fields, tensors, -(-cursor.position // alignment) * alignment
