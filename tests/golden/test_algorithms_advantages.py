"""Advantage estimators against the references' numbers, in both precisions."""

import algorithm_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import (
    advantages,
    turns,
)
from agent_rl_jax.algorithms.options import AdvantageOptions

pytestmark = pytest.mark.usefixtures('double')


PRECISIONS = pytest.mark.parametrize(
    'dtype', [jnp.float64, jnp.float32], ids=['f64', 'f32']
)


def estimate(name, options, dtype=jnp.float64, state=None, **extra):
  batch = cases.batch_of(name, dtype, **extra)
  scores = cases.scores_of(name, dtype)
  result = advantages.estimate(batch, scores, state, options)
  assert result.advantages.dtype == dtype
  off = ~np.array(batch.action_mask)
  assert not np.array(result.advantages)[off].any()
  return result, np.array(batch.action_mask)


# name -> (estimator, options); rewards are on turn ends in each.
PLAIN = {
    'verl/grpo/norm_std=True': ('grpo', {'normalize_std': True}),
    'verl/grpo/dense_rewards/norm_std=True': ('grpo', {'normalize_std': True}),
    'verl/grpo/dense_rewards/norm_std=False': ('grpo', {}),
    'verl/grpo_vectorized': ('grpo', {'normalize_std': True}),
    'verl/rloo': ('rloo', {}),
    'verl/rloo_vectorized': ('rloo', {}),
    'verl/opo': ('opo', {}),
    'verl/gpg': ('gpg', {}),
    'verl/reinforce_plus_plus_baseline': ('reinforce_plus_plus_baseline', {}),
    'verl/reinforce_plus_plus/outcome/gamma=1.0': ('reinforce_plus_plus', {}),
    'verl/reinforce_plus_plus/dense/gamma=1.0': ('reinforce_plus_plus', {}),
    'verl/reinforce_plus_plus/dense/gamma=0.95': (
        'reinforce_plus_plus',
        {'gamma': 0.95},
    ),
    'verl/gae/dense/gamma=1.0/lam=1.0': ('gae', {}),
    'verl/gae/outcome/gamma=0.99/lam=0.95': (
        'gae',
        {'gamma': 0.99, 'lam': 0.95},
    ),
    'verl/gae/dense/gamma=0.99/lam=0.95': ('gae', {'gamma': 0.99, 'lam': 0.95}),
    'verl/edge/gae': ('gae', {'gamma': 1.0, 'lam': 0.95}),
    'verl/edge/rloo_vectorized': ('rloo', {}),
    'verl/edge/reinforce_plus_plus': ('reinforce_plus_plus', {}),
    'verl/edge/reinforce_plus_plus_baseline': (
        'reinforce_plus_plus_baseline',
        {},
    ),
    'tunix/gae/dense/gamma=0.99/lam=0.95': (
        'gae',
        {'gamma': 0.99, 'lam': 0.95},
    ),
    'ragen/bi_level_gae/dense/gamma=1.0/lam=1.0/high=0.95': (
        'bi_level_gae',
        {},
    ),
    'ragen/bi_level_gae/dense/gamma=0.99/lam=0.95/high=0.9': (
        'bi_level_gae',
        {'gamma': 0.99, 'lam': 0.95, 'high_gamma': 0.9},
    ),
    **{
        f'formula/bi_level_gae_mask_turns/{key}': (
            'bi_level_gae',
            {'gamma': 0.99, 'lam': 0.95, 'high_gamma': 0.9},
        )
        for key in ('dense', 'zero_reward_middle_turn', 'outcome_only')
    },
}


# Another shape in another precision would only be compiled once more.
RUNS = [
    (name, dtype)
    for name in cases.claim(*PLAIN)
    for dtype in (jnp.float64, jnp.float32)
    if dtype == jnp.float64 or 'edge' not in name
]


@pytest.mark.parametrize('name, dtype', RUNS)
def test_estimator(name, dtype):
  advantage, options = PLAIN[name]
  options = AdvantageOptions(advantage=advantage, **options)
  result, mask = estimate(name, options, dtype)
  expected = cases.CASES[name]['outputs']
  cases.assert_close(
      result.advantages, expected['advantages'], name, dtype, where=mask
  )
  if result.value_targets is not None:
    cases.assert_close(
        result.value_targets, expected['returns'], name, dtype, where=mask
    )
  if 'advantages_unwhitened' in expected:
    plain = AdvantageOptions(
        **{**vars_of(options), 'whiten': False},
    )
    result, _ = estimate(name, plain, dtype)
    cases.assert_close(
        result.advantages,
        expected['advantages_unwhitened'],
        name,
        dtype,
        where=mask,
    )


