"""GiGPO: advantages of whole episodes plus those of steps from equal states.

Anchor states arrive as dense ids (`anchors` makes them on the host).  Leaves
out the penalty for invalid actions, which is a reward.  Invariant: anchors of
different groups never merge, whatever their ids; a step counts once however
many rows repeat its episode; a state visited once gives exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import groups, returns
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch

Array = jax.Array


@jax.jit
def dense_pairs(first_N: Array, second_N: Array) -> Array:
  """int32 [N] ids below N, equal exactly where both keys are."""
  order_N = jnp.lexsort((second_N, first_N))
  first_S, second_S = first_N[order_N], second_N[order_N]
  new_S = (first_S[1:] != first_S[:-1]) | (second_S[1:] != second_S[:-1])
  ids_S = jnp.append(jnp.zeros((1,), jnp.int32), jnp.cumsum(new_S))
  return (
      jnp.zeros_like(order_N, jnp.int32)
      .at[order_N]
      .set(ids_S.astype(jnp.int32))
  )


def step_returns(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Array:
  """S_k = r_k + gamma S_{k+1} over the turns of the row's episode: [B, U].

  r_k is the sum of the turn's token rewards, so that the steps hold all of the
  return: turn rewards at their turns, the rest at the last one, less a KL.  The
  paper's code discounts the environment's rewards alone, and has its outcome
  among them.
  """
  rewards_BxU = returns.sum_by_turn(
      returns.token_rewards(batch, scores, state, options),
      returns.sampled(batch),
      batch,
  )
  slope_BxU = jnp.where(batch.turn_mask, options.gamma, 1).astype(
      rewards_BxU.dtype
  )
  at_BxU, _ = returns.suffix(rewards_BxU, slope_BxU)
  return at_BxU


def step_advantages(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Array:
  """Step returns normalized among steps of equal group and anchor: [B, U]."""
  shape = batch.turn_mask.shape
  exists_BxU = batch.turn_mask & (batch.anchor >= 0)
  counted_BxU = exists_BxU & returns.representatives(batch)[:, None]
  group_BxU = jnp.broadcast_to(batch.group[:, None], shape)
  values_N = groups.normalized(
      step_returns(batch, scores, state, options).ravel(),
      dense_pairs(group_BxU.ravel(), batch.anchor.ravel()),
      counted_BxU.ravel(),
      options.normalize_std,
      options.epsilon,
  )
  return jnp.where(exists_BxU, values_N.reshape(shape), 0)


def gigpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """A = A_episode + step_coef A_step (Feng et al. 2025, arXiv 2505.10978).

  Both normalized by their group's mean, and std with `normalize_std`.  With
  `pooled` an episode counts once for each of its turns in the episode
  statistics, as the reference code does; the paper's form counts it once.
  """
  weight_B = returns.representatives(batch)
  if options.pooled:
    weight_B = weight_B * jnp.sum(batch.turn_mask, axis=1)
  episode_B = groups.normalized(
      returns.episode_scores(batch, scores, state, options),
      batch.group,
      weight_B,
      options.normalize_std,
      options.epsilon,
  )
  step_BxT = returns.turn_values(
      step_advantages(batch, scores, state, options), batch
  )
  advantages_BxT = episode_B[:, None] + options.step_coef * step_BxT
  return Advantages(
      jnp.where(returns.sampled(batch), advantages_BxT, 0), state=state
  )
