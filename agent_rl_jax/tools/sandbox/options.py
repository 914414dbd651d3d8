"""What a sandbox is asked for and what it answers.

Leaves out every backend.  Invariant: `SandboxResult` says how the code ended;
a call that was not tried, or not given its time, is `unavailable`.
"""

import dataclasses
from typing import Literal, Protocol

ErrorKind = Literal[
    'none',
    'exception',
    'timeout',
    'memory',
    'output',
    'crashed',
    'unavailable',
]

# Layers of the `process` backend, in the order in which they are given up
# when the machine lacks them.
LAYERS = ('namespaces', 'landlock', 'seccomp', 'uid')

# Imported once per server, so that calls find them warm.  The ones that need
# shared libraries from outside Python's folder must be here to be had at all.
PRELOAD = tuple("""
  array ast base64 binascii bisect bz2 calendar cmath collections contextlib
  copy csv dataclasses datetime decimal difflib enum fractions functools
  graphlib hashlib heapq inspect itertools json lzma math numbers operator
  pathlib pprint random re secrets shutil sqlite3 statistics string struct
  tempfile textwrap time timeit typing unicodedata zlib _strptime
  encodings.ascii encodings.latin_1
  """.split())


class SandboxUnavailable(RuntimeError):
  """No backend passed its probe; the message lists why, one a line."""


@dataclasses.dataclass(frozen=True)
class SandboxResult:
  """How a call ended.

  Attributes:
    stdout: What the code printed, cut to the limit; invalid UTF-8 replaced.
    error_kind: How it ended; `none` when the code ran to its end.
    error: Last line of the traceback, or a line of the same shape about a
      limit; empty when `error_kind` is `none`.
    truncated: Whether the code printed more than `stdout` holds.
    seconds: Wall-clock of the call as the caller saw it.
    reason: Why the sandbox is `unavailable`, for the log; may hold paths and
      process ids, which `error` never does: a model reads `error`.
  """

  stdout: str
  error_kind: ErrorKind
  error: str
  truncated: bool
  seconds: float
  reason: str = ''


class Sandbox(Protocol):
  """Runs code that nobody has read.

  `run` is thread-safe, never raises for anything that the code does, and
  answers by `deadline` (seconds of `time.monotonic`).
  """

  backend: str
  why: str

  def run(self, code: str, *, deadline: float) -> SandboxResult:
    ...

  def close(self) -> None:
    ...


@dataclasses.dataclass(frozen=True)
class SandboxOptions:
  """Limits of one call and the backend that keeps them.

  Attributes:
    backend: `process` (CPython in a confined fork), `monty` (an interpreter
      without system access), or `auto`: the first whose probe succeeds.
    wall_seconds: Longest a call may take from when it has an interpreter; the
      caller's deadline bounds it and the waiting before it.
    cpu_seconds: Whole seconds of computing.
    memory_bytes: What the code may allocate beyond the interpreter.
    output_bytes: Printed bytes that are kept.
    file_bytes: Largest file that the code may write in its scratch folder.
    processes: Calls that can run at the same time.
    preload: Modules that the `process` backend imports once for all calls.
    paths: Further library folders (an absolute site-packages, say) that the
      `process` backend may import from.
    layers: Protection of the `process` backend to use where it is there.
  """

  backend: str = 'auto'
  wall_seconds: float = 2.0
  cpu_seconds: int = 2
  memory_bytes: int = 512 << 20
  output_bytes: int = 8192
  file_bytes: int = 1 << 20
  processes: int = 4
  preload: tuple[str, ...] = PRELOAD
  paths: tuple[str, ...] = ()
  layers: tuple[str, ...] = LAYERS

  def __post_init__(self):
    for name in ('preload', 'paths', 'layers'):
      # Configs hold lists.
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for name in (
        'wall_seconds',
        'cpu_seconds',
        'memory_bytes',
        'output_bytes',
        'file_bytes',
        'processes',
    ):
      value = getattr(self, name)
      if value <= 0:
        raise ValueError(f'{name} is {value}: it must be above 0')
      if name != 'wall_seconds' and value != int(value):
        raise ValueError(f'{name} is {value}: it must be a whole number')
    unknown = sorted(set(self.layers) - set(LAYERS))
    if unknown:
      raise ValueError(f'layers has {unknown}: choose from {list(LAYERS)}')

  @property
  def folder_bytes(self) -> int:
    """All that a call may have in its scratch folder."""
    return 16 * self.file_bytes
