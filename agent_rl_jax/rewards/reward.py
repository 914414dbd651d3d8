"""What a reward is, and how a function of one episode becomes one.

Invariant: a reward answers one float per episode of the group, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from agent_rl_jax.types import Episode, Task


class Reward(Protocol):
  """Scores the episodes of one group together.

  `step` is the iteration, from 0, for schedules.  A reward with memory
  also has `state_dict() -> dict` and `load_state_dict(state)`, of JSON-like
  values; the checkpoint keeps them.  `RewardSet` copies on the way out and
  in, so that neither needs to.
  """

  def __call__(
      self, task: Task, episodes: Sequence[Episode], step: int
  ) -> Sequence[float]:
    ...


def per_episode(fn: Callable[[Task, Episode], float]) -> Reward:
  """Lifts `fn(task, episode) -> float` to a reward of groups."""

  def reward(
      task: Task, episodes: Sequence[Episode], step: int
  ) -> Sequence[float]:
    del step
    return [fn(task, episode) for episode in episodes]

  reward.__name__ = fn.__name__
  reward.__doc__ = fn.__doc__
  return reward
