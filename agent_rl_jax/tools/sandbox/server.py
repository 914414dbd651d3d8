"""The fork server: a small warm interpreter that runs one call at a time.

Started as a program of its own, with an empty environment, and imports the
standard library only.  Two processes: a launcher, which lives outside every
namespace, ends the server when the trainer is gone and removes its files; and
the server, which forks a confined child for each request.  Leaves out pools,
the caller's deadlines and replacement (process.py).  Invariant: only the
server writes to the trainer, so code cannot forge a frame.

Frames on both pipes: 4 bytes of length, then the payload.  A request is the
wall-clock seconds (8 bytes, float) and the code; an answer is a JSON object.
The first answer says that the server is ready, or which layer is missing.
"""

import codecs
import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator

from agent_rl_jax.tools.sandbox import (
    child,
    landlock,
    namespaces,
    scratch,
    seccomp,
)

# The pipes to the trainer, out of the way of the child's descriptors 0 to 4.
_REQUESTS, _ANSWERS = 20, 21
_PLACEHOLDERS = range(5)
_PACKAGE = 'agent_rl_jax'
_NOT_PYTHON = ('site-packages', 'dist-packages', 'test', 'idlelib')
_CONFINED = b'confined\n'
_MAX_REPORT = 1 << 14
_MAX_DRAIN = 1 << 24
_TICK_MS = 50
_FIRST_UID, _UIDS = 50_000, 10_000
_FLOOD = 64  # times the output limit, at least
_MIN_FLOOD = 1 << 20


class LayerError(Exception):
  """A layer of protection cannot be had here."""

  def __init__(self, layer: str, reason: str):
    super().__init__(f'{layer}: {reason}')
    self.layer, self.reason = layer, reason


def _send(answer: dict) -> None:
  payload = json.dumps(answer).encode()
  data = struct.pack('>I', len(payload)) + payload
  while data:
    data = data[os.write(_ANSWERS, data) :]


def _read_exactly(count: int) -> bytes:
  data = b''
  while len(data) < count:
    part = os.read(_REQUESTS, count - len(data))
    if not part:
      raise EOFError('the trainer closed its pipe')
    data += part
  return data


# Start: the library and the layers.


def _library(paths: list[str]) -> tuple[list[str], list[str], list[str]]:
  """What of Python may be seen: (roots, entries to read, folders to hide)."""
  found = [p for p in sys.path if os.path.isdir(p) and p not in paths]
  read, hide = list(paths), []
  for root in found:
    for name in os.listdir(root):
      path = os.path.join(root, name)
      if not os.path.realpath(path).startswith(os.path.realpath(root) + '/'):
        continue  # a link to a file of the system's configuration, say
      if name not in _NOT_PYTHON:
        read.append(path)
      elif path not in paths:
        hide.append(path)
  roots = [*found, *paths]
  outer = [
      path
      for path in roots
      if not any(path.startswith(other + '/') for other in roots)
  ]
  return outer, read, hide


def _check_layers(settings: dict) -> None:
  """Raises LayerError for the first layer that cannot work here."""
  layers = settings['layers']
  if 'uid' in layers:
    if os.geteuid() != 0:
      raise LayerError('uid', 'not root, so there is no user to change to')
    pid = os.fork()
    if pid == 0:
      try:
        child.drop_user(settings['uid'])
      except OSError:
        os._exit(1)
      os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
      raise LayerError('uid', 'this root may not change its user')
  if 'landlock' in layers and not landlock.abi():
    raise LayerError('landlock', 'the kernel has no Landlock')
  if 'seccomp' in layers and (reason := seccomp.unsupported()):
    raise LayerError('seccomp', reason)


def _mapped() -> int:
  with open('/proc/self/statm') as file:
    return int(file.read().split()[0]) * resource.getpagesize()


# One call.


class _Stream:
  """What comes out of one pipe, kept up to a limit and counted beyond it."""

  def __init__(self, descriptor: int, limit: int):
    os.set_blocking(descriptor, False)
    self.descriptor, self.limit = descriptor, limit
    self.total, self.data, self.open = 0, b'', True

  def read(self) -> bool:
    """Takes what is there; False when there is nothing."""
    try:
      part = os.read(self.descriptor, 1 << 16)
    except BlockingIOError:
      return False
    self.open = bool(part)
    self.total += len(part)
    self.data += part[: max(0, self.limit - len(self.data))]
    return self.open

  @property
  def truncated(self) -> bool:
    return self.total > self.limit

  def text(self) -> str:
    """The kept bytes; a character cut in two by the limit is left out."""
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    return decoder.decode(self.data, final=not self.truncated)


