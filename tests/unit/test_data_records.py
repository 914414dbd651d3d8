"""Records: what becomes a task, and what is refused with which words."""

import json

import numpy as np
import pytest

from agent_rl_jax.data import jsonl, records

GOOD = [
    {'question': f'What is {i} + {i}?', 'answer': f'{i}+{i}\n#### {2 * i}'}
    for i in range(6)
]
MALFORMED = {
    'bad JSON': b'{"question": "What?", "answer": ',
    'not an object': b'[1, 2]',
    'missing field': b'{"question": "What?"}',
    'wrong type': b'{"question": ["What?"], "answer": "#### 1"}',
    'true is no number': b'{"question": "What?", "answer": true}',
    'null': b'{"question": null, "answer": "#### 1"}',
    'no mark': b'{"question": "What?", "answer": "1"}',
    'no number': b'{"question": "What?", "answer": "#### one"}',
    'empty question': b'{"question": " ", "answer": "#### 1"}',
    'invalid UTF-8': b'{"question": "What\xff?", "answer": "#### 1"}',
    'lone surrogate': b'{"question": "What\\ud800?", "answer": "#### 1"}',
    'NaN': b'{"question": "What?", "answer": NaN}',
    'too deep': b'[' * 200_000,
}


def _write(path, lines):
  path.write_bytes(b''.join(line + b'\n' for line in lines))
  return str(path)


def _lines(items=GOOD):
  return [json.dumps(item).encode() for item in items]


@pytest.mark.parametrize(
    ('text', 'gold'),
    [
        ('16-3-4=9\n#### 18', '18'),
        ('#### 5\nno, rather\n#### 1,234,567', '1234567'),
        ('#### -3.5', '-3.5'),
        ('so much\n#### $70,000 ', '70000'),
    ],
)
def test_gsm8k_gold_is_the_number_after_the_last_mark(text, gold):
  task = records.to_task(
      {'question': 'How much?', 'answer': text}, 'x/0', records.RecordOptions()
  )
  assert task.payload == {'answer': gold}
  assert task.messages == ({'role': 'user', 'content': 'How much?'},)
  assert (task.uid, task.env) == ('x/0', 'tool')


def test_plain_records_with_fields_of_their_own_names():
  options = records.RecordOptions(
      parser='plain',
      question_field='prompt',
      answer_field='gold',
      extra_fields=['level'],
      system='Be brief.',
      instruction='Box it.',
      env='other',
  )
  task = records.to_task(
      {'prompt': '6 * 7?', 'gold': 42, 'level': 1.5, 'unused': None},
      'x/0',
      options,
  )
  assert task.payload == {'answer': '42', 'level': '1.5'}
  assert task.env == 'other'
  assert task.messages == (
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': '6 * 7?\n\nBox it.'},
  )


@pytest.mark.parametrize('kind', sorted(MALFORMED))
def test_a_malformed_line_is_left_out_and_reported(kind, tmp_path, caplog):
  lines = _lines()
  lines[2:2] = [b'', MALFORMED[kind]]  # A blank line is not a record.
  path = _write(tmp_path / 'some-data.jsonl', lines)
  source = jsonl.JsonlSource(path)
  assert len(source) == len(GOOD)
  assert [source[i].payload['answer'] for i in range(6)] == [
      str(2 * i) for i in range(6)
  ]
  assert source.skipped == 1
  assert source.errors[0].startswith(f'{path}:4: ')
  assert f'{path}:4: ' in caplog.text
  with pytest.raises(records.RecordError, match=f'{path}:4: '):
    jsonl.JsonlSource(path, on_error='raise')


def test_reasons_name_the_field():
  options = records.RecordOptions()
  for record, words in (
      ({'question': 'a'}, "no field 'answer' among"),
      ({'question': [], 'answer': ''}, "field 'question' is list, not text"),
      ({'question': 'a', 'answer': float('inf')}, "field 'answer' is inf"),
      ([], 'a record is list'),
  ):
    with pytest.raises(records.RecordError, match=words):
      records.to_task(record, '', options)


def test_random_access_over_any_line_ending_and_a_byte_order_mark(tmp_path):
  path = tmp_path / 'Ends.v2.jsonl'
  content = b'\r\n'.join(_lines())
  path.write_bytes(b'\xef\xbb\xbf' + content)  # No last newline.
  source = jsonl.JsonlSource(str(path))
  order = np.random.default_rng(0).permutation(6)
  for index in order:
    assert source[index].messages[0]['content'] == GOOD[index]['question']
    assert source[index].uid == f'ends_v2/{index}'
  with pytest.raises(IndexError, match='6 records, not 6'):
    source[6]


def test_a_line_that_changed_since_it_was_indexed_is_named(tmp_path):
  path = tmp_path / 'data.jsonl'
  _write(path, _lines())
  source = jsonl.JsonlSource(str(path))
  _write(path, [b'#' * len(line) for line in _lines()])
  with pytest.raises(records.RecordError, match='data.jsonl:3: invalid JSON'):
    source[2]


def test_fingerprint_is_of_the_content_not_the_place(tmp_path):
  paths = []
  for folder in 'ab':
    (tmp_path / folder).mkdir()
    paths.append(_write(tmp_path / folder / 'data.jsonl', _lines()))
  first, second = map(jsonl.JsonlSource, paths)
  assert first.fingerprint == second.fingerprint
  _write(tmp_path / 'b' / 'data.jsonl', _lines(GOOD[::-1]))
  assert jsonl.JsonlSource(paths[1]).fingerprint != first.fingerprint


def test_a_file_without_a_record_and_a_missing_file_say_so(tmp_path):
  path = _write(tmp_path / 'empty.jsonl', [b'', b'{}'])
  with pytest.raises(ValueError, match='no usable record \\(1 malformed'):
    jsonl.JsonlSource(path)
  with pytest.raises(FileNotFoundError, match='nowhere.jsonl'):
    jsonl.JsonlSource(str(tmp_path / 'nowhere.jsonl'))


def test_options_are_checked():
  with pytest.raises(ValueError, match="parser='gsm' is not one of"):
    records.RecordOptions(parser='gsm')
  with pytest.raises(ValueError, match='repeat'):
    records.RecordOptions(question_field='answer')
  with pytest.raises(ValueError, match="extra_fields may not hold 'answer'"):
    records.RecordOptions(answer_field='gold', extra_fields=('answer',))
  with pytest.raises(ValueError, match="on_error='ignore'"):
    records.check_on_error('ignore')
