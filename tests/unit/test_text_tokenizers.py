"""Tokenizers: any text comes back, and no text becomes a control token."""

import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest
import sentencepiece
import tokenizers as hf
from tokenizers import models, pre_tokenizers, trainers

from agent_rl_jax.text import byte_level, tags, tokenizers, vocabulary

MARKS = ('<|im_start|>', '<|im_end|>', '<think>')
CORPUS = [
    'def f(x):\n    return x + 12\n\n\tprint(f(345))\n',
    'a=965;b=54;c=501;print(a*b-c)\n',
    '  Tom has 12 apples, and 7 pears.\n\nHow many?  ',
] * 20


def _sentencepiece(folder: pathlib.Path) -> vocabulary.Tokenizer:
  return tokenizers.train_sentencepiece(
      CORPUS,
      folder / 'spm.model',
      vocab_size=340,
      control=tags.TAG_CONTROL,
  )


def _bpe_file(folder: pathlib.Path, **changes) -> pathlib.Path:
  """Trains a byte-level BPE on text and returns its tokenizer.json."""
  model = hf.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  model.train_from_iterator(
      [*CORPUS, *['<|im_end|> <think>'] * 50],
      trainers.BpeTrainer(
          vocab_size=400,
          special_tokens=list(MARKS),
          initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
          show_progress=False,
      ),
  )
  spec = json.loads(model.to_str())
  spec['added_tokens'][2]['special'] = False  # as Qwen3 lists <think>
  path = folder / 'tokenizer.json'
  path.write_text(json.dumps(spec | changes))
  return path


def _gguf(folder: pathlib.Path, pre: str = 'smollm') -> pathlib.Path:
  """Writes the vocabulary of `_bpe_file` as GGUF metadata."""
  gguf = pytest.importorskip('gguf')
  spec = json.loads(_bpe_file(folder).read_text())
  vocab = sorted(spec['model']['vocab'], key=spec['model']['vocab'].get)
  path = folder / 'model.gguf'
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(vocab)
  writer.add_token_types([3 if t in MARKS else 1 for t in vocab])
  writer.add_token_merges([' '.join(m) for m in spec['model']['merges']])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(1)
  writer.add_chat_template('{{ messages }}')
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


@pytest.fixture(scope='module')
def kinds(tmp_path_factory) -> dict[str, vocabulary.Tokenizer]:
  folder = tmp_path_factory.mktemp('tokenizers')
  return {
      'bytes': tokenizers.make_tokenizer('bytes'),
      'sentencepiece': _sentencepiece(folder),
      'bpe': tokenizers.make_tokenizer('bpe', _bpe_file(folder)),
      'gguf': tokenizers.make_tokenizer('gguf', _gguf(folder)),
  }


KINDS = sorted(tokenizers.TOKENIZERS)
HARD = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [*MARKS, *tags.TAG_CONTROL, '<unk>', '<0x41>', '\u2581', '\x00']
        ),
        st.sampled_from(
            ['\n', '    ', '\t', '\r\n', '😀', 'e\u0301', 'ﬁ', '12']
        ),
    ),
    max_size=12,
).map(''.join)


@pytest.mark.parametrize('kind', KINDS)
@hypothesis.given(text=HARD)
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_text_comes_back_and_is_never_control(kinds, kind, text):
  tokenizer = kinds[kind]
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert b''.join(map(tokenizer.token_bytes, ids)) == text.encode()
  assert not set(ids) & set(tokenizer.control.values())


@pytest.mark.parametrize('kind', KINDS)
def test_marks_are_reached_by_id_only(kinds, kind):
  tokenizer = kinds[kind]
  mark, index = next(iter(tokenizer.control.items()))
  assert index not in tokenizer.encode(mark)
  assert tokenizer.token_bytes(index) == b''
  assert tokenizer.decode([index]) == mark
  ids = tokenizer.encode_marked(f'a{mark}b')
  assert ids.count(index) == 1
  assert tokenizer.decode(ids) == f'a{mark}b'


@pytest.mark.parametrize('kind', KINDS)
def test_half_a_character_decodes_to_the_replacement(kinds, kind):
  tokenizer = kinds[kind]
  ids = tokenizer.encode('\U000e0041')
  assert len(ids) > 1
  assert '\ufffd' in tokenizer.decode(ids[:-1])
  assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a\ufffdb'