class _Server:
  """Everything that stays the same from call to call."""

  def __init__(self, settings: dict, box: str, rules: int | None, mapped: int):
    self.settings, self.box = settings, box
    self.rules, self.mapped = rules, mapped
    self.pid = os.getpid()

  def call(self, wall: float, source: bytes) -> Iterator[dict]:
    """Runs the code in a fresh process; yields how it ended, then cleans up.

    The answer does not wait for the cleaning: a process that held much
    memory takes long to take apart.
    """
    began = time.monotonic()
    out, out_end = os.pipe()
    report, report_end = os.pipe()
    output = _Stream(out, self.settings['output_bytes'])
    words = _Stream(report, _MAX_REPORT)
    pid = os.fork()
    if pid == 0:
      child.run(
          source,
          (out_end, report_end),
          self.box,
          self.settings,
          self.mapped,
          self.rules,
          self.pid,
      )
    os.close(out_end)
    os.close(report_end)
    process = os.pidfd_open(pid)
    stopped = self._wait(process, output, words, began + wall)
    self._kill(pid)
    for stream in (output, words):
      while stream.open and stream.read() and stream.total < _MAX_DRAIN:
        pass
    ended = None if stopped else os.wait4(pid, 0)[1:]
    kind, error = self._judge(stopped, ended, words.data, wall)
    yield {
        'kind': kind,
        'error': error,
        'stdout': output.text(),
        'truncated': output.truncated,
    }
    if ended is None:
      os.waitpid(pid, 0)
    for descriptor in (process, out, report):
      os.close(descriptor)
    scratch.empty(self.box)

  def _kill(self, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is its own
    if self.pid == 1:
      try:
        os.kill(-1, signal.SIGKILL)  # all of this namespace but itself
      except ProcessLookupError:
        pass

  def _wait(self, process, output, words, deadline: float) -> str:
    """Reads until the process ends; returns why it must be stopped, or ''."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.register(_REQUESTS, 0)  # reports only that the trainer is gone
    streams = {s.descriptor: s for s in (output, words)}
    for descriptor in streams:
      poller.register(descriptor, select.POLLIN)
    flood = max(_MIN_FLOOD, _FLOOD * output.limit)
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        return 'timeout'
      ready = dict(poller.poll(min(_TICK_MS, left * 1e3 + 1)))
      if ready.get(_REQUESTS, 0) & (select.POLLHUP | select.POLLERR):
        raise EOFError('the trainer closed its pipe')
      for descriptor in streams.keys() & ready.keys():
        streams[descriptor].read()
        if not streams[descriptor].open:
          poller.unregister(descriptor)
      if process in ready:
        return ''
      if output.total > flood:
        return 'output'
      # In its own mount space the scratch file system keeps the limit.
      if not ready and 'namespaces' not in self.settings['layers']:
        if not scratch.within(self.box, self.settings['folder_bytes']):
          return 'files'

  def _judge(self, stopped, ended, report, wall) -> tuple[str, str]:
    """(error kind, the line that the agent sees)."""
    if stopped == 'timeout':
      return 'timeout', f'TimeoutError: no answer within {wall:.3g} s'
    if stopped == 'output':
      return 'output', 'OutputError: the code printed far too much'
    if stopped == 'files':
      return 'output', 'OutputError: the code wrote too many files'
    if not report.startswith(_CONFINED):
      text = report.decode('utf-8', 'replace') or 'died before it was confined'
      return 'unavailable', f'the sandbox could not be set up: {text}'
    status, spent = ended
    # CPU seconds, a quarter less since the clock of the limit is coarse.
    cpu = self.settings['cpu_seconds']
    if os.WIFSIGNALED(status):
      if spent.ru_utime + spent.ru_stime > cpu - 0.25:
        return 'timeout', f'TimeoutError: more than {cpu} s of computing'
      name = signal.Signals(os.WTERMSIG(status)).name
      return 'crashed', f'Crashed: the process died of {name}'
    text = report[len(_CONFINED) :].decode('utf-8', 'replace')
    kind, separator, error = text.partition('\n')
    if kind not in ('none', 'exception', 'memory') or not separator:
      code = os.WEXITSTATUS(status)
      return 'crashed', f'Crashed: the process ended itself with code {code}'
    return kind, error


# The two processes.


def _serve(settings: dict, folder: str, mapped: int) -> None:
  """The server: sets up what all calls share, then answers requests."""
  layers = settings['layers']
  child.die_with_parent()
  roots, read, hide = _library(settings['paths'])
  place = f'{folder}/scratch'
  if 'namespaces' in layers:
    try:
      place = namespaces.enter_root(
          f'{folder}/root',
          roots,
          hide,
          settings['folder_bytes'],
          scratch.MAX_FILES,
      )
    except OSError as error:
      raise LayerError('namespaces', str(error)) from error
  box = os.path.join(place, 'box')
  os.mkdir(box, 0o700)
  if 'uid' in layers:
    os.chown(box, settings['uid'], settings['uid'])
  if 'seccomp' in layers:
    seccomp.for_process(os.getpid())  # put together before the first fork
  rules = None
  if 'landlock' in layers:
    rules = landlock.ruleset(read, roots, [box])
  server = _Server(settings, box, rules, mapped)
  # Code that asks for this package is told that there is none.
  for name in [n for n in sys.modules if n.partition('.')[0] == _PACKAGE]:
    del sys.modules[name]
  gc.collect()
  gc.freeze()
  _send({'ready': True, 'landlock': landlock.abi(), 'uid': settings['uid']})
  while True:
    payload = _read_exactly(*struct.unpack('>I', _read_exactly(4)))
    (wall,) = struct.unpack('>d', payload[:8])
    for answer in server.call(wall, payload[8:]):
      _send(answer)


def _watch(server: int, trainer: int) -> bool:
  """The launcher: waits for the end of the server or of the trainer.

  Returns:
    Whether the trainer is gone, or wants this server gone.
  """
  process = os.pidfd_open(server)
  poller = select.poll()
  poller.register(process, select.POLLIN)
  poller.register(_REQUESTS, 0)
  # The parent is looked at too: a fork of the trainer may hold the pipe open.
  while not (ready := poller.poll(500)) and os.getppid() == trainer:
    pass
  os.kill(server, signal.SIGKILL)
  os.waitpid(server, 0)
  return process not in dict(ready)


def _guard(function, *arguments) -> None:
  """Runs one of the start-up steps; tells the trainer what went wrong."""
  try:
    function(*arguments)
  except EOFError:
    os._exit(0)
  except LayerError as error:
    _send({'ready': False, 'layer': error.layer, 'reason': error.reason})
    os._exit(1)
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'
    _send({'ready': False, 'layer': '', 'reason': reason})
    os._exit(1)


def main() -> None:
  """Entry point; settings are one JSON object in the first argument."""
  settings = json.loads(sys.argv[1])
  for old, new in ((0, _REQUESTS), (1, _ANSWERS)):
    os.dup2(old, new, inheritable=False)
  null = os.open(os.devnull, os.O_RDWR)
  for number in _PLACEHOLDERS:
    os.dup2(null, number)
  os.environ.clear()
  os.umask(0o022)
  settings['uid'] = _FIRST_UID + os.getpid() % _UIDS
  sys.path.extend(settings['paths'])
  folder = os.path.join(settings['folder'], f'server-{os.getpid()}')

  def prepare() -> None:
    for name in settings['preload']:
      importlib.import_module(name)
    _check_layers(settings)
    os.makedirs(settings['folder'], exist_ok=True)
    for name in (folder, f'{folder}/scratch', f'{folder}/root'):
      os.mkdir(name, 0o711)
    if 'namespaces' in settings['layers']:
      try:
        namespaces.unshare()
      except OSError as error:
        raise LayerError('namespaces', str(error)) from error

  trainer = settings['trainer']
  _guard(prepare)
  mapped = _mapped()
  server = os.fork()
  if server == 0:
    _guard(_serve, settings, folder, mapped)
    os._exit(0)
  os.close(_ANSWERS)
  alone = _watch(server, trainer)
  scratch.empty(folder)
  os.rmdir(folder)
  if alone:
    try:
      os.rmdir(settings['folder'])
    except OSError:
      pass  # other servers are still leaving
  os._exit(0)
