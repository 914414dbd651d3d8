"""BRIDGE: evaluation is the same engine under another purpose.

Leaves out what is done with the figures.  Invariant: evaluation draws from
its own randomness, so it changes nothing in the training that surrounds it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_rl_jax.rewards.reward_set import RewardSet
from agent_rl_jax.rollout.engine import Engine, RolloutStats
from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.slots import Purpose
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.types import Episode, Task


@dataclasses.dataclass(frozen=True)
class Scored:
  """Episodes with what the rewards made of them.

  Attributes:
    episodes: With their components filled in.
    returns: float [B], what is optimized.
    accuracy: float [B], the unshaped measure.
    valid: bool [B], False where infrastructure or a reward failed.
  """

  episodes: list[Episode]
  returns: np.ndarray
  accuracy: np.ndarray
  valid: np.ndarray

  def metrics(self) -> dict[str, float]:
    """Episode metrics of what was judged, failures counted apart."""
    counted = [
        i
        for i, episode in enumerate(self.episodes)
        if self.valid[i] or episode.status.failed
    ]
    metrics = metrics_lib.episode_metrics(
        [self.episodes[i] for i in counted],
        self.returns[counted],
        self.accuracy[counted],
    )
    metrics['failures/unscored'] = float(len(self.episodes) - len(counted))
    return metrics


def join(parts: Sequence[Scored]) -> Scored:
  """All episodes, in order; at least one part."""
  if len(parts) == 1:
    return parts[0]
  return Scored(
      [episode for part in parts for episode in part.episodes],
      *(
          np.concatenate([getattr(part, name) for part in parts])
          for name in ('returns', 'accuracy', 'valid')
      ),
  )


def score(
    episodes: Sequence[Episode],
    rewards: RewardSet,
    step: int,
    executor: Executor,
    patience: float,
) -> Scored:
  """Scores whole groups in the order of their first episodes.

  One group at a time, so that a reward with memory sees the same order in
  every run, but on a thread: a reward that hangs costs its own group.

  Args:
    episodes: Finished episodes.
    rewards: Judges.
    step: Iteration, for rewards with a schedule.
    executor: Threads.
    patience: Seconds that a group may take.

  Raises:
    InvalidReward: a reward gave no finite number, naming task and reward.
  """
  groups: dict[int, list[int]] = {}
  for i, episode in enumerate(episodes):
    groups.setdefault(episode.group, []).append(i)
  scored = list(episodes)
  returns = np.zeros(len(scored), np.float32)
  accuracy = np.zeros(len(scored), np.float32)
  valid = np.zeros(len(scored), bool)
  for members in groups.values():
    group = [episodes[i] for i in members]
    ticket = executor.submit(
        rewards.score,
        group[0].task,
        group,
        step,
        deadline=time.monotonic() + patience,
    )
    executor.wait_all([ticket])
    if ticket.error is not None and not ticket.expired:
      raise ticket.error
    components = ticket.result or [{} for _ in members]
    for i, values in zip(members, components, strict=True):
      scored[i] = dataclasses.replace(episodes[i], rewards=dict(values))
      returns[i] = rewards.total(values)
      accuracy[i] = values.get(rewards.metric, 0.0)
      valid[i] = bool(values) and not episodes[i].status.failed
  return Scored(scored, returns, accuracy, valid)


def evaluate(
    engine: Engine,
    params: Any,
    tasks: Sequence[Task],
    rewards: RewardSet,
    executor: Executor,
    *,
    patience: float = 60.0,
    samples: int = 1,
    temperature: float = 0.0,
    version: int = 0,
) -> tuple[Scored, RolloutStats]:
  """Plays each task `samples` times and scores the episodes.

  Args:
    engine: Plays them.
    params: Rollout parameters.
    tasks: Held-out problems.
    rewards: Judges.
    executor: Threads that judge.
    patience: Seconds that judging a group may take.
    samples: Episodes per task.
    temperature: 0 is greedy.
    version: Updates the weights have seen.
  """
  requests = [
      Request(task, group * samples + i, group)
      for group, task in enumerate(tasks)
      for i in range(samples)
  ]
  episodes, stats = engine.rollout(
      params,
      requests,
      purpose=Purpose.EVAL,
      version=version,
      temperature=temperature,
  )
  return score(episodes, rewards, version, executor, patience), stats
