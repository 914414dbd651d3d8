"""A pool whose calls are interrupted, whose servers die and do not start."""

import os
import pathlib
import signal
import struct
import subprocess
import sys
import time
from concurrent import futures

import pytest

from agent_rl_jax.tools.sandbox import SandboxOptions, client, server
from agent_rl_jax.tools.sandbox.process import ProcessSandbox

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='needs Linux'
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(sandbox, code, seconds=10.0):
  return sandbox.run(code, deadline=time.monotonic() + seconds)


def together(sandbox, code, count=2, seconds=10.0):
  """The results of calls that run at the same time."""
  with futures.ThreadPoolExecutor(count) as threads:
    made = [threads.submit(run, sandbox, code, seconds) for _ in range(count)]
    return [future.result() for future in made]


def _kill_servers(sandbox):
  """Kills the servers and waits until all their processes have ended."""
  for used in list(sandbox._clients):
    os.kill(used.pid, signal.SIGKILL)
    stop = time.monotonic() + 3
    while not used.ended and time.monotonic() < stop:
      time.sleep(0.01)
    assert used.ended


class _Interrupt(BaseException):
  pass


@pytest.fixture
def single():
  made = ProcessSandbox(SandboxOptions(processes=1, wall_seconds=3.0))
  yield made
  made.close()


@pytest.mark.parametrize('error', [_Interrupt, MemoryError, OSError])
def test_an_exception_in_a_call_does_not_shift_the_answers(
    single, monkeypatch, error
):
  receive = client.Client._receive

  def interrupted(self, deadline):
    if self.hello is not None:
      monkeypatch.undo()
      raise error
    return receive(self, deadline)

  run(single, 'print(0)')
  monkeypatch.setattr(client.Client, '_receive', interrupted)
  if error is _Interrupt:
    with pytest.raises(_Interrupt):
      run(single, 'print("A")')
  else:
    assert run(single, 'print("A")').error_kind == 'unavailable'
  for name in 'BCD':
    assert run(single, f'print("{name}")').stdout == f'{name}\n'


def test_an_answer_to_another_request_is_no_answer(single):
  run(single, 'print(0)')
  (used,) = single._clients
  used._number += 1  # as if a request had been lost on the way
  with pytest.raises(client.Dead):
    payload = struct.pack('>Qd', 1, 1.0) + b'print("A")'
    used._write(struct.pack('>I', len(payload)) + payload, time.monotonic() + 1)
    used.call(b'print("B")', 1.0, time.monotonic() + 5)


def test_a_dead_client_writes_to_no_file_that_has_its_numbers(single, tmp_path):
  run(single, 'print(0)')
  (used,) = single._clients
  numbers = {used._requests, used._answers}
  used.kill()
  files = [open(tmp_path / str(i), 'w+b') for i in range(8)]
  try:
    assert numbers & {file.fileno() for file in files}
    assert used.ended
    with pytest.raises(client.Dead):
      used.call(b'print("model code")', 1.0, time.monotonic() + 1)
    with pytest.raises(client.Dead):
      used.hello = None
      used.wait_ready(time.monotonic() + 1)
    assert all(os.path.getsize(file.name) == 0 for file in files)
  finally:
    for file in files:
      file.close()


def test_a_replacement_that_does_not_start_is_tried_again(
    single, monkeypatch, caplog
):
  run(single, 'print(0)')

  def refuse(*arguments, **keywords):
    raise BlockingIOError(11, 'Resource temporarily unavailable')

  monkeypatch.setattr(client.subprocess, 'Popen', refuse)
  _kill_servers(single)
  for _ in range(3):
    result = run(single, 'print(1)')
    assert result.error_kind == 'unavailable'
    assert result.error == 'the sandbox is unavailable'
  assert 'Resource temporarily unavailable' in caplog.text
  assert single.pids == []
  monkeypatch.undo()
  assert run(single, 'print(1)').stdout == '1\n'


def test_a_layer_lost_later_is_told_without_paths(single):
  """What a model reads is the same on every machine and in every run."""
  run(single, 'print(0)')
  folder, single._folder = single._folder, '/proc/no/such'
  _kill_servers(single)
  result = run(single, 'print(1)')
  single._folder = folder
  assert result.error_kind == 'unavailable'
  assert result.error == 'the sandbox is unavailable'
  assert '/proc/no' in result.reason


def test_waiting_for_a_server_does_not_shorten_a_call():
  made = ProcessSandbox(SandboxOptions(processes=1, wall_seconds=1.0))
  try:
    run(made, 'print(0)')
    code = 'import time\ntime.sleep(0.7)\nprint(1)'
    results = together(made, code, count=3)
    assert [result.stdout for result in results] == ['1\n'] * 3
    # One that gets only the rest of its time has not had its chance.
    results = together(made, code, count=2, seconds=1.6)
    kinds = sorted(result.error_kind for result in results)
    assert kinds == ['none', 'unavailable']
  finally:
    made.close()


_LEAVES = """
import os, signal, sys, time
from agent_rl_jax.tools.sandbox import SandboxOptions
from agent_rl_jax.tools.sandbox.process import ProcessSandbox
sandbox = ProcessSandbox(SandboxOptions(processes=1, layers=('landlock', 'seccomp')))
run = lambda code: sandbox.run(code, deadline=time.monotonic() + 9)
run('print(1)')
server = sandbox.folders[0]
os.kill(sandbox.pids[0], signal.SIGKILL)
time.sleep(0.2)
assert run('print(2)').stdout == '2\\n'
print(sandbox._folder, os.path.exists(server), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_replaced_server_leaves_no_folder_to_a_killed_trainer():
  done = subprocess.run(
      [sys.executable, '-c', _LEAVES],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      text=True,
      check=False,
  )
  folder, left = done.stdout.split()
  assert left == 'False'
  stop = time.monotonic() + 3
  while os.path.exists(folder) and time.monotonic() < stop:
    time.sleep(0.02)
  assert not os.path.exists(folder)


def test_user_ids_that_have_a_name_are_skipped(monkeypatch):
  first = server._free_uid()
  known = server.pwd.getpwuid

  def taken(uid):
    return None if uid == first else known(uid)

  monkeypatch.setattr(server.pwd, 'getpwuid', taken)
  assert server._free_uid() == first + 1 or first == 59_999


def test_a_server_that_is_first_used_late_answers(monkeypatch):
  """Its hello is read at the first use, when its time to start is over."""
  monkeypatch.setattr(client, 'START_SECONDS', 3.0)
  sandbox = ProcessSandbox(SandboxOptions(processes=3, wall_seconds=3.0))
  try:
    late = [c for c in sandbox._clients if c.hello is None]
    assert len(late) == 2
    stop = time.monotonic() + 20
    while any(c.starting for c in late) and time.monotonic() < stop:
      time.sleep(0.05)
    assert not any(c.starting for c in late)
    code = 'import time; time.sleep(0.3); print(7)'
    results = together(sandbox, code, count=3)
    assert [r.stdout for r in results] == ['7\n'] * 3
    assert sandbox.replaced == 0
  finally:
    sandbox.close()