def test_every_mark_of_each_vocabulary_is_control(kinds):
  assert set(kinds['bpe'].control) == set(MARKS)
  assert set(kinds['gguf'].control) == set(MARKS)
  assert set(kinds['sentencepiece'].control) == set(tags.TAG_CONTROL)


def test_digits_stand_alone(kinds):
  for kind in ('sentencepiece', 'gguf'):
    pieces = [kinds[kind].token_bytes(i) for i in kinds[kind].encode('x=12345')]
    assert pieces[-5:] == [b'1', b'2', b'3', b'4', b'5']


def test_sentencepiece_training_is_repeatable(tmp_path):
  one = _sentencepiece(tmp_path)
  first = (tmp_path / 'spm.model').read_bytes()
  two = _sentencepiece(tmp_path)
  assert (tmp_path / 'spm.model').read_bytes() == first
  assert one.digest == two.digest
  assert one.vocab_size == 340
  assert [p.name for p in tmp_path.iterdir()] == ['spm.model']


def test_sentencepiece_size_that_does_not_fit_is_named(tmp_path):
  with pytest.raises(ValueError, match='vocab_size=100000'):
    tokenizers.train_sentencepiece(
        ['ab'], tmp_path / 'm', vocab_size=100000, control=()
    )


def _foreign(folder: pathlib.Path, **settings) -> pathlib.Path:
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(CORPUS),
      model_prefix=str(folder / 'foreign'),
      vocab_size=340,
      model_type='bpe',
      hard_vocab_limit=False,
      minloglevel=2,
      **settings,
  )
  return folder / 'foreign.model'


def test_foreign_model_is_read_without_its_dummy_prefix(tmp_path):
  path = _foreign(
      tmp_path, byte_fallback=True, normalization_rule_name='identity'
  )
  plain = sentencepiece.SentencePieceProcessor(model_file=str(path))
  assert plain.decode(plain.encode('  a\n')) != '  a\n'
  tokenizer = tokenizers.make_tokenizer('sentencepiece', path)
  assert tokenizer.decode(tokenizer.encode('  a\n\n b')) == '  a\n\n b'
  assert tokenizer.token_bytes(tokenizer.encode('print')[0])[:1] == b'p'


def test_foreign_model_that_loses_text_is_refused(tmp_path):
  with pytest.raises(ValueError, match='no byte fallback'):
    tokenizers.make_tokenizer('sentencepiece', _foreign(tmp_path))
  with pytest.raises(ValueError, match='normalises'):
    tokenizers.make_tokenizer(
        'sentencepiece', _foreign(tmp_path, byte_fallback=True)
    )


USER_DEFINED = ('<start_of_turn>', '<start>', '£', ' <h 1>', '  ', '\n\n')


@pytest.fixture(scope='module')
def foreign(tmp_path_factory) -> pathlib.Path:
  return _foreign(
      tmp_path_factory.mktemp('foreign'),
      byte_fallback=True,
      normalization_rule_name='identity',
      user_defined_symbols=[s.replace(' ', '\u2581') for s in USER_DEFINED],
  )


@hypothesis.given(
    parts=st.lists(
        st.one_of(
            st.sampled_from([*USER_DEFINED, '<start', '_of_turn>', '<s>']),
            st.text(max_size=4),
        ),
        max_size=8,
    )
)
@hypothesis.example(parts=['a', '<start_of_turn>', '<start_of_turn>', 'b'])
@hypothesis.example(parts=['£', ' <h 1>', '££', '<start'])
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_text_holds_a_user_defined_symbol(foreign, parts):
  tokenizer = tokenizers.make_tokenizer('sentencepiece', foreign)
  marks = {mark for mark in USER_DEFINED if mark.strip()}
  assert marks <= set(tokenizer.control)
  text = ''.join(parts)
  ids = tokenizer.encode(text)
  assert not set(ids) & set(tokenizer.control.values())
  assert tokenizer.decode(ids) == text


