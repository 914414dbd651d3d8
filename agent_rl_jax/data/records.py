"""How a raw record of a data set becomes a Task: named parsers.

A record is a mapping of plain Python values (text, numbers), wherever it was
stored.  Leaves out reading files.  Invariant: a record either gives a whole,
well-typed task or raises RecordError with the field and the reason; nothing
is guessed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from agent_rl_jax import types

ON_ERROR = ('skip', 'raise')

_NUMBER = re.compile(r'-?(\d+(\.\d*)?|\.\d+)')


class RecordError(ValueError):
  """A record that gives no task; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class RecordOptions:
  """How records are read.

  Attributes:
    parser: Key of PARSERS.
    question_field: Field with the problem's text.
    answer_field: Field with the gold answer (`gsm8k`: the worked solution).
    extra_fields: More fields to copy into the task's payload, as text.
    system: System message in front of every task; empty for none.
    instruction: Text appended to every question after a blank line.
    env: Key of the environment that plays the tasks.
  """

  parser: str = 'gsm8k'
  question_field: str = 'question'
  answer_field: str = 'answer'
  extra_fields: tuple[str, ...] = ()
  system: str = ''
  instruction: str = ''
  env: str = 'tool'

  def __post_init__(self):
    object.__setattr__(self, 'extra_fields', tuple(self.extra_fields))
    if self.parser not in PARSERS:
      raise ValueError(
          f'parser={self.parser!r} is not one of {sorted(PARSERS)}'
      )
    if len(set(self.fields)) != len(self.fields):
      raise ValueError(
          f'fields {self.fields} repeat: question_field, answer_field and'
          ' extra_fields must differ'
      )
    if 'answer' in self.extra_fields:
      raise ValueError(
          "extra_fields may not hold 'answer', the name of the gold answer in"
          ' the payload; rename the field in the data'
      )

  @property
  def fields(self) -> tuple[str, ...]:
    """Every field that is read, in order."""
    return (self.question_field, self.answer_field, *self.extra_fields)


def field_text(record: Mapping[str, Any], field: str) -> str:
  """A field as text; numbers as Python writes them.

  Raises:
    RecordError: The field is missing, is neither text nor a finite number, or
      holds characters that UTF-8 cannot write (lone surrogates).
  """
  if field not in record:
    raise RecordError(f'no field {field!r} among {sorted(record)}')
  value = record[field]
  if isinstance(value, bool) or not isinstance(value, (str, int, float)):
    raise RecordError(
        f'field {field!r} is {type(value).__name__}, not text or a number'
    )
  if isinstance(value, float) and not math.isfinite(value):
    raise RecordError(f'field {field!r} is {value}')
  text = str(value)
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:
    raise RecordError(f'field {field!r} is not Unicode text: {error}') from None
  return text


def _gsm8k_answer(text: str) -> str:
  """Number after the last `####` of a GSM8K solution, commas removed."""
  _, mark, gold = text.rpartition('####')
  if not mark:
    raise RecordError("the answer has no '#### ' before its final number")
  gold = gold.strip().removeprefix('$').replace(',', '')
  if not _NUMBER.fullmatch(gold):
    raise RecordError(f"{gold!r} after '####' is not a number")
  return gold


def _plain_answer(text: str) -> str:
  if not text.strip():
    raise RecordError('the answer is empty')
  return text


# Text of the answer field -> gold answer.
PARSERS: dict[str, Callable[[str], str]] = {
    'gsm8k': _gsm8k_answer,
    'plain': _plain_answer,
}


def to_task(
    record: Mapping[str, Any], uid: str, options: RecordOptions
) -> types.Task:
  """Task of one record.

  Raises:
    RecordError: A field is missing or malformed.
  """
  if not isinstance(record, Mapping):
    raise RecordError(f'a record is {type(record).__name__}, not an object')
  question = field_text(record, options.question_field)
  if not question.strip():
    raise RecordError(f'field {options.question_field!r} is empty')
  if options.instruction:
    question = f'{question}\n\n{options.instruction}'
  messages = [{'role': 'user', 'content': question}]
  if options.system:
    messages.insert(0, {'role': 'system', 'content': options.system})
  answer = PARSERS[options.parser](field_text(record, options.answer_field))
  extra = {field: field_text(record, field) for field in options.extra_fields}
  return types.Task(
      uid=uid,
      env=options.env,
      messages=tuple(messages),
      payload={'answer': answer, **extra},
  )


def check_on_error(on_error: str) -> None:
  """Raises ValueError unless `on_error` is 'skip' or 'raise'."""
  if on_error not in ON_ERROR:
    raise ValueError(f'on_error={on_error!r} is not one of {ON_ERROR}')
