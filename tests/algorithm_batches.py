"""Random rollout batches for the tests of the algorithms room.

Rows of one episode lie apart, groups interleave, some rows are padding or
failed, and everything that must not be read holds NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.algorithms import advantages
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.batch import Scores, TrajectoryBatch

ROWS, LENGTH, TURNS, COMPONENTS = 8, 10, 4, 2

OPTIONS = {
    name: AlgorithmOptions(
        advantage=name,
        normalize_std=name in ('grpo', 'gigpo', 'mt_grpo'),
        gamma=0.9,
        lam=0.8,
        high_gamma=0.7,
        step_coef=0.5,
        turn_coef=0.5,
        component_weights=(1.0, 0.5),
        aggregation='token-mean',
    )
    for name in advantages.ADVANTAGES
}


def random_batch(seed: int, markov: bool = False):
  """(TrajectoryBatch, Scores) in float64 numpy; markov: a row per turn."""
  rng = np.random.default_rng(seed)
  rows, length, turns = ROWS, LENGTH, TURNS
  mask = np.zeros((rows, length), bool)
  turn = np.zeros((rows, length), np.int32)
  episode = np.arange(rows, dtype=np.int32)
  first_turn = np.zeros(rows, int)
  if markov:
    episode = np.sort(rng.integers(0, 4, rows)).astype(np.int32)
    episode = np.unique(episode, return_inverse=True)[1].astype(np.int32)
    for e in range(episode.max() + 1):
      members = np.flatnonzero(episode == e)[:turns]
      episode[np.flatnonzero(episode == e)[turns:]] = rows - 1
      first_turn[members] = np.arange(len(members))
  for row in range(rows):
    place = rng.integers(0, 3)
    for k in range(1 if markov else rng.integers(1, turns + 1)):
      stop = min(place + rng.integers(1, 4), length)
      mask[row, place:stop] = True
      turn[row, place:] = first_turn[row] + k
      place = stop + rng.integers(0, 3)
  turn = np.minimum(turn, turns - 1)
  if markov:  # rows beyond the last turn are padding
    spare = episode == rows - 1
    mask[spare] = False
  valid = rng.random(rows) < 0.8
  for e in np.unique(episode):  # an episode fails as a whole
    valid[episode == e] = valid[np.flatnonzero(episode == e)[0]]
  if markov:
    valid[episode == rows - 1] = False
  per_episode = lambda draw: draw[episode]
  group = per_episode(rng.integers(0, 3, rows)).astype(np.int32)
  turn_mask = np.zeros((rows, turns), bool)
  for row in range(rows):
    for other in np.flatnonzero(episode == episode[row]):
      turn_mask[row, np.unique(turn[other][mask[other]])] = True
  turn_rewards = per_episode(rng.normal(size=(rows, turns)).round(1))
  turn_rewards = np.where(turn_mask, turn_rewards, np.nan)
  returns = per_episode(rng.choice([0.0, 0.5, 1.0], rows))
  anchor = per_episode(rng.integers(-1, 3, (rows, turns))).astype(np.int32)
  values = np.where(mask, rng.normal(size=mask.shape), np.nan)
  logprobs = lambda: np.where(mask, -rng.exponential(size=mask.shape), np.nan)
  bad = ~valid
  nan = lambda x: np.where(bad.reshape((-1,) + (1,) * (x.ndim - 1)), np.nan, x)
  permutation = rng.permutation(rows)
  batch = TrajectoryBatch(
      tokens=np.zeros((rows, length), np.int32),
      action_mask=mask,
      length=np.full(rows, length, np.int32),
      sampler_logprobs=nan(logprobs()),
      policy_version=np.zeros((rows, length), np.int32),
      turn=turn,
      episode=episode,
      group=group,
      valid=valid,
      weight=np.where(valid, 1.0, 0.0),
      components=nan(per_episode(rng.normal(size=(rows, COMPONENTS)).round(1))),
      returns=nan(returns),
      metric=nan(returns),
      turn_rewards=nan(turn_rewards),
      anchor=anchor,
      turn_mask=turn_mask,
      baseline=nan(per_episode(rng.normal(size=rows).round(1))),
  )
  scores = Scores(
      old_logprobs=nan(logprobs()),
      reference_logprobs=nan(logprobs()),
      values=nan(values),
  )
  return jax.tree.map(lambda x: x[permutation], (batch, scores))


def states():
  """A running baseline that has seen something."""
  state = advantages.initial_state(OPTIONS['reinforce'])
  state['baseline'] = {
      **state['baseline'],
      'batches': jnp.asarray(2.0),
      'mean_of_means': jnp.asarray(0.3),
      'samples': jnp.asarray(7.0),
  }
  return state


# Compiled once or twice and run on a few numbers: do not optimize.
QUICK = {'xla_backend_optimization_level': 0}


@functools.partial(jax.jit, compiler_options=QUICK)
def every_advantage(batch, scores):
  """{name: Advantages}: one program for all estimators."""
  state = states()
  return {
      name: advantages.estimate(batch, scores, state, options)
      for name, options in OPTIONS.items()
  }
