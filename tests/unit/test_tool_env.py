"""The tool environment: what the agent is told, when, and what ends."""

import threading
import time

import pytest

from agent_rl_jax.envs.env import Env
from agent_rl_jax.envs.registry import ENVS, make_env
from agent_rl_jax.envs.tool_env import (
    ToolEnv,
    ToolEnvOptions,
    ToolState,
    ToolsUnavailable,
)
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.types import Action, Task, ToolCall, ToolResult

TASK = Task('t0', 'tool', ({'role': 'user', 'content': '1+1?'},))


class Echo:
  """Answers with its argument, and remembers being asked."""

  spec = {
      'name': 'echo',
      'description': '',
      'parameters': {
          'type': 'object',
          'properties': {'x': {'type': 'string'}},
          'required': ['x'],
      },
  }

  def __init__(self):
    self.seen = []

  def __call__(self, arguments, *, deadline):
    self.seen.append(arguments['x'])
    return ToolResult('', arguments['x'], True)


class Fails(Echo):
  spec = {**Echo.spec, 'name': 'fails'}

  def __call__(self, arguments, *, deadline):
    return ToolResult('', 'no', False)


def calls(*xs, name='echo'):
  made = tuple(ToolCall(f'c{i}', name, {'x': x}) for i, x in enumerate(xs))
  return Action('...', tool_calls=made)


def contents(observation):
  assert all(m['role'] == 'tool' for m in observation.messages)
  return [m['content'] for m in observation.messages]


@pytest.fixture
def pool():
  with Executor(4) as made:
    yield made


def make(pool, tool=None, **options):
  tool = tool or Echo()
  return ToolEnv({tool.spec['name']: tool}, pool, ToolEnvOptions(**options))


def test_reset_shows_the_task(pool):
  env = make(pool)
  state, observation = env.reset(TASK, 7)
  assert observation.messages == TASK.messages and not observation.done
  assert state == ToolState(TASK, 7)
  assert [spec['name'] for spec in env.tools] == ['echo']
  assert isinstance(env, Env) and env.name == 'tool'


