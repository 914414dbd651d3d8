"""A collector over a scripted engine: episodes are written by hand.

A task is a list of outcomes, one per episode of its group: 'right', 'wrong',
'tidy' (wrong, yet rewarded by half), 'long' (wrong, cut off at the limit of 16
tokens), 'cut' (wrong, an action cut off after 4 tokens), 'dead'
(infrastructure).
"""

import types as pytypes

import numpy as np

from agent_rl_jax.rewards.reward import per_episode
from agent_rl_jax.rewards.reward_set import RewardSet
from agent_rl_jax.rollout.engine import Interrupted
from agent_rl_jax.rollout.stats import RolloutStats
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.train import settings
from agent_rl_jax.train.collect import Collector
from agent_rl_jax.types import Action, Episode, Row, Status, Task, Turn
from configs import base

PROMPTS, SAMPLES, LIMIT = 2, 2, 16
STATUS = {'long': Status.MAX_TOKENS, 'dead': Status.ENV_ERROR}


def make_settings(**changes):
  """Two groups of two, with 'section__key' changed."""
  config = base.get_config()
  config.rollout.max_len = 32
  config.rollout.extend_block = 8
  config.rollout.forced_limit = 8
  config.rollout.max_turns = 2
  config.rollout.max_action_tokens = LIMIT
  config.rollout.max_episode_tokens = LIMIT
  config.train.prompts, config.train.samples = PROMPTS, SAMPLES
  config.train.iterations = 10
  if 'overlong__penalty' in changes:
    config.overlong.buffer = 8
  for key, value in changes.items():
    section, _, name = key.partition('__')
    config[section][name] = value
  return settings.resolve(config, base.get_config())


class Tasks:
  """A stream of scripts; remembers how far it was read."""

  def __init__(self, scripts):
    self.scripts, self.cursor = list(scripts), 0

  def take(self, count):
    start, self.cursor = self.cursor, self.cursor + count
    assert self.cursor <= len(self.scripts), 'more tasks than scripted'
    return [
        Task(str(start + i), 'toy', (), {'script': script.split()})
        for i, script in enumerate(self.scripts[start : self.cursor])
    ]


class ScriptedEngine:
  """Gives each request the outcome that its task's script says."""

  def __init__(self, stop_at_wave=None):
    self.requests, self.waves = [], 0
    self._stop_at = stop_at_wave

  def rollout(self, params, requests, *, purpose, version):
    del params, purpose
    if self.waves == self._stop_at:
      raise Interrupted
    self.waves += 1
    self.requests.append(list(requests))
    seen = {}
    episodes = []
    for request in requests:
      place = seen.setdefault(request.group, [0])
      # The outcome of the greedy episode stands last in a script.
      index = -1 if request.greedy else place[0]
      place[0] += not request.greedy
      outcome = request.task.payload['script'][index]
      episodes.append(episode(request, outcome, version))
    return episodes, RolloutStats(tokens=len(episodes))


def episode(request, outcome, version):
  tokens = LIMIT if outcome == 'long' else 4
  length = 0 if outcome == 'dead' else 2 + tokens
  mask = np.arange(length) >= 2
  row = Row(np.ones(length, np.int32), mask, np.where(mask, -1, 0))
  row = Row(row.tokens, mask, row.logprobs.astype(np.float32))
  finish = 'length' if outcome in ('long', 'cut') else 'stop'
  turn = Turn(0, 2, length, length, Action(outcome), finish=finish)
  return Episode(
      task=request.task,
      uid=request.uid,
      group=request.group,
      policy_version=version,
      rows=(row,),
      turns=() if outcome == 'dead' else (turn,),
      status=STATUS.get(outcome, Status.DONE),
  )


def _right(task, played):
  if 'broken' in task.payload['script']:
    raise RuntimeError('judge is down')
  return float(played.turns[0].action.text == 'right')


def _tidy(task, played):
  del task
  return 0.5 * (played.turns[0].action.text == 'tidy')


def collector(scripts, engine=None, **changes):
  made = make_settings(**changes)
  parts = pytypes.SimpleNamespace(settings=made, judges=Executor(1, 'judges'))
  rewards = RewardSet(
      {'answer': 1.0, 'tidy': 1.0},
      rewards={
          'answer': lambda: per_episode(_right),
          'tidy': lambda: per_episode(_tidy),
      },
  )
  engine = engine or ScriptedEngine()
  return Collector(parts, engine, rewards, Tasks(scripts)), engine


def uids(scored):
  return [episode.uid for episode in scored.episodes]
