"""From scored groups to the rows of a batch: what is optimized, and where.

Puts in what a run's settings add to an episode: the charge for its length,
the greedy baseline, which rows the loss leaves out, the anchors of its steps.
Leaves out which groups are taken (`collect.py`) and the arrays themselves
(`rollout/collate.py`).  Invariant: the batch has `train.prompts *
train.samples` rows, whatever is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agent_rl_jax.algorithms import anchors, filters
from agent_rl_jax.algorithms.advantages import NEEDS_GREEDY_BASELINE
from agent_rl_jax.batch import TrajectoryBatch
from agent_rl_jax.rollout.collate import collate
from agent_rl_jax.train.evaluate import Scored
from agent_rl_jax.train.group import Group
from agent_rl_jax.train.settings import Settings
from agent_rl_jax.types import Episode, Status


def assemble(
    settings: Settings,
    groups: Sequence[Group],
    trained: Sequence[bool],
    fresh: int,
) -> tuple[Scored, TrajectoryBatch]:
  """Groups as a batch of the run's one shape.

  Args:
    settings: Of the run.
    groups: At most `train.prompts`; rows of what is missing are empty.
    trained: Per group, False to leave it out of the loss and of what is
      computed over the batch (baselines, whitening), as if it was not there:
      RAGEN filters before it estimates.
    fresh: The first so many groups were in no batch before; surplus of an
      earlier iteration was not, the replayed ones were.

  Returns:
    (episodes with the returns that are optimized, batch).  Weight is 0 also
    where a truncated episode is masked.
  """
  rollout, train = settings.rollout, settings.train
  needs_baseline = settings.algorithm.advantage in NEEDS_GREEDY_BASELINE
  episodes, chosen, weights, baselines, new = [], [], [], [], []
  for index, (group, keep) in enumerate(zip(groups, trained, strict=True)):
    for episode in group.episodes:
      masked = settings.overlong.mask and truncated(episode)
      episodes.append(dataclasses.replace(episode, group=index))
      chosen.append(keep)
      weights.append(float(not masked))
      baselines.append(group.baseline or 0.0)
      new.append(index < fresh)
  gather = lambda name, dtype: np.concatenate(
      [np.zeros(0, dtype), *(getattr(group, name) for group in groups)],
      dtype=dtype,
  )
  returns = gather('returns', np.float32)
  if settings.overlong.penalty:
    returns = (returns + penalty(settings, episodes)).astype(np.float32)
  scored = Scored(
      episodes, returns, gather('metric', np.float32), gather('valid', bool)
  )
  batch = collate(
      episodes,
      components=settings.rewards.names,
      returns=scored.returns,
      metric=scored.accuracy,
      valid=scored.valid & np.array(chosen, bool),
      num_rows=train.prompts * train.samples,
      length=rollout.max_len,
      num_turns=rollout.max_turns,
      turn_weight=settings.rewards.by_name().get('environment', 0.0),
      anchors=anchors.group_anchors(
          [turn.state_key for e in episodes for turn in e.turns],
          [e.group for e in episodes for _ in e.turns],
          settings.algorithm.similarity,
      ),
      weight=weights,
      baseline=baselines if needs_baseline else None,
      fresh=new if settings.replay.capacity else None,
  )
  return scored, batch


def truncated(episode: Episode) -> bool:
  """Whether a limit on tokens, and not the episode itself, ended it."""
  return episode.status is Status.MAX_TOKENS or any(
      turn.finish == 'length' for turn in episode.turns
  )


def penalty(settings: Settings, episodes: Sequence[Episode]) -> np.ndarray:
  """What long episodes are charged; sampled tokens count, tools' do not.

  A truncated one pays all, wherever it stood: the limit on its row or on one
  action may be hit before that on the episode.
  """
  options = settings.overlong
  if not options.penalty:
    return np.zeros(len(episodes))
  limit = options.limit or settings.rollout.max_episode_tokens
  return filters.overlong_penalty(
      np.array(
          [limit if truncated(e) else e.num_action_tokens for e in episodes]
      ),
      limit,
      options.buffer,
      options.penalty,
  )


def overlong_metrics(settings: Settings, scored: Scored) -> dict[str, float]:
  """Of the batch's valid episodes: mean penalty, and share left out."""
  valid = [e for e, v in zip(scored.episodes, scored.valid, strict=True) if v]
  count = max(len(valid), 1)
  metrics = {}
  if settings.overlong.penalty:
    total = float(penalty(settings, valid).sum()) if valid else 0.0
    metrics['overlong/penalty'] = total / count
  if settings.overlong.mask:
    metrics['overlong/masked'] = sum(map(truncated, valid)) / count
  return metrics
