"""Episodes to arrays: masks, groups, failures, padding."""

import dataclasses

import numpy as np
import pytest

from agent_rl_jax.rollout.admission import Admission
from agent_rl_jax.rollout.collate import collate
from agent_rl_jax.rollout.live import Live, Request
from agent_rl_jax.types import (
    Action,
    Episode,
    Observation,
    Row,
    Status,
    Task,
    Turn,
)
from tests import toys


def _episode(uid, group, length, status=Status.DONE):
  tokens = np.arange(10, 10 + length, dtype=np.int32)
  mask = np.zeros(length, bool)
  mask[3:5] = mask[7:length] = True
  action = Action(text='')
  return Episode(
      task=Task(f't{group}', 'toy', ()),
      uid=uid,
      group=group,
      policy_version=4,
      rows=(Row(tokens, mask, np.where(mask, -0.5, 0).astype(np.float32)),),
      turns=(
          Turn(0, 3, 5, 7, action, reward=0.25),
          Turn(0, 7, length, length, action, reward=1.0),
      ),
      status=status,
      rewards={'answer': 1.0, 'format': 0.5},
  )


def _collate(episodes, **changes):
  turns = sum(len(e.turns) for e in episodes)
  shape = {
      'num_rows': 4,
      'length': 12,
      'num_turns': 3,
      'turn_weight': 1.0,
      'anchors': [-1] * turns,
      **changes,
  }
  return collate(
      episodes,
      components=('answer', 'format'),
      returns=[1.5] * len(episodes),
      metric=[1.0] * len(episodes),
      valid=[not e.status.failed for e in episodes],
      **shape,
  )


def test_rows_are_left_aligned_and_padding_counts_nowhere():
  batch = _collate(
      [
          _episode(0, 7, 9),
          _episode(1, 7, 11, Status.TIMEOUT),
          _episode(2, 9, 9),
      ],
      anchors=[0, 1, 1, 1, -1, 2],
      turn_weight=0.5,
  )
  np.testing.assert_array_equal(batch.length, [9, 11, 9, 0])
  np.testing.assert_array_equal(batch.group, [0, 0, 1, 3])
  np.testing.assert_array_equal(batch.episode, [0, 1, 2, 3])
  # A failed episode keeps its place in the group and counts nowhere.
  np.testing.assert_array_equal(batch.valid, [True, False, True, False])
  np.testing.assert_array_equal(batch.weight, [1, 0, 1, 0])
  np.testing.assert_array_equal(
      np.flatnonzero(batch.action_mask[0]), [3, 4, 7, 8]
  )
  # An observation carries the index of the turn that it answers.
  np.testing.assert_array_equal(
      batch.turn[0], [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
  )
  # The part of the return that they are.
  np.testing.assert_array_equal(batch.turn_rewards[0], [0.125, 0.5, 0])
  np.testing.assert_array_equal(batch.turn_mask[0], [True, True, False])
  np.testing.assert_array_equal(
      batch.anchor, [[0, 1, -1], [1, 1, -1], [-1, 2, -1], [-1, -1, -1]]
  )
  np.testing.assert_array_equal(batch.components[0], [1, 0.5])
  assert not batch.action_mask[3].any() and batch.tokens[3].sum() == 0
  assert (batch.sampler_logprobs[~batch.action_mask] == 0).all()
  assert (batch.policy_version[0, :9] == 4).all()


def test_every_row_of_an_episode_tells_all_of_its_turns():
  one = _episode(0, 0, 9)
  first, second = one.turns
  rows = tuple(
      Row(*(x[part] for x in dataclasses.astuple(one.rows[0])))
      for part in (slice(0, 7), slice(5, 9))
  )
  two = dataclasses.replace(
      one, rows=rows, turns=(first, Turn(1, 2, 4, 4, second.action, reward=1.0))
  )
  batch = _collate([two, one], anchors=[3, 4, 3, 5])
  np.testing.assert_array_equal(batch.episode, [0, 0, 1, 3])
  each = lambda x: np.array(x)[[0, 0, 1]]
  np.testing.assert_array_equal(
      batch.turn_rewards[:3], each([[0.25, 1, 0], [0.25, 1, 0]])
  )
  np.testing.assert_array_equal(
      batch.anchor[:3], each([[3, 4, -1], [3, 5, -1]])
  )
  np.testing.assert_array_equal(batch.turn_mask[:3], [[True, True, False]] * 3)
  assert not batch.turn_mask[3].any()
  # Tokens know the turn of their own row alone.
  np.testing.assert_array_equal(batch.turn[0, :7], [0, 0, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(batch.turn[1, :4], [0, 0, 1, 1])


def test_an_anchor_for_each_turn():
  with pytest.raises(ValueError, match='3 anchors for 2 turns'):
    _collate([_episode(0, 0, 9)], anchors=[0, 1, 2])


@pytest.mark.parametrize(
    'changes', [{'num_rows': 1}, {'length': 10}, {'num_turns': 1}], ids=str
)
def test_what_does_not_fit_is_refused(changes):
  with pytest.raises(ValueError, match='2 rows of up to 11 tokens and 2 turns'):
    _collate([_episode(0, 0, 9), _episode(1, 0, 11)], **changes)


def _live(uid, group, prompt):
  live = Live(
      Request(Task(str(uid), 'toy', ()), uid, group), toys.OPTIONS, version=0
  )
  live.prompt = np.asarray(prompt, np.int32)
  return live


def test_a_group_shares_a_shard_and_forks_from_its_first_member():
  admission = Admission(slots=4, shards=2)
  admission.expect(0, 3)
  admission.expect(1, 1)
  members = [_live(i, 0, [1, 2]) for i in range(3)]
  assert admission.admit(members[0]) == (0, None)
  assert admission.admit(members[1]) == (1, 0)
  assert admission.admit(members[2]) is None  # its shard is full
  assert admission.admit(_live(9, 1, [1, 2])) == (2, None)  # another shard
  # When the first leaves, the next takes its slot and copies from the other.
  admission.release(members[0])
  assert admission.admit(members[2]) == (0, 1)


def test_a_prompt_that_nobody_holds_is_prefilled_again():
  admission = Admission(slots=1, shards=1)
  admission.expect(0, 2)
  first, second = (_live(i, 0, [1, 2]) for i in range(2))
  assert admission.admit(first) == (0, None)
  admission.release(first)
  assert admission.admit(second) == (0, None)


def test_a_turn_keeps_its_reward_and_the_state_that_it_starts_from():
  live = _live(0, 0, [1, 2])
  live.append(live.prompt)
  live.state_key = b'start'
  for reward, state in ((0.5, b'next'), (0.25, b'end')):
    live.sampled(np.array([3]), np.array([-1.0], np.float32))
    live.begin_turn(Action('x'), 'stop')
    live.end_turn(Observation(reward=reward, state_key=state), live.length)
  turns = live.finish(Status.DONE).turns
  assert [(t.reward, t.state_key) for t in turns] == [
      (0.5, b'start'),
      (0.25, b'next'),
  ]


def test_live_budget_is_the_tightest_limit():
  options = dataclasses.replace(
      toys.OPTIONS, max_action_tokens=10, max_episode_tokens=12, max_len=30
  )
  live = Live(Request(Task('t', 'toy', ()), 0, 0), options, version=0)
  live.append(np.arange(5))
  assert live.budget() == 10
  live.sampled(np.arange(8), np.full(8, -1.0))
  assert live.budget() == 4  # of the episode's twelve
  live.append(np.arange(14))
  assert live.budget() == 3  # of the row's thirty
