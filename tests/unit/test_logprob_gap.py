"""The gap of sampler and trainer is told of rows at equal weights only."""

import types as pytypes

import numpy as np
import pytest

from agent_rl_jax.batch import Mean
from agent_rl_jax.train.loop import Trainer

DRIFT = {'policy/drift': Mean(1.0, 2.0), 'policy/drift_max': Mean(0.7, 1.0)}


def _told(version, weight=(1.0, 1.0), old_logprobs='sampler'):
  """Names of the sums of two updates, of one row each, in iteration 3."""
  trainer = object.__new__(Trainer)
  trainer.train = pytypes.SimpleNamespace(
      prompts=2, epochs=1, mini_batches=2, old_logprobs=old_logprobs
  )
  trainer.parts = pytypes.SimpleNamespace(
      settings=pytypes.SimpleNamespace(
          seed=0, filter=pytypes.SimpleNamespace(name='none')
      )
  )
  trainer.update = pytypes.SimpleNamespace(
      run=lambda state, *args, **kwargs: (state, dict(DRIFT))
  )
  host = pytypes.SimpleNamespace(
      group=np.arange(2),
      length=np.array([4, 4]),
      weight=np.array(weight),
      policy_version=np.array(version)[:, None],
  )
  _, sums = trainer._updates(None, None, None, None, None, host, 3, 0.0)
  return sums


@pytest.mark.parametrize('weight', [(1.0, 1.0), (0.0, 1.0)])
def test_with_the_samplers_log_probs_it_is_the_first_update_s_drift(weight):
  sums = _told((3, 3), weight)
  assert sums['policy/logprob_gap'] == DRIFT['policy/drift']
  assert sums['policy/drift'].count == 4


def test_drift_of_an_older_policys_rows_is_no_gap():
  sums = _told((2, 2))
  assert not [name for name in sums if 'gap' in name]
  assert sums['policy/drift'].count == 4
  # Rows outside the loss are in no drift.
  assert 'policy/logprob_gap' in _told((2, 2), (0.0, 0.0))


def test_recomputed_ones_have_a_gap_of_their_own():
  assert 'policy/logprob_gap' not in _told((3, 3), old_logprobs='recompute')
