"""REINFORCE and its kin: returns to go and baselines from outside the group.

Leaves out critics (`gae`) and group baselines (`group`).  Invariant: a running
baseline comes from earlier batches alone, since one that holds the present
batch correlates with the samples it is subtracted from; each episode counts in
it once, in the first batch that holds it (`TrajectoryBatch.fresh`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import groups, masked, returns
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch

Array = jax.Array


def initial_baseline(options: AdvantageOptions) -> dict[str, Array]:
  """State of the running baseline before any batch; float32 scalars."""
  zero = jnp.zeros((), jnp.float32)
  return {
      'batches': zero,
      'mean_of_means': zero,
      'samples': zero,
      'mean': zero,
      'squares': zero,
      'average': zero,
      'window': jnp.zeros((options.baseline_window,), jnp.float32),
  }


@functools.partial(jax.jit, static_argnames='options')
def updated_baseline(
    state: dict[str, Array],
    values_B: Array,
    counted_B: Array,
    options: AdvantageOptions,
) -> dict[str, Array]:
  """State after a batch; one without samples changes nothing.

  `mean` and `squares` (sum of squared deviations) merge as in Chan et al.
  1983; `window` holds the last batch means, newest first.
  """
  batches, samples = state['batches'], state['samples']
  count = jnp.sum(counted_B).astype(values_B.dtype)
  mean = masked.masked_mean(values_B, counted_B)
  squares = masked.masked_sum((values_B - mean) ** 2, counted_B)
  total = jnp.maximum(samples + count, 1)
  delta = mean - state['mean']
  decay = options.baseline_decay
  new = {
      'batches': batches + 1,
      'mean_of_means': state['mean_of_means']
      + (mean - state['mean_of_means']) / (batches + 1),
      'samples': samples + count,
      'mean': state['mean'] + delta * count / total,
      'squares': state['squares']
      + squares
      + delta**2 * samples * count / total,
      'average': jnp.where(
          batches == 0, mean, decay * state['average'] + (1 - decay) * mean
      ),
      'window': jnp.append(mean[None], state['window'][:-1]),
  }
  return jax.tree.map(
      lambda x, y: jnp.where(count > 0, x, y).astype(y.dtype), new, state
  )


def running_std(state: dict[str, Array]) -> Array:
  """Unbiased standard deviation of all past samples."""
  return jnp.sqrt(state['squares'] / jnp.maximum(state['samples'] - 1, 1))


def _baseline(state: dict[str, Array], options: AdvantageOptions) -> Array:
  if options.baseline == 'window':
    held = jnp.minimum(state['batches'], options.baseline_window)
    return jnp.sum(state['window']) / jnp.maximum(held, 1)
  return state[
      {
          'batch_mean': 'mean_of_means',
          'all': 'mean',
          'exponential': 'average',
      }[options.baseline]
  ]


def reinforce(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """R minus a running baseline of earlier batches (Williams 1992).

  `baseline` names it: 'batch_mean' (mean of past batch means), 'all' (of all
  past samples), 'exponential' (average with `baseline_decay`), 'window' (mean
  of the last `baseline_window` batch means).  With `normalize_std` divided by
  the running standard deviation too, once two samples have passed.

  Replay leaves one dependence: a replayed sample's own reward is part of the
  baseline that is subtracted from it, since an earlier batch held it.  Its
  share is one in all samples of the baseline, so that it matters only to a
  short 'window' or a small `baseline_decay`.

  Raises:
    ValueError: The state is missing (`advantages.initial_state`).
  """
  if state is None or 'baseline' not in state:
    raise ValueError(
        'reinforce keeps a running baseline: pass the state of '
        'advantages.initial_state, then the one it returns'
    )
  score_B = returns.episode_scores(batch, scores, state, options)
  past = state['baseline']
  values_B = score_B - _baseline(past, options)
  if options.normalize_std:
    values_B = jnp.where(
        past['samples'] > 1,
        values_B / (running_std(past) + options.epsilon),
        values_B,
    )
  new = updated_baseline(past, score_B, returns.newcomers(batch), options)
  return Advantages(
      groups.broadcast(values_B, returns.sampled(batch)),
      state={**state, 'baseline': new},
  )


def _to_go(batch, scores, state, options, gamma: float) -> Array:
  rewards_BxT = returns.token_rewards(batch, scores, state, options)
  slope_BxT = jnp.full_like(rewards_BxT, gamma)
  to_go_BxT, _ = returns.carry_back(rewards_BxT, slope_BxT, batch)
  return jnp.where(returns.sampled(batch), to_go_BxT, 0)


def reward_to_go(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """G_t = r_t + gamma G_next over sampled tokens, without a baseline."""
  return Advantages(
      _to_go(batch, scores, state, options, options.gamma), state=state
  )


def reinforce_plus_plus(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """Rewards to go, whitened over the batch's tokens .

  REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).  Returns are carried across tool results, which neither discount nor stop
  them.
  """
  to_go_BxT = _to_go(batch, scores, state, options, options.gamma)
  return Advantages(
      masked.whiten(to_go_BxT, returns.sampled(batch)), state=state
  )


def remax(
    batch: TrajectoryBatch,
    scores: Scores,
    state: dict | None,
    options: AdvantageOptions,
) -> Advantages:
  """Undiscounted rewards to go minus a greedy episode's return.

  ReMax (Li et al. 2023, arXiv 2310.10505); the greedy return is `batch.baseline`.

  Raises:
    ValueError: The batch has no baseline.
  """
  if batch.baseline is None:
    raise ValueError(
        'remax needs TrajectoryBatch.baseline: roll every task out once '
        'greedily and give its return to the rows of the group'
    )
  to_go_BxT = _to_go(batch, scores, state, options, 1.0)
  baseline_BxT = groups.broadcast(
      masked.real(batch.baseline), returns.sampled(batch)
  )
  return Advantages(to_go_BxT - baseline_BxT, state=state)
