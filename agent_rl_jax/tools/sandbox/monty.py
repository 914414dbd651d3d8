"""The `monty` backend: an interpreter without any access to the system.

A pool of worker processes of pydantic-monty, a Python subset written in Rust
(no classes with bases, no generators, a part of the standard library).  For
platforms without Linux's protections.  Leaves out the file, process and
network limits, which have nothing to limit here.  When the trainer is killed,
a worker in the middle of a call goes on until the call's time is up.
Invariant: each call has an interpreter of its own and the same random seed.
"""

import logging
import threading
import time

from agent_rl_jax.tools.sandbox import options as options_lib

_MARGIN = 0.05
_GRACE = 0.2  # to end by itself before the pool kills the worker
_MAX_RECURSION = 1000
_MAX_CODE = 1 << 20
_LOG = logging.getLogger(__name__)


class _Flood(Exception):
  pass


class _Printed:
  """Takes what the code prints, as bytes up to a limit."""

  def __init__(self, limit: int):
    self._limit = limit
    self._flood = max(1 << 20, 64 * limit)
    self._data = b''
    self.total = 0

  def __call__(self, stream: str, text: str) -> None:
    if stream != 'stdout':
      return
    data = text.encode('utf-8', 'backslashreplace')
    self.total += len(data)
    self._data += data[: max(0, self._limit - len(self._data))]
    if self.flooded:
      raise _Flood

  @property
  def flooded(self) -> bool:
    return self.total > self._flood

  @property
  def truncated(self) -> bool:
    return self.total > self._limit

  @property
  def text(self) -> str:
    errors = 'ignore' if self.truncated else 'replace'
    return self._data.decode('utf-8', errors)


class MontySandbox:
  """Runs each call in a fresh session of a pydantic-monty pool."""

  backend = 'monty'

  def __init__(self, options: options_lib.SandboxOptions):
    """Starts the pool.

    Raises:
      SandboxUnavailable: The package is missing or does not start.
    """
    try:
      import pydantic_monty
    except ImportError as error:
      raise options_lib.SandboxUnavailable(
          f'{error}; pip install pydantic-monty'
      ) from error
    self._monty = pydantic_monty
    self._options = options
    self._free = threading.Semaphore(options.processes)
    self._closed = False
    try:
      self._pool = pydantic_monty.Monty(
          min_processes=options.processes,
          max_processes=options.processes,
          feed_duration_limit_grace=_GRACE,
      )
      self._pool.__enter__()
    except Exception as error:
      raise options_lib.SandboxUnavailable(
          f'pydantic-monty does not start: {error}'
      ) from error
    self.why = (
        f'monty: pydantic-monty {pydantic_monty.__version__}, an interpreter'
        ' without system calls; time, memory and recursion limits'
    )

  def run(self, code: str, *, deadline: float) -> options_lib.SandboxResult:
    """Runs `code`; see `options.Sandbox`."""
    began = time.monotonic()
    printed = _Printed(self._options.output_bytes)

    def result(kind, error):
      return options_lib.SandboxResult(
          printed.text,
          kind,
          error,
          printed.truncated,
          time.monotonic() - began,
      )

    if self._closed:
      return result('unavailable', 'the sandbox is closed')
    if len(code) > _MAX_CODE:
      return result('exception', f'ValueError: code of {len(code)} characters')
    # Lone surrogates do not cross into the worker.
    code = code.encode('utf-8', 'replace').decode('utf-8')
    if not self._free.acquire(timeout=max(0.0, deadline - began)):
      return result('unavailable', 'the sandbox is busy')
    try:
      left = deadline - _MARGIN - _GRACE - time.monotonic()
      if left <= 0:
        return result('unavailable', 'the sandbox is busy')
      wall = min(self._options.wall_seconds, left)
      return result(*self._feed(code, wall, printed))
    finally:
      self._free.release()

  def _feed(self, code, wall, printed) -> tuple[options_lib.ErrorKind, str]:
    """(error kind, error) of one run."""
    # Sleeping does not count as running; together they stay below `wall`.
    running = min(0.9 * wall, float(self._options.cpu_seconds))
    limits = {
        'max_feed_duration_secs': running,
        'max_total_sleep_secs': wall - running,
        'max_memory': int(self._options.memory_bytes),
        'max_recursion_depth': _MAX_RECURSION,
    }
    policy = {'random_start': {'seed': 0}}
    try:
      with self._pool.checkout(limits=limits, os_policy=policy) as session:
        session.feed_run(code, print_callback=printed)
      return 'none', ''
    except self._monty.MontyCrashedError as error:
      if getattr(error, 'timed_out', False):
        return 'timeout', self._too_long()
      return 'crashed', 'Crashed: the interpreter died'
    except (
        self._monty.MontyRuntimeError,
        self._monty.MontySyntaxError,
    ) as error:
      line = error.display('type-msg').strip().rsplit('\n', 1)[-1]
    except (KeyboardInterrupt, SystemExit):
      raise
    except BaseException as error:  # a panic in Rust is not an Exception
      _LOG.warning('the interpreter died of %s: %s', type(error), error)
      return 'crashed', 'Crashed: the interpreter died'
    if printed.flooded:
      return 'output', 'OutputError: the code printed far too much'
    # The interpreter's own words hold what it measured; a model reads these.
    exceeded = 'limit exceeded' in line
    if line.startswith('MemoryError'):
      return 'memory', 'MemoryError' if exceeded else line
    if line.startswith('TimeoutError') and exceeded:
      return 'timeout', self._too_long()
    return 'exception', line

  def _too_long(self) -> str:
    return f'TimeoutError: more than {self._options.wall_seconds:g} s'

  def close(self) -> None:
    """Ends the workers."""
    if not self._closed:
      self._closed = True
      self._pool.__exit__(None, None, None)
