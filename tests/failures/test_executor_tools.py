"""Tools that sleep, raise, flood, exit or hang cost only their own episode."""

import pathlib
import random
import subprocess
import sys
import textwrap
import threading
import time

from agent_rl_jax.envs.tool_env import ToolEnv, ToolEnvOptions
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.types import Action, Task, ToolCall, ToolResult

TASK = Task('t0', 'tool', ())


class Bad:
  """Does what its argument names."""

  spec = {
      'name': 'bad',
      'description': '',
      'parameters': {
          'type': 'object',
          'properties': {'do': {'type': 'string'}},
          'required': ['do'],
      },
  }

  def __init__(self, gate):
    self._gate = gate

  def __call__(self, arguments, *, deadline):
    do = arguments['do']
    if do == 'sleep':
      time.sleep(random.uniform(0, 0.02))
    elif do == 'raise':
      raise ValueError('bad luck')
    elif do == 'exit':
      sys.exit(1)
    elif do == 'flood':
      return ToolResult('', 'x' * 10_000_000, True)
    elif do == 'hang':
      self._gate.wait(60)
    return ToolResult('', f'did {do}', True)


def play(env, index):
  """One episode of three turns; returns everything that the agent saw."""
  rng = random.Random(index)
  state, _ = env.reset(TASK, index)
  seen = []
  for i in range(3):
    do = rng.choice(['sleep', 'fine', 'fine', 'raise', 'exit', 'flood'])
    if index % 10 == 3 and i == 1:
      do = 'hang'
    call = ToolCall(f'{index}.{i}', 'bad', {'do': do})
    state, observation = env.step(state, Action('', tool_calls=(call,)))
    seen.append((do, observation.messages[0]['content']))
  assert env.step(state, Action('', answer='1'))[1].done
  return seen


def test_fifty_episodes_with_failures():
  expected = {
      'sleep': 'did sleep',
      'fine': 'did fine',
      'raise': 'error: ValueError: bad luck',
      'exit': 'error: SystemExit: 1',
      'hang': 'error: timed out after 1 s',
  }
  gate = threading.Event()
  with Executor(8) as pool:
    env = ToolEnv(
        {'bad': Bad(gate)},
        pool,
        ToolEnvOptions(max_tool_calls=9, tool_timeout=1.0, max_output_chars=99),
    )
    begin = time.monotonic()
    tickets = [
        pool.submit(play, env, i, deadline=begin + 30) for i in range(50)
    ]
    pool.wait_all(tickets, 30)
    assert all(t.error is None for t in tickets)
    hung = 0
    for ticket in tickets:
      for do, text in ticket.result:
        hung += do == 'hang'
        if do == 'flood':
          assert len(text) <= 99 and 'left out' in text
        else:
          assert text == expected[do]
    assert hung == 5 and pool.abandoned == 5 and pool.stuck == 5
    gate.set()
    until = time.monotonic() + 5
    while pool.stuck and time.monotonic() < until:
      time.sleep(0.01)
    assert pool.stuck == 0


def test_results_do_not_depend_on_timing():
  def once():
    gate = threading.Event()
    with Executor(5) as pool:
      env = ToolEnv({'bad': Bad(gate)}, pool, ToolEnvOptions(tool_timeout=1.0))
      deadline = time.monotonic() + 30
      tickets = [pool.submit(play, env, i, deadline=deadline) for i in range(4)]
      pool.wait_all(tickets, 30)
      gate.set()
      return [t.result for t in tickets]

  assert once() == once()


def test_every_worker_hung_and_the_pool_goes_on():
  gate = threading.Event()
  with Executor(4) as pool:
    deadline = time.monotonic() + 0.3
    stuck = [pool.submit(gate.wait, 60, deadline=deadline) for _ in range(12)]
    pool.wait_all(stuck, 10)
    assert all(t.expired for t in stuck)
    good = [pool.submit(int, deadline=time.monotonic() + 5) for _ in range(20)]
    pool.wait_all(good, 5)
    assert all(t.result == 0 and not t.expired for t in good)
    assert pool.abandoned == 4  # the eight others never started
    gate.set()


def test_megabytes_are_let_go():
  with Executor(2) as pool:
    tool = Bad(threading.Event())
    calls = [ToolCall(str(i), 'bad', {'do': 'flood'}) for i in range(8)]
    deadline = time.monotonic() + 10
    results = pool.run_calls(
        {'bad': tool}, calls, deadline, max_output_chars=100
    )
    assert all(len(r.text) <= 100 for r in results)


def _run(body):
  # A joined thread or a deaf wait would take 600 s.
  return subprocess.run(
      [sys.executable, '-c', textwrap.dedent(body)],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
      cwd=pathlib.Path(__file__).parents[2],
  )


def test_interpreter_exit_waits_for_no_tool():
  done = _run(
      """
      import time
      from agent_rl_jax.tools.executor import Executor
      pool = Executor(2)
      now = time.monotonic()
      hung = pool.submit(time.sleep, 600, deadline=now + 0.1)
      running = pool.submit(time.sleep, 600, deadline=now + 600)
      pool.submit(time.sleep, 600, deadline=now + 600)
      pool.wait_any([hung], 5)
      assert hung.expired and not running.done
      print('bye', flush=True)
      """,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'bye\n' and done.stderr == ''


def test_interrupt_reaches_a_waiting_main_thread():
  done = _run(
      """
      import os, signal, threading, time
      from agent_rl_jax.tools.executor import Executor
      pool = Executor(2)
      ticket = pool.submit(time.sleep, 600, deadline=time.monotonic() + 600)
      threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
      try:
        pool.wait_any([ticket])
      except KeyboardInterrupt:
        after = pool.submit(int, deadline=time.monotonic() + 5)
        pool.wait_any([after], 5)  # the lock is free again
        print('saved', after.result, flush=True)
      """,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'saved 0\n'
