"""The executor's promises: order, deadlines, replacement, nesting, limits."""

import threading
import time

import pytest

from agent_rl_jax.tools.calls import clip, last_line
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.types import ToolCall, ToolResult


def soon(seconds=5.0):
  return time.monotonic() + seconds


class FnTool:
  """A tool of one text argument, made of a function."""

  def __init__(self, name, fn):
    self.spec = {
        'name': name,
        'description': '',
        'parameters': {
            'type': 'object',
            'properties': {'x': {'type': 'string'}},
            'required': ['x'],
        },
    }
    self._fn = fn

  def __call__(self, arguments, *, deadline):
    return ToolResult('', self._fn(arguments['x']), True)


def call(name='t', x='', call_id='c0', **arguments):
  return ToolCall(call_id, name, {'x': x, **arguments})


@pytest.fixture
def pool():
  with Executor(2) as made:
    yield made


def test_result_and_error(pool):
  good = pool.submit(lambda a, b: a + b, 2, 3, deadline=soon())
  bad = pool.submit(lambda: 1 / 0, deadline=soon())
  pool.wait_all([good, bad], 5)
  assert good.done and good.result == 5 and good.error is None
  assert bad.done and bad.result is None and not bad.expired
  assert isinstance(bad.error, ZeroDivisionError)
  assert good.started and good.ended and pool.calls == 2


def test_first_in_first_out():
  order = []
  with Executor(1) as pool:
    gate = threading.Event()
    tickets = [pool.submit(gate.wait, deadline=soon())]
    for i in range(20):
      tickets.append(pool.submit(order.append, i, deadline=soon()))
    gate.set()
    pool.wait_all(tickets, 5)
  assert order == list(range(20))


def test_never_more_than_workers():
  lock, running, peak = threading.Lock(), [0], [0]

  def job():
    with lock:
      running[0] += 1
      peak[0] = max(peak[0], running[0])
    time.sleep(0.003)
    with lock:
      running[0] -= 1

  with Executor(3) as pool:
    tickets = [pool.submit(job, deadline=soon()) for _ in range(40)]
    pool.wait_all(tickets, 5)
  assert peak[0] == 3
  assert all(t.done and not t.expired for t in tickets)


def test_queued_job_that_expires_never_starts(pool):
  gate, ran = threading.Event(), []
  blockers = [pool.submit(gate.wait, deadline=soon(30)) for _ in range(2)]
  late = pool.submit(ran.append, 1, deadline=soon(0.05))
  pool.wait_any([late], 5)
  assert late.expired and late.done and not late.started and late.ended
  assert isinstance(late.error, TimeoutError) and late.result is None
  assert pool.abandoned == 0  # no thread was lost over it
  gate.set()
  pool.wait_all(blockers, 5)
  time.sleep(0.02)
  assert not ran


def test_past_deadline_is_expired_at_submit(pool):
  ticket = pool.submit(print, deadline=time.monotonic() - 1)
  assert ticket.expired and not ticket.started


def test_stuck_worker_is_replaced_and_late_result_dropped():
  gate = threading.Event()
  with Executor(1) as pool:
    stuck = pool.submit(lambda: gate.wait(30) and 'late', deadline=soon(0.05))
    behind = pool.submit(lambda: 'next', deadline=soon(5))
    pool.wait_all([stuck, behind], 5)
    assert stuck.expired and stuck.started and not stuck.ended
    assert behind.result == 'next'
    assert (pool.abandoned, pool.stuck) == (1, 1)
    gate.set()
    until = soon()
    while pool.stuck and time.monotonic() < until:
      time.sleep(0.005)
    assert pool.stuck == 0 and stuck.ended
    assert stuck.result is None and stuck.expired  # it stays expired
    # The late thread has gone; the pool still has exactly one worker.
    again = [pool.submit(int, deadline=soon()) for _ in range(3)]
    pool.wait_all(again, 5)
    assert [t.result for t in again] == [0, 0, 0]


def test_queue_moves_on_while_nobody_looks():
  gate, done = threading.Event(), threading.Event()
  with Executor(1) as pool:
    pool.submit(gate.wait, 30, deadline=soon(0.05))
    pool.submit(done.set, deadline=soon(30))
    assert done.wait(5)  # no ticket was read, no wait called
    gate.set()


def test_wait_any_wakes_promptly(pool):
  gate = threading.Event()
  slow = pool.submit(gate.wait, 600, deadline=soon(600))
  fast = pool.submit(time.sleep, 0.05, deadline=soon(600))
  begin = time.monotonic()
  pool.wait_any([slow, fast], 600)
  assert fast.done and not slow.done
  pool.wait_any([slow], 0.05)
  assert time.monotonic() - begin > 0.04
  pool.wait_any([], 600)
  assert not slow.done  # none of the waits was to its end
  gate.set()


@pytest.mark.parametrize('error', [SystemExit, KeyboardInterrupt])
def test_base_exceptions_do_not_kill_workers(error):
  def job():
    raise error('no')

  with Executor(1) as pool:
    bad = [pool.submit(job, deadline=soon()) for _ in range(3)]
    good = pool.submit(int, deadline=soon())
    pool.wait_all([*bad, good], 5)
    assert all(isinstance(t.error, error) for t in bad)
    assert good.result == 0
    assert pool._threads == 1  # the same thread served all four


def test_jobs_may_wait_for_jobs_of_the_same_pool():
  with Executor(2) as pool:

    def outer(i):
      inner = [
          pool.submit(lambda j=j: i * 10 + j, deadline=soon()) for j in (0, 1)
      ]
      pool.wait_all(inner)
      return [t.result for t in inner]

    tickets = [pool.submit(outer, i, deadline=soon(10)) for i in range(20)]
    pool.wait_all(tickets, 10)
    assert [t.result for t in tickets] == [
        [i * 10, i * 10 + 1] for i in range(20)
    ]


