"""Tool calls from arguments to results, whatever the tools do.

Checks the arguments, runs the tools, cuts their text, words their failures.
What it leaves out: threads and deadlines (executor.py).  Invariant: there is a
result for every call and every outcome, and its text is valid Unicode within
the limit.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agent_rl_jax.tools import tool as tool_lib
from agent_rl_jax.tools.ticket import Ticket
from agent_rl_jax.types import ToolCall, ToolResult

_MARGIN_S = 0.5  # at most; a tenth of the time when that is less
_MARK = '\n...[{} characters left out]...\n'


class Pool(Protocol):
  """The part of an executor that runs calls."""

  def submit(
      self, fn: Callable[..., Any], *args: Any, deadline: float
  ) -> Ticket:
    ...

  def wait_all(self, tickets: Sequence[Ticket]) -> None:
    ...


def run_calls(
    pool: Pool,
    tools: Mapping[str, tool_lib.Tool],
    calls: Sequence[ToolCall],
    deadline: float,
    timeout: float | None,
    limit: int,
) -> tuple[ToolResult, ...]:
  """Runs calls concurrently and returns their results in call order.

  Never raises: an unknown tool, bad arguments, an exception, a timeout and a
  result of the wrong type become results with `ok=False` whose text begins
  with 'error: '.  A call that was not tried, since the pool is closed or had no
  thread for it in time, has `infrastructure` set.

  Args:
    pool: Where to run them.
    tools: By name.
    calls: What to run.
    deadline: `time.monotonic()` seconds.  Tools are told a slightly earlier
      one, so that a tool that keeps it has the word, not the clock: which of
      two messages the model reads must not be a race.
    timeout: Seconds that a timeout's message names; none when None, for what
      is left until the deadline would differ from run to run.
    limit: Characters of one result; the middle of a longer one is left out.
  """
  left = max(0.0, deadline - time.monotonic())
  told = deadline - min(_MARGIN_S, 0.1 * left)
  outcomes: list[ToolResult | Ticket] = []
  for call in calls:
    if call.name not in tools:
      reason = tool_lib.unknown_tool(call.name, tools)
      outcomes.append(tool_lib.error_result(reason))
      continue
    try:
      job = (tools[call.name], call.arguments, told, limit)
      outcomes.append(pool.submit(_invoke, *job, deadline=deadline))
    except RuntimeError as e:  # the pool is closed
      outcomes.append(tool_lib.error_result(str(e), infrastructure=True))
  pool.wait_all([o for o in outcomes if isinstance(o, Ticket)])
  return tuple(
      _collect(outcome, call.call_id, timeout, limit)
      for outcome, call in zip(outcomes, calls, strict=True)
  )


def _invoke(
    tool: tool_lib.Tool,
    arguments: Mapping[str, Any],
    deadline: float,
    limit: int,
) -> ToolResult:
  """Validates, runs and clips one call on a worker thread."""
  problem = tool_lib.validate_arguments(tool.spec, arguments)
  if problem is not None:
    return tool_lib.error_result(problem)
  result = tool(arguments, deadline=deadline)
  if not isinstance(result, ToolResult) or not isinstance(result.text, str):
    raise TypeError(
        f'tool {tool.spec["name"]} returned {type(result).__name__}, '
        'not a ToolResult with text'
    )
  # Clipped here, so that no more than the limit outlives the tool's thread.
  return ToolResult(
      '',
      clip(result.text, limit),
      bool(result.ok),
      infrastructure=bool(result.infrastructure),
  )


def _collect(
    slot: ToolResult | Ticket, call_id: str, timeout: float | None, limit: int
) -> ToolResult:
  """The result of one call, whatever became of it."""
  seconds, infrastructure = 0.0, False
  if isinstance(slot, ToolResult):
    text, ok, infrastructure = slot.text, slot.ok, slot.infrastructure
  elif slot.expired:
    within = '' if timeout is None else f' after {timeout:.4g} s'
    text, ok = f'{tool_lib.ERROR}timed out{within}', False
    # A tool that hangs is the call's own affair; a queue is not.
    infrastructure = not slot.started
  elif slot.error is not None:
    text, ok = tool_lib.ERROR + last_line(slot.error), False
  else:
    result = slot.result
    text, ok, infrastructure = result.text, result.ok, result.infrastructure
  if not isinstance(slot, ToolResult):
    seconds = slot.seconds
  return ToolResult(call_id, clip(text, limit), ok, seconds, infrastructure)


def last_line(error: BaseException) -> str:
  """Last line of an exception as the interpreter would print it."""
  lines = ''.join(traceback.format_exception_only(error)).strip().splitlines()
  return lines[-1] if lines else type(error).__name__


def clip(text: str, limit: int) -> str:
  """At most `limit` characters of valid Unicode, the middle left out.

  Head and tail stay: a result's end (the last line of an error, the final
  number) matters as much as its beginning.  Only what is kept is copied.
  """
  if len(text) > limit:
    room = limit - len(_MARK.format(len(text)))
    if room < 2:
      text = text[:limit]
    else:
      tail = room // 2
      mark = _MARK.format(len(text) - room)
      text = text[: room - tail] + mark + text[len(text) - tail :]
  # A lone surrogate is a str that no tokenizer can encode.
  return text.encode('utf-8', 'replace').decode('utf-8')
