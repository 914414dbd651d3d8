"""KL: which estimators may be weighed by the ratio, and what is told of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import advantages, kl
from agent_rl_jax.algorithms.options import AlgorithmOptions, KlOptions
from agent_rl_jax.batch import Scores
from tests.train_cases import trajectory

OLD, NEW, REFERENCE = (
    np.log(np.array(p))
    for p in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.4, 0.1, 0.5])
)


def _gradients(kind, importance):
  """(expected gradient of the estimate, gradient of the KL) in the logits.

  The expectation over samples of the old policy is a sum over three tokens.
  """

  def estimate(logits):
    new = jax.nn.log_softmax(logits)
    value = kl.kl_penalty(new, REFERENCE, np.ones(3, bool), kind)
    ratio = jnp.exp(new - OLD) if importance else 1.0
    return jnp.sum(np.exp(OLD) * ratio * value)

  def exact(logits):
    new = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(new) * (new - REFERENCE))

  return jax.grad(estimate)(NEW), jax.grad(exact)(NEW)


@pytest.mark.parametrize('kind', kl.KL_KINDS)
def test_importance_is_allowed_where_its_expected_gradient_is_exact(kind):
  got, exact = _gradients(kind, importance=True)
  unbiased = np.allclose(got, exact, atol=1e-6)
  assert unbiased == (kind in ('k1', 'k3'))
  options = dict(kl=kind, kl_coef=0.1, kl_importance=True)
  if unbiased:
    KlOptions(**options)
  else:
    with pytest.raises(ValueError, match="for 'k1' and 'k3' alone"):
      KlOptions(**options)


@pytest.mark.parametrize('placement', ['loss', 'reward'])
def test_what_is_told_of_the_kl(placement):
  """x = 0.5 and -0.1, 0.5, and 2 in an older row; 9 where none is sampled."""
  batch = trajectory(rows=3, length=6, padding=0)
  action_mask = np.zeros((3, 6), bool)
  action_mask[:, 1] = action_mask[0, 2] = True
  batch = batch.replace(
      action_mask=action_mask, fresh=np.array([True, True, False])
  )
  x = np.full((3, 6), 9, np.float32)
  x[:, 1], x[0, 2] = (0.5, 0.5, 2), -0.1
  scores = Scores(x, reference_logprobs=np.zeros_like(x))
  options = AlgorithmOptions(
      kl='k1' if placement == 'reward' else 'k3',
      kl_coef=0.25,
      kl_placement=placement,
      kl_adaptive=True,
  )
  state = {'kl_coef': jnp.float32(0.125)}
  told = advantages.kl_metrics(batch, scores, state, options)
  told = {name: float(mean.value()) for name, mean in told.items()}
  # Rows' means, of the rows that no earlier batch held.
  k3 = lambda x: np.exp(-x) - 1 + x
  want = {
      'kl/coef': 0.125,
      'kl/measured': pytest.approx(
          (0.2 + 0.5) / 2
          if placement == 'reward'
          else ((k3(0.5) + k3(-0.1)) / 2 + k3(0.5)) / 2,
          rel=1e-5,
      ),
  }
  if placement == 'reward':
    want['kl/reward'] = pytest.approx((0.5 - 0.1 + 0.5 + 2) / 4)
  assert told == want
  # It is what moves the coefficient.
  moved = advantages.estimate(batch, scores, state, options).state['kl_coef']
  assert float(moved) == pytest.approx(
      float(
          kl.adapted_coef(
              0.125,
              told['kl/measured'],
              options.kl_target,
              options.kl_horizon,
              2,
          )
      )
  )
  assert float(moved) != 0.125
  fixed = dataclasses.replace(options, kl_adaptive=False)
  assert 'kl/measured' not in advantages.kl_metrics(batch, scores, {}, fixed)
  # What the rewards lose: coefficient x KL x tokens.
  lost = batch.returns - advantages.returns.episode_scores(
      batch, scores, state, options
  )
  share = 0.125 * (placement == 'reward') * np.array([0.4, 0.5, 2])
  np.testing.assert_allclose(lost, share, atol=1e-6)
  assert advantages.kl_metrics(batch, scores, {}, AlgorithmOptions()) == {}
