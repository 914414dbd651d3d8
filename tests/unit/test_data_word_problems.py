"""Word problems: what a story holds, its ranges, and the disjoint splits."""

import re

import pytest

from agent_rl_jax.data import word_problems

ROUNDS = 40
SIZE = ROUNDS * len(word_problems.TEMPLATES)


def _problems(split, seed=0):
  return [word_problems.problem(seed, i, split) for i in range(SIZE)]


@pytest.mark.parametrize('split', word_problems.SPLITS)
def test_numbers_stand_in_the_story_in_the_order_of_the_code(split):
  for item in _problems(split):
    numbers = [str(number) for number in item.numbers.values()]
    assert re.findall(r'\d+', item.story) == numbers
    assert re.findall(r'\d+', item.code) == numbers
    assert re.findall(r'\d+', item.wrong_code) == numbers
    assert all(2 <= len(number) <= 5 for number in numbers)
    assert item.story.isascii()


@pytest.mark.parametrize('split', word_problems.SPLITS)
def test_answer_is_what_the_code_prints(split):
  for item in _problems(split):
    for code, answer in (
        (item.code, item.answer),
        (item.wrong_code, item.wrong_answer),
    ):
      printed = []
      exec(
          code, {'print': printed.append}
      )  # Our own expression, not a model's.
      assert printed == [answer]
    assert 4 <= len(str(item.answer)) <= 7
    assert item.answer != item.wrong_answer


def test_a_dozen_stories_of_two_or_three_operations():
  assert len(word_problems.TEMPLATES) == 12
  for template in word_problems.TEMPLATES:
    for expression in (template.right, template.wrong):
      assert len(re.findall(r'[-+*]', expression)) == len(template.ranges) - 1
      letters = ''.join(re.findall(r'[a-d]', expression))
      assert letters == word_problems.LETTERS[: len(template.ranges)]


def test_splits_share_no_numbers_whatever_the_seeds():
  tuples = {
      split: {
          tuple(item.numbers.values())
          for seed in (0, 1)
          for item in _problems(split, seed)
      }
      for split in word_problems.SPLITS
  }
  # Two random samples hardly ever meet: what proves it is that the numbers
  # alone say their split.
  for split, members in tuples.items():
    assert {word_problems.split_of(numbers) for numbers in members} == {split}
  assert not tuples['train'] & tuples['heldout']
  assert min(map(len, tuples.values())) > 0.99 * 2 * SIZE


def test_a_problem_is_a_function_of_seed_index_and_split():
  problem = word_problems.problem
  assert problem(0, 17, 'train') == problem(0, 17, 'train')
  others = [
      problem(1, 17, 'train'),
      problem(0, 29, 'train'),
      problem(0, 17, 'heldout'),
  ]
  assert problem(0, 17, 'train') not in others
  # Pinned: a resumed run of a newer version must see the same problems.
  assert problem(0, 0, 'train').code == 'a=936;b=23;c=6203;print(a*b-c)'


def test_evaluate_by_hand_and_what_it_refuses():
  numbers = {'a': 7, 'b': 3, 'c': 2, 'd': 5}
  assert word_problems.evaluate('(a+b)*c-d', numbers) == 15
  assert word_problems.evaluate('a-b*c', numbers) == 1
  with pytest.raises(ValueError, match='more than'):
    word_problems.evaluate('__import__("os")', numbers)


def test_tasks_carry_answer_code_and_a_stable_name():
  source = word_problems.WordProblemSource(seed=3, split='heldout', size=24)
  task = source[5]
  item = word_problems.problem(3, 5, 'heldout')
  assert task.payload == {
      'answer': str(item.answer),
      'template': 5,
      'code': item.code,
  }
  assert task.messages == ({'role': 'user', 'content': item.story},)
  assert len({source[i].uid for i in range(len(source))}) == 24
  with pytest.raises(IndexError, match='24 tasks, not 24'):
    source[24]


def test_bad_options_name_the_value():
  with pytest.raises(ValueError, match="split='test'"):
    word_problems.WordProblemSource(split='test')
  with pytest.raises(ValueError, match='size=0'):
    word_problems.WordProblemSource(size=0)
  with pytest.raises(ValueError, match="split='dev'"):
    word_problems.problem(0, 0, 'dev')
