"""Checkpoints' templates against renderings of `transformers`, byte for byte."""

import json
import pathlib

import numpy as np
import pytest

from agent_rl_jax.text import chat, template, tokenizers

HERE = pathlib.Path(__file__).parent
GOLDEN = json.loads((HERE / 'chat_templates.json').read_text())
MARKS = (
    '<|im_start|>',
    '<|im_end|>',
    '<|begin_of_text|>',
    '<|start_header_id|>',
    '<|end_header_id|>',
    '<|eot_id|>',
    '<bos>',
    '<start_of_turn>',
    '<end_of_turn>',
)
TOKENIZER = tokenizers.ByteTokenizer(control=MARKS)
DERIVED = ('smollm2', 'qwen2_5', 'llama3_1')


def _path(name: str) -> str:
  return str(HERE / 'templates' / f'{name}.jinja')


def _chat(inputs, **options) -> chat.TemplateChat:
  kwargs = dict(inputs.get('kwargs', {}))
  kwargs.pop('add_generation_prompt', None)
  return chat.make_chat(
      'template',
      TOKENIZER,
      template=_path(inputs['template']),
      variables={**inputs.get('special_tokens', {}), **kwargs},
      **options,
  )


def _by_id(cases):
  return [pytest.param(case, id=case['id']) for case in cases]


@pytest.mark.parametrize('case', _by_id(GOLDEN['cases']))
def test_rendering(case):
  inputs = case['inputs']
  kwargs = dict(inputs['kwargs'])
  header = kwargs.pop('add_generation_prompt', False)
  page = template.Template(
      pathlib.Path(_path(inputs['template'])).read_text(),
      {**inputs['special_tokens'], **kwargs},
  )
  turns = [(m['role'], m['content']) for m in inputs['messages']]
  if case['expected'] is None:
    with pytest.raises(template.TemplateError):
      page.render(turns, inputs['tools'], header)
  else:
    assert page.render(turns, inputs['tools'], header) == case['expected']


PROMPTS = [
    case
    for case in GOLDEN['cases']
    if case['inputs']['template'] in DERIVED
    and case['inputs']['kwargs'].get('add_generation_prompt')
    and not case['inputs']['tools']
]


@pytest.mark.parametrize('case', _by_id(PROMPTS))
def test_derived_prompt(case):
  ids = _chat(case['inputs']).prompt(case['inputs']['messages'])
  assert TOKENIZER.decode(ids) == case['expected']
  # Marks of the layout are control ids, each of them.
  marks = np.isin(ids, list(TOKENIZER.control.values())).sum()
  assert marks == sum(case['expected'].count(mark) for mark in MARKS)


def test_derived_prompt_with_tools():
  (case,) = (
      c for c in GOLDEN['cases'] if c['id'] == 'qwen2_5/tools2_system_user_gen'
  )
  inputs = case['inputs']
  hermes = _chat(inputs, tool_dialect='hermes')
  specs = [tool['function'] for tool in inputs['tools']]
  ids = hermes.prompt(inputs['messages'], specs)
  assert TOKENIZER.decode(ids) == case['expected']


def _as_text(message):
  """A message with its structured calls written as the policy writes them."""
  calls = [
      '<tool_call>\n' + json.dumps(call['function'], ensure_ascii=False)
      for call in message.get('tool_calls', ())
  ]
  text = [message['content']] if message['content'] else []
  said = '\n'.join([*text, *(f'{call}\n</tool_call>' for call in calls)])
  return {'role': message['role'], 'content': said}


@pytest.mark.parametrize(
    'case',
    [
        pytest.param(m, id=f'{m["template"]}/{m["trajectory"]}')
        for m in GOLDEN['mask_spans']
    ],
)
def test_whole_conversation_and_its_mask(case):
  hermes = _chat(case, tool_dialect='hermes')
  tools = [tool['function'] for tool in case['tools'] or ()]
  ids, mask = hermes.demonstration(
      [_as_text(message) for message in case['messages']], tools
  )
  text = case['rendered']
  assert TOKENIZER.decode(ids) == text.rstrip('\n')
  trained = np.zeros(len(text.rstrip('\n')), bool)
  for start, stop in case['train_spans']:
    trained[start:stop] = True
  widths = [len(TOKENIZER.decode([i])) for i in ids]
  np.testing.assert_array_equal(np.repeat(mask, widths), trained)


@pytest.mark.parametrize('name', DERIVED)
def test_code_rounds_read_as_the_template_renders_them(name):
  inputs = {'template': name, 'special_tokens': {'bos_token': '<bos>'}}
  said = 'So:\n```python\nprint(42)\n```\n'
  messages = [
      {'role': 'system', 'content': 'S'},
      {'role': 'user', 'content': 'U'},
      {'role': 'assistant', 'content': said},
      {'role': 'tool', 'content': '42 <|im_end|>\n'},
      {'role': 'assistant', 'content': 'It is \\boxed{42}.'},
  ]
  coded = _chat(inputs)
  ids, mask = coded.demonstration(messages)
  messages[3] = {'role': 'user', 'content': '```output\n42 <|im_end|>\n```'}
  turns = [(m['role'], m['content']) for m in messages]
  page = coded._template.render(turns).rstrip('\n')
  shown = TOKENIZER.decode(ids)
  if name == 'llama3_1':  # it trims history; sampled ids are not rewritten
    shown = shown.replace('```\n<|eot_id|>', '```<|eot_id|>')
  assert shown == page
  # The stop string ended the first turn, so its end mark was put in.
  assert said in TOKENIZER.decode(ids[mask])
  assert TOKENIZER.decode(ids[mask]).count(coded._end) == 1


def test_a_template_that_is_not_append_safe_is_refused():
  with pytest.raises(template.TemplateError, match='<think>') as refused:
    _chat({'template': 'qwen3'}, tool_dialect='hermes')
  assert 'not append-safe' in str(refused.value)


def test_a_template_without_system_turns_gets_it_in_the_user_s():
  gemma = _chat(
      {'template': 'gemma2', 'special_tokens': {'bos_token': '<bos>'}}
  )
  ids = gemma.prompt(
      [
          {'role': 'system', 'content': 'S'},
          {'role': 'user', 'content': 'U'},
      ]
  )
  assert TOKENIZER.decode(ids) == (
      '<bos><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n'
  )
