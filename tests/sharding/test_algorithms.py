"""Estimators, weights and losses on eight devices equal those on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agent_rl_jax.algorithms import aggregate, corrections, losses
from agent_rl_jax.algorithms.options import CorrectionOptions, LossOptions
from agent_rl_jax.batch import LossBatch
from tests import algorithm_batches as batches


@pytest.fixture(scope='module')
def by_rows():
  """Puts a tree's leading axis on eight devices."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))

  def put(tree):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec('data')))

  return put


def to_float32(tree):
  return jax.tree.map(
      lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, tree
  )


@pytest.mark.parametrize('markov', [False, True], ids=['full', 'markov'])
def test_estimators(by_rows, markov):
  """Every one, since each whitens, normalizes or crosses rows."""
  for seed in range(2):
    inputs = to_float32(batches.random_batch(seed, markov))
    one = batches.every_advantage(*inputs)
    eight = batches.every_advantage(*by_rows(inputs))
    for name in one:
      for a, b in zip(
          jax.tree.leaves(eight[name]), jax.tree.leaves(one[name]), strict=True
      ):
        assert a.dtype != jnp.float64
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize('mode', aggregate.AGGREGATIONS)
def test_token_weights(by_rows, mode):
  batch, _ = to_float32(batches.random_batch(0))
  run = jax.jit(
      functools.partial(aggregate.token_weights, mode=mode, norm_length=5.0)
  )
  arguments = (batch.action_mask, batch.weight, batch.group)
  for a, b in zip(run(*by_rows(arguments)), run(*arguments), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_corrections(by_rows):
  inputs = to_float32(batches.random_batch(1))
  options = CorrectionOptions(
      correction='tis_sequence', correction_normalize=True, rejection='token_k1'
  )
  run = jax.jit(functools.partial(corrections.correct, options=options))
  one, eight = run(*inputs), run(*by_rows(inputs))
  for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize('loss', ['ppo_clip', 'gspo', 'gmpo'])
def test_losses(by_rows, loss):
  """Two rows to a bin, so that row reductions read segments."""
  rng = np.random.default_rng(0)
  shape = (8, 16)
  draw = lambda: rng.normal(size=shape).astype(np.float32)
  mask = rng.random(shape) < 0.7
  old = draw()
  place = np.broadcast_to(np.arange(16, dtype=np.int32), shape)
  batch = LossBatch(
      tokens=np.zeros(shape, np.int32),
      positions=place % 8,
      segment=place // 8 + 1,
      mask=mask,
      advantages=draw(),
      old_logprobs=old,
      sampler_logprobs=old,
      weight=mask.astype(np.float32),
      denominator=mask.astype(np.float32),
      row=np.zeros(shape, np.int32),
      group=np.zeros(shape, np.int32),
  )
  logprobs = old + 0.3 * draw()
  options = LossOptions(loss=loss, aggregation='seq-mean-token-mean')

  @functools.partial(jax.jit, compiler_options=batches.QUICK)
  def run(logprobs, batch):
    def total(x):
      mean, metrics = losses.policy_loss(x, None, batch, options)
      return mean.total, (mean, metrics)

    return jax.value_and_grad(total, has_aux=True)(logprobs)

  inputs = (logprobs, batch)
  eight = run(*by_rows(inputs))
  for a, b in zip(
      jax.tree.leaves(eight), jax.tree.leaves(run(*inputs)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
  # A row's reduction stays on its device: sums of scalars are all there is.
  text = run.lower(*by_rows(inputs)).compile().as_text()
  assert 'all-gather' not in text and 'all-to-all' not in text
