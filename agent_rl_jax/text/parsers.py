r"""From the text of a model turn to answers and calls; no tokens here.

Left out: deciding where a turn ends (text/stops.py) and running anything.
Invariant: a malformed turn yields an error worded for the model and no call at
all; it is never run in part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_CALL_BYTES = 64 * 1024
MAX_NESTING = 32

_BOXED = re.compile(r'\\boxed\s*\{')
_FENCE = re.compile(r'^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[ \t]*$', re.MULTILINE)
_CALL, _CALL_END = '<tool_call>', '</tool_call>'


def boxed(text: str) -> list[str]:
  r"""Returns the contents of every complete \boxed{...}, braces balanced."""
  found = []
  for match in _BOXED.finditer(text):
    depth, at = 1, match.end()
    while at < len(text) and depth:
      if text[at] == '\\':
        at += 1  # an escaped brace does not count
      elif text[at] in '{}':
        depth += 1 if text[at] == '{' else -1
      at += 1
    if not depth:
      found.append(text[match.end() : at - 1].strip())
  return found


def answer_of(text: str) -> tuple[str | None, str | None]:
  r"""Returns (answer, error): the one value that `text` boxes, or why not."""
  values = boxed(text)
  if not values:
    return None, (
        r'There is no call and no answer in this turn. Give the final answer'
        r' as \boxed{answer}.'
    )
  if len(set(values)) > 1:
    return None, (
        r'This turn boxes different answers:'
        f' {", ".join(dict.fromkeys(values))}.'
        r' Give one final answer as \boxed{answer}.'
    )
  return values[-1], None


def without_thoughts(text: str) -> str | None:
  """Returns `text` without <think> parts; None when one is never closed."""
  kept = re.sub(r'<think>.*?</think>', '', text, flags=re.DOTALL)
  if '<think>' in kept:
    return None
  # A prefilled <think> is not part of the turn: only its end is.
  return kept.rpartition('</think>')[2]


def code_block(text: str) -> tuple[str | None, str, str | None]:
  """Finds the first ```python block.

  Returns:
    (code, rest, error): the code (None without a block), the text outside of
    fenced blocks, and what is wrong with the fences, if anything is.
  """
  code, rest, start = None, [], 0
  language, opened = None, 0
  for match in _FENCE.finditer(text):
    if language is None:
      rest.append(text[start : match.start()])
      language, opened = match.group(1).lower(), match.end() + 1
    elif not match.group(1):
      if language in ('python', 'py', 'python3') and code is None:
        code = text[opened : match.start()]
      language, start = None, match.end()
  if language is not None:
    return (
        None,
        ''.join(rest),
        (
            'The code block is not closed. Write ```python, a line break, the code,'
            ' a line break and ``` on a line of its own.'
        ),
    )
  rest.append(text[start:])
  if code is not None and not code.strip():
    return None, ''.join(rest), 'The code block is empty.'
  return code, ''.join(rest), None


def hermes_calls(
    text: str,
) -> tuple[list[tuple[str, dict[str, Any]]], str, str | None]:
  """Finds every <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

  A JSON list of such objects inside one pair is read too (SmolLM2's habit).
  Names and schemas are the executor's to check.

  Args:
    text: A turn without its thoughts.

  Returns:
    (calls, rest, error): (name, arguments) of each call in order, the text
    outside of calls, and an error, in which case there are no calls.
  """
  calls, rest, start = [], [], 0
  while (at := text.find(_CALL, start)) >= 0:
    rest.append(text[start:at])
    end = text.find(_CALL_END, at)
    inner = text[at + len(_CALL) : end]
    if end < 0 or _CALL in inner:
      return (
          [],
          text,
          (
              f'Unterminated call: a {_CALL} has no {_CALL_END}. Nothing was run.'
          ),
      )
    for name, arguments, error in _read_call(inner):
      if error:
        return [], text, f'{error} Nothing was run.'
      calls.append((name, arguments))
    start = end + len(_CALL_END)
  rest.append(text[start:])
  outside = ''.join(rest)
  if _CALL_END in outside:
    return [], text, f'A {_CALL_END} has no {_CALL}. Nothing was run.'
  return calls, outside, None


def _read_call(
    inner: str,
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
  """Yields (name, arguments, error) of what stands inside one pair of tags."""
  if len(inner.encode('utf-8', 'replace')) > MAX_CALL_BYTES:
    yield '', {}, f'The call is longer than {MAX_CALL_BYTES} bytes.'
    return
  try:
    if _nesting(inner) > MAX_NESTING:
      raise ValueError(f'nested more than {MAX_NESTING} deep')
    read = json.loads(inner.strip(), parse_constant=_no_constant)
  except ValueError as error:
    yield '', {}, f'The call is not valid JSON: {error}.'
    return
  for call in read if isinstance(read, list) and read else [read]:
    arguments = call.get('arguments') if isinstance(call, dict) else None
    if isinstance(arguments, str):
      try:
        arguments = json.loads(arguments, parse_constant=_no_constant)
      except ValueError:
        arguments = None
    if not isinstance(call, dict) or not isinstance(call.get('name'), str):
      yield '', {}, 'A call needs "name", a string.'
    elif not isinstance(arguments, dict):
      yield '', {}, 'A call needs "arguments", a JSON object.'
    elif extra := set(call) - {'name', 'arguments', 'id'}:
      yield '', {}, f'A call has no field {sorted(extra)[0]!r}.'
    else:
      yield call['name'], arguments, None


def _no_constant(name: str):
  raise ValueError(f'{name} is not JSON')


def _nesting(text: str) -> int:
  """Depth of brackets outside of strings, before anything is parsed."""
  depth = deepest = 0
  for char in re.sub(r'"(?:[^"\\]|\\.)*"', '', text):
    depth += (char in '[{') - (char in ']}')
    deepest = max(deepest, depth)
  return deepest
