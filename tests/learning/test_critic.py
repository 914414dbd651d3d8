"""A critic learns a return that the tokens give away."""

import jax
import numpy as np
import pytest

from agent_rl_jax.algorithms import gae, value
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.train import pack, score
from agent_rl_jax.train.state import init_state
from agent_rl_jax.train.step import make_train_step
from tests.critic_cases import make_tx, options
from tests.train_cases import CONFIG, ROWS, trajectory


@pytest.mark.parametrize(
    'kind, policy_lr, updates', [('own', 1e-4, 16), ('shared', 0.01, 32)]
)
def test_explained_variance_rises(kind, policy_lr, updates):
  """Rows of odd tokens return 1, rows of even ones 0.

  Every batch is new, so nothing is learned by heart.
  """
  algorithm = AlgorithmOptions(advantage='gae', value_clip=0.0)
  tx = make_tx(kind, name='adamw', policy_lr=policy_lr, critic_lr=0.01)
  state = init_state(CONFIG, tx, jax.random.key(0), critic=kind)
  shape = dict(size=16, micro_batch=ROWS, num_micro=1)
  make = pack.make_pack(aggregation='token-mean', **shape)
  values = score.make_value_step(CONFIG, micro_batch=ROWS, logprobs=True)
  plain = score.make_score_step(CONFIG, micro_batch=ROWS)
  step = make_train_step(
      CONFIG, tx, algorithm, critic=options(kind), critic_grad_norm=1.0
  )
  estimate = jax.jit(lambda b, s: gae.gae(b, s, None, algorithm))
  explained = jax.jit(value.explained_variance)
  curve = []
  for update in range(updates):
    batch = trajectory(seed=update, padding=0)
    odd = np.random.default_rng(update).integers(0, 2, ROWS)
    batch = batch.replace(
        tokens=(batch.tokens // 2 * 2 + odd[:, None]).astype(np.int32),
        returns=odd.astype(np.float32),
    )
    scores = score.score_batch(
        plain, state, batch, np.int32(1), value_step=values
    )
    advantages = estimate(batch, scores)
    curve.append(float(explained(batch, scores, advantages).value()))
    plan = pack.plan_pack(
        batch.length, batch.weight, np.ones(ROWS, bool), **shape, packing=False
    )
    state, _ = step(
        state, make(plan, batch, scores, advantages), plan.num_micro, 0.0
    )
  assert curve[0] == 0
  assert np.mean(curve[-5:]) > 0.5, curve
