"""Advantage estimators against the references' numbers, in both precisions."""

import algorithm_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import (
    advantages,
    anchors,
    baselines,
    gigpo,
    groups,
    kl,
    returns,
    turns,
)
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Scores


@pytest.fixture(autouse=True)
def double():
  with jax.enable_x64(True):
    yield


PRECISIONS = pytest.mark.parametrize(
    'dtype', [jnp.float64, jnp.float32], ids=['f64', 'f32']
)


def batch_of(name, dtype=jnp.float64, **extra):
  inputs = cases.CASES[name]['inputs']
  key = 'rewards' if 'rewards' in inputs else 'token_level_rewards'
  if key in inputs:
    extra['rewards'] = cases.resolve(name, key)
  else:
    extra['returns'] = cases.resolve(name, 'outcome')
  return cases.trajectories(
      cases.field(name, 'response_mask'),
      group=cases.field(name, 'uid'),
      dtype=dtype,
      **extra,
  )


def estimate(name, options, dtype=jnp.float64, state=None, **extra):
  batch = batch_of(name, dtype, **extra)
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
      batch_of(name), cases.scores_of(name), None, options
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


# GiGPO: one row per step of an episode.


def steps(uid, trajectory, anchor_ids, mask, step_rewards, episode_returns):
  """Rows that are the steps of their episodes, in order."""
  trajectory = cases.dense(trajectory)
  rows = len(trajectory)
  step = np.array(
      [(trajectory[:row] == trajectory[row]).sum() for row in range(rows)]
  )
  turns = step.max() + 1
  turn_rewards = np.zeros((rows, turns))
  turn_mask = np.zeros((rows, turns), bool)
  anchor = np.full((rows, turns), -1, np.int32)
  for row in range(rows):
    for other in np.flatnonzero(trajectory == trajectory[row]):
      turn_rewards[row, step[other]] = step_rewards[other]
      turn_mask[row, step[other]] = True
      anchor[row, step[other]] = anchor_ids[other]
  batch = cases.trajectories(mask, returns=episode_returns, group=uid)
  return (
      batch.replace(
          turn=jnp.asarray(
              np.broadcast_to(step[:, None], np.shape(mask)).astype(np.int32)
          ),
          episode=jnp.asarray(trajectory),
          turn_rewards=jnp.asarray(turn_rewards),
          turn_mask=jnp.asarray(turn_mask),
          anchor=jnp.asarray(anchor),
      ),
      step,
  )


def gigpo_batch():
  inputs = cases.INPUTS['batch_gigpo']
  ids = anchors.group_anchors(inputs['anchor_obs'], cases.dense(inputs['uid']))
  return steps(
      inputs['uid'],
      inputs['traj_uid'],
      ids,
      inputs['response_mask'],
      inputs['step_reward_raw'],
      [inputs['episode_return'][key] for key in inputs['traj_uid']],
  )


@pytest.mark.parametrize(
    'name', cases.claim('verl_agent/step_discounted_returns/*')
)
def test_step_returns(name):
  batch, step = gigpo_batch()
  actual = gigpo.step_returns(batch, cases.CASES[name]['params']['gamma'])
  cases.assert_close(
      np.array(actual)[np.arange(len(step)), step],
      cases.CASES[name]['outputs']['step_returns'],
      name,
  )


@pytest.mark.parametrize('name', cases.claim('verl_agent/build_step_group/*'))
def test_anchor_groups(name):
  params = cases.CASES[name]['params']
  actual = anchors.group_anchors(
      cases.resolve(name, 'anchor_obs'),
      cases.dense(cases.resolve(name, 'index')),
      similarity=params.get('similarity_thresh'),
  )
  expected = cases.CASES[name]['outputs']['group_id']
  np.testing.assert_array_equal(cases.dense(actual), expected)


MODES = {'mean_norm': False, 'mean_std_norm': True}


@pytest.mark.parametrize('name', cases.claim('verl_agent/step_norm_reward/*'))
def test_step_advantages(name):
  batch, step = gigpo_batch()
  options = AdvantageOptions(
      normalize_std=MODES[cases.CASES[name]['params']['mode']], gamma=0.95
  )
  values = np.array(gigpo.step_advantages(batch, options))
  actual = values[np.arange(len(step)), step][:, None] * batch.action_mask
  cases.assert_close(actual, cases.CASES[name]['outputs']['advantages'], name)


@pytest.mark.parametrize(
    'name',
    cases.claim('verl_agent/episode_norm_reward/*', 'verl_agent/grpo/*'),
)
def test_episode_advantages(name):
  params = cases.CASES[name]['params']
  batch, _ = gigpo_batch()
  options = AdvantageOptions(
      advantage='gigpo',
      step_coef=0.0,
      normalize_std=params.get(
          'norm_adv_by_std_in_grpo', MODES.get(params.get('mode'))
      ),
      pooled=params['compute_mean_std_cross_steps'],
  )
  result = gigpo.gigpo(batch, Scores(batch.returns), None, options)
  expected = cases.CASES[name]['outputs']['advantages']
  cases.assert_close(result.advantages, expected, name)


@pytest.mark.parametrize('name', cases.claim('verl_agent/gigpo/*'))
def test_gigpo(name):
  params = cases.CASES[name]['params']
  batch, _ = gigpo_batch()
  options = AdvantageOptions(
      advantage='gigpo',
      gamma=params['gamma'],
      step_coef=params['step_advantage_w'],
      normalize_std=MODES[params['mode']],
      pooled=True,
  )
  result = gigpo.gigpo(batch, Scores(batch.returns), None, options)
  expected = cases.CASES[name]['outputs']['advantages']
  cases.assert_close(result.advantages, expected, name)


@pytest.mark.parametrize('name', cases.claim('verl_agent/edge/*'))
def test_gigpo_edges(name):
  params = cases.CASES[name]['params']
  read = lambda key: cases.resolve(name, key)
  uid = read('uid')
  ids = anchors.group_anchors(read('anchor_obs'), cases.dense(uid))
  batch, step = steps(
      uid,
      read('traj_uid'),
      ids,
      read('response_mask'),
      np.zeros(len(uid)),
      cases.number(read('token_level_rewards')).sum(axis=1),
  )
  options = AdvantageOptions(
      advantage='gigpo',
      step_coef=0.0,
      normalize_std=MODES[params['mode']],
      pooled=params['compute_mean_std_cross_steps'],
  )
  result = gigpo.gigpo(batch, Scores(batch.returns), None, options)
  actual = np.array(result.advantages)
  expected = cases.number(cases.CASES[name]['outputs']['episode_advantages'])
  alone = np.array(uid) == 's'
  np.testing.assert_allclose(actual[~alone], expected[~alone], atol=1e-6)
  # A lone trajectory keeps its score there unless pooled; here it is 0.
  assert not actual[alone].any()
  values = groups.normalized(
      jnp.asarray(cases.number(read('step_returns'))),
      jnp.asarray(ids),
      jnp.ones(len(uid), bool),
      options.normalize_std,
      options.epsilon,
  )
  np.testing.assert_allclose(
      values,
      cases.number(cases.CASES[name]['outputs']['step_advantages'])[:, 0],
      atol=1e-6,
  )
