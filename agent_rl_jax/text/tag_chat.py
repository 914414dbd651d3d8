r"""The `tags` protocol: every mark is one control id, put in or sampled as such.

    <|system|>text<|user|>text<|assistant|>
      <think>text</think> <code>a=2;print(a)</code>      sampled, ends the turn
    <|tool|>2\n<|assistant|>                             observation
      \boxed{2}<|end|>                                   sampled, ends the turn

A header begins a message and thereby ends the one before it, so only the policy
writes <|end|>: an observation costs two tokens beside its text.  Turns are
parsed by id, so that plain text which spells a tag means nothing.  Left out:
calls of tools other than the code tool.  Invariant: every control id outside of
action spans was put in here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.text import format as chat_format
from agent_rl_jax.text import parsers, tags, vocabulary


@dataclasses.dataclass(frozen=True)
class TagOptions:
  """Choices of the `tags` protocol.

  Attributes:
    code_tool: Name of the tool that is called with the code.
    describe_tools: Whether the prompt lists the tools in a system message.
    max_observation_tokens: Longest tool or environment text in tokens; longer
      ones lose their middle.
  """

  code_tool: str = 'python'
  describe_tools: bool = False
  max_observation_tokens: int = 512

  def __post_init__(self):
    if not self.code_tool:
      raise ValueError("code_tool='' names no tool; give one, such as 'python'")
    if self.max_observation_tokens < 1:
      raise ValueError(
          f'max_observation_tokens={self.max_observation_tokens} must be at'
          ' least 1'
      )


class TagChat:
  """ChatFormat of the `tags` protocol (see the module)."""

  def __init__(self, tokenizer: vocabulary.Tokenizer, **options):
    """Takes the fields of TagOptions as options.

    Raises:
      ValueError: The tokenizer lacks a mark.
    """
    missing = [m for m in tags.TAG_CONTROL if m not in tokenizer.control]
    if missing:
      raise ValueError(
          f'the tokenizer has no control token {missing[0]!r}; train it with'
          " control=TAG_CONTROL, or use chat 'template' for a checkpoint"
      )
    self.tokenizer = tokenizer
    self.options = TagOptions(**options)
    self._id = tokenizer.control
    self.stop_ids = (self._id[tags.CODE_END], self._id[tags.END])
    self.stop_strings: tuple[str, ...] = ()
    self._marks = frozenset(self._id.values())

  def prompt(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> np.ndarray:
    """Returns int32 ids of the messages and the assistant's header.

    An assistant's message in the opening (an example) is read as one that the
    policy wrote: its tags are marks.

    Raises:
      ValueError: A message has an unknown role.
    """
    if self.options.describe_tools and tools:
      messages = describe(messages, tools)
    ids = []
    for message in messages:
      ids.append(self._header(message['role']))
      if message['role'] == 'assistant':
        ids += self.written(message['content'])
      else:
        ids += self.tokenizer.encode(message['content'])
    return vocabulary.int32([*ids, self._id[tags.ASSISTANT]])

  def observation(
      self, obs: types.Observation, last: int | None = None
  ) -> np.ndarray:
    """Returns int32 ids of what the environment said, up to the next header.

    Args:
      obs: Messages, or ids of a world, which are passed on as they are.
      last: Not needed: a header ends the turn before it, however that ended.
    """
    del last
    if obs.ids is not None:
      return np.asarray(obs.ids, np.int32)
    if obs.done:
      return np.zeros(0, np.int32)
    ids = []
    for message in obs.messages:
      ids.append(self._header(message['role']))
      ids += chat_format.clip(
          self.tokenizer,
          message['content'],
          self.options.max_observation_tokens,
      )
    return vocabulary.int32([*ids, self._id[tags.ASSISTANT]])

  def action(
      self, ids: Sequence[int] | np.ndarray, finish: str
  ) -> types.Action:
    r"""Parses a turn by its marks.

    A turn that ends with </code> calls the code tool; one that ends with
    <|end|> answers with what it boxes.  Thoughts count for nothing.

    Args:
      ids: The sampled ids, the one that ended the turn included.
      finish: 'stop', or 'length' when a limit cut the turn.

    Returns:
      The action; `error` is set when there is neither one call nor one answer.
    """
    ids = [int(i) for i in ids]
    text = self.tokenizer.decode(ids)
    if finish == 'length' or not ids or ids[-1] not in self.stop_ids:
      return types.Action(text, error=chat_format.CUT_OFF)
    spoken, error = self._without_thoughts(ids[:-1])
    code_at = [k for k, i in enumerate(spoken) if i == self._id[tags.CODE]]
    if error:
      return types.Action(text, error=error)
    if ids[-1] == self._id[tags.END]:
      if code_at:
        return types.Action(
            text, error='The code was not closed with </code>; it was not run.'
        )
      answer, error = parsers.answer_of(self.tokenizer.decode(spoken))
      return types.Action(text, answer=answer, error=error)
    if len(code_at) != 1:
      found = 'no' if not code_at else 'more than one'
      return types.Action(
          text,
          error=f'</code> ends this turn, but {found} <code> is before it;'
          ' nothing was run.',
      )
    inner = spoken[code_at[0] + 1 :]
    code = self.tokenizer.decode(inner)
    if not code.strip():
      return types.Action(text, error='There is no code in <code></code>.')
    if not self._marks.isdisjoint(inner):
      return types.Action(
          text, error='A tag stands inside the code; it was not run.'
      )
    call = types.ToolCall('0', self.options.code_tool, {'code': code})
    return types.Action(text, tool_calls=(call,))

  def demonstration(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids int32 [T], mask bool [T]); see format.assemble."""
    return chat_format.assemble(self, messages, tools)

  def written(self, content: str) -> list[int]:
    """Returns the ids that a policy would sample to say `content`.

    Its tags become marks; </code> ends it, else <|end|> is added.

    Raises:
      ValueError: Text follows </code>, where a sampled turn would have ended.
    """
    ids = self.tokenizer.encode_marked(content, tags.TAGS)
    end = self._id[tags.CODE_END]
    if end not in ids:
      return [*ids, self._id[tags.END]]
    if ids.index(end) != len(ids) - 1:
      raise ValueError(
          f'text follows </code> in the assistant turn {content!r}; </code> ends'
          ' a turn, so put the rest into the next one'
      )
    return ids

  def _header(self, role: str) -> int:
    if role not in tags.HEADERS:
      raise ValueError(
          f'unknown role {role!r}; there are {sorted(tags.HEADERS)}'
      )
    return self._id[tags.HEADERS[role]]

  def _without_thoughts(self, ids: list[int]) -> tuple[list[int], str | None]:
    """Returns the ids outside of thoughts, and what is wrong with the tags."""
    kept, thinking = [], False
    for i in ids:
      if i in (self._id[tags.THINK], self._id[tags.THINK_END]):
        if thinking == (i == self._id[tags.THINK]):
          return [], 'The tags <think> and </think> do not match.'
        thinking = not thinking
      elif not thinking:
        kept.append(i)
    if thinking:
      return [], 'A <think> is not closed with </think>.'
    return kept, None


def describe(
    messages: Sequence[types.Message], tools: Sequence[Mapping[str, Any]]
) -> list[types.Message]:
  """Returns the messages with a short list of the tools in the system message."""
  lines = ['Tools:']
  for tool in tools:
    names = ', '.join(tool.get('parameters', {}).get('properties', {}))
    lines.append(f'{tool["name"]}({names}): {tool.get("description", "")}')
  return chat_format.add_to_system(messages, '\n'.join(lines))
