"""What is carried from batch to batch counts a replayed episode once."""

import jax
import numpy as np
import pytest

from agent_rl_jax.algorithms import advantages
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.batch import Scores
from tests.train_cases import trajectory

OPTIONS = AlgorithmOptions(advantage='reinforce', baseline='all', kl_coef=0.0)


def _batch(fresh):
  """Four episodes; the last two are stale where `fresh` says so."""
  batch = trajectory(rows=4, padding=0)
  mask = np.zeros_like(batch.action_mask)
  mask[:, 2:4] = True
  return batch.replace(
      action_mask=mask,
      returns=np.array([1.0, 0.0, 1.0, 1.0], np.float32),
      fresh=fresh,
  )


def _scores(batch, gap_B):
  """Old log-probs that lie `gap` above the reference's."""
  shape = batch.action_mask.shape
  old_BxT = np.full(shape, -1.0, np.float32)
  return Scores(old_BxT, old_BxT - np.array(gap_B, np.float32)[:, None])


STALE = np.array([True, True, False, False])


@pytest.mark.parametrize(
    'fresh, samples, mean', [(None, 4, 0.75), (STALE, 2, 0.5)]
)
def test_a_running_baseline_counts_fresh_episodes(fresh, samples, mean):
  batch = _batch(fresh)
  result = jax.jit(advantages.estimate, static_argnums=3)(
      batch, _scores(batch, [0, 0, 0, 0]), advantages.initial_state(OPTIONS),
      OPTIONS,
  )  # fmt: skip
  baseline = result.state['baseline']
  assert baseline['samples'] == samples and baseline['mean'] == mean
  # Stale ones are trained on all the same; the baseline was still 0.
  np.testing.assert_array_equal(result.advantages[:, 2], [1, 0, 1, 1])


def test_nothing_fresh_leaves_the_baseline_as_it_was():
  batch = _batch(STALE)
  state = advantages.initial_state(OPTIONS)
  scores = _scores(batch, [0, 0, 0, 0])
  state = advantages.estimate(batch, scores, state, OPTIONS).state
  old = batch.replace(fresh=np.zeros(4, bool))
  again = advantages.estimate(old, scores, state, OPTIONS)
  jax.tree.map(np.testing.assert_array_equal, again.state, state)
  # R minus the baseline of 0.5 that the first batch left.
  np.testing.assert_array_equal(again.advantages[:, 2], [0.5, -0.5, 0.5, 0.5])


def test_the_adaptive_kl_sees_fresh_episodes_and_counts_them():
  options = AlgorithmOptions(
      advantage='grpo',
      kl='k3',
      kl_coef=1.0,
      kl_adaptive=True,
      kl_target=0.1,
      kl_horizon=100.0,
  )
  state = advantages.initial_state(options)
  coef = lambda fresh: float(
      advantages.estimate(
          _batch(fresh), _scores(_batch(fresh), [0, 0, 2, 2]), state, options
      ).state['kl_coef']
  )
  # Stale rows have all of the KL: with them the coefficient must rise.
  assert coef(None) == pytest.approx(1 + 0.2 * 4 / 100)
  assert coef(STALE) == pytest.approx(1 - 0.2 * 2 / 100)
  assert coef(np.zeros(4, bool)) == 1