def test_user_defined_symbols_are_reached_by_id(foreign):
  plain = sentencepiece.SentencePieceProcessor(model_file=str(foreign))
  tokenizer = tokenizers.make_tokenizer('sentencepiece', foreign)
  index = tokenizer.control['<start_of_turn>']
  # The library finds it in any text; here it is what the id says.
  assert index in plain.encode('a<start_of_turn>b')
  assert tokenizer.token_bytes(index) == b''
  assert tokenizer.decode([index]) == '<start_of_turn>'
  assert index in tokenizer.encode_marked('a<start_of_turn>b')
  # User-defined whitespace is text, in one piece.
  assert not {'  ', '\n\n'} & set(tokenizer.control)
  assert len(tokenizer.encode('\n\n')) == 1
  # Other pieces become marks when they are named.
  named = tokenizers.make_tokenizer('sentencepiece', foreign, control=('pr',))
  assert named.control.keys() - tokenizer.control.keys() == {'pr'}
  assert named.control['pr'] not in named.encode('print')
  assert named.decode(named.encode('print')) == 'print'
  with pytest.raises(ValueError, match='<nowhere>'):
    tokenizers.make_tokenizer('sentencepiece', foreign, control=('<nowhere>',))


def test_bpe_gives_the_library_s_ids_for_plain_text(tmp_path, kinds):
  path = _bpe_file(tmp_path)
  model = hf.Tokenizer.from_file(str(path))
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  text = 'def f(x):\n    return x + 12\n\n\tprint(f(345)) apples'
  assert kinds['bpe'].encode(text) == model.encode(text).ids


@pytest.mark.parametrize(
    'changes',
    [
        {'model': {'type': 'WordPiece', 'vocab': {}}},
        {'normalizer': {'type': 'Lowercase'}},
        {'pre_tokenizer': {'type': 'Whitespace'}},
    ],
)
def test_other_tokenizer_json_is_refused(tmp_path, changes):
  with pytest.raises(ValueError):
    tokenizers.make_tokenizer('bpe', _bpe_file(tmp_path, **changes))


def test_added_blanks_stay_text(tmp_path):
  path = _bpe_file(tmp_path)
  spec = json.loads(path.read_text())
  spec['model']['vocab']['   '] = size = len(spec['model']['vocab'])
  spec['added_tokens'].append(
      spec['added_tokens'][0] | {'content': '   ', 'id': size, 'special': False}
  )
  path.write_text(json.dumps(spec))
  tokenizer = tokenizers.make_tokenizer('bpe', path)
  ids = tokenizer.encode('a   b<|im_end|>')
  assert size in ids and '   ' not in tokenizer.control
  assert tokenizer.decode(ids) == 'a   b<|im_end|>'


def test_a_mark_that_merges_would_make_is_unmade(tmp_path):
  path = _bpe_file(tmp_path)
  spec = json.loads(path.read_text())
  index = spec['model']['vocab']['print']
  spec['added_tokens'].append(
      spec['added_tokens'][0] | {'content': 'print', 'id': index}
  )
  path.write_text(json.dumps(spec))
  tokenizer = tokenizers.make_tokenizer('bpe', path)
  assert index not in tokenizer.encode('print(1)')
  assert tokenizer.decode(tokenizer.encode('print(1)')) == 'print(1)'


def test_tokenizer_config_beside_the_file_is_read(tmp_path):
  path = _bpe_file(tmp_path)
  config = {'chat_template': '{{ x }}', 'bos_token': {'content': '<think>'}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  tokenizer = tokenizers.make_tokenizer('bpe', path)
  assert tokenizer.chat_template == '{{ x }}'
  assert tokenizer.special == {'bos_token': '<think>'}


def test_gguf_metadata_is_read(kinds):
  assert kinds['gguf'].chat_template == '{{ messages }}'
  assert kinds['gguf'].special == {
      'bos_token': MARKS[0],
      'eos_token': MARKS[1],
  }


def test_gguf_with_an_unknown_pre_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match='chatglm'):
    tokenizers.make_tokenizer('gguf', _gguf(tmp_path, pre='chatglm'))


def test_a_missing_byte_reads_as_the_replacement(tmp_path):
  path = _bpe_file(tmp_path)
  spec = json.loads(path.read_text())
  bell = next(k for k, v in byte_level._byte_of().items() if v == 7)
  del spec['model']['vocab'][bell]
  path.write_text(json.dumps(spec))
  tokenizer = tokenizers.make_tokenizer('bpe', path)
  assert tokenizer.decode(tokenizer.encode('a\x07b')) == 'a\ufffdb'


@pytest.mark.parametrize(
    'kind, path, words',
    [
        ('sentencepeice', 'x', "did you mean 'sentencepiece'"),
        ('bpe', None, 'needs the path'),
        ('bytes', 'x', 'reads no file'),
    ],
)
def test_bad_arguments_are_named(kind, path, words):
  with pytest.raises(ValueError, match=words):
    tokenizers.make_tokenizer(kind, path)
