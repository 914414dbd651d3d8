"""Demonstrations: true tool outputs, the fixed mix, and the exercises."""

import collections
import re

import pytest

from agent_rl_jax.data import demonstrations, word_problems

OPTIONS = demonstrations.DemonstrationOptions()
SIZE = 2400


def _items(stream, size=SIZE, seed=0):
  source = demonstrations.DemonstrationSource(stream, seed)
  return [source.item(i) for i in range(size)]


def _run(code):
  printed = []
  exec(code, {'print': printed.append})  # Our own expression, not a model's.
  return [str(value) for value in printed]


@pytest.mark.parametrize('stream', sorted(demonstrations.STREAMS))
def test_every_tool_message_is_what_the_code_prints(stream):
  calls = 0
  for item in _items(stream):
    for before, after in zip(item.messages, item.messages[1:], strict=False):
      if after['role'] == 'tool':
        (code,) = re.findall('<code>(.*)</code>', before['content'])
        assert _run(code) == [after['content']]
        calls += 1
  assert calls > SIZE // 3


def test_kinds_answer_rightly_wrongly_and_without_a_call():
  for index, item in enumerate(_items('story')):
    problem = word_problems.problem(0, index, 'train')
    (boxed,) = re.findall(r'\\boxed\{(\d+)\}$', item.messages[-1]['content'])
    roles = [message['role'] for message in item.messages]
    assert item.messages[0]['content'] == problem.story
    assert (boxed == str(problem.answer)) == (item.kind == 'right')
    if item.kind == 'guess':
      assert roles == ['user', 'assistant']
      assert 0.5 <= int(boxed) / problem.answer <= 2
    else:
      assert roles == ['user', 'assistant', 'tool', 'assistant']
      assert item.messages[2]['content'] == boxed


def test_each_template_has_the_shares_of_its_third():
  counts = collections.defaultdict(collections.Counter)
  for index, item in enumerate(_items('story')):
    counts[index % len(word_problems.TEMPLATES)][item.kind] += 1
  per_template = SIZE // len(word_problems.TEMPLATES)
  for template, counter in counts.items():
    mix = OPTIONS.mixes[template % 3]
    for kind, share in zip(demonstrations.KINDS, mix, strict=True):
      # A low-discrepancy choice: 200 draws are within 2 of their share.
      assert abs(counter[kind] - share * per_template) <= 2


def test_exercises_have_their_shares_and_copy_true_numbers():
  items = _items('exercise')
  counter = collections.Counter(item.kind for item in items)
  for kind, share in zip(
      demonstrations.EXERCISES, OPTIONS.exercises, strict=True
  ):
    assert abs(counter[kind] - share * SIZE) <= 3
  for item in items:
    (code,) = re.findall('<code>(.*)</code>', item.messages[1]['content'])
    story = re.findall(r'\d+', item.messages[0]['content'])
    assert re.findall(r'\d+', code) == story


def test_heads_are_prefixes_of_train_stories():
  for index, item in enumerate(_items('exercise', 200)):
    if item.kind == 'head':
      story = word_problems.problem(0, index, 'train').story
      assert story.startswith(item.messages[0]['content'])


def test_items_are_functions_of_seed_and_index():
  for stream in demonstrations.STREAMS:
    assert _items(stream, 30) == _items(stream, 30)
    assert _items(stream, 30) != _items(stream, 30, seed=1)
    source = demonstrations.DemonstrationSource(stream, 0)
    assert source[29] == _items(stream, 30)[29].messages


def test_corpus_leaves_the_tags_out():
  texts = list(demonstrations.corpus(0, 40))
  assert not any('<' in text or '>' in text for text in texts)
  assert any(text.startswith('a=') for text in texts)
  assert any('\\boxed{' in text for text in texts)


def test_options_are_checked():
  options = demonstrations.DemonstrationOptions
  with pytest.raises(ValueError, match='sum to 1'):
    options(mixes=[[0.5, 0.1, 0.1]])
  with pytest.raises(ValueError, match='sum to 1'):
    options(exercises=(1.2, -0.2, 0.0))
  with pytest.raises(ValueError, match='mixes is empty'):
    options(mixes=())
  with pytest.raises(ValueError, match="stream='stories'"):
    demonstrations.DemonstrationSource('stories')
