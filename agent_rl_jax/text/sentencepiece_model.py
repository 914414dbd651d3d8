"""SentencePiece: training with settings that keep code whole, and loading.

Left out: unigram sampling, models without byte fallback (they lose text).
Invariant: as of every tokenizer, decode(encode(text)) == text; a model that
cannot hold it is refused when loaded.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from agent_rl_jax.text import vocabulary

# What the library writes for a blank.  Text that holds the character itself
# would come back as a blank, so it is encoded apart, as its three bytes; so is
# a mark of one character, which cannot be cut.
_BLANK = '\u2581'

# ModelProto.normalizer_spec {add_dummy_prefix: false, remove_extra_whitespaces:
# false}.  Appended to a serialized model, it is merged into the model's own
# specification (protocol buffers: the last value of a field counts).
_KEEP_BLANKS = bytes([0x1A, 4, 0x18, 0, 0x20, 0])

# ModelProto.SentencePiece.Type.USER_DEFINED, which the library does not tell.
_USER_DEFINED = 4

_PROBES = (
    'def f(x):\n    return  x\n\n\ttail \n',
    ' ﬁ ½ Ａ \u00a0\u3000 e\u0301 \r\n\x00 😀',
)


class SentencePieceTokenizer(vocabulary.Tokenizer):
  """A SentencePiece model whose marks are reachable by id only.

  Marks are its control symbols and its user-defined symbols, such as
  '<start_of_turn>', which the library would find in any text; user-defined
  runs of whitespace are text.
  A model with a dummy prefix is read without it, so that pieces of a
  conversation can be encoded one by one.
  """

  def __init__(self, path: str | os.PathLike, control: Sequence[str] = ()):
    """Loads a model.

    Args:
      path: The .model file.
      control: Further pieces to treat as marks, whatever their type.

    Raises:
      ValueError: The model cannot give back every text, or lacks a piece.
    """
    proto = pathlib.Path(path).read_bytes()
    model = sentencepiece.SentencePieceProcessor(
        model_proto=proto + _KEEP_BLANKS
    )
    self._model = model
    self._named = tuple(control)
    size = model.vocab_size()
    pieces = [model.id_to_piece(i) for i in range(size)]
    ids = {piece: i for i, piece in enumerate(pieces)}
    missing = [mark for mark in control if mark not in ids]
    if missing:
      raise ValueError(
          f'{path}: no piece {missing[0]!r} in this model; name only pieces that'
          ' it has, or train one with control=(...)'
      )
    shown = [piece.replace(_BLANK, ' ') for piece in pieces]
    types = _piece_types(proto)
    spelt = {
        i
        for i in range(size)
        if pieces[i] in self._named
        or (types[i] == _USER_DEFINED and shown[i].strip())
    }
    marks = {
        shown[i]: i for i in range(size) if model.is_control(i) or i in spelt
    }
    long = [shown[i] for i in spelt if len(shown[i]) > 1]
    self._starts = re.compile(
        f'(?={"|".join(map(re.escape, sorted(long)))})' if long else r'(?!)'
    )
    single = {_BLANK, *(shown[i] for i in spelt if len(shown[i]) == 1)}
    self._single = re.compile(f'([{re.escape("".join(sorted(single)))}])')
    table = [b''] * size
    self._byte_ids = {}
    for i, piece in enumerate(pieces):
      if shown[i] in marks or model.is_unknown(i) or model.is_unused(i):
        continue
      if model.is_byte(i):
        table[i] = bytes([int(piece[3:5], 16)])
        self._byte_ids[table[i][0]] = i
      else:
        table[i] = shown[i].encode()
    if len(self._byte_ids) < 256:
      raise ValueError(
          f'{path}: this model has no byte fallback, so it loses text; train'
          ' one with byte_fallback=true'
      )
    digest = hashlib.sha256(proto + repr(self._named).encode()).hexdigest()
    super().__init__(table, marks, digest)
    for probe in _PROBES:
      back = self.decode(self.encode(probe))
      if back != probe:
        raise ValueError(
            f'{path}: this model turns {probe!r} into {back!r} (it normalises'
            ' text); train one with normalization_rule_name=identity'
        )

  def encode(self, text: str) -> list[int]:
    ids = []
    for k, part in enumerate(self._single.split(vocabulary.scrub(text))):
      if k % 2:
        ids += [self._byte_ids[byte] for byte in part.encode()]
        continue
      # Every mark is cut behind its first character: no piece holds a whole.
      cuts = [match.start() + 1 for match in self._starts.finditer(part)]
      for start, stop in zip([0, *cuts], [*cuts, len(part)], strict=True):
        ids += self._model.encode(part[start:stop])
    return ids


def _piece_types(proto: bytes) -> list[int]:
  """Types of the pieces of a serialized model, in the order of their ids."""
  types = []
  for field, value in _fields(proto):
    if field == 1:  # ModelProto.pieces
      # SentencePiece.type; NORMAL when it is not there.
      types.append(next((v for f, v in _fields(value) if f == 3), 1))
  return types


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
  """Yields (field number, value) of a protocol buffer, nested ones as bytes."""
  place = 0

  def varint() -> int:
    nonlocal place
    value, shift = 0, 0
    while True:
      byte = message[place]
      place += 1
      value |= (byte & 127) << shift
      if byte < 128:
        return value
      shift += 7

  while place < len(message):
    field, wire = divmod(varint(), 8)
    if wire == 0:
      yield field, varint()
      continue
    length = {1: 8, 5: 4}.get(wire)
    if length is None:
      length = varint()
    yield field, message[place : place + length]
    place += length


def train_sentencepiece(
    corpus: Iterable[str],
    path: str | os.PathLike,
    *,
    vocab_size: int,
    control: Sequence[str],
) -> SentencePieceTokenizer:
  """Trains a BPE model that keeps blanks, newlines and code, and loads it.

  The same corpus gives the same bytes on disk; the file appears whole or not
  at all.

  Args:
    corpus: Texts, each with its newlines.
    path: Where the .model file goes.
    vocab_size: Ids in all: 1 unknown, 256 bytes, the marks, then pieces.
    control: Marks, reachable by id only.

  Returns:
    The tokenizer.

  Raises:
    ValueError: The corpus cannot fill, or cannot fit into, `vocab_size`.
  """
  written = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(vocabulary.scrub(text) for text in corpus if text),
        model_writer=written,
        model_type='bpe',
        vocab_size=vocab_size,
        control_symbols=list(control),
        normalization_rule_name='identity',
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        split_digits=True,
        character_coverage=1.0,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        input_sentence_size=0,
        shuffle_input_sentence=False,
        max_sentence_length=1 << 24,
        minloglevel=2,
    )
  except RuntimeError as error:
    raise ValueError(
        f'vocab_size={vocab_size} does not suit this corpus: {error}; choose at'
        f' least {257 + len(control)} plus the distinct characters, and no more'
        ' than the corpus has pieces for'
    ) from error
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  part.write_bytes(written.getvalue())
  os.replace(part, path)
  return SentencePieceTokenizer(path)
