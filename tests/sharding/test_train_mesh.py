"""The train room on a mesh: same numbers, pinned shardings, other layouts."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.parallel.mesh import (
    MeshOptions,
    make_mesh,
    make_rollout_mesh,
)
from agent_rl_jax.parallel.rules import ROLLOUT_RULES, Partition
from agent_rl_jax.train import optimizer, pack, publish, score
from agent_rl_jax.train.state import (
    abstract_state,
    init_state,
    state_shardings,
    trainable_axes,
)
from agent_rl_jax.train.step import make_train_step
from tests.train_cases import CONFIG, ROWS, scored, trajectory

OPTIONS = LossOptions(kl='k3', kl_coef=0.1)
# SGD shows the gradient itself; the moments of Adam are checked by sharding.
SGD = optimizer.make_optimizer(
    optimizer.OptimizerOptions(name='sgd', lr=0.5, b1=0.9),
    trainable_axes(CONFIG),
)
SHAPE = dict(size=24, micro_batch=4, num_micro=3)


def _mesh():
  return Partition(make_mesh(MeshOptions(data=2, fsdp=2, tensor=2)))


def _run(part):
  """Two updates from the same start: (state, metrics, scores, batch)."""
  batch = trajectory()
  state = init_state(CONFIG, SGD, jax.random.key(3), reference=True, part=part)
  score_step = score.make_score_step(CONFIG, micro_batch=4, part=part)
  scores = score.score_batch(score_step, state, batch, np.int32(3))
  scores = scores.replace(old_logprobs=scored(batch)[0].old_logprobs)
  plan = pack.plan_pack(
      batch.length, batch.weight, np.ones(ROWS, bool), **SHAPE
  )
  make = pack.make_pack(**SHAPE, aggregation='token-mean', part=part)
  loss_batch = make(plan, batch, scores, scored(batch)[1])
  step = make_train_step(
      CONFIG, SGD, OPTIONS, max_grad_norm=0.5, reference=True, part=part
  )
  for _ in range(2):
    state, metrics = step(state, loss_batch, plan.num_micro, np.float32(0.1))
  assert step._cache_size() == 1
  return state, metrics, scores, loss_batch


@pytest.fixture(scope='module')
def meshed():
  return _run(_mesh())


def test_mesh_equals_one_device(meshed):
  state, metrics, scores, loss_batch = meshed
  want, want_metrics, want_scores, want_batch = _run(Partition())
  for a, b in zip(
      jax.tree.leaves(loss_batch), jax.tree.leaves(want_batch), strict=True
  ):
    if a.dtype != np.float32:
      np.testing.assert_array_equal(a, b)
  np.testing.assert_allclose(
      scores.reference_logprobs, want_scores.reference_logprobs, atol=1e-5
  )
  for a, b in zip(
      jax.tree.leaves(state.trainable),
      jax.tree.leaves(want.trainable),
      strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)
  assert int(state.step) == 2
  for name, mean in want_metrics.items():
    np.testing.assert_allclose(
        float(metrics[name].value()), float(mean.value()), rtol=1e-4,
        atol=1e-6, err_msg=name,
    )  # fmt: skip


POLICY_SPECS = {
    'blocks/attn_norm/scale': P(),
    'blocks/down/kernel': P(None, 'tensor', 'fsdp'),
    'blocks/gate/kernel': P(None, 'fsdp', 'tensor'),
    'blocks/k/kernel': P(None, 'fsdp', 'tensor'),
    'blocks/k_norm/scale': P(),
    'blocks/mlp_norm/scale': P(),
    'blocks/o/kernel': P(None, 'tensor', 'fsdp'),
    'blocks/q/kernel': P(None, 'fsdp', 'tensor'),
    'blocks/q_norm/scale': P(),
    'blocks/up/kernel': P(None, 'fsdp', 'tensor'),
    'blocks/v/kernel': P(None, 'fsdp', 'tensor'),
    'embed/table': P('tensor', 'fsdp'),
    'final_norm/scale': P(),
    'head/table': P('tensor', 'fsdp'),
}


def _specs(tree):
  """PartitionSpec of each leaf by path, trailing Nones aside."""

  def short(spec):
    parts = list(spec)
    while parts and parts[-1] is None:
      parts.pop()
    return P(*parts)

  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): short(
          getattr(leaf, 'sharding', leaf).spec
      )
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_output_shardings_of_the_step(meshed):
  """A lost axis is silent, so they are listed."""
  state, metrics, scores, loss_batch = meshed
  assert _specs(state.trainable['policy']) == POLICY_SPECS
  assert _specs(state.frozen['policy']) == POLICY_SPECS
  assert set(_specs((state.step, state.skipped, metrics)).values()) == {P()}
  assert set(_specs(loss_batch).values()) == {P(None, ('data', 'fsdp'))}
  assert _specs(scores.reference_logprobs) == {'': P(('data', 'fsdp'))}


@pytest.mark.parametrize('name', sorted(optimizer.OPTIMIZERS))
def test_moments_are_sharded_as_their_parameters(name):
  tx = optimizer.make_optimizer(
      optimizer.OptimizerOptions(name=name), trainable_axes(CONFIG)
  )
  specs = _specs(state_shardings(CONFIG, tx, part=_mesh()).opt_state)
  mirrored = 0
  for path, spec in specs.items():
    _, found, parameter = path.partition('/policy/')
    if found:
      mirrored += 1
      assert spec == POLICY_SPECS[parameter], path
    else:
      assert spec == P(), path
  # AdamW has two moments of each parameter; Muon one of each matrix.
  matrices = 7
  others = len(POLICY_SPECS) - matrices
  assert (
      mirrored
      == {
          'adamw': 2 * len(POLICY_SPECS),
          'muon': matrices + 2 * others,
          'sgd': len(POLICY_SPECS),
      }[name]
  )


def test_abstract_state_is_the_state(meshed):
  state = meshed[0]
  abstract = abstract_state(CONFIG, SGD, reference=True, part=_mesh())
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for a, b in zip(
      jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_publish_changes_the_layout_and_not_the_values(meshed):
  params = meshed[0].trainable['policy']
  part = _mesh()
  rollout = Partition(make_rollout_mesh(part.mesh), ROLLOUT_RULES)
  out = publish.make_publish(CONFIG, part, rollout)(params)
  specs = _specs(out)
  assert specs['blocks/1/q/kernel'] == P(None, 'tensor')
  assert specs['blocks/0/down/kernel'] == P('tensor')
  assert specs['embed/table'] == P('tensor')
  assert out['embed']['table'].sharding.mesh.shape['data'] == 4
  np.testing.assert_array_equal(
      out['blocks'][1]['q']['kernel'], params['blocks']['q']['kernel'][1]
  )
  np.testing.assert_array_equal(out['head']['table'], params['head']['table'])
  with pytest.raises(ValueError, match='both'):
    publish.make_publish(CONFIG, part, Partition())
  other = Partition(make_mesh(MeshOptions(data=4)), ROLLOUT_RULES)
  with pytest.raises(ValueError, match='make_rollout_mesh'):
    publish.make_publish(CONFIG, part, other)
