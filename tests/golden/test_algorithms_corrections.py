"""Corrections for sampler mismatch against the references' numbers."""

import algorithm_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import corrections, losses
from agent_rl_jax.algorithms.options import CorrectionOptions, LossOptions

pytestmark = pytest.mark.usefixtures('double')


def gap_of(name):
  batch = cases.INPUTS[cases.CASES[name]['inputs']['batch']]
  mask = cases.number(batch['response_mask']) > 0
  gap = cases.number(batch['old_log_prob']) - cases.number(
      batch['rollout_log_prob']
  )
  return jnp.asarray(np.where(mask, gap, 0)), jnp.asarray(mask)


def bounds(threshold):
  """'low_high' is a pair, a number the upper bound."""
  if isinstance(threshold, str):
    return tuple(float(x) for x in threshold.split('_'))
  return 0.0, threshold


@pytest.mark.parametrize('name', cases.claim('verl/rollout_is/*'))
def test_verl_weights(name):
  params = cases.CASES[name]['params']
  gap, mask = gap_of(name)
  kind = 'icepop' if 'icepop' in name else 'tis'
  if params['rollout_is'] == 'sequence':
    kind += '_sequence'
  low, high = bounds(params['threshold'])
  weight = corrections.importance_weights(gap, mask, kind, low, high)
  if params.get('batch_normalize'):
    weight = corrections.normalized_weights(weight, mask, kind)
  expected = cases.CASES[name]['outputs']
  cases.assert_close(weight, expected['weights'], name, where=np.array(mask))


@pytest.mark.parametrize('name', cases.claim('verl/rollout_rs/*'))
def test_verl_rejection(name):
  params = cases.CASES[name]['params']
  gap, mask = gap_of(name)
  keep = mask
  for kind, threshold in zip(
      params['rollout_rs'].split(','),
      str(params['threshold']).split(','),
      strict=True,
  ):
    if kind.endswith('k1'):
      # It bounds sampler / old, here old / sampler is bounded.
      low, high = bounds(threshold if '_' in threshold else float(threshold))
      low = low or 1 / high
      low, high = 1 / high, 1 / low
    else:
      low, high = 0.0, float(threshold)
    keep = keep & corrections.kept(gap, mask, kind, low, high)
  expected = cases.CASES[name]['outputs']
  np.testing.assert_array_equal(keep, cases.number(expected['mask']) > 0)
  rejected = 1 - np.sum(keep) / np.sum(mask)
  np.testing.assert_allclose(rejected, expected['masked_fraction'], atol=1e-6)


