"""KL: which estimators may be weighed by the ratio, and what is told of it."""

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
  """Two sampled tokens a row, x = 0.5 and -0.1; 9 elsewhere."""
  batch = trajectory(rows=2, length=6, padding=0).replace(
      action_mask=np.array([[0, 1, 1, 0, 0, 0]] * 2, bool),
      valid=np.array([True, True]),
  )
  x = np.array([[9, 0.5, -0.1, 9, 9, 9]] * 2, np.float32)
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
  want = {'kl/coef': 0.125}
  if placement == 'reward':
    want['kl/reward'] = pytest.approx(0.2)
  assert told == want
  # What the rewards lose: coefficient x KL x tokens.
  lost = batch.returns - advantages.returns.episode_scores(
      batch, scores, state, options
  )
  share = 2 * 0.125 * 0.2 if placement == 'reward' else 0.0
  np.testing.assert_allclose(lost, share, atol=1e-6)
  assert advantages.kl_metrics(batch, scores, {}, AlgorithmOptions()) == {}
