"""The train step with a critic: its gradient, clips, warm-up and scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agent_rl_jax.algorithms.losses import policy_loss
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.models import policy, value
from agent_rl_jax.models.logprobs import token_logprobs
from agent_rl_jax.train import score
from agent_rl_jax.train.step import make_gradient, make_train_step
from tests.critic_cases import (
    COEF,
    device,
    host,
    make_state,
    make_tx,
    options,
    packed,
    same_bits,
    with_values,
)
from tests.train_cases import CONFIG, LENGTH, ROWS, trajectory

KINDS = ('own', 'shared')
LOSS = LossOptions(aggregation='token-mean', value_clip=0.5)
ZERO = np.float32(0)


@functools.cache
def _gradient(kind, stop_gradient=False, loss=LOSS):
  return jax.jit(
      make_gradient(
          CONFIG, loss, critic=options(kind, stop_gradient=stop_gradient)
      )
  )


@functools.cache
def _trainable(kind):
  return host(make_state(kind, make_tx(kind)).trainable)


# From the squared errors [B, T], 0 where no value is trained, and each row's
# number of trained ones, as the papers have it.
BY_HAND = {
    'token-mean': lambda error, n: jnp.sum(error) / n.sum(),
    'seq-mean-token-mean': lambda error, n: jnp.mean(
        jnp.sum(error, axis=1)[n > 0] / n[n > 0]
    ),
    'seq-mean-token-sum': lambda error, n: jnp.mean(
        jnp.sum(error, axis=1)[n > 0]
    ),
}


def _by_hand(kind, loss):
  """Each loss divided by its own count, whole and unpacked: (grads, losses).

  The value loss is made of the trajectory's rows; only the policy's reads the
  LossBatch and its weights.
  """
  batch = trajectory()
  old, targets = with_values(batch, turn_starts=True)
  starts = targets.value_mask
  whole, _ = packed(LENGTH, ROWS, packing=False, aggregation=loss.aggregation)
  whole = jax.tree.map(lambda x: x[0], whole)
  place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
  segment = (place < batch.length[:, None]).astype(np.int32)

  def losses(trainable):
    params, critic = trainable['policy'], trainable['critic']
    logprobs, entropy = token_logprobs(
        CONFIG, params, whole.tokens, whole.positions, whole.segment
    )
    policy_term, _ = policy_loss(logprobs, entropy, whole, loss, 0.0)
    trunk = critic['trunk'] if kind == 'own' else params
    x = policy.hidden(CONFIG, trunk, batch.tokens, place, segment)
    values = value.hidden_values(critic['head'], x, segment)
    near = jnp.clip(
        values, old.values - loss.value_clip, old.values + loss.value_clip
    )
    error = jnp.maximum(
        (values - targets.value_targets) ** 2,
        (near - targets.value_targets) ** 2,
    )
    error = jnp.where(starts, error, 0) / 2
    parts = (
        policy_term.value(),
        BY_HAND[loss.aggregation](error, starts.sum(axis=1)),
    )
    return parts[0] + COEF * parts[1], parts

  return jax.jit(jax.grad(losses, has_aux=True))(_trainable(kind))


def _close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    size = np.linalg.norm(np.asarray(y, np.float64)) + 1e-7
    assert np.linalg.norm(np.asarray(x, np.float64) - y) <= 1e-5 * size


@pytest.mark.parametrize(
    'kind, aggregation',
    [
        ('own', 'token-mean'),
        ('shared', 'token-mean'),
        ('shared', 'seq-mean-token-mean'),
        ('own', 'seq-mean-token-sum'),
    ],
)
def test_packed_micro_batches_give_the_gradient_by_hand(kind, aggregation):
  loss = dataclasses.replace(LOSS, aggregation=aggregation)
  want, losses = _by_hand(kind, loss)
  assert float(optax.tree.norm(want['critic'])) > 0.01
  batch, num_micro = packed(24, 2, aggregation=aggregation)
  assert num_micro > 1
  grads, metrics = _gradient(kind, loss=loss)(
      _trainable(kind), batch, num_micro, ZERO
  )
  _close(grads, want)
  for name, loss in zip(('train/loss', 'value/loss'), losses, strict=True):
    np.testing.assert_allclose(
        float(metrics[name].value()), float(loss), rtol=1e-5
    )
  counts = [float(metrics[f'{area}/loss'].count) for area in ('train', 'value')]
  if aggregation == 'token-mean':
    assert counts[0] > 1.5 * counts[1] > 0
  else:
    # Rows, whether all their tokens have a value or some.
    np.testing.assert_allclose(counts, trajectory().valid.sum(), rtol=1e-6)


def test_values_outside_the_mask_and_unread_micro_batches_do_not_matter():
  batch, num_micro = packed(24, 2)
  run = lambda b: _gradient('own')(_trainable('own'), b, num_micro, ZERO)[0]
  want = run(batch)
  off = batch.value_weight == 0
  spoiled = batch.replace(
      value_targets=jnp.where(off, jnp.nan, batch.value_targets),
      old_values=jnp.where(off, jnp.inf, batch.old_values),
  )
  same_bits(run(spoiled), want)
  read = np.arange(batch.tokens.shape[0])[:, None, None] < num_micro
  unread = jax.tree.map(
      lambda x: jnp.where(read, x, jnp.ones((), x.dtype)), batch
  )
  same_bits(run(unread), want)
  trained = batch.replace(value_targets=batch.value_targets + 1)
  with pytest.raises(AssertionError):
    same_bits(run(trained), want)


def test_own_and_shared_trunks():
  """The value loss reaches the policy on a shared trunk alone."""
  batch, num_micro = packed(24, 2)
  run = lambda kind, **kw: _gradient(kind, **kw)(
      _trainable(kind), batch, num_micro, ZERO
  )[0]
  own, shared = run('own'), run('shared')
  stopped = run('shared', stop_gradient=True)
  # Both trunks are equal here, and so are the heads.
  _close(own['critic']['head'], shared['critic']['head'])
  _close(stopped['critic'], shared['critic'])
  _close(stopped['policy'], own['policy'])
  total = jax.tree.map(
      jnp.add, {**own['policy'], 'head': 0}, {**own['critic']['trunk'], 'head': 0}
  )  # fmt: skip
  _close({**shared['policy'], 'head': 0}, total)
  with pytest.raises(AssertionError):
    _close(shared['policy'], own['policy'])


@pytest.mark.parametrize('kind', KINDS)
def test_warm_up_moves_the_critic_alone(kind):
  """Three updates, two of warm-up; then both move, each clipped by itself."""
  limits = {'policy': 0.05, 'critic': 0.02}
  tx = make_tx(kind, policy_lr=0.5, critic_lr=0.25, b1=0.9)
  step = make_train_step(
      CONFIG,
      tx,
      LOSS,
      max_grad_norm=limits['policy'],
      critic=options(kind, warmup_updates=2),
      critic_grad_norm=limits['critic'],
  )
  batch, num_micro = packed(24, 2)
  state = make_state(kind, tx)
  seen, reports = [host(state)], []
  for micro in (num_micro, num_micro, num_micro, np.int32(0)):
    state, metrics = step(state, batch, micro, ZERO)
    seen.append(host(state))
    reports.append(host(metrics))
  assert step._cache_size() == 1
  first, one, two, three, last = seen
  for warm in (one, two):
    same_bits(warm.trainable['policy'], first.trainable['policy'])
    same_bits(warm.opt_state['policy'], first.opt_state['policy'])
  norm = lambda a, b, key: float(
      optax.tree.norm(
          jax.tree.map(jnp.subtract, a.trainable[key], b.trainable[key])
      )
  )
  # The first step of SGD is rate times the clipped gradient.
  np.testing.assert_allclose(norm(one, first, 'critic'), 0.25 * 0.02, rtol=1e-4)
  np.testing.assert_allclose(norm(three, two, 'policy'), 0.5 * 0.05, rtol=1e-4)
  assert norm(two, one, 'critic') > 0 and norm(three, two, 'critic') > 0
  # Without tokens nothing moves, momentum or not.
  same_bits(last.trainable, three.trainable)
  same_bits(last.opt_state, three.opt_state)
  assert [int(s.skipped) for s in seen] == [0, 0, 0, 0, 1]
  for area in ('train', 'value'):
    assert float(reports[0][f'{area}/clipped'].value()) == 1
  assert reports[0]['train/grad_norm'].total > limits['policy']
  assert reports[0]['value/grad_norm'].total > limits['critic']


def test_an_update_that_is_not_finite_changes_neither():
  tx = make_tx('own', name='adamw')
  step = make_train_step(CONFIG, tx, LOSS, critic=options('own'))
  batch, num_micro = packed(24, 2)
  place = tuple(np.argwhere(np.asarray(batch.value_weight))[0])
  spoiled = batch.replace(
      value_targets=batch.value_targets.at[place].set(np.nan)
  )
  first = host(make_state('own', tx))
  state, metrics = step(device(first), spoiled, num_micro, ZERO)
  same_bits(state.trainable, first.trainable)
  same_bits(state.opt_state, first.opt_state)
  assert int(state.skipped) == 1
  assert float(metrics['train/skipped'].total) == 1
  assert float(metrics['value/grad_norm'].count) == 0
  state, metrics = step(state, batch, num_micro, ZERO)
  assert int(state.skipped) == 1
  with pytest.raises(AssertionError):
    same_bits(state.trainable['critic'], first.trainable['critic'])


@pytest.mark.parametrize(
    'kind, recompute', [('own', True), ('shared', True), ('shared', False)]
)
def test_scores_hold_the_values(kind, recompute):
  state = make_state(kind, make_tx(kind), reference=True)
  batch = trajectory()
  plain = score.make_score_step(CONFIG, micro_batch=5, temperature=0.7)
  step = score.make_value_step(
      CONFIG, micro_batch=5, logprobs=recompute, temperature=0.7
  )
  scores = score.score_batch(
      plain, state, batch, np.int32(2), recompute, value_step=step
  )
  want = plain(state.trainable['policy'], batch.tokens, batch.length, 2)
  old = want if recompute else batch.sampler_logprobs
  np.testing.assert_allclose(scores.old_logprobs, old, atol=1e-6)
  np.testing.assert_allclose(scores.reference_logprobs, want, atol=1e-6)
  place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
  inside = place < batch.length[:, None]
  alone = jax.jit(lambda *rows: value.token_values(CONFIG, *rows))(
      state.trainable, batch.tokens, place, inside.astype(np.int32)
  )
  np.testing.assert_allclose(scores.values, alone, atol=1e-5)
  assert np.all((np.asarray(scores.values) != 0) == (inside & (place > 0)))
