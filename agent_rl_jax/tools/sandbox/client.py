"""One fork server as the trainer sees it: a program and two pipes.

Leaves out the pool and what becomes of a call when its server fails
(process.py).  Invariant: once a client is killed it touches no descriptor,
for the numbers of its pipes may by then be those of other files.
"""

import json
import os
import pathlib
import select
import signal
import struct
import subprocess
import sys
import time

# Seconds for reading a hello that is late to be fetched.
_GRACE = 1.0
START_SECONDS = 20.0
_MAX_ANSWER = 1 << 26
_END_SECONDS = 0.2

# Finds the package's files without running the `__init__` of any package:
# the server must stay small, and must not import what the trainer imports.
_BOOTSTRAP = """
import sys, types
root, sys.argv = sys.argv[1], [''] + sys.argv[2:]
for name in ('', '.tools', '.tools.sandbox'):
  module = types.ModuleType('agent_rl_jax' + name)
  module.__path__ = [root + name.replace('.', '/')]
  sys.modules[module.__name__] = module
from agent_rl_jax.tools.sandbox import server
step = server.main
while True:
  step = step()
"""
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Not -E: the hash seed is fixed, so that a set of strings or numbers prints in
# the same order everywhere.  Objects that hash by address do not.
_FLAGS = ('-s', '-S', '-P', '-B', '-X', 'utf8', '-c')
_ENVIRONMENT = {
    'PYTHONHASHSEED': '0',
    'OPENBLAS_NUM_THREADS': '1',
    'OMP_NUM_THREADS': '1',
}


class LayerMissing(Exception):
  """A server could not set up a layer: (layer or '', reason)."""

  def __init__(self, layer: str, reason: str):
    super().__init__(f'{layer or "server"}: {reason}')
    self.layer, self.reason = layer, reason


class Hung(Exception):
  """The server did not answer in time."""


class Dead(Exception):
  """The server ended."""


class Client:
  """One server as the trainer sees it; used by one thread at a time."""

  def __init__(self, settings: dict):
    self._process = subprocess.Popen(
        [
            sys.executable,
            *_FLAGS,
            _BOOTSTRAP,
            str(_ROOT),
            json.dumps({**settings, 'trainer': os.getpid()}),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd='/',
        bufsize=0,
        # Ctrl-C in the terminal is the trainer's affair.
        start_new_session=True,
    )
    self._requests = self._process.stdin.fileno()
    self._answers = self._process.stdout.fileno()
    os.set_blocking(self._requests, False)
    os.set_blocking(self._answers, False)
    self._ready_by = time.monotonic() + START_SECONDS
    self._number = 0
    self.hello = None
    self.dead = False

  @property
  def pid(self) -> int:
    """Process id of the launcher, by which the server's folder is named."""
    return self._process.pid

  def wait_ready(self, deadline: float) -> None:
    """Raises LayerMissing, Hung or Dead when the server is no use."""
    if self.hello is None:
      # A server that nobody has used for long has long said hello: its word
      # is in the pipe and must still be read.
      ready_by = max(self._ready_by, time.monotonic() + _GRACE)
      hello = self._receive(min(deadline, ready_by))
      if not hello['ready']:
        raise LayerMissing(hello['layer'], hello['reason'])
      self.hello = hello

  @property
  def ended(self) -> bool:
    """Whether it died while nobody used it."""
    if self.dead:
      return True
    poller = select.poll()
    poller.register(self._answers, select.POLLIN)
    events = dict(poller.poll(0)).get(self._answers, 0)
    # A server that could not start has left word why, which is to be read.
    return bool(events & select.POLLHUP) and not events & select.POLLIN

  @property
  def starting(self) -> bool:
    """Whether it may still come up, so that a hurried caller spares it."""
    return self.hello is None and time.monotonic() < self._ready_by

  def call(self, code: bytes, wall: float, deadline: float) -> dict:
    """Sends one request and returns its answer.

    After any exception the client is of no more use: an answer may be on its
    way that would be taken for the next one.

    Raises:
      Hung: There was no answer by the deadline.
      Dead: The server ended, or answered another request.
    """
    self._number += 1
    payload = struct.pack('>Qd', self._number, wall) + code
    self._write(struct.pack('>I', len(payload)) + payload, deadline)
    answer = self._receive(deadline)
    if answer.get('number') != self._number:
      raise Dead
    return answer

  def _poll(self, descriptor: int, event: int, deadline: float) -> None:
    if self.dead:
      raise Dead
    poller = select.poll()
    poller.register(descriptor, event)
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        raise Hung
      if poller.poll(left * 1e3):
        return

  def _write(self, data: bytes, deadline: float) -> None:
    while data:
      self._poll(self._requests, select.POLLOUT, deadline)
      try:
        data = data[os.write(self._requests, data) :]
      except BlockingIOError:
        continue
      except OSError as error:
        raise Dead from error

  def _read(self, count: int, deadline: float) -> bytes:
    data = b''
    while len(data) < count:
      self._poll(self._answers, select.POLLIN, deadline)
      try:
        part = os.read(self._answers, count - len(data))
      except BlockingIOError:
        continue
      if not part:
        raise Dead
      data += part
    return data

  def _receive(self, deadline: float) -> dict:
    (count,) = struct.unpack('>I', self._read(4, deadline))
    if count > _MAX_ANSWER:
      raise Dead
    try:
      return json.loads(self._read(count, deadline))
    except ValueError as error:
      raise Dead from error

  def close(self, grace: float = 1.0) -> None:
    """Ends the server: its pipe closes, and it is killed if that is no use."""
    self.dead = True
    self._process.stdin.close()
    try:
      self._process.wait(grace)
    except subprocess.TimeoutExpired:
      self.kill()
    self._process.stdout.close()

  def stop(self) -> None:
    """Ends launcher, server and call at once; leaves the pipes alone."""
    # The launcher alone is killed; the kernel then kills what it started.
    self._process.send_signal(signal.SIGKILL)

  def kill(self) -> None:
    """Ends launcher, server and call at once."""
    self.dead = True
    self.stop()
    self._process.wait()
    self._process.stdin.close()
    if not self._process.stdout.closed:
      self._await_end()
      self._process.stdout.close()

  def _await_end(self) -> None:
    """Reads to the pipe's end, which is when the last writer has ended."""
    poller = select.poll()
    poller.register(self._answers, select.POLLIN)
    stop = time.monotonic() + _END_SECONDS
    while (left := stop - time.monotonic()) > 0 and poller.poll(left * 1e3):
      if not os.read(self._answers, 1 << 16):
        return