def vars_of(options):
  return {key: getattr(options, key) for key in options.__dataclass_fields__}


# Estimators that keep the raw reward of a group of one in the reference; here
# it is 0, since without a second sample there is no baseline.
SINGLETONS = {
    'verl/edge/grpo/norm_std=True': ('grpo', {'normalize_std': True}),
    'verl/edge/grpo/norm_std=False': ('grpo', {}),
    'verl/edge/grpo_vectorized': ('grpo', {'normalize_std': True}),
    'verl/edge/rloo': ('rloo', {}),
    'verl/edge/opo': ('opo', {}),
}


@pytest.mark.parametrize('name', cases.claim(*SINGLETONS))
def test_group_of_one_differs(name):
  advantage, options = SINGLETONS[name]
  options = AdvantageOptions(advantage=advantage, **options)
  result, mask = estimate(name, options)
  uid = np.array(cases.field(name, 'uid'))
  alone, equal = uid == 's', uid == 'z'
  expected = cases.CASES[name]['outputs']['advantages']
  np.testing.assert_allclose(
      np.array(result.advantages)[mask & ~alone[:, None]],
      cases.number(expected)[mask & ~alone[:, None]],
      rtol=2e-7 if 'vectorized' not in name else 2e-5,
      atol=1e-7,
  )
  assert not np.array(result.advantages)[alone].any()
  # Not rounding noise over epsilon: exactly 0.
  assert not np.array(result.advantages)[equal].any()


@PRECISIONS
@pytest.mark.parametrize('name', cases.claim('verl/remax/*'))
def test_remax(name, dtype):
  options = AdvantageOptions(advantage='remax')
  result, mask = estimate(
      name, options, dtype, baseline=cases.resolve(name, 'reward_baselines')
  )
  cases.assert_close(
      result.advantages,
      cases.CASES[name]['outputs']['advantages'],
      name,
      dtype,
      where=mask,
  )


@PRECISIONS
@pytest.mark.parametrize('name', cases.claim('verl/gdpo'))
def test_gdpo(name, dtype):
  components = np.stack(
      [cases.resolve(name, 'rewards_acc'), cases.resolve(name, 'rewards_fmt')],
      axis=1,
  )
  options = AdvantageOptions(
      advantage='gdpo',
      component_weights=cases.CASES[name]['params']['weights'],
  )
  batch = cases.trajectories(
      cases.field(name, 'response_mask'),
      returns=components.sum(axis=1),
      components=components,
      group=cases.field(name, 'uid'),
      dtype=dtype,
  )
  result = advantages.estimate(
      batch, cases.scores_of(name, dtype), None, options
  )
  cases.assert_close(
      result.advantages,
      cases.CASES[name]['outputs']['advantages'],
      name,
      dtype,
      where=np.array(batch.action_mask),
  )


@pytest.mark.parametrize('name', cases.claim('tunix/group_advantages'))
def test_tunix_groups(name):
  options = {
      'grpo': {'advantage': 'grpo', 'normalize_std': True},
      'rloo': {'advantage': 'rloo'},
      'drgrpo': {'advantage': 'dr_grpo'},
  }
  for key, expected in cases.CASES[name]['outputs'].items():
    result, mask = estimate(name, AdvantageOptions(**options[key]))
    first = mask.argmax(axis=1)[:, None]
    actual = np.take_along_axis(np.array(result.advantages), first, axis=1)
    cases.assert_close(actual[:, 0], expected, name)


