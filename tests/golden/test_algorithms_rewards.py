"""Token rewards, KL in them and running baselines against the references."""

import algorithm_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import (
    advantages,
    baselines,
    kl,
    returns,
)
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Scores

pytestmark = pytest.mark.usefixtures('double')


@pytest.mark.parametrize('name', cases.claim('verl/kl_in_reward/*'))
def test_kl_in_reward(name):
  params = cases.CASES[name]['params']
  expected = cases.CASES[name]['outputs']
  adaptive = params['controller'] == 'adaptive'
  options = AdvantageOptions(
      advantage='reinforce_plus_plus',
      kl=params['kl_penalty'],
      kl_coef=params['kl_coef'],
      kl_placement='reward',
      kl_adaptive=adaptive,
      kl_target=params.get('target_kl', 0.1),
      kl_horizon=params.get('horizon', 10000),
  )
  batch = cases.trajectories(
      cases.field(name, 'response_mask'),
      rewards=cases.resolve(name, 'token_level_scores'),
  )
  scores = cases.scores_of(name)
  state = advantages.initial_state(options)
  cases.assert_close(
      returns.token_rewards(batch, scores, state, options),
      expected['token_level_rewards'],
      name,
      where=np.array(batch.action_mask),
  )
  cases.assert_close(
      advantages.reference_kl(batch, scores, options), expected['mean_kl'], name
  )
  state = advantages.estimate(batch, scores, state, options).state
  coef = state['kl_coef'] if adaptive else options.kl_coef
  np.testing.assert_allclose(coef, expected['kl_coef_after'], rtol=1e-6)


@pytest.mark.parametrize('name', cases.claim('openrlhf/compute_reward'))
def test_reward_placement(name):
  options = AdvantageOptions(
      kl='k1', kl_coef=cases.CASES[name]['params']['kl_coef'],
      kl_placement='reward',
  )  # fmt: skip
  rewards = returns.token_rewards(
      cases.batch_of(name), cases.scores_of(name), None, options
  )
  cases.assert_close(
      rewards, cases.CASES[name]['outputs']['token_rewards'], name
  )


@pytest.mark.parametrize('name', cases.claim('verl/adaptive_kl_controller'))
def test_adaptive_kl(name):
  params = cases.CASES[name]['params']
  coef = params['init']
  for measured, expected in zip(
      cases.resolve(name, 'current_kl'),
      cases.CASES[name]['outputs']['value_after_each'],
      strict=True,
  ):
    coef = kl.adapted_coef(
        coef, measured, params['target'], params['horizon'], params['n_steps']
    )
    cases.assert_close(coef, expected, name)


BASELINES = {
    'mean_of_batch_means': 'batch_mean',
    'mean_of_all_samples': 'all',
    'ema0.9': 'exponential',
    'window2': 'window',
}


@pytest.mark.parametrize('baseline', BASELINES)
@pytest.mark.parametrize(
    'name', cases.claim('formula/reinforce_running_baseline')
)
def test_running_baseline(name, baseline):
  options = AdvantageOptions(
      advantage='reinforce',
      baseline=BASELINES[baseline],
      baseline_decay=cases.CASES[name]['params']['ema_decay'],
      baseline_window=cases.CASES[name]['params']['window'],
  )
  state = advantages.initial_state(options)
  for rewards, expected in zip(
      cases.resolve(name, 'batches'),
      cases.CASES[name]['outputs']['per_batch'],
      strict=True,
  ):
    mask = np.ones((len(rewards), 2))
    batch = cases.trajectories(mask, returns=rewards)
    result = advantages.estimate(batch, Scores(jnp.zeros(2)), state, options)
    state = result.state
    np.testing.assert_allclose(
        result.advantages[:, 0], expected[f'adv_{baseline}'], atol=1e-6
    )


@pytest.mark.parametrize('name', cases.claim('roll/running_moments'))
def test_running_moments(name):
  options = AdvantageOptions(advantage='reinforce')
  state = baselines.initial_baseline(options)
  for values, expected in zip(
      cases.resolve(name, 'batches'),
      cases.CASES[name]['outputs']['after_each'],
      strict=True,
  ):
    values = jnp.asarray(cases.number(values))
    counted = jnp.ones(values.shape, bool)
    state = baselines.updated_baseline(state, values, counted, options)
    cases.assert_close(state['mean'], expected['running_mean'], name)
    cases.assert_close(
        baselines.running_std(state), expected['running_std'], name
    )
    assert state['samples'] == expected['count']
