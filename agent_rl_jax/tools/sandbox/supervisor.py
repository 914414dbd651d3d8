"""The supervisor of a server: takes requests, has them run, judges, answers.

A fork of the server that lives as long.  It holds the code and the output of
calls; the server, of which every call's process is a copy, is told to fork
and is handed descriptors, never a byte of a call.  Leaves out the confinement
and the caller's deadline.  Invariant: only the supervisor reads requests and
writes answers.

Frames on both pipes: 4 bytes of length, then the payload.  A request is its
number (8 bytes), the wall-clock seconds (8 bytes, float) and the code; an
answer is a JSON object with that number.
"""

import codecs
import dataclasses
import json
import os
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from agent_rl_jax.tools.sandbox import child, scratch

# The pipes to the trainer, out of the way of the child's descriptors 0 to 4.
REQUESTS, ANSWERS = 20, 21
_PIPES = 4  # a child's input, output, errors and report
_PID, _STATUS = struct.Struct('>i'), struct.Struct('>id')
_CONFINED = b'confined\n'
_MAX_REPORT = 1 << 14
_MAX_DRAIN = 1 << 24
_TICK = 0.05
_LOOK_SHARE = 4  # a look at the files may take a fifth of the time
_FLOOD = 64  # times the output limit, at least
_MIN_FLOOD = 1 << 20
_NOT_SET_UP = 'the sandbox could not be set up'


@dataclasses.dataclass(frozen=True)
class Common:
  """What stays the same from call to call.

  Attributes:
    settings: The server's settings: limits and layers.
    box: The scratch folder, emptied after each call.
    rules: Descriptor of the Landlock rule set; None without that layer.
    mapped: Bytes of address space that the server has mapped.
    server: Process id of the server, as it sees itself.
  """

  settings: dict
  box: str
  rules: int | None
  mapped: int
  server: int


def send(answer: dict) -> None:
  """Writes one frame to the trainer."""
  payload = json.dumps(answer).encode()
  data = struct.pack('>I', len(payload)) + payload
  while data:
    data = data[os.write(ANSWERS, data) :]


def _read_exactly(count: int) -> bytes:
  data = b''
  while len(data) < count:
    part = os.read(REQUESTS, count - len(data))
    if not part:
      raise EOFError('the trainer closed its pipe')
    data += part
  return data


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


class _Feed:
  """The code on its way into a pipe, after which the pipe ends."""

  def __init__(self, descriptor: int, data: bytes):
    os.set_blocking(descriptor, False)
    self.descriptor, self._data = descriptor, data

  def write(self) -> bool:
    """Writes what fits; whether that was the last of it."""
    try:
      self._data = self._data[os.write(self.descriptor, self._data) :]
    except BlockingIOError:
      pass
    except BrokenPipeError:
      self._data = b''  # nobody reads it any more
    return not self._data

  def close(self) -> None:
    if self.descriptor >= 0:
      os.close(self.descriptor)
    self.descriptor = -1


class Forks:
  """Both ends of what server and supervisor say to each other.

  The supervisor asks for a process and later for its reaping, so a process
  id is its process's own for as long as the supervisor uses it.
  """

  def __init__(self):
    kind = socket.SOCK_SEQPACKET
    self.server, self.supervisor = socket.socketpair(socket.AF_UNIX, kind)

  # The supervisor's side.

  def fork(self, descriptors: list[int]) -> int:
    """Has the server fork a child with these descriptors; 0 if it cannot."""
    socket.send_fds(self.supervisor, [b'f'], descriptors)
    return _PID.unpack(self._heard(_PID.size))[0]

  def reap(self) -> tuple[int, float]:
    """Has the server wait for the child; its status and CPU seconds."""
    self.supervisor.send(b'w')
    return _STATUS.unpack(self._heard(_STATUS.size))

  def _heard(self, size: int) -> bytes:
    data = self.supervisor.recv(size)
    if len(data) != size:
      raise EOFError('the server ended')
    return data

  # The server's side.

  def asked(self) -> list[int]:
    """Waits until a child is asked for; its descriptors, none at the end."""
    return list(socket.recv_fds(self.server, 1, _PIPES)[1])

  def forked(self, pid: int) -> None:
    self.server.send(_PID.pack(pid))

  def reaped(self, pid: int) -> None:
    """Waits until told to wait for the child, and reports how it ended."""
    if not self.server.recv(1):
      raise EOFError('the supervisor ended')
    _, status, spent = os.wait4(pid, 0)
    self.server.send(_STATUS.pack(status, spent.ru_utime + spent.ru_stime))


def supervise(common: Common, forks: Forks) -> NoReturn:
  """Sees one request after another through until the trainer is gone."""
  try:
    child.die_with_parent()
    if os.getppid() != common.server:
      os._exit(1)
    forks.server.close()
    while True:
      payload = _read_exactly(*struct.unpack('>I', _read_exactly(4)))
      number, wall = struct.unpack('>Qd', payload[:16])
      _call(common, forks, number, wall, payload[16:])
  finally:
    os._exit(1)  # the server ends with it, and whatever is left of a call


