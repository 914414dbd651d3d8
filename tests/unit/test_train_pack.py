"""Packing: bins by hand, nothing lost, nothing twice, named mini-batches."""

import functools

import jax
import numpy as np
import pytest

from agent_rl_jax.train import pack
from tests.train_cases import scored, trajectory

SHAPE = dict(size=24, micro_batch=2, num_micro=6)
_make_pack = functools.cache(pack.make_pack)


def _packed(batch, chosen=None, packing=True, **kwargs):
  chosen = np.ones(batch.length.shape, bool) if chosen is None else chosen
  plan = pack.plan_pack(
      batch.length, batch.weight, chosen, **SHAPE, packing=packing
  )
  make = _make_pack(**SHAPE, **{'aggregation': 'token-mean', **kwargs})
  return plan, make(plan, batch, *scored(batch, reference=True))


def test_first_fit_decreasing_by_hand():
  lengths = np.array([3, 6, 5, 4, 0, 2, 9])
  keep = np.array([1, 1, 1, 1, 1, 1, 0], bool)
  bins, starts, used = pack.assign_bins(lengths, keep, size=10)
  # 6 | 5 | 4 joins 6 | 3 joins 5 | 2 joins 5+3.
  assert bins.tolist() == [1, 0, 1, 0, -1, 1, -1]
  assert starts.tolist() == [5, 0, 0, 6, 0, 8, 0]
  assert used == 2
  bins, starts, used = pack.assign_bins(lengths, keep, 10, packing=False)
  assert bins.tolist() == [0, 1, 2, 3, -1, 4, -1] and used == 5
  assert not starts.any()


def test_row_longer_than_a_bin_is_refused_by_name():
  lengths, keep = np.array([3, 11]), np.ones(2, bool)
  with pytest.raises(ValueError, match='row 1 has 11 tokens and bins hold 10'):
    pack.assign_bins(lengths, keep, 10)
  with pytest.raises(ValueError, match='11 tokens fits none'):
    pack.bin_length(lengths, (4, 10))
  assert pack.bin_length(np.array([5]), (16, 4, 8)) == 8
  assert pack.bin_length(np.array([], np.int32), (16, 4)) == 4


def test_too_few_bins_are_refused():
  ones = np.ones(5)
  with pytest.raises(ValueError, match='5 bins do not fit 2 micro-batches'):
    pack.plan_pack(ones.astype(int), ones, ones > 0, 8, 2, 2, packing=False)


@pytest.mark.parametrize('packing', [True, False])
def test_every_row_once_and_whole(packing):
  batch = trajectory()
  plan, out = _packed(batch, packing=packing)
  out = jax.tree.map(np.asarray, out)
  flat = jax.tree.map(lambda x: x.reshape(-1, SHAPE['size']), out)
  seen = []
  for b in range(flat.tokens.shape[0]):
    for segment in range(1, flat.segment[b].max() + 1):
      places = np.flatnonzero(flat.segment[b] == segment)
      length = len(places)
      assert places.tolist() == list(range(places[0], places[0] + length))
      assert flat.positions[b, places].tolist() == list(range(length))
      match = [
          r
          for r in range(len(batch.length))
          if batch.length[r] == length
          and (batch.tokens[r, :length] == flat.tokens[b, places]).all()
      ]
      assert len(match) == 1
      row = match[0]
      seen.append(row)
      np.testing.assert_array_equal(
          flat.mask[b, places], batch.action_mask[row, :length]
      )
      np.testing.assert_array_equal(
          flat.sampler_logprobs[b, places], batch.sampler_logprobs[row, :length]
      )
      assert (flat.group[b, places] == batch.group[row]).all()
      # One name for the whole row, its own within the micro-batch.
      assert len(set(flat.row[b, places])) == 1
  assert sorted(seen) == np.flatnonzero(batch.length > 0).tolist()
  gaps = flat.segment == 0
  assert not flat.tokens[gaps].any() and not flat.mask[gaps].any()
  assert (flat.row[gaps] == SHAPE['size'] * SHAPE['micro_batch'] - 1).all()
  filled = (out.segment > 0).any(axis=(1, 2))
  assert filled.tolist() == [i < plan.num_micro for i in range(len(filled))]
  names = [
      len(np.unique(out.row[m][out.segment[m] > 0]))
      for m in range(int(plan.num_micro))
  ]
  assert sum(names) == len(seen)


