"""The seam that every chat format fills, and what all of them share.

A conversation is a list of pieces, each encoded once and never again: prompt,
sampled ids as they are, observation, sampled ids, ...  Left out: the marks
themselves (one file per format).  Invariant: a conversation's ids are the
prompt's, the actions' and the observations' put behind one another, whether it
was sampled (rollout) or written (demonstration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.text import vocabulary

CUT_OFF = (
    'The turn was cut off at the token limit before it was complete; nothing'
    ' in it was run. Be shorter.'
)
CUT_MARK = '\n[... cut ...]\n'


class ChatFormat(Protocol):
  """What the engine and the cold start need of a protocol.

  Attributes:
    stop_ids: Ids that end a turn.
    stop_strings: Strings that end a turn, matched on bytes (text/stops.py).
  """

  stop_ids: tuple[int, ...]
  stop_strings: tuple[str, ...]

  def prompt(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> np.ndarray:
    """Returns int32 ids of the opening, the assistant's header included."""

  def observation(
      self, obs: types.Observation, last: int | None = None
  ) -> np.ndarray:
    """Returns int32 ids between one action and the next, none of them sampled.

    The next header included; nothing at all when `obs.done`.

    Args:
      obs: What the environment said.
      last: Last id of the action that it answers; None when not known.
    """

  def action(
      self, ids: Sequence[int] | np.ndarray, finish: str
  ) -> types.Action:
    """Parses a turn; `finish` is 'stop' or 'length', as in types.Turn."""

  def demonstration(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids int32 [T], mask bool [T]) of a conversation for SFT."""

  def written(self, content: str) -> list[int]:
    """Returns the ids that a policy would sample to say `content`."""


def assemble(
    chat: ChatFormat,
    messages: Sequence[types.Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[np.ndarray, np.ndarray]:
  """Encodes a whole conversation piece by piece, exactly as a rollout would.

  Args:
    chat: The format.
    messages: A conversation that ends with an assistant's turn.
    tools: Specifications for the prompt.

  Returns:
    ids int32 [T] and mask bool [T], True on what the policy would sample: the
    assistant's turns with the tokens that end them.

  Raises:
    ValueError: The last message, or none, is the assistant's.
  """
  turns = [k for k, m in enumerate(messages) if m['role'] == 'assistant']
  if not turns or turns[-1] != len(messages) - 1 or turns[0] == 0:
    raise ValueError(
        'a demonstration opens with another role and ends with an assistant'
        f' turn, got roles {[m["role"] for m in messages]}'
    )
  pieces = [chat.prompt(messages[: turns[0]], tools)]
  sampled = [False]
  for k, stop in zip(turns, [*turns[1:], len(messages)], strict=True):
    pieces.append(vocabulary.int32(chat.written(messages[k]['content'])))
    sampled.append(True)
    between = tuple(messages[k + 1 : stop])
    if stop < len(messages):
      obs = types.Observation(messages=between)
      pieces.append(chat.observation(obs, int(pieces[-1][-1])))
      sampled.append(False)
  mask = np.repeat(sampled, [len(piece) for piece in pieces])
  return np.concatenate(pieces), mask


def clip(tokenizer: vocabulary.Tokenizer, text: str, limit: int) -> list[int]:
  """Returns ids of `text`, its middle replaced by a mark beyond `limit` tokens.

  Cuts stand between characters.  The mark counts; a limit too small for it
  keeps the head alone.
  """
  reach = limit * tokenizer.longest
  if len(text) <= 2 * reach:
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
      return ids
    head, tail = ids, ids
  else:  # megabytes need not be encoded to know that they are too long
    head, tail = tokenizer.encode(text[:reach]), tokenizer.encode(text[-reach:])
  mark = tokenizer.encode(CUT_MARK)
  room = limit - len(mark)
  if room < 2:
    return head[: _border(tokenizer, head, limit, -1)]
  front = _border(tokenizer, head, room - room // 2, -1)
  back = _border(tokenizer, tail, len(tail) - room // 2, 1)
  return head[:front] + mark + tail[back:]


def _border(
    tokenizer: vocabulary.Tokenizer, ids: list[int], at: int, step: int
) -> int:
  """Moves a cut before `ids[at]` by `step` until no character is cut."""
  while 0 < at < len(ids) and tokenizer.token_bytes(ids[at])[0] & 0xC0 == 0x80:
    at += step
  return at


def add_to_system(
    messages: Sequence[types.Message], text: str
) -> list[types.Message]:
  """Returns the messages with `text` behind (or as) the system message."""
  messages = list(messages)
  if messages and messages[0]['role'] == 'system':
    first = messages.pop(0)['content']
    text = f'{first}\n\n{text}' if first else text
  return [{'role': 'system', 'content': text}, *messages]
