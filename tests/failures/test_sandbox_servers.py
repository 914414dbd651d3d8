"""Servers that hang or die, trainers that die, many callers at once."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from agent_rl_jax.tools.sandbox import SandboxOptions
from agent_rl_jax.tools.sandbox.process import ProcessSandbox

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='needs Linux'
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def sandbox():
  made = ProcessSandbox(SandboxOptions(processes=2, wall_seconds=3.0))
  yield made
  made.close()


def run(sandbox, code, seconds=10.0):
  return sandbox.run(code, deadline=time.monotonic() + seconds)


def together(sandbox, code, count=2, seconds=10.0):
  """The results of calls that run at the same time, each on its server."""
  with futures.ThreadPoolExecutor(count) as threads:
    made = [threads.submit(run, sandbox, code, seconds) for _ in range(count)]
    return [future.result() for future in made]


_SLOW = 'import time\ntime.sleep(0.3)\nprint(1)'


def _children(pid):
  path = f'/proc/{pid}/task/{pid}/children'
  return [int(word) for word in pathlib.Path(path).read_text().split()]


def _gone(pids, seconds):
  """Whether all the processes end (zombies count as ended) in time."""
  stop = time.monotonic() + seconds

  def alive(pid):
    try:
      stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
      return False
    return stat.rsplit(')', 1)[1].split()[0] not in 'ZX'

  while any(alive(pid) for pid in pids):
    if time.monotonic() > stop:
      return False
    time.sleep(0.02)
  return True


def _family(pid):
  """A launcher, its server, the server's supervisor and its child."""
  found, queue = [], [pid]
  while queue:
    pid = queue.pop()
    found.append(pid)
    queue += _children(pid)
  return found


def test_a_server_killed_while_idle_is_replaced_before_the_call(sandbox):
  together(sandbox, _SLOW)  # both have started
  replaced = sandbox.replaced
  families = [pid for first in sandbox.pids for pid in _family(first)]
  for pid in sandbox.pids:
    os.kill(pid, signal.SIGKILL)
  assert _gone(families, 3)
  for _ in range(2):
    results = together(sandbox, _SLOW)
    assert [result.stdout for result in results] == ['1\n'] * 2
  assert sandbox.replaced == replaced + 2


@pytest.mark.parametrize('who', ['launcher', 'server', 'supervisor', 'child'])
def test_a_server_killed_during_a_call_ends_that_call_alone(sandbox, who):
  answers = []

  def call():
    answers.append(run(sandbox, 'import time\ntime.sleep(2)'))

  thread = threading.Thread(target=call)
  thread.start()
  time.sleep(0.3)
  busy = next(f for f in map(_family, sandbox.pids) if len(f) == 4)
  launcher, server, *others = busy
  supervisor, child = sorted(others)
  victim = dict(
      launcher=launcher, server=server, supervisor=supervisor, child=child
  )[who]
  os.kill(victim, signal.SIGKILL)
  thread.join()
  assert answers[0].error_kind == 'crashed', answers
  for _ in range(3):
    assert run(sandbox, 'print(1)').stdout == '1\n'
  assert child not in [p for f in map(_family, sandbox.pids) for p in f]


def test_a_hung_server_costs_its_call_the_deadline_and_no_more(sandbox):
  replaced = sandbox.replaced
  servers = [_children(pid)[0] for pid in sandbox.pids]
  for pid in servers:
    os.kill(pid, signal.SIGSTOP)
  results = together(sandbox, 'print(1)', seconds=0.3)
  assert [result.error_kind for result in results] == ['timeout'] * 2
  assert sandbox.replaced == replaced + 2
  # Not the code's fault: it has not been tried.
  result = run(sandbox, 'print(1)', seconds=0.06)
  assert result.error_kind == 'unavailable' and 'starting' in result.error
  assert run(sandbox, 'print(1)').stdout == '1\n'
  assert _gone(servers, 3)


