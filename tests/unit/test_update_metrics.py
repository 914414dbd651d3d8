"""What an iteration tells of its updates: sums, extremes, gaps, the last."""

import types as pytypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.batch import Extreme, LossBatch, Mean, Scores
from agent_rl_jax.train.loop import Trainer
from agent_rl_jax.train.metrics import finalize
from agent_rl_jax.train.score import logprob_gap
from agent_rl_jax.train.step import drift_metrics
from tests.train_cases import trajectory


def _mean(total, count):
  return Mean(np.float32(total), np.float32(count))


def _sums(clipped, low, high, *, tokens=2.0, own=1.0):
  """What an update reports, `clipped` of its tokens clipped."""
  return {
      'train/loss': _mean(0.5 * tokens, tokens),
      'policy/clip_fraction': _mean(clipped, tokens),
      'policy/approx_kl': _mean(clipped / 10, tokens),
      'policy/ratio_max': Extreme(np.float32(high)),
      'policy/ratio_min': Extreme(np.float32(-low), sign=-1),
      'policy/drift': _mean(1.0, tokens),
      'policy/drift_max': Extreme(np.float32(0.7)),
      'policy/logprob_gap': _mean(0.25 * own, own),
      'policy/logprob_gap_max': Extreme(np.float32(0.25 if own else -np.inf)),
  }


FIRST, SECOND = _sums(0, 1.0, 1.0), _sums(1, 0.5, 50.0)


def _told(
    updates=(FIRST, SECOND), version=(3, 3), old_logprobs='sampler', owns=None
):
  """Metrics of two updates, of one row each, in iteration 3."""
  trainer = object.__new__(Trainer)
  trainer.train = pytypes.SimpleNamespace(
      prompts=2, epochs=1, mini_batches=2, old_logprobs=old_logprobs
  )
  trainer.parts = pytypes.SimpleNamespace(
      settings=pytypes.SimpleNamespace(
          seed=0, filter=pytypes.SimpleNamespace(name='none')
      )
  )
  left = [dict(sums) for sums in updates]

  def run(state, *args, own, **kwargs):
    if owns is not None:
      owns.append(own.tolist())
    return state, left.pop(0)

  trainer.update = pytypes.SimpleNamespace(run=run)
  host = pytypes.SimpleNamespace(
      group=np.arange(2),
      length=np.array([4, 4]),
      weight=np.ones(2),
      policy_version=np.array(version)[:, None],
  )
  _, sums = trainer._updates(None, None, None, None, None, host, 3, 0.0)
  assert not left
  return finalize(sums)


def test_extremes_are_those_of_all_updates_and_means_are_means():
  told = _told((SECOND, FIRST))
  assert told['policy/ratio_max'] == 50 and told['policy/ratio_min'] == 0.5
  assert told['policy/clip_fraction'] == 0.25
  assert told['policy/drift'] == 0.5
  assert told['policy/drift_max'] == pytest.approx(0.7)


def test_the_last_update_is_told_by_itself():
  told = _told()
  last = {k: v for k, v in told.items() if k.startswith('last_update/')}
  assert last == {
      'last_update/clip_fraction': 0.5,
      'last_update/approx_kl': pytest.approx(0.05),
      'last_update/ratio_max': 50.0,
      'last_update/ratio_min': 0.5,
  }
  # An update without tokens says nothing.
  none = _sums(0, np.inf, -np.inf, tokens=0.0)
  assert {k: v for k, v in _told((SECOND, none)).items() if k in last} == last
  empty = _told((none, none))
  assert {empty[name] for name in last} == {0}


def test_with_the_samplers_log_probs_the_gap_is_the_first_update_s():
  owns = []
  told = _told((FIRST, _sums(1, 0.5, 50.0, own=9.0)), (3, 2), owns=owns)
  assert told['policy/logprob_gap'] == told['policy/logprob_gap_max'] == 0.25
  assert owns == [[True, False]] * 2


def test_without_rows_of_this_policy_in_the_first_update_there_is_no_gap():
  told = _told((_sums(0, 1.0, 1.0, own=0.0), SECOND))
  assert not [name for name in told if 'gap' in name]


def test_recomputed_ones_have_a_gap_of_their_own():
  assert not [name for name in _told(old_logprobs='recompute') if 'gap' in name]


