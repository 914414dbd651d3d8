"""Options: paper defaults, refusals, and the tables they name."""

import pytest

from agent_rl_jax.algorithms import (
    advantages,
    aggregate,
    choices,
    kl,
    losses,
    options,
)
from agent_rl_jax.algorithms.filters import FilterOptions
from agent_rl_jax.algorithms.options import AlgorithmOptions


def test_tables_agree():
  assert set(choices.ESTIMATORS) == set(advantages.ADVANTAGES)
  assert set(choices.CLIP_BOUNDS) == set(losses.LOSSES)
  assert set(choices.AGGREGATION) == set(losses.LOSSES)
  assert {key: set(table) for key, table in choices.READ.items()} == {
      'advantage': set(advantages.ADVANTAGES),
      'baseline': set(choices.BASELINES),
      'normalize_std': {True, False},
      'loss': set(losses.LOSSES),
      'aggregation': set(aggregate.AGGREGATIONS),
      'kl': {'none', *kl.KL_KINDS},
      'kl_adaptive': {True, False},
      'correction': set(choices.CORRECTION_BOUNDS),
      'rejection': set(choices.REJECTION_BOUNDS),
  }
  needs = advantages.NEEDS_VALUES | advantages.NEEDS_GREEDY_BASELINE
  assert needs | advantages.NEEDS_GROUPS <= set(advantages.ADVANTAGES)


def test_a_loss_brings_its_paper_defaults():
  resolved = AlgorithmOptions(advantage='gigpo', loss='gspo', correction='tis')
  assert (resolved.clip_low, resolved.clip_high) == (3e-4, 4e-4)
  assert resolved.aggregation == 'seq-mean-token-mean'
  assert resolved.correction_high == 2.0
  resolved = AlgorithmOptions()
  assert (resolved.clip_low, resolved.clip_high) == (0.2, 0.28)
  assert resolved.aggregation == 'token-mean'
  assert not resolved.normalize_std
  resolved = AlgorithmOptions(advantage='dr_grpo', norm_length=128)
  assert resolved.aggregation == 'seq-mean-token-sum-norm'
  assert AlgorithmOptions(clip_high=0.3).clip_high == 0.3
  row_mean = 'seq-mean-token-mean'
  assert AlgorithmOptions(loss='sapo').aggregation == row_mean
  # It has no means over rows by definition: another may be chosen.
  chosen = AlgorithmOptions(loss='sapo', aggregation='token-mean')
  assert chosen.aggregation == 'token-mean'


def test_dr_grpo_needs_no_length_where_rows_are_averaged():
  for loss in choices.ROW_LOSSES:
    made = AlgorithmOptions(advantage='dr_grpo', loss=loss)
    assert made.aggregation == 'seq-mean-token-mean'
  with pytest.raises(ValueError, match='norm_length'):
    AlgorithmOptions(advantage='dr_grpo', loss='sapo')


def test_options_are_static():
  assert hash(AlgorithmOptions(component_weights=[1.0, 2.0]))
  assert AlgorithmOptions() == AlgorithmOptions()


REFUSED = {
    'norm_length': {'aggregation': 'seq-mean-token-sum-norm'},
    'constant': {'advantage': 'dr_grpo'},
    'without the standard deviation': {
        'advantage': 'dr_grpo',
        'normalize_std': True,
        'norm_length': 9,
    },
    'one value per row': {'loss': 'gspo', 'aggregation': 'token-mean'},
    'expected gradient of zero': {'kl': 'k1'},
    'rewards have none': {'kl': 'k2+', 'kl_placement': 'reward'},
    'there is no ratio': {
        'kl': 'k1',
        'kl_placement': 'reward',
        'kl_importance': True,
    },
    'adapts nothing': {'kl_adaptive': True},
    'so kl_coef=0 stays 0': {'kl': 'k3', 'kl_adaptive': True, 'kl_coef': 0.0},
    'normalizes each reward component': {
        'advantage': 'gdpo',
        'kl': 'k1',
        'kl_placement': 'reward',
    },
    'a KL of single tokens is in neither': {
        'advantage': 'mt_grpo',
        'kl': 'k1',
        'kl_placement': 'reward',
    },
    'no sampler drew': {'loss': 'sft', 'correction': 'tis'},
    'above 1': {'dual_clip': 0.5},
    'is none of ppo_clip': {'loss': 'ppo'},
    'is none of reinforce': {'advantage': 'grop'},
    'must lie in': {'gamma': 1.5},
    'similarity=95': {'similarity': 95},
    'cannot be negative': {'clip_low': -0.1},
    'low <= high': {'correction': 'tis', 'correction_low': 3.0},
    'needs a correction': {'correction_normalize': True},
}


@pytest.mark.parametrize('reason', REFUSED)
def test_refused(reason):
  with pytest.raises(ValueError, match=reason):
    AlgorithmOptions(**REFUSED[reason])


def test_double_correction_is_refused():
  plain = AlgorithmOptions()
  options.refuse_double_correction(plain, 'sampler')
  corrected = AlgorithmOptions(correction='tis')
  options.refuse_double_correction(corrected, 'recompute')
  with pytest.raises(ValueError, match='twice'):
    options.refuse_double_correction(corrected, 'sampler')
  with pytest.raises(ValueError, match='nothing to compare'):
    options.refuse_double_correction(
        AlgorithmOptions(rejection='token_k1'), 'sampler'
    )


def test_filter_options_are_checked():
  FilterOptions(name='top_count', value=3)
  for bad in (
      {'name': 'best'},
      {'name': 'top_share', 'value': 3},
      {'value': 0},
      {'measure': 'variance'},
      {'band_low': 0.9},
      {'tries': 0},
      {'name': 'min_p', 'measure': 'mean'},
      {'name': 'top_p', 'measure': 'sum'},
      {'name': 'top_p', 'smallest': True},
  ):
    with pytest.raises(ValueError):
      FilterOptions(**bad)