@pytest.mark.parametrize('name', cases.claim('verl/offpolicy_metrics'))
def test_mismatch_metrics(name):
  batch = cases.INPUTS['batch_a']
  metrics = corrections.mismatch_metrics(
      jnp.asarray(cases.number(batch['old_log_prob'])),
      jnp.asarray(cases.number(batch['rollout_log_prob'])),
      jnp.asarray(cases.number(batch['response_mask']) > 0),
  )
  expected = cases.CASES[name]['outputs']
  for ours, theirs in {
      'kl_k1': 'kl',
      'kl_k3': 'k3_kl',
      'old_log_ppl': 'training_log_ppl',
      'sampler_log_ppl': 'rollout_log_ppl',
      'log_ppl_gap': 'log_ppl_abs_diff',
      'chi2_token': 'chi2_token',
      'chi2_row': 'chi2_seq',
  }.items():
    np.testing.assert_allclose(
        metrics[ours], expected[theirs], rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize(
    'name',
    cases.claim('slime/vanilla_tis_function/*', 'slime/icepop_function/*'),
)
def test_slime_weights(name):
  params = cases.CASES[name]['params']
  gap, mask = gap_of(name)
  kind = 'icepop' if 'icepop' in name else 'tis'
  weight = corrections.importance_weights(
      gap, mask, kind, params['tis_clip_low'], params['tis_clip']
  )
  cases.assert_close(
      weight,
      cases.CASES[name]['outputs']['weights'],
      name,
      where=np.array(mask),
  )


@pytest.mark.parametrize('name', cases.claim('skyrl/off_policy_correction'))
def test_skyrl_corrections(name):
  gap, mask = gap_of(name)
  expected = cases.CASES[name]['outputs']
  some = np.array(mask)
  weigh = lambda kind, high: corrections.importance_weights(
      gap, mask, kind, 0.0, high
  )
  cases.assert_close(weigh('tis', 2.0), expected['tis_token'], name, where=some)
  cases.assert_close(
      weigh('tis_sequence', 5.0), expected['tis_sequence'], name, where=some
  )
  masks = {
      'token_mask': ('token_k1', 0.5, 2.0),
      'geometric_mask': ('seq_mean_k1', 0.95, 1.1),
      'product_mask': ('seq_sum_k1', 0.5, 2.0),
  }
  for key, (kind, low, high) in masks.items():
    keep = np.array(corrections.kept(gap, mask, kind, low, high))
    wanted = np.broadcast_to(cases.number(expected[key]) > 0, some.shape)
    np.testing.assert_array_equal(keep[some], wanted[some])
  # Rows with an outlying token: those that token rejection touches.
  keep = np.array(corrections.kept(gap, mask, 'token_k1', 0.5, 2.0))
  untouched = (keep | ~some).all(axis=1)
  np.testing.assert_array_equal(
      untouched, cases.number(expected['outlier_sequence_mask'])[:, 0] > 0
  )


def corrected_loss(name, options, correction, keep=None):
  """Corrections as the loop applies them, then loss and gradient."""
  batch = cases.INPUTS[cases.CASES[name]['inputs']['batch']]
  mask = np.array(cases.number(batch['response_mask']) > 0)
  loss_batch = cases.loss_batch(
      mask if keep is None else mask & np.array(keep),
      cases.resolve(name, 'advantages'),
      batch['old_log_prob'],
      correction=correction,
  )
  logprobs = jnp.asarray(cases.number(batch['log_prob']))

  def loss(x):
    return losses.policy_loss(x, None, loss_batch, options)[0].value()

  return jax.value_and_grad(loss)(logprobs)


def assert_loss(name, options, correction):
  expected = cases.CASES[name]['outputs']
  total, gradient = corrected_loss(name, options, correction)
  # Some of them compute the weights in float32.
  exact = {'rtol': 2e-6, 'atol': 1e-8}
  np.testing.assert_allclose(total, expected['loss'], **exact)
  np.testing.assert_allclose(
      gradient, cases.number(expected['grad_log_prob']), **exact
  )


AREAL = {
    'none': None,
    'token_mask_upper2': ('icepop', 0.0, 2.0),
    'token_mask_0.5_2': ('icepop', 0.5, 2.0),
    'seq_mask_geo_0.95_1.1': ('icepop_geometric', 0.95, 1.1),
    'seq_clamp_geo_1.05': ('tis_geometric', 0.0, 1.05),
}


@pytest.mark.parametrize('name', cases.claim('areal/decoupled_ppo/*'))
def test_decoupled_ppo(name):
  gap, mask = gap_of(name)
  arguments = AREAL[name.rsplit('/', 1)[1]]
  weight = np.ones(mask.shape)
  if arguments is not None:
    weight = np.array(corrections.importance_weights(gap, mask, *arguments))
    np.testing.assert_allclose(
        weight,
        cases.number(cases.CASES[name]['outputs']['behaviour_weight']),
        atol=1e-6,
    )
  options = LossOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
  assert_loss(name, options, weight)


OPENRLHF = {
    'tis': ('tis', 0.5, 2.0),
    'icepop': ('icepop', 0.5, 2.0),
}


@pytest.mark.parametrize(
    'name', cases.claim(*(f'openrlhf/policy_loss/{key}' for key in OPENRLHF))
)
def test_openrlhf_corrections(name):
  gap, mask = gap_of(name)
  weight = corrections.importance_weights(
      gap, mask, *OPENRLHF[name.rsplit('/', 1)[1]]
  )
  options = LossOptions(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
  assert_loss(name, options, weight)


@pytest.mark.parametrize(
    'name', cases.claim('openrlhf/policy_loss/seq_mask_tis')
)
def test_openrlhf_rejection_with_unbounded_weights(name):
  """Token weights are not clipped there; rejected rows stay in the count."""
  gap, mask = gap_of(name)
  weight = corrections.importance_weights(gap, mask, 'tis', 0.0, np.inf)
  keep = corrections.kept(gap, mask, 'seq_mean_k1', 0.9, 1.1)
  options = LossOptions(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
  assert_loss(name, options, np.where(keep, weight, 0))


@pytest.mark.parametrize('name', cases.claim('trl/grpo_loss/seq_mask_is_3.0'))
def test_trl_sequence_mask(name):
  gap, mask = gap_of(name)
  weight = corrections.importance_weights(
      gap, mask, 'icepop_sequence', 0.0, 3.0
  )
  options = LossOptions(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
  assert_loss(name, options, weight)


def batch_and_scores():
  inputs = cases.INPUTS['batch_a']
  batch = cases.trajectories(
      inputs['response_mask'],
      returns=inputs['outcome'],
      sampler_logprobs=inputs['rollout_log_prob'],
  )
  return batch, cases.scores_of('verl/rollout_is/token/thr=2.0')


def test_correct_joins_them():
  batch, scores = batch_and_scores()
  name = 'verl/rollout_is/token/thr=2.0'
  result = corrections.correct(
      batch, scores, CorrectionOptions(correction='tis')
  )
  mask = np.array(batch.action_mask)
  expected = cases.CASES[name]['outputs']['weights']
  cases.assert_close(result.weight, expected, name, where=mask)
  assert result.keep is None
  clipped = result.metrics['correction/changed_fraction']
  assert clipped.total == ((np.exp(gap_of(name)[0]) > 2) & mask).sum()

  options = CorrectionOptions(
      rejection='token_k1', rejection_denominator='original'
  )
  result = corrections.correct(batch, scores, options)
  keep = corrections.kept(*gap_of(name), 'token_k1', 0.5, 2.0)
  np.testing.assert_array_equal(result.weight, np.where(keep, 1, 0))
  assert result.keep is None
  options = CorrectionOptions(rejection='token_k1')
  result = corrections.correct(batch, scores, options)
  np.testing.assert_array_equal(result.keep, keep)
  assert result.weight is None
