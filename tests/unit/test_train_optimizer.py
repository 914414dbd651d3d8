"""Optimizers: masks, schedules, and Muon on layer-stacked leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agent_rl_jax.train import optimizer

AXES = {
    'embed': {'table': ('vocab', 'embed')},
    'blocks': {
        'norm': {'scale': ('layers', 'norm')},
        'q': {'kernel': ('layers', 'embed', 'heads')},
        'bias': ('layers', 'heads'),
    },
    'final': {'scale': ('norm',)},
}


def _params(seed=0, layers=3):
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  draw = lambda *shape: jax.random.normal(next(keys), shape)
  return {
      'embed': {'table': draw(11, 8)},
      'blocks': {
          'norm': {'scale': draw(layers, 8)},
          'q': {'kernel': draw(layers, 8, 12)},
          'bias': draw(layers, 12),
      },
      'final': {'scale': draw(8)},
  }


def test_mask_names_matrices_only():
  mask = optimizer.matrix_mask(AXES)
  assert mask == {
      'embed': {'table': False},
      'blocks': {
          'norm': {'scale': False},
          'q': {'kernel': True},
          # A stacked bias has rank 2 and is still no matrix.
          'bias': False,
      },
      'final': {'scale': False},
  }


def test_stacked_muon_equals_muon_of_each_layer():
  options = optimizer.OptimizerOptions(
      name='muon', lr=0.02, weight_decay=0.1, eps=1e-8
  )
  params = _params()
  tx = optimizer.make_optimizer(options, AXES)
  state, update = tx.init(params), jax.jit(tx.update)
  single = optax.contrib.muon(0.02, weight_decay=0.1)
  update_one = jax.jit(single.update)
  kernels = [params['blocks']['q']['kernel'][i] for i in range(3)]
  states = [single.init({'w': kernel}) for kernel in kernels]
  for step in range(3):
    grads = _params(seed=10 + step)
    updates, state = update(grads, state, params)
    for i in range(3):
      want, states[i] = update_one(
          {'w': grads['blocks']['q']['kernel'][i]},
          states[i],
          {'w': kernels[i]},
      )
      np.testing.assert_allclose(
          updates['blocks']['q']['kernel'][i], want['w'], rtol=1e-5, atol=1e-7
      )


def test_muon_leaves_embedding_norms_and_biases_to_adam():
  options = optimizer.OptimizerOptions(name='muon', lr=0.02)
  params = _params()
  tx = optimizer.make_optimizer(options, AXES)
  grads = _params(seed=5)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  # The first (Nesterov) Adam update has one magnitude whatever the gradient;
  # an orthogonalized one has not.
  for leaf in (
      updates['embed']['table'],
      updates['blocks']['norm']['scale'],
      updates['blocks']['bias'],
      updates['final']['scale'],
  ):
    magnitude = np.abs(np.asarray(leaf))
    np.testing.assert_allclose(magnitude, magnitude.max(), rtol=1e-3)
  kernel = np.abs(np.asarray(updates['blocks']['q']['kernel']))
  assert kernel.min() < 0.5 * kernel.max()


@pytest.mark.parametrize('name', sorted(optimizer.OPTIMIZERS))
def test_decay_touches_matrices_only(name):
  options = optimizer.OptimizerOptions(name=name, lr=0.1, weight_decay=0.5)
  params = _params()
  tx = optimizer.make_optimizer(options, AXES)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
  moved = jax.tree.map(lambda x: bool(jnp.any(x != 0)), updates)
  assert moved == optimizer.matrix_mask(AXES)
  np.testing.assert_allclose(
      updates['blocks']['q']['kernel'],
      -0.05 * params['blocks']['q']['kernel'],
      rtol=1e-5,
  )


def test_adamw_first_update_by_hand():
  options = optimizer.OptimizerOptions(lr=0.1, eps=1e-5)
  params = {'w': jnp.array([1.0, 2.0])}
  tx = optimizer.make_optimizer(options, {'w': ('embed',)})
  grads = {'w': jnp.array([0.5, -2e-5])}
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  # m_hat = g, v_hat = g^2: -lr g / (|g| + eps).
  want = [-0.1 * 0.5 / (0.5 + 1e-5), 0.1 * 2e-5 / (2e-5 + 1e-5)]
  np.testing.assert_allclose(updates['w'], want, rtol=1e-4)


def test_schedules_by_hand():
  make = lambda **kw: optimizer.OptimizerOptions(lr=2.0, **kw)
  rate = lambda options, count: float(optimizer.learning_rate(options, count))
  constant = make(warmup=4)
  assert [rate(constant, i) for i in (0, 1, 3, 4, 99)] == [0.5, 1, 2, 2, 2]
  linear = make(schedule='linear', warmup=2, total=6, final=0.5)
  np.testing.assert_allclose(
      [rate(linear, i) for i in (0, 1, 2, 4, 6, 9)], [1, 2, 2, 1.5, 1, 1]
  )
  cosine = make(schedule='cosine', total=4)
  np.testing.assert_allclose(
      [rate(cosine, i) for i in (0, 2, 4, 5)], [2, 1, 0, 0], atol=1e-6
  )


@pytest.mark.parametrize(
    'options, word',
    [
        ({'name': 'adam'}, 'adamw'),
        ({'schedule': 'exp'}, 'cosine'),
        ({'lr': -1.0}, 'lr=-1.0'),
        ({'lr': float('nan')}, 'lr=nan'),
        ({'b1': 1.0}, 'b1=1.0'),
        ({'eps': 0.0}, 'eps=0.0'),
        ({'schedule': 'linear', 'warmup': 5, 'total': 5}, 'total=5'),
    ],
)
def test_bad_options_name_the_value(options, word):
  with pytest.raises(ValueError, match=word):
    optimizer.OptimizerOptions(**options)