def test_packing_uses_fewer_micro_batches():
  batch = trajectory()
  assert (
      _packed(batch)[0].num_micro < _packed(batch, packing=False)[0].num_micro
  )


def test_rows_of_weight_zero_are_left_out():
  batch = trajectory()
  batch = batch.replace(weight=np.where(np.arange(12) == 3, 0, batch.weight))
  plan, out = _packed(batch)
  assert plan.bin[3] == -1
  assert float(out.weight.sum()) == batch.action_mask[np.arange(12) != 3].sum()


def test_rows_of_the_current_policy_are_marked():
  batch = trajectory()
  own = np.arange(12) % 3 == 0
  ones = np.ones(12, bool)
  plan = pack.plan_pack(batch.length, batch.weight, ones, **SHAPE, own_B=own)
  out = _make_pack(**SHAPE, aggregation='token-mean')(
      plan, batch, *scored(batch, reference=True)
  )
  # Advantages differ by row, so they tell which row a token is of.
  mask = np.asarray(out.mask)
  stale = scored(batch)[1].advantages[~own]
  of_stale = np.isin(np.asarray(out.advantages)[mask], stale[stale != 0])
  np.testing.assert_array_equal(np.asarray(out.own)[mask], ~of_stale)
  assert of_stale.any() and not of_stale.all()
  assert not np.asarray(out.own)[np.asarray(out.segment) == 0].any()
  _, whole = _packed(batch)
  np.testing.assert_array_equal(whole.own, np.asarray(whole.segment) > 0)


def test_weights_are_those_of_the_mini_batch():
  """Denominators count the chosen rows only, whatever else is in the batch."""
  batch = trajectory()
  chosen = np.isin(batch.group, [0, 2])
  _, out = _packed(batch, chosen, aggregation='seq-mean-token-mean')
  rows = int((chosen & (batch.length > 0)).sum())
  np.testing.assert_allclose(float(out.denominator.sum()), rows, rtol=1e-6)
  _, out = _packed(batch, chosen, aggregation='token-sum')
  np.testing.assert_allclose(float(out.denominator.sum()), 1, rtol=1e-6)


def test_mini_batches_are_whole_groups_in_a_named_permutation():
  groups = np.repeat(np.arange(7), 4)
  plan = pack.minibatch_plan(groups, 2, 3, seed=1, iteration=5)
  assert [len(part) for part in plan] == [3, 2, 2, 3, 2, 2]
  first, second = np.concatenate(plan[:3]), np.concatenate(plan[3:])
  assert sorted(first) == sorted(second) == list(range(7))
  assert first.tolist() != second.tolist()
  same = lambda **kw: [
      p.tolist()
      for p in pack.minibatch_plan(
          groups, 2, 3, **{'seed': 1, 'iteration': 5, **kw}
      )
  ]
  assert same() == [p.tolist() for p in plan]
  assert same(seed=2) != same() and same(iteration=6) != same()
  assert len(pack.minibatch_plan(np.array([4]), 2, 3, 0, 0)) == 2


def test_one_compile_whatever_the_lengths():
  make = pack.make_pack(**SHAPE, aggregation='token-mean')
  for seed in range(3):
    batch = trajectory(seed, padding=seed)
    plan = pack.plan_pack(
        batch.length, batch.weight, batch.group != seed, **SHAPE
    )
    make(plan, batch, *scored(batch))
  assert make._cache_size() == 1
