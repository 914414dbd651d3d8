"""Estimators that compare the episodes of a group: one value per episode.

Leaves out credit inside an episode.  Invariant: the statistics of `groups`,
every sampled token of an episode gets its value, every other token 0.
"""

from __future__ import annotations

from agent_rl_jax.algorithms import groups
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch


def grpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """(R - mean) / (std + epsilon) in the group, without std by default.

  GRPO (Shao et al. 2024, sec. 4.1.2); without the standard deviation it is
  Dr. GRPO's advantage (Liu et al. 2025, eq. 1).  A group of one and a group
  of equal rewards give 0.
  """
  del scores
  values_B = groups.normalized(
      batch.returns,
      batch.group,
      groups.representatives(batch.episode, batch.valid),
      options.normalize_std,
      options.epsilon,
  )
  return Advantages(
      groups.broadcast(values_B, batch.action_mask, batch.valid), state=state
  )
