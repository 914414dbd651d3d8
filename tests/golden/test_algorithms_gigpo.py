"""GiGPO against the reference: one row per step of an episode."""

import algorithm_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import (
    anchors,
    gigpo,
    groups,
)
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Scores

pytestmark = pytest.mark.usefixtures('double')


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
  options = AdvantageOptions(gamma=cases.CASES[name]['params']['gamma'])
  actual = gigpo.step_returns(batch, Scores(batch.returns), None, options)
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
      similarity=params.get('similarity_thresh') or 0.0,
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
  scores = Scores(batch.returns)
  values = np.array(gigpo.step_advantages(batch, scores, None, options))
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
