"""What a caller holds of a job: its state, its result, its deadline.

The executor (executor.py) owns every transition and makes them under its
lock; this file only records and reads.  Invariant: a ticket settles once, as
finished or as expired, and stays so; a deadline that has passed reads as
expired even when nothing else has noticed yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

QUEUED, RUNNING, FINISHED, EXPIRED = range(4)


class Worker:
  """Bookkeeping of one thread; guarded by the executor's lock."""

  def __init__(self):
    self.abandoned = False
    self.blocked = 0  # depth of waits for jobs of its own executor


class Ticket:
  """One submitted job; every property may be read from any thread.

  Attributes:
    deadline: `time.monotonic()` seconds after which the job is expired.
  """

  def __init__(
      self,
      fn: Callable[..., Any],
      args: tuple[Any, ...],
      deadline: float,
      sweep: Callable[[], None],
  ):
    self.deadline = deadline
    self._sweep = sweep  # expires what is late, under the executor's lock
    self._job: tuple[Callable[..., Any], tuple[Any, ...]] | None = (fn, args)
    self._state = QUEUED
    self._result: Any = None
    self._error: BaseException | None = None
    self._worker: Worker | None = None  # while its thread is inside the job
    self._submitted = time.monotonic()
    self._start: float | None = None
    self._stop: float | None = None
    self._afters: list[Ticket] = []
    self._timeout = math.inf  # of a follower, counted from when it is queued

  def _settled(self) -> bool:
    if self._state in (QUEUED, RUNNING):
      if time.monotonic() >= self.deadline:
        self._sweep()  # the clock decides, not who looks first
    return self._state in (FINISHED, EXPIRED)

  @property
  def done(self) -> bool:
    """Finished, failed or expired: nothing more will come of it."""
    return self._settled()

  @property
  def expired(self) -> bool:
    """Past its deadline without a result; `error` is a TimeoutError."""
    return self._settled() and self._state == EXPIRED

  @property
  def started(self) -> bool:
    """Whether its function was ever entered."""
    return self._start is not None

  @property
  def ended(self) -> bool:
    """Settled, and no thread is inside its function any more."""
    return self._settled() and self._worker is None

  @property
  def result(self) -> Any:
    """What the function returned; None when pending, failed or expired."""
    return self._result if self._settled() else None

  @property
  def error(self) -> BaseException | None:
    """What the function raised, or a TimeoutError when expired."""
    return self._error if self._settled() else None

  @property
  def seconds(self) -> float:
    """Wall-clock spent running, up to the deadline; 0 if never started."""
    if self._start is None:
      return 0.0
    stop = self._stop if self._stop is not None else time.monotonic()
    return max(0.0, stop - self._start)

  @property
  def waited(self) -> float:
    """Wall-clock spent in the queue."""
    until = self._start if self._start is not None else self._stop
    until = until if until is not None else time.monotonic()
    return max(0.0, until - self._submitted)
