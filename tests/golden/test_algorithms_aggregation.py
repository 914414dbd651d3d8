"""Aggregation modes and KL estimators against the references' numbers."""

import algorithm_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import kl, masked
from agent_rl_jax.algorithms.aggregate import token_weights
from agent_rl_jax.batch import Mean

pytestmark = pytest.mark.usefixtures('double')


# Reference name of each aggregation, where it differs.
AGGREGATIONS = {
    'sequence-mean-token-mean': 'seq-mean-token-mean',
    'sequence-mean-token-scale': 'seq-mean-token-sum-norm',
    'sequence-mean-token-sum-norm': 'seq-mean-token-sum',
}


def aggregated(loss, mask, mode, norm_length=None):
  loss, mask = jnp.asarray(cases.number(loss)), jnp.asarray(cases.number(mask))
  weight, denominator = token_weights(
      mask > 0,
      jnp.ones(loss.shape[0]),
      jnp.zeros(loss.shape[0], jnp.int32),
      mode,
      norm_length or loss.shape[1],
  )
  return Mean(jnp.sum(weight * loss), jnp.sum(denominator))


@pytest.mark.parametrize('name', cases.claim('verl/masked_whiten'))
def test_masked_primitives(name):
  x = jnp.asarray(cases.number(cases.resolve(name, 'x')))
  mask = jnp.asarray(cases.number(cases.resolve(name, 'mask'))) > 0
  expected = cases.CASES[name]['outputs']
  cases.assert_close(masked.masked_mean(x, mask), expected['masked_mean'], name)
  cases.assert_close(
      masked.masked_variance(x, mask), expected['masked_var'], name
  )
  cases.assert_close(
      masked.masked_mean(x, mask, axis=1),
      expected['masked_mean_axis_last'],
      name,
  )
  whitened = masked.whiten(x, mask)
  cases.assert_close(whitened, expected['whitened'], name, where=np.array(mask))
  # Unlike there, what the mask leaves out is 0.
  assert not np.array(whitened)[~np.array(mask)].any()


@pytest.mark.parametrize('name', cases.claim('verl/agg_loss/*'))
def test_aggregation(name):
  mode = cases.CASES[name]['params']['mode']
  info = cases.CASES[name]['params']['global_info']
  expected = cases.CASES[name]['outputs']
  read = lambda key: cases.resolve(name, key)
  mean = aggregated(read('loss_mat_a'), read('mask_a'), mode)
  cases.assert_close(mean.value(), expected['local'], name)
  edge = aggregated(read('loss_mat_edge'), read('mask_edge'), mode)
  cases.assert_close(edge.value(), expected['edge_local'], name)
  # Given the counts of the whole batch the sum is divided by those instead.
  counts = {'token-mean': info['batch_num_tokens']}
  mean = aggregated(
      read('loss_mat_a'), read('mask_a'), mode, info['loss_scale_factor']
  )
  whole = counts.get(mode, info['global_batch_size'])
  cases.assert_close(
      mean.total / whole * info['dp_size'], expected['global_info'], name
  )
  # The reference gives 0 / 0 where nothing is sampled; here it is 0.
  empty = aggregated(read('loss_mat_a'), np.zeros_like(read('mask_a')), mode)
  assert float(empty.value()) == 0


@pytest.mark.parametrize('name', cases.claim('tunix/aggregate_loss'))
def test_tunix_aggregation(name):
  for mode, expected in cases.CASES[name]['outputs'].items():
    mean = aggregated(
        cases.resolve(name, 'loss_mat'),
        cases.resolve(name, 'mask'),
        AGGREGATIONS.get(mode, mode),
    )
    cases.assert_close(mean.value(), expected, name)


SCALINGS = {
    'token_mean': 'token-mean',
    'sequence_mean': 'seq-mean-token-mean',
    'seq_mean_token_sum_norm': 'seq-mean-token-sum-norm',
    'prompt_mean': 'prompt-mean',
}


@pytest.mark.parametrize('name', cases.claim('skyrl/advantage_scaling/*'))
def test_advantage_scaling(name):
  """SkyRL scales the advantages by what is a token's weight here."""
  mask = cases.field(name, 'response_mask')
  advantages = cases.number(cases.resolve(name, 'advantages'))
  weight, denominator = token_weights(
      jnp.asarray(mask) > 0,
      jnp.ones(len(mask)),
      jnp.asarray(cases.dense(cases.field(name, 'uid'))),
      SCALINGS[name.rsplit('/', 1)[1]],
      cases.CASES[name]['params']['max_seq_len'],
  )
  scaled = weight / jnp.sum(denominator) * advantages
  expected = cases.CASES[name]['outputs']['scaled_advantages']
  cases.assert_close(scaled, expected, name)


KINDS = {
    'k1': 'k1', 'k2': 'k2', 'k3': 'k3', 'abs': 'abs',
    'kl': 'k1', 'mse_kl': 'k2', 'low_var_kl': 'k3',
}  # fmt: skip


@pytest.mark.parametrize('name', cases.claim('verl/kl_penalty/*'))
def test_kl_penalty(name):
  kind = cases.CASES[name]['params']['kind']
  policy = jnp.asarray(cases.number(cases.resolve(name, 'log_prob')))
  reference = jnp.asarray(cases.number(cases.resolve(name, 'ref_log_prob')))
  expected = cases.CASES[name]['outputs']
  everywhere = jnp.ones(policy.shape, bool)
  cases.assert_close(
      kl.kl_penalty(policy, reference, everywhere, kind), expected['kl'], name
  )
  if 'kl_loss' not in expected:
    return
  mask = jnp.asarray(cases.field(name, 'response_mask')) > 0

  def loss(x):
    return jnp.sum(kl.kl_penalty(x, reference, mask, kind)) / jnp.sum(mask)

  total, gradient = jax.value_and_grad(loss)(policy)
  cases.assert_close(total, expected['kl_loss'], name)
  cases.assert_close(gradient, expected['grad_log_prob'], name)


@pytest.mark.parametrize('name', cases.claim('openrlhf/kl/*', 'tunix/kl'))
def test_kl_of_others(name):
  policy = jnp.asarray(cases.number(cases.resolve(name, 'log_prob')))
  reference = jnp.asarray(cases.number(cases.resolve(name, 'ref_log_prob')))
  everywhere = jnp.ones(policy.shape, bool)
  for key, expected in cases.CASES[name]['outputs'].items():
    kind = KINDS[cases.CASES[name]['params'].get('kind', key)]
    actual = kl.kl_penalty(policy, reference, everywhere, kind)
    cases.assert_close(actual, expected, name)
