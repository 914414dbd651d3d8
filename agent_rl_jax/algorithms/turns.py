"""Estimators whose unit of credit is the turn.

Leaves out anchor states (`gigpo`).  Invariant: all sampled tokens of a turn
share one advantage.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import gae, groups, masked, returns
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch

Array = jax.Array


def _turn_sums(x_BxT: Array, batch: TrajectoryBatch) -> Array:
  return returns.sum_by_turn(x_BxT, returns.sampled(batch), batch)


def _exists(batch: TrajectoryBatch) -> Array:
  """bool [B, U]: turns of the row's episode that sampled a token."""
  ones_BxT = jnp.ones(batch.turn.shape, jnp.int32)
  return _turn_sums(ones_BxT, batch) > 0


def turn_gae(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """One step of the decision process per turn.

  A_k = R_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}, where V_k is the value
  before the turn's first token and R_k the sum of its rewards.  Values are
  trained at those tokens alone.
  """
  values_BxT = gae.values_of(scores, batch)
  rewards_BxT = returns.token_rewards(batch, scores, state, options)
  start_BxT = returns.turn_starts(batch)
  values_BxU = returns.sum_by_turn(values_BxT, start_BxT, batch)
  advantages_BxU = gae.turn_gae_values(
      _turn_sums(rewards_BxT, batch),
      values_BxU,
      _exists(batch),
      options.gamma,
      options.lam,
  )
  return gae.finished(
      returns.turn_values(advantages_BxU, batch),
      returns.turn_values(advantages_BxU + values_BxU, batch),
      batch,
      state,
      options,
      value_mask=start_BxT,
  )


def turn_return(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """G_k = R_k + gamma G_{k+1}: one discount per turn, no baseline."""
  rewards_BxT = returns.token_rewards(batch, scores, state, options)
  rewards_BxU = _turn_sums(rewards_BxT, batch)
  slope_BxU = jnp.where(_exists(batch), options.gamma, 1).astype(
      rewards_BxU.dtype
  )
  to_go_BxU, _ = returns.suffix(rewards_BxU, slope_BxU)
  advantages_BxT = returns.turn_values(to_go_BxU, batch)
  return Advantages(
      jnp.where(returns.sampled(batch), advantages_BxT, 0), state=state
  )


def assigned(
    turn_B: Array,
    outcome_B: Array,
    combined_B: Array,
    several_B: Array,
    first_BxT: Array,
    coef: float,
) -> Array:
  """MT-GRPO's assignment of advantages to tokens, [B, T].

  outcome + coef turn on the first turn and outcome after it, for episodes of
  several turns; combined everywhere for the others.
  """
  first_B = jnp.where(several_B, outcome_B + coef * turn_B, combined_B)
  later_B = jnp.where(several_B, outcome_B, combined_B)
  return jnp.where(first_BxT, first_B[:, None], later_B[:, None])


def mt_grpo(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """Turn reward credited to what precedes the first tool result.

  MT-GRPO (Zeng et al. 2025, arXiv 2505.11821).  The turn reward is the sum of
  the environment's turn rewards, the outcome reward what `returns` holds beyond
  them; each is normalized in its group, and their sum for episodes without a
  tool call, which have no result to tell the two apart.

  A batch tells turns, not calls, so that these are approximated: the first
  result is the answer to the first turn, even if that is an error message to a
  turn that called nothing; and an episode without a call is one of a single
  turn, even if it called a tool in it and a limit ended it there.
  """
  del scores
  counted_B = returns.representatives(batch)

  def normalized(values_B):
    return groups.normalized(
        values_B,
        batch.group,
        counted_B,
        options.normalize_std,
        options.epsilon,
    )

  turn_B = jnp.sum(returns.turn_rewards(batch), axis=1)
  total_B = masked.real(batch.returns)
  advantages_BxT = assigned(
      normalized(turn_B),
      normalized(total_B - turn_B),
      normalized(total_B),
      jnp.sum(_exists(batch), axis=1) > 1,
      batch.turn == 0,
      options.turn_coef,
  )
  return Advantages(
      jnp.where(returns.sampled(batch), advantages_BxT, 0), state=state
  )