def _call(common, forks, number: int, wall: float, source: bytes) -> None:
  """Has the code run, answers, then cleans up.

  The answer does not wait for the cleaning: a process that held much memory
  takes long to take apart.
  """
  began = time.monotonic()
  # No device and no open file is shared with another call: the input is a
  # pipe that ends after the code, and printed errors are read and dropped.
  pipes = [os.pipe() for _ in range(_PIPES)]
  (stdin, writer), *outward = pipes
  ends = [stdin, *(end for _, end in outward)]
  pid = forks.fork(ends)
  for end in ends:
    os.close(end)
  limits = (common.settings['output_bytes'], 0, _MAX_REPORT)
  streams = [
      _Stream(read, limit)
      for (read, _), limit in zip(outward, limits, strict=True)
  ]
  feed = _Feed(writer, struct.pack('>I', len(source)) + source)
  if pid:
    process = os.pidfd_open(pid)
    stopped = _wait(common, process, feed, streams, began + wall)
    os.close(process)
    answer, reaped = _ended(common, forks, number, pid, stopped, streams)
    send(answer)
  else:
    reason = 'the server could not fork'
    send(_answer(number, 'unavailable', _NOT_SET_UP, reason=reason))
  feed.close()
  for stream in streams:
    os.close(stream.descriptor)
  if pid:
    if not reaped:
      forks.reap()
    scratch.empty(common.box)


def _ended(common, forks, number, pid, stopped, streams) -> tuple[dict, bool]:
  """Ends the call's process; the answer, and whether it is reaped already."""
  output, _, report = streams
  os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is its own
  if common.server == 1:
    try:
      os.kill(-1, signal.SIGKILL)  # all of this namespace but 1 and itself
    except ProcessLookupError:
      pass
  for stream in streams:
    while stream.open and stream.read() and stream.total < _MAX_DRAIN:
      pass
  # How it ended need not be asked of one that has said so itself.
  said = _said(report.data)
  ended = None if stopped or said else forks.reap()
  kind, error, reason = _judge(common.settings, stopped, ended, report.data)
  answer = _answer(
      number,
      kind,
      error,
      reason=reason,
      stdout=output.text(),
      truncated=output.truncated,
      stopped=stopped,
  )
  return answer, ended is not None


def _answer(number: int, kind: str, error: str, **more) -> dict:
  empty = {'stdout': '', 'truncated': False, 'reason': '', 'stopped': ''}
  return {'number': number, 'kind': kind, 'error': error, **empty, **more}


def _wait(common, process, feed, streams, deadline: float) -> str:
  """Reads until the process ends; returns why it must be stopped, or ''."""
  poller = select.poll()
  poller.register(process, select.POLLIN)
  poller.register(REQUESTS, 0)  # reports only that the trainer is gone
  if feed.write():
    feed.close()
  else:
    poller.register(feed.descriptor, select.POLLOUT)
  pipes = {stream.descriptor: stream for stream in streams}
  for descriptor in pipes:
    poller.register(descriptor, select.POLLIN)
  flood = max(_MIN_FLOOD, _FLOOD * common.settings['output_bytes'])
  # In its own mount space the scratch file system keeps the limit.
  look = float('inf') if 'namespaces' in common.settings['layers'] else 0.0
  while True:
    now = time.monotonic()
    left = deadline - now
    if left <= 0:
      return 'timeout'
    # By the clock and not when it is quiet: the code decides what is quiet.
    if now >= look:
      if not scratch.within(common.box, common.settings['folder_bytes']):
        return 'files'
      done = time.monotonic()
      look = done + max(_TICK, _LOOK_SHARE * (done - now))
    ready = dict(poller.poll(1e3 * min(_TICK, left) + 1))
    if ready.get(REQUESTS, 0) & (select.POLLHUP | select.POLLERR):
      raise EOFError('the trainer closed its pipe')
    if feed.descriptor in ready and feed.write():
      poller.unregister(feed.descriptor)
      feed.close()
    for descriptor in pipes.keys() & ready.keys():
      pipes[descriptor].read()
      if not pipes[descriptor].open:
        poller.unregister(descriptor)
    if process in ready:
      return ''
    if sum(stream.total for stream in streams) > flood:
      return 'output'


def _judge(settings, stopped, ended, report) -> tuple[str, str, str]:
  """(error kind, the line that the agent sees, a reason for the log).

  The line depends on what the code did and on the limits, never on a clock,
  a process id or a path: it becomes part of a prompt.
  """
  if stopped == 'timeout':
    limit = settings['wall_seconds']
    return 'timeout', f'TimeoutError: more than {limit:g} s', ''
  if stopped == 'output':
    return 'output', 'OutputError: the code printed far too much', ''
  if stopped == 'files':
    return 'output', 'OutputError: the code wrote too many files', ''
  if not report.startswith(_CONFINED):
    reason = report.decode('utf-8', 'replace') or 'died before it was confined'
    return 'unavailable', _NOT_SET_UP, reason
  if said := _said(report):
    return (*said, '')
  status, spent = ended
  # CPU seconds, a quarter less since the clock of the limit is coarse.
  cpu = settings['cpu_seconds']
  if os.WIFSIGNALED(status):
    if spent > cpu - 0.25:
      return 'timeout', f'TimeoutError: more than {cpu} s of computing', ''
    name = signal.Signals(os.WTERMSIG(status)).name
    return 'crashed', f'Crashed: the process died of {name}', ''
  code = os.WEXITSTATUS(status)
  return 'crashed', f'Crashed: the process ended itself with code {code}', ''


def _said(report: bytes) -> tuple[str, str] | None:
  """(error kind, error) as the child reported them; None if it did not."""
  text = report.removeprefix(_CONFINED).decode('utf-8', 'replace')
  kind, separator, error = text.partition('\n')
  known = kind in ('none', 'exception', 'memory') and separator
  return (kind, error) if known and report.startswith(_CONFINED) else None