def test_many_threads_share_few_servers(sandbox):
  answers = {}

  def caller(name):
    for i in range(4):
      code = f'import time\ntime.sleep(0.01)\nprint({name} * 100 + {i})'
      answers[name, i] = run(sandbox, code, seconds=30.0).stdout

  threads = [threading.Thread(target=caller, args=(n,)) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert answers == {
      (n, i): f'{n * 100 + i}\n' for n in range(8) for i in range(4)
  }


def test_a_caller_that_finds_all_servers_busy_is_answered_in_time(sandbox):
  def occupy():
    run(sandbox, 'import time\ntime.sleep(1)')

  threads = [threading.Thread(target=occupy) for _ in range(2)]
  for thread in threads:
    thread.start()
  time.sleep(0.2)
  result = run(sandbox, 'print(1)', seconds=0.2)
  assert result.error_kind == 'unavailable' and 'busy' in result.error
  for thread in threads:
    thread.join()


def test_descriptors_and_processes_do_not_pile_up(sandbox):
  run(sandbox, 'print(1)')
  launchers = sandbox.pids
  time.sleep(0.2)
  idle = [pid for first in launchers for pid in _family(first)]

  def descriptors():
    # A supervisor tidies up after it has answered.
    time.sleep(0.2)
    return {pid: len(os.listdir(f'/proc/{pid}/fd')) for pid in idle}

  before = descriptors()
  mine = len(os.listdir('/proc/self/fd'))
  for code in ('print(1)', '1/0', 'import os\nos._exit(1)') * 4:
    run(sandbox, code)
  assert descriptors() == before
  assert len(os.listdir('/proc/self/fd')) == mine
  # None is left of the calls.
  assert idle == [pid for first in launchers for pid in _family(first)]


def test_the_cpu_limit_counts_work_and_not_time():
  made = ProcessSandbox(
      SandboxOptions(processes=1, wall_seconds=8.0, cpu_seconds=1)
  )
  try:
    result = run(made, 'while True: pass')
    assert result.error_kind == 'timeout' and 'computing' in result.error
    code = 'import time\ntime.sleep(1.2)\nprint(1)'
    assert run(made, code).stdout == '1\n'
  finally:
    made.close()


def test_close_ends_everything_even_a_call_in_flight():
  made = ProcessSandbox(SandboxOptions(processes=2))
  folder = made._folder
  pids = [pid for first in made.pids for pid in _family(first)]
  answers = []
  thread = threading.Thread(
      target=lambda: answers.append(run(made, 'while True: pass'))
  )
  thread.start()
  time.sleep(0.3)
  made.close()
  thread.join()
  assert answers[0].error_kind == 'crashed'
  assert run(made, 'print(1)').error_kind == 'unavailable'
  assert _gone(pids, 3)
  assert not os.path.exists(folder)
  made.close()


_TRAINER = """
import os, sys, threading, time
from agent_rl_jax.tools.sandbox import BACKENDS, SandboxOptions
backend, fork = sys.argv[1], sys.argv[2] == 'fork'
sandbox = BACKENDS[backend](SandboxOptions(
    backend=backend, processes=2, wall_seconds=60.0, cpu_seconds=int(sys.argv[3])))
run = lambda: sandbox.run('while True: pass', deadline=time.monotonic() + 60)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.3)  # so that it has the server that is up already
for _ in range(3):
  sandbox.run('print(1)', deadline=time.monotonic() + 10)
# A data worker, say, that has inherited the pipes and outlives the trainer.
worker = os.fork() if fork else -1
if worker == 0:
  time.sleep(30)
  os._exit(0)
print(worker, getattr(sandbox, '_folder', ''), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    'backend, fork', [('process', ''), ('process', 'fork'), ('monty', '')]
)
def test_servers_end_with_a_killed_trainer(backend, fork):
  # A monty worker ends at once when idle, and else when its call's time is up.
  cpu_seconds = '60' if backend == 'process' else '1'
  if backend == 'monty':
    pytest.importorskip('pydantic_monty')
  trainer = subprocess.Popen(
      [sys.executable, '-c', _TRAINER, backend, fork, cpu_seconds],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      text=True,
  )
  worker = -1
  try:
    worker, _, folder = trainer.stdout.readline().strip().partition(' ')
    worker = int(worker)
    family = [p for p in _family(trainer.pid) if p not in (trainer.pid, worker)]
    assert len(family) >= (7 if backend == 'process' else 2)
    trainer.kill()
    trainer.wait()
    # Long, for a machine that is busy: they end by themselves or never.
    assert _gone(family, 20)
    if folder:
      stop = time.monotonic() + 20
      while os.path.exists(folder) and time.monotonic() < stop:
        time.sleep(0.02)
      assert not os.path.exists(folder)
  finally:
    trainer.kill()
    trainer.wait()
    if worker > 0:
      os.kill(worker, signal.SIGKILL)
    trainer.stdout.close()


def test_the_folder_goes_when_the_servers_are_seen_to_end_first():
  """Launchers that look late find the server and the trainer gone at once."""
  trainer = subprocess.Popen(
      [sys.executable, '-c', _TRAINER, 'process', '', '60'],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      text=True,
  )
  launchers = []
  try:
    folder = trainer.stdout.readline().strip().partition(' ')[2]
    launchers = _children(trainer.pid)
    servers = [pid for launcher in launchers for pid in _children(launcher)]
    assert os.path.exists(folder) and len(servers) == 2
    for pid in launchers:
      os.kill(pid, signal.SIGSTOP)
    trainer.kill()
    trainer.wait()
    assert _gone(servers, 20)
    for pid in launchers:
      os.kill(pid, signal.SIGCONT)
    assert _gone(launchers, 20)
    assert not os.path.exists(folder)
  finally:
    trainer.kill()
    trainer.wait()
    for pid in launchers:
      if not _gone([pid], 0):
        os.kill(pid, signal.SIGKILL)
    trainer.stdout.close()
