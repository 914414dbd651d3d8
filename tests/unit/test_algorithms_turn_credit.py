"""Where the return stands, from episodes to advantages, worked by hand."""

import numpy as np
import pytest

from agent_rl_jax.algorithms import advantages, anchors
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Scores
from agent_rl_jax.rewards.reward_set import RewardSet
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.train.assemble import assemble
from agent_rl_jax.train.evaluate import score
from agent_rl_jax.train.group import Group
from agent_rl_jax.types import Action, Episode, Row, Status, Task, Turn
from tests.collect_cases import make_settings

TASK = Task('t', 'toy', (), {'answer': '7'})
OUTCOME = {'answer': 1.0}
BOTH = {'answer': 1.0, 'environment': 1.0}


def episode(answer, rewards, states, one_row=True):
  """Turns of two sampled tokens and one observed, in one row or a row each.

  Args:
    answer: The last action's; '7' is right.
    rewards: Of the environment, one for each turn.
    states: Key that each turn starts from.
    one_row: False for a row per turn.
  """
  turns, places = len(rewards), []
  for k, (reward, state) in enumerate(zip(rewards, states, strict=True)):
    row, start = (0, 1 + 3 * k) if one_row else (k, 1)
    action = Action('', answer=answer if k == turns - 1 else None)
    places.append(Turn(row, start, start + 2, start + 3, action, reward, state))
  masks = [[False, *[True, True, False] * (turns if one_row else 1)]]
  rows = tuple(
      Row(
          np.zeros(len(mask), np.int32),
          np.array(mask),
          np.where(mask, -1, 0).astype(np.float32),
      )
      for mask in masks * (1 if one_row else turns)
  )
  return Episode(TASK, 0, 0, 0, rows, tuple(places), Status.DONE)


def batch_of(episodes, weights, **changes):
  """One group, judged and assembled as a run does it."""
  settings = make_settings(
      rewards__names=tuple(weights),
      rewards__weights=tuple(weights.values()),
      train__prompts=1,
      train__samples=max(2, sum(len(e.rows) for e in episodes)),
      **changes,
  )
  with Executor(1, 'judges') as judges:
    judged = score(episodes, RewardSet(weights), 0, judges, 60.0)
  group = Group(
      tuple(judged.episodes), judged.returns, judged.accuracy, judged.valid
  )
  return assemble(settings, [group], [True], fresh=1)[1]


def credit(batch, name, **options):
  """{(episode, turn): its advantage}."""
  result = advantages.estimate(
      batch,
      Scores(batch.sampler_logprobs),
      {},
      AdvantageOptions(advantage=name, **options),
  )
  found = {}
  for row, column in np.argwhere(batch.action_mask):
    key = int(batch.episode[row]), int(batch.turn[row, column])
    found.setdefault(key, set()).add(float(result.advantages[row, column]))
  return {key: value for key, (value,) in found.items()}


def close(actual, *expected):
  """expected: a list for each episode, with a number for each turn."""
  flat = {
      (e, k): value
      for e, values in enumerate(expected)
      for k, value in enumerate(values)
  }
  assert actual == pytest.approx(flat, abs=1e-6)


PAIR = (
    episode('7', (1.0, 0.0), (b's', b'a')),
    episode('3', (0.0, 0.0), (b's', b'b')),
)


def test_the_outcome_of_mt_grpo_is_what_the_environment_did_not_give():
  batch = batch_of(PAIR, BOTH)
  np.testing.assert_array_equal(batch.returns, [2, 0])
  close(credit(batch, 'mt_grpo'), [1, 0.5], [-1, -0.5])
  # Half the weight, half the turn reward.
  batch = batch_of(PAIR, {'answer': 1.0, 'environment': 0.5})
  np.testing.assert_array_equal(batch.returns, [1.5, 0])
  close(credit(batch, 'mt_grpo'), [0.75, 0.5], [-0.75, -0.5])


@pytest.mark.parametrize('weights', [OUTCOME, {'answer': 1, 'environment': 0}])
def test_what_is_no_part_of_the_return_is_nobodys_credit(weights):
  batch = batch_of(PAIR, weights)
  np.testing.assert_array_equal(batch.returns, [1, 0])
  assert not batch.turn_rewards.any()
  close(credit(batch, 'reward_to_go', gamma=1.0), [1, 1], [0, 0])
  close(credit(batch, 'mt_grpo'), [0.5, 0.5], [-0.5, -0.5])


