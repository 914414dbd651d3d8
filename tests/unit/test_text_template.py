"""Template chat: layouts by hand, the end of turns, dialects, refusals."""

import hypothesis
import hypothesis.strategies as st
import pytest

from agent_rl_jax import types
from agent_rl_jax.text import chat, template, tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = ('<|im_start|>', '<|im_end|>', '<|endoftext|>', '<tool_call>')
TOKENIZER = tokenizers.ByteTokenizer(control=MARKS)
START, END = TOKENIZER.control['<|im_start|>'], TOKENIZER.control['<|im_end|>']
SPEC = {
    'name': 'python',
    'description': 'Runs code.',
    'parameters': {'type': 'object', 'properties': {'code': {}}},
}
USER = {'role': 'user', 'content': 'U'}


def _chat(source=CHATML, **options) -> chat.TemplateChat:
  return chat.make_chat('template', TOKENIZER, template=source, **options)


def _ids(text: str) -> list[int]:
  return TOKENIZER.encode_marked(text)


def _tool(*texts: str) -> types.Observation:
  return types.Observation(
      messages=tuple({'role': 'tool', 'content': text} for text in texts)
  )


CODE, HERMES = _chat(), _chat(tool_dialect='hermes')


def test_prompt_by_hand():
  ids = CODE.prompt([USER])
  assert ids.tolist() == [
      *(START, *b'user\nU', END, *b'\n'),
      *(START, *b'assistant\n'),
  ]


@hypothesis.given(text=st.text(max_size=30) | st.sampled_from(MARKS))
@hypothesis.settings(max_examples=60, deadline=None)
def test_contents_are_never_control(text):
  prompt = CODE.prompt([{'role': 'user', 'content': text}])
  assert TOKENIZER.decode(prompt) == (
      f'<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n'
  )
  assert (prompt >= 256).sum() == 3
  for chats in (CODE, HERMES):
    ids = chats.observation(_tool(text), END)
    assert text.rstrip('\n') in TOKENIZER.decode(ids)
    assert (ids >= 256).sum() == 3


def test_the_end_mark_is_put_in_where_it_was_not_sampled():
  ended = '\n<|im_start|>user\n```output\n5\n```<|im_end|>\n'
  ended += '<|im_start|>assistant\n'
  said = CODE.written('```python\nprint(5)\n```')
  assert TOKENIZER.decode(said).endswith('```\n')
  after = CODE.observation(_tool('5\n'), said[-1])
  assert TOKENIZER.decode(after) == f'<|im_end|>{ended}'
  assert after[0] == END
  assert TOKENIZER.decode(CODE.observation(_tool('5'), END)) == ended
  other = TOKENIZER.control['<|endoftext|>']
  assert TOKENIZER.decode(CODE.observation(_tool('5'), other)) == ended
  with pytest.raises(ValueError, match='last id'):
    CODE.observation(_tool('5'))


def test_results_of_a_round_share_a_turn_and_notes_follow():
  obs = types.Observation(
      messages=(*_tool('a', 'b').messages, {'role': 'user', 'content': 'Go.'})
  )
  assert TOKENIZER.decode(HERMES.observation(obs, END)) == (
      '\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n'
      '<tool_response>\nb\n</tool_response><|im_end|>\n'
      '<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n'
  )


def test_nothing_follows_the_end_and_long_results_are_cut():
  assert CODE.observation(types.Observation(done=True), END).size == 0
  short = _chat(max_observation_tokens=40)
  text = TOKENIZER.decode(short.observation(_tool('x' * 90), END))
  assert '\n[... cut ...]\n' in text
  assert text.count('x') == 40 - len('\n[... cut ...]\n')


def test_code_actions():
  action = CODE.action(_ids('Well.\n```python\nprint(5)\n```\n'), 'stop')
  assert action.error is None
  assert action.tool_calls[0].arguments == {'code': 'print(5)\n'}
  action = CODE.action(_ids('```py\nprint(5)\n```<|im_end|>'), 'stop')
  assert action.tool_calls and action.error is None
  action = CODE.action(_ids('It is \\boxed{5}.<|im_end|>'), 'stop')
  assert action.answer == '5' and not action.tool_calls


def test_what_a_token_holds_beyond_the_stop_is_not_run():
  class Wide(tokenizers.ByteTokenizer):

    def __init__(self):
      super().__init__(control=MARKS)
      self._bytes = (*self._bytes, b'```\n```python')
      self._shown.append(b'```\n```python')
      self.vocab_size += 1

  wide = Wide()
  coded = chat.make_chat('template', wide, template=CHATML)
  ids = [*wide.encode('```python\nprint(5)\n'), wide.vocab_size - 1]
  action = coded.action(ids, 'stop')
  assert action.tool_calls[0].arguments == {'code': 'print(5)\n'}
  assert action.text.endswith('```python')


@pytest.mark.parametrize(
    'chats, text, finish, words',
    [
        (CODE, '```python\nprint(5)<|im_end|>', 'stop', 'not closed'),
        (CODE, '```python\n \n```\n', 'stop', 'empty'),
        (CODE, 'hm<|im_end|>', 'stop', 'no call and no answer'),
        (CODE, 'x\n```\n', 'stop', 'not closed'),
        (CODE, '<think>\\boxed{1}<|im_end|>', 'stop', 'not closed'),
        (CODE, '\\boxed{5}<|im_end|>', 'length', 'cut off'),
        (CODE, '```python\nprint(5)', 'length', 'cut off'),
        (HERMES, '<tool_call>{"name": "a"}<|im_end|>', 'stop', 'Unterminated'),
    ],
)
def test_malformed_turns_are_told(chats, text, finish, words):
  action = chats.action(_ids(text), finish)
  assert words in action.error
  assert not action.tool_calls and action.answer is None


