"""What every tokenizer here is: a table of bytes, one entry per id.

Ids are of two sorts.  Text ids stand for bytes; control ids stand for protocol
marks and for nothing else.  `encode` yields text ids only, whatever the text
spells, so that neither a user nor a tool can write a mark; marks are put in by
id, or sampled by the policy.  Left out: how text is cut into ids (one file per
kind).  Invariant: `decode(encode(text)) == text` for every text that UTF-8 can
hold (lone surrogates become U+FFFD).
"""

from __future__ import annotations

import abc
import re
import types
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


class Tokenizer(abc.ABC):
  """Base of the tokenizers: decoding, control ids and digest.

  Attributes:
    vocab_size: Number of ids.
    control: Mark -> id, for marks that are reachable by id only.
    digest: Hash of all that fixes the mapping, for the run's record.
    chat_template: Jinja template that came with the vocabulary, or None.
    special: Names that came with it, such as {'bos_token': '<s>'}.
  """

  chat_template: str | None = None
  special: Mapping[str, str] = types.MappingProxyType({})

  def __init__(
      self,
      token_bytes: Sequence[bytes],
      control: Mapping[str, int],
      digest: str,
  ):
    self._bytes = tuple(token_bytes)
    self.vocab_size = len(self._bytes)
    self.control = dict(control)
    self.digest = digest
    self._shown = list(self._bytes)
    for mark, index in self.control.items():
      if not 0 <= index < self.vocab_size or self._bytes[index]:
        raise ValueError(
            f'control token {mark!r} has id {index}, which is not a free id of'
            f' this vocabulary of {self.vocab_size}'
        )
      self._shown[index] = mark.encode()
    marks = sorted(self.control, key=lambda mark: (-len(mark), mark))
    self._marks = re.compile('|'.join(map(re.escape, marks)) or r'(?!)')

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns text ids of `text`; never a control id."""

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids`: marks as they are spelt, bad UTF-8 as U+FFFD."""
    return self.text_bytes(ids).decode('utf-8', errors='replace')

  def text_bytes(self, ids: Iterable[int]) -> bytes:
    """Returns the bytes that `decode` reads as UTF-8."""
    return b''.join(self._shown[i] for i in map(int, ids))

  def token_bytes(self, index: int) -> bytes:
    """Returns the bytes of a text id, b'' for an id that is not text."""
    return self._bytes[index]

  @property
  def longest(self) -> int:
    """Bytes in the longest text token."""
    return max(map(len, self._bytes))

  def encode_marked(
      self, text: str, marks: Iterable[str] | None = None
  ) -> list[int]:
    """Returns ids of trusted text, in which marks are control ids.

    For glue that a template or a demonstration wrote, never for what a user or
    a tool wrote.

    Args:
      text: The text.
      marks: The marks to recognise; all control tokens when None.

    Raises:
      KeyError: A mark is not a control token.
    """
    pattern = self._marks
    if marks is not None:
      ordered = sorted(marks, key=lambda mark: (-len(mark), mark))
      pattern = re.compile('|'.join(map(re.escape, ordered)) or r'(?!)')
    ids, start = [], 0
    for match in pattern.finditer(text):
      ids += self.encode(text[start : match.start()])
      ids.append(self.control[match.group()])
      start = match.end()
    return ids + self.encode(text[start:])


def scrub(text: str) -> str:
  """Returns `text` with lone surrogates, which UTF-8 lacks, as U+FFFD."""
  try:
    text.encode()
  except UnicodeEncodeError:
    # A pair of surrogates is a character; a single one is not.
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  return text


def int32(ids: Iterable[int]) -> np.ndarray:
  """Returns ids as an int32 array of rank 1."""
  return np.fromiter(ids, dtype=np.int32)
