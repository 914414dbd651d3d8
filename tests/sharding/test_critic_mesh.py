"""The critic on a mesh: same numbers, its leaves sharded as the policy's."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.parallel.mesh import MeshOptions, make_mesh
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train import optimizer, score
from agent_rl_jax.train.state import abstract_state, state_shardings
from agent_rl_jax.train.step import make_train_step
from tests.critic_cases import make_state, make_tx, options, packed
from tests.sharding.test_train_mesh import POLICY_SPECS, _specs
from tests.train_cases import CONFIG, trajectory

LOSS = LossOptions(aggregation='seq-mean-token-mean', value_clip=0.5)
HEAD_SPECS = {'head/bias': P(), 'head/kernel': P()}
TRUNK_SPECS = {
    f'trunk/{path}': spec
    for path, spec in POLICY_SPECS.items()
    if path != 'head/table'
}


def _mesh():
  return Partition(make_mesh(MeshOptions(data=2, fsdp=2, tensor=2)))


def _run(kind, part):
  """Scores, then two updates of which one warms the critic up."""
  tx = make_tx(kind, b1=0.9)
  state = make_state(kind, tx, part)
  values = score.make_value_step(
      CONFIG, micro_batch=4, logprobs=False, part=part
  )
  scores = score.score_batch(
      None, state, trajectory(), np.int32(3), False, value_step=values
  )
  step = make_train_step(
      CONFIG,
      tx,
      LOSS,
      max_grad_norm=0.5,
      critic=options(kind, warmup_updates=1),
      critic_grad_norm=0.5,
      part=part,
  )
  batch, num_micro = packed(24, 4, part=part, aggregation=LOSS.aggregation)
  for _ in range(2):
    state, metrics = step(state, batch, num_micro, np.float32(0))
  return state, metrics, scores.values


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['own', 'shared'])
def test_mesh_equals_one_device(kind):
  state, metrics, values = _run(kind, _mesh())
  want, want_metrics, want_values = _run(kind, Partition())
  np.testing.assert_allclose(values, want_values, atol=1e-5)
  for a, b in zip(
      jax.tree.leaves(state.trainable),
      jax.tree.leaves(want.trainable),
      strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=2e-6)
  for name in ('value/loss', 'value/grad_norm', 'train/loss', 'value/target'):
    np.testing.assert_allclose(
        float(metrics[name].value()), float(want_metrics[name].value()),
        rtol=1e-4, atol=1e-6, err_msg=name,
    )  # fmt: skip
  assert _specs(state.trainable['policy']) == POLICY_SPECS
  specs = TRUNK_SPECS if kind == 'own' else {}
  assert _specs(state.trainable['critic']) == HEAD_SPECS | specs
  assert _specs(values) == {'': P(('data', 'fsdp'))}
  assert set(_specs(metrics).values()) == {P()}
  abstract = abstract_state(
      CONFIG, make_tx(kind, b1=0.9), critic=kind, part=_mesh()
  )
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for a, b in zip(
      jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize('name', sorted(optimizer.OPTIMIZERS))
def test_moments_are_sharded_as_their_parameters(name):
  tx = make_tx('own', name=name)
  state = state_shardings(CONFIG, tx, critic='own', part=_mesh())
  specs = {
      'policy': POLICY_SPECS,
      'critic': HEAD_SPECS | TRUNK_SPECS,
  }
  mirrored = {'policy': set(), 'critic': set()}
  assert set(state.opt_state) == set(mirrored)
  for path, spec in _specs(state.opt_state).items():
    part = path.partition('/')[0]
    _, found, parameter = path[len(part) :].rpartition(f'/{part}/')
    if found:
      mirrored[part].add(parameter)
      assert spec == specs[part][parameter], path
    else:
      assert spec == P(), path
  assert mirrored == {part: set(specs[part]) for part in specs}
