"""The host's vocabulary: tasks, actions, observations, turns, rows, episodes.

Plain frozen dataclasses over numpy; this module never imports jax, and holds
no behaviour beyond small derived counts.  Invariant: `Row.action_mask` is True
exactly on tokens that the policy sampled, its end-of-turn token included.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

Message = Mapping[str, Any]  # {'role': ..., 'content': ...}


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem, before any sampling.

  Attributes:
    uid: Unique name of the task within its data set, stable over epochs.
    env: Key of the environment that plays it.
    messages: Conversation that opens the episode.
    payload: What the environment and the rewards need (gold answer, ...).
      JSON-like values only, so that a task can be saved and printed.
  """

  uid: str
  env: str
  messages: tuple[Message, ...]
  payload: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call as parsed from an action: `arguments` is already a mapping."""

  call_id: str
  name: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a tool answered; `seconds` is wall-clock and never enters a loss.

  `infrastructure` says that the call could not be tried: no fault of the
  agent's, so its episode must not be scored.
  """

  call_id: str
  text: str
  ok: bool
  seconds: float = 0.0
  infrastructure: bool = False


@dataclasses.dataclass(frozen=True)
class Action:
  """One parsed model turn.

  Attributes:
    text: The decoded turn, protocol marks included.
    tool_calls: Calls to run, in order; empty when the turn has none.
    answer: Final answer when the turn gives one, else None.
    error: Why the turn could not be parsed (unterminated call, bad JSON),
      worded for the model; None when the turn is well formed.
  """

  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  answer: str | None = None
  error: str | None = None


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the environment says after `reset` or `step`.

  Exactly one of `messages` and `ids` is given unless `done` ends the episode
  with nothing more to say.  `state_key` names the anchor state (GiGPO).
  """

  messages: tuple[Message, ...] = ()
  ids: np.ndarray | None = None
  reward: float = 0.0
  done: bool = False
  state_key: bytes | None = None
  tool_results: tuple[ToolResult, ...] = ()
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Turn:
  """One action and the observation that answered it, as offsets in a row.

  Tokens `[action_start, action_stop)` were sampled;
  `[action_stop, observation_stop)` were appended by the host.
  """

  row: int
  action_start: int
  action_stop: int
  observation_stop: int
  action: Action
  reward: float = 0.0
  state_key: bytes | None = None
  tool_results: tuple[ToolResult, ...] = ()
  finish: str = 'stop'  # stop | length: why the action ended


@dataclasses.dataclass(frozen=True)
class Row:
  """One context: `tokens[T]`, `action_mask[T]`, `logprobs[T]` (0 off-mask)."""

  tokens: np.ndarray
  action_mask: np.ndarray
  logprobs: np.ndarray


class Status(enum.Enum):
  """How an episode ended.  TIMEOUT and ENV_ERROR are infrastructure failures:

  such episodes keep their place in the group with valid = weight = 0.
  """

  DONE = 'done'
  MAX_TURNS = 'max_turns'
  MAX_TOKENS = 'max_tokens'
  TIMEOUT = 'timeout'
  ENV_ERROR = 'env_error'

  @property
  def failed(self) -> bool:
    return self in (Status.TIMEOUT, Status.ENV_ERROR)


@dataclasses.dataclass(frozen=True)
class Episode:
  """A finished episode.

  Attributes:
    task: The task it played.
    uid: Global episode index, the name that its randomness is drawn under.
    group: Index of its group in the batch.
    policy_version: Updates that the sampling weights had seen.
    rows: One row (`full` context) or one per turn (`markov`).
    turns: Its turns in order.
    status: How it ended.
    rewards: Named reward components; filled once its group is scored.
    detail: The error of a failed episode, for the log.
  """

  task: Task
  uid: int
  group: int
  policy_version: int
  rows: tuple[Row, ...]
  turns: tuple[Turn, ...]
  status: Status
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  detail: str = ''

  @property
  def num_action_tokens(self) -> int:
    return int(sum(row.action_mask.sum() for row in self.rows))

  @property
  def num_tool_calls(self) -> int:
    return sum(len(turn.tool_results) for turn in self.turns)

  @property
  def answer(self) -> str | None:
    """Answer of the last turn that gave one."""
    for turn in reversed(self.turns):
      if turn.action.answer is not None:
        return turn.action.answer
    return None
