"""Generalized advantage estimation over sampled tokens, flat and in two levels.

Leaves out the critic and its loss.  Invariant: a tool's tokens neither
bootstrap nor discount; turn ends come from the mask and the turn index, so a
turn whose reward is zero stays a turn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked, returns
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch

Array = jax.Array


def values_of(scores: Scores, batch: TrajectoryBatch) -> Array:
  """Old values on sampled tokens, 0 elsewhere; ValueError without a critic."""
  if scores.values is None:
    raise ValueError(
        'this estimator needs Scores.values: configure a critic, or choose an '
        'estimator without one (grpo, rloo, reinforce_plus_plus, ...)'
    )
  return jnp.where(returns.sampled(batch), masked.real(scores.values), 0)


def finished(
    advantages_BxT: Array,
    targets_BxT: Array,
    batch: TrajectoryBatch,
    state: dict | None,
    options: AdvantageOptions,
    value_mask: Array | None = None,
) -> Advantages:
  """Whitens if asked and clears what is not sampled."""
  mask_BxT = returns.sampled(batch)
  if options.whiten:
    advantages_BxT = masked.whiten(advantages_BxT, mask_BxT)
  return Advantages(
      jnp.where(mask_BxT, advantages_BxT, 0),
      value_targets=jnp.where(mask_BxT, targets_BxT, 0),
      value_mask=value_mask,
      state=state,
  )


def gae(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t.

  Schulman et al. 2016, eq. 16, with 'next' the next sampled token; targets
  are A + V, and A is whitened with `whiten`.
  """
  values_BxT = values_of(scores, batch)
  rewards_BxT = returns.token_rewards(batch, scores, state, options)
  _, next_BxT = returns.carry_back(
      values_BxT, jnp.zeros_like(values_BxT), batch
  )
  delta_BxT = rewards_BxT + options.gamma * next_BxT - values_BxT
  slope_BxT = jnp.full_like(delta_BxT, options.gamma * options.lam)
  advantages_BxT, _ = returns.carry_back(delta_BxT, slope_BxT, batch)
  return finished(
      advantages_BxT, advantages_BxT + values_BxT, batch, state, options
  )


def turn_gae_values(
    rewards_BxU: Array,
    values_BxU: Array,
    exists_BxU: Array,
    gamma: float,
    lam: float,
) -> Array:
  """A_k = r_k + gamma V_{k+1} - V_k + gamma lam A_{k+1} over turns: [B, U]."""
  one_BxU = jnp.ones_like(values_BxU)
  _, next_BxU = returns.suffix(
      jnp.where(exists_BxU, values_BxU, 0), jnp.where(exists_BxU, 0, one_BxU)
  )
  delta_BxU = rewards_BxU + gamma * next_BxU - values_BxU
  at_BxU, _ = returns.suffix(
      jnp.where(exists_BxU, delta_BxU, 0),
      jnp.where(exists_BxU, gamma * lam * one_BxU, one_BxU),
  )
  return at_BxU


def bi_level_gae(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """GAE over turn ends first, then over the tokens of each turn.

  RAGEN (Wang et al. 2025, arXiv 2504.20073).  The high level discounts by
  `high_gamma` from turn end to turn end; its return replaces the reward at the
  turn end, where the low level, discounted by `gamma`, restarts.
  """
  values_BxT = values_of(scores, batch)
  rewards_BxT = returns.token_rewards(batch, scores, state, options)
  end_BxT = returns.turn_ends(batch)
  end_values_BxU = returns.sum_by_turn(values_BxT, end_BxT, batch)
  high_BxU = turn_gae_values(
      returns.sum_by_turn(rewards_BxT, end_BxT, batch),
      end_values_BxU,
      returns.sum_by_turn(jnp.ones_like(values_BxT), end_BxT, batch) > 0,
      options.high_gamma,
      options.lam,
  )
  target_BxT = returns.turn_values(high_BxU + end_values_BxU, batch)
  _, next_BxT = returns.carry_back(
      values_BxT, jnp.zeros_like(values_BxT), batch
  )
  inside_BxT = rewards_BxT + options.gamma * next_BxT - values_BxT
  delta_BxT = jnp.where(end_BxT, target_BxT - values_BxT, inside_BxT)
  decay_BxT = jnp.full_like(delta_BxT, options.gamma * options.lam)
  advantages_BxT, _ = returns.carry_back(
      delta_BxT, jnp.where(end_BxT, 0, decay_BxT), batch
  )
  return finished(
      advantages_BxT, advantages_BxT + values_BxT, batch, state, options
  )
