"""Rewards on tokens, and recurrences that run backwards over an episode.

Leaves out baselines and normalization.  Invariants: an episode's token
rewards sum to its `returns` (less the KL penalty) and stand on sampled tokens
alone; recurrences skip tokens that the policy did not sample, neither
discounting nor stopping there, and run on through the rows of an episode in
turn order, whatever the rows' places in the batch.

Helpers of many small operations are jitted: inside a compiled step that
changes nothing, outside of one it saves compiling each operation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import groups, kl, masked
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Scores, TrajectoryBatch

Array = jax.Array


def sampled(batch: TrajectoryBatch) -> Array:
  """bool [B, T]: sampled tokens of valid rows."""
  return batch.action_mask & batch.valid[:, None]


def over_episode(x: Array, batch: TrajectoryBatch) -> Array:
  """Sum of x [B, ...] over the valid rows of each row's episode."""
  rows = batch.episode.shape[0]
  valid = batch.valid.reshape((rows,) + (1,) * (x.ndim - 1))
  x = jnp.where(valid, x, jnp.zeros((), x.dtype))
  return jax.ops.segment_sum(x, batch.episode, num_segments=rows)[batch.episode]


def turn_ends(batch: TrajectoryBatch) -> Array:
  """bool [B, T]: the last sampled token of each turn."""
  mask_BxT = sampled(batch)
  length = mask_BxT.shape[1]
  index_BxT = jnp.broadcast_to(jnp.arange(length)[None], mask_BxT.shape)
  at_BxT = jnp.where(mask_BxT, index_BxT, length)
  at_BxT = jax.lax.cummin(at_BxT, axis=1, reverse=True)
  after_BxT = jnp.pad(at_BxT[:, 1:], ((0, 0), (0, 1)), constant_values=length)
  next_BxT = jnp.take_along_axis(
      batch.turn, jnp.minimum(after_BxT, length - 1), axis=1
  )
  return mask_BxT & ((after_BxT == length) | (next_BxT != batch.turn))


