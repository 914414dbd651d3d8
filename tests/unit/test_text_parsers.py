r"""Parsers: boxed answers, fenced code, calls; hand-worked."""

import json

import pytest

from agent_rl_jax.text import parsers


@pytest.mark.parametrize(
    'text, values',
    [
        (r'a \boxed{12} b \boxed {x}', ['12', 'x']),
        (r'\boxed{\frac{1}{2}}', [r'\frac{1}{2}']),
        (r'\boxed{\{1\}}', [r'\{1\}']),
        (r'\boxed{1', []),
        (r'\boxed{} boxed{3}', ['']),
    ],
)
def test_boxed(text, values):
  assert parsers.boxed(text) == values


def test_answers():
  assert parsers.answer_of(r'\boxed{1} so \boxed{1}') == ('1', None)
  answer, error = parsers.answer_of(r'\boxed{1} \boxed{2} \boxed{1}')
  assert answer is None and '1, 2' in error
  assert parsers.answer_of('1')[0] is None


def test_thoughts():
  assert parsers.without_thoughts('a<think>b</think>c') == 'ac'
  assert parsers.without_thoughts('b</think>c') == 'c'
  assert parsers.without_thoughts('a<think>b') is None


def test_code_blocks():
  code, rest, error = parsers.code_block(
      'a\n```text\n\\boxed{1}\n```\nb\n```Python\nx = 1\n\nprint(x)\n```'
  )
  assert code == 'x = 1\n\nprint(x)\n'
  assert rest == 'a\n\nb\n' and error is None
  assert parsers.code_block('no code')[:2] == (None, 'no code')
  # A fence inside a string of the code is not a line of its own.
  code, _, error = parsers.code_block('```python\nprint("```")\n```')
  assert code == 'print("```")\n' and error is None


CALL = {'name': 'f', 'arguments': {'x': 'a\n<b>'}}


def _tag(value) -> str:
  text = value if isinstance(value, str) else json.dumps(value)
  return f'<tool_call>\n{text}\n</tool_call>'


def test_calls():
  text = f'first {_tag(CALL)} then {_tag([CALL, CALL])}.'
  calls, rest, error = parsers.hermes_calls(text)
  assert error is None and rest == 'first  then .'
  assert calls == [('f', {'x': 'a\n<b>'})] * 3
  double = CALL | {'arguments': json.dumps(CALL['arguments'])}
  assert parsers.hermes_calls(_tag(double))[0] == calls[:1]
  assert parsers.hermes_calls(_tag(json.dumps(CALL, indent=2)))[0] == calls[:1]


@pytest.mark.parametrize(
    'text, words',
    [
        (f'{_tag(CALL)}<tool_call>{{', 'Unterminated'),
        (f'<tool_call>{_tag(CALL)}', 'Unterminated'),
        ('}</tool_call>', 'has no <tool_call>'),
        (_tag("{'name': 'f'}"), 'not valid JSON'),
        (_tag('{"name": "f", "arguments": {"x": NaN}}'), 'NaN'),
        (_tag({'arguments': {}}), 'needs "name"'),
        (_tag({'name': 3, 'arguments': {}}), 'needs "name"'),
        (_tag({'name': 'f'}), 'needs "arguments"'),
        (_tag({'name': 'f', 'arguments': '[1]'}), 'needs "arguments"'),
        (
            _tag({'name': 'f', 'parameters': {}, 'arguments': {}}),
            "'parameters'",
        ),
        (_tag('[]'), 'needs "name"'),
        (_tag('[' * 40 + ']' * 40), 'nested'),
        (_tag('"' + 'x' * 70_000 + '"'), 'longer than'),
        (_tag(CALL) + _tag('{'), 'not valid JSON'),
    ],
)
def test_bad_calls_run_nothing(text, words):
  calls, _, error = parsers.hermes_calls(text)
  assert calls == [] and words in error and 'Nothing was run' in error


def test_brackets_in_strings_are_not_nesting():
  call = CALL | {'arguments': {'x': '[' * 100 + '\\"'}}
  calls, _, error = parsers.hermes_calls(_tag(call))
  assert error is None and calls[0][1] == call['arguments']
