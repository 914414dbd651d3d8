"""Episodes as records for people: text pieces with their log-probs.

Tokens are shown, never tokenized again.  Leaves out drawing (`html.py`) and
the file (`writers.JsonlWriter`).  Invariant: the pieces of a record are the
tokens of its episode, one each and in order.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from agent_rl_jax import types

KINDS = ('prompt', 'action', 'observation')


class Piece(NamedTuple):
  """One token: its text, who wrote it, and what training made of it."""

  text: str
  kind: str  # one of KINDS
  logprob: float | None = None  # of the sampler; None where not sampled
  advantage: float | None = None
  token: int | None = None


@dataclasses.dataclass(frozen=True)
class TrajectoryRecord:
  """An episode to be read.

  Attributes:
    task_uid: Name of the task.
    pieces: Its tokens, rows one after the other.
    rewards: Named components.
    total: The reward that was optimized.
    advantage: Mean advantage of its action tokens; None before training.
    status: How it ended.
    info: What else stands in the head of the page's entry, as text.
  """

  task_uid: str
  pieces: tuple[Piece, ...]
  rewards: Mapping[str, float]
  total: float
  advantage: float | None
  status: str
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """A line for the trajectory log, the pieces joined into spans of a kind."""
    spans: list[list[str]] = []
    for piece in self.pieces:
      if spans and spans[-1][0] == piece.kind:
        spans[-1][1] += piece.text
      else:
        spans.append([piece.kind, piece.text])
    return {
        'task': self.task_uid,
        'status': self.status,
        'total': self.total,
        'advantage': self.advantage,
        'rewards': dict(self.rewards),
        'info': dict(self.info),
        'text': spans,
    }


class _Decoder(Protocol):

  def token_bytes(self, token: int) -> bytes:
    ...

  def decode(self, ids: Sequence[int]) -> str:
    ...


def token_texts(tokens: Sequence[int], tokenizer: _Decoder) -> list[str]:
  """Returns each token's text; a character cut over several tokens stands at

  the one that completes it.  Control tokens are shown by their name.
  """
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  texts = []
  for token in tokens:
    token = int(token)
    data = tokenizer.token_bytes(token)
    if data:
      texts.append(decoder.decode(data))
    else:
      texts.append(decoder.decode(b'', True) + tokenizer.decode([token]))
      decoder.reset()
  rest = decoder.decode(b'', True)
  if rest and texts:
    texts[-1] += rest
  return texts


def make_record(
    episode: types.Episode,
    tokenizer: _Decoder,
    *,
    total: float,
    advantages: Sequence[np.ndarray] | None = None,
    info: Mapping[str, Any] | None = None,
) -> TrajectoryRecord:
  """Lays an episode out as a record.

  Args:
    episode: A scored episode.
    tokenizer: Gives each token's text.
    total: The reward that was optimized.
    advantages: float [T] for each row of the episode, or None.
    info: More for the head of the entry.

  Returns:
    The record; tokens before a row's first action are its prompt.
  """
  pieces: list[Piece] = []
  weights: list[float] = []
  for index, row in enumerate(episode.rows):
    mask = np.asarray(row.action_mask, bool)
    sampled = np.flatnonzero(mask)
    first = int(sampled[0]) if len(sampled) else len(mask)
    texts = token_texts(row.tokens, tokenizer)
    for t, text in enumerate(texts):
      if mask[t]:
        advantage = None
        if advantages is not None:
          advantage = float(advantages[index][t])
          weights.append(advantage)
        pieces.append(
            Piece(
                text,
                'action',
                float(row.logprobs[t]),
                advantage,
                int(row.tokens[t]),
            )
        )
      else:
        kind = 'prompt' if t < first else 'observation'
        pieces.append(Piece(text, kind, None, None, int(row.tokens[t])))
  head = {
      'episode': episode.uid,
      'group': episode.group,
      'turns': len(episode.turns),
      'tool calls': episode.num_tool_calls,
      'action tokens': episode.num_action_tokens,
      'policy version': episode.policy_version,
  }
  if episode.detail:
    head['error'] = episode.detail
  return TrajectoryRecord(
      task_uid=episode.task.uid,
      pieces=tuple(pieces),
      rewards={name: float(value) for name, value in episode.rewards.items()},
      total=float(total),
      advantage=float(np.mean(weights)) if weights else None,
      status=episode.status.value,
      info={**head, **(info or {})},
  )
