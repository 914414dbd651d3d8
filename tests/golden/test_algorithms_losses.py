"""Policy and value losses against the references' numbers."""

import algorithm_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import losses, value
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.logprobs import hidden_logprobs

pytestmark = pytest.mark.usefixtures('double')


def run_loss(name, options, batch, expected):
  """Loss and gradient against `expected`; returns the metrics."""
  logprobs = jnp.asarray(cases.number(cases.resolve(name, 'log_prob')))

  def loss(x):
    mean, metrics = losses.policy_loss(x, None, batch, options)
    return mean.value(), metrics

  (total, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
  cases.assert_close(total, expected['loss'], name)
  cases.assert_close(gradient, expected['grad_log_prob'], name)
  if 'per_token_loss' in expected:
    cases.assert_close(
        per_token(batch, options, logprobs),
        expected['per_token_loss'],
        name,
        where=np.array(batch.mask),
    )
  return {key: float(mean.value()) for key, mean in metrics.items()}


def per_token(batch, options, logprobs):
  """The loss is linear in the weights, so this is its per-token value."""
  return jax.grad(
      lambda weight: losses.policy_loss(
          logprobs, None, batch.replace(weight=weight), options
      )[0].total
  )(batch.weight)


def batch_of(name, options, **extra):
  mask = (
      cases.resolve(name, 'mask')
      if 'mask' in cases.CASES[name]['inputs']
      else cases.field(name, 'response_mask')
  )
  return cases.loss_batch(
      mask,
      cases.resolve(name, 'advantages'),
      cases.resolve(name, 'old_log_prob'),
      options.aggregation,
      options.norm_length,
      **extra,
  )


VERL_LOSSES = {
    'vanilla': 'ppo_clip',
    'gspo': 'gspo',
    'cispo': 'cispo',
    'gpg': 'reinforce',
    'geo_mean': 'gmpo',
    'reinforce': 'reinforce',
}


def verl_options(name, length):
  params = cases.CASES[name]['params']
  loss = VERL_LOSSES.get(name.split('/')[2], 'ppo_clip')
  aggregation = params.get('loss_agg_mode', 'token-mean')
  if loss in ('gspo', 'gmpo'):
    aggregation = None
  return LossOptions(
      loss=loss,
      clip_low=params.get('clip_ratio_low', params.get('clip_ratio')),
      clip_high=params.get('clip_ratio_high', params.get('clip_ratio')),
      dual_clip=params.get('clip_ratio_c', 0.0),
      aggregation=aggregation,
      norm_length=length,
  )


@pytest.mark.parametrize('name', cases.claim('verl/policy_loss/*'))
def test_verl_policy_loss(name):
  inputs = cases.CASES[name]['inputs']
  expected = cases.CASES[name]['outputs']
  options = verl_options(name, np.shape(cases.resolve(name, 'mask'))[1])
  extra = {}
  if 'rollout_is_weights_values' in inputs:
    extra['correction'] = inputs['rollout_is_weights_values']
  elif 'rollout_is_weights' in inputs:
    extra['correction'] = cases.resolve(name, 'rollout_is_weights')
  batch = batch_of(name, options, **extra)
  metrics = run_loss(name, options, batch, expected)
  wanted = {
      key.removeprefix('actor/'): number
      for key, number in expected['metrics'].items()
  }
  ours = {
      'pg_clipfrac': 'policy/clip_fraction',
      'pg_clipfrac_lower': 'policy/dual_clip_fraction',
      'ppo_kl': 'policy/approx_kl',
  }
  if options.loss == 'reinforce':
    # There it is measured against the sampler.
    del ours['ppo_kl']
  for key, metric in ours.items():
    if metric in metrics and key in wanted and options.loss != 'gmpo':
      np.testing.assert_allclose(
          metrics[metric], wanted[key], rtol=1e-6, atol=1e-8
      )


@pytest.mark.parametrize('name', cases.claim('verl/edge/policy_loss/*'))
def test_verl_edge_policy_loss(name):
  options = verl_options(name, 4)
  names = dict(cases.CASES[name]['inputs'])
  batch = cases.INPUTS[names['batch']]
  loss_batch = cases.loss_batch(
      batch['response_mask'],
      cases.resolve(name, 'advantages'),
      batch['old_log_prob'],
      options.aggregation,
      options.norm_length,
  )
  expected = cases.CASES[name]['outputs']
  logprobs = jnp.asarray(cases.number(batch['log_prob']))

  def loss(x):
    return losses.policy_loss(x, None, loss_batch, options)[0].value()

  total, gradient = jax.value_and_grad(loss)(logprobs)
  cases.assert_close(total, expected['loss'], name)
  cases.assert_close(gradient, expected['grad_log_prob'], name)


OPENRLHF = {
    'ppo_token_mean': LossOptions(clip_high=0.2, dual_clip=0.0),
    'ppo_sample_mean': LossOptions(
        clip_high=0.2, dual_clip=0.0, aggregation='seq-mean-token-mean'
    ),
    'dual_clip3': LossOptions(clip_high=0.2, dual_clip=3.0),
    'gspo': LossOptions(loss='gspo', clip_low=0.05, clip_high=0.1),
}


@pytest.mark.parametrize(
    'name', cases.claim(*(f'openrlhf/policy_loss/{key}' for key in OPENRLHF))
)
def test_openrlhf_policy_loss(name):
  options = OPENRLHF[name.rsplit('/', 1)[1]]
  expected = cases.CASES[name]['outputs']
  metrics = run_loss(name, options, batch_of(name, options), expected)
  np.testing.assert_allclose(
      metrics['policy/clip_fraction'], expected['clip_ratio'], rtol=1e-6
  )
  if options.loss != 'gspo':
    np.testing.assert_allclose(
        metrics['policy/approx_kl'], expected['ppo_kl'], rtol=1e-6
    )


def test_openrlhf_gspo_is_the_row_gradient():
  """Straight-through and row gradients agree where A is constant on a row."""
  name = 'openrlhf/policy_loss/gspo'
  advantages = cases.number(cases.resolve(name, 'advantages'))
  mask = cases.number(cases.field(name, 'response_mask')) > 0
  for row in range(len(mask)):
    assert np.ptp(advantages[row][mask[row]]) < 1e-9


BNPO = {'clip_low': 0.2, 'clip_high': 0.2, 'dual_clip': 0.0}
TRL = {
    'grpo': LossOptions(**BNPO, aggregation='seq-mean-token-mean'),
    'bnpo': LossOptions(**BNPO),
    'dr_grpo': LossOptions(
        **BNPO, aggregation='seq-mean-token-sum-norm', norm_length=12
    ),
    # The cap is absolute there, and there is no lower bound.
    'cispo_cap5': LossOptions(loss='cispo', clip_low=1.0, clip_high=4.0),
    'sapo': LossOptions(loss='sapo', aggregation='seq-mean-token-mean'),
    'gspo': LossOptions(loss='gspo', clip_low=0.05, clip_high=0.1),
    'kl_beta0.04': LossOptions(**BNPO, kl='k3', kl_coef=0.04),
    'kl_beta0.04_bias_corrected': LossOptions(
        **BNPO, kl='k3', kl_coef=0.04, kl_importance=True
    ),
    'off_policy_mask0.05': LossOptions(**BNPO, opsm_delta=0.05),
}


@pytest.mark.parametrize(
    'name', cases.claim(*(f'trl/grpo_loss/{key}' for key in TRL))
)
def test_trl_grpo_loss(name):
  options = TRL[name.rsplit('/', 1)[1]]
  batch = batch_of(
      name,
      options,
      reference_logprobs=cases.resolve(name, 'ref_log_prob'),
  )
  expected = cases.CASES[name]['outputs']
  metrics = run_loss(name, options, batch, expected)
  if 'kl' in expected['metrics'] and not options.kl_importance:
    np.testing.assert_allclose(
        metrics['policy/kl_reference'], expected['metrics']['kl'], rtol=1e-6
    )


@pytest.mark.parametrize('name', cases.claim('slime/gspo'))
def test_slime_gspo(name):
  options = LossOptions(loss='gspo', clip_low=0.05, clip_high=0.1)
  batch = batch_of(name, options)
  logprobs = jnp.asarray(cases.number(cases.resolve(name, 'log_prob')))
  cases.assert_close(
      per_token(batch, options, logprobs),
      cases.CASES[name]['outputs']['per_token_loss'],
      name,
      where=np.array(batch.mask),
  )


@pytest.mark.parametrize('name', cases.claim('slime/opsm_mask/*'))
def test_slime_opsm(name):
  options = LossOptions()
  batch = batch_of(name, options)
  logprobs = jnp.asarray(cases.number(cases.resolve(name, 'log_prob')))
  delta = cases.CASES[name]['params']['delta']
  keep = losses.opsm_keep(logprobs, batch, delta)
  mask = np.array(batch.mask)
  expected = cases.number(cases.CASES[name]['outputs']['mask'])
  np.testing.assert_array_equal(
      np.array(keep)[mask], np.broadcast_to(expected, mask.shape)[mask] > 0
  )


@pytest.mark.parametrize('name', cases.claim('slime/kl_is_corrected/*'))
def test_slime_kl_importance(name):
  policy, old, reference = (
      jnp.asarray(cases.number(cases.field(name, key)))
      for key in ('log_prob', 'old_log_prob', 'ref_log_prob')
  )
  everywhere = jnp.ones(policy.shape, bool)
  batch = cases.loss_batch(
      everywhere, np.zeros(policy.shape), old, reference_logprobs=reference
  )
  options = LossOptions(kl='k3', kl_coef=1.0, kl_importance=True)
  cases.assert_close(
      jax.grad(
          lambda weight: losses.policy_loss(
              policy, None, batch.replace(weight=weight), options
          )[0].total
      )(batch.weight),
      cases.CASES[name]['outputs']['kl'],
      name,
  )


@pytest.mark.parametrize(
    'name', cases.claim('verl/value_loss/*', 'openrlhf/value_loss/*')
)
def test_value_loss(name):
  params = cases.CASES[name]['params']
  expected = cases.CASES[name]['outputs']
  options = LossOptions(
      aggregation=params.get('loss_agg_mode', 'token-mean'),
      value_clip=params.get('cliprange_value', params.get('clip_eps')),
  )
  mask = cases.field(name, 'response_mask')
  batch = cases.loss_batch(
      mask,
      np.zeros_like(mask),
      np.zeros_like(mask),
      options.aggregation,
      value_targets=cases.resolve(name, 'returns'),
      old_values=cases.resolve(name, 'values'),
  )

  def loss(x):
    mean, metrics = value.value_loss(x, batch, options)
    return mean.value(), metrics

  (total, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(cases.number(cases.resolve(name, 'vpreds')))
  )
  cases.assert_close(total, expected.get('vf_loss', expected.get('loss')), name)
  cases.assert_close(gradient, expected['grad_vpreds'], name)
  if 'vf_clipfrac' in expected:
    np.testing.assert_allclose(
        metrics['value/clip_fraction'].value(),
        expected['vf_clipfrac'],
        rtol=1e-6,
    )


@pytest.mark.parametrize('name', cases.claim('verl/entropy'))
def test_entropy(name):
  """Through an identity head, which is float32: the hidden is the logits."""
  expected = cases.CASES[name]['outputs']
  real = lambda key: cases.number(cases.resolve(name, key))
  # Our position t - 1 says the distribution of token t; there they are shifted.
  logits = jnp.asarray(np.pad(real('logits'), ((0, 0), (0, 1), (0, 0))))
  mask = np.pad(real('mask'), ((0, 0), (1, 0)))
  rows, length, vocab = logits.shape
  config = ModelConfig(vocab_size=vocab, width=vocab)
  segment = jnp.ones((rows, length), jnp.int32)
  nothing = np.zeros(mask.shape)
  batch = cases.loss_batch(mask, nothing, nothing, dtype=jnp.float32)

  def bonus(x):
    logprobs, entropy = hidden_logprobs(
        config, {'embed': {'table': jnp.eye(vocab)}}, x, segment, segment
    )
    mean, metrics = losses.policy_loss(
        logprobs, entropy, batch, LossOptions(entropy_coef=1.0)
    )
    return -mean.value(), (entropy, metrics['policy/entropy'])

  (total, (entropy, metric)), gradient = jax.value_and_grad(
      bonus, has_aux=True
  )(logits.astype(jnp.float32))
  close = lambda *pair: cases.assert_close(*pair, name, jnp.float32)
  close(entropy[:, 1:], expected['token_entropy'])
  close(total, expected['entropy'])
  close(metric.value(), expected['entropy'])
  close(gradient[:, :-1], expected['grad_logits'])
