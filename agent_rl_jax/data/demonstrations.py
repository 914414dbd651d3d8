"""Demonstrations of mixed quality for the cold start (SFT), and its exercises.

Conversations only: {'role', 'content'} messages in the tag syntax of the chat
format, which turns them into ids and a mask of trained tokens.  Leaves out
tokenizing, batching and training.  Two streams, both pure functions of (seed,
index) and both drawn from the train split:

- `story`: a word problem answered rightly (call, read, box), with a wrong
  expression (a true call, but the wrong operators) or by a guess without a
  call, in shares fixed per third of the templates.  The greedy policy then
  follows each template's majority, and sampling shows all three behaviours.
- `exercise`: what has to be learned before: copying digits.  Lists of numbers
  to assign, one-step problems with the whole exchange, heads of stories.

Invariant: every tool message is what the code before it prints.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.data import named, word_problems

KINDS = ('right', 'wrong', 'guess')
EXERCISES = ('list', 'one_step', 'head')

# Story, expression: the words of the real stories, one operation.
ONE_STEP = (
    (
        'A farm has {a} red hens and {b} blue hens. How many hens in all?',
        'a+b',
    ),
    (
        'A bank holds {a} coins and {b} more coins. How many coins in all?',
        'a+b',
    ),
    ('A farm packs {a} boxes of {b} eggs. How many eggs in all?', 'a*b'),
    ('A shop sells {a} boxes at {b} coins. How many coins in all?', 'a*b'),
    (
        'A bank holds {a} coins. It pays {b} coins. How many coins are left?',
        'a-b',
    ),
    (
        'A farm has {a} eggs. Then {b} eggs break. How many eggs are left?',
        'a-b',
    ),
)

_TAGS = re.compile('</?(?:think|code)>')
_WEYL = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True)
class DemonstrationOptions:
  """Shares of behaviours and of exercises.

  Attributes:
    mixes: Shares of (right, wrong, guess); template k follows mix k modulo
      their number.
    exercises: Shares of (list, one_step, head) among the short exercises.
  """

  mixes: tuple[tuple[float, float, float], ...] = (
      (0.60, 0.15, 0.25),
      (0.25, 0.50, 0.25),
      (0.25, 0.15, 0.60),
  )
  exercises: tuple[float, float, float] = (0.2, 0.5, 0.3)

  def __post_init__(self):
    # ml_collections hands sequences over as lists or tuples alike.
    object.__setattr__(self, 'mixes', tuple(map(tuple, self.mixes)))
    object.__setattr__(self, 'exercises', tuple(self.exercises))
    if not self.mixes:
      raise ValueError(
          'mixes is empty; give at least one (right, wrong, guess)'
      )
    for name, shares in (
        *(('mixes', mix) for mix in self.mixes),
        ('exercises', self.exercises),
    ):
      if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f'{name} has shares {shares}: give three that are not negative'
            ' and sum to 1'
        )


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """One conversation and which behaviour it shows (KINDS or EXERCISES)."""

  kind: str
  messages: tuple[types.Message, ...]


def _pick(shares, point: float) -> int:
  """Index of the share that a point of [0, 1) falls in."""
  edges = np.cumsum(shares)
  return int(min(np.searchsorted(edges, point, side='right'), len(shares) - 1))


def _spread(seed: int, purpose: str, index: int) -> float:
  """Point `index` of a Weyl sequence, so that short runs have true shares."""
  start = named.named_generator('spread', purpose, seed).random()
  return (start + index * _WEYL) % 1.0


def _exchange(user: str, think: str, program: str, printed: int):
  return (
      {'role': 'user', 'content': user},
      {
          'role': 'assistant',
          'content': f'<think>{think}</think><code>{program}</code>',
      },
      {'role': 'tool', 'content': str(printed)},
      {'role': 'assistant', 'content': f'\\boxed{{{printed}}}'},
  )


def _copying(user: str, program: str):
  return (
      {'role': 'user', 'content': user},
      {'role': 'assistant', 'content': f'<code>{program}</code>'},
  )


def _guess(answer: int, generator: np.random.Generator) -> int:
  """A number of the answer's magnitude (within a factor of two), not it."""
  while True:
    number = int(answer * 2 ** generator.uniform(-1, 1))
    if number != answer:
      return number


