"""Filters, worked by hand: groups that failed, and scores of either sign."""

import numpy as np
import pytest

from agent_rl_jax.algorithms import filters
from agent_rl_jax.algorithms.filters import FilterOptions

NAN = np.nan
REWARDS = np.array(
    [[-1.0, -1.0], [NAN, NAN], [-0.5, -0.6], [-2.0, -3.0], [-1.5, NAN]]
)


def _kept(rewards=REWARDS, **options):
  return filters.kept_groups(
      rewards, rewards, FilterOptions(**options)
  ).tolist()


def test_a_group_of_failures_has_no_score():
  for measure, scores in (
      ('mean', [-1, NAN, -0.55, -2.5, -1.5]),
      ('sum', [-2, NAN, -1.1, -5, -1.5]),
      ('std', [0, NAN, 0.1 / np.sqrt(2), 1 / np.sqrt(2), 0]),
  ):
    got = filters.group_scores(REWARDS, measure)
    np.testing.assert_allclose(got, scores, atol=1e-12)


@pytest.mark.parametrize(
    'options, kept',
    [
        ({'name': 'top_count', 'value': 1, 'measure': 'mean'}, [2]),
        ({'name': 'top_count', 'value': 9, 'measure': 'sum'}, [0, 2, 3, 4]),
        # Half of the four that have a score.
        ({'name': 'top_share', 'value': 0.5, 'smallest': True}, [0, 4]),
        ({'name': 'top_share', 'value': 0.5}, [2, 3]),
        ({'name': 'min_p', 'value': 0.05}, [2, 3]),
        ({'name': 'top_p', 'value': 1.0}, [0, 2, 3, 4]),
        ({'name': 'top_p', 'value': 0.9, 'smallest': True, 'zeros': False},
         [2, 3]),
        ({'name': 'top_p_softmax', 'value': 1.0, 'measure': 'mean'},
         [0, 2, 3, 4]),
        ({'name': 'accuracy_band', 'band_low': 0.0, 'band_high': 1.0}, []),
    ],
)  # fmt: skip
def test_a_ranking_never_chooses_it(options, kept):
  assert _kept(**options) == kept


def test_nothing_but_failures_leaves_nothing():
  failed = np.full((2, 3), NAN)
  for name in set(filters.FILTERS) - {'none'}:
    assert _kept(failed, name=name) == []
