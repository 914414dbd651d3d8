"""Word problems whose arithmetic is too large to do in the head.

Twelve short stories of three or four numbers (two or three operations), each
number of 2 to 5 digits and each answer of 4 to 7.  The numbers stand in the
story in the order in which the code needs them, so that writing the code is
copying from left to right.  The stories share a small ASCII vocabulary, since
the policy that reads them is tiny.

Train and held-out problems are disjoint by construction: a checksum of the
numbers alone, not of seed, index or story, says which split they belong to
(one tuple in eight is held out).  Leaves out demonstrations (demonstrations.py).
Invariant: a problem is a pure function of (seed, index, split).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
import zlib
from collections.abc import Mapping, Sequence

from agent_rl_jax import types
from agent_rl_jax.data import named

LETTERS = 'abcd'
SPLITS = ('train', 'heldout')
MIN_ANSWER = 1_000
MAX_ANSWER = 9_999_999
_HELDOUT_ONE_IN = 8

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@dataclasses.dataclass(frozen=True)
class Template:
  """One story.

  Attributes:
    story: Text with the fields {a}, {b}, ... in this order.
    right: Expression that answers the story.
    wrong: The mistake that demonstrations make: same numbers, other operators.
    ranges: Least and largest value of each number, both included.
  """

  story: str
  right: str
  wrong: str
  ranges: tuple[tuple[int, int], ...]


TEMPLATES: tuple[Template, ...] = (
    Template(
        'A farm packs {a} boxes of {b} eggs. Then {c} eggs break.'
        ' How many eggs are left?',
        'a*b-c',
        'a*b+c',
        ((100, 999), (12, 99), (100, 9999)),
    ),
    Template(
        'A shop sells {a} boxes of {b} pens and {c} more pens.'
        ' How many pens in all?',
        'a*b+c',
        'a+b+c',
        ((100, 999), (12, 99), (100, 9999)),
    ),
    Template(
        'A bank holds {a} coins. It buys {b} boxes at {c} coins each.'
        ' How many coins are left?',
        'a-b*c',
        'a-b-c',
        ((12000, 99999), (12, 99), (12, 999)),
    ),
    Template(
        'A bank holds {a} coins. Then {b} people bring {c} coins each.'
        ' How many coins in all?',
        'a+b*c',
        'a+b+c',
        ((1000, 99999), (12, 999), (12, 99)),
    ),
    Template(
        'A school has {a} girls and {b} boys. Each needs {c} books.'
        ' How many books in all?',
        '(a+b)*c',
        'a+b*c',
        ((100, 9999), (100, 999), (12, 99)),
    ),
    Template(
        'A farm has {a} hens and sells {b} hens. Each hen lays {c} eggs.'
        ' How many eggs in all?',
        '(a-b)*c',
        '(a+b)*c',
        ((200, 9999), (12, 999), (12, 99)),
    ),
    Template(
        'A shop has {a} boxes. Each holds {b} red pens and {c} blue pens.'
        ' How many pens in all?',
        'a*(b+c)',
        'a*b+c',
        ((12, 999), (12, 999), (12, 99)),
    ),
    Template(
        'A team walks {a} days. Each day it plans {b} miles but rests {c}'
        ' miles. How many miles in all?',
        'a*(b-c)',
        'a*b-c',
        ((100, 999), (100, 999), (12, 99)),
    ),
    Template(
        'A school buys {a} books at {b} coins and {c} pens at {d} coins.'
        ' How many coins in all?',
        'a*b+c*d',
        'a*b+c+d',
        ((100, 999), (12, 99), (100, 999), (12, 99)),
    ),
    Template(
        'A shop sells {a} boxes at {b} coins. It pays {c} people {d} coins'
        ' each. How many coins are left?',
        'a*b-c*d',
        'a*b-c-d',
        ((200, 999), (50, 99), (12, 99), (12, 99)),
    ),
    Template(
        'A farm has {a} red hens and {b} blue hens. Each lays {c} eggs.'
        ' Then {d} eggs break. How many eggs are left?',
        '(a+b)*c-d',
        '(a+b)*c+d',
        ((100, 999), (12, 999), (12, 99), (100, 999)),
    ),
    Template(
        'A train has {a} cars of {b} rows of {c} seats. Then {d} seats'
        ' break. How many seats are left?',
        'a*b*c-d',
        'a*b*c+d',
        ((12, 99), (12, 99), (12, 99), (100, 999)),
    ),
)


@functools.cache
def _parse(expression: str) -> ast.expr:
  return ast.parse(expression, mode='eval').body


def evaluate(expression: str, numbers: Mapping[str, int]) -> int:
  """Value of an expression of +, -, * and brackets over named integers."""

  def value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
      return _OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Name):
      return numbers[node.id]
    raise ValueError(f'{expression!r} has more than +, -, * and names')

  return value(_parse(expression))


def split_of(numbers: Sequence[int]) -> str:
  """Split that a tuple of numbers belongs to, whatever story tells it."""
  checksum = zlib.crc32(','.join(map(str, numbers)).encode('ascii'))
  return 'train' if checksum % _HELDOUT_ONE_IN else 'heldout'


def assignments(numbers: Mapping[str, int]) -> str:
  """The numbers as code: `a=965;b=54`."""
  return ';'.join(f'{letter}={number}' for letter, number in numbers.items())


def code(expression: str, numbers: Mapping[str, int]) -> str:
  """Program that prints the expression: `a=965;b=54;print(a*b)`."""
  return f'{assignments(numbers)};print({expression})'


@dataclasses.dataclass(frozen=True)
class Problem:
  """A story with its numbers; `template` indexes TEMPLATES."""

  template: int
  numbers: Mapping[str, int]

  @property
  def story(self) -> str:
    return TEMPLATES[self.template].story.format(**self.numbers)

  @property
  def answer(self) -> int:
    return evaluate(TEMPLATES[self.template].right, self.numbers)

  @property
  def code(self) -> str:
    return code(TEMPLATES[self.template].right, self.numbers)

  @property
  def wrong_answer(self) -> int:
    return evaluate(TEMPLATES[self.template].wrong, self.numbers)

  @property
  def wrong_code(self) -> str:
    return code(TEMPLATES[self.template].wrong, self.numbers)


def problem(seed: int, index: int, split: str) -> Problem:
  """Problem `index` of a split; stories take turns, numbers are drawn.

  Raises:
    ValueError: The split is neither 'train' nor 'heldout'.
  """
  if split not in SPLITS:
    raise ValueError(f'split={split!r} is not one of {SPLITS}')
  template = index % len(TEMPLATES)
  ranges = TEMPLATES[template].ranges
  generator = named.named_generator('word_problems', seed, split, index)
  while True:
    drawn = [int(generator.integers(low, high + 1)) for low, high in ranges]
    if split_of(drawn) != split:
      continue
    candidate = Problem(template, dict(zip(LETTERS, drawn, strict=False)))
    if MIN_ANSWER <= candidate.answer <= MAX_ANSWER:
      return candidate


@dataclasses.dataclass(frozen=True)
class WordProblemSource:
  """Task source of `size` word problems of one split, random access."""

  seed: int = 0
  split: str = 'train'
  size: int = 100_000
  env: str = 'tool'
  system: str = ''

  def __post_init__(self):
    if self.split not in SPLITS:
      raise ValueError(f'split={self.split!r} is not one of {SPLITS}')
    if self.size < 1:
      raise ValueError(f'size={self.size} must be at least 1')

  @property
  def name(self) -> str:
    return f'word_problems/{self.split}/seed={self.seed}'

  @property
  def fingerprint(self) -> str:
    return f'{self.name}/size={self.size}'

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> types.Task:
    if not 0 <= index < self.size:
      raise IndexError(f'{self.name} has {self.size} tasks, not {index}')
    item = problem(self.seed, index, self.split)
    messages = [{'role': 'user', 'content': item.story}]
    if self.system:
      messages.insert(0, {'role': 'system', 'content': self.system})
    return types.Task(
        uid=f'{self.name}/{index}',
        env=self.env,
        messages=tuple(messages),
        payload={
            'answer': str(item.answer),
            'template': item.template,
            'code': item.code,
        },
    )
