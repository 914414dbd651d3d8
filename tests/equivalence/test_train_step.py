"""The train step: splits, packing, padding, skipping, compiling once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.train import optimizer, pack, publish, score
from agent_rl_jax.train.state import init_state, trainable_axes
from agent_rl_jax.train.step import make_gradient, make_train_step
from tests.train_cases import CONFIG, LENGTH, ROWS, scored, trajectory

KEY = jax.random.key(3)
OPTIONS = LossOptions(
    kl='k3',
    kl_coef=0.1,
    entropy_coef=0.01,
    aggregation='seq-mean-token-mean',
)


_TX = optax.adamw(1e-2)
# Compiling is what these tests spend their time on.
_make_pack = functools.cache(pack.make_pack)


@functools.cache
def _make_gradient(options):
  return jax.jit(make_gradient(CONFIG, options, temperature=0.7))


@functools.cache
def _make_step(options=OPTIONS, **kwargs):
  return make_train_step(CONFIG, _TX, options, **kwargs)


@functools.cache
def _first_state(tx, reference):
  return jax.tree.map(
      np.array, init_state(CONFIG, tx, KEY, reference=reference)
  )


def _state(tx=_TX, reference=False):
  return jax.tree.map(jnp.array, _first_state(tx, reference))


def _batch(batch, size=24, micro_batch=2, packing=True):
  num_micro = pack.max_micro(ROWS, micro_batch)
  shape = dict(size=size, micro_batch=micro_batch, num_micro=num_micro)
  chosen = np.ones(ROWS, bool)
  plan = pack.plan_pack(
      batch.length, batch.weight, chosen, **shape, packing=packing
  )
  out = _make_pack(aggregation=OPTIONS.aggregation, **shape)(
      plan, batch, *scored(batch, reference=True)
  )
  return out, plan.num_micro


def _gradient(loss_batch, num_micro, options=OPTIONS):
  state = _state()
  grads, metrics = _make_gradient(options)(
      state.trainable, loss_batch, num_micro, np.float32(0.1)
  )
  return grads, metrics


def _close(a, b):
  """Within 1e-6 as whole vectors, and each leaf within 1e-5."""
  norm = lambda x: float(np.linalg.norm(x.astype(np.float64)))
  errors, norms = [], []
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    errors.append(norm(np.asarray(x) - np.asarray(y)))
    norms.append(norm(np.asarray(y)))
    assert errors[-1] <= 1e-5 * norms[-1]
  assert np.hypot.reduce(errors) <= 1e-6 * np.hypot.reduce(norms)


def _same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope='module')
def whole():
  """Gradient of all rows in one micro-batch, one row per bin."""
  return _gradient(*_batch(trajectory(), LENGTH, ROWS, packing=False))


@pytest.mark.parametrize(
    'size, micro_batch, packing',
    [(LENGTH, 2, False), (24, 2, True)],
)
def test_micro_batches_and_packing_give_the_whole_gradient(
    whole, size, micro_batch, packing
):
  grads, metrics = _gradient(*_batch(trajectory(), size, micro_batch, packing))
  _close(grads, whole[0])
  for name in (
      'train/loss',
      'policy/entropy',
      'policy/clip_fraction',
      'policy/ratio_max',
      'policy/ratio_min',
      'policy/drift_max',
  ):
    np.testing.assert_allclose(
        float(metrics[name].value()), float(whole[1][name].value()), rtol=1e-5
    )


def test_what_is_not_an_action_does_not_reach_the_gradient():
  batch = trajectory()
  # End three rows on observations: those tokens are targets and no inputs.
  mask = batch.action_mask.copy()
  last = batch.length[:3] - 1
  mask[np.arange(3), last] = False
  batch = batch.replace(action_mask=mask)
  loss_batch, num_micro = _batch(batch)
  want, _ = _gradient(loss_batch, num_micro)

  tokens = batch.tokens.copy()
  tokens[np.arange(3), last] = (tokens[np.arange(3), last] + 7) % 32
  other, _ = _batch(batch.replace(tokens=tokens))
  assert (np.asarray(other.tokens) != np.asarray(loss_batch.tokens)).sum() == 3
  _same_bits(_gradient(other, num_micro)[0], want)

  gaps = loss_batch.segment == 0
  off = ~loss_batch.mask
  spoiled = loss_batch.replace(
      tokens=jnp.where(gaps, 9, loss_batch.tokens),
      **{
          name: jnp.where(off, jnp.nan, getattr(loss_batch, name))
          for name in (
              'advantages',
              'old_logprobs',
              'reference_logprobs',
              'sampler_logprobs',
          )
      },
  )
  _same_bits(_gradient(spoiled, num_micro)[0], want)
  # The check can fail: an action token is a target.
  tokens = batch.tokens.copy()
  ends = batch.action_mask[np.arange(ROWS), batch.length - 1]
  rows = np.flatnonzero(ends & (batch.length > 0))
  assert rows.size >= 3
  last = batch.length[rows] - 1
  tokens[rows, last] = (tokens[rows, last] + 7) % 32
  other, _ = _batch(batch.replace(tokens=tokens))
  with pytest.raises(AssertionError):
    _same_bits(_gradient(other, num_micro)[0], want)


def test_unread_micro_batches_do_not_matter():
  loss_batch, num_micro = _batch(trajectory())
  read = np.arange(loss_batch.tokens.shape[0])[:, None, None] < num_micro
  spoiled = jax.tree.map(
      lambda x: jnp.where(read, x, jnp.ones((), x.dtype)), loss_batch
  )
  _same_bits(
      _gradient(spoiled, num_micro)[0], _gradient(loss_batch, num_micro)[0]
  )


def test_skips_what_is_not_finite_and_compiles_once():
  options = optimizer.OptimizerOptions(name='muon')
  tx = optimizer.make_optimizer(options, trainable_axes(CONFIG))
  step = make_train_step(CONFIG, tx, OPTIONS, max_grad_norm=1.0)
  coef = np.float32(0.1)
  batches = [_batch(trajectory(seed, padding=seed)) for seed in (1, 2, 3)]
  assert len({int(num_micro) for _, num_micro in batches}) > 1
  loss_batch, num_micro = batches[0]
  place = tuple(np.argwhere(np.asarray(loss_batch.mask))[0])
  spoil = lambda bad: loss_batch.replace(
      advantages=loss_batch.advantages.at[place].set(bad)
  )
  spoiled = [spoil(np.nan), spoil(np.inf)]
  state = _state(tx)

  compiles = []
  listener = lambda name, *args, **kwargs: compiles.append(name)
  jax.monitoring.register_event_duration_secs_listener(listener)
  reports = []
  try:
    for some_batch, some_micro in batches:
      state, metrics = step(state, some_batch, some_micro, coef)
      reports.append(metrics)
    before = jax.tree.map(np.array, state)
    for bad in spoiled:
      state, metrics = step(state, bad, num_micro, coef)
      reports.append(metrics)
    after = jax.tree.map(np.array, state)
    # No token at all: momentum alone must not move the parameters.
    state, metrics = step(state, loss_batch, np.int32(0), coef)
    reports.append(metrics)
    last = jax.tree.map(np.array, state)
    state, metrics = step(state, loss_batch, num_micro, coef)
    reports.append(metrics)
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert compiles.count('/jax/core/compile/backend_compile_duration') == 1
  skipped = [float(report['train/skipped'].total) for report in reports]
  assert skipped == [0, 0, 0, 1, 1, 1, 0]
  # Nothing to learn from is no gradient that is not finite.
  bad = [float(report['train/nonfinite'].total) for report in reports]
  assert bad == [0, 0, 0, 1, 1, 0, 0]
  assert float(reports[5]['policy/ratio_max'].value()) == 0
  # The metric of the norm counts finite ones only.
  norms = [float(report['train/grad_norm'].count) for report in reports]
  assert norms == [1, 1, 1, 0, 0, 1, 1]
  for unchanged in (after, last):
    _same_bits(unchanged.trainable, before.trainable)
    _same_bits(unchanged.opt_state, before.opt_state)
  assert int(after.skipped) == 2 and int(after.step) == 5
  assert int(state.skipped) == 3 and int(state.step) == 7
  with pytest.raises(AssertionError):
    _same_bits(state.trainable, before.trainable)


def test_sft_learns_and_is_clipped():
  tx = optax.sgd(0.3)
  step = make_train_step(CONFIG, tx, LossOptions(loss='sft'), max_grad_norm=0.1)
  loss_batch, num_micro = _batch(trajectory())
  state, losses = _state(tx), []
  start = jax.tree.map(np.array, state.trainable)
  for _ in range(60):
    state, metrics = step(state, loss_batch, num_micro, np.float32(0))
    losses.append(float(metrics['train/loss'].value()))
    if len(losses) == 1:
      # Plain gradient descent moves by rate times the clipped norm.
      moved = jax.tree.map(lambda a, b: a - b, state.trainable, start)
      np.testing.assert_allclose(float(optax.tree.norm(moved)), 0.03, rtol=1e-3)
      assert float(metrics['train/clipped'].value()) == 1
      assert float(metrics['train/grad_norm'].value()) > 0.1
  assert 'policy/drift' not in metrics
  assert losses[0] > 3 and losses[-1] < 0.7 * losses[0], losses


def test_scores_are_those_of_the_loss():
  """Old log-probs of unchanged weights: ratio 1, KL 0, drift 0."""
  batch = trajectory()
  state = _state(reference=True)
  score_step = score.make_score_step(CONFIG, micro_batch=5, temperature=0.7)
  scores = score.score_batch(score_step, state, batch, np.int32(2))
  assert score_step._cache_size() == 1
  _same_bits(scores.old_logprobs, scores.reference_logprobs)
  outside = np.arange(LENGTH)[None] >= batch.length[:, None]
  old = np.asarray(scores.old_logprobs)
  assert not old[outside].any() and not old[:, 0].any()
  assert (old[:10][~outside[:10]] < 0).sum() == batch.length[:10].sum() - 10
  batch = batch.replace(sampler_logprobs=old * batch.action_mask)
  gap = score.logprob_gap(batch, scores.old_logprobs)
  assert float(gap['policy/logprob_gap_max'].value()) == 0
  shape = dict(size=24, micro_batch=2, num_micro=6)
  plan = pack.plan_pack(
      batch.length, batch.weight, np.ones(ROWS, bool), **shape
  )
  loss_batch = pack.make_pack(**shape, aggregation=OPTIONS.aggregation)(
      plan, batch, scores, scored(batch)[1]
  )
  step = _make_step(temperature=0.7, reference=True)
  _, metrics = step(state, loss_batch, plan.num_micro, np.float32(0.1))
  np.testing.assert_allclose(
      float(metrics['policy/ratio'].value()), 1, atol=1e-5
  )
  assert float(metrics['policy/drift_max'].value()) < 1e-5
  assert abs(float(metrics['policy/kl_reference'].value())) < 1e-6


def test_fewer_scored_micro_batches_leave_zeros():
  batch = trajectory()
  state = _state()
  step = score.make_score_step(CONFIG, micro_batch=4)
  run = lambda n: np.asarray(
      step(state.trainable['policy'], batch.tokens, batch.length, np.int32(n))
  )
  full, some = run(3), run(2)
  np.testing.assert_array_equal(some[:8], full[:8])
  assert not some[8:].any() and full[8:].any()
  np.testing.assert_array_equal(run(9), full)


def test_published_weights_survive_the_next_update():
  state = _state(reference=True)
  rollout = publish.make_publish(CONFIG)(state.trainable['policy'])
  assert len(rollout['blocks']) == CONFIG.num_layers
  before = jax.tree.map(np.array, rollout)
  want = np.array(state.trainable['policy']['blocks']['q']['kernel'][1])
  np.testing.assert_array_equal(rollout['blocks'][1]['q']['kernel'], want)
  step = _make_step(temperature=0.7, reference=True)
  step(state, *_batch(trajectory()), np.float32(0.1))
  _same_bits(rollout, before)


def test_a_state_owns_its_buffers():
  """Donating a state made from parameters leaves those parameters alone."""
  first = _state()
  params = first.trainable['policy']
  before = jax.tree.map(np.array, params)
  state = init_state(CONFIG, _TX, KEY, params=params, reference=True)
  step = _make_step(temperature=0.7, reference=True)
  for _ in range(2):
    state, _ = step(state, *_batch(trajectory()), np.float32(0.1))
  _same_bits(params, before)
  _same_bits(state.frozen['policy'], before)
  other = {**params, 'embed': {'table': jnp.zeros((3, 16))}}
  with pytest.raises(ValueError, match='embed.table has shape'):
    init_state(CONFIG, _TX, KEY, params=other)
