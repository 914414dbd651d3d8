"""The fork server: a small warm interpreter that runs one call at a time.

Started as a program of its own, with an empty environment, and imports the
standard library only.  Two processes: a launcher, which lives outside every
namespace, ends the server when the trainer is gone and removes its files; and
the server, which forks a supervisor and then a confined child for each call.
Leaves out the calls (supervisor.py), pools and replacement (process.py).
Invariant: the server writes one frame, which says that it is ready or which
layer is missing, and gives the pipes up; it never holds a byte of a call, so
no call finds another one in the memory that it is forked with.
"""

import functools
import gc
import importlib
import json
import os
import pwd
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from agent_rl_jax.tools.sandbox import (
    child,
    landlock,
    namespaces,
    scratch,
    seccomp,
    supervisor,
)

_PLACEHOLDERS = range(5)
_PACKAGE = 'agent_rl_jax'
_NOT_PYTHON = ('site-packages', 'dist-packages', 'test', 'idlelib')
_FIRST_UID, _UIDS = 50_000, 10_000


class LayerError(Exception):
  """A layer of protection cannot be had here."""

  def __init__(self, layer: str, reason: str):
    super().__init__(f'{layer}: {reason}')
    self.layer, self.reason = layer, reason


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


# The two processes.


def _serve(settings: dict, folder: str, mapped: int) -> Callable[[], Any]:
  """The server: sets up what all calls share, then forks their processes.

  Returns:
    In supervisor and children alone: what they have to run.
  """
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
  common = supervisor.Common(settings, box, rules, mapped, os.getpid())
  # Code that asks for this package is told that there is none.
  for name in [n for n in sys.modules if n.partition('.')[0] == _PACKAGE]:
    del sys.modules[name]
  gc.collect()
  gc.freeze()
  supervisor.send(
      {'ready': True, 'landlock': landlock.abi(), 'uid': settings['uid']}
  )
  forks = supervisor.Forks()
  if os.fork() == 0:
    return functools.partial(supervisor.supervise, common, forks)
  forks.supervisor.close()
  os.close(supervisor.REQUESTS)
  os.close(supervisor.ANSWERS)
  try:
    return _fork_children(common, forks)
  except BaseException:
    os._exit(1)


def _fork_children(
    common: supervisor.Common, forks: supervisor.Forks
) -> Callable[[], Any]:
  """Forks a child whenever asked to; returns in the child alone."""
  while descriptors := forks.asked():
    try:
      pid = os.fork()
    except OSError:
      pid = -1
    if pid == 0:
      return functools.partial(
          child.confine,
          descriptors,
          common.box,
          common.settings,
          common.mapped,
          common.rules,
          common.server,
      )
    for descriptor in descriptors:
      os.close(descriptor)
    forks.forked(max(pid, 0))
    if pid > 0:
      forks.reaped(pid)
  os._exit(0)


def _watch(server: int, trainer: int) -> bool:
  """The launcher: waits for the end of the server or of the trainer.

  Returns:
    Whether the trainer is gone, or wants this server gone.
  """
  process = os.pidfd_open(server)
  poller = select.poll()
  poller.register(process, select.POLLIN)
  poller.register(supervisor.REQUESTS, 0)
  # The parent is looked at too: a fork of the trainer may hold the pipe open.
  while not poller.poll(500) and os.getppid() == trainer:
    pass
  os.kill(server, signal.SIGKILL)
  os.waitpid(server, 0)
  # The server ends with the trainer as well, and may have been seen first.
  poller.unregister(process)
  return bool(poller.poll(0)) or os.getppid() != trainer


def _guard(function: Callable[..., Any], *arguments: Any) -> Any:
  """Runs one of the start-up steps; tells the trainer what went wrong."""
  try:
    return function(*arguments)
  except LayerError as error:
    layer, reason = error.layer, error.reason
  except Exception as error:
    layer, reason = '', f'{type(error).__name__}: {error}'
  supervisor.send({'ready': False, 'layer': layer, 'reason': reason})
  os._exit(1)


def _free_uid() -> int:
  """A user id that differs between servers and that no user has."""
  for i in range(_UIDS):
    uid = _FIRST_UID + (os.getpid() + i) % _UIDS
    try:
      pwd.getpwuid(uid)
    except KeyError:
      return uid
  raise LayerError('uid', f'{_UIDS} user ids from {_FIRST_UID} are all taken')


def _prepare(settings: dict, folder: str) -> None:
  """Start-up steps of the launcher, before the server is forked."""
  settings['uid'] = _free_uid() if 'uid' in settings['layers'] else 0
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


def main() -> Callable[[], Any]:
  """Entry point; settings are one JSON object in the first argument.

  Returns:
    In supervisor and children alone: what they have to run, which may return
    such a thing again.  Called by a loop, so that the code that a model wrote
    has none of these functions' frames above its own.
  """
  settings = json.loads(sys.argv[1])
  sys.argv = sys.orig_argv = ['']
  for old, new in ((0, supervisor.REQUESTS), (1, supervisor.ANSWERS)):
    os.dup2(old, new, inheritable=False)
  null = os.open(os.devnull, os.O_RDWR)
  for number in _PLACEHOLDERS:
    os.dup2(null, number)
  os.environ.clear()
  os.umask(0o022)
  sys.path.extend(settings['paths'])
  folder = os.path.join(settings['folder'], f'server-{os.getpid()}')
  trainer = settings['trainer']
  _guard(_prepare, settings, folder)
  mapped = _mapped()
  server = os.fork()
  if server == 0:
    return _guard(_serve, settings, folder, mapped)
  os.close(supervisor.ANSWERS)
  alone = _watch(server, trainer)
  scratch.empty(folder)
  os.rmdir(folder)
  if alone:
    try:
      os.rmdir(settings['folder'])
    except OSError:
      pass  # other servers are still leaving
  os._exit(0)
