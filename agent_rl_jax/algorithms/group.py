"""Estimators that compare the episodes of a group: one value per episode.

Leaves out credit inside an episode.  Invariant: the statistics of `groups`;
every sampled token of a valid episode gets its value, every other token 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from agent_rl_jax.algorithms import groups, masked, returns
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch


def _spread_over(values_B, batch: TrajectoryBatch, state) -> Advantages:
  return Advantages(
      groups.broadcast(values_B, returns.sampled(batch)), state=state
  )


def grpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """(R - mean) in the group, over std + epsilon with `normalize_std`.

  GRPO (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2).  A group of one and a group of equal
  rewards give 0.
  """
  values_B = groups.normalized(
      returns.episode_scores(batch, scores, state, options),
      batch.group,
      returns.representatives(batch),
      options.normalize_std,
      options.epsilon,
  )
  return _spread_over(values_B, batch, state)


def dr_grpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """R - mean in the group (Liu et al. 2025, arXiv 2503.20783).

  The paper pairs it with the aggregation seq-mean-token-sum-norm.
  """
  values_B = groups.normalized(
      returns.episode_scores(batch, scores, state, options),
      batch.group,
      returns.representatives(batch),
      False,
      1.0,
  )
  return _spread_over(values_B, batch, state)


def rloo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """R minus the mean of the group's others (RLOO).

  Ahmadian et al. 2024, arXiv 2402.14740; computed as n / (n - 1) (R - mean),
  0 for a group of one.
  """
  score_B = returns.episode_scores(batch, scores, state, options)
  counted_B = returns.representatives(batch)
  values_B = groups.normalized(score_B, batch.group, counted_B, False, 1.0)
  count_B = groups.group_statistics(score_B, batch.group, counted_B).count
  values_B = values_B * count_B / jnp.maximum(count_B - 1, 1)
  return _spread_over(values_B, batch, state)


def opo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """R minus the group's mean weighted by length (OPO).

  Hao et al. 2025, arXiv 2505.23585; length is the episode's sampled tokens,
  and a group of one gives 0.
  """
  score_B = returns.episode_scores(batch, scores, state, options)
  counted_B = returns.representatives(batch)
  stats = groups.group_statistics(score_B, batch.group, counted_B)
  tokens_B = jnp.sum(returns.sampled(batch), axis=1, dtype=score_B.dtype)
  weight_B = jnp.where(counted_B, returns.over_episode(tokens_B, batch), 0)
  total_B = groups.group_sum(score_B, batch.group, weight_B)
  weights_B = groups.group_sum(jnp.ones_like(score_B), batch.group, weight_B)
  baseline_B = total_B / jnp.maximum(weights_B, 1)
  signal_B = (stats.count > 1) & (stats.spread > masked.SPREAD_TOLERANCE)
  return _spread_over(
      jnp.where(signal_B, score_B - baseline_B, 0), batch, state
  )


def gpg(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """a (R - mean), a = episodes / episodes of nonzero reward (GPG).

  Chu et al. 2025, arXiv 2504.02546, in verl's form.  The paper's a scales a
  batch up for its groups of equal rewards, which teach nothing.  This one
  counts episodes of reward 0 instead: those of mixed groups too, and none of a
  group that is all right.  Shaping (a format or length reward, a penalty, a KL
  in the reward) may make failures nonzero, and a then tends to 1.
  """
  score_B = returns.episode_scores(batch, scores, state, options)
  counted_B = returns.representatives(batch)
  values_B = groups.normalized(score_B, batch.group, counted_B, False, 1.0)
  nonzero = jnp.sum(counted_B & (score_B != 0), dtype=score_B.dtype)
  scale = jnp.sum(counted_B, dtype=score_B.dtype) / jnp.maximum(nonzero, 1)
  return _spread_over(scale * values_B, batch, state)


def reinforce_plus_plus_baseline(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """R - mean in the group, whitened over the batch's tokens.

  REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).  A group of one keeps R: the whitening is its
  baseline.
  """
  score_B = returns.episode_scores(batch, scores, state, options)
  counted_B = returns.representatives(batch)
  stats = groups.group_statistics(score_B, batch.group, counted_B)
  values_B = jnp.where(stats.count > 1, score_B - stats.mean, score_B)
  mask_BxT = returns.sampled(batch)
  return Advantages(
      masked.whiten(groups.broadcast(values_B, mask_BxT), mask_BxT),
      state=state,
  )


def gdpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """Each reward component normalized in its group, summed, then whitened.

  GDPO (Liu et al. 2026, arXiv 2601.05242), weighted by `component_weights`,
  one for each column of `batch.components` (none: all 1).  A component of
  weight 0 is not read.

  Raises:
    ValueError: As many weights as components are needed.
  """
  del scores
  components = batch.components.shape[1]
  weights = options.component_weights or (1.0,) * components
  if len(weights) != components:
    raise ValueError(
        f'component_weights={weights} for {components} reward components: '
        'give one weight to each, in the order of the rewards'
    )
  counted_B = returns.representatives(batch)
  total_B = jnp.zeros_like(masked.real(batch.returns))
  for column, weight in enumerate(weights):
    if weight:
      total_B += weight * groups.normalized(
          batch.components[:, column],
          batch.group,
          counted_B,
          True,
          options.epsilon,
      )
  mask_BxT = returns.sampled(batch)
  return Advantages(
      masked.whiten(groups.broadcast(total_B, mask_BxT), mask_BxT), state=state
  )
