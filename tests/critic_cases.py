"""What the tests of the critic share: batches with values, states, packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.batch import Advantages, Scores
from agent_rl_jax.train import optimizer, pack
from agent_rl_jax.train.options import CriticOptions
from agent_rl_jax.train.state import init_state, trainable_axes
from tests.train_cases import CONFIG, ROWS, scored, trajectory

COEF = 0.7
make_pack = functools.cache(pack.make_pack)


def options(kind, **changes):
  return CriticOptions(kind=kind, value_coef=COEF, **changes)


def make_tx(kind, name='sgd', policy_lr=0.5, critic_lr=0.5, **changes):
  """An optimizer of each part, with momentum."""
  keys = ('policy',) if kind == 'none' else ('policy', 'critic')
  lr = {'policy': policy_lr, 'critic': critic_lr}
  made = {
      key: optimizer.OptimizerOptions(name=name, lr=lr[key], **changes)
      for key in keys
  }
  return optimizer.make_optimizers(made, trainable_axes(CONFIG, kind))


def make_state(kind, tx, part=None, reference=False):
  """A state whose value head is not zero, so that its trunk has a gradient."""
  where = {} if part is None else {'part': part}
  state = init_state(
      CONFIG,
      tx,
      jax.random.key(3),
      critic=kind,
      reference=reference,
      **where,
  )
  if kind == 'none':
    return state
  head = state.trainable['critic']['head']
  kernel = np.random.default_rng(5).standard_normal(CONFIG.width) / 4
  kernel = jnp.asarray(kernel.astype(np.float32))
  if part is not None:
    kernel = jax.device_put(kernel, head['kernel'].sharding)
  critic = {**state.trainable['critic'], 'head': {**head, 'kernel': kernel}}
  return state.replace(trainable={**state.trainable, 'critic': critic})


def with_values(batch, turn_starts):
  """(Scores, Advantages) with old values, targets and perhaps a value mask."""
  scores, advantages = scored(batch)
  rng = np.random.default_rng(7)
  draw = lambda: rng.standard_normal(batch.tokens.shape).astype(np.float32)
  mask = batch.action_mask
  starts = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  return (
      Scores(scores.old_logprobs, values=np.where(mask, 0.3 * draw(), 0)),
      Advantages(
          advantages.advantages,
          value_targets=np.where(mask, draw(), 0),
          value_mask=starts if turn_starts else None,
      ),
  )


def packed(
    size,
    micro_batch,
    packing=True,
    turn_starts=True,
    part=None,
    aggregation='token-mean',
):
  """(LossBatch, num_micro) of the trajectory batch."""
  batch = trajectory()
  num_micro = pack.max_micro(ROWS, micro_batch)
  shape = dict(size=size, micro_batch=micro_batch, num_micro=num_micro)
  plan = pack.plan_pack(
      batch.length, batch.weight, np.ones(ROWS, bool), **shape, packing=packing
  )
  where = {} if part is None else {'part': part}
  make = make_pack(aggregation=aggregation, **shape, **where)
  out = make(plan, batch, *with_values(batch, turn_starts))
  return out, plan.num_micro


def host(tree):
  return jax.tree.map(np.array, tree)


def device(tree):
  return jax.tree.map(jnp.array, tree)


def same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