def test_turn_rewards_of_the_return_stand_at_their_turns():
  batch = batch_of(PAIR, BOTH)
  close(credit(batch, 'reward_to_go', gamma=1.0), [2, 1], [0, 0])
  close(credit(batch, 'turn_return', gamma=0.5), [1.5, 1], [0, 0])


def test_the_steps_of_gigpo_see_the_outcome():
  """Step returns 0.5, 1 and 0, 0; only 's' is visited by both."""
  batch = batch_of(PAIR, OUTCOME)
  close(
      credit(batch, 'gigpo', gamma=0.5),
      [0.5 + 0.25, 0.5],
      [-0.5 - 0.25, -0.5],
  )
  # With the environment's reward 1.5, 1 and 0, 0; episodes +1 and -1.
  batch = batch_of(PAIR, BOTH)
  close(credit(batch, 'gigpo', gamma=0.5), [1.75, 1], [-1.75, -1])


@pytest.mark.parametrize(
    'one_row', [(True, True), (False, True), (False, False)], ids=str
)
def test_rows_of_an_episode_are_worth_what_one_row_is(one_row):
  histories = (
      ('7', (1.0, 0.0), (b's', b'a')),
      ('3', (0.0, 0.0, 0.5), (b's', b'a', b's')),
  )
  episodes = [
      episode(*history, one_row=one)
      for history, one in zip(histories, one_row, strict=True)
  ]
  batch = batch_of(episodes, BOTH, rollout__max_turns=3)
  assert (batch.length > 0).sum() == {2: 2, 1: 3, 0: 5}[sum(one_row)]
  # Returns 2 and 0.5; step returns 1.5, 1 and 1/8, 1/4, 1/2.  The mean of 's'
  # is 2.125 / 3, that of 'a' 0.625.
  s = 2.125 / 3
  close(
      credit(batch, 'gigpo', gamma=0.5),
      [0.75 + 1.5 - s, 0.75 + 0.375],
      [-0.75 + 0.125 - s, -0.75 - 0.375, -0.75 + 0.5 - s],
  )
  # Turn rewards 1 and 0.5, outcomes 1 and 0.
  close(credit(batch, 'mt_grpo'), [0.75, 0.5], [-0.75, -0.5, -0.5])
  assert anchors.anchored_fraction(batch) == 1


def test_anchored_fraction_counts_steps_with_company():
  batch = batch_of(PAIR, OUTCOME)
  assert anchors.anchored_fraction(batch) == 2 / 4
  alone = (episode('7', (0.0, 0.0), (None, b'a')), *PAIR[1:])
  assert anchors.anchored_fraction(batch_of(alone, OUTCOME)) == 0
  # Who failed is no company.
  batch = batch.replace(valid=np.array([True, False]))
  assert anchors.anchored_fraction(batch) == 0
  batch = batch.replace(valid=np.array([False, False]))
  assert anchors.anchored_fraction(batch) == 0


def test_similar_states_are_one_anchor_when_asked():
  """'corridor 1' and 'corridor 2' share 18 of 20 characters: 0.9."""
  pair = (
      episode('7', (0.0, 0.0), (b's', b'corridor 1')),
      episode('3', (0.0, 0.0), (b's', b'corridor 2')),
  )
  for similarity, share in ((0.0, 0.5), (0.95, 0.5), (0.9, 1.0)):
    batch = batch_of(
        pair,
        OUTCOME,
        algorithm__advantage='gigpo',
        algorithm__similarity=similarity,
    )
    assert anchors.anchored_fraction(batch) == share


def test_states_of_two_groups_never_merge():
  states = [b'corridor 1', b'corridor 1', None, b'corridor 2', b'\xff\x00']
  groups = [0, 1, 1, 1, 1]
  for similarity, ids in ((0.0, [0, 1, -1, 2, 3]), (0.9, [0, 1, -1, 1, 2])):
    found = anchors.group_anchors(states, groups, similarity)
    assert found.tolist() == ids
