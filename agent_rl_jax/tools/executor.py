"""Threads of our own for whatever may hang: env steps, tools, rewards.

A bounded pool of daemon threads, a first-in first-out queue, and deadlines
that belong to the caller: absolute `time.monotonic()` seconds, so the time
spent in the queue counts.  A job past its deadline is expired at once,
whatever its thread is doing: the stuck thread is abandoned and replaced, its
late result dropped, and a job that is still queued never starts.  Interpreter
exit waits for no thread (concurrent.futures would join them all).

What it leaves out: killing.  A Python thread cannot be killed, so an abandoned
one lives on until its function returns; code that must die belongs in a
process (sandbox).

Invariant: at most `workers` jobs run that are neither abandoned nor waiting
for other jobs of the same executor.  A job may therefore submit and await
further jobs here without deadlock; such nested jobs go ahead of the queue.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent_rl_jax.tools import calls as calls_lib
from agent_rl_jax.tools import tool as tool_lib
from agent_rl_jax.tools.ticket import (
    EXPIRED,
    FINISHED,
    QUEUED,
    RUNNING,
    Ticket,
    Worker,
)
from agent_rl_jax.types import ToolCall, ToolResult


class Executor:
  """Runs functions and tool calls on bounded, replaceable daemon threads."""

  def __init__(
      self, workers: int, name: str = 'tools', max_output_chars: int = 4096
  ):
    """Makes the pool; threads start as jobs need them.

    Args:
      workers: Jobs that may run at once.
      name: Prefix of the threads' names.
      max_output_chars: Default limit on the text of a tool's result.

    Raises:
      ValueError: A number is out of range.
    """
    if workers < 1:
      raise ValueError(f'executor workers={workers}: must be at least 1')
    if max_output_chars < 1:
      raise ValueError(
          f'executor max_output_chars={max_output_chars}: must be at least 1'
      )
    self.workers = workers
    self.name = name
    self.max_output_chars = max_output_chars
    self.calls = 0  # jobs submitted
    self.expirations = 0  # jobs that ran out of time
    self.abandoned = 0  # threads given up, ever
    self.stuck = 0  # abandoned threads that have not ended yet
    self._lock = threading.RLock()
    self._work = threading.Condition(self._lock)  # for idle workers
    self._news = threading.Condition(self._lock)  # for whoever waits
    self._watch = threading.Condition(self._lock)  # for the watchdog
    self._queue: collections.deque[Ticket] = collections.deque()
    self._nested: collections.deque[Ticket] = collections.deque()
    self._live: dict[Ticket, None] = {}  # queued or running, oldest first
    self._local = threading.local()
    self._busy = 0  # jobs that run, neither abandoned nor waiting for others
    self._idle = 0  # threads that wait for work
    self._threads = 0  # ever started, for names
    self._watch_until = math.inf
    self._watchdog: threading.Thread | None = None
    self._closed = False

  # Jobs.

  def submit(
      self, fn: Callable[..., Any], *args: Any, deadline: float
  ) -> Ticket:
    """Queues `fn(*args)`, to be settled by `deadline` (monotonic seconds).

    Raises:
      RuntimeError: The executor is closed.
    """
    ticket = Ticket(fn, args, float(deadline), self._sweep)
    with self._lock:
      if self._closed:
        raise RuntimeError(f'executor {self.name!r} is closed')
      self._enqueue(ticket)
    return ticket

  def after(
      self,
      ticket: Ticket,
      fn: Callable[..., Any],
      *args: Any,
      timeout: float = 30.0,
  ) -> Ticket:
    """Queues `fn(*args)` once no thread is inside `ticket`'s job any more.

    For closing what the job uses: an expired job may still be working on it.
    When the job never ends, neither does this ticket start.

    Args:
      ticket: A ticket of this executor.
      fn: Usually an environment's `close`.
      *args: Its arguments.
      timeout: Seconds that `fn` may take, counted from when it is queued.

    Returns:
      The ticket of `fn`.
    """
    follower = Ticket(fn, args, math.inf, self._sweep)
    follower._timeout = timeout
    ticket._settled()
    with self._lock:
      if self._closed:
        self._cancel(follower)
      elif ticket._state in (FINISHED, EXPIRED) and ticket._worker is None:
        self._follow(follower)
      else:
        ticket._afters.append(follower)
    return follower

  def wait_any(
      self, tickets: Iterable[Ticket], timeout: float | None = None
  ) -> None:
    """Blocks until a ticket is done (expired included) or `timeout` seconds.

    Returns at once when there are no tickets.
    """
    self._wait(tuple(tickets), any, timeout)

  def wait_all(
      self, tickets: Iterable[Ticket], timeout: float | None = None
  ) -> None:
    """Blocks until every ticket is done or `timeout` seconds have passed."""
    self._wait(tuple(tickets), all, timeout)

  def close(self) -> None:
    """Cancels what is queued and lets idle threads go; waits for nothing.

    Jobs that run may finish; their tickets settle as usual.
    """
    with self._lock:
      self._closed = True
      for ticket in list(self._live):
        if ticket._state == QUEUED:
          self._cancel(ticket)
      self._queue.clear()
      self._nested.clear()
      self._work.notify_all()
      self._watch.notify_all()
      self._news.notify_all()

  def __enter__(self) -> Executor:
    return self

  def __exit__(self, *exc: Any) -> None:
    self.close()

  # Tool calls.

  def call(
      self, tool: tool_lib.Tool, call: ToolCall, deadline: float
  ) -> ToolResult:
    """Runs one call; like `run_calls` with a single tool, never raises."""
    return self.run_calls({tool.spec['name']: tool}, (call,), deadline)[0]

  def run_calls(
      self,
      tools: Mapping[str, tool_lib.Tool],
      calls: Sequence[ToolCall],
      deadline: float,
      *,
      timeout: float | None = None,
      max_output_chars: int | None = None,
  ) -> tuple[ToolResult, ...]:
    """Runs calls concurrently and returns their results in call order.

    Never raises; see `calls.run_calls`.  `max_output_chars` is the executor's
    own when None; `timeout` (seconds) is what a timeout's message names.
    """
    return calls_lib.run_calls(
        self,
        tools,
        calls,
        deadline,
        timeout,
        max_output_chars or self.max_output_chars,
    )

  # Under the lock.

  def _enqueue(self, ticket: Ticket) -> None:
    self.calls += 1
    self._live[ticket] = None
    nested = getattr(self._local, 'worker', None) is not None
    (self._nested if nested else self._queue).append(ticket)
    if ticket._settled():  # it came too late
      return
    self._hire()
    if ticket.deadline < self._watch_until:
      self._watch_until = ticket.deadline
      if self._watchdog is None:
        self._watchdog = self._start_thread('deadlines', self._keep_deadlines)
      self._watch.notify()

  def _start_thread(
      self, label: str, body: Callable[..., None], *args: Any
  ) -> threading.Thread | None:
    """Starts a daemon thread; None when the system has none to give."""
    name = f'{self.name}-{label}'
    thread = threading.Thread(target=body, args=args, name=name, daemon=True)
    try:
      thread.start()
    except RuntimeError:
      return None
    return thread

  def _ready(self) -> int:
    """Queued jobs that may start now."""
    queued = len(self._queue) + len(self._nested)
    return min(queued, self.workers - self._busy)

  def _hire(self) -> None:
    """Starts threads when more jobs may start than threads are idle."""
    self._work.notify()
    while self._ready() > self._idle and not self._closed:
      label = str(self._threads)
      if self._start_thread(label, self._serve, Worker()) is None:
        return  # jobs wait, and expire in time; the next submit tries again
      self._threads += 1
      self._idle += 1

  def _sweep(self) -> None:
    """Expires every live job that is past its deadline."""
    with self._lock:
      now = time.monotonic()
      late = [t for t in self._live if now >= t.deadline]
      for ticket in late:
        self._expire(ticket)
      if late:
        self._work.notify_all()
        self._hire()
        self._news.notify_all()

  def _expire(self, ticket: Ticket) -> None:
    self.expirations += 1
    worker = ticket._worker
    if worker is not None and not worker.abandoned:
      worker.abandoned = True
      self.abandoned += 1
      self.stuck += 1
      if not worker.blocked:
        self._busy -= 1
    doing = 'running' if ticket.started else 'queued'
    error = TimeoutError(f'deadline passed while {doing}')
    self._settle(ticket, EXPIRED, None, error)

  def _settle(
      self,
      ticket: Ticket,
      state: int,
      result: Any,
      error: BaseException | None,
  ) -> None:
    ticket._result = result
    ticket._error = error
    ticket._stop = min(time.monotonic(), ticket.deadline)
    ticket._state = state
    if ticket._worker is None:  # else the thread still holds what it uses
      self._end(ticket)
    self._live.pop(ticket, None)

  def _end(self, ticket: Ticket) -> None:
    """No thread is inside the job any more: let go and queue what follows."""
    ticket._worker = None
    ticket._job = None
    for follower in ticket._afters:
      self._follow(follower)
    ticket._afters.clear()

  def _follow(self, follower: Ticket) -> None:
    if self._closed:
      self._cancel(follower)
    else:
      follower._submitted = time.monotonic()
      follower.deadline = follower._submitted + follower._timeout
      self._enqueue(follower)

  def _cancel(self, ticket: Ticket) -> None:
    error = RuntimeError(f'executor {self.name!r} closed before the job ran')
    self._settle(ticket, FINISHED, None, error)

  # Threads.

  def _serve(self, worker: Worker) -> None:
    """Body of a worker thread."""
    self._local.worker = worker
    while True:
      ticket = self._take()
      if ticket is None:
        return
      fn, args = ticket._job
      result, error = None, None
      try:
        result = fn(*args)
      except BaseException as e:  # SystemExit too: a job must not end threads
        error = e
      del fn, args
      if not self._finish(worker, ticket, result, error):
        return
      del ticket, result, error  # an idle thread must not pin megabytes

  def _take(self) -> Ticket | None:
    """Next job for an idle worker; None when the worker should go."""
    with self._lock:
      worker = self._local.worker
      while not self._closed:
        if self._ready() <= 0:
          self._work.wait()
          continue
        ticket = (self._nested or self._queue).popleft()
        if ticket._settled():  # expired or cancelled while in line
          continue
        ticket._state = RUNNING
        ticket._start = time.monotonic()
        ticket._worker = worker
        self._idle -= 1
        self._busy += 1
        return ticket
      self._idle -= 1
      return None

  def _finish(
      self,
      worker: Worker,
      ticket: Ticket,
      result: Any,
      error: BaseException | None,
  ) -> bool:
    """Settles a job that has returned; False when its thread should go."""
    with self._lock:
      if ticket._state == RUNNING and time.monotonic() < ticket.deadline:
        ticket._worker = None
        self._settle(ticket, FINISHED, result, error)
      else:  # late: the value is dropped even if nobody noticed before
        ticket._worker = None
        if ticket._state == RUNNING:
          self._expire(ticket)
        else:
          self._end(ticket)
      self._news.notify_all()
      if worker.abandoned:
        self.stuck -= 1
        return False
      self._busy -= 1
      self._idle += 1
      return True

  def _keep_deadlines(self) -> None:
    """Body of the watchdog: expires jobs on time when nobody is looking."""
    with self._lock:
      while not (self._closed and not self._live):
        self._sweep()
        self._watch_until = min(
            (ticket.deadline for ticket in self._live), default=math.inf
        )
        seconds = self._watch_until - time.monotonic()
        wait = min(seconds, threading.TIMEOUT_MAX)
        self._watch.wait(None if math.isinf(seconds) else max(0.0, wait))

  def _wait(
      self,
      tickets: tuple[Ticket, ...],
      enough: Callable[[Iterable[bool]], bool],
      timeout: float | None,
  ) -> None:
    if not tickets:
      return
    until = math.inf if timeout is None else time.monotonic() + timeout
    with self._lock:
      if enough(ticket._settled() for ticket in tickets):
        return
      worker = getattr(self._local, 'worker', None)
      if worker is not None:
        self._block(worker)
      try:
        while not enough(ticket._settled() for ticket in tickets):
          seconds = until - time.monotonic()
          if seconds <= 0:
            return
          wait = min(seconds, threading.TIMEOUT_MAX)
          self._news.wait(None if math.isinf(seconds) else wait)
      finally:
        if worker is not None:
          self._unblock(worker)

  def _block(self, worker: Worker) -> None:
    """A worker waits for other jobs here: its place is free meanwhile."""
    worker.blocked += 1
    if worker.blocked == 1 and not worker.abandoned:
      self._busy -= 1
      self._hire()

  def _unblock(self, worker: Worker) -> None:
    """It runs again, at once: nothing starts until `_busy` is back in bounds."""
    worker.blocked -= 1
    if worker.blocked == 0 and not worker.abandoned:
      self._busy += 1