def story(
    seed: int, index: int, options: DemonstrationOptions
) -> Demonstration:
  """Demonstration `index`: a whole word problem, right, wrong or guessed."""
  problem = word_problems.problem(seed, index, 'train')
  template = word_problems.TEMPLATES[problem.template]
  mix = options.mixes[problem.template % len(options.mixes)]
  round_number = index // len(word_problems.TEMPLATES)
  kind = KINDS[
      _pick(mix, _spread(seed, f'kind/{problem.template}', round_number))
  ]
  if kind == 'right':
    messages = _exchange(
        problem.story, template.right, problem.code, problem.answer
    )
  elif kind == 'wrong':
    messages = _exchange(
        problem.story, template.wrong, problem.wrong_code, problem.wrong_answer
    )
  else:
    generator = named.named_generator('guess', seed, index)
    number = _guess(problem.answer, generator)
    messages = (
        {'role': 'user', 'content': problem.story},
        {
            'role': 'assistant',
            'content': f'<think>guess</think>\\boxed{{{number}}}',
        },
    )
  return Demonstration(kind, messages)


def _number(generator: np.random.Generator) -> int:
  """A number of 2 to 5 digits, short ones more often as in the stories."""
  digits = int(generator.choice([2, 3, 4, 5], p=[0.3, 0.4, 0.2, 0.1]))
  return int(generator.integers(10 ** (digits - 1), 10**digits))


def _list(seed: int, index: int, generator: np.random.Generator):
  count = int(generator.integers(1, len(word_problems.LETTERS) + 1))
  numbers = {
      letter: _number(generator) for letter in word_problems.LETTERS[:count]
  }
  text = ' and '.join(str(number) for number in numbers.values())
  return _copying(f'Copy {text}.', word_problems.assignments(numbers))


def _one_step(seed: int, index: int, generator: np.random.Generator):
  text, expression = ONE_STEP[int(generator.integers(len(ONE_STEP)))]
  while True:
    first, second = _number(generator), _number(generator)
    if expression == 'a-b' and first < second:
      first, second = second, first
    numbers = {'a': first, 'b': second}
    answer = word_problems.evaluate(expression, numbers)
    if answer <= word_problems.MAX_ANSWER:
      break
  program = word_problems.code(expression, numbers)
  return _exchange(text.format(**numbers), expression, program, answer)


def _head(seed: int, index: int, generator: np.random.Generator):
  problem = word_problems.problem(seed, index, 'train')
  template = word_problems.TEMPLATES[problem.template]
  count = int(generator.integers(1, len(problem.numbers) + 1))
  numbers = dict(list(problem.numbers.items())[:count])
  last = word_problems.LETTERS[count - 1]
  text = template.story.partition(f'{{{last}}}')[0] + f'{{{last}}}'
  return _copying(text.format(**numbers), word_problems.assignments(numbers))


_EXERCISES = {'list': _list, 'one_step': _one_step, 'head': _head}


def exercise(
    seed: int, index: int, options: DemonstrationOptions
) -> Demonstration:
  """Short exercise `index`: copying digits, and one-step problems."""
  kind = EXERCISES[_pick(options.exercises, _spread(seed, 'exercise', index))]
  generator = named.named_generator('exercise', seed, index)
  return Demonstration(kind, _EXERCISES[kind](seed, index, generator))


STREAMS = {'exercise': exercise, 'story': story}


@dataclasses.dataclass(frozen=True)
class DemonstrationSource:
  """Item i of a stream (`exercise` or `story`) as a conversation."""

  stream: str = 'story'
  seed: int = 0
  size: int = 1_000_000
  options: DemonstrationOptions = DemonstrationOptions()

  def __post_init__(self):
    if self.stream not in STREAMS:
      raise ValueError(
          f'stream={self.stream!r} is not one of {sorted(STREAMS)}'
      )
    if self.size < 1:
      raise ValueError(f'size={self.size} must be at least 1')

  @property
  def name(self) -> str:
    return f'demonstrations/{self.stream}/seed={self.seed}'

  def __len__(self) -> int:
    return self.size

  def item(self, index: int) -> Demonstration:
    """Demonstration with its kind."""
    if not 0 <= index < self.size:
      raise IndexError(f'{self.name} has {self.size} items, not {index}')
    return STREAMS[self.stream](self.seed, index, self.options)

  def __getitem__(self, index: int) -> tuple[types.Message, ...]:
    return self.item(index).messages


def corpus(
    seed: int,
    size: int,
    options: DemonstrationOptions | None = None,
) -> Iterator[str]:
  """Texts of `size` demonstrations to train a tokenizer on, tags left out.

  The tags are control symbols that a chat format inserts by id, so a tokenizer
  must not spend pieces on their spelling.
  """
  options = options or DemonstrationOptions()
  for index in range(size):
    stream = STREAMS['exercise' if index % 4 == 3 else 'story']
    for message in stream(seed, index, options).messages:
      yield from _untagged(message['content'])


def _untagged(text: str) -> list[str]:
  return [part for part in _TAGS.split(text) if part]