def test_after_waits_for_the_thread_to_end(pool):
  gate, closed = threading.Event(), []
  ticket = pool.submit(gate.wait, 30, deadline=soon(0.05))
  follower = pool.after(ticket, closed.append, 'state')
  pool.wait_any([ticket], 5)
  assert ticket.expired
  time.sleep(0.05)
  assert not closed and not follower.done  # its state is still in use
  gate.set()
  pool.wait_any([follower], 5)
  assert closed == ['state'] and follower.done


def test_after_a_finished_or_never_started_job(pool):
  closed = []
  done = pool.submit(int, deadline=soon())
  pool.wait_any([done], 5)
  never = pool.submit(int, deadline=time.monotonic() - 1)
  followers = [
      pool.after(done, closed.append, 1),
      pool.after(never, closed.append, 2),
  ]
  pool.wait_all(followers, 5)
  assert sorted(closed) == [1, 2]


def test_close_cancels_the_queue():
  pool = Executor(1)
  gate = threading.Event()
  begun = threading.Event()
  running = pool.submit(lambda: begun.set() or gate.wait(30), deadline=soon(30))
  assert begun.wait(5)
  queued = pool.submit(int, deadline=soon(30))
  pool.close()
  assert queued.done and not queued.started
  assert 'closed' in str(queued.error)
  with pytest.raises(RuntimeError, match='closed'):
    pool.submit(int, deadline=soon())
  results = pool.run_calls({'t': FnTool('t', str)}, [call()], soon())
  assert not results[0].ok and 'closed' in results[0].text
  assert results[0].infrastructure
  gate.set()
  pool.wait_any([running], 5)
  assert running.result is True


def test_call_results(pool):
  def boom(_):
    raise ValueError('first\nlast')

  tools = {
      'up': FnTool('up', str.upper),
      'boom': FnTool('boom', boom),
      'none': FnTool('none', lambda x: None),
      'exit': FnTool('exit', lambda x: exit(3)),
  }
  calls = [
      call('up', 'abc', 'a'),
      call('boom', '', 'b'),
      call('nope', '', 'c'),
      ToolCall('d', 'up', {}),
      ToolCall('e', 'up', {'x': 3}),
      ToolCall('f', 'up', {'x': 'a', 'xx': 'b'}),
      call('none', '', 'g'),
      call('exit', '', 'h'),
      call('up', '\ud800', 'i'),
  ]
  results = pool.run_calls(tools, calls, soon())
  assert [r.call_id for r in results] == list('abcdefghi')
  assert [r.ok for r in results] == [True] + 7 * [False] + [True]
  texts = [r.text for r in results]
  assert texts[:3] == [
      'ABC',
      'error: last',
      'error: unknown tool nope; available: up, boom, none, exit',
  ]
  assert texts[3] == 'error: missing argument x'
  assert texts[4] == 'error: x must be string, not integer'
  assert texts[5].startswith("error: unknown argument xx; did you mean 'x'?")
  assert 'not a ToolResult' in texts[6]
  assert texts[7] == 'error: SystemExit: 3'
  assert texts[8] == '?'
  assert pool.call(tools['up'], call('up', 'x', 'z'), soon()).text == 'X'


def test_calls_of_a_turn_run_together():
  with Executor(8) as pool:
    # Nobody leaves before all are there: one after the other would break it.
    together = threading.Barrier(8, timeout=30)

    def meet(x):
      together.wait()
      return x

    calls = [call(x=str(i)) for i in range(8)]
    results = pool.run_calls({'t': FnTool('t', meet)}, calls, soon(60))
  assert [r.text for r in results] == [str(i) for i in range(8)]
  assert all(r.seconds > 0 for r in results)


def test_timeout_message_and_seconds(pool):
  gate = threading.Event()
  tools = {'t': FnTool('t', lambda x: gate.wait(30))}
  (result,) = pool.run_calls(tools, [call()], soon(0.1), timeout=0.1)
  assert result.text == 'error: timed out after 0.1 s' and not result.ok
  assert 0 < result.seconds <= 0.11
  assert not result.infrastructure  # it ran, and hung
  # What was left until the deadline would be another number in each run.
  result = pool.call(tools['t'], call(), soon(0.05))
  assert result.text == 'error: timed out'
  gate.set()


def test_tool_that_keeps_its_deadline_has_the_word(pool):
  class Careful(FnTool):

    def __call__(self, arguments, *, deadline):
      time.sleep(max(0, deadline - time.monotonic()))
      return ToolResult('', 'out of time', False)

  result = pool.call(Careful('t', str), call(), soon(0.5))
  assert result.text == 'out of time' and pool.abandoned == 0


def test_clip_keeps_head_and_tail():
  assert clip('abc', 3) == 'abc'
  assert clip('abcdef', 3) == 'abc'  # no room for the mark
  text = clip('h' * 500 + 't' * 500, 100)
  assert len(text) <= 100
  head, tail = text.split('\n...[')
  kept = len(head) + len(tail.split(']...\n')[1])
  assert head == 'h' * len(head)
  assert f'{1000 - kept} characters left out' in tail
  assert text.endswith('t' * 20)


def test_options_are_checked():
  with pytest.raises(ValueError, match='workers=0'):
    Executor(0)
  with pytest.raises(ValueError, match='max_output_chars=0'):
    Executor(1, max_output_chars=0)


def test_last_line():
  assert last_line(KeyError('k')) == "KeyError: 'k'"
  assert last_line(ValueError('a\nb')) == 'b'
