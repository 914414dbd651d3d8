"""Settings of the rollout engine; validated against each other here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
  """Shapes and limits of a rollout.

  Attributes:
    slots: Rows that decode together, over all data shards of the process.
    max_len: Tokens a row can hold (T); prompt, actions and observations.
    chunk: Tokens decoded per compiled call, at most.
    extend_rows: Rows per data shard in one prefill call (R).
    extend_block: New tokens per row in one prefill call (S).
    forced_limit: Observations of at most this many tokens ride along in
      the decode chunks instead of a prefill call (E).
    max_turns: Actions per episode.
    max_action_tokens: Sampled tokens per action.
    max_episode_tokens: Sampled tokens per episode.
    temperature: Of training rollouts; 0 is greedy.
    step_timeout: Seconds an environment step (with its tools) or reset may
      take before the episode is given up as TIMEOUT.
    workers: Host threads that run environment steps.
  """

  slots: int
  max_len: int
  chunk: int = 16
  extend_rows: int = 4
  extend_block: int = 64
  forced_limit: int = 32
  max_turns: int = 4
  max_action_tokens: int = 128
  max_episode_tokens: int = 512
  temperature: float = 1.0
  step_timeout: float = 30.0
  workers: int = 16

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      low = 0 if field.name in ('temperature', 'forced_limit') else 1
      if field.name == 'step_timeout':
        low = 1e-3
      if value < low:
        raise ValueError(
            f'rollout.{field.name}={value}: must be at least {low}'
        )
    if self.extend_block > self.max_len:
      raise ValueError(
          f'rollout.extend_block={self.extend_block} is longer than a row,'
          f' rollout.max_len={self.max_len}'
      )
    if self.forced_limit > self.max_len:
      raise ValueError(
          f'rollout.forced_limit={self.forced_limit} is longer than a row,'
          f' rollout.max_len={self.max_len}'
      )
    if self.max_action_tokens > self.max_episode_tokens:
      raise ValueError(
          f'rollout.max_action_tokens={self.max_action_tokens} exceeds'
          f' rollout.max_episode_tokens={self.max_episode_tokens}'
      )