@pytest.mark.parametrize('name', cases.claim('openrlhf/estimators'))
def test_openrlhf_estimators(name):
  expected = cases.CASES[name]['outputs']
  result, mask = estimate(name, AdvantageOptions(advantage='rloo'))
  cases.assert_close(result.advantages, expected['rloo'], name, where=mask)
  options = AdvantageOptions(normalize_std=True, epsilon=1e-9)
  result, _ = estimate(name, options)
  cases.assert_close(
      result.advantages, expected['group_norm'], name, where=mask
  )
  # It whitens with the biased variance; here the variance is unbiased.
  bias = np.sqrt(mask.sum() / (mask.sum() - 1))
  result, _ = estimate(
      name, AdvantageOptions(advantage='reinforce_plus_plus_baseline')
  )
  np.testing.assert_allclose(
      np.array(result.advantages)[mask] * bias,
      cases.number(expected['reinforce_baseline'])[mask],
      rtol=1e-6,
  )
  result, _ = estimate(
      name,
      AdvantageOptions(
          advantage='reinforce_plus_plus',
          kl='k1',
          kl_coef=0.01,
          kl_placement='reward',
      ),
  )
  np.testing.assert_allclose(
      np.array(result.advantages)[mask] * bias,
      cases.number(expected['reinforce_kl0.01'])[mask],
      rtol=1e-6,
      atol=1e-8,
  )


@pytest.mark.parametrize(
    'name', cases.claim('openrlhf/cumulative_returns/dense/gamma=1.0')
)
def test_openrlhf_returns(name):
  """Equal without a discount; with one it discounts once per tool token."""
  options = AdvantageOptions(advantage='reward_to_go')
  result, mask = estimate(name, options)
  cases.assert_close(
      result.advantages,
      cases.CASES[name]['outputs']['returns'],
      name,
      where=mask,
  )


@pytest.mark.parametrize(
    'name', cases.claim('ragen/bi_level_gae/zero_reward_middle_turn')
)
def test_zero_reward_turn_stays_a_turn(name):
  """The reference merges such a turn into the next; rows without one agree."""
  options = AdvantageOptions(advantage='bi_level_gae', whiten=False)
  result, mask = estimate(name, options)
  expected = cases.number(cases.CASES[name]['outputs']['returns'])
  merged = np.isin(np.arange(len(mask)), [4, 6])
  same = mask & ~merged[:, None]
  np.testing.assert_allclose(
      np.array(result.value_targets)[same], expected[same], atol=2e-6
  )
  for row in (4, 6):
    gap = np.array(result.value_targets)[row] - expected[row]
    assert np.abs(gap[mask[row]]).max() > 1e-3


@PRECISIONS
@pytest.mark.parametrize('name', cases.claim('formula/turn_level_gae/*'))
def test_turn_gae(name, dtype):
  params = cases.CASES[name]['params']
  options = AdvantageOptions(
      advantage='turn_gae',
      gamma=params['gamma'],
      lam=params['lam'],
      whiten=False,
  )
  result, _ = estimate(name, options, dtype)
  cases.assert_close(
      result.advantages,
      cases.CASES[name]['outputs']['advantages_unwhitened'],
      name,
      dtype,
  )
  # One trained value per turn.
  ends = cases.resolve(name, 'turn_end_index')
  assert [len(row) for row in ends] == result.value_mask.sum(axis=1).tolist()


@PRECISIONS
@pytest.mark.parametrize('name', cases.claim('roll/turn_level_return/*'))
def test_turn_return(name, dtype):
  options = AdvantageOptions(
      advantage='turn_return', gamma=cases.CASES[name]['params']['gamma']
  )
  result, _ = estimate(name, options, dtype)
  cases.assert_close(
      result.advantages, cases.CASES[name]['outputs']['returns'], name, dtype
  )


@pytest.mark.parametrize('name', cases.claim('mt_grpo/assign_advantages'))
def test_mt_grpo_assignment(name):
  rows = cases.resolve(name, 'mask_rows_of_batch_a')
  mask = cases.number(cases.INPUTS['batch_a']['response_mask'])[rows] > 0
  turn = cases.turns_of(mask)
  read = lambda key: jnp.asarray(cases.number(cases.resolve(name, key)))
  actual = turns.assigned(
      read('turn_advantage'),
      read('outcome_advantage'),
      read('combined_advantage'),
      jnp.asarray(cases.resolve(name, 'result_segment')) >= 0,
      jnp.asarray(turn) == 0,
      cases.CASES[name]['params']['turn_advantage_coef'],
  )
  expected = cases.CASES[name]['outputs']['advantages']
  cases.assert_close(actual, expected, name, where=mask)
