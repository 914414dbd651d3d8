"""The table of advantage estimators, and the call that runs one.

An estimator is a pure function (batch, scores, state, options) -> Advantages;
to add one, write it in a file of its own and enter it here.  Leaves out every
formula.  Invariant: advantages are constants, 0 on tokens that were not
sampled, and float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import (
    baselines,
    gae,
    gigpo,
    group,
    groups,
    kl,
    masked,
    returns,
    turns,
)
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Mean, Scores, TrajectoryBatch

Estimator = Callable[
    [TrajectoryBatch, Scores, dict | None, AdvantageOptions], Advantages
]

ADVANTAGES: dict[str, Estimator] = {
    'reinforce': baselines.reinforce,
    'reward_to_go': baselines.reward_to_go,
    'reinforce_plus_plus': baselines.reinforce_plus_plus,
    'reinforce_plus_plus_baseline': group.reinforce_plus_plus_baseline,
    'rloo': group.rloo,
    'remax': baselines.remax,
    'grpo': group.grpo,
    'dr_grpo': group.dr_grpo,
    'gdpo': group.gdpo,
    'opo': group.opo,
    'gpg': group.gpg,
    'gae': gae.gae,
    'bi_level_gae': gae.bi_level_gae,
    'turn_gae': turns.turn_gae,
    'turn_return': turns.turn_return,
    'mt_grpo': turns.mt_grpo,
    'gigpo': gigpo.gigpo,
}

# What each needs beyond rewards, for the loop to provide.
NEEDS_VALUES = frozenset({'gae', 'bi_level_gae', 'turn_gae'})
NEEDS_GREEDY_BASELINE = frozenset({'remax'})
NEEDS_GROUPS = frozenset(
    {'rloo', 'grpo', 'dr_grpo', 'gdpo', 'opo', 'gpg', 'mt_grpo', 'gigpo'}
)


def initial_state(options: AdvantageOptions) -> dict:
  """What the estimator and the KL controller carry from batch to batch."""
  state = {}
  if options.advantage == 'reinforce':
    state['baseline'] = baselines.initial_baseline(options)
  if options.kl_adaptive:
    state['kl_coef'] = jnp.asarray(options.kl_coef, jnp.float32)
  return state


def reference_kl(
    batch: TrajectoryBatch, scores: Scores, options: AdvantageOptions
) -> jax.Array:
  """Mean over rows of the row's mean KL(old, reference), in nats per token.

  Rows that are not `fresh` were counted when an earlier batch held them.
  """
  mask_BxT = returns.sampled(batch)
  if batch.fresh is not None:
    mask_BxT = mask_BxT & batch.fresh[:, None]
  gap_BxT = kl.kl_penalty(
      scores.old_logprobs, scores.reference_logprobs, mask_BxT, options.kl
  )
  return masked.masked_mean(
      masked.masked_mean(gap_BxT, mask_BxT, axis=1), jnp.any(mask_BxT, axis=1)
  )


def kl_metrics(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> dict[str, Mean]:
  """The coefficient in force, what it takes off the rewards and what moves it.

  kl/coef of any KL; kl/reward, with the KL in the reward, is the mean of
  KL(old, reference) over sampled tokens in nats, before the coefficient;
  kl/measured, with an adaptive coefficient, is the `reference_kl` that is
  compared with kl_target after this batch.
  """
  if options.kl == 'none':
    return {}
  one = jnp.ones((), jnp.float32)
  coef = jnp.asarray(returns.kl_coef(state, options), jnp.float32)
  metrics = {'kl/coef': Mean(coef, one)}
  if options.kl_placement == 'reward':
    mask_BxT = returns.sampled(batch)
    gap_BxT = kl.kl_penalty(
        scores.old_logprobs, scores.reference_logprobs, mask_BxT, options.kl
    )
    metrics['kl/reward'] = Mean(
        jnp.sum(gap_BxT), jnp.sum(mask_BxT).astype(gap_BxT.dtype)
    )
  if options.kl_adaptive:
    metrics['kl/measured'] = Mean(reference_kl(batch, scores, options), one)
  return metrics


def group_metrics(batch: TrajectoryBatch) -> dict[str, Mean]:
  """Shares of groups without signal, and the reward's spread inside groups."""
  counted_B = returns.representatives(batch)
  stats = groups.group_statistics(batch.returns, batch.group, counted_B)
  first_B = groups.representatives(batch.group, counted_B)
  several_B = first_B & (stats.count > 1)
  dtype = stats.std.dtype
  groups_seen = jnp.sum(first_B).astype(dtype)
  flat_B = several_B & (stats.spread <= masked.SPREAD_TOLERANCE)
  return {
      'group/singleton_fraction': Mean(
          jnp.sum(first_B & (stats.count == 1)).astype(dtype), groups_seen
      ),
      'group/zero_variance_fraction': Mean(
          jnp.sum(flat_B).astype(dtype), jnp.sum(several_B).astype(dtype)
      ),
      'group/return_std': Mean(
          masked.masked_sum(stats.std, several_B),
          jnp.sum(several_B).astype(dtype),
      ),
  }


def estimate(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """Runs the configured estimator and adapts the KL coefficient after it.

  Args:
    batch: A whole rollout batch, so that statistics are global.
    scores: Of the policy at the start of the update.
    state: From `initial_state` or the last call; checkpointed by the caller.
    options: Static.

  Raises:
    ValueError: The estimator or the KL lacks an input.
  """
  result = ADVANTAGES[options.advantage](batch, scores, state, options)
  new = dict(result.state or {})
  if options.kl_adaptive:
    if scores.reference_logprobs is None:
      raise ValueError(
          'kl_adaptive needs reference log-probs: score the batch with the '
          'reference policy, or set kl_adaptive=False'
      )
    episodes = jnp.sum(returns.newcomers(batch))
    new['kl_coef'] = kl.adapted_coef(
        returns.kl_coef(state, options),
        reference_kl(batch, scores, options),
        options.kl_target,
        options.kl_horizon,
        episodes,
    )
  return jax.tree.map(jax.lax.stop_gradient, result.replace(state=new))