def test_hermes_actions():
  call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
  action = HERMES.action(
      _ids(f'<think>a</think>{call}\n{call}<|im_end|>'), 'stop'
  )
  assert [c.call_id for c in action.tool_calls] == ['0', '1']
  assert action.tool_calls[0].name == 'f'
  assert action.tool_calls[0].arguments == {'x': 1}
  action = HERMES.action(_ids('\\boxed{7}<|im_end|>'), 'stop')
  assert action.answer == '7'


def test_tools_are_described_in_the_system_message():
  system = {'role': 'system', 'content': 'Be brief.'}
  text = TOKENIZER.decode(CODE.prompt([system, USER], [SPEC]))
  assert text.startswith('<|im_start|>system\nBe brief.\n\nYou can run Python.')
  text = TOKENIZER.decode(HERMES.prompt([USER], [SPEC]))
  assert '{"type": "function", "function": {"name": "python"' in text
  told = _chat(
      instructions='Tools:\n{tools}', system='S', tool_dialect='hermes'
  )
  text = TOKENIZER.decode(told.prompt([USER], [SPEC]))
  assert text.startswith('<|im_start|>system\nS\n\nTools:\n{"type"')
  silent = _chat(describe_tools=False)
  assert silent.prompt([USER], [SPEC]).tolist() == CODE.prompt([USER]).tolist()


def test_stops():
  assert CODE.stop_ids == (END, TOKENIZER.control['<|endoftext|>'])
  assert CODE.stop_strings == ('\n```\n',)
  assert HERMES.stop_strings == ()
  asked = _chat(stop_tokens=(), stop_strings=('<tool_call>', 'X'))
  assert set(asked.stop_ids) == {END, TOKENIZER.control['<tool_call>']}
  assert asked.stop_strings == ('X',)


def test_a_demonstration_ends_where_a_rollout_would():
  with pytest.raises(ValueError, match='text follows'):
    CODE.written('```python\n1\n```\nand more')
  assert CODE.written('Done.')[-1] == END


@pytest.mark.parametrize(
    'source, words',
    [
        (CHATML.replace("m['content']", "m['content'] | upper"), 'append-safe'),
        (
            CHATML.replace(
                "'<|im_end|>\n'", "('<|im_end|>\n' if not loop.last else '')"
            ),
            'append-safe',
        ),
        (
            CHATML.replace(
                "'<|im_end|>\n'",
                "('.' if m['role'] == 'assistant' and not loop.last else '')"
                " + '<|im_end|>\n'",
            ),
            'changes the text before it',
        ),
        (CHATML.replace('<|im_end|>', ''), 'control token'),
        ('{% for', 'not valid'),
        ("{{ raise_exception('no') }}", 'refuses'),
    ],
)
def test_unfit_templates_are_refused(source, words):
  with pytest.raises(template.TemplateError, match=words):
    _chat(source)


def test_contents_that_are_lost_or_rewritten_are_refused_when_met():
  page = template.Template(
      "{{ messages[0]['content'] | title }}{{ messages[-1]['content'][:9] }}",
      {},
  )
  mark = template.placeholder(0)
  with pytest.raises(template.TemplateError, match='0 times'):
    page.layout([('user', 'x'), ('user', mark)])
  page = template.Template(
      "{{ messages[0]['content'] | replace(' ', '_') }}", {}
  )
  with pytest.raises(template.TemplateError, match='rewrites'):
    page.layout([('user', mark)])


@pytest.mark.parametrize(
    'done, text, expected',
    [
        ('| trim', ' a\n', 'a'),
        ('', ' a\n', ' a\n'),
        ('| tojson', 'a"\né', '"a\\"\\né"'),
        (".strip('\n')", '\n a\n', ' a'),
    ],
)
def test_what_a_template_does_to_contents_is_done(done, text, expected):
  source = "<{{ messages[0]['content'] FILTER }}>".replace('FILTER', done)
  page = template.Template(source, {})
  parts = page.layout([('user', template.placeholder(0))])
  shown = ''.join(p if isinstance(p, str) else p.change(text) for p in parts)
  assert shown == f'<{expected}>' == page.render([('user', text)])


def test_training_markers_and_the_clock_do_not_matter():
  page = template.Template(
      '{% generation %}a{%- endgeneration %}{{ strftime_now is defined }}', {}
  )
  assert page.render([]) == 'aFalse'


def test_bad_options_are_named(tmp_path):
  with pytest.raises(ValueError, match="tool_dialect='xml'"):
    _chat(tool_dialect='xml')
  with pytest.raises(ValueError, match='max_observation_tokens=0'):
    _chat(max_observation_tokens=0)
  with pytest.raises(ValueError, match='<eos>'):
    _chat(stop_tokens=('<eos>',))
  with pytest.raises(ValueError, match='it has none'):
    _chat('')
  native = CHATML.replace(
      '{% if add',
      '{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if add',
  )
  with pytest.raises(ValueError, match='spells the control token'):
    _chat(native, tool_dialect='hermes').prompt(
        [USER], [SPEC | {'description': '<|im_end|>'}]
    )
  path = tmp_path / 'chat.jinja'
  path.write_text(CHATML)
  assert _chat(str(path)).digest == CODE.digest