def turn_starts(batch: TrajectoryBatch) -> Array:
  """bool [B, T]: the first sampled token of each turn."""
  mask_BxT = sampled(batch)
  length = mask_BxT.shape[1]
  index_BxT = jnp.broadcast_to(jnp.arange(length)[None], mask_BxT.shape)
  at_BxT = jax.lax.cummax(jnp.where(mask_BxT, index_BxT, -1), axis=1)
  before_BxT = jnp.pad(at_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  last_BxT = jnp.take_along_axis(batch.turn, jnp.maximum(before_BxT, 0), axis=1)
  return mask_BxT & ((before_BxT < 0) | (last_BxT != batch.turn))


def episode_ends(batch: TrajectoryBatch) -> Array:
  """bool [B, T]: the last sampled token of each episode."""
  rows = batch.episode.shape[0]
  turn_B = jnp.max(jnp.where(sampled(batch), batch.turn, -1), axis=1)
  last_B = jax.ops.segment_max(turn_B, batch.episode, num_segments=rows)
  return turn_ends(batch) & (batch.turn == last_B[batch.episode][:, None])


def turn_values(x_BxU: Array, batch: TrajectoryBatch) -> Array:
  """Each token's entry of its turn: [B, T] from [B, U]."""
  return jnp.take_along_axis(x_BxU, batch.turn, axis=1)


def sum_by_turn(x_BxT: Array, mask_BxT: Array, batch: TrajectoryBatch) -> Array:
  """Sum of x over the masked tokens of each turn of the row's episode: [B, U]."""
  turns = batch.turn_mask.shape[1]

  def one_row(x_T, turn_T):
    return jax.ops.segment_sum(x_T, turn_T, num_segments=turns)

  x_BxT = jnp.where(mask_BxT, x_BxT, jnp.zeros((), x_BxT.dtype))
  return over_episode(jax.vmap(one_row)(x_BxT, batch.turn), batch)


def kl_coef(state: dict | None, options: AdvantageOptions) -> Array | float:
  """The coefficient in force: adapted if the state holds one."""
  if state is not None and 'kl_coef' in state:
    return state['kl_coef']
  return options.kl_coef


def _reward_penalty(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Array | None:
  """kl_coef KL(old, reference) per token, or None if it is not in the reward."""
  if options.kl == 'none' or options.kl_placement != 'reward':
    return None
  if scores.reference_logprobs is None:
    raise ValueError(
        f"kl={options.kl!r} with kl_placement='reward' needs reference "
        'log-probs: score the batch with the reference policy, or set kl=none'
    )
  gap_BxT = kl.kl_penalty(
      scores.old_logprobs, scores.reference_logprobs, sampled(batch), options.kl
  )
  return kl_coef(state, options) * gap_BxT


def token_rewards(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Array:
  """Rewards on sampled tokens, [B, T].

  With `turn_rewards` the environment's reward of a turn stands on the turn's
  last token and what is left of `returns` on the episode's; without, all of it
  stands there.  A KL in the reward is taken off every sampled token.
  """
  end_BxT = episode_ends(batch)
  returns_B = masked.real(batch.returns)
  rewards_BxT = jnp.where(end_BxT, returns_B[:, None], 0)
  if options.turn_rewards:
    placed_BxT = jnp.where(
        turn_ends(batch), turn_values(_turn_rewards(batch), batch), 0
    )
    left_B = returns_B - over_episode(jnp.sum(placed_BxT, axis=1), batch)
    rewards_BxT = placed_BxT + jnp.where(end_BxT, left_B[:, None], 0)
  penalty_BxT = _reward_penalty(batch, scores, state, options)
  if penalty_BxT is not None:
    rewards_BxT = rewards_BxT - penalty_BxT
  return rewards_BxT


def episode_scores(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Array:
  """The sum of an episode's token rewards, on each of its rows: [B]."""
  penalty_BxT = _reward_penalty(batch, scores, state, options)
  if penalty_BxT is None:
    return masked.real(batch.returns)
  penalty_B = over_episode(jnp.sum(penalty_BxT, axis=1), batch)
  return masked.real(batch.returns) - penalty_B


def _turn_rewards(batch: TrajectoryBatch) -> Array:
  return jnp.where(batch.turn_mask, masked.real(batch.turn_rewards), 0)


def turn_rewards(batch: TrajectoryBatch) -> Array:
  """The environment's rewards, 0 for turns that do not exist: [B, U]."""
  return _turn_rewards(batch)


def _affine_suffix(offset_NxB: Array, slope_NxB: Array) -> tuple[Array, Array]:
  """Composes x -> offset + slope x from the end: the maps from n on, [N, B]."""

  def step(later, now):
    offset_l, slope_l = later
    offset_n, slope_n = now
    maps = (offset_n + slope_n * offset_l, slope_n * slope_l)
    return maps, maps

  identity = (jnp.zeros_like(offset_NxB[0]), jnp.ones_like(slope_NxB[0]))
  _, maps = jax.lax.scan(step, identity, (offset_NxB, slope_NxB), reverse=True)
  return maps


@jax.jit
def suffix(offset_BxN: Array, slope_BxN: Array) -> tuple[Array, Array]:
  """x[n] = offset[n] + slope[n] x[n + 1] along axis 1, x = 0 at its end.

  Returns (x[n], x[n + 1]), each [B, N].
  """
  at_NxB, _ = _affine_suffix(offset_BxN.T, slope_BxN.T)
  return at_NxB.T, jnp.pad(at_NxB.T[:, 1:], ((0, 0), (0, 1)))


def carry_back(
    offset_BxT: Array, slope_BxT: Array, batch: TrajectoryBatch
) -> tuple[Array, Array]:
  """x = offset + slope x_next over the sampled tokens of each episode.

  Other tokens hand x on unchanged; what they hold in offset and slope is not
  read.  x is 0 after an episode's last token.

  Returns:
    (x at each token, x at the sampled token after it), each [B, T].
  """
  return _carry_back(
      offset_BxT, slope_BxT, sampled(batch), batch.turn, batch.episode
  )


@jax.jit
def _carry_back(
    offset_BxT: Array,
    slope_BxT: Array,
    mask_BxT: Array,
    turn_BxT: Array,
    episode_B: Array,
) -> tuple[Array, Array]:
  offset_BxT = jnp.where(mask_BxT, offset_BxT, 0)
  slope_BxT = jnp.where(mask_BxT, slope_BxT, 1)
  # Each row as one affine map, then the rows of an episode by their turns.
  at_TxB, through_TxB = _affine_suffix(offset_BxT.T, slope_BxT.T)
  none = jnp.iinfo(turn_BxT.dtype).max
  first_turn_B = jnp.min(jnp.where(mask_BxT, turn_BxT, none), axis=1)
  order_B = jnp.lexsort((first_turn_B, episode_B))
  sorted_B = episode_B[order_B]
  more_B = jnp.append(sorted_B[1:] == sorted_B[:-1], False)
  start_B, _ = _affine_suffix(
      at_TxB[0, order_B], jnp.where(more_B, through_TxB[0, order_B], 0)
  )
  entering_B = jnp.where(more_B, jnp.append(start_B[1:], 0), 0)
  entering_B = jnp.zeros_like(entering_B).at[order_B].set(entering_B)
  x_BxT = (at_TxB + through_TxB * entering_B[None]).T
  return x_BxT, jnp.append(x_BxT[:, 1:], entering_B[:, None], axis=1)


def representatives(batch: TrajectoryBatch) -> Array:
  """bool [B]: the row that stands for its episode in statistics."""
  return groups.representatives(batch.episode, batch.valid)


def newcomers(batch: TrajectoryBatch) -> Array:
  """bool [B]: representatives of the episodes that no earlier batch held."""
  counted_B = representatives(batch)
  return counted_B if batch.fresh is None else counted_B & batch.fresh
