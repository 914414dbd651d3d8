"""Group filters and overlong shaping against the references' numbers."""

import algorithm_cases as cases
import numpy as np
import pytest

from agent_rl_jax.algorithms import filters
from agent_rl_jax.algorithms.filters import FILTERS, FilterOptions

MEASURES = {'reward_variance': 'std', 'reward': 'mean', 'reward_sum': 'sum'}
STRATEGIES = {
    'top_k': 'top_share',
    'top_k_abs': 'top_count',
    'min_p': 'min_p',
    'top_p': 'top_p',
}


def rows_of(groups, size):
  return [int(g) * size + i for g in groups for i in range(size)]


@pytest.mark.parametrize('name', cases.claim('ragen2/rollout_filter/*'))
def test_ragen2_filters(name):
  params = cases.CASES[name]['params']
  expected = cases.CASES[name]['outputs']
  scores = cases.number(cases.resolve(name, 'scores'))
  strategy = STRATEGIES[params['strategy']]
  if params['strategy'] == 'top_p' and params['top_p_prob_mode'] == 'softmax':
    strategy = 'top_p_softmax'
  options = FilterOptions(
      name=strategy,
      value=params['value'],
      measure=MEASURES[params['metric']],
      smallest=params['filter_type'] == 'smallest',
      zeros=params['include_zero'],
  )
  cases.assert_close(
      filters.group_scores(scores, options.measure),
      expected['group_scores'],
      name,
  )
  chosen = FILTERS[strategy](scores, scores, options)
  # Sorted, since equal scores come in no order of their own.
  np.testing.assert_array_equal(
      np.sort(chosen), np.sort(expected['selected_groups_in_order'])
  )
  kept = filters.kept_groups(scores, scores, options)
  size = cases.resolve(name, 'group_size')
  assert rows_of(kept, size) == expected['kept_rows']


@pytest.mark.parametrize('name', cases.claim('ragen/rollout_filter/*'))
def test_ragen_filter(name):
  params = cases.CASES[name]['params']
  scores = cases.number(cases.resolve(name, 'scores'))
  options = FilterOptions(
      name='top_share',
      value=params['rollout_filter_ratio'],
      smallest=params['rollout_filter_type'] == 'std_rev',
  )
  kept = filters.kept_groups(scores, scores, options)
  expected = cases.CASES[name]['outputs']
  assert rows_of(kept, scores.shape[1]) == expected['kept_rows']


@pytest.mark.parametrize(
    'name', cases.claim('verl_agent/dynamic_sampling_filter')
)
def test_dynamic_sampling_has_a_tolerance(name):
  """The reference keeps a group for a difference of 1e-7; here it is equal."""
  size = cases.resolve(name, 'group_size')
  metric = cases.number(cases.resolve(name, 'episode_rewards')).reshape(
      -1, size
  )
  options = FilterOptions(name='dynamic_sampling')
  kept = rows_of(filters.kept_groups(metric, metric, options), size)
  expected = cases.CASES[name]['outputs']['kept_rows']
  assert kept == [row for row in expected if row < 9]
  metric[3, 2] += 1e-3
  kept = rows_of(filters.kept_groups(metric, metric, options), size)
  assert kept == expected


@pytest.mark.parametrize(
    'name', cases.claim('verl/dapo_overlong/*', 'openrlhf/dapo_overlong')
)
def test_overlong_penalty(name):
  params = cases.CASES[name]['params']
  limit = params.get('max_resp_len', params.get('max_new_tokens'))
  lengths = np.array(cases.resolve(name, 'response_length'))
  penalty = filters.overlong_penalty(
      lengths,
      limit,
      params['buffer_len'],
      params.get('penalty_factor', params.get('factor')),
  )
  actual = penalty + cases.resolve(name, 'base_score')
  expected = cases.number(cases.CASES[name]['outputs']['reward'])
  # verl has no floor beyond the limit; the paper, and this, have.
  within = lengths <= limit if name.startswith('verl') else lengths > 0
  np.testing.assert_allclose(actual[within], expected[within], atol=1e-6)
  assert (penalty[lengths > limit] == penalty[lengths == limit]).all()
