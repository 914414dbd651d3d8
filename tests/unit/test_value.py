"""The value head: where values are read, how it begins, what it explains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms.aggregate import AGGREGATIONS
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.algorithms.value import explained_variance, value_loss
from agent_rl_jax.batch import Advantages, Scores
from agent_rl_jax.models import policy, value
from agent_rl_jax.parallel.rules import is_axes
from agent_rl_jax.train import pack
from tests.train_cases import CONFIG, scored, trajectory

KINDS = ('own', 'shared')


def _trainable(kind, seed=0):
  params = policy.init(CONFIG, jax.random.key(seed))
  critic = value.init(CONFIG, kind, params)
  kernel = jax.random.normal(jax.random.key(seed + 1), (CONFIG.width,))
  critic['head'] = {'kernel': kernel, 'bias': jnp.float32(0.25)}
  return {'policy': params, 'critic': critic}


def test_a_value_is_read_before_its_token():
  """By hand: position p says 10 p + 1, two rows packed into one bin."""
  hidden = jnp.stack([jnp.arange(7.0), jnp.ones(7)], axis=-1)[None]
  head = {'kernel': jnp.array([10.0, 1.0]), 'bias': jnp.float32(0.5)}
  segment = jnp.array([[1, 1, 1, 2, 2, 2, 0]])
  values = value.hidden_values(head, hidden, segment)
  # The first token of each row, and padding, have none.
  np.testing.assert_allclose(
      values, [[0, 1.5, 11.5, 0, 31.5, 41.5, 0]], atol=1e-6
  )
  half = value.hidden_values(head, hidden.astype(jnp.bfloat16), segment)
  assert half.dtype == jnp.float32


@pytest.mark.parametrize('kind', KINDS)
def test_a_value_knows_what_precedes_its_token_and_no_more(kind):
  trainable = _trainable(kind)
  tokens = np.arange(1, 11, dtype=np.int32)[None]
  place = jnp.arange(10)[None]
  segment = jnp.ones((1, 10), jnp.int32)
  run = jax.jit(
      lambda tokens: value.token_values(
          CONFIG, trainable, tokens, place, segment
      )
  )
  before = np.asarray(run(tokens))
  other = tokens.copy()
  other[0, 5] = 20
  moved = np.asarray(run(other)) != before
  assert moved[0].tolist() == [False] * 6 + [True] * 4


@pytest.mark.parametrize('kind', KINDS)
def test_values_beside_logprobs_are_values_alone(kind):
  trainable = _trainable(kind)
  batch = trajectory()
  place = np.broadcast_to(np.arange(16, dtype=np.int32), batch.tokens.shape)
  segment = (place < batch.length[:, None]).astype(np.int32)
  rows = (batch.tokens, place, segment)
  logprobs, entropy, values = jax.jit(
      lambda t: value.logprobs_and_values(CONFIG, t, *rows, 0.7)
  )(trainable)
  alone = jax.jit(lambda t: value.token_values(CONFIG, t, *rows))(trainable)
  np.testing.assert_allclose(values, alone, atol=1e-6)
  want, want_entropy, none = jax.jit(
      lambda t: value.logprobs_and_values(CONFIG, t, *rows, 0.7)
  )({'policy': trainable['policy']})
  np.testing.assert_allclose(logprobs, want, atol=1e-6)
  np.testing.assert_allclose(entropy, want_entropy, atol=1e-6)
  assert none is None


@pytest.mark.parametrize('kind', KINDS)
def test_a_fresh_critic_says_zero_from_the_policys_trunk(kind):
  params = policy.init(CONFIG, jax.random.key(0))
  critic = value.init(CONFIG, kind, params)
  assert not np.any(critic['head']['kernel']) and critic['head']['bias'] == 0
  assert critic['head']['kernel'].dtype == jnp.float32
  axes = value.axes(CONFIG, kind)
  ranks = jax.tree.map(len, axes, is_leaf=is_axes)
  assert ranks == jax.tree.map(lambda x: x.ndim, critic)
  if kind == 'shared':
    assert set(critic) == {'head'}
    return
  # The output head of an untied policy is no part of the trunk.
  assert set(critic['trunk']) == {'embed', 'blocks', 'final_norm'}
  jax.tree.map(
      np.testing.assert_array_equal,
      critic['trunk'],
      {name: params[name] for name in critic['trunk']},
  )


# Three rows whose 2, 2 and 1 trained tokens cost 1, 3 and 8 each.
VALUE_LOSS = {
    'token-mean': 16 / 5,
    'seq-mean-token-mean': (1 + 3 + 8) / 3,
    'seq-mean-token-sum': 16 / 3,
    'seq-mean-token-sum-norm': 16 / 3 / 100,
    'token-sum': 16,
    'prompt-mean': ((2 + 6) / 4 + 8) / 2,
}


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_the_value_loss_is_aggregated_over_tokens_with_a_value(aggregation):
  """Rows of 100, 10 and 5 sampled tokens, of which turn starts alone count."""
  sampled, trained = np.array([100, 10, 5]), np.array([2, 2, 1])
  place = np.arange(104)[None]
  batch = trajectory(rows=3, length=104, padding=0).replace(
      length=sampled + 1,
      action_mask=(place >= 1) & (place <= sampled[:, None]),
      group=np.array([0, 0, 1], np.int32),
  )
  error = np.sqrt([2, 6, 16], dtype=np.float32)[:, None]
  scores, advantages = scored(batch)
  advantages = advantages.replace(
      value_targets=np.broadcast_to(error, batch.tokens.shape),
      # The token before the first sampled one is no token with a value.
      value_mask=place <= trained[:, None],
  )
  shape = dict(size=104, micro_batch=1, num_micro=3)
  plan = pack.plan_pack(batch.length, batch.weight, np.ones(3, bool), **shape)
  packed = pack.pack(
      plan,
      batch,
      scores,
      advantages,
      **shape,
      aggregation=aggregation,
      norm_length=100.0,
  )
  loss, _ = value_loss(
      jnp.zeros(packed.tokens.shape), packed, LossOptions(value_clip=0.0)
  )
  np.testing.assert_allclose(
      float(loss.value()), VALUE_LOSS[aggregation], rtol=1e-6
  )


def test_explained_variance_by_hand():
  batch = trajectory(rows=2, length=6, padding=0)
  mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0]], bool)
  batch = batch.replace(action_mask=mask)
  target = np.where(mask, [[9, 1, 2, 9, 3, 9], [9, 9, 4, 5, 9, 9]], np.nan)
  # Var of 1..5 is 2.5; what is left, 0 0 0 0 1, has variance 0.2.
  values = np.where(mask, [[9, 1, 2, 9, 3, 9], [9, 9, 4, 4, 9, 9]], np.nan)

  def explained(values, value_mask=None, target=target):
    mean = explained_variance(
        batch,
        Scores(None, values=values),
        Advantages(None, value_targets=target, value_mask=value_mask),
    )
    return float(mean.value())

  np.testing.assert_allclose(explained(values), 1 - 0.2 / 2.5, rtol=1e-6)
  assert explained(np.full((2, 6), 7.0)) == 0
  assert explained(-values) < 0
  # Without the fifth the critic is right.
  fifth = np.zeros((2, 6), bool)
  fifth[1, 3] = True
  np.testing.assert_allclose(explained(values, ~fifth), 1, rtol=1e-6)
  assert explained(values, target=np.ones((2, 6))) == 0
