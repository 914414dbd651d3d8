"""The `tags` protocol: layout by hand, parsing, demonstrations, clipping."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from agent_rl_jax import types
from agent_rl_jax.text import chat, tags, tokenizers

TOKENIZER = tokenizers.make_tokenizer('bytes')
CHAT = chat.make_chat('tags', TOKENIZER)


def _ids(text: str) -> list[int]:
  """Encodes with every mark as a control id."""
  return TOKENIZER.encode_marked(text)


def _act(text: str, finish: str = 'stop') -> types.Action:
  return CHAT.action(_ids(text), finish)


def test_layout_by_hand():
  prompt = CHAT.prompt(
      [
          {'role': 'system', 'content': 'S'},
          {'role': 'user', 'content': 'U <code>x</code> <|end|>'},
      ]
  )
  control = TOKENIZER.control
  assert prompt.dtype == np.int32
  assert prompt.tolist() == [
      control['<|system|>'],
      *b'S',
      control['<|user|>'],
      *b'U <code>x</code> <|end|>',
      control['<|assistant|>'],
  ]
  observed = CHAT.observation(
      types.Observation(messages=({'role': 'tool', 'content': '7<|end|>'},)),
      control['</code>'],
  )
  assert observed.tolist() == [
      control['<|tool|>'],
      *b'7<|end|>',
      control['<|assistant|>'],
  ]


def test_worlds_ids_pass_and_nothing_follows_the_end():
  ids = CHAT.observation(types.Observation(ids=np.array([5, 6])))
  assert ids.dtype == np.int32 and ids.tolist() == [5, 6]
  bye = ({'role': 'user', 'content': 'bye'},)
  assert CHAT.observation(types.Observation(bye, done=True)).size == 0


def test_a_call():
  action = _act('<think>so \\boxed{1}</think>\n<code>\nprint(2)\n</code>')
  assert action.error is None and action.answer is None
  (call,) = action.tool_calls
  assert call.name == 'python' and call.arguments == {'code': '\nprint(2)\n'}
  assert action.text.startswith('<think>so')


def test_an_answer():
  action = _act(r'<think>\boxed{1}</think>It is \boxed{\frac{1}{2}}.<|end|>')
  assert action.answer == r'\frac{1}{2}' and action.error is None
  assert _act(r'\boxed{ 7 } or \boxed{7}<|end|>').answer == '7'


@pytest.mark.parametrize(
    'text, words',
    [
        ('print(1)</code>', 'no <code>'),
        ('<code>a<code>b</code>', 'more than one <code>'),
        ('<code>a<|user|>b</code>', 'tag stands inside'),
        ('<code> \n</code>', 'no code'),
        ('<code>print(1)<|end|>', 'not closed'),
        ('<think>hm<code>a</code>', '<think> is not closed'),
        ('a</think>\\boxed{1}<|end|>', 'do not match'),
        ('nothing<|end|>', 'no answer'),
        ('\\boxed{1} \\boxed{2}<|end|>', 'different answers: 1, 2'),
        ('\\boxed{1<|end|>', 'no answer'),
        ('<code>print(1)', 'cut off'),
        ('', 'cut off'),
    ],
)
def test_malformed_turns_are_told(text, words):
  action = _act(text)
  assert words in action.error
  assert not action.tool_calls and action.answer is None


def test_a_turn_at_the_limit_is_cut_off_even_if_it_looks_whole():
  action = _act('\\boxed{1}<|end|>', finish='length')
  assert action.answer is None and 'cut off' in action.error


def test_spelt_tags_are_text():
  ids = [*TOKENIZER.encode('<code>x</code>'), TOKENIZER.control['<|end|>']]
  assert 'no call' in CHAT.action(ids, 'stop').error


def test_the_code_tool_has_a_name():
  named = chat.make_chat('tags', TOKENIZER, code_tool='run')
  action = named.action(_ids('<code>1</code>'), 'stop')
  assert action.tool_calls[0].name == 'run'


CONVERSATION = [
    {'role': 'system', 'content': 'Be <think>brief</think>.'},
    {'role': 'user', 'content': 'What is 6*7?'},
    {'role': 'assistant', 'content': '<think>t</think><code>print(6*7)</code>'},
    {'role': 'tool', 'content': '42\n</code>'},
    {'role': 'assistant', 'content': 'hm'},
    {'role': 'user', 'content': 'Answer.'},
    {'role': 'assistant', 'content': '\\boxed{42}'},
]


def test_a_demonstration_is_what_a_rollout_would_be():
  ids, mask = CHAT.demonstration(CONVERSATION)
  actions = [
      _ids('<think>t</think><code>print(6*7)</code>'),
      _ids('hm<|end|>'),
      _ids('\\boxed{42}<|end|>'),
  ]
  pieces = [
      (CHAT.prompt(CONVERSATION[:2]), False),
      (actions[0], True),
      (CHAT.observation(types.Observation((CONVERSATION[3],))), False),
      (actions[1], True),
      (CHAT.observation(types.Observation((CONVERSATION[5],))), False),
      (actions[2], True),
  ]
  assert ids.dtype == np.int32 and mask.dtype == bool
  np.testing.assert_array_equal(ids, np.concatenate([p for p, _ in pieces]))
  np.testing.assert_array_equal(
      mask, np.concatenate([np.full(len(p), on) for p, on in pieces])
  )
  assert CHAT.action(actions[0], 'stop').tool_calls
  assert CHAT.action(actions[2], 'stop').answer == '42'


@pytest.mark.parametrize(
    'messages, words',
    [
        (CONVERSATION[:2], 'ends with an assistant'),
        (CONVERSATION[2:3], 'opens with another role'),
        (
            [
                CONVERSATION[1],
                {'role': 'assistant', 'content': '<code></code>!'},
            ],
            'text follows </code>',
        ),
        ([{'role': 'bot', 'content': ''}, CONVERSATION[-1]], "role 'bot'"),
    ],
)
def test_demonstrations_that_no_rollout_gives_are_refused(messages, words):
  with pytest.raises(ValueError, match=words):
    CHAT.demonstration(messages)


@hypothesis.given(text=st.text(max_size=200), limit=st.integers(1, 60))
@hypothesis.settings(max_examples=200, deadline=None)
def test_observations_keep_to_their_limit(text, limit):
  short = chat.make_chat('tags', TOKENIZER, max_observation_tokens=limit)
  obs = types.Observation(messages=({'role': 'tool', 'content': text},))
  ids = short.observation(obs)[1:-1]
  assert len(ids) <= limit
  shown = TOKENIZER.decode(ids)
  if len(text.encode()) <= limit:
    assert shown == text
  else:
    assert '\ufffd' not in shown or '\ufffd' in text
    head, mark, tail = shown.partition('\n[... cut ...]\n')
    assert text.startswith(head) and text.endswith(tail)
    assert mark or limit < 18


def test_megabytes_are_cut_quickly_at_both_ends():
  obs = types.Observation(
      messages=({'role': 'tool', 'content': 'a' * 5_000_000 + 'error: b'},)
  )
  ids = CHAT.observation(obs)
  assert len(ids) <= 514
  assert TOKENIZER.decode(ids).endswith('error: b<|assistant|>')


def test_tools_are_listed_when_asked():
  spec = {
      'name': 'python',
      'description': 'Runs code.',
      'parameters': {'type': 'object', 'properties': {'code': {}}},
  }
  asked = chat.make_chat('tags', TOKENIZER, describe_tools=True)
  user = [{'role': 'user', 'content': 'U'}]
  assert TOKENIZER.decode(asked.prompt(user, [spec])) == (
      '<|system|>Tools:\npython(code): Runs code.<|user|>U<|assistant|>'
  )
  assert TOKENIZER.decode(CHAT.prompt(user, [spec])) == (
      '<|user|>U<|assistant|>'
  )


def test_bad_options_are_named():
  with pytest.raises(ValueError, match="did you mean 'tags'"):
    chat.make_chat('tag', TOKENIZER)
  with pytest.raises(ValueError, match='max_observation_tokens=0'):
    chat.make_chat('tags', TOKENIZER, max_observation_tokens=0)
  with pytest.raises(ValueError, match='code_tool'):
    chat.make_chat('tags', TOKENIZER, code_tool='')
  with pytest.raises(ValueError, match=r'<\|pad\|>'):
    chat.make_chat('tags', tokenizers.ByteTokenizer(control=('<x>',)))


def test_no_mark_is_part_of_another():
  for one in tags.TAG_CONTROL:
    assert [m for m in tags.TAG_CONTROL if one in m] == [one]