def test_calls_then_answer(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  next_state, observation = env.step(state, calls('a', 'b'))
  assert contents(observation) == ['a', 'b'] and not observation.done
  assert [r.call_id for r in observation.tool_results] == ['c0', 'c1']
  assert all(r.ok for r in observation.tool_results)
  assert (state.calls, next_state.calls) == (0, 2)  # the old one is untouched
  assert observation.state_key is None and observation.reward == 0.0
  _, observation = env.step(next_state, Action('2', answer='2'))
  assert observation.done and not observation.messages
  env.close(next_state)


def test_the_first_success_is_rewarded_once(pool):
  failing = Fails()
  env = ToolEnv(
      {'echo': Echo(), 'fails': failing},
      pool,
      ToolEnvOptions(call_reward=0.2, max_tool_calls=9),
  )
  state, observation = env.reset(TASK, 0)
  given = [observation.reward]
  for action in (
      Action('', error='unreadable'),
      calls('a', name='fails'),
      Action(
          '',
          tool_calls=calls('a').tool_calls
          + calls('b', name='fails').tool_calls,
      ),
      calls('a', 'b'),
      calls('a'),
      Action('2', answer='2'),
  ):
    state, observation = env.step(state, action)
    given.append(observation.reward)
  assert given == [0, 0, 0, 0, 0.2, 0, 0]


def test_one_state_can_be_played_on_twice(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  first = env.step(state, calls('a'))
  second = env.step(state, calls('a'))
  assert first[0] == second[0]
  assert first[1].messages == second[1].messages


def test_turn_without_call_or_answer_is_final(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  assert env.step(state, Action('well.'))[1].done


def test_call_beats_answer_in_one_turn(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  action = Action('', tool_calls=calls('a').tool_calls, answer='2')
  _, observation = env.step(state, action)
  assert contents(observation) == ['a'] and not observation.done


def test_limit_is_told_and_answer_still_counts(pool):
  env = make(pool, max_tool_calls=2, call_limit_notice='Answer now.')
  state, _ = env.reset(TASK, 0)
  state, observation = env.step(state, calls('a'))
  assert contents(observation) == ['a']
  state, observation = env.step(state, calls('b'))
  assert contents(observation) == ['b\nAnswer now.']
  assert observation.tool_results[0].text == 'b'
  state, observation = env.step(state, Action('2', answer='2'))
  assert observation.done and state.violations == 0


def test_calls_over_the_limit_in_one_turn(pool):
  tool = Echo()
  env = make(pool, tool, max_tool_calls=2, call_limit_notice='Answer now.')
  state, _ = env.reset(TASK, 0)
  state, observation = env.step(state, calls('a', 'b', 'c'))
  assert contents(observation) == ['a', 'b', 'error: not run.\nAnswer now.']
  assert sorted(tool.seen) == ['a', 'b']
  assert len(observation.tool_results) == 2
  assert (state.calls, state.violations) == (2, 0)


def test_second_call_in_vain_ends(pool):
  tool = Echo()
  env = make(pool, tool, max_tool_calls=0, call_limit_notice='Answer now.')
  state, _ = env.reset(TASK, 0)
  state, observation = env.step(state, calls('a'))
  assert contents(observation) == ['error: Answer now.']
  assert not observation.done and observation.tool_results == ()
  state, observation = env.step(state, calls('a'))
  assert observation.done and not observation.messages
  assert tool.seen == [] and state.violations == 2


def test_malformed_turn_is_answered_and_counted(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  for count in (1, 2, 3):
    action = Action('<tool_call>{', error='the call is not closed')
    state, observation = env.step(state, action)
    assert contents(observation) == ['error: the call is not closed']
    assert not observation.done and observation.info['malformed'] == count
  assert state.calls == 0


def test_no_tools_is_legal():
  env = ToolEnv({})
  assert env.tools == ()
  state, _ = env.reset(TASK, 0)
  state, observation = env.step(state, calls('a'))
  expected = 'error: no tool is available; answer directly.'
  assert contents(observation) == [expected]
  _, observation = env.step(state, Action('2', answer='2'))
  assert observation.done


def test_unknown_tool_and_bad_arguments_become_observations(pool):
  env = make(pool)
  state, _ = env.reset(TASK, 0)
  _, observation = env.step(state, calls('a', name='eco'))
  assert contents(observation) == ['error: unknown tool eco; available: echo']
  call = ToolCall('c', 'echo', {'y': 'a'})
  _, observation = env.step(state, Action('', tool_calls=(call,)))
  assert contents(observation) == ['error: unknown argument y (arguments: x)']
  assert not observation.tool_results[0].ok


def test_hung_tool_costs_one_observation_even_on_the_same_pool():
  gate = threading.Event()

  class Hung(Echo):

    def __call__(self, arguments, *, deadline):
      gate.wait(30)
      return ToolResult('', 'late', True)

  with Executor(1) as pool:  # env.step and its tool share the only worker
    env = make(pool, Hung(), tool_timeout=0.1)
    state, _ = env.reset(TASK, 0)
    ticket = pool.submit(
        env.step, state, calls('a'), deadline=time.monotonic() + 10
    )
    pool.wait_any([ticket], 10)
    state, observation = ticket.result
    assert contents(observation) == ['error: timed out after 0.1 s']
    assert (pool.abandoned, pool.stuck) == (1, 1)
    gate.set()


def test_a_call_that_could_not_be_tried_is_no_observation(pool):
  class Away(Echo):

    def __call__(self, arguments, *, deadline):
      away = arguments['x'] == 'away'
      return ToolResult('', arguments['x'], not away, infrastructure=away)

  env = make(pool, Away())
  state, _ = env.reset(TASK, 0)
  with pytest.raises(ToolsUnavailable, match='tool echo: away'):
    env.step(state, calls('a', 'away'))
  _, observation = env.step(state, calls('a'))
  assert contents(observation) == ['a']


def test_a_call_that_found_no_thread_is_no_observation():
  gate = threading.Event()
  with Executor(1) as pool:
    soon = time.monotonic() + 10
    running = pool.submit(gate.wait, deadline=soon)
    env = make(pool, tool_timeout=0.1)
    state, _ = env.reset(TASK, 0)
    with pytest.raises(ToolsUnavailable, match='timed out after 0.1 s'):
      env.step(state, calls('a'))
    gate.set()
    pool.wait_any([running], 5)
    assert contents(env.step(state, calls('a'))[1]) == ['a']


def test_long_output_is_cut(pool):
  env = make(pool, max_output_chars=200)
  state, _ = env.reset(TASK, 0)
  _, observation = env.step(state, calls('x' * 10_000_000))
  assert len(contents(observation)[0]) <= 200


def test_registry(pool):
  assert set(ENVS) == {'tool'}
  env = make_env(
      'tool', tools={'echo': Echo()}, executor=pool, max_tool_calls=1
  )
  assert env.name == 'tool' and len(env.tools) == 1
  with pytest.raises(
      ValueError, match="unknown env 'tol': did you mean 'tool'"
  ):
    make_env('tol')
  with pytest.raises(ValueError, match="'max_tool_cals'.*'max_tool_calls'"):
    make_env('tool', max_tool_cals=1)


@pytest.mark.parametrize(
    'options',
    [
        {'max_tool_calls': -1},
        {'tool_timeout': 0.0},
        {'max_output_chars': 0},
        {'call_limit_notice': ' '},
    ],
)
def test_options_are_checked(options):
  (name,) = options
  with pytest.raises(ValueError, match=name):
    ToolEnvOptions(**options)


def test_construction_is_checked(pool):
  with pytest.raises(ValueError, match='calls itself'):
    ToolEnv({'other': Echo()}, pool)
  with pytest.raises(ValueError, match='no executor'):
    ToolEnv({'echo': Echo()})
