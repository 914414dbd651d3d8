"""One running episode as the host sees it: its row, its turns, its limits.

Pure bookkeeping over numpy, without device or threads.  Invariant: `mask` is
True exactly on tokens that a report said were sampled.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.types import (
    Action,
    Episode,
    Observation,
    Row,
    Status,
    Task,
    Turn,
)


@dataclasses.dataclass(frozen=True)
class Request:
  """An episode to be sampled.

  Attributes:
    task: What it plays.
    uid: Global episode index: names its randomness, on device and host.
    group: Index of its group within the rollout.
    greedy: Sample at temperature 0, in the environment (and the chance of it)
      of the sampled episode `uid`: a baseline for its group.
  """

  task: Task
  uid: int
  group: int
  greedy: bool = False


class Phase(enum.Enum):
  RESETTING = enum.auto()  # env.reset runs on a thread
  READY = enum.auto()  # waits for a slot
  DECODING = enum.auto()
  STEPPING = enum.auto()  # env.step runs on a thread
  FINISHED = enum.auto()


class Live:
  """An episode between its request and its `Episode`."""

  def __init__(self, request: Request, options: RolloutOptions, version: int):
    self.request = request
    self.options = options
    self.version = version
    self.phase = Phase.RESETTING
    self.slot: int | None = None
    self.writes = 0  # edits made to its row: tells a stale report from a new
    self.ticket: Any = None
    self.state: Any = None  # the environment's; its threads' to set and close
    self.prompt: np.ndarray | None = None
    self.length = 0
    self.tokens = np.zeros(options.max_len, np.int32)
    self.mask = np.zeros(options.max_len, bool)
    self.logprobs = np.zeros(options.max_len, np.float32)
    self.action_start = 0
    self.turns: list[Turn] = []
    self.state_key: bytes | None = None
    self.episode: Episode | None = None

  def append(self, ids: np.ndarray) -> None:
    """Adds tokens that the host wrote; the next action starts behind them."""
    stop = self.length + len(ids)
    self.tokens[self.length : stop] = ids
    self.length = stop
    self.action_start = stop
    self.phase = Phase.DECODING

  def sampled(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Adds tokens that a report brought."""
    stop = self.length + len(tokens)
    self.tokens[self.length : stop] = tokens
    self.logprobs[self.length : stop] = logprobs
    self.mask[self.length : stop] = True
    self.length = stop

  @property
  def action_ids(self) -> np.ndarray:
    return self.tokens[self.action_start : self.length]

  def budget(self) -> int:
    """Tokens the next action may sample."""
    spent = int(self.mask[: self.length].sum())
    return min(
        self.options.max_action_tokens,
        self.options.max_episode_tokens - spent,
        self.options.max_len - self.length,
    )

  def begin_turn(self, action: Action, finish: str) -> None:
    """Records the action; its observation is filled in by `end_turn`."""
    self.turns.append(
        Turn(
            row=0,
            action_start=self.action_start,
            action_stop=self.length,
            observation_stop=self.length,
            action=action,
            state_key=self.state_key,
            finish=finish,
        )
    )

  def end_turn(self, observation: Observation, stop: int) -> None:
    """Completes the last turn with what the environment answered."""
    self.turns[-1] = dataclasses.replace(
        self.turns[-1],
        observation_stop=stop,
        reward=observation.reward,
        tool_results=observation.tool_results,
    )
    self.state_key = observation.state_key

  def finish(self, status: Status, detail: str = '') -> Episode:
    """Freezes the episode."""
    self.phase = Phase.FINISHED
    row = Row(
        tokens=self.tokens[: self.length].copy(),
        action_mask=self.mask[: self.length].copy(),
        logprobs=self.logprobs[: self.length].copy(),
    )
    self.episode = Episode(
        task=self.request.task,
        uid=self.request.uid,
        group=self.request.group,
        policy_version=self.version,
        rows=(row,),
        turns=tuple(self.turns),
        status=status,
        detail=detail,
    )
    return self.episode
