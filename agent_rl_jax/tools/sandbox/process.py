"""The `process` backend, trainer's side: a pool of fork servers.

Starts servers (server.py) as programs of their own, so that nothing is ever
forked from a process that runs JAX.  Leaves out the confinement itself.
Invariant: `run` answers by its deadline; a server that does not is killed and
replaced, and servers end when the trainer's process does, however it ends.
"""

import contextlib
import json
import os
import pathlib
import queue
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from agent_rl_jax.tools.sandbox import options as options_lib
from agent_rl_jax.tools.sandbox import scratch

_START_SECONDS = 20.0
# Kept of the time left for the way there and back: a share, within bounds.
# An answer that misses the deadline costs the server.
_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 0.25, 0.05, 0.5
_MAX_CODE = 1 << 20
_MAX_ANSWER = 1 << 26
_CLOSED = 'the sandbox is closed'

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
server.main()
"""
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Not -E: the hash seed is fixed, so that printing a set is deterministic.
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


class _Hung(Exception):
  """The server did not answer in time."""


class _Dead(Exception):
  """The server ended."""


class _Client:
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
    self._ready_by = time.monotonic() + _START_SECONDS
    self.hello = None

  @property
  def pid(self) -> int:
    return self._process.pid

  def wait_ready(self, deadline: float) -> None:
    """Raises LayerMissing, _Hung or _Dead when the server is no use."""
    if self.hello is None:
      hello = self._receive(min(deadline, self._ready_by))
      if not hello['ready']:
        raise LayerMissing(hello['layer'], hello['reason'])
      self.hello = hello

  @property
  def ended(self) -> bool:
    """Whether it died while nobody used it."""
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
    payload = struct.pack('>d', wall) + code
    self._write(struct.pack('>I', len(payload)) + payload, deadline)
    return self._receive(deadline)

  def _poll(self, descriptor: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(descriptor, event)
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        raise _Hung
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
        raise _Dead from error

  def _read(self, count: int, deadline: float) -> bytes:
    data = b''
    while len(data) < count:
      self._poll(self._answers, select.POLLIN, deadline)
      try:
        part = os.read(self._answers, count - len(data))
      except BlockingIOError:
        continue
      if not part:
        raise _Dead
      data += part
    return data

  def _receive(self, deadline: float) -> dict:
    (count,) = struct.unpack('>I', self._read(4, deadline))
    if count > _MAX_ANSWER:
      raise _Dead
    return json.loads(self._read(count, deadline))

  def close(self, grace: float = 1.0) -> None:
    """Ends the server: its pipe closes, and it is killed if that is no use."""
    self._process.stdin.close()
    try:
      self._process.wait(grace)
    except subprocess.TimeoutExpired:
      self.kill()
    self._process.stdout.close()

  def stop(self) -> None:
    """Ends launcher, server and child at once; leaves the pipes alone."""
    # The launcher alone is killed; the kernel then kills what it started.
    self._process.send_signal(signal.SIGKILL)

  def kill(self) -> None:
    """Ends launcher, server and child at once."""
    self.stop()
    self._process.wait()
    if not self._process.stdin.closed:
      self._process.stdin.close()
    self._process.stdout.close()


def _remove(folder: str) -> None:
  """Removes what servers have left, which is nothing unless one was killed."""
  with contextlib.suppress(OSError):
    scratch.empty(folder)
    os.rmdir(folder)


class ProcessSandbox:
  """Runs each call in a confined fork of a warm interpreter."""

  backend = 'process'

  def __init__(self, options: options_lib.SandboxOptions):
    """Starts the servers with every layer that this machine has.

    Raises:
      SandboxUnavailable: No server could be started.
    """
    if not sys.platform.startswith('linux'):
      raise options_lib.SandboxUnavailable(
          f'the process backend needs Linux, this is {sys.platform}'
      )
    self._options = options
    self._folder = tempfile.mkdtemp(prefix='agent_rl_jax_sandbox_')
    os.chmod(self._folder, 0o711)
    self._idle: queue.SimpleQueue[_Client] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._clients: set[_Client] = set()
    self._closed = False
    self.replaced = 0
    self.missing: dict[str, str] = {}
    self._layers = list(options.layers)
    try:
      first = self._negotiate()
    except BaseException:
      _remove(self._folder)
      raise
    self._idle.put(first)
    for _ in range(options.processes - 1):
      self._idle.put(self._start())
    self.why = self._describe(first.hello)

  def _settings(self) -> dict:
    options = self._options
    return {
        'cpu_seconds': int(options.cpu_seconds),
        'memory_bytes': int(options.memory_bytes),
        'output_bytes': int(options.output_bytes),
        'file_bytes': int(options.file_bytes),
        'folder_bytes': int(options.folder_bytes),
        'preload': list(options.preload),
        'paths': [os.path.abspath(path) for path in options.paths],
        'layers': self._layers,
        'folder': self._folder,
    }

  def _start(self) -> _Client:
    client = _Client(self._settings())
    with self._lock:
      self._clients.add(client)
    return client

  def _negotiate(self) -> _Client:
    """Starts one server, giving up the layers that this machine lacks.

    Servers started later must have the same layers, or they do not start.
    """
    while True:
      client = self._start()
      try:
        client.wait_ready(time.monotonic() + _START_SECONDS)
        return client
      except LayerMissing as error:
        self._discard(client)
        if error.layer not in self._layers:
          raise options_lib.SandboxUnavailable(
              f'the fork server does not start: {error.reason}'
          ) from error
        self._layers.remove(error.layer)
        self.missing[error.layer] = error.reason
      except (_Hung, _Dead) as error:
        self._discard(client)
        raise options_lib.SandboxUnavailable(
            f'the fork server does not start: {type(error).__name__[1:].lower()}'
        ) from error

  def _describe(self, hello: dict) -> str:
    words = {
        'namespaces': 'pid, network, IPC and mount namespaces',
        'landlock': f'Landlock ABI {hello["landlock"]}',
        'seccomp': 'seccomp allow-list',
        'uid': f'own user ({hello["uid"]})',
    }
    have = [words[name] for name in self._layers] + ['resource limits']
    lacks = [f'{name} ({reason})' for name, reason in self.missing.items()]
    text = 'process: ' + ', '.join(have)
    return text + ('; without ' + ', '.join(lacks) if lacks else '')

  def _discard(self, client: _Client) -> None:
    client.kill()
    with self._lock:
      self._clients.discard(client)

  def _replace(self, client: _Client) -> _Client | None:
    """Ends a server and starts another; None once the sandbox is closed."""
    self._discard(client)
    if self._closed:
      return None
    with self._lock:
      self.replaced += 1
    return self._start()

  def _release(self, client: _Client) -> None:
    with self._lock:
      if not self._closed:
        self._idle.put(client)
        return
    self._discard(client)

  def run(self, code: str, *, deadline: float) -> options_lib.SandboxResult:
    """Runs `code`; see `options.Sandbox`."""
    began = time.monotonic()

    def result(kind, error, stdout='', truncated=False):
      seconds = time.monotonic() - began
      return options_lib.SandboxResult(stdout, kind, error, truncated, seconds)

    source = code.encode('utf-8', 'surrogatepass')
    if len(source) > _MAX_CODE:
      return result('exception', f'ValueError: code of {len(source)} bytes')
    if self._closed:
      return result('unavailable', _CLOSED)
    client = None
    try:
      try:
        client = self._idle.get(timeout=max(0.0, deadline - began))
      except queue.Empty:
        return result('timeout', 'TimeoutError: the sandbox is busy')
      if client.ended:
        client = self._replace(client)
      if client is None:
        return result('unavailable', _CLOSED)
      left = deadline - time.monotonic()
      margin = min(max(_LEAST_MARGIN, _MARGIN * left), _MOST_MARGIN)
      try:
        client.wait_ready(deadline - margin)
      except _Hung:
        if not client.starting:
          client = self._replace(client)
        return result('timeout', 'TimeoutError: the sandbox is starting')
      left = deadline - margin - time.monotonic()
      if left <= 0:
        return result('timeout', 'TimeoutError: the sandbox is busy')
      wall = min(self._options.wall_seconds, left)
      answer = client.call(source, wall, deadline)
      return result(
          answer['kind'],
          answer['error'],
          answer['stdout'],
          answer['truncated'],
      )
    except _Hung:
      client = self._replace(client)
      return result('timeout', 'TimeoutError: the sandbox did not answer')
    except _Dead:
      client = self._replace(client)
      return result('crashed', 'Crashed: the sandbox ended and was replaced')
    except (LayerMissing, ValueError, KeyError) as error:
      client = self._replace(client)
      return result('unavailable', f'the sandbox has no protection: {error}')
    finally:
      if client is not None:
        self._release(client)

  @property
  def pids(self) -> list[int]:
    """Process ids of the servers' launchers."""
    with self._lock:
      return [client.pid for client in self._clients]

  def close(self) -> None:
    """Ends all servers; calls in flight end as `crashed`."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      clients = set(self._clients)
    while True:
      try:
        client = self._idle.get_nowait()
      except queue.Empty:
        break
      clients.discard(client)
      client.close()
    for client in clients:
      # In use: its pipes belong to the caller's thread, which will see it end.
      client.stop()
    _remove(self._folder)
