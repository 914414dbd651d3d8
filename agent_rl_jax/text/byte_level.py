"""Byte-level BPE, from a tokenizer.json or from the metadata of a GGUF file.

The merging is done by the `tokenizers` library; what is special about a
vocabulary's added tokens is taken away from it, so that the library never
finds a mark in a text.  Left out: normalizers that change text, unigram and
word-piece models (refused), templates and post-processors (the chat formats'
business).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from agent_rl_jax.text import vocabulary

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_LLAMA3 = _QWEN2.replace(r'|\p{N}|', r'|\p{N}{1,3}|')

# GGUF's token types.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


@functools.cache
def _byte_of() -> dict[str, int]:
  """Returns the byte that each letter of the GPT-2 byte alphabet stands for."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in plain]
  table = {chr(byte): byte for byte in plain}
  return table | {chr(256 + k): byte for k, byte in enumerate(others)}


class _ByteLevel(vocabulary.Tokenizer):
  """What both sources share: vocabulary, merges and a pre-tokenizer."""

  def __init__(
      self,
      vocab: Mapping[str, int],
      merges: Sequence[tuple[str, str]],
      control: Mapping[str, int],
      blanks: Mapping[str, int],
      unused: frozenset[int],
      size: int,
      pre_tokenizer: pre_tokenizers.PreTokenizer,
      ignore_merges: bool,
      digest: str,
  ):
    """Builds the merging model without what is not text.

    Args:
      vocab: Piece (in the byte alphabet) -> id, of the text pieces.
      merges: Pairs of pieces in the order of their rank.
      control: Mark -> id.
      blanks: Added tokens made of white space, which stay text.
      unused: Ids that stand for nothing.
      size: Number of ids.
      pre_tokenizer: Cuts text into words and maps bytes to letters.
      ignore_merges: Whether a whole word that is a piece is that piece.
      digest: Hash of the source.
    """
    marks = set(control)
    vocab = {
        piece: i
        for piece, i in vocab.items()
        if piece not in marks and i not in unused
    }
    merges = [
        (a, b)
        for a, b in merges
        if a in vocab and b in vocab and a + b in vocab
    ]
    self._model = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    )
    self._model.pre_tokenizer = pre_tokenizer
    if blanks:
      self._model.add_tokens(
          [tokenizers.AddedToken(text, normalized=False) for text in blanks]
      )
      for text, index in blanks.items():
        if self._model.token_to_id(text) != index:
          raise ValueError(
              f'added token {text!r} has id {index} outside the vocabulary;'
              ' put it into model.vocab'
          )
    byte_of = _byte_of()
    table = [b''] * size
    for piece, index in vocab.items():
      if piece not in blanks:
        table[index] = bytes(byte_of[letter] for letter in piece)
    for text, index in blanks.items():
      table[index] = text.encode()
    # Bytes that no piece holds (SmolLM2 lacks some) would vanish silently.
    held = {piece[0] for piece in table if len(piece) == 1}
    self._lost = frozenset(range(256)) - held
    super().__init__(table, control, digest)

  def encode(self, text: str) -> list[int]:
    text = vocabulary.scrub(text)
    if self._lost and not self._lost.isdisjoint(text.encode()):
      text = ''.join(
          c if self._lost.isdisjoint(c.encode()) else '\ufffd' for c in text
      )
    return self._model.encode(text, add_special_tokens=False).ids


