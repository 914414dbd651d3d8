"""Tokenizers by name: bytes, sentencepiece, bpe (tokenizer.json) and gguf.

Left out: word-piece and unigram vocabularies of the `tokenizers` library.
Invariant: every kind keeps the promise of `vocabulary.Tokenizer`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence

from agent_rl_jax.text import byte_level, sentencepiece_model, tags, vocabulary

Tokenizer = vocabulary.Tokenizer
train_sentencepiece = sentencepiece_model.train_sentencepiece


class ByteTokenizer(Tokenizer):
  """Ids 0 to 255 are bytes; the marks follow."""

  def __init__(
      self,
      path: str | os.PathLike | None = None,
      control: Sequence[str] = tags.TAG_CONTROL,
  ):
    """Takes no file; `control` names the marks in the order of their ids.

    Raises:
      ValueError: A path is given: this kind has none.
    """
    if path:
      raise ValueError(f"kind 'bytes' reads no file, got path={str(path)!r}")
    marks = {mark: 256 + k for k, mark in enumerate(control)}
    table = [bytes([i]) for i in range(256)] + [b''] * len(marks)
    digest = hashlib.sha256(repr(('bytes', tuple(marks))).encode()).hexdigest()
    super().__init__(table, marks, digest)

  def encode(self, text: str) -> list[int]:
    return list(vocabulary.scrub(text).encode())


TOKENIZERS = {
    'bytes': ByteTokenizer,
    'sentencepiece': sentencepiece_model.SentencePieceTokenizer,
    'bpe': byte_level.ByteLevelTokenizer,
    'gguf': byte_level.GgufTokenizer,
}


def make_tokenizer(
    kind: str, path: str | os.PathLike | None = None, **options
) -> Tokenizer:
  """Returns the tokenizer of `kind` from the file `path`.

  Args:
    kind: A key of TOKENIZERS.
    path: Its file; None for 'bytes'.
    **options: Of the kind: `control` for bytes and sentencepiece.

  Raises:
    ValueError: No such kind, a path too many or too few, or an unfit file.
  """
  if kind not in TOKENIZERS:
    near = difflib.get_close_matches(kind, TOKENIZERS, 1, 0)[0]
    raise ValueError(
        f'unknown tokenizer {kind!r}; did you mean {near!r}? There are'
        f' {sorted(TOKENIZERS)}'
    )
  if kind != 'bytes' and not path:
    raise ValueError(f'tokenizer {kind!r} needs the path of its file')
  return TOKENIZERS[kind](path, **options)
