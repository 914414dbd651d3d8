"""Commands run side by side, each on cores of its own, ended together.

Leaves out what is run and in which order (`sweep.py`).  Invariants: Ctrl-C
reaches a command through this process alone, and once each time, since it has
a session of its own: the first lets a run save, the second ends it; and no
command outlives a pool that is left.  What is left of a process that is killed
outright must be kept apart by the commands themselves (`sweep.alone`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Hashable, Sequence
from typing import Any

_POLL = 0.1  # seconds
_GRACE = 60.0  # seconds that a run may take to save


@dataclasses.dataclass
class _Running:
  """A command; `told` is how many signals it was sent."""

  process: subprocess.Popen
  began: float
  share: int
  told: int


def shares(jobs: int) -> list[set[int]]:
  """This process's cores, dealt out to `jobs` commands; all of them to one.

  Side by side on all cores, compiled programs wait for each other's threads:
  two runs of the quickstart then took 1.3 times as long as on one core each.

  Raises:
    ValueError: more jobs than cores.
  """
  if hasattr(os, 'sched_getaffinity'):
    cores = sorted(os.sched_getaffinity(0))
  else:
    cores = list(range(os.cpu_count() or 1))
  if not 1 <= jobs <= len(cores):
    raise ValueError(
        f'jobs={jobs}: give 1 to {len(cores)}, the cores of this machine'
    )
  return [set(cores[place::jobs]) for place in range(jobs)]


class Pool:
  """Runs up to `jobs` commands; a context manager of the main thread.

  A signal is only noted when it comes, and passed on while waiting, so that
  it can hit no half-started command.

  Attributes:
    asked: Whether Ctrl-C or SIGTERM came.
    running: Keys of the commands that run.
  """

  def __init__(self, jobs: int):
    """Nothing runs yet; raises ValueError for more jobs than cores."""
    self._shares = shares(jobs)
    self._running: dict[Hashable, _Running] = {}
    self._kept: dict[int, Any] = {}
    self._signals: list[int] = []

  @property
  def asked(self) -> bool:
    return bool(self._signals)

  @property
  def running(self) -> frozenset:
    return frozenset(self._running)

  @property
  def free(self) -> bool:
    """Whether another command may be started."""
    return len(self._running) < len(self._shares) and not self.asked

  def __enter__(self) -> Pool:
    note = lambda number, frame: self._signals.append(number)
    self._kept = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    return self

  def __exit__(self, *exc: Any) -> None:
    """Ends what still runs, which is nothing but after an error."""
    try:
      for running in self._running.values():
        running.process.terminate()
      until = time.monotonic() + _GRACE
      while self._running and time.monotonic() < until:
        if self._ended() is None:
          time.sleep(_POLL)
    finally:
      for running in self._running.values():
        running.process.kill()
        running.process.wait()
      for number, handler in self._kept.items():
        signal.signal(number, handler)

  def start(
      self, key: Hashable, command: Sequence[str], output: str | os.PathLike
  ) -> None:
    """Starts a command; what it prints is appended to `output`."""
    taken = {running.share for running in self._running.values()}
    share = min(set(range(len(self._shares))) - taken)
    told = len(self._signals)
    with open(output, 'ab') as file:
      process = subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=subprocess.STDOUT,
          start_new_session=True,
      )
    self._running[key] = _Running(process, time.monotonic(), share, told)
    if hasattr(os, 'sched_setaffinity') and len(self._shares) > 1:
      with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.sched_setaffinity(process.pid, self._shares[share])

  def wait(self) -> tuple[Hashable, float]:
    """Blocks until a command has ended: (its key, seconds it took)."""
    while (ended := self._ended()) is None:
      time.sleep(_POLL)
    return ended

  def _ended(self) -> tuple[Hashable, float] | None:
    """A command that has ended, if any; passes signals on to the others."""
    for key, running in self._running.items():
      if running.process.poll() is not None:
        del self._running[key]
        return key, time.monotonic() - running.began
      for number in self._signals[running.told :]:
        running.process.send_signal(number)
        running.told += 1
    return None
