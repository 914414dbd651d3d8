"""The weighted rewards of a run: components, total, failures, memory.

What it leaves out: threads and deadlines (the engine scores groups on an
executor) and group statistics (algorithms/).  Invariants: every scored episode
has the same components in the same order, all finite; a reward that raises
costs its group, never the step; a reward that returns NaN is a bug and is
refused loudly.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rewards.reward import Reward
from agent_rl_jax.types import Episode, Task

_LOG = logging.getLogger(__name__)


class InvalidReward(ValueError):
  """A reward answered something that is not one finite float per episode."""


class RewardSet:
  """Scores groups with several named rewards.

  Attributes:
    names: Components in order; `metric` comes last when it has no weight.
    metric: The unshaped measure (accuracy), computed even without weight.
    failures: Groups that could not be scored because a reward raised.
  """

  def __init__(
      self,
      weights: Mapping[str, float],
      metric: str = 'answer',
      rewards: Mapping[str, Callable[[], Reward]] = REWARDS,
  ):
    """Makes each reward once.

    Args:
      weights: Weight of each component in the total; 0 only records it.
      metric: Component that measures success, whatever its weight.
      rewards: Table to take them from.

    Raises:
      ValueError: A name is unknown (the nearest is named), a weight is not
        finite, or there is none.
    """
    if not weights:
      raise ValueError(
          "reward weights are empty: give at least one, as {'answer': 1.0}"
      )
    for name in (*weights, metric):
      if name not in rewards:
        near = difflib.get_close_matches(name, rewards, n=1)
        hint = f'did you mean {near[0]!r}?' if near else ''
        known = ', '.join(rewards)
        raise ValueError(f'unknown reward {name!r}: {hint} (known: {known})')
    for name, weight in weights.items():
      if not math.isfinite(weight):
        raise ValueError(f'weight of reward {name!r} is {weight}: not finite')
    self.metric = metric
    self.weights = {name: float(weight) for name, weight in weights.items()}
    self.names = tuple(dict.fromkeys((*weights, metric)))
    self.failures = 0
    self._rewards = {name: rewards[name]() for name in self.names}
    self._lock = threading.Lock()

  def score(
      self, task: Task, episodes: Sequence[Episode], step: int
  ) -> list[Mapping[str, float]]:
    """Components of each episode of one group, in order.

    Episodes that failed (`status.failed`) are not shown to the rewards and
    get zeros; their place in the statistics is not decided here.

    Returns:
      One mapping per episode; EMPTY mappings for the whole group when a
      reward raised: such a group was not scored and must have
      valid = weight = 0.

    Raises:
      InvalidReward: A value is NaN, infinite or no number, or the count is
        wrong; names the task and the reward.
    """
    alive = [i for i, e in enumerate(episodes) if not e.status.failed]
    scored = [dict.fromkeys(self.names, 0.0) for _ in episodes]
    if not alive:
      return scored
    group = [episodes[i] for i in alive]
    for name in self.names:
      try:
        values = list(self._rewards[name](task, group, step))
      except Exception:
        _LOG.exception('reward %r failed on task %s', name, task.uid)
        with self._lock:
          self.failures += 1
        return [{} for _ in episodes]
      _check(values, len(group), name, task)
      for i, value in zip(alive, values, strict=True):
        scored[i][name] = float(value)
    return scored

  def total(self, components: Mapping[str, float]) -> float:
    """The weighted sum that is optimized; 0.0 for a group not scored."""
    if not components:
      return 0.0
    return math.fsum(
        weight * components[name] for name, weight in self.weights.items()
    )

  def state(self) -> dict[str, Any]:
    """Memory of the rewards that have any, for the checkpoint.

    A copy: an interrupt in the middle of an iteration saves what was there
    before it, which scoring has gone on from.
    """
    return {
        name: copy.deepcopy(reward.state_dict())
        for name, reward in self._rewards.items()
        if hasattr(reward, 'state_dict')
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes back what `state` gave.

    Raises:
      ValueError: The state belongs to other rewards than these.
    """
    own = self.state()
    if set(state) != set(own):
      raise ValueError(
          f'reward state of {sorted(state)} does not fit the rewards with '
          f'memory in this run, {sorted(own)}: resume with the same rewards'
      )
    for name, value in state.items():
      self._rewards[name].load_state_dict(copy.deepcopy(value))


def _check(values: list[Any], count: int, name: str, task: Task) -> None:
  """Refuses what would poison a whole batch."""
  if len(values) != count:
    raise InvalidReward(
        f'reward {name!r} gave {len(values)} values for {count} episodes of '
        f'task {task.uid}'
    )
  for value in values:
    try:
      finite = math.isfinite(value)
    except (TypeError, OverflowError):
      finite = False
    if not finite:
      raise InvalidReward(
          f'reward {name!r} gave {value!r} on task {task.uid}: rewards must '
          'be finite numbers'
      )