def _recomputed_gap(version, old_logprobs='recompute', **changes):
  """In iteration 3, of rows whose sampled tokens differ by 1 and by 5."""
  trainer = object.__new__(Trainer)
  trainer.train = pytypes.SimpleNamespace(old_logprobs=old_logprobs)
  trainer.update = pytypes.SimpleNamespace(put=lambda x: x)
  batch = trajectory(rows=2, length=6, padding=0).replace(
      policy_version=np.full((2, 6), np.array(version)[:, None]), **changes
  )
  off = np.where(batch.action_mask, np.array([[1], [5]]), 100)
  scores = Scores((batch.sampler_logprobs - off).astype(np.float32))
  return finalize(trainer._gap(scores, batch, batch, 3))


def test_a_recomputed_gap_is_of_this_policy_s_rows_or_absent():
  name = 'policy/logprob_gap'
  close = lambda x: pytest.approx(x, abs=1e-5)
  assert _recomputed_gap((3, 2)) == {name: close(1), f'{name}_max': close(1)}
  assert _recomputed_gap((3, 3))[f'{name}_max'] == close(5)
  # 0 would read as perfect agreement.
  assert _recomputed_gap((2, 2)) == {}
  assert _recomputed_gap((3, 2), valid=np.array([False, True])) == {}
  assert _recomputed_gap((3, 3), 'sampler') == {}


def test_the_maximum_of_no_gap_is_of_nothing():
  """So that it adds nothing to another's, where a Mean would count 1."""
  batch = trajectory(rows=2, length=6, padding=0)
  nobody = batch.replace(valid=np.zeros(2, bool))
  gap = logprob_gap(nobody, batch.sampler_logprobs)
  assert gap['policy/logprob_gap'].count == 0
  assert np.isneginf(gap['policy/logprob_gap_max'].largest)


def test_fetched_numbers_are_divided_on_the_host():
  for metric in (_mean(1, 4), Extreme(np.float32(0.25))):
    assert isinstance(metric.value(), (np.ndarray, np.generic))
    inside = jax.jit(lambda m: m.value())(metric)
    assert isinstance(inside, jax.Array)
    assert float(metric.value()) == float(inside) == 0.25
  # In float64: a third of float32 is another number.
  assert finalize({'a': _mean(1, 3)}) == {'a': 1 / 3}


def test_finalize_and_extremes():
  three = Extreme(np.float32(3.0)) + Extreme(np.float32(-np.inf))
  least = Extreme(np.float32(-3.0), -1) + Extreme(np.float32(-2.0), -1)
  # Fetched numbers stay on the host, where nothing compiles.
  assert isinstance(three.largest, np.generic)
  none = Extreme(np.float32(-np.inf), -1)
  got = finalize({'a': three, 'b': least, 'c': none, 'd': _mean(1, 0)})
  assert got == {'a': 3.0, 'b': 2.0, 'c': 0.0, 'd': 0.0}
  assert (float(least.value()), float(none.value())) == (2.0, 0.0)
  bad = Extreme(jnp.float32(1.0)) + Extreme(jnp.float32(jnp.nan))
  assert np.isnan(finalize({'bad': bad})['bad'])


def test_drift_counts_every_row_and_the_gap_own_ones():
  """Gaps 1 and 3 in own tokens, 5 in a stale one; 100 and NaN not counted."""
  zeros = np.zeros((1, 5), np.float32)
  batch = LossBatch(
      tokens=zeros,
      positions=zeros,
      segment=zeros,
      mask=np.array([[1, 1, 1, 0, 1]], bool),
      advantages=zeros,
      old_logprobs=zeros,
      sampler_logprobs=np.array([[-1, -3, 5, 100, np.nan]], np.float32),
      weight=np.array([[1, 1, 1, 1, 0]], np.float32),
      row=zeros,
      group=zeros,
      own=np.array([[1, 1, 0, 1, 1]], bool),
  )
  told = finalize(drift_metrics(jnp.zeros((1, 5)), batch))
  assert told == {
      'policy/drift': 3.0,
      'policy/drift_max': 5.0,
      'policy/logprob_gap': 2.0,
      'policy/logprob_gap_max': 3.0,
  }
  whole = finalize(drift_metrics(jnp.zeros((1, 5)), batch.replace(own=None)))
  assert whole['policy/logprob_gap'] == whole['policy/drift'] == 3.0
