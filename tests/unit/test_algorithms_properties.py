"""What theory says must not change an advantage, and that none is ever NaN."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import algorithm_batches as batches

EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True)
SHAPE = (batches.ROWS, batches.LENGTH)


@pytest.fixture(autouse=True)
def double():
  with jax.enable_x64(True):
    yield


def advantages_of(batch, scores):
  result = batches.every_advantage(batch, scores)
  return {name: np.array(value.advantages) for name, value in result.items()}


@EXAMPLES
@given(seed=st.integers(0, 10**6), markov=st.booleans(), data=st.data())
def test_row_order_does_not_matter(seed, markov, data):
  batch, scores = batches.random_batch(seed, markov)
  order = np.array(data.draw(st.permutations(range(batches.ROWS))))
  before = advantages_of(batch, scores)
  after = advantages_of(*jax.tree.map(lambda x: x[order], (batch, scores)))
  for name in before:
    np.testing.assert_allclose(
        after[name], before[name][order], atol=1e-9, err_msg=name
    )


@EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    markov=st.booleans(),
    mask=hnp.arrays(bool, SHAPE),
    valid=hnp.arrays(bool, batches.ROWS),
)
def test_no_mask_gives_nan(seed, markov, mask, valid):
  batch, scores = batches.random_batch(seed, markov)
  # What a token may hold is unknown, but where it is sampled it is a number.
  fill = lambda x: np.where(np.isnan(x), 0.5, x)
  seen = mask & valid[:, None]
  rows = lambda x: np.where(
      valid.reshape((-1,) + (1,) * (x.ndim - 1)), fill(x), np.nan
  )
  batch = batch.replace(
      action_mask=mask,
      valid=valid,
      returns=rows(batch.returns),
      components=rows(batch.components),
      turn_rewards=rows(batch.turn_rewards),
      baseline=rows(batch.baseline),
  )
  scores = jax.tree.map(lambda x: np.where(seen, fill(x), np.nan), scores)
  for name, value in advantages_of(batch, scores).items():
    assert np.isfinite(value).all(), name
    assert not value[~seen].any(), name


@EXAMPLES
@given(seed=st.integers(0, 10**6), markov=st.booleans(), data=st.data())
def test_what_is_not_valid_does_not_matter(seed, markov, data):
  """Padding rows may hold anything, at any place, in any group."""
  batch, scores = batches.random_batch(seed, markov)
  before = advantages_of(batch, scores)
  bad = ~batch.valid
  group = np.where(bad, data.draw(st.integers(0, 7)), batch.group)
  mask = np.where(bad[:, None], data.draw(hnp.arrays(bool, SHAPE)), False)
  batch = batch.replace(
      group=group.astype(np.int32),
      action_mask=np.where(bad[:, None], mask, batch.action_mask),
      returns=np.where(bad, 1e6, batch.returns),
  )
  after = advantages_of(batch, scores)
  for name in before:
    np.testing.assert_array_equal(after[name], before[name], err_msg=name)


# The KL and the mean of a group cancel what all of its members share.  Not
# gigpo: it discounts the end by the steps that are left.
SHIFT_INVARIANT = {'rloo', 'grpo', 'dr_grpo', 'gdpo', 'opo', 'mt_grpo'}


@EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    markov=st.booleans(),
    shift=hnp.arrays(np.float64, 8, elements=st.integers(-3, 3)),
)
def test_a_shift_of_a_groups_rewards_cancels(seed, markov, shift):
  batch, scores = batches.random_batch(seed, markov)
  before = advantages_of(batch, scores)
  by_row = shift[batch.group]
  batch = batch.replace(
      returns=batch.returns + by_row,
      components=batch.components + by_row[:, None],
  )
  after = advantages_of(batch, scores)
  for name in SHIFT_INVARIANT:
    np.testing.assert_allclose(
        after[name], before[name], atol=1e-8, err_msg=name
    )
  # And one that compares nothing does move.
  sampled = batch.action_mask & (batch.valid & (by_row != 0))[:, None]
  moved = after['reinforce'] != before['reinforce']
  np.testing.assert_array_equal(moved, sampled)


@EXAMPLES
@given(seed=st.integers(0, 10**6), markov=st.booleans())
def test_group_means_are_zero(seed, markov):
  """Each episode counted once, whatever its rows."""
  batch, scores = batches.random_batch(seed, markov)
  values = advantages_of(batch, scores)
  for group in np.unique(batch.group[batch.valid]):
    members = np.unique(batch.episode[batch.valid & (batch.group == group)])
    for name in ('grpo', 'dr_grpo', 'rloo'):
      per_episode = []
      for episode in members:
        rows = batch.valid & (batch.episode == episode)
        tokens = values[name][rows][batch.action_mask[rows]]
        if len(tokens):
          assert np.ptp(tokens) == 0
          per_episode.append(tokens[0])
      if len(per_episode) == len(members):
        np.testing.assert_allclose(sum(per_episode), 0, atol=1e-5)
