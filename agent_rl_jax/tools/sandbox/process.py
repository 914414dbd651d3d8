"""The `process` backend, trainer's side: a pool of fork servers.

Starts servers (server.py) as programs of their own, so that nothing is ever
forked from a process that runs JAX.  Leaves out the confinement itself and the
pipes (client.py).  Invariant: `run` answers by its deadline; a server that
does not is killed and replaced, the pool keeps its size, and servers end when
the trainer's process does, however it ends.
"""

import contextlib
import logging
import os
import queue
import sys
import tempfile
import threading
import time

from agent_rl_jax.tools.sandbox import client as client_lib
from agent_rl_jax.tools.sandbox import options as options_lib
from agent_rl_jax.tools.sandbox import scratch

# Kept of the time left for the way there and back: a share, within bounds.
# An answer that misses the deadline costs the server.
_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 0.25, 0.05, 0.5
# A call that is stopped with less than this share of its time has had to wait
# too long for a server.
_FAIR_SHARE = 0.8
_MAX_CODE = 1 << 20
_TRIES = 3
_CLOSED = 'the sandbox is closed'
_BUSY = 'the sandbox is busy'
_UNAVAILABLE = 'the sandbox is unavailable'
_LOG = logging.getLogger(__name__)


class _Place:
  """One server's place in the pool; empty while none could be started."""

  def __init__(self, client: client_lib.Client | None = None):
    self.client = client


def _remove(folder: str) -> None:
  """Removes what servers have left, which is nothing unless one was killed."""
  for _ in range(_TRIES):  # what the kernel is still ending may still write
    try:
      scratch.empty(folder)
      os.rmdir(folder)
    except FileNotFoundError:
      return
    except OSError:
      time.sleep(0.01)


def _answer(kind: str, error: str, reason: str = '') -> dict:
  return {
      'kind': kind,
      'error': error,
      'reason': reason,
      'stdout': '',
      'truncated': False,
  }


