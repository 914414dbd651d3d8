"""Groups of episodes as bytes, exactly: an npz without pickle.

Numbers that are many (tokens, masks, log-probs, returns) are arrays; all else
is JSON, one of the arrays.  Leaves out which groups are written.  Invariant:
what is read equals what was written, log-probs to the bit, as long as tasks
hold JSON-like values only, as `types.Task` says.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_rl_jax.train.group import Group
from agent_rl_jax.types import (
    Action,
    Episode,
    Row,
    Status,
    Task,
    ToolCall,
    ToolResult,
    Turn,
)

_FORMAT = 1
_DTYPES = {'tokens': np.int32, 'action_mask': np.bool_, 'logprobs': np.float32}
_JUDGED = {'returns': np.float32, 'metric': np.float32, 'valid': np.bool_}


def pack(groups: Sequence[Group]) -> bytes:
  """The groups as the bytes of one file; TypeError for a task that is no JSON.

  The same groups always give the same bytes.
  """
  rows = [row for g in groups for e in g.episodes for row in e.rows]
  text = json.dumps(
      {
          'format': _FORMAT,
          'groups': [_from_group(group) for group in groups],
      }
  )
  arrays = {
      name: _joined([getattr(row, name) for row in rows], dtype)
      for name, dtype in _DTYPES.items()
  }
  arrays |= {
      name: _joined([getattr(group, name) for group in groups], dtype)
      for name, dtype in _JUDGED.items()
  }
  out = io.BytesIO()
  np.savez(out, json=np.frombuffer(text.encode('utf-8'), np.uint8), **arrays)
  return out.getvalue()


def unpack(content: bytes) -> tuple[Group, ...]:
  """The groups that `pack` wrote; ValueError for another format."""
  with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
    arrays = {name: loaded[name] for name in loaded.files}
  values = json.loads(arrays.pop('json').tobytes().decode('utf-8'))
  if values['format'] != _FORMAT:
    raise ValueError(
        f'episodes of format {values["format"]}; this version reads {_FORMAT}'
    )
  rows = _Cursor({name: arrays[name] for name in _DTYPES})
  judged = _Cursor({name: arrays[name] for name in _JUDGED})
  return tuple(_to_group(value, rows, judged) for value in values['groups'])


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
  # An unsafe cast would lose bits in silence.
  parts = [np.asarray(part) for part in parts]
  return np.concatenate(
      [np.zeros(0, dtype), *parts], dtype=dtype, casting='safe'
  )


class _Cursor:
  """Hands out arrays that were joined, piece by piece."""

  def __init__(self, arrays: Mapping[str, np.ndarray]):
    self._arrays, self._at = arrays, 0

  def take(self, count: int) -> dict[str, np.ndarray]:
    start, self._at = self._at, self._at + count
    return {
        name: array[start : self._at].copy()
        for name, array in self._arrays.items()
    }


def _from_group(group: Group) -> dict[str, Any]:
  task = group.episodes[0].task
  return {
      'task': {
          'uid': task.uid,
          'env': task.env,
          'messages': list(task.messages),
          'payload': dict(task.payload),
      },
      'baseline': group.baseline,
      'episodes': [_from_episode(episode) for episode in group.episodes],
  }


def _to_group(value: Mapping[str, Any], rows, judged) -> Group:
  given = value['task']
  task = Task(
      uid=given['uid'],
      env=given['env'],
      messages=tuple(given['messages']),
      payload=given['payload'],
  )
  episodes = tuple(_to_episode(e, task, rows) for e in value['episodes'])
  return Group(
      episodes=episodes,
      baseline=value['baseline'],
      **judged.take(len(episodes)),
  )


def _from_episode(episode: Episode) -> dict[str, Any]:
  return {
      'uid': episode.uid,
      'group': episode.group,
      'policy_version': episode.policy_version,
      'rows': [len(row.tokens) for row in episode.rows],
      'turns': [_from_turn(turn) for turn in episode.turns],
      'status': episode.status.value,
      'rewards': dict(episode.rewards),
      'detail': episode.detail,
  }


def _to_episode(value: Mapping[str, Any], task: Task, rows) -> Episode:
  return Episode(
      task=task,
      uid=value['uid'],
      group=value['group'],
      policy_version=value['policy_version'],
      rows=tuple(Row(**rows.take(count)) for count in value['rows']),
      turns=tuple(_to_turn(turn) for turn in value['turns']),
      status=Status(value['status']),
      rewards=value['rewards'],
      detail=value['detail'],
  )


def _from_turn(turn: Turn) -> dict[str, Any]:
  action = turn.action
  return {
      'offsets': [
          turn.row,
          turn.action_start,
          turn.action_stop,
          turn.observation_stop,
      ],
      'text': action.text,
      'tool_calls': [
          [call.call_id, call.name, dict(call.arguments)]
          for call in action.tool_calls
      ],
      'answer': action.answer,
      'error': action.error,
      'reward': float(turn.reward),
      'state_key': None
      if turn.state_key is None
      else base64.b64encode(turn.state_key).decode('ascii'),
      'tool_results': [
          [r.call_id, r.text, r.ok, r.seconds, r.infrastructure]
          for r in turn.tool_results
      ],
      'finish': turn.finish,
  }


def _to_turn(value: Mapping[str, Any]) -> Turn:
  key = value['state_key']
  return Turn(
      *value['offsets'],
      action=Action(
          text=value['text'],
          tool_calls=tuple(ToolCall(*call) for call in value['tool_calls']),
          answer=value['answer'],
          error=value['error'],
      ),
      reward=value['reward'],
      state_key=None if key is None else base64.b64decode(key),
      tool_results=tuple(ToolResult(*r) for r in value['tool_results']),
      finish=value['finish'],
  )
