"""What goes wrong in an environment costs its own episode only."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from agent_rl_jax.rollout.engine import Interrupted
from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.slots import Purpose
from agent_rl_jax.types import Observation, Status
from tests import toys


def _by_uid(episodes):
  return {e.uid: e for e in episodes}


def test_a_raising_and_a_hanging_env_cost_their_own_episodes():
  options = dataclasses.replace(toys.OPTIONS, step_timeout=1.5)
  healthy, params = toys.engine(options)
  requests = toys.requests(count=5, samples=2)
  expected = toys.fingerprint(
      healthy.rollout(params, requests, purpose=Purpose.TRAIN)[0]
  )
  env = toys.ToyEnv(misbehave={'task1': 'raise', 'task3': 'hang'})
  engine, params = toys.engine(options, env)
  episodes, _ = engine.rollout(params, requests, purpose=Purpose.TRAIN)
  statuses = {}
  for episode in episodes:
    statuses.setdefault(episode.task.uid, set()).add(episode.status)
  # An episode whose only action ran out of tokens never reaches its env.
  assert statuses['task1'] <= {Status.ENV_ERROR, Status.MAX_TOKENS}
  assert Status.ENV_ERROR in statuses['task1']
  assert statuses['task3'] <= {Status.TIMEOUT, Status.MAX_TOKENS}
  assert Status.TIMEOUT in statuses['task3']
  got = toys.fingerprint(episodes)
  for episode in episodes:
    if episode.task.uid not in ('task1', 'task3'):
      assert got[episode.uid] == expected[episode.uid]
    if episode.status is Status.ENV_ERROR:
      assert 'broken env' in episode.detail


def test_states_are_closed_once_their_thread_has_left():
  env = toys.ToyEnv()
  engine, params = toys.engine(env=env)
  requests = toys.requests(count=3, samples=2)
  engine.rollout(params, requests, purpose=Purpose.TRAIN)
  deadline = time.monotonic() + 20
  while len(env.closed) < len(requests) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert sorted(env.closed) == sorted(r.task.uid for r in requests)


def test_a_prompt_that_does_not_fit_is_an_episode_with_a_reason():
  engine, params = toys.engine()
  task = toys.tasks(1)[0]
  content = list(range(6, 6 + 30)) * 3
  long_task = dataclasses.replace(
      task, messages=({'role': 'user', 'content': content},)
  )
  empty = dataclasses.replace(task, messages=({'role': 'user', 'content': []},))
  requests = [Request(long_task, 0, 0), Request(empty, 1, 1)]
  requests += toys.requests(count=1, samples=1, first=2)
  requests[-1] = dataclasses.replace(requests[-1], group=2)
  episodes, _ = engine.rollout(params, requests, purpose=Purpose.TRAIN)
  assert [e.status for e in episodes[:2]] == [Status.ENV_ERROR] * 2
  assert 'rollout.max_len = 64' in episodes[0].detail
  assert not episodes[2].status.failed


def test_an_observation_that_does_not_fit_ends_the_episode():
  class Talker(toys.ToyEnv):

    def step(self, state, action):
      ids = [7] * 60
      return state, Observation(messages=({'role': 'tool', 'content': ids},))

  engine, params = toys.engine(env=Talker())
  episodes, _ = engine.rollout(
      params, toys.requests(count=3, samples=1), purpose=Purpose.TRAIN
  )
  assert {e.status for e in episodes} == {Status.MAX_TOKENS}
  for episode in episodes:
    row = episode.rows[0]
    assert len(row.tokens) <= toys.OPTIONS.max_len
    assert episode.turns[-1].observation_stop == len(row.tokens)


def test_unknown_environment_is_refused_before_anything_runs():
  engine, params = toys.engine()
  task = dataclasses.replace(toys.tasks(1)[0], env='toi')
  with pytest.raises(ValueError, match="environment 'toi'; there are"):
    engine.rollout(params, [Request(task, 0, 0)], purpose=Purpose.TRAIN)


def test_a_rollout_with_a_hung_step_can_be_interrupted():
  started = threading.Event()

  class Hanging(toys.ToyEnv):

    def step(self, state, action):
      started.set()
      time.sleep(3600)

  engine, params = toys.engine(env=Hanging())
  engine._should_stop = started.is_set
  with pytest.raises(Interrupted):
    engine.rollout(params, toys.requests(), purpose=Purpose.TRAIN)


def test_limits_on_turns_and_tokens_hold():
  engine, params = toys.engine()
  episodes, _ = engine.rollout(
      params, toys.requests(count=8, samples=3), purpose=Purpose.TRAIN
  )
  options = toys.OPTIONS
  for episode in episodes:
    assert len(episode.turns) <= options.max_turns
    assert episode.num_action_tokens <= options.max_episode_tokens
    for turn in episode.turns:
      assert turn.action_stop - turn.action_start <= options.max_action_tokens
  assert len({e.status for e in episodes}) >= 3
  assert np.isfinite([e.rows[0].logprobs.sum() for e in episodes]).all()


class _Counting(toys.ToyEnv):
  """Counts the states that are open; a chosen call waits for `gate`."""

  def __init__(self, slow='', task='task1'):
    super().__init__()
    self.slow, self.task = slow, task
    self.gate, self.entered = threading.Event(), threading.Event()
    self.opened = []

  def _maybe_wait(self, call, task):
    if call == self.slow and task.uid == self.task:
      self.entered.set()
      assert self.gate.wait(60)

  def reset(self, task, seed):
    self._maybe_wait('reset', task)
    self.opened.append(task.uid)
    return super().reset(task, seed)

  def step(self, state, action):
    self._maybe_wait('step', state[0])
    return super().step(state, action)

  def all_closed(self, seconds=20):
    deadline = time.monotonic() + seconds
    while sorted(self.closed) != sorted(self.opened):
      if time.monotonic() > deadline:
        return False
      time.sleep(0.01)
    return True


@pytest.mark.parametrize('slow', ['reset', 'step'])
def test_the_state_of_a_call_that_comes_too_late_is_closed(slow):
  options = dataclasses.replace(toys.OPTIONS, step_timeout=1.0)
  env = _Counting(slow)
  engine, params = toys.engine(options, env)
  requests = toys.requests(count=3, samples=2)
  episodes, _ = engine.rollout(params, requests, purpose=Purpose.TRAIN)
  late = [e for e in episodes if e.status is Status.TIMEOUT]
  assert late and {e.task.uid for e in late} == {'task1'}
  # A thread is still inside: the state is in use, or not there yet.
  assert env.closed.count('task1') < 2
  env.gate.set()
  deadline = time.monotonic() + 20
  while len(env.opened) < len(requests) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(env.opened) == len(requests)
  assert env.all_closed()


def test_a_prompt_that_cannot_be_encoded_closes_its_state():
  env = _Counting()
  engine, params = toys.engine(env=env)

  class Refusing(toys.IdChat):

    def prompt(self, messages, tools):
      raise ValueError('no such role')

  engine._chat = Refusing()
  episodes, _ = engine.rollout(
      params, toys.requests(count=2, samples=1), purpose=Purpose.TRAIN
  )
  assert {e.status for e in episodes} == {Status.ENV_ERROR}
  assert len(env.opened) == 2 and env.all_closed()


@pytest.mark.parametrize('how', ['interrupt', 'error'])
def test_a_rollout_that_ends_early_closes_its_states(how):
  env = _Counting('step')
  engine, params = toys.engine(env=env)
  requests = toys.requests(count=3, samples=2)
  kwargs = {}
  if how == 'interrupt':
    engine._should_stop = env.entered.is_set
    error = Interrupted
  else:
    error = RuntimeError

    def fail(episode):
      del episode
      if env.entered.is_set():
        raise RuntimeError('a defect of the caller')

    kwargs['on_episode'] = fail
    requests += toys.requests(count=8, samples=4, first=100)
    requests = [
        dataclasses.replace(r, group=i // 2) for i, r in enumerate(requests)
    ]
  with pytest.raises(error):
    engine.rollout(params, requests, purpose=Purpose.TRAIN, **kwargs)
  # All but those whose thread is still inside.
  deadline = time.monotonic() + 20
  held = lambda: set(env.opened) - {'task1'} - set(env.closed)
  while held() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not held() and env.closed
  env.gate.set()
  assert env.all_closed()