def _margin(left: float) -> float:
  return min(max(_LEAST_MARGIN, _MARGIN * left), _MOST_MARGIN)


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
    # The last one used comes first: it is up, and its pages are warm.
    self._idle: queue.LifoQueue[_Place] = queue.LifoQueue()
    self._lock = threading.Lock()
    self._clients: set[client_lib.Client] = set()
    self._closed = False
    self.replaced = 0
    self.missing: dict[str, str] = {}
    self._layers = list(options.layers)
    try:
      first = self._negotiate()
    except BaseException:
      _remove(self._folder)
      raise
    for _ in range(options.processes - 1):
      place = _Place()
      with contextlib.suppress(OSError):
        place.client = self._start()
      self._idle.put(place)
    self._idle.put(_Place(first))
    self.why = self._describe(first.hello)

  def _settings(self) -> dict:
    options = self._options
    return {
        'wall_seconds': float(options.wall_seconds),
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

  def _start(self) -> client_lib.Client:
    client = client_lib.Client(self._settings())
    with self._lock:
      self._clients.add(client)
    return client

  def _negotiate(self) -> client_lib.Client:
    """Starts one server, giving up the layers that this machine lacks.

    Servers started later must have the same layers, or they do not start.
    """
    while True:
      place = _Place()
      try:
        place.client = self._start()
        place.client.wait_ready(time.monotonic() + client_lib.START_SECONDS)
        return place.client
      except client_lib.LayerMissing as error:
        self._discard(place)
        if error.layer not in self._layers:
          raise options_lib.SandboxUnavailable(
              f'the fork server does not start: {error.reason}'
          ) from error
        self._layers.remove(error.layer)
        self.missing[error.layer] = error.reason
      except (client_lib.Hung, client_lib.Dead, OSError) as error:
        self._discard(place)
        raise options_lib.SandboxUnavailable(
            f'the fork server does not start: {error!r}'
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

  def _discard(self, place: _Place) -> None:
    """Ends a place's server, if it has one, and removes its files."""
    client, place.client = place.client, None
    if client is None:
      return
    with self._lock:
      self._clients.discard(client)
    client.kill()
    _remove(self._folder_of(client.pid))

  def _renew(self, place: _Place) -> None:
    """Ends a place's server and starts another.

    The place stays empty once the sandbox is closed, or when no process can
    be started; the next call that takes it tries again.
    """
    try:
      self._discard(place)
      if self._closed:
        return
      with self._lock:
        self.replaced += 1
      place.client = self._start()
    except Exception as error:
      _LOG.warning('no sandbox server could be started: %s', error)

  def _release(self, place: _Place) -> None:
    with self._lock:
      if not self._closed:
        self._idle.put(place)
        return
    self._discard(place)

  def run(self, code: str, *, deadline: float) -> options_lib.SandboxResult:
    """Runs `code`; see `options.Sandbox`."""
    began = time.monotonic()
    source = code.encode('utf-8', 'surrogatepass')
    if len(source) > _MAX_CODE:
      answer = _answer('exception', f'ValueError: code of {len(source)} bytes')
    elif self._closed:
      answer = _answer('unavailable', _CLOSED)
    else:
      answer = self._in_turn(source, began, deadline)
    if answer['reason']:
      _LOG.warning('%s: %s', answer['error'], answer['reason'])
    return options_lib.SandboxResult(
        answer['stdout'],
        answer['kind'],
        answer['error'],
        answer['truncated'],
        time.monotonic() - began,
        answer['reason'],
    )

  def _in_turn(self, source: bytes, began: float, deadline: float) -> dict:
    """Waits for a place and tries the call there."""
    try:
      place = self._idle.get(timeout=max(0.0, deadline - began))
    except queue.Empty:
      return _answer('unavailable', _BUSY)
    try:
      return self._try(place, source, began, deadline)
    except client_lib.Hung:
      self._renew(place)
      return _answer('timeout', 'TimeoutError: the sandbox did not answer')
    except client_lib.Dead:
      self._renew(place)
      return _answer('crashed', 'Crashed: the sandbox ended and was replaced')
    except Exception as error:
      self._renew(place)
      reason = f'{type(error).__name__}: {error}'
      return _answer('unavailable', _UNAVAILABLE, reason)
    except BaseException:
      # An answer may be on its way that belongs to nobody.
      self._discard(place)
      raise
    finally:
      self._release(place)

  def _try(self, place, source: bytes, began: float, deadline: float) -> dict:
    """One call in a place's server; raises what `Client.call` raises."""
    if place.client is None or place.client.ended:
      self._renew(place)
    if place.client is None:
      return _answer('unavailable', _CLOSED if self._closed else _UNAVAILABLE)
    margin = _margin(deadline - time.monotonic())
    try:
      place.client.wait_ready(deadline - margin)
    except client_lib.Hung:
      # One that may still come up is left alone by a hurried caller.
      if not place.client.starting:
        self._renew(place)
      return _answer('unavailable', 'the sandbox is starting')
    # The call's own clock starts here: a queue does not shorten its time.
    left = deadline - margin - time.monotonic()
    if left <= 0:
      return _answer('unavailable', _BUSY)
    wall = min(self._options.wall_seconds, left)
    answer = place.client.call(source, wall, deadline)
    allowed = deadline - began
    due = min(self._options.wall_seconds, allowed - _margin(allowed))
    if answer['stopped'] == 'timeout' and wall < _FAIR_SHARE * due:
      return _answer('unavailable', _BUSY)
    return answer

  def _folder_of(self, pid: int) -> str:
    return os.path.join(self._folder, f'server-{pid}')

  @property
  def folders(self) -> list[str]:
    """Where the servers keep their files, as seen from outside."""
    return [self._folder_of(pid) for pid in self.pids]

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
        place = self._idle.get_nowait()
      except queue.Empty:
        break
      if place.client is not None:
        clients.discard(place.client)
        place.client.close()
    for client in clients:
      # In use: its pipes belong to the caller's thread, which will see it end.
      client.stop()
    _remove(self._folder)
