"""One call's process: gives up every power, then runs the code.

Runs in a fresh fork of the server.  Leaves out judging the call:
the supervisor does that from the exit and the clock.  Invariant: no line of
the code runs unless every layer asked for is in place; a layer that fails
ends the process with a report that says so.  What the code can reach here, a
report included, speaks for this call alone: the supervisor writes the frames.
"""

import builtins
import ctypes
import gc
import io
import os
import random
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

from agent_rl_jax.tools.sandbox import landlock, seccomp

STDIN, STDOUT, STDERR, REPORT = range(4)  # descriptors in the child
_FIRST_UNUSED = 4
# As few as honest code can do with: each open file without a name holds up to
# `file_bytes` that a look at the scratch folder does not see.
_MAX_DESCRIPTORS = 16
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CAPABILITY_VERSION = 0x20080522
_MAX_ERROR = 2000
# Opened before the fork: each call would pay for it otherwise.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


def _prctl(option: int, value: int) -> None:
  if _LIBC.prctl(option, value, 0, 0, 0):
    raise OSError(ctypes.get_errno(), f'prctl({option})')


def die_with_parent() -> None:
  """Asks the kernel to kill this process when its parent dies."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _drop_capabilities() -> None:
  if _LIBC.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES):
    raise OSError(ctypes.get_errno(), 'capset')


def drop_user(uid: int) -> None:
  """Becomes a user of no name with no groups and no capabilities."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def _limit(settings: dict, mapped: int) -> None:
  cpu = settings['cpu_seconds']
  for kind, soft, hard in (
      # The soft limit ends the process; code that ignores the signal meets
      # the hard one a second later.
      (resource.RLIMIT_CPU, cpu, cpu + 1),
      (resource.RLIMIT_AS, mapped + settings['memory_bytes'], None),
      (resource.RLIMIT_FSIZE, settings['file_bytes'], None),
      (resource.RLIMIT_NPROC, 0, None),
      (resource.RLIMIT_CORE, 0, None),
      (resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS, None),
      (resource.RLIMIT_MEMLOCK, 0, None),
      (resource.RLIMIT_MSGQUEUE, 0, None),
  ):
    resource.setrlimit(kind, (soft, soft if hard is None else hard))


def _give_up(settings: dict, parent: int, mapped: int, rules: int | None):
  """Takes every layer, in the only order that works."""
  layers = settings['layers']
  _limit(settings, mapped)
  if 'uid' in layers:
    drop_user(settings['uid'])
  _drop_capabilities()
  # After the change of user, which clears it.
  die_with_parent()
  if os.getppid() != parent:
    os._exit(1)
  _prctl(_PR_SET_DUMPABLE, 0)
  seccomp.set_no_new_privileges()
  if rules is not None:
    landlock.restrict(rules)
    os.close(rules)
  if 'seccomp' in layers:
    seccomp.install(seccomp.for_process(os.getpid()))


def _report(text: str) -> None:
  data = text.encode('utf-8', 'replace')
  try:
    os.write(REPORT, data)
  except OSError:
    pass  # the code closed it; the server then calls the process crashed


def _error(error: BaseException) -> str:
  """Last line of the traceback, whatever the exception's methods do."""
  try:
    lines = traceback.format_exception_only(type(error), error)
    last = ''.join(lines).strip().rsplit('\n', 1)[-1]
  except Exception:
    last = type.__repr__(type(error))
  return last[:_MAX_ERROR]


def _left_well(error: SystemExit) -> bool:
  try:
    return error.code is None or error.code == 0
  except Exception:
    return False


def _outcome(source: str, module: types.ModuleType) -> str:
  """Runs the code; returns a word, then the error's line."""
  try:
    exec(compile(source, '<tool>', 'exec'), module.__dict__)
  except MemoryError as error:
    return 'memory\n' + _error(error)
  except SystemExit as error:
    if not _left_well(error):
      return 'exception\n' + _error(error)
  except BaseException as error:
    return 'exception\n' + _error(error)
  return 'none\n'


def _read_code() -> str:
  """The code from the input pipe, behind 4 bytes that say how long it is."""
  data, size = b'', 4
  while len(data) < size:
    part = os.read(STDIN, size - len(data))
    if not part:
      os._exit(1)  # the supervisor is gone
    data += part
    if len(data) == 4 == size:
      size += int.from_bytes(data, 'big')
  return data[4:].decode('utf-8', 'surrogatepass')


def _execute() -> NoReturn:
  """Reads the code, runs it, reports how it ended, exits."""
  try:
    source = _read_code()
    stdout = io.TextIOWrapper(
        io.FileIO(STDOUT, 'w', closefd=False),
        encoding='utf-8',
        errors='backslashreplace',
        write_through=False,
    )
    sys.stdout = sys.__stdout__ = stdout
    module = types.ModuleType('__main__')
    sys.modules['__main__'] = module
    module.__dict__['__builtins__'] = builtins
    report = _outcome(source, module)
    for stream in {id(s): s for s in (stdout, sys.stdout)}.values():
      try:
        stream.flush()
      except Exception:
        pass  # the code closed or replaced it
    _report(report)
  finally:
    os._exit(0)


def confine(
    descriptors: list[int],
    folder: str,
    settings: dict,
    mapped: int,
    rules: int | None,
    parent: int,
) -> Callable[[], NoReturn]:
  """Confines this process, for good.

  Args:
    descriptors: Pipe ends for input, output, errors and the report.
    folder: The call's own scratch folder.
    settings: The server's settings: limits and layers.
    mapped: Bytes of address space that the server has mapped already.
    rules: Descriptor of the Landlock rule set; None without that layer.
    parent: Process id of the server.

  Returns:
    What runs the code, reports and exits; called from outside, so that the
    code sees no frame that holds any of these values.
  """
  try:
    # The server keeps the null device on 0 to 4, so none of these is in use.
    for number, descriptor in enumerate(descriptors):
      os.dup2(descriptor, number)
    if rules is not None:
      rules = os.dup2(rules, _FIRST_UNUSED)
    os.closerange(_FIRST_UNUSED + (rules is not None), 1024)
    os.chdir(folder)
    try:
      _give_up(settings, parent, mapped, rules)
    except Exception as error:
      _report(_error(error))
      os._exit(1)
    # Said before the code runs, so that no code can claim to be unconfined.
    _report('confined\n')
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(signum, signal.SIG_DFL)
    random.seed(0)  # the same code draws the same numbers in every call
    gc.enable()
  except BaseException:
    os._exit(1)
  return _execute