class ByteLevelTokenizer(_ByteLevel):
  """Byte-level BPE of a tokenizer.json.

  Its added tokens become control tokens; those of white space alone stay text.
  A tokenizer_config.json beside it gives `chat_template` and `special`.
  """

  def __init__(self, path: str | os.PathLike):
    """Loads the file.

    Raises:
      ValueError: The file is no byte-level BPE, or changes text.
    """
    source = pathlib.Path(path).read_bytes()
    spec = json.loads(source)
    model = spec['model']
    # Old files do not say their model's type.
    if model.get('type', 'BPE') != 'BPE' or 'merges' not in model:
      raise ValueError(
          f'{path}: model {model.get("type")!r} is not BPE; use the'
          " 'sentencepiece' kind with the checkpoint's .model file"
      )
    if 'ByteLevel' not in json.dumps(spec.get('pre_tokenizer')):
      raise ValueError(
          f'{path}: the pre-tokenizer is not byte-level; use the'
          " 'sentencepiece' kind with the checkpoint's .model file"
      )
    if (normalizer := spec.get('normalizer')) not in (None, {'type': 'NFC'}):
      raise ValueError(
          f'{path}: normalizer {normalizer} changes text, so tokens would not'
          ' give it back; only none and NFC (which is dropped) are read'
      )
    spec_only = {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': [],
        'normalizer': None,
        'pre_tokenizer': _no_prefix(spec['pre_tokenizer']),
        'post_processor': None,
        'decoder': None,
        'model': {'type': 'BPE', 'vocab': {}, 'merges': []},
    }
    cut = tokenizers.Tokenizer.from_str(json.dumps(spec_only)).pre_tokenizer
    added = {
        token['content']: token['id'] for token in spec.get('added_tokens', ())
    }
    special = {
        token['content']
        for token in spec.get('added_tokens', ())
        if token.get('special') or token['content'].strip()
    }
    super().__init__(
        vocab=model['vocab'],
        merges=[
            tuple(pair) if isinstance(pair, list) else tuple(pair.split(' '))
            for pair in model['merges']
        ],
        control={mark: i for mark, i in added.items() if mark in special},
        blanks={text: i for text, i in added.items() if text not in special},
        unused=frozenset(),
        size=1 + max([*model['vocab'].values(), *added.values()]),
        pre_tokenizer=cut,
        ignore_merges=bool(model.get('ignore_merges')),
        digest=hashlib.sha256(source).hexdigest(),
    )
    config = pathlib.Path(path).with_name('tokenizer_config.json')
    if config.exists():
      named = json.loads(config.read_text())
      template = named.get('chat_template')
      self.chat_template = template if isinstance(template, str) else None
      self.special = {
          key: value['content'] if isinstance(value, dict) else value
          for key in ('bos_token', 'eos_token')
          if (value := named.get(key))
      }


def _no_prefix(spec: Any) -> Any:
  """Returns a pre-tokenizer's description that never adds a blank in front."""
  if isinstance(spec, dict):
    return {
        key: False if key == 'add_prefix_space' else _no_prefix(value)
        for key, value in spec.items()
    }
  return (
      [_no_prefix(value) for value in spec]
      if isinstance(spec, list)
      else (spec)
  )


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence(
      [
          pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )


def _gpt2() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# The name under tokenizer.ggml.pre -> how words are cut.
_PRE_TOKENIZERS = {
    'gpt-2': _gpt2,
    'smollm': lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    ),
    'qwen2': lambda: _split(_QWEN2),
    'llama-bpe': lambda: _split(_LLAMA3),
}
_PRE_TOKENIZERS['llama3'] = _PRE_TOKENIZERS['llama-bpe']


class GgufTokenizer(_ByteLevel):
  """Byte-level BPE of a GGUF file's metadata, its chat template included."""

  def __init__(self, path: str | os.PathLike):
    """Reads the metadata.

    Raises:
      ValueError: The vocabulary is not byte-level BPE, or is cut into words in
        a way that is not known here.
    """
    import gguf  # an optional extra

    fields = gguf.GGUFReader(str(path)).fields

    def read(name, default=None):
      field = fields.get(name)
      return default if field is None else field.contents()

    kind = read('tokenizer.ggml.model')
    pre = read('tokenizer.ggml.pre', 'gpt-2')
    if kind != 'gpt2' or pre not in _PRE_TOKENIZERS:
      raise ValueError(
          f'{path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not read;'
          f" only 'gpt2' with one of {sorted(_PRE_TOKENIZERS)} is: take the"
          " checkpoint's tokenizer.json (kind 'bpe') instead"
      )
    tokens = read('tokenizer.ggml.tokens')
    types = read('tokenizer.ggml.token_type', [1] * len(tokens))
    merges = read('tokenizer.ggml.merges', [])
    special = {i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)}
    blank = {i for i in special if not tokens[i].strip()}
    described = json.dumps([tokens, list(map(int, types)), merges, pre])
    super().__init__(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(pair.split(' ')) for pair in merges],
        control={tokens[i]: i for i in sorted(special - blank)},
        blanks={tokens[i]: i for i in sorted(blank)},
        unused=frozenset(i for i, t in enumerate(types) if t == _UNUSED),
        size=len(tokens),
        pre_tokenizer=_PRE_TOKENIZERS[pre](),
        ignore_merges=pre in ('llama-bpe', 'llama3'),
        digest=hashlib.sha256(described.encode()).hexdigest(),
    )
    self.chat_template = read('tokenizer.chat_template')
    self.special = {
        f'{name}_token': tokens[index]
        for name in ('bos', 'eos')
        if (index := read(f'tokenizer.ggml.{name}_token_id')) is not None
    }
