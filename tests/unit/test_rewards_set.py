"""Components, totals and failures of a RewardSet, worked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rewards.reward import per_episode
from agent_rl_jax.rewards.reward_set import InvalidReward, RewardSet
from agent_rl_jax.types import (
    Action,
    Episode,
    Row,
    Status,
    Task,
    ToolResult,
    Turn,
)

TASK = Task('t7', 'tool', (), {'answer': '42'})


def turn(answer=None, error=None, oks=(), reward=0.0):
  results = tuple(ToolResult(f'c{i}', '', ok) for i, ok in enumerate(oks))
  action = Action('', answer=answer, error=error)
  return Turn(0, 0, 1, 1, action, reward=reward, tool_results=results)


def episode(*turns, status=Status.DONE, tokens=4):
  mask = np.ones(tokens, bool)
  mask[0] = False
  row = Row(np.zeros(tokens, np.int32), mask, np.zeros(tokens, np.float32))
  return Episode(TASK, 0, 0, 0, (row,), turns, status)


def score_one(name, made):
  (scores,) = RewardSet({name: 1.0}).score(TASK, [made], 0)
  return scores[name]


@pytest.mark.parametrize(
    ('name', 'turns', 'value'),
    [
        ('answer', [turn('42')], 1.0),
        ('answer', [turn('42.0')], 1.0),
        ('answer', [turn('41')], 0.0),
        ('answer', [turn()], 0.0),
        ('answer', [], 0.0),
        ('answer', [turn('41'), turn('42')], 1.0),  # the last one counts
        ('answer', [turn('42'), turn('41')], 0.0),
        ('format', [turn(), turn('1')], 1.0),
        ('format', [turn()], 0.0),
        ('format', [turn(error='bad'), turn('1')], 0.0),
        ('execution', [turn(oks=[True, False]), turn(oks=[True, True])], 0.75),
        ('execution', [turn('1')], 0.0),
        ('environment', [turn(reward=0.5), turn('1', reward=-0.25)], 0.25),
        ('environment', [], 0.0),
        ('call_cost', [turn(oks=[True, False]), turn()], -2.0),
        ('length_cost', [turn()], -0.003),
    ],
)
def test_each_reward(name, turns, value):
  assert score_one(name, episode(*turns)) == pytest.approx(value, abs=1e-12)


def test_components_and_total():
  rewards = RewardSet({'format': 0.5, 'execution': 0.0})
  assert rewards.names == ('format', 'execution', 'answer')
  good = episode(turn(oks=[True]), turn('42'))
  bad = episode(turn(error='no'), turn('42'))
  scores = rewards.score(TASK, [good, bad], 3)
  assert scores == [
      {'format': 1.0, 'execution': 1.0, 'answer': 1.0},
      {'format': 0.0, 'execution': 0.0, 'answer': 1.0},
  ]
  assert [rewards.total(s) for s in scores] == [0.5, 0.0]
  assert [s[rewards.metric] for s in scores] == [1.0, 1.0]


def test_failed_episodes_are_skipped():
  seen = []

  def group_size(task, episodes, step):
    seen.append((len(episodes), step))
    return [1.0] * len(episodes)

  table = {'n': lambda: group_size}
  rewards = RewardSet({'n': 1.0}, metric='n', rewards=table)
  group = [
      episode(turn('42')),
      episode(turn('42'), status=Status.TIMEOUT),
      episode(turn('42'), status=Status.MAX_TURNS),
      episode(turn('42'), status=Status.ENV_ERROR),
  ]
  scores = rewards.score(TASK, group, 5)
  assert [s['n'] for s in scores] == [1.0, 0.0, 1.0, 0.0]
  assert rewards.score(TASK, group[1:2], 6) == [{'n': 0.0}]
  assert seen == [(2, 5)]


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, 'x', None])
def test_bad_values_are_refused_with_names(value):
  table = {**REWARDS, 'odd': lambda: per_episode(lambda t, e: value)}
  rewards = RewardSet({'answer': 1.0, 'odd': 1.0}, rewards=table)
  with pytest.raises(ValueError, match="'odd'.*task t7"):
    rewards.score(TASK, [episode(turn('42'))], 0)
  assert rewards.failures == 0


def test_wrong_count_is_refused():
  rewards = RewardSet(
      {'odd': 1.0}, metric='odd', rewards={'odd': lambda: lambda t, e, s: [1.0]}
  )
  with pytest.raises(InvalidReward, match='1 values for 2 episodes of task t7'):
    rewards.score(TASK, [episode(), episode()], 0)


def test_raising_reward_marks_the_group_only():
  def odd(task, made):
    return 1 / (0 if task.uid == 't7' else 1)

  table = {**REWARDS, 'odd': lambda: per_episode(odd)}
  rewards = RewardSet({'odd': 1.0}, rewards=table)
  group = [episode(turn('42')), episode(turn('1'))]
  assert rewards.score(TASK, group, 0) == [{}, {}]
  assert rewards.failures == 1 and rewards.total({}) == 0.0
  other = dataclasses.replace(TASK, uid='t8')
  assert rewards.score(other, group, 0)[0] == {'odd': 1.0, 'answer': 1.0}
  assert rewards.failures == 1


def test_task_without_gold_answer_is_a_failure_not_a_crash(caplog):
  rewards = RewardSet({'answer': 1.0})
  bare = Task('t9', 'tool', ())
  assert rewards.score(bare, [episode(turn('42'))], 0) == [{}]
  assert "task t9 has no payload['answer']" in caplog.text


def test_memory_is_saved_and_restored():
  class Best:
    """1.0 for an episode with no more calls than any before it."""

    def __init__(self):
      self.best = {}

    def __call__(self, task, episodes, step):
      for e in episodes:
        seen = self.best.get(task.uid, e.num_tool_calls)
        self.best[task.uid] = min(seen, e.num_tool_calls)
      return [float(e.num_tool_calls == self.best[task.uid]) for e in episodes]

    def state_dict(self):
      return dict(self.best)

    def load_state_dict(self, state):
      self.best = dict(state)

  table = {**REWARDS, 'best': Best}
  first = RewardSet({'best': 1.0}, rewards=table)
  lean, wasteful = episode(turn(oks=[True])), episode(turn(oks=[True, True]))
  first.score(TASK, [lean], 0)
  assert first.state() == {'best': {'t7': 1}}
  second = RewardSet({'best': 1.0}, rewards=table)
  assert second.score(TASK, [wasteful], 1)[0]['best'] == 1.0  # knows nothing
  second.restore(first.state())
  assert second.score(TASK, [wasteful], 1)[0]['best'] == 0.0
  assert RewardSet({'answer': 1.0}).state() == {}
  with pytest.raises(ValueError, match='best'):
    RewardSet({'answer': 1.0}).restore(first.state())


def test_saved_memory_is_a_copy():
  class Calls:
    """Hands out its own dict, and keeps the one that it is given."""

    def __init__(self):
      self.count = {'calls': {'n': 0}}

    def __call__(self, task, episodes, step):
      self.count['calls']['n'] += 1
      return [0.0 for _ in episodes]

    def state_dict(self):
      return self.count

    def load_state_dict(self, state):
      self.count = state

  rewards = RewardSet({'calls': 1.0}, rewards={**REWARDS, 'calls': Calls})
  before = rewards.state()
  rewards.score(TASK, [episode(turn())], 0)
  assert before == {'calls': {'calls': {'n': 0}}}
  assert rewards.state() == {'calls': {'calls': {'n': 1}}}
  rewards.restore(before)
  rewards.score(TASK, [episode(turn())], 0)
  assert before == {'calls': {'calls': {'n': 0}}}


def test_construction_is_checked():
  with pytest.raises(ValueError, match="'anser'.*did you mean 'answer'"):
    RewardSet({'anser': 1.0})
  with pytest.raises(ValueError, match="'formt'.*did you mean 'format'"):
    RewardSet({'answer': 1.0}, metric='formt')
  with pytest.raises(ValueError, match='empty'):
    RewardSet({})
  with pytest.raises(ValueError, match="'answer' is nan"):
    RewardSet({'answer': math.nan})
